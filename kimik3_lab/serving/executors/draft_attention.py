"""Attention of drafted blocks: a few queries of each request, over its context and over each other.

Needs torch. :mod:`kimik3_lab.serving.executors.proposer` uses it, lesson 09 with that. It is
:func:`kimik3_lab.reference.mla.absorbed` without a causal mask, for many requests at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kimik3_lab.reference.drafter_layers import DraftLayer
from kimik3_lab.reference.norms import compute_dtype

__all__ = ["ContextGroup", "attend_blocks", "block_attention", "group_contexts"]

#: Most rows of padded context that one attention call gathers, which bounds its memory.
MAX_GATHERED_ROWS = 16_384


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """Requests whose contexts are gathered together.

    ``cells [n, L]`` numbers cached rows with blocks laid end to end. Where ``padding`` is true
    the number is 0, a cell of the null block.
    """

    requests: slice
    cells: Tensor
    padding: Tensor | None

    def cut(self, lengths: Tensor) -> ContextGroup:
        """Cut contexts that were gathered too long: int64 ``[R]``, of all requests."""
        place = torch.arange(self.cells.shape[1], device=self.cells.device)
        padding = place >= lengths[self.requests].unsqueeze(-1)
        return ContextGroup(self.requests, self.cells.masked_fill(padding, 0), padding)


def group_contexts(
    block_ids: Sequence[Sequence[int]],
    lengths: Sequence[int],
    block_size: int,
    device: torch.device,
    *,
    max_rows: int = MAX_GATHERED_ROWS,
) -> list[ContextGroup]:
    """Find the cached rows of requests that are sorted by the length of their contexts.

    Parameters
    ----------
    block_ids, lengths
        Blocks and context length of each request, the shortest first.
    block_size, device
        Of the cache.
    max_rows
        Most rows, padding included, of a group with more than one request: it bounds the memory.

    Examples
    --------
    >>> (group,) = group_contexts([[3], [1, 2]], [2, 5], 4, torch.device("cpu"))
    >>> group.cells.tolist(), group.padding.sum(-1).tolist()
    ([[12, 13, 0, 0, 0], [4, 5, 6, 7, 8]], [3, 0])
    """
    groups, low = [], 0
    while low < len(lengths):
        high = low + 1
        while high < len(lengths) and (high + 1 - low) * lengths[high] <= max_rows:
            high += 1
        longest = lengths[high - 1]
        num_blocks = -(-longest // block_size)
        table = torch.zeros(high - low, num_blocks, dtype=torch.int64)
        for row, (blocks, length) in enumerate(
            zip(block_ids[low:high], lengths[low:high], strict=True)
        ):
            used = -(-length // block_size)
            table[row, :used] = torch.as_tensor(blocks[:used])
        cells = table.to(device).unsqueeze(-1) * block_size + torch.arange(
            block_size, device=device
        )
        cells, padding = cells.flatten(-2)[:, :longest], None
        if lengths[low] < longest:
            place = torch.arange(longest, device=device)
            padding = place >= torch.tensor(lengths[low:high], device=device).unsqueeze(-1)
            cells = cells.masked_fill(padding, 0)
        groups.append(ContextGroup(slice(low, high), cells, padding))
        low = high
    return groups


def block_attention(
    q: Tensor,
    own: Tensor,
    context: Tensor,
    kv_b: Tensor,
    *,
    scale: float,
    padding: Tensor | None = None,
) -> Tensor:
    """Let every query of a block see the whole context and the whole block, later rows included.

    Parameters
    ----------
    q : Tensor
        ``[R, N, H, nope + rope]``: the blocks of R requests.
    own : Tensor
        ``[R, N, kv_lora + rope]``: the rows of the blocks themselves, which are not cached.
    context : Tensor
        ``[R, L, kv_lora + rope]``: cached rows, padded with finite values.
    kv_b : Tensor
        ``[H * (nope + v), kv_lora]``.
    scale : float
        Of the scores.
    padding : Tensor, optional
        bool ``[R, L]``, true where a row of the context is padding.

    Returns
    -------
    Tensor
        ``[R, N, H, v]`` in the type of ``context``.

    Examples
    --------
    >>> from kimik3_lab.reference import mla
    >>> q, own, context = torch.randn(2, 3, 2, 6), torch.randn(2, 3, 5), torch.randn(2, 4, 5)
    >>> kv_b = torch.randn(2 * 7, 3)
    >>> alone = mla.absorbed(q[1], torch.cat((context[1], own[1])), kv_b, scale=0.5, causal=False)
    >>> together = block_attention(q, own, context, kv_b, scale=0.5)
    >>> torch.allclose(together[1], alone, atol=1e-5)
    True
    """
    dtype, rank = compute_dtype(context.dtype), kv_b.shape[1]
    heads, width = q.shape[-2:]
    nope = width - (context.shape[-1] - rank)
    key_up, value_up = kv_b.to(dtype).view(heads, -1, rank).tensor_split((nope,), 1)
    q, rows = q.to(dtype), torch.cat((context, own), 1).to(dtype)
    query = torch.cat((torch.einsum("bnhd,hdr->bnhr", q[..., :nope], key_up), q[..., nope:]), -1)
    scores = torch.einsum("bnhc,blc->bnhl", query, rows) * scale
    if padding is not None:
        masked = torch.nn.functional.pad(padding, (0, own.shape[1]))  # False for the block's own
        scores = scores.masked_fill(masked[:, None, None], -torch.inf)
    attended = torch.einsum("bnhl,blr->bnhr", scores.softmax(-1), rows[..., :rank])
    return torch.einsum("bnhr,hvr->bnhv", attended, value_up).to(context.dtype)


def attend_blocks(
    layer: DraftLayer,
    x: Tensor,
    positions: Tensor,
    pages: Tensor,
    groups: Sequence[ContextGroup],
    *,
    block_length: int,
) -> Tensor:
    """Compute the attention of a draft layer for the blocks of all requests.

    Parameters
    ----------
    layer
        Its ``self_attn`` alone is used.
    x : Tensor
        ``[R * N, hidden]``: normed inputs, block after block, in the order of ``groups``.
    positions : Tensor
        int64 ``[R * N]``.
    pages : Tensor
        ``[blocks, block_size, kv_lora + rope]``: the layer's cache.
    groups
        Where the contexts lie, see :func:`group_contexts`.
    block_length : int
        N.

    Returns
    -------
    Tensor
        ``[R * N, hidden]``.
    """
    attention = layer.self_attn
    queries, own = attention.queries(x, positions), attention.latent(x, positions)
    queries = queries.view(-1, block_length, *queries.shape[1:])
    own = own.view(-1, block_length, own.shape[-1])
    cached = pages.flatten(0, 1)
    parts = []
    for group in groups:
        context = cached.index_select(0, group.cells.flatten()).view(*group.cells.shape, -1)
        parts.append(
            block_attention(
                queries[group.requests],
                own[group.requests],
                context,
                attention.kv_b_proj.weight,
                scale=attention.scale,
                padding=group.padding,
            )
        )
    mixed: Tensor = attention.o_proj(torch.cat(parts).flatten(0, 1).flatten(-2))
    return mixed
