"""Dispatch: sort (token, choice) pairs by expert and pad each expert's run to whole blocks.

Needs PyTorch; Triton when it runs. Lessons 03 and 04 use it.

The router leaves ``expert_ids [T, k]``: pair ``p = t * k + j`` is choice ``j`` of token ``t``. A
grouped GEMM wants the opposite view: for each block of rows one expert, whose weights it loads
once. For ids ``[[2, 0], [2, 1], [0, 2]]``, three experts and blocks of two::

    sorted_token_ids         1 4 | 3 6 | 0 2 | 5 6      6 = number of pairs: padding
    block_expert_ids         0     1     2     2
    num_tokens_post_padded   8

Names and meaning are those of vLLM's ``moe_align_block_size``, whose ``expert_ids`` are called
``block_expert_ids`` here because the router's have that name. Order within an expert is the order
of the pairs, so results do not change from run to run. Every element of the arrays is written:
padding up to their end, -1 for the blocks that are not needed.

Expert parallel: a rank names the experts it holds, as a range or as a map; pairs of other experts,
and ids that no expert has, are left out.

How the kernels spend their time
--------------------------------
The data are tiny, 64 kB of ids for 1024 tokens; what costs is the number of steps that wait for one
another. An id and its pair's index fit one integer, so one sort of integers gives both the order by
expert and the stable order within each; two scans over the sorted keys give each pair's rank in its
expert and the number of the block. No table over the 896 experts is needed, however few pairs there
are.

*Up to* ``single`` *pairs* one program does all of that: one launch, no counters to clear before it.

*More pairs* are cut into slices. A first launch sorts each slice for itself and counts; a second
adds up the counts of the slices before its own, which gives each pair its place without a second
sort. Every program adds them up for itself: a third launch would cost more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from k3_kernels import tuned
from k3_kernels._compat import (
    check_integers,
    check_ndim,
    check_runs_here,
    load_kernels,
    next_power_of_2,
    on_device,
)
from k3_kernels._numbers import check_experts_here, check_int

__all__ = ["Dispatch", "DispatchConfig", "choose_config", "dispatch", "max_padded_pairs"]

#: More pairs need more than 32 bits in the addresses of their rows' indices.
_MAX_PAIRS = 2**24
_MAX_BLOCK = 256


class Dispatch(NamedTuple):
    """Pairs in the order of a grouped GEMM; all tensors int32.

    ``sorted_token_ids [max_padded]`` holds pairs, and the number of pairs as padding;
    ``block_expert_ids [max_blocks]`` the local expert of each block, -1 behind the last;
    ``num_tokens_post_padded [1]`` the elements in use; ``expert_counts [num_experts]`` the pairs of
    each local expert, or None.
    """

    sorted_token_ids: torch.Tensor
    block_expert_ids: torch.Tensor
    num_tokens_post_padded: torch.Tensor
    expert_counts: torch.Tensor | None


@dataclass(frozen=True)
class DispatchConfig:
    """Launch constants: up to ``single`` pairs one program, else slices of ``slice_pairs``."""

    num_warps: int
    single: int = 256
    slice_pairs: int = 128
    place_warps: int = 8
    rows: int = 32
    pdl: bool = False


def choose_config(num_pairs: int) -> DispatchConfig:
    """Choose constants by rule, for a device that has not been measured.

    Examples
    --------
    >>> choose_config(16).num_warps, choose_config(131072).slice_pairs
    (1, 1024)
    """
    if num_pairs <= 256:
        return DispatchConfig(num_warps=max(1, next_power_of_2(num_pairs) // 64))
    slice_pairs = min(1024, max(128, next_power_of_2(num_pairs) // 32))
    return DispatchConfig(num_warps=slice_pairs // 128, slice_pairs=slice_pairs)


def max_padded_pairs(num_pairs: int, num_experts: int, block_size: int) -> int:
    """Return the length of ``sorted_token_ids``: the most that any routing can need.

    Examples
    --------
    >>> max_padded_pairs(16, 896, 8), max_padded_pairs(16384, 896, 64)
    (128, 72832)
    """
    padding = min(num_pairs, num_experts) * (block_size - 1)
    return (num_pairs + padding) // block_size * block_size


def dispatch(
    expert_ids: torch.Tensor,
    num_experts: int,
    block_size: int,
    *,
    first_expert: int = 0,
    expert_map: torch.Tensor | None = None,
    counts: bool = False,
    config: DispatchConfig | None = None,
) -> Dispatch:
    """Sort pairs by expert, each expert's run padded to a multiple of ``block_size``.

    Parameters
    ----------
    expert_ids
        ``[T, k]`` int32 or int64, contiguous: the router's choice, global ids.
    num_experts
        Experts on this rank.
    block_size
        Rows of a block, a power of two up to 256.
    first_expert
        The rank holds ``first_expert .. first_expert + num_experts - 1``, numbers of int32.
    expert_map
        Or: int32 ``[E]``, the local index of every global id, -1 if it is on another rank.
    counts
        Whether to return ``expert_counts`` too.
    config
        Constants of the launch; None takes measured ones, or :func:`choose_config`'s.

    Returns
    -------
    Dispatch
        Of length :func:`max_padded_pairs` and that over ``block_size``, without waiting for the
        device.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; the message names it.
    ImportError
        If Triton is missing.
    RuntimeError
        If the tensors are on the CPU and ``TRITON_INTERPRET=1`` was not set in time.

    Examples
    --------
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> ids = torch.tensor([[2, 0], [2, 1], [0, 2]], dtype=torch.int32, device=device)
    >>> done = dispatch(ids, num_experts=3, block_size=2)
    >>> used = int(done.num_tokens_post_padded)
    >>> done.sorted_token_ids[:used].tolist(), done.block_expert_ids.tolist()
    ([1, 4, 3, 6, 0, 2, 5, 6], [0, 1, 2, 2])
    """
    _check(expert_ids, num_experts, block_size, first_expert, expert_map)
    num_pairs, device = expert_ids.numel(), expert_ids.device
    max_padded = max_padded_pairs(num_pairs, num_experts, block_size)
    max_blocks = max_padded // block_size

    done = Dispatch(
        _integers(max_padded, device),
        _integers(max_blocks, device),
        _integers(1, device),
        _integers(num_experts, device) if counts else None,
    )
    if num_pairs == 0:
        done.num_tokens_post_padded.zero_()
        if done.expert_counts is not None:
            done.expert_counts.zero_()
        return done

    kernels = load_kernels("dispatch")
    check_runs_here("dispatch", kernels.dispatch_kernel, expert_ids, expert_map)
    if config is None:
        measured = tuned.lookup("dispatch", "pairs", num_pairs, device)
        config = DispatchConfig(**measured) if measured else choose_config(num_pairs)
    # A kernel argument must be a tensor: what the constants switch off is given the ids instead.
    table = expert_ids if expert_map is None else expert_map
    map_size = 0 if expert_map is None else expert_map.numel()
    where = (first_expert, num_experts, map_size)
    count_out = done.num_tokens_post_padded if done.expert_counts is None else done.expert_counts
    options = {"launch_pdl": True} if config.pdl else {}
    has_map = expert_map is not None
    if num_pairs <= config.single:
        log_pairs = max(5, (num_pairs - 1).bit_length())
        with on_device(expert_ids):
            kernels.dispatch_kernel[(1,)](
                *done[:3], count_out, expert_ids, table, num_pairs, max_padded, max_blocks, *where,
                LOG_P=log_pairs, BLOCK_SIZE=block_size, HAS_MAP=has_map, COUNTS=counts,
                PDL=config.pdl, num_warps=config.num_warps, **options,
            )  # fmt: skip
        return done
    slices = -(-num_pairs // config.slice_pairs)
    log_slice = config.slice_pairs.bit_length() - 1
    log_experts = max(5, (num_experts - 1).bit_length())
    ranks = _integers(num_pairs, device)
    slice_counts = _integers(slices * num_experts, device)
    rows = max(1, min(config.rows, next_power_of_2(slices), 2**15 >> log_experts))
    with on_device(expert_ids):
        kernels.count_kernel[(slices,)](
            done.sorted_token_ids, done.block_expert_ids, ranks, slice_counts, expert_ids, table,
            num_pairs, max_padded, max_blocks, *where,
            LOG_P=log_slice, HAS_MAP=has_map, PDL=config.pdl, num_warps=config.num_warps, **options,
        )  # fmt: skip
        kernels.place_kernel[(slices,)](
            *done[:3], count_out, ranks, slice_counts, expert_ids, table, num_pairs, *where,
            LOG_P=log_slice, LOG_E=log_experts, ROWS=rows, BLOCK_SIZE=block_size, HAS_MAP=has_map,
            COUNTS=counts, PDL=config.pdl, num_warps=config.place_warps, **options,
        )  # fmt: skip
    return done


def _integers(length: int, device: torch.device) -> torch.Tensor:
    return torch.empty(length, dtype=torch.int32, device=device)


def _check(
    expert_ids: torch.Tensor,
    num_experts: int,
    block_size: int,
    first_expert: int,
    expert_map: torch.Tensor | None,
) -> None:
    where = "k3_kernels.dispatch"
    check_ndim("dispatch", "expert_ids", expert_ids, "[T, k]")
    check_integers("dispatch", "expert_ids", expert_ids, tuple(expert_ids.shape), like=expert_ids)
    if expert_ids.numel() > _MAX_PAIRS:
        raise ValueError(f"{where}: {expert_ids.numel()} pairs, at most {_MAX_PAIRS}: split them")
    check_experts_here("dispatch", first_expert, num_experts)
    check_int("dispatch", "block_size", block_size, at_least=1)
    if block_size > _MAX_BLOCK or block_size & (block_size - 1):
        raise ValueError(
            f"{where}: block_size must be a power of two up to {_MAX_BLOCK}, got {block_size}"
        )
    if num_experts > 2**14:
        raise ValueError(f"{where}: num_experts must be at most {2**14}, got {num_experts}")
    if expert_map is not None:
        check_ndim("dispatch", "expert_map", expert_map, "[E] of int32")
        check_integers(
            "dispatch", "expert_map", expert_map, tuple(expert_map.shape), like=expert_ids
        )
        if first_expert:
            raise ValueError(
                f"{where}: first_expert={first_expert} and expert_map both say which experts are "
                "local: pass one of them"
            )
