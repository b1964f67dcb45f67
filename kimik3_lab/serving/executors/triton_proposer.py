"""The drafter at speed: the same drafts, from fused operators that a CUDA graph can hold.

Needs torch, and Triton when it runs. Lesson 10 shows what a draft costs on one rank of eight.

Two differences to :class:`~kimik3_lab.serving.executors.proposer.Proposer`. Contexts are not
gathered: a drafted block writes its rows into the pages behind its context, where the scheduler has
kept room for them (``num_lookahead_tokens``), and attention walks through pages. And everything of
a pass, up to the drafted tokens, follows from a few integers for each request, so that a recorded
pass serves any requests: their number is filled up to a power of two, as in
:mod:`~kimik3_lab.serving.executors.cuda_graphs`.

Requests that draw their drafts, and steps without a block table, take the parent's way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from k3_kernels import mla_decode, rotate_pairs, row_norm, silu_and_mul
from torch import Tensor

from kimik3_lab.reference.drafter_layers import DraftLayer
from kimik3_lab.reference.norms import RMSNorm
from kimik3_lab.serving.executors.async_tables import SeatTables
from kimik3_lab.serving.executors.cuda_graphs import DecodeGraphs, padded_size
from kimik3_lab.serving.executors.drafts import Draft, DraftRequest
from kimik3_lab.serving.executors.paged_cache import PagedCache
from kimik3_lab.serving.executors.pinned import to_device
from kimik3_lab.serving.executors.proposer import Proposer
from kimik3_lab.serving.executors.triton_linear import JoinedLinear, Skinny

__all__ = ["DraftRecording", "TritonProposer"]


class DraftRecording:
    """One pass with its buffers: anchors, slots and starts in, tokens and confidences out."""

    def __init__(self, size: int, bound: int, empty_slot: int, device: torch.device) -> None:
        self.size, self.bound = size, bound
        self.empty = [0] * size, [empty_slot] * size, [0] * size
        self.numbers = torch.tensor(self.empty, dtype=torch.int64, device=device)
        self.result: Tensor | None = None
        #: Seats that the buffer names, where the pass takes all else from their tables.
        self.seats: list[int] = []
        self.replay: Callable[[], None] = lambda: None


class TritonProposer(Proposer):
    """Drafts on the Triton kernels.

    Parameters
    ----------
    cache : PagedCache
        The executor's: its block table says where a request's rows are.
    skinny : Skinny
        Computes the products.
    graphs : DecodeGraphs, optional
        Records the target's steps; the drafter's passes are recorded the same way. Left out, each
        is launched operator by operator.
    args, kwargs
        As for :class:`~kimik3_lab.serving.executors.proposer.Proposer`.
    """

    def __init__(
        self,
        *args: Any,
        cache: PagedCache,
        skinny: Skinny,
        graphs: DecodeGraphs | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.cache, self.skinny, self._graphs_of_target = cache, skinny, graphs
        self.recordings: dict[tuple[int, int, bool], DraftRecording] = {}
        attentions = [layer.self_attn for layer in self._layers]
        # All layers read the same context: one product serves them.
        self._cached = JoinedLinear([a.kv_a_proj_with_mqa for a in attentions], skinny)
        self._gate_up = [
            JoinedLinear([layer.mlp.gate_proj, layer.mlp.up_proj], skinny) for layer in self._layers
        ]
        self._frequencies = attentions[0].frequencies.to(self.latent.device)

    # -- context -----------------------------------------------------------------------------

    @torch.inference_mode()
    def write(self, taps: Mapping[int, Tensor | None], positions: Tensor, cells: Tensor) -> None:
        """See :meth:`Proposer.write`. Rows without a token go to the null block, unread."""
        drafter = self.drafter
        tapped = [taps[i] for i in drafter.config.target_layer_ids]
        joined = torch.cat([tap for tap in tapped if tap is not None], -1)
        context = self._norm(
            drafter.context_norm, self.skinny.linear(joined, drafter.context_proj.weight)
        )
        turned = self._angles(positions)
        for layer, pages, rows in zip(
            self._layers, self.latent, self._cached(context), strict=True
        ):
            self._keep(layer, rows, turned, pages, cells)

    def _keep(
        self,
        layer: DraftLayer,
        rows: Tensor,
        turned: tuple[Tensor, Tensor],
        pages: Tensor,
        cells: Tensor,
    ) -> None:
        """Norm and rotate the projections of tokens, and write them to their cells."""
        norm = layer.self_attn.kv_a_layernorm
        latent = row_norm(rows, norm.weight, eps=norm.eps)
        rotate_pairs(latent[:, None, len(norm.weight) :], *turned)
        pages.flatten(0, 1).index_copy_(0, cells, latent)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = positions.to(torch.float64).unsqueeze(-1) * self._frequencies
        return angle.cos().float(), angle.sin().float()

    @staticmethod
    def _norm(norm: RMSNorm, x: Tensor) -> Tensor:
        return row_norm(x, norm.weight, eps=norm.eps)

    # -- drafts ------------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> dict[str, Draft]:
        """See :meth:`Proposer.propose`."""
        drawn = self.draft_sample_method == "probabilistic"
        if not requests or any(r.slot is None or (drawn and not r.params.greedy) for r in requests):
            return super().propose(requests)
        self.num_forwards += 1
        recorded = self.recording(requests)
        recorded.replay()
        assert recorded.result is not None
        # Tokens and confidences in one copy: float64 holds both.
        tokens, confidence = recorded.result[:, : len(requests)].tolist()
        return {
            r.req_id: Draft(
                [int(token) for token in tokens[i]],
                None,
                confidence[i] if self.drafter.confidence_head is not None else None,
            )
            for i, r in enumerate(requests)
        }

    @torch.inference_mode()
    def propose_async(
        self, requests: Sequence[DraftRequest], anchors: Tensor, num_context: Tensor
    ) -> Tensor:
        """See :meth:`Proposer.propose_async`."""
        self.num_forwards += 1
        recorded, count = self.recording(requests), len(requests)
        recorded.numbers[0, :count].copy_(anchors)
        recorded.numbers[2, :count].copy_(num_context)
        recorded.replay()
        assert recorded.result is not None
        return recorded.result[0, :count].long()

    @torch.inference_mode()
    def propose_seats(self, slots: Sequence[int], longest: int, tables: SeatTables) -> None:
        """Draft greedily for the requests in these seats, from their tables and into them.

        Parameters
        ----------
        slots
            Seats.
        longest
            None of their contexts is longer.
        tables
            Their last tokens and contexts are read, their drafts written, by the recorded pass:
            the host has only the seats to send, and these only when they are others.
        """
        self.num_forwards += 1
        recorded = self._recorded(len(slots), longest, tables)
        seats = sorted(slots)
        if seats != recorded.seats:
            _, others, _ = recorded.empty
            to_device([*seats, *others[len(seats) :]], out=recorded.numbers[1])
            recorded.seats = seats
        recorded.replay()

    def recording(self, requests: Sequence[DraftRequest]) -> DraftRecording:
        """Find or make the recording of a pass for these requests, and fill its buffers."""
        recorded = self._recorded(len(requests), max(r.num_context for r in requests))
        anchors, slots, starts = recorded.empty
        numbers = [
            *[r.anchor for r in requests],
            *anchors[len(requests) :],
            *[r.slot for r in requests if r.slot is not None],
            *slots[len(requests) :],
            *[r.num_context for r in requests],
            *starts[len(requests) :],
        ]
        to_device(numbers, out=recorded.numbers.view(-1))
        return recorded

    def _recorded(
        self, count: int, longest: int, tables: SeatTables | None = None
    ) -> DraftRecording:
        longest += self.num_speculative_tokens
        shortest = 64 if self._graphs_of_target is None else self._graphs_of_target.shortest
        bound = max(shortest, 1 << (longest - 1).bit_length())
        key = padded_size(count), bound, tables is not None
        recorded = self.recordings.get(key)
        if recorded is None:
            recorded = self.recordings[key] = self._record(*key[:2], tables)
        return recorded

    def _record(self, size: int, bound: int, tables: SeatTables | None) -> DraftRecording:
        recorded = DraftRecording(size, bound, self.cache.padding_slot, self.latent.device)

        def run() -> None:
            anchors, slots, starts = recorded.numbers
            if tables is not None:
                anchors.copy_(tables.last_token[slots])
                starts.copy_(tables.num_computed[slots])
            recorded.result = self._pass(recorded)
            if tables is not None:
                tables.drafts[slots] = recorded.result[0].long()

        graphs = self._graphs_of_target
        recorded.replay = run if graphs is None else graphs.recorder(run, run)
        return recorded

    def _pass(self, recorded: DraftRecording) -> Tensor:
        """Draft for all requests of the buffers: float64 ``[2, n, K]``, tokens and confidences."""
        drafter, count, cache = self.drafter, self.num_speculative_tokens, self.cache
        size, page = recorded.size, cache.page_size
        anchors, slots, starts = recorded.numbers
        device = anchors.device
        ids = torch.full((size, count), drafter.config.mask_token_id, device=device)
        ids[:, 0] = anchors
        positions = (starts.unsqueeze(-1) + torch.arange(count, device=device)).flatten()
        row_slots = slots.unsqueeze(-1).expand(size, count).flatten()
        cells = cache.block_table[0, row_slots, positions // page] * page + positions % page
        table = cache.block_table[0, slots, : -(-recorded.bound // page)].int()
        # Every row of a block sees all of the context and all of the block.
        lengths = (starts + count).int().unsqueeze(-1).expand(size, count).contiguous()
        turned = self._angles(positions)
        x = self.target.model.embed_tokens(ids.flatten()).to(self.latent.dtype)
        for index, (layer, pages) in enumerate(zip(self._layers, self.latent, strict=True)):
            attention = layer.self_attn
            normed = self._norm(layer.input_layernorm, x)
            rows = self.skinny.linear(normed, attention.kv_a_proj_with_mqa.weight)
            self._keep(layer, rows, turned, pages, cells)
            x = x + self._attend(layer, normed, turned, pages, table, lengths)
            normed = self._norm(layer.post_attention_layernorm, x)
            inner = silu_and_mul(*self._gate_up[index](normed))
            x = x + self.skinny.linear(inner, layer.mlp.down_proj.weight)
        hidden = self._norm(drafter.final_norm, x)
        base = self.skinny.linear(hidden, self.target.lm_head.weight, wide=True)
        return self._choose(anchors, hidden.view(size, count, -1), base.view(size, count, -1))

    def _attend(
        self,
        layer: DraftLayer,
        x: Tensor,
        turned: tuple[Tensor, Tensor],
        pages: Tensor,
        table: Tensor,
        lengths: Tensor,
    ) -> Tensor:
        attention, config = layer.self_attn, self.drafter.config
        linear, nope = self.skinny.linear, config.qk_nope_head_dim
        low = self._norm(attention.q_a_layernorm, linear(x, attention.q_a_proj.weight))
        q = linear(low, attention.q_b_proj.weight)
        q = q.view(len(q), config.num_attention_heads, -1)
        q_pe = rotate_pairs(q[..., nope:], *turned)
        per_head = attention.kv_b_proj.weight.view(
            config.num_attention_heads, -1, config.kv_lora_rank
        )
        q_latent = torch.bmm(q[..., :nope].transpose(0, 1), per_head[:, :nope]).transpose(0, 1)
        o = mla_decode(q_latent, q_pe, pages, table, lengths, scale=attention.scale)
        values = torch.bmm(o.transpose(0, 1), per_head[:, nope:].mT).transpose(0, 1)
        return linear(values.flatten(-2), attention.o_proj.weight)

    def _choose(self, anchors: Tensor, hidden: Tensor, base: Tensor) -> Tensor:
        """Choose the places of each block in order: the Markov head sees the token before."""
        drafter, previous = self.drafter, anchors
        tokens, embeddings = [], []
        for place in range(base.shape[1]):
            embeddings.append(drafter.markov_head.markov_w1(previous))
            logits = base[:, place] + drafter.markov_head.bias(embeddings[-1])
            previous = logits.argmax(-1)
            tokens.append(previous)
        chosen = torch.stack(tokens, 1).double()
        confidence = torch.zeros_like(chosen)
        if drafter.confidence_head is not None:
            confidence = drafter.confidence_head(hidden, torch.stack(embeddings, 1)).double()
        return torch.stack((chosen, confidence))
