"""Finalize: the weighted sum over a token's experts, and the RMSNorm of the complete sum.

Needs PyTorch; Triton when it runs. Lesson 04 uses it.

A grouped GEMM leaves one row for each (token, choice) pair, ``pairs [T * k, D]`` in the order of
the pairs. For token ``t``::

    sum_t = sum over j of weights[t, j] * pairs[t * k + j]        float32, j ascending
    out_t = norm_weight * sum_t / sqrt(mean(sum_t^2) + eps)       sum_t first rounded to out's type

The second line is K3's ``routed_expert_norm``. It sees the complete sum and may therefore be fused
only where one rank holds all of it: with experts spread over ranks the sums are added first, and
``norm_weight`` stays None. The shared experts are added behind the projection that follows, not
here.

How the kernel spends its time
------------------------------
It reads ``k`` rows and writes one: 122 kB a token at k = 16, D = 3584 in bfloat16, 0.23 ms for 8192
tokens at 4.3 TB/s. Doing it inside the down projection instead would save these bytes and cost
atomic additions, whose order changes from run to run. A program owns a token (with the norm) or a
piece of its row (without), keeps its part of the sum in registers and reads every row once; the
loads do not depend on one another, so all of them are in flight together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from k3_kernels import tuned
from k3_kernels._compat import (
    check_integers,
    check_ndim,
    check_runs_here,
    check_tensor,
    load_kernels,
    next_power_of_2,
    on_device,
)
from k3_kernels._numbers import check_experts_here, check_number

__all__ = ["MAX_TOP_K", "MAX_WIDTH", "FinalizeConfig", "choose_config", "finalize"]

#: Beyond this a row no longer fits the registers of one program.
MAX_WIDTH = 16384
#: The loop over choices is unrolled.
MAX_TOP_K = 64


@dataclass(frozen=True)
class FinalizeConfig:
    """Launch constants: the row is read in pieces of ``block_d``; without norm ``pieces`` each."""

    block_d: int
    num_warps: int
    pieces: int = 1
    pdl: bool = False


def choose_config(num_tokens: int, width: int, has_norm: bool) -> FinalizeConfig:
    """Choose constants by rule, for a device that has not been measured.

    Examples
    --------
    >>> choose_config(8192, 3584, has_norm=True)
    FinalizeConfig(block_d=512, num_warps=8, pieces=7, pdl=False)
    """
    if has_norm:
        block_d = min(512, max(16, next_power_of_2(width)))
        warps = min(16, next_power_of_2(-(-width // 512)))
        return FinalizeConfig(block_d, warps, -(-width // block_d))
    block_d = min(512 if num_tokens > 132 else 128, max(16, next_power_of_2(width)))
    return FinalizeConfig(block_d, max(1, block_d // 128))


def finalize(
    pairs: torch.Tensor,
    weights: torch.Tensor | None,
    top_k: int | None = None,
    *,
    expert_ids: torch.Tensor | None = None,
    first_expert: int = 0,
    num_experts: int | None = None,
    expert_map: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-5,
    out: torch.Tensor | None = None,
    config: FinalizeConfig | None = None,
) -> torch.Tensor:
    """Sum the experts' outputs of each token, weighted, and normalise the sum if asked to.

    Parameters
    ----------
    pairs
        Outputs of the experts ``[T * k, D]``, row ``t * k + j`` for choice ``j`` of token ``t``;
        float32, float16 or bfloat16. Rows may have any stride.
    weights
        float32 ``[T, k]``, contiguous; None if the rows are weighted already, then ``top_k`` says
        how many belong to a token.
    top_k
        ``k``. May be left out when ``weights`` is given.
    expert_ids
        ``[T, k]`` int32 or int64, for expert parallelism: rows of experts on other ranks are left
        out, whatever they hold: they count as 0. A weight that is NaN or infinite does spoil its
        token, whatever rank its expert is on. Goes with ``num_experts`` and ``first_expert``, or
        ``expert_map``, as in :func:`k3_kernels.dispatch.dispatch`.
    norm_weight
        ``[D]``, any float type: RMSNorm of the sum; None gives the sum itself.
    eps
        Added to the mean square.
    out
        Buffer ``[T, D]`` of any float type, allocated in the type of ``pairs`` if None. Must not
        overlap an input.
    config
        Constants of the launch; None takes measured ones, or :func:`choose_config`'s.

    Returns
    -------
    torch.Tensor
        ``[T, D]``.

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
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> pairs = torch.tensor([[1.0, 2.0], [3.0, 5.0]], device=device)
    >>> finalize(pairs, torch.tensor([[0.25, 0.75]], device=device)).tolist()
    [[2.5, 4.25]]
    """
    where = "k3_kernels.finalize"
    check_number("finalize", "eps", eps, at_least=0.0)
    check_ndim("finalize", "pairs", pairs, "[T * k, D]")
    num_pairs, width = pairs.shape
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"{where}: rows of {width} elements are outside 1..{MAX_WIDTH}")
    top_k = _top_k(pairs, weights, top_k)
    num_tokens = num_pairs // top_k
    check = partial(check_tensor, "finalize", like=pairs)
    check("pairs", pairs, (num_pairs, width))
    if weights is not None:
        check("weights", weights, (num_tokens, top_k), same_dtype=False)
        if weights.dtype != torch.float32 or not weights.is_contiguous():
            raise ValueError(
                f"{where}: weights must be contiguous float32, got {weights.dtype} with strides "
                f"{list(weights.stride())}"
            )
    if norm_weight is not None:
        check("norm_weight", norm_weight, (width,), same_dtype=False)
    _check_experts(pairs, (num_tokens, top_k), expert_ids, first_expert, num_experts, expert_map)
    if out is None:
        out = torch.empty((num_tokens, width), dtype=pairs.dtype, device=pairs.device)
    check("out", out, (num_tokens, width), same_dtype=False, output=True)
    if num_tokens == 0:
        return out

    kernels = load_kernels("finalize")
    check_runs_here("finalize", kernels.finalize_kernel, pairs, weights, norm_weight, out)
    has_norm = norm_weight is not None
    if config is None:
        shape = f"k={top_k},D={width},norm={int(has_norm)}"
        measured = tuned.lookup("finalize", shape, num_tokens, pairs.device)
        if measured:
            config = FinalizeConfig(**measured)
        else:
            config = choose_config(num_tokens, width, has_norm)
    pieces = -(-width // config.block_d) if has_norm else config.pieces
    with on_device(pairs):
        # A kernel argument must be a tensor: what the constants switch off is given the pairs.
        kernels.finalize_kernel[(num_tokens, -(-width // (pieces * config.block_d)))](
            out, pairs,
            pairs if weights is None else weights,
            pairs if expert_ids is None else expert_ids,
            pairs if expert_map is None else expert_map,
            pairs if norm_weight is None else norm_weight,
            out.stride(0), pairs.stride(0), first_expert, num_experts or 0,
            0 if expert_map is None else expert_map.numel(), eps,
            WIDTH=width, TOP_K=top_k, HAS_WEIGHTS=weights is not None,
            HAS_IDS=expert_ids is not None, HAS_MAP=expert_map is not None, HAS_NORM=has_norm,
            BLOCK_D=config.block_d, PIECES=pieces, PDL=config.pdl, COMPUTE=kernels.tl.float32,
            num_warps=config.num_warps, **({"launch_pdl": True} if config.pdl else {}),
        )  # fmt: skip
    return out


def _top_k(pairs: torch.Tensor, weights: torch.Tensor | None, top_k: int | None) -> int:
    where = "k3_kernels.finalize"
    if weights is not None:
        check_ndim("finalize", "weights", weights, "[T, k] or None")
        if top_k not in (None, weights.shape[1]):
            raise ValueError(f"{where}: top_k is {top_k}, but weights has {weights.shape[1]} a row")
        top_k = weights.shape[1]
    if isinstance(top_k, bool) or not isinstance(top_k, int):
        raise TypeError(
            f"{where}: without weights top_k must be given as an int, got {type(top_k).__name__}"
        )
    if not 1 <= top_k <= MAX_TOP_K:
        raise ValueError(f"{where}: top_k must be from 1 to {MAX_TOP_K}, got {top_k}")
    if pairs.shape[0] % top_k:
        raise ValueError(f"{where}: {pairs.shape[0]} pairs are not a multiple of top_k={top_k}")
    return top_k


def _check_experts(
    pairs: torch.Tensor,
    shape: tuple[int, int],
    expert_ids: torch.Tensor | None,
    first_expert: int,
    num_experts: int | None,
    expert_map: torch.Tensor | None,
) -> None:
    where = "k3_kernels.finalize"
    if expert_ids is None:
        if first_expert or num_experts is not None or expert_map is not None:
            raise ValueError(
                f"{where}: first_expert, num_experts and expert_map say which rows to leave out, "
                "and need expert_ids"
            )
        return
    check_integers("finalize", "expert_ids", expert_ids, shape, like=pairs)
    if num_experts is None:
        raise ValueError(
            f"{where}: expert_ids needs num_experts, the experts on this rank, got None"
        )
    check_experts_here("finalize", first_expert, num_experts)
    if expert_map is not None:
        check_ndim("finalize", "expert_map", expert_map, "[E] of int32")
        check_integers("finalize", "expert_map", expert_map, tuple(expert_map.shape), like=pairs)
        if first_expert:
            raise ValueError(
                f"{where}: first_expert={first_expert} and expert_map both say which experts are "
                "local: pass one of them"
            )
