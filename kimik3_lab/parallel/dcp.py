"""Decode context parallel: every rank keeps some of a sequence's MLA rows, all answer together.

Needs torch. Lesson 11 prices it; lesson 13 turns it on in vLLM.

All heads of an MLA layer read the same rows, so splitting heads over R ranks leaves R copies of
the cache. Here token p's row lies on rank ``p mod R`` alone. Each rank attends with the queries of
*all* heads to the rows it has, and keeps what a softmax over part of the rows cannot know, the
logarithm of its denominator (*lse*, log-sum-exp)::

    o_r = sum over its rows of softmax_r(s) v        lse_r = log sum over its rows of exp(s)
    lse = log sum over ranks of exp(lse_r)           o = sum over ranks of exp(lse_r - lse) o_r

That is exact. A rank without any row that a query may see has ``lse_r = -inf`` and weighs nothing.

Source: vLLM 0.33.0, ``--decode-context-parallel-size`` and
``vllm/v1/attention/ops/common.py``; https://github.com/vllm-project/vllm/pull/50484 for K3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimik3_lab.config import K3Config
from kimik3_lab.parallel.groups import Ranks
from kimik3_lab.reference.norms import compute_dtype
from kimik3_lab.reference.state import SequenceMixer, SequenceState

__all__ = ["RankMixer", "attend", "merge", "merge_weights"]


def attend(
    query: Tensor,
    rows: Tensor,
    value_width: int,
    scale: float,
    query_positions: Tensor,
    row_positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """Attend to some rows of a sequence.

    Parameters
    ----------
    query
        ``[N, H, C]``: absorbed queries, see :func:`kimik3_lab.reference.mla.absorbed`.
    rows
        ``[L, C]``: any of the sequence's cached rows, or none of them.
    value_width
        The first so many values of a row are what is summed.
    scale
        Of the scores.
    query_positions, row_positions
        int64 ``[N]`` and ``[L]``: a query sees the rows up to its own position.

    Returns
    -------
    out, lse
        ``[N, H, value_width]`` and ``[N, H]``, float32 or wider. A query that sees no row here gets
        zeros and minus infinity.

    Examples
    --------
    >>> query, rows = torch.zeros(1, 1, 2), torch.tensor([[1.0, 0.0], [3.0, 0.0]])
    >>> out, lse = attend(query, rows, 1, 1.0, torch.tensor([5]), torch.tensor([2, 7]))
    >>> out.item(), lse.item()  # the row at 7 is not visible yet
    (1.0, 0.0)
    """
    wide = compute_dtype(query.dtype)
    query, rows = query.to(wide), rows.to(wide)
    scores = torch.einsum("nhc,lc->nhl", query, rows) * scale
    hidden = row_positions > query_positions.unsqueeze(-1)
    scores = scores.masked_fill(hidden.unsqueeze(1), -torch.inf)
    lse = scores.logsumexp(-1) if len(rows) else scores.new_full(query.shape[:2], -torch.inf)
    # Where nothing is visible -inf - -inf would be no number; exp(-inf - 0) is the wanted zero.
    shares = (scores - lse.nan_to_num(neginf=0.0).unsqueeze(-1)).exp()
    return torch.einsum("nhl,lr->nhr", shares, rows[:, :value_width]), lse


def merge_weights(lse: Tensor) -> Tensor:
    """How much each rank's result counts: ``[R, ...]`` that adds up to 1 over ranks.

    Where no rank saw a row all weights are 0, and so is the merged result.

    Examples
    --------
    >>> merge_weights(torch.tensor([[0.0], [-torch.inf]])).flatten().tolist()
    [1.0, 0.0]
    """
    total = lse.logsumexp(0, keepdim=True).nan_to_num(neginf=0.0)
    return (lse - total).exp()


def merge(out: Tensor, lse: Tensor) -> Tensor:
    """Put results over parts of the rows together.

    Parameters
    ----------
    out, lse
        ``[R, N, H, V]`` and ``[R, N, H]`` of R parts, as :func:`attend` returns them.

    Returns
    -------
    Tensor
        ``[N, H, V]``: what one call over all rows gives, up to rounding.

    Examples
    --------
    Two rows with equal scores, seen apart: the mean of both.

    >>> merge(torch.tensor([[[[1.0]]], [[[3.0]]]]), torch.zeros(2, 1, 1)).item()
    2.0
    """
    return (merge_weights(lse).unsqueeze(-1) * out).sum(0)


class RankMixer(SequenceMixer):
    """The mixer of a rank: its own KDA heads, and all MLA rows or its share of them.

    Parameters
    ----------
    state
        Of this rank: from :meth:`kimik3_lab.parallel.model.ParallelK3.new_state`.
    ranks
        The ranks that hold the heads.
    context_parallel
        Split the rows of MLA layers; otherwise every rank keeps all of them.
    num_heads
        MLA heads of the whole model.

    Examples
    --------
    >>> from kimik3_lab.config import K3Config
    >>> mixer = RankMixer(SequenceState.empty(K3Config.micro()), Ranks(), num_heads=2)
    >>> mixer.context_parallel
    False
    """

    def __init__(
        self,
        state: SequenceState,
        ranks: Ranks,
        *,
        num_heads: int,
        context_parallel: bool = False,
    ) -> None:
        super().__init__(state)
        self.ranks, self.context_parallel = ranks, context_parallel
        self.num_heads = num_heads

    def mla(
        self, layer_id: int, q: Tensor, latent: Tensor, kv_b: Tensor, config: K3Config
    ) -> Tensor:
        """See :meth:`kimik3_lab.reference.mixer.Mixer.mla`; ``q`` and ``kv_b`` of local heads."""
        if not self.context_parallel:
            if q.shape[1]:
                return super().mla(layer_id, q, latent, kv_b, config)
            self._advance(layer_id, len(q))
            return q.new_zeros(len(q), 0, config.v_head_dim)
        ranks = self.ranks
        positions = self.state.num_tokens + torch.arange(len(q), device=q.device)
        mine = positions % ranks.size == ranks.rank
        rows = torch.cat((self.state.latent[layer_id], latent[mine]))
        self.state.latent[layer_id] = rows
        self._advance(layer_id, len(q))

        lora, nope = config.kv_lora_rank, config.qk_nope_head_dim
        wide = compute_dtype(latent.dtype)
        per_head = kv_b.to(wide).view(q.shape[1], nope + config.v_head_dim, lora)
        q_latent = torch.einsum("nhd,hdr->nhr", q[..., :nope].to(wide), per_head[:, :nope])
        heads = ranks.sizes(self.num_heads)
        query = ranks.all_gather(torch.cat((q_latent, q[..., nope:].to(wide)), -1), heads, dim=1)
        row_positions = ranks.rank + ranks.size * torch.arange(len(rows), device=q.device)
        out, lse = attend(query, rows, lora, config.qk_head_dim**-0.5, positions, row_positions)
        every = ranks.all_gather(lse.unsqueeze(0), [1] * ranks.size)
        weighted = merge_weights(every)[ranks.rank].unsqueeze(-1) * out
        attended = ranks.reduce_scatter(weighted, heads, dim=1)
        return torch.einsum("nhr,hvr->nhv", attended, per_head[:, nope:]).to(latent.dtype)
