"""Attention over cached rows for requests of any length at once.

Needs torch. Lesson 10 runs it inside the paged mixer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimik3_lab.config import K3Config
from kimik3_lab.reference.norms import compute_dtype

__all__ = ["absorbed_decode", "absorbing_pays"]


def absorbed_decode(q: Tensor, rows: Tensor, kv_b: Tensor, hidden: Tensor | None = None) -> Tensor:
    """:func:`kimik3_lab.reference.mla.absorbed` for many sequences with T queries each.

    Parameters
    ----------
    q : Tensor
        ``[n, T, H, nope + rope]``: the newest tokens of each sequence.
    rows : Tensor
        ``[n, L, kv_lora + rope]``: cached rows, padded to the longest sequence with finite values.
    kv_b : Tensor
        ``[H * (nope + v), kv_lora]``.
    hidden : Tensor, optional
        bool ``[n, T, L]``, true where a query must not look: at padding, or behind itself.

    Returns
    -------
    Tensor
        ``[n, T, H, v]`` in the type of ``rows``.

    Examples
    --------
    >>> from kimik3_lab.reference import mla
    >>> q, rows, kv_b = torch.randn(3, 1, 2, 6), torch.randn(3, 4, 5), torch.randn(2 * 7, 3)
    >>> alone = torch.stack([mla.absorbed(q[i], rows[i], kv_b) for i in range(3)])
    >>> torch.allclose(absorbed_decode(q, rows, kv_b), alone, atol=1e-5)
    True
    """
    dtype, rank = compute_dtype(rows.dtype), kv_b.shape[1]
    heads, width = q.shape[-2:]
    nope = width - (rows.shape[-1] - rank)
    key_up, value_up = kv_b.to(dtype).view(heads, -1, rank).tensor_split((nope,), 1)
    q, wide = q.to(dtype), rows.to(dtype)
    query = torch.cat((torch.einsum("nthd,hdr->nthr", q[..., :nope], key_up), q[..., nope:]), -1)
    scores = torch.einsum("nthc,nlc->nthl", query, wide) * width**-0.5
    if hidden is not None:
        scores = scores.masked_fill(hidden.unsqueeze(2), -torch.inf)
    attended = torch.einsum("nthl,nlr->nthr", scores.softmax(-1), wide[..., :rank])
    return torch.einsum("nthr,hvr->nthv", attended, value_up).to(rows.dtype)


def absorbing_pays(num_queries: int, num_rows: int, config: K3Config) -> bool:
    """Whether the absorbed form takes fewer multiplications: short chunks over a long context.

    Expanding rebuilds keys and values of all rows; absorbing converts only the queries, but then
    each score is a product over 576 values instead of 192, and each output over 512 instead of 128.
    """
    rebuilt = config.kv_lora_rank * (config.qk_nope_head_dim + config.v_head_dim)
    narrow = config.qk_head_dim + config.v_head_dim
    wide = config.mla_cache_dim + config.kv_lora_rank
    pairs = num_queries * num_rows
    return num_queries * rebuilt + pairs * wide < num_rows * rebuilt + pairs * narrow
