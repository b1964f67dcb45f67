"""Attention over a paged cache of latent rows, for one token a request or several.

Needs PyTorch; Triton when it runs. Lesson 10 runs it inside the engine.

What multi-head latent attention does once ``kv_b`` is absorbed into the queries, per head::

    score[l] = scale * (q_latent . row[l, :R]  +  q_pe . row[l, R:])
    out      = sum of softmax(score)[l] * row[l, :R]

One cached row of R + P = 512 + 64 values serves all heads, as key and, without its last P values,
as value. K3 rotates nothing: its P values are columns like the others. In plain PyTorch it is
:func:`kimik3_lab.reference.mla.absorbed` less the two products with ``kv_b``.

How the kernel spends its time
------------------------------
A row is 1152 bytes and costs ``2 * 1088`` operations for each query of each head. On an H200 at 4.3
TB/s a multiprocessor gets a row every 62 clocks, in which its tensor cores could multiply it with
117 queries. So:

*All queries of a request share a read of its rows.* 12 heads decode one token as 12 rows of a
matrix product, and verify 8 drafts as 108. The product's accumulator is what limits it: 64 rows
of 512 float32 take half of all registers of a multiprocessor. A program therefore has at most 64
(token, head) pairs; a request with more gets several programs side by side, and the second to
read a tile finds it in the L2 cache.

*A tile is read once and multiplied twice*: it lies in shared memory, as keys on its side.

*The context is split* (flash-decoding): with 12 heads a request would keep one multiprocessor busy
and leave 131 idle. Each program leaves its part's result and the logarithm of its sum of
exponentials, and a second launch merges them. How many parts there are follows from shapes alone,
lengths are read on the device: a CUDA graph recorded for a width of the block table serves every
length. Parts behind a short context are empty and cost nothing but their start.

*The next block number is asked for a step ahead*, so that its row need not wait for it.

What was measured on an H200, both launches, 8192 rows a request, 12 heads: 10.2 us for one request
(floor 2.2) and 48 us for 16 (floor 35.2, 73 %), with 32 rows at a time and two programs on a
multiprocessor; 49 us with 64 rows and one program. Nine tokens a request take 21.5 and 159 us
(floor 39.0). They are bound by the matrix units: 64 pairs are the rows of one warp group, so the
two groups that the accumulator needs each compute all scores; and beside queries (74 kB) and two
tiles of 64 rows there is no room for a third, so copies run beside a part of the arithmetic only.
Tiles of 32 rows leave room and take 181 us, because a step multiplies with fewer columns. Cached
rows as left operand (``rows_left``) suit 32 pairs, at few requests.

Memory: ``N * H * splits * (R + 1)`` float32 for the parts, none with one split.
"""

from __future__ import annotations

from typing import Any

import torch

from k3_kernels._compat import (
    check_ndim,
    check_runs_here,
    check_tensor,
    load_kernels,
    next_power_of_2,
    on_device,
)
from k3_kernels._numbers import check_int, check_number
from k3_kernels.mla_decode_config import (
    MAX_RANK,
    MAX_SPLITS,
    MLADecodeConfig,
    choose_config,
    num_splits,
)

__all__ = ["MAX_RANK", "MLADecodeConfig", "choose_config", "mla_decode", "num_splits"]

_LOG2_E = 1.4426950408889634


def mla_decode(
    q_latent: torch.Tensor,
    q_pe: torch.Tensor | None,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    splits: int | None = None,
    config: MLADecodeConfig | None = None,
) -> torch.Tensor:
    """Attend with T tokens of each of B requests to the rows of their blocks.

    Parameters
    ----------
    q_latent
        ``[N, H, R]``, N = B * T, tokens of a request next to each other: queries times the key half
        of ``kv_b``; float32, float16 or bfloat16, R at most 512. Strides are free but for the last:
        the transposed result of a batched product by head will do.
    q_pe
        ``[N, H, P]``: the queries of the last P columns, same type; None if P is 0.
    cache
        ``[blocks, page, R + P]``, same type; the rows of a block must be evenly spaced. The rows of
        the T new tokens must be in it already.
    block_table
        ``[B, W]`` int32: row l of request b is row ``l % page`` of block
        ``block_table[b, l // page]``. Entries behind the request's length are not read.
    lengths
        int32, either ``[B]``: rows of each request, with those of its T tokens, of which token t
        sees all but the last ``T - 1 - t``. Or ``[B, T]``: the rows that each token sees, for a
        rank that has only part of a context. A token that sees nothing gets 0; so do padded
        requests of length 0.
    scale
        Of the scores; K3's is ``192 ** -0.5``.
    out
        ``[N, H, R]`` for the result, allocated in the type of ``q_latent`` if None.
    lse
        ``[N, H]`` float32: filled with the natural logarithm of the sum of e^score, which merges
        results over several shards of a context; -inf where a token sees nothing.
    splits
        Parts of each context; None chooses by :func:`num_splits`.
    config
        Constants of the launch; None takes measured ones, or :func:`choose_config`'s.

    Returns
    -------
    torch.Tensor
        ``[N, H, R]``.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; the message names it. Block numbers and lengths are looked at
        on the CPU only.
    ImportError, RuntimeError
        If Triton is missing or cannot run here.

    Examples
    --------
    Two requests, of which the second has no row yet:

    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> q, cache = torch.zeros(2, 1, 4, device=device), torch.ones(2, 8, 4, device=device)
    >>> table = torch.tensor([[1], [0]], dtype=torch.int32, device=device)
    >>> lengths = torch.tensor([3, 0], dtype=torch.int32, device=device)
    >>> lse = torch.empty(2, 1, device=device)
    >>> mla_decode(q, None, cache, table, lengths, scale=1.0, lse=lse)[:, 0, 0].tolist()
    [1.0, 0.0]
    >>> lse.exp().flatten().round(decimals=4).tolist()
    [3.0, 0.0]
    """
    check_ndim("mla_decode", "q_latent", q_latent, "[N, H, R]")
    num_rows, heads, rank = q_latent.shape
    if not 1 <= rank <= MAX_RANK:
        raise ValueError(f"k3_kernels.mla_decode: rank {rank} is outside 1..{MAX_RANK}")
    check_tensor("mla_decode", "q_latent", q_latent, (num_rows, heads, rank), like=q_latent)
    width = 0
    if q_pe is not None:
        width = q_pe.shape[-1] if isinstance(q_pe, torch.Tensor) and q_pe.ndim else 0
        check_tensor("mla_decode", "q_pe", q_pe, (num_rows, heads, width), like=q_latent)
    page, blocks = _check_cache(cache, rank, width, q_latent)
    batch, tokens = _check_requests(block_table, lengths, num_rows, page, blocks, q_latent)
    shape = (num_rows, heads, rank)
    if out is None:
        out = torch.empty(shape, dtype=q_latent.dtype, device=q_latent.device)
    check_tensor("mla_decode", "out", out, shape, like=q_latent, output=True)
    if lse is not None:
        check_tensor("mla_decode", "lse", lse, shape[:2], like=q_latent, same_dtype=False,
                     output=True)  # fmt: skip
        if lse.dtype != torch.float32:
            raise TypeError(f"k3_kernels.mla_decode: lse is {lse.dtype}, expected torch.float32")
    check_number("mla_decode", "scale", scale)
    if splits is not None:
        check_int("mla_decode", "splits", splits, at_least=1, at_most=MAX_SPLITS)
    if not num_rows or not heads:
        return out

    kernels = load_kernels("mla_decode")
    tl = kernels.tl
    check_runs_here("mla_decode", kernels.mla_decode_kernel, q_latent)
    if config is None:
        rows, itemsize = tokens * heads, q_latent.element_size()
        config = choose_config(rows, batch, rank, q_latent.device, itemsize)
    row_blocks = -(-tokens * heads // config.block_m)
    max_length = block_table.shape[1] * page
    if splits is None:
        splits = num_splits(batch * row_blocks, max_length, config)
    target, target_lse = out, lse
    if splits > 1:
        target = out.new_empty((num_rows, heads, splits, rank), dtype=torch.float32)
        target_lse = out.new_empty((num_rows, heads, splits), dtype=torch.float32)
    # A kernel argument must be a tensor: what is switched off is given the queries instead.
    lse_or_q = q_latent if target_lse is None else target_lse
    pe_or_q = q_latent if q_pe is None else q_pe
    per_token = lengths.ndim == 2
    exact = q_latent.dtype == torch.float32 or q_latent.device.type == "cpu"
    dtypes = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    constants: dict[str, Any] = {"HEADS": heads, "RANK": rank, "PDL": config.pdl}
    options = {"launch_pdl": True} if config.pdl else {}
    with on_device(q_latent):
        kernels.mla_decode_kernel[(row_blocks, batch, splits)](
            target, lse_or_q, q_latent, pe_or_q, cache, block_table, lengths,
            target.stride(0), target.stride(1), target.stride(2) if splits > 1 else 0,
            lse_or_q.stride(0), lse_or_q.stride(1), 1,
            q_latent.stride(0), q_latent.stride(1), pe_or_q.stride(0), pe_or_q.stride(1),
            cache.stride(0), block_table.stride(0), lengths.stride(0),
            lengths.stride(1) if per_token else 0, tokens, splits, scale * _LOG2_E,
            **constants, WIDTH_PE=width, PAGE=page, ROW_STRIDE=cache.stride(1), SPLIT=splits > 1,
            CAUSAL=not per_token, HAS_LSE=target_lse is not None, BLOCK_M=config.block_m,
            BLOCK_N=config.block_n, COLUMNS=_padded(rank), COLUMNS_PE=_padded(width),
            STAGES=config.stages, AXIS=0 if config.rows_left else 1,
            COMPUTE=tl.float32 if exact else dtypes[q_latent.dtype],
            num_warps=config.num_warps, **options,
        )  # fmt: skip
        if splits > 1:
            columns = min(config.merge_columns, _padded(rank))
            lse_or_q = q_latent if lse is None else lse
            kernels.mla_merge_kernel[(num_rows * heads, -(-rank // columns))](
                out, lse_or_q, target, target_lse, out.stride(0), out.stride(1),
                lse_or_q.stride(0), lse_or_q.stride(1), splits, **constants,
                ROWS=next_power_of_2(splits), COLUMNS=columns, HAS_LSE=lse is not None,
                num_warps=4, **options,
            )  # fmt: skip
    return out


def _padded(width: int) -> int:
    """Return columns of a tile: a matrix product wants at least 16."""
    return max(16, next_power_of_2(max(1, width)))


def _check_cache(cache: torch.Tensor, rank: int, width: int, like: torch.Tensor) -> tuple[int, int]:
    """Return rows of a block and the number of blocks."""
    check_ndim("mla_decode", "cache", cache, "[blocks, page, R + P]")
    blocks, page, _ = cache.shape
    check_tensor("mla_decode", "cache", cache, (blocks, page, rank + width), like=like)
    if page < 1:
        raise ValueError("k3_kernels.mla_decode: the blocks of cache have no rows")
    return page, blocks


def _check_requests(
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    num_rows: int,
    page: int,
    blocks: int,
    like: torch.Tensor,
) -> tuple[int, int]:
    """Check the integers that describe the requests; return B and T."""
    for name, numbers, dimensions in (
        ("block_table", block_table, (2,)),
        ("lengths", lengths, (1, 2)),
    ):
        where = f"k3_kernels.mla_decode: {name}"
        if not isinstance(numbers, torch.Tensor):
            raise TypeError(f"{where} must be a torch.Tensor, got {type(numbers).__name__}")
        if numbers.dtype != torch.int32:
            raise TypeError(
                f"{where} is {numbers.dtype}, expected torch.int32: convert with .int()"
            )
        if numbers.device != like.device:
            raise ValueError(f"{where} is on {numbers.device}, expected {like.device}")
        if numbers.ndim not in dimensions:
            expected = "[B, W]" if name == "block_table" else "[B] or [B, T]"
            raise ValueError(f"{where} has shape {list(numbers.shape)}, expected {expected}")
    batch = lengths.shape[0]
    if block_table.shape[0] != batch:
        raise ValueError(
            f"k3_kernels.mla_decode: block_table is of {block_table.shape[0]} requests, lengths of "
            f"{batch}"
        )
    if block_table.shape[1] > 1 and block_table.stride(1) != 1:
        raise ValueError(
            f"k3_kernels.mla_decode: block_table has stride {block_table.stride(1)} in its last "
            "dimension, expected 1: call .contiguous() first"
        )
    if num_rows % batch if batch else num_rows:
        raise ValueError(
            f"k3_kernels.mla_decode: {num_rows} tokens are not the same number for each of "
            f"{batch} requests"
        )
    tokens = num_rows // batch if batch else 0
    if lengths.ndim == 2 and lengths.shape[1] != tokens:
        raise ValueError(
            f"k3_kernels.mla_decode: lengths has {lengths.shape[1]} numbers for each request of "
            f"{tokens} tokens"
        )
    if lengths.device.type == "cpu" and lengths.numel():
        longest, room = int(lengths.max()), block_table.shape[1] * page
        if longest > room:
            raise ValueError(
                f"k3_kernels.mla_decode: a context of {longest} rows does not fit the "
                f"{block_table.shape[1]} blocks of {page} rows in block_table"
            )
        for row, length in zip(block_table, lengths.reshape(batch, -1).amax(-1), strict=True):
            used = row[: -(-int(length) // page)]
            if int(length) > 0 and not 0 <= int(used.min()) <= int(used.max()) < blocks:
                raise ValueError(
                    f"k3_kernels.mla_decode: block_table names block {int(used.max())} or "
                    f"{int(used.min())}, but the cache has blocks 0..{blocks - 1}"
                )
    return batch, tokens
