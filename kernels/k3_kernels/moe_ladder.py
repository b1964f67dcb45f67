"""The expert layer as a ladder: from a loop in PyTorch to the kernels, one idea a rung.

Needs PyTorch; Triton from the second rung on. Lesson 04 climbs it, and ``benchmarks.moe_ladder``
times it.

Every rung computes the same: the experts' weighted sum for each token and its RMSNorm. What changes
from one to the next is a single idea:

==================  ================================================================================
``loop``            for every expert that has tokens: dequantize, three products, add up
``grouped_bf16``    sort the pairs by expert, one launch for all experts; weights as bfloat16
``grouped_mxfp4``   the weights stay at 4.25 bits and are unpacked in registers
``fused_situ``      gate-up applies SiTU to its accumulators: one array less to write and read
``fused_norm``      the weighted sum over a token's experts and the RMSNorm are one launch
``rotated_bits``    a bit layout that takes 9 operations instead of 15 to unpack 8 weights
``tuned``           constants for the number of tokens: no dispatch for few pairs, split columns,
                    large tiles for many tokens (:func:`k3_kernels.moe_experts` as it is)
==================  ================================================================================
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from k3_kernels._compat import check_runs_here, load_kernels, next_power_of_2, on_device
from k3_kernels.finalize import finalize
from k3_kernels.moe import make_groups, moe_experts
from k3_kernels.moe_config import MoEConfig
from k3_kernels.moe_gemm import down, gate_up
from k3_kernels.moe_weights import BF16Experts, ExpertWeights, MXFP4Experts, pack_mxfp4

__all__ = ["RUNGS", "LadderWeights", "climb"]

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class LadderWeights:
    """Experts as in the checkpoint, and what the rungs make of them (each once, when needed).

    Arguments as of :func:`k3_kernels.pack_mxfp4`, and ``norm_weight [H]``.

    Examples
    --------
    >>> bytes_, scales = torch.zeros(2, 16, 16).byte(), torch.full((2, 16, 1), 127).byte()
    >>> down = torch.zeros(2, 32, 4).byte(), torch.full((2, 32, 1), 127).byte()
    >>> weights = LadderWeights(bytes_, scales, *down, torch.ones(32))
    >>> weights.plain(torch.float32).gate_up.shape
    torch.Size([2, 16, 32])
    """

    gate_up: torch.Tensor
    gate_up_scale: torch.Tensor
    down: torch.Tensor
    down_scale: torch.Tensor
    norm_weight: torch.Tensor

    def expert(self, index: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Dequantize one expert: ``[2 I, H]`` and ``[H, I]``."""
        return (
            _dequantize(self.gate_up[index], self.gate_up_scale[index], dtype),
            _dequantize(self.down[index], self.down_scale[index], dtype),
        )

    def plain(self, dtype: torch.dtype) -> BF16Experts:
        """Return all experts dequantized: 3.8 times the bytes in bfloat16."""
        return _plain(self, dtype)

    def packed(self, layout: str) -> MXFP4Experts:
        """Return all experts packed for the kernels."""
        return _packed(self, layout)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


@functools.lru_cache(maxsize=2)
def _plain(weights: LadderWeights, dtype: torch.dtype) -> BF16Experts:
    experts, rows, half = weights.gate_up.shape
    options = {"dtype": dtype, "device": weights.gate_up.device}
    gate_up_all = torch.empty(experts, rows, 2 * half, **options)
    down_all = torch.empty(experts, 2 * half, rows // 2, **options)
    for index in range(experts):  # one by one: a float copy of everything would be twice as large
        gate_up_all[index], down_all[index] = weights.expert(index, dtype)
    return BF16Experts(gate_up_all, down_all)


@functools.lru_cache(maxsize=4)
def _packed(weights: LadderWeights, layout: str) -> MXFP4Experts:
    tensors = (weights.gate_up, weights.gate_up_scale, weights.down, weights.down_scale)
    return pack_mxfp4(*tensors, layout=layout)  # type: ignore[arg-type]


def _dequantize(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    grid = torch.tensor([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], device=packed.device)
    values = grid[torch.stack([packed & 15, packed >> 4], -1).flatten(-2).int()]
    factor = torch.exp2(scale.float() - 127).repeat_interleave(32, -1)
    return (values * factor[..., : values.shape[-1]]).to(dtype)


@dataclass(frozen=True)
class _Call:
    x: torch.Tensor
    weights: LadderWeights
    expert_ids: torch.Tensor
    pair_weights: torch.Tensor
    beta: float
    linear_beta: float
    eps: float

    def norm(self, total: torch.Tensor) -> torch.Tensor:
        weight = self.weights.norm_weight.to(total.dtype)
        return torch.nn.functional.rms_norm(total, total.shape[-1:], weight, self.eps)


def _loop(call: _Call) -> torch.Tensor:
    x, ids = call.x, call.expert_ids
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in ids.unique().tolist():  # waits for the GPU: the host must know who has tokens
        tokens, choices = (ids == expert).nonzero(as_tuple=True)
        gate_up_matrix, down_matrix = call.weights.expert(expert, x.dtype)
        gate, up = (x[tokens] @ gate_up_matrix.T).float().chunk(2, -1)
        act = call.beta * torch.tanh(gate / call.beta) * torch.sigmoid(gate)
        act = act * call.linear_beta * torch.tanh(up / call.linear_beta)
        result = (act.to(x.dtype) @ down_matrix.T).float()
        total.index_add_(0, tokens, call.pair_weights[tokens, choices, None] * result)
    return call.norm(total.to(x.dtype))


def _grouped(
    call: _Call, experts: ExpertWeights, config: MoEConfig, *, fuse_situ: bool, fuse_norm: bool
) -> torch.Tensor:
    x, ids = call.x, call.expert_ids
    top_k, inner = ids.shape[1], experts.intermediate_size
    groups = make_groups(experts, ids, config)
    act = gate_up(x, experts, groups, top_k, config, beta=call.beta,
                  linear_beta=call.linear_beta, fused=fuse_situ)  # fmt: skip
    if not fuse_situ:
        kernels = load_kernels("moe_ladder")
        check_runs_here("moe_ladder", kernels.situ_kernel, x)
        both, act = act, act.new_empty(act.shape[0], inner)
        block = 512 if inner >= 512 else max(16, next_power_of_2(inner))
        with on_device(x):
            kernels.situ_kernel[(len(act), -(-inner // block))](
                act, both, I=inner, BETA=call.beta, LINEAR_BETA=call.linear_beta, BLOCK=block,
                COMPUTE=kernels.tl.float32,
            )  # fmt: skip
    pairs = down(act, experts, groups, call.pair_weights, config)
    if fuse_norm:
        weight = call.weights.norm_weight
        return finalize(pairs, None, top_k, norm_weight=weight, eps=call.eps)
    return call.norm(finalize(pairs, None, top_k))


def _simple(experts: ExpertWeights) -> MoEConfig:
    """Return one set of constants for every number of tokens."""
    if isinstance(experts, MXFP4Experts):
        return MoEConfig(block_m=8, gate_unroll=1, down_unroll=1)
    return MoEConfig(prefill=True, block_m=16)


def _grouped_bf16(call: _Call) -> torch.Tensor:
    experts = call.weights.plain(call.x.dtype)
    return _grouped(call, experts, _simple(experts), fuse_situ=False, fuse_norm=False)


def _mxfp4(layout: str, *, fuse_situ: bool, fuse_norm: bool) -> Callable[[_Call], torch.Tensor]:
    def run(call: _Call) -> torch.Tensor:
        experts = call.weights.packed(layout)
        return _grouped(call, experts, _simple(experts), fuse_situ=fuse_situ, fuse_norm=fuse_norm)

    return run


def _tuned(call: _Call) -> torch.Tensor:
    return moe_experts(
        call.x, call.weights.packed("rotated"), call.expert_ids, call.pair_weights, beta=call.beta,
        linear_beta=call.linear_beta, norm_weight=call.weights.norm_weight, eps=call.eps,
    )  # fmt: skip


_RUNGS: dict[str, Callable[[_Call], torch.Tensor]] = {
    "loop": _loop,
    "grouped_bf16": _grouped_bf16,
    "grouped_mxfp4": _mxfp4("nibbles", fuse_situ=False, fuse_norm=False),
    "fused_situ": _mxfp4("nibbles", fuse_situ=True, fuse_norm=False),
    "fused_norm": _mxfp4("nibbles", fuse_situ=True, fuse_norm=True),
    "rotated_bits": _mxfp4("rotated", fuse_situ=True, fuse_norm=True),
    "tuned": _tuned,
}
#: Names of the rungs, from the ground up.
RUNGS: tuple[str, ...] = tuple(_RUNGS)


def climb(
    rung: str,
    x: torch.Tensor,
    weights: LadderWeights,
    expert_ids: torch.Tensor,
    pair_weights: torch.Tensor,
    *,
    beta: float = 4.0,
    linear_beta: float = 25.0,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Run the expert layer as it is on one rung.

    Parameters
    ----------
    rung
        One of :data:`RUNGS`.
    x
        ``[T, H]``; bfloat16 on a GPU, float32 in the interpreter.
    weights
        Experts and norm weight.
    expert_ids, pair_weights
        ``[T, k]``, int32 and float32; every id belongs to an expert that is here.
    beta, linear_beta, eps
        Of SiTU and of the norm.

    Returns
    -------
    Tensor
        ``[T, H]``.

    Raises
    ------
    ValueError
        If there is no such rung.

    Examples
    --------
    >>> empty = torch.zeros(1, 16, 16).byte(), torch.full((1, 16, 1), 127).byte()
    >>> down = torch.zeros(1, 32, 4).byte(), torch.full((1, 32, 1), 127).byte()
    >>> weights = LadderWeights(*empty, *down, torch.ones(32))
    >>> ids, share = torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)
    >>> climb("loop", torch.ones(3, 32), weights, ids, share).abs().max().item()
    0.0
    """
    if rung not in _RUNGS:
        raise ValueError(f"climb: there is no rung {rung!r}, expected one of {', '.join(RUNGS)}")
    return _RUNGS[rung](_Call(x, weights, expert_ids, pair_weights, beta, linear_beta, eps))
