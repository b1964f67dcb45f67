"""Kimi Delta Attention with matrix products over 64 tokens at a time: the form for prefill.

Needs torch. Lesson 05 derives it in three lines; :mod:`kimik3_lab.reference.kda` has the recurrence
that it equals, and exports it as ``kda.chunked``.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from kimik3_lab.reference.norms import compute_dtype

__all__ = ["SUB_CHUNK", "chunked", "initial_state"]

#: Rows that :func:`chunked` takes together when it weighs keys by their decay.
SUB_CHUNK = 16


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    chunk_size: int = 64,
    checkpoint_at: Collection[int] = (),
) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """Run the delta rule with matrix products, ``chunk_size`` tokens at a time: for prefill.

    Within a chunk, let ``G_i`` be the sum of the log-decays up to row i. Row i's error depends on
    the errors of the rows before it, which is a unit lower triangular system::

        R_i = beta_i (v_i - (k_i e^{G_i}) S_0 - sum_{j<i} (k_i . e^{G_i - G_j} k_j) R_j)

    Once it is solved (by substitution: inverting it by repeated squaring loses every digit when
    keys are alike and decay is slow), outputs and the next state are plain products.

    Parameters
    ----------
    q, k, v, g, beta, state
        As for :func:`kimik3_lab.reference.kda.recurrent`.
    chunk_size
        Tokens in a chunk; the last one may be shorter.
    checkpoint_at
        Token counts at which to export the state, each from 0 to T, in any order. They need not
        fall on chunk ends: rows after a position do not enter its state, so the chunk is not split.

    Returns
    -------
    o, state, checkpoints
        As for :func:`kimik3_lab.reference.kda.recurrent`, and the exported states
        ``{position: [B, H, K, V]}``.

    Raises
    ------
    ValueError
        If ``chunk_size`` is not positive or a position lies outside the sequence.

    Examples
    --------
    >>> from kimik3_lab.reference.kda import l2norm, recurrent
    >>> q, k = l2norm(torch.randn(2, 1, 100, 2, 8))
    >>> v, g, beta = torch.randn(1, 100, 2, 4), -torch.rand(1, 100, 2, 8), torch.rand(1, 100, 2)
    >>> o, state, at = chunked(q, k, v, g, beta, checkpoint_at=[37])
    >>> rest, same = recurrent(q[:, 37:], k[:, 37:], v[:, 37:], g[:, 37:], beta[:, 37:], at[37])
    >>> torch.allclose(o[:, 37:], rest, atol=1e-5), torch.allclose(state, same, atol=1e-5)
    (True, True)
    """
    length = q.shape[1]
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    for position in checkpoint_at:
        if not 0 <= position <= length:
            raise ValueError(f"cannot export the state after {position} of {length} tokens")
    state = initial_state(k, v, state)
    checkpoints = {position: state for position in checkpoint_at if position == 0}
    o = torch.empty_like(v)
    # Heads before time, so that the last two dimensions are the matrices: [B, H, T, *].
    q, k, v, g = (x.to(state.dtype).transpose(1, 2) for x in (q, k, v, g))
    beta = beta.to(state.dtype).transpose(1, 2).unsqueeze(-1)

    for start in range(0, length, chunk_size):
        stop = min(start + chunk_size, length)
        qc, kc, vc, gc, bc = (x[:, :, start:stop] for x in (q, k, v, g, beta))
        # Up to -5 * 64 = -320, where float32 has steps of 3e-5 and differences of two such sums
        # would lose five digits of a decay; float64 keeps them.
        G = gc.double().cumsum(-2)
        decay = G.exp().to(state.dtype)
        lower = (bc * _decayed_scores(kc, kc, G)).tril(-1)
        errors = torch.linalg.solve_triangular(
            lower, bc * (vc - (kc * decay) @ state), upper=False, unitriangular=True
        )
        within = _decayed_scores(qc, kc, G).tril() @ errors
        o[:, start:stop] = ((qc * decay) @ state + within).transpose(1, 2)
        for position in checkpoint_at:
            if start < position <= stop:
                checkpoints[position] = _carry(state, kc, G, errors, position - start)
        state = _carry(state, kc, G, errors, stop - start)
    return o, state, checkpoints


def initial_state(k: Tensor, v: Tensor, state: Tensor | None) -> Tensor:
    """Check ``state`` or make an empty one, ``[B, H, K, V]``, float32 or wider.

    Raises
    ------
    ValueError
        If ``state`` has another shape than keys ``[B, T, H, K]`` and values ``[B, T, H, V]`` need.

    Examples
    --------
    >>> initial_state(torch.zeros(1, 5, 2, 8), torch.zeros(1, 5, 2, 4), None).shape
    torch.Size([1, 2, 8, 4])
    """
    batch, _, heads, keys = k.shape
    shape = (batch, heads, keys, v.shape[-1])
    dtype = compute_dtype(v.dtype)
    if state is None:
        return v.new_zeros(shape, dtype=dtype)
    if tuple(state.shape) != shape:
        raise ValueError(
            f"the state must be [B, H, K, V] = {shape}, got {tuple(state.shape)}; "
            "from_cache_layout converts a state of a cache, which is [B, H, V, K]"
        )
    return state.to(torch.promote_types(state.dtype, dtype))


def _decayed_scores(x: Tensor, k: Tensor, G: Tensor) -> Tensor:
    """``x_i . (e^{G_i - G_j} k_j)`` for j <= i, ``[B, H, C, C]``; undefined above the diagonal.

    ``e^{G_i} e^{-G_j}`` over a whole chunk overflows: a saturated gate gives e^{+320}. So 16 rows
    are taken at a time. Earlier columns are weighed from the first of these rows, which splits the
    exponent into two parts that are both at most 0; inside the 16 rows each pair is weighed singly.
    """
    length = x.shape[-2]
    scores = x.new_zeros(*x.shape[:-1], length)
    for first in range(0, length, SUB_CHUNK):
        rows = slice(first, min(first + SUB_CHUNK, length))
        xs, Gs, anchor = x[..., rows, :], G[..., rows, :], G[..., first : first + 1, :]
        from_anchor = xs * (Gs - anchor).exp().to(x.dtype)
        to_anchor = k[..., :first, :] * (anchor - G[..., :first, :]).exp().to(x.dtype)
        scores[..., rows, :first] = from_anchor @ to_anchor.mT
        # Pairs with j > i, which nobody wants, have a positive exponent: an infinity there
        # would still reach the gradients.
        weight = (Gs.unsqueeze(-2) - Gs.unsqueeze(-3)).clamp(max=0).exp().to(x.dtype)
        weighted_keys = weight * k[..., rows, :].unsqueeze(-3)
        scores[..., rows, rows] = (weighted_keys @ xs.unsqueeze(-1)).squeeze(-1)
    return scores


def _carry(state: Tensor, k: Tensor, G: Tensor, errors: Tensor, rows: int) -> Tensor:
    """State after the first ``rows`` rows of a chunk that began with ``state``."""
    total = G[..., rows - 1 : rows, :]
    remaining = (total - G[..., :rows, :]).exp().to(state.dtype)
    written = (k[..., :rows, :] * remaining).mT @ errors[..., :rows, :]
    return total.mT.exp().to(state.dtype) * state + written
