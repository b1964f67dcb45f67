"""The two grouped GEMMs of the routed experts: gate-up with SiTU, and down with the pair's weight.

Needs PyTorch; Triton when they run. :mod:`k3_kernels.moe` puts them together; lesson 04 climbs the
ladder that leads to them.

Two regimes. An expert call reads the weights of every expert that any token chose. On a rank of
eight with 896 experts of width 384 that is 35 MB for one token, 1.34 GB for 64, 2 GB from 1000 on
(MXFP4); the products cost 43 us at T = 256 and 1370 us at T = 8192 at 790 TFLOP/s, the bytes 454
and 484 us at 4.3 TB/s. So up to about 2800 tokens memory is the floor, and beyond, arithmetic.

Few tokens an expert (:mod:`k3_kernels.moe_gemm_kernel`)
--------------------------------------------------------
*The instructions are the budget.* To stream MXFP4 at 4.3 TB/s a multiprocessor unpacks 35 weights a
clock, and it issues 128 lane instructions: 3.6 a weight for everything. The gate-up loop of 64 + 64
rows and 256 columns has 652 instructions for 256 weights a lane, 2.55 a weight (Triton 3.6, sm_90;
3.2 with ``"nibbles"``), because

- weights are the left operand of the matrix instruction, 64 rows for four warps, and 8 tokens are
  its columns: the smallest shape there is, and words go from shared memory straight into the
  registers of that operand;
- a plane of a word is a pair of bfloat16 numbers after one rotation and one mask;
- the scale of a group multiplies the *accumulator*: 4 multiply-adds a lane for 32 x 64 weights;
- scale bytes are stored as exponent fields: one mask, one shift.

*Scales are asked for one step early, by hand.* Triton's pipeline runs copies ahead for the operands
of a dot. A scale meets the result, so its load stayed where it is used and every step waited for
memory; with the loads a step ahead the compiler also needs 80 instead of 120 registers, and five
programs share a multiprocessor instead of four.

*Launches.* With one token, 96 programs cannot fill 132 multiprocessors: ``gate_split`` gives each
four parts of the columns; the part that finishes last, told by a counter in memory, adds up. Down
with 384 columns is three steps, too short to hide their start: a program keeps its activations and
walks over ``down_row_blocks`` blocks of rows.

Many tokens an expert (:mod:`k3_kernels.moe_prefill_kernel`)
------------------------------------------------------------
*Unpack once, multiply 32 to 160 columns.* Scaling accumulators would cost as much as the products
(one multiply-add for 32), so here scales multiply the weights, two at a time, exactly. 128 columns
become one operand in registers and eight ``wgmma`` follow one another without a wait; the next
operand is unpacked while they run. 3.6 instructions a weight, for 16 weights a clock at 128 tokens.

*Tiles fit the load.* 8192 tokens x 16 choices are 146 pairs an expert: two tiles of 128 would be
43 % padding, three of 64 unpack three times. A program takes 128 + 32 with two products from one
unpacked operand, 91 % full. This took gate-up from 2078 to 1640 us and down from 1219 to 973 us.

Bfloat16 weights run through the same kernels without the unpacking; there vLLM's Triton kernel
already reaches 95 % of the bandwidth for T = 16 to 256, and so do these.

What limits the rest, side by side with the peers (``data/results/h200/kernels.json``): at 64 and
256 tokens 85 to 89 % of the bandwidth; at one token 22 us for 8 us of bytes, of which gate-up is
12, down 7, and the rest launches. At T = 8192 about half of 790 TFLOP/s: a multiprocessor reads
each token once for every 64 or 128 rows of weights, 5 TB/s from the L2 cache in all. So does the
tile of 64 for the 37 tokens an expert has at T = 2048, 27 of them copies to fill it; there Humming
is ahead on the expert-parallel shape (1003 against 1100 us). ``fit`` leaves the copies out and is
yet to be measured. With Triton 3.6 the widest gate-up tile spills one register (24 bytes, one load
a step), with 3.9 none.

What was tried and lost, on an H200, gate-up at T = 64 (223 us) unless said otherwise: four stages
(255 us), unrolling four times (268 us); 16 tokens a program (404 against 334 us at T = 256);
activations in one copy a step, cut in registers (fewer instructions, 2.48 a weight, but no faster,
and down of width 3072 142 -> 181 us); tiles of 32 + 16 at T = 2048 (766 against 654 us).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from k3_kernels._compat import check_runs_here, load_kernels, next_power_of_2, on_device
from k3_kernels.moe_config import MoEConfig
from k3_kernels.moe_weights import BF16Experts, ExpertWeights, MXFP4Experts

__all__ = ["Groups", "compute_type", "down", "gate_up"]


@dataclass(frozen=True)
class Groups:
    """Which rows go to which expert: the pairs themselves, or what dispatch made of them.

    Attributes
    ----------
    ids
        Direct: expert of every pair, int ``[P]``. Else pair of every slot.
    block_experts
        Expert of every block; not used if direct.
    num_pairs, num_blocks, num_rows
        P; programs along the rows; rows of the activations in between.
    direct
        No dispatch was made: ids are those of the router, and programs find their pairs.
    first_expert
        Id of the first expert that is here; only used if direct.
    """

    ids: torch.Tensor
    block_experts: torch.Tensor
    num_pairs: int
    num_blocks: int
    num_rows: int
    direct: bool
    first_expert: int = 0


_COUNTERS: dict[tuple[torch.device, int], torch.Tensor] = {}


def _counters(device: torch.device, count: int) -> torch.Tensor:
    """Return zeros that a split leaves as zeros.

    Calls on one stream follow one another and may share them. What a CUDA graph records may run
    beside any stream, so it gets zeros of its own, which every replay writes anew.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    found = _COUNTERS.get((device, stream))
    if found is None or found.numel() < count:
        found = torch.zeros(max(count, 4096), dtype=torch.int32, device=device)
        _COUNTERS[device, stream] = found
    return found


def compute_type(kernels: Any, x: torch.Tensor) -> Any:
    """Return what the matrix units multiply: bfloat16 as it is, everything else as float32."""
    return kernels.tl.bfloat16 if x.dtype == torch.bfloat16 else kernels.tl.float32


def _index_type(kernels: Any, rows: torch.Tensor) -> Any:
    """Return the type of an offset into ``rows``."""
    return kernels.tl.int32 if rows.shape[0] * rows.stride(0) < 2**31 else kernels.tl.int64


def gate_up(
    x: torch.Tensor,
    experts: ExpertWeights,
    groups: Groups,
    top_k: int,
    config: MoEConfig,
    *,
    beta: float = 4.0,
    linear_beta: float = 25.0,
    fused: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``SiTU(x @ gate.T, x @ up.T)`` for every row of the groups.

    Parameters
    ----------
    x
        ``[T, H]``.
    experts, groups, top_k, config
        Weights, who goes where, choices of a token, launch constants.
    beta, linear_beta
        Of SiTU.
    fused
        False leaves SiTU out, for the lesson's ladder: ``out`` is ``[groups.num_rows, 2 I]`` then.
    out
        ``[groups.num_rows, I]``; allocated if None. Rows of no expert here are not written.

    Returns
    -------
    Tensor
        ``[groups.num_rows, I]`` in the type of ``x``.
    """
    hidden, inner = experts.hidden_size, experts.intermediate_size
    if out is None:
        out = x.new_empty((groups.num_rows, inner if fused else 2 * inner))
    mxfp4 = isinstance(experts, MXFP4Experts)
    if config.prefill or not mxfp4:
        kernels = load_kernels("moe_prefill")
        kernel = kernels.gate_up_prefill_kernel
        check_runs_here("moe_experts", kernel, x)
        grid = groups.num_blocks * -(-inner // config.gate_block_n)
        with on_device(x):
            kernel[(grid,)](
                out, x, *_operands(experts, "gate_up"), groups.ids, groups.block_experts,
                x.stride(0), groups.num_pairs, groups.num_blocks, H=hidden, I=inner, TOP_K=top_k,
                BETA=beta, LINEAR_BETA=linear_beta, FUSED=fused, **_format(experts, "gate_up"),
                BLOCK_M=config.block_m, EXTRA_M=config.extra_m,
                BLOCK_N=config.gate_block_n, BLOCK_K=128 if mxfp4 else config.block_k,
                FIT=config.fit, INDEX=_index_type(kernels, x), COMPUTE=compute_type(kernels, x),
                num_warps=config.gate_warps, num_stages=config.gate_stages,
            **_registers(config.gate_registers),
            )  # fmt: skip
        return out
    kernels = load_kernels("moe_gemm")
    kernel = kernels.gate_up_kernel
    check_runs_here("moe_experts", kernel, x)
    programs = groups.num_blocks * -(-inner // 64)
    split = config.gate_split
    partial = counter = groups.ids  # stand-ins: not read without a split
    if split > 1:
        size = (programs * split, 2 * config.block_m * 64)
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        counter = _counters(x.device, programs)
    with on_device(x):
        kernel[(programs * split,)](
            out, x, *_operands(experts, "gate_up"), groups.ids, groups.block_experts, partial,
            counter, x.stride(0), groups.num_pairs, groups.first_expert, H=hidden, I=inner,
            TOP_K=top_k, NUM_EXPERTS=experts.num_experts, BETA=beta, LINEAR_BETA=linear_beta,
            FUSED=fused, ROTATED=experts.gate_up.layout == "rotated", WIDE=experts.gate_up.wide,
            MAX_PAIRS=_max_pairs(groups), BLOCK_M=config.block_m, SPLIT_K=split,
            UNROLL=config.gate_unroll, COMPUTE=compute_type(kernels, x),
            num_warps=config.gate_warps, num_stages=config.gate_stages,
            **_registers(config.gate_registers),
        )  # fmt: skip
    return out


def down(
    act: torch.Tensor,
    experts: ExpertWeights,
    groups: Groups,
    weights: torch.Tensor,
    config: MoEConfig,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``weight * (act @ down.T)`` for every pair.

    Parameters
    ----------
    act
        ``[groups.num_rows, I]`` from :func:`gate_up`.
    experts, groups, config
        As there.
    weights
        float32 ``[P]``.
    out
        ``[P * config.down_split, H]``; allocated if None.

    Returns
    -------
    Tensor
        ``[P * down_split, H]``: the summands of pair p in rows ``p * down_split ..``. Pairs of no
        expert here: zeros if the groups are direct, not written otherwise.
    """
    hidden, inner = experts.hidden_size, experts.intermediate_size
    mxfp4 = isinstance(experts, MXFP4Experts)
    split = 1 if config.prefill or not mxfp4 else config.down_split
    if out is None:
        out = act.new_empty((groups.num_pairs * split, hidden))
    if config.prefill or not mxfp4:
        kernels = load_kernels("moe_prefill")
        kernel = kernels.down_prefill_kernel
        check_runs_here("moe_experts", kernel, act)
        row_blocks = -(-hidden // config.down_block_n)
        chunks = -(-row_blocks // config.down_row_blocks)
        with on_device(act):
            kernel[(groups.num_blocks * chunks,)](
                out, act, *_operands(experts, "down"), weights, groups.ids, groups.block_experts,
                groups.num_pairs, groups.num_blocks, H=hidden, I=inner,
                **_format(experts, "down"), BLOCK_M=config.block_m, EXTRA_M=config.extra_m,
                BLOCK_N=config.down_block_n, BLOCK_K=128 if mxfp4 else config.block_k,
                ROW_BLOCKS=config.down_row_blocks, RESIDENT=config.down_resident,
                FIT=config.fit, INDEX=_index_type(kernels, act), COMPUTE=compute_type(kernels, act),
                num_warps=config.down_warps, num_stages=config.down_stages,
                **_registers(config.down_registers),
            )  # fmt: skip
        return out
    kernels = load_kernels("moe_gemm")
    kernel = kernels.down_kernel
    check_runs_here("moe_experts", kernel, act)
    row_blocks = -(-hidden // 64)
    chunks = -(-row_blocks // config.down_row_blocks)
    with on_device(act):
        kernel[(groups.num_blocks * chunks * split,)](
            out, act, *_operands(experts, "down"), weights, groups.ids, groups.block_experts,
            groups.num_pairs, groups.first_expert, H=hidden, I=inner,
            NUM_EXPERTS=experts.num_experts, ROTATED=experts.down.layout == "rotated",
            WIDE=experts.down.wide, MAX_PAIRS=_max_pairs(groups), BLOCK_M=config.block_m,
            SPLIT_K=split, UNROLL=config.down_unroll,
            ROW_BLOCKS=config.down_row_blocks, RESIDENT=config.down_resident,
            COMPUTE=compute_type(kernels, act), num_warps=config.down_warps,
            num_stages=config.down_stages, **_registers(config.down_registers),
        )  # fmt: skip
    return out


def _registers(most: int) -> dict[str, int]:
    return {"maxnreg": most} if most else {}


def _max_pairs(groups: Groups) -> int:
    return max(16, next_power_of_2(groups.num_pairs)) if groups.direct else 0


def _operands(experts: ExpertWeights, which: str) -> tuple[torch.Tensor, torch.Tensor]:
    weights = getattr(experts, which)
    if isinstance(experts, MXFP4Experts):
        return weights.words, weights.scales
    return weights, weights


def _format(experts: ExpertWeights, which: str) -> dict[str, bool]:
    if isinstance(experts, BF16Experts):
        return {"MXFP4": False, "ROTATED": False, "WIDE": False}
    packed = getattr(experts, which)
    return {"MXFP4": True, "ROTATED": packed.layout == "rotated", "WIDE": packed.wide}
