"""Attention of the Triton backend: absorbed over pages, or expanded for a long chunk of a prompt.

Needs torch, and Triton when it runs. Lesson 10 turns the backend.

:func:`paged_absorbed` is for decoding, verification and chunks short beside their context:
:func:`k3_kernels.mla_decode` walks through the pages, and ``kv_b`` is applied to the few queries.
:func:`chunk_expanded` rebuilds keys and values and hands them to cuDNN, or to whatever PyTorch has
in its place. With 8000 tokens of one prompt the absorbed form would take 3.4 times the
multiplications.
"""

from __future__ import annotations

from typing import Protocol

import torch
from k3_kernels import mla_decode
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.functional import scaled_dot_product_attention

from kimik3_lab.config import K3Config
from kimik3_lab.serving.executors.paged_attention import absorbing_pays

__all__ = [
    "STEP",
    "Attend",
    "chunk_expanded",
    "chunk_in_steps",
    "expanding_pays",
    "merge",
    "paged_absorbed",
]

#: Attention through cuDNN is computed with lengths that are multiples of this.
STEP = 1024


class Attend(Protocol):
    """What attends, see :func:`chunk_in_steps`."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
        """Return output and logarithm of the sum of weights."""


def paged_absorbed(
    q: Tensor,
    pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    kv_b: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """:func:`kimik3_lab.reference.mla.absorbed` for B requests with T queries each.

    Parameters
    ----------
    q : Tensor
        ``[B * T, H, nope + rope]``: the newest tokens of each request.
    pages : Tensor
        ``[blocks, page, kv_lora + rope]``: one layer of the cache, the newest rows included.
    block_table, lengths : Tensor
        int32 ``[B, W]`` and ``[B]`` or ``[B, T]``, see :func:`k3_kernels.mla_decode`: with ``[B]``
        a token sees itself and what came before.
    kv_b : Tensor
        ``[H * (nope + v), kv_lora]``.
    out : Tensor, optional
        ``[B * T, H, v]`` for the result.

    Returns
    -------
    Tensor
        ``[B * T, H, v]``. No step waits for the device, and shapes decide what is launched.
    """
    heads, width = q.shape[1:]
    rank = kv_b.shape[1]
    nope = width - (pages.shape[-1] - rank)
    per_head = kv_b.view(heads, -1, rank)
    q_latent = torch.bmm(q[..., :nope].transpose(0, 1), per_head[:, :nope]).transpose(0, 1)
    q_pe = q[..., nope:] if nope < width else None
    attended = mla_decode(q_latent, q_pe, pages, block_table, lengths, scale=width**-0.5)
    values = torch.bmm(attended.transpose(0, 1), per_head[:, nope:].mT).transpose(0, 1)
    return values if out is None else out.copy_(values)


def expanding_pays(num_queries: int, num_rows: int, config: K3Config) -> bool:
    """Whether :func:`chunk_expanded` is the quicker one for a chunk of a prompt.

    On an H200 its products ran at 500 to 680 TFLOP/s and those of :func:`k3_kernels.mla_decode` at
    214, so absorbing has to save two thirds of the operations.
    """
    return not absorbing_pays(3 * num_queries, num_rows, config)


def chunk_expanded(q: Tensor, rows: Tensor, kv_b: Tensor) -> Tensor:
    """:func:`kimik3_lab.reference.mla.expanded` without its matrix of scores.

    With 8192 tokens of 12 heads it takes 0.7 ms on an H200, of which 0.5 ms are the attention (500
    TFLOP/s of what a token may see), 0.07 ms rebuilding, and the rest copies.

    Takes ``L * H * (nope + rope + v)`` values more memory for keys and values, and ``2 * L * H *
    (nope + v) * kv_lora`` operations to rebuild them: at 12 heads 62 MB and 25 GFLOP for 8000 rows.

    Parameters
    ----------
    q : Tensor
        ``[N, H, nope + rope]``: the last N tokens of one sequence.
    rows : Tensor
        ``[L, kv_lora + rope]``: its cached rows, L >= N, the newest last.
    kv_b : Tensor
        ``[H * (nope + v), kv_lora]``.

    Returns
    -------
    Tensor
        ``[N, H, v]``.

    Examples
    --------
    >>> from kimik3_lab.reference import mla
    >>> q, rows, kv_b = torch.randn(3, 2, 6), torch.randn(4, 5), torch.randn(2 * 7, 3)
    >>> torch.allclose(chunk_expanded(q, rows, kv_b), mla.expanded(q, rows, kv_b), atol=1e-5)
    True
    """
    count, heads, width = q.shape
    if _has_cudnn(q, rows, kv_b):
        return chunk_in_steps(q, rows, kv_b, _with_lse)
    k, v = _expand(rows, kv_b, heads, width)
    q, start = q.transpose(0, 1).unsqueeze(0), len(rows) - count
    if start == 0:
        o = scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        # Loads PyTorch's compiler, seconds that nobody else has to wait for.
        from torch.nn.attention.bias import causal_lower_right

        o = scaled_dot_product_attention(q, k, v, causal_lower_right(count, len(rows)))
    return o[0].transpose(0, 1)


def chunk_in_steps(
    q: Tensor, rows: Tensor, kv_b: Tensor, attend: Attend, *, step: int = STEP
) -> Tensor:
    """Attend with shapes that are multiples of ``step``, so that few of them occur.

    cuDNN makes a plan for each shape that it has not seen, tens of milliseconds on the host, and
    chunks beside decoding requests have a new length in every step. What is filled up is zeros,
    and stands where nobody looks: keys behind the last token, and queries whose result is dropped.
    The context ends at a multiple of ``step``; what is left of it goes with the chunk's own rows.
    Taken apart and merged it is four times as fast as one call with its mask in the lower right.

    Parameters
    ----------
    q, rows, kv_b : Tensor
        As for :func:`chunk_expanded`.
    attend : callable
        Maps ``(q, k, v, causal=...)``, each ``[1, H, L, width]``, to the output and, ``[1, H, L,
        1]``, the logarithm of the sum of its weights.
    step : int
        Lengths are multiples of it.

    Examples
    --------
    >>> from kimik3_lab.reference import mla
    >>> def attend(q, k, v, *, causal):
    ...     scores = q @ k.mT * q.shape[-1] ** -0.5
    ...     if causal:
    ...         scores = scores.where(torch.ones_like(scores).tril() > 0, -torch.inf)
    ...     return scores.softmax(-1) @ v, scores.logsumexp(-1, keepdim=True)
    >>> q, rows, kv_b = torch.randn(3, 2, 6), torch.randn(9, 5), torch.randn(2 * 7, 3)
    >>> ours = chunk_in_steps(q, rows, kv_b, attend, step=4)
    >>> torch.allclose(ours, mla.expanded(q, rows, kv_b), atol=1e-5)
    True
    """

    def up(number: int) -> int:
        return -(-number // step) * step

    count, heads, width = q.shape
    lead = (len(rows) - count) % step
    before, side = len(rows) - count - lead, up(lead + count)
    k, v = _expand(_fill_up(rows, before + side), kv_b, heads, width)
    queries = q.new_zeros(max(side, lead + up(count)), heads, width)
    queries[lead : lead + count] = q
    queries = queries.transpose(0, 1).unsqueeze(0)
    mine = slice(lead, lead + count)
    o, lse = attend(queries[..., :side, :], k[..., before:, :], v[..., before:, :], causal=True)
    o, lse = o[0, :, mine], lse[0, :, mine]
    if before:
        asked = queries[..., lead : lead + up(count), :]
        other, other_lse = attend(asked, k[..., :before, :], v[..., :before, :], causal=False)
        o = merge(other[0, :, :count], other_lse[0, :, :count], o, lse)
    return o.transpose(0, 1)


def _fill_up(rows: Tensor, length: int) -> Tensor:
    return torch.cat((rows, rows.new_zeros(length - len(rows), rows.shape[1])))


def _expand(rows: Tensor, kv_b: Tensor, heads: int, width: int) -> tuple[Tensor, Tensor]:
    """Rebuild keys and values, ``[1, H, L, width]`` and ``[1, H, L, v]``."""
    rank = kv_b.shape[1]
    rope = rows.shape[1] - rank
    expanded = (rows[:, :rank] @ kv_b.mT).view(len(rows), heads, -1)
    k_pe = rows[:, None, rank:].expand(-1, heads, -1)
    k = torch.cat((expanded[..., : width - rope], k_pe), -1)
    v = expanded[..., width - rope :]
    return k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)


def _has_cudnn(q: Tensor, rows: Tensor, kv_b: Tensor) -> bool:
    """Whether cuDNN can attend with heads of these widths here."""
    if not q.is_cuda:
        return False
    like = q.transpose(0, 1).unsqueeze(0)
    nope = q.shape[2] - (rows.shape[1] - kv_b.shape[1])
    values = like[..., : len(kv_b) // q.shape[1] - nope]
    return bool(can_use_cudnn_attention(SDPAParams(like, like, values, None, 0.0, False, False)))


def merge(o: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
    """Merge attention over two parts of a context, ``[..., v]`` and ``[..., 1]`` each.

    Examples
    --------
    Two rows that were scored alike:

    >>> one, two = torch.tensor([1.0]), torch.tensor([3.0])
    >>> merge(one, torch.zeros(1), two, torch.zeros(1)).item()
    2.0
    """
    share = torch.sigmoid(lse - other_lse)
    return torch.lerp(other.float(), o.float(), share).to(o.dtype)


def _with_lse(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Attend as PyTorch does with cuDNN, which does not hand out what a merge needs."""
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention
    o, lse, *_ = operator(q, k, v, None, True, 0.0, causal)
    return o, lse.view(*o.shape[:-1], 1)
