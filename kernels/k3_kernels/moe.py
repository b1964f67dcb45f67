"""The routed experts of one layer: one call from tokens, expert ids and weights to their sum.

Needs PyTorch; Triton when it runs. Lesson 04 uses it.

For token ``t`` with chosen experts ``e_1 .. e_k`` and weights ``w_1 .. w_k``::

    out_t = sum over j of w_j * down[e_j] @ SiTU(gate[e_j] @ x_t, up[e_j] @ x_t)

Steps, one launch each unless said otherwise:

1. :func:`k3_kernels.dispatch.dispatch` sorts the ``P = T * k`` pairs by expert. With few pairs
   (``direct``) the programs of the GEMMs find their pairs themselves and this launch is not needed.
2. :func:`k3_kernels.moe_gemm.gate_up`: both products and SiTU. The activations lie in the order of
   the slots that dispatch made, so that down reads them row after row.
3. :func:`k3_kernels.moe_gemm.down`: the product, times the pair's weight, written in the order of
   the pairs.
4. :func:`k3_kernels.finalize.finalize`: the sum over a token's pairs, in the order of its choices,
   and K3's RMSNorm if asked for.

The sum stays a launch of its own. Folded into down it would need atomic additions, whose order and
so whose rounding changes from run to run; in float32 they write twice the bytes of bfloat16 rows,
and at T = 8192 on a tensor-parallel rank the rows of 131072 pairs are 0.94 GB either way. Deferred,
it also takes the norm along, which has to see the complete sum.
"""

from __future__ import annotations

import torch

from k3_kernels._compat import check_ndim, check_tensor
from k3_kernels._numbers import check_experts_here, check_number
from k3_kernels.dispatch import dispatch
from k3_kernels.finalize import finalize
from k3_kernels.moe_config import MoEConfig, choose_config
from k3_kernels.moe_gemm import Groups, down, gate_up
from k3_kernels.moe_tiles import list_tiles, max_tiles
from k3_kernels.moe_weights import BF16Experts, ExpertWeights, MXFP4Experts

__all__ = ["make_groups", "moe_experts"]


def moe_experts(
    x: torch.Tensor,
    experts: ExpertWeights,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    first_expert: int = 0,
    beta: float = 4.0,
    linear_beta: float = 25.0,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-5,
    out: torch.Tensor | None = None,
    config: MoEConfig | None = None,
) -> torch.Tensor:
    """Run every token through its experts and add up the weighted results.

    Parameters
    ----------
    x
        Tokens ``[T, H]``: K3's latent, H = 3584. bfloat16 on a GPU; float32 and float16 are
        multiplied as float32, which is slow there and what the interpreter wants. The last
        dimension must be contiguous.
    experts
        Weights, from :func:`k3_kernels.pack_mxfp4` or as :class:`k3_kernels.BF16Experts`, whose
        type must be that of ``x``.
    expert_ids
        int32 or int64 ``[T, k]``, contiguous: the router's choice.
    weights
        float32 ``[T, k]``, contiguous.
    first_expert
        Expert parallelism: ``experts`` are the experts ``first_expert`` and following of the model.
        Pairs of others contribute nothing; the ranks' results are to be added.
    beta, linear_beta
        Of SiTU, above 0.
    norm_weight, eps
        ``[H]``: apply the RMSNorm of the layer's latent output. Only where one rank holds the
        complete sum.
    out
        ``[T, H]`` in the type of ``x``, allocated if None. Must not overlap an input.
    config
        Launch constants; None takes those measured on this device, or a rule
        (:func:`k3_kernels.moe_config.choose_config`).

    Returns
    -------
    Tensor
        ``[T, H]``. The same bits every time for the same arguments and constants.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; the message names it. The interpreter refuses bfloat16.
    ImportError
        If Triton is missing.
    RuntimeError
        If the tensors are on the CPU and ``TRITON_INTERPRET=1`` was not set in time.

    Examples
    --------
    One expert whose weights are all 1: gate and up are the sum of x, here 2.

    >>> import math
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> ones = torch.ones(1, 8, 2, device=device), torch.ones(1, 2, 4, device=device)
    >>> ids = torch.zeros(1, 1, dtype=torch.int32, device=device)
    >>> weights = torch.ones(1, 1, device=device)
    >>> out = moe_experts(torch.ones(1, 2, device=device), BF16Experts(*ones), ids, weights)
    >>> situ = 4 * math.tanh(2 / 4) / (1 + math.exp(-2)) * 25 * math.tanh(2 / 25)
    >>> abs(out[0, 0].item() - 4 * situ) < 1e-3
    True
    """
    _check(x, experts, expert_ids, weights, first_expert)
    for name, value in (("beta", beta), ("linear_beta", linear_beta)):
        check_number("moe_experts", name, value, above=0.0)
    check_number("moe_experts", "eps", eps, at_least=0.0)
    num_tokens, top_k = expert_ids.shape
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    check_tensor("moe_experts", "out", out, tuple(x.shape), like=x, output=True)
    if norm_weight is not None:
        width = (experts.hidden_size,)
        check_tensor("moe_experts", "norm_weight", norm_weight, width, like=x, same_dtype=False)
    if num_tokens == 0:
        return out
    if config is None:
        config = choose_config(experts, num_tokens, top_k)
    groups = make_groups(experts, expert_ids, config, first_expert)
    act = gate_up(x, experts, groups, top_k, config, beta=beta, linear_beta=linear_beta)
    pairs = down(act, experts, groups, weights, config)
    norm = {"norm_weight": norm_weight, "eps": eps, "out": out}
    if groups.direct:  # down has written every row
        return finalize(pairs, None, top_k * (len(pairs) // groups.num_pairs), **norm)
    return finalize(
        pairs, None, top_k, expert_ids=expert_ids, first_expert=first_expert,
        num_experts=experts.num_experts, **norm,
    )  # fmt: skip


def make_groups(
    experts: ExpertWeights, expert_ids: torch.Tensor, config: MoEConfig, first_expert: int = 0
) -> Groups:
    """Find out which rows go to which expert, by :func:`k3_kernels.dispatch` or not at all."""
    pairs = expert_ids.numel()
    if config.direct and not config.prefill and isinstance(experts, MXFP4Experts):
        return Groups(expert_ids, expert_ids, pairs, pairs, pairs, True, first_expert)
    made = dispatch(expert_ids, experts.num_experts, config.granule, first_expert=first_expert)
    slots = made.sorted_token_ids
    if config.listed and (config.prefill or not isinstance(experts, MXFP4Experts)):
        tile = (config.block_m + config.extra_m) // config.granule
        most = max_tiles(pairs, experts.num_experts, config.granule, tile)
        tiles = list_tiles(made.block_expert_ids, most, tile)
        return Groups(slots, tiles, pairs, most, len(slots), False)
    return Groups(
        slots, made.block_expert_ids, pairs, len(made.block_expert_ids), len(slots), False
    )


def _check(
    x: torch.Tensor,
    experts: ExpertWeights,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    first_expert: int,
) -> None:
    where = "k3_kernels.moe_experts"
    if not isinstance(experts, (MXFP4Experts, BF16Experts)):
        raise TypeError(
            f"{where}: experts must be MXFP4Experts (from pack_mxfp4) or BF16Experts, got "
            f"{type(experts).__name__}"
        )
    check_ndim("moe_experts", "expert_ids", expert_ids, "[T, k]")
    if expert_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{where}: expert_ids is {expert_ids.dtype}, expected int32 or int64")
    if expert_ids.shape[1] < 1:
        raise ValueError(f"{where}: expert_ids is {list(expert_ids.shape)}: no expert for a token")
    num_tokens = expert_ids.shape[0]
    check_tensor("moe_experts", "x", x, (num_tokens, experts.hidden_size), like=x)
    check_tensor(
        "moe_experts", "weights", weights, tuple(expert_ids.shape), like=x, same_dtype=False
    )
    if experts.num_experts < 1:
        raise ValueError(f"{where}: experts holds no expert, expected at least 1")
    check_experts_here("moe_experts", first_expert, experts.num_experts)
    if weights.dtype != torch.float32:
        raise TypeError(f"{where}: weights is {weights.dtype}, expected float32: call .float()")
    for name, tensor in (("expert_ids", expert_ids), ("weights", weights)):
        if not tensor.is_contiguous():
            raise ValueError(f"{where}: {name} must be contiguous, call .contiguous()")
    for name, device in (("expert_ids", expert_ids.device), ("experts", experts.device)):
        if device != x.device:
            raise ValueError(f"{where}: {name} is on {device}, expected {x.device}")
    if isinstance(experts, BF16Experts) and experts.gate_up.dtype != x.dtype:
        raise TypeError(
            f"{where}: the experts' weights are {experts.gate_up.dtype}, expected {x.dtype} as x"
        )
