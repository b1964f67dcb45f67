"""The mixer of training: many sequences of one length at once, under autograd.

Needs torch. The reference runs one sequence and walks through its chunks in order. Here everything
within chunks is computed for all chunks of all sequences in the same few products, and only the
state goes from chunk to chunk. ``tests/unit/test_train_tiny_k3_mixing.py`` holds the two equal.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kimik3_lab.config import K3Config
from kimik3_lab.reference import kda
from kimik3_lab.reference.norms import compute_dtype

__all__ = ["CHUNK", "SUB_CHUNK", "TrainingMixer", "chunked_kda"]

CHUNK = 64
#: Rows whose decays are taken from one anchor: e^(5 * 15) is within float32, e^(5 * 63) is not.
SUB_CHUNK = 16


class TrainingMixer:
    """The reference's mixer for ``batch`` sequences of ``length`` tokens, flattened to rows.

    Parameters
    ----------
    batch, length
        Rows of a step are ``batch * length`` tokens, sequence after sequence.

    Examples
    --------
    >>> TrainingMixer(2, 3).conv(0, torch.ones(6, 4), torch.ones(4, 4)).shape
    torch.Size([6, 4])
    """

    def __init__(self, batch: int, length: int) -> None:
        self.shape = (batch, length)

    def conv(self, layer_id: int, u: Tensor, weight: Tensor) -> Tensor:
        """See :meth:`kimik3_lab.reference.mixer.Mixer.conv`."""
        y, _ = kda.short_conv(u.unflatten(0, self.shape), weight)
        return y.flatten(0, 1)

    def kda(
        self, layer_id: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
    ) -> Tensor:
        """See :meth:`kimik3_lab.reference.mixer.Mixer.kda`."""
        inputs = [x.unflatten(0, self.shape) for x in (q, k, v, g, beta)]
        return chunked_kda(*inputs).flatten(0, 1)

    def mla(
        self, layer_id: int, q: Tensor, latent: Tensor, kv_b: Tensor, config: K3Config
    ) -> Tensor:
        """See :meth:`kimik3_lab.reference.mixer.Mixer.mla`."""
        heads, nope = config.num_attention_heads, config.qk_nope_head_dim
        compressed, k_pe = latent.split((config.kv_lora_rank, config.qk_rope_head_dim), -1)
        keys_values = (compressed @ kv_b.mT).unflatten(-1, (heads, -1))
        k_nope, value = keys_values.split((nope, config.v_head_dim), -1)
        key = torch.cat((k_nope, k_pe.unsqueeze(1).expand(-1, heads, -1)), -1)
        q, key, value = (
            x.unflatten(0, self.shape).transpose(1, 2).contiguous() for x in (q, key, value)
        )
        o = F.scaled_dot_product_attention(q, key, value, is_causal=True)
        return o.transpose(1, 2).flatten(0, 1)


def chunked_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """:func:`kimik3_lab.reference.kda.chunked` from the empty state, for all chunks at once.

    Parameters
    ----------
    q, k, g
        ``[B, T, H, K]``; log-decays of at least -5.
    v
        ``[B, T, H, V]``.
    beta
        ``[B, T, H]``.

    Returns
    -------
    Tensor
        ``[B, T, H, V]`` in the type of ``v``.

    Examples
    --------
    >>> q, k = kda.l2norm(torch.randn(2, 1, 100, 2, 8, dtype=torch.float64))
    >>> v, g = torch.randn_like(q), -5 * torch.rand_like(q)
    >>> beta = torch.rand(1, 100, 2, dtype=torch.float64)
    >>> torch.allclose(chunked_kda(q, k, v, g, beta), kda.recurrent(q, k, v, g, beta)[0])
    True
    """
    dtype, length = compute_dtype(v.dtype), v.shape[1]
    missing = -length % CHUNK  # rows of zeros at the end write nothing and nobody reads them

    def to_chunks(x: Tensor) -> Tensor:  # [B, T, H, D] to [B, H, chunks, CHUNK, D]
        x = F.pad(x.to(dtype), (0, 0, 0, 0, 0, missing))
        return x.transpose(1, 2).unflatten(2, (-1, CHUNK))

    out_type = v.dtype
    q, k, v, g, beta = (to_chunks(x) for x in (q, k, v, g, beta.unsqueeze(-1)))
    decayed = g.cumsum(-2)  # G of the reference
    total = decayed[..., -1:, :]
    to_here = decayed.exp()

    scores_k, scores_q = _decayed_scores(k, q, decayed)
    lower = (beta * scores_k).tril(-1)
    right = beta * torch.cat((v, k * to_here), -1)
    solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    own, seen = solved.split((v.shape[-1], k.shape[-1]), -1)
    written = (k * (total - decayed).exp()).mT
    keep = total.exp().mT

    state = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1])
    states, errors = [], []
    for own_c, seen_c, written_c, keep_c in zip(
        *(x.unbind(2) for x in (own, seen, written, keep)), strict=True
    ):
        error = own_c - seen_c @ state
        states.append(state)
        errors.append(error)
        state = keep_c * state + written_c @ error
    before, error = torch.stack(states, 2), torch.stack(errors, 2)
    o = (q * to_here) @ before + scores_q.tril() @ error
    return o.flatten(2, 3)[:, :, :length].transpose(1, 2).to(out_type)


def _decayed_scores(k: Tensor, q: Tensor, decayed: Tensor) -> tuple[Tensor, Tensor]:
    """``x_i . (e^{G_i - G_j} k_j)`` for x = k and x = q, ``[..., CHUNK, CHUNK]`` each.

    Each sub-chunk of rows weighs all columns from its own first row, so one exponent is at most 0
    and the other at most 75. Above the diagonal the values mean nothing, but are finite.
    """
    sub = decayed.unflatten(-2, (-1, SUB_CHUNK))  # [..., S, 16, K]
    anchor = sub[..., :1, :]
    rows = torch.cat((k, q), -1).unflatten(-2, (-1, SUB_CHUNK)).unflatten(-1, (2, -1))
    rows = (rows * (sub - anchor).exp().unsqueeze(-2)).movedim(-2, -3).flatten(-3, -2)
    # Columns after the sub-chunk are not wanted; a zero exponent keeps them finite.
    steps = torch.arange(CHUNK, device=k.device)
    past = steps < (steps[::SUB_CHUNK].unsqueeze(-1) + SUB_CHUNK)  # [S, CHUNK]
    exponent = (anchor - decayed.unsqueeze(-3)).masked_fill(~past.unsqueeze(-1), 0.0)
    columns = k.unsqueeze(-3) * exponent.exp()  # [..., S, CHUNK, K]
    scores = rows @ columns.mT  # [..., S, 2 * 16, CHUNK]
    of_k, of_q = scores.unflatten(-2, (2, SUB_CHUNK)).unbind(-3)
    return of_k.flatten(-3, -2), of_q.flatten(-3, -2)
