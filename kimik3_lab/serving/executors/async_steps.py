"""Steps that nobody waits for: what the next one needs of them stays on the device.

Needs torch. Lesson 10 turns the switch ``async_scheduling``. In vLLM this is
``GPUModelRunner.execute_model`` with ``AsyncOutput`` (``vllm/v1/worker/gpu/model_runner.py``).

A step is begun like any other, with three differences. Its plan has gaps, which
:class:`~kimik3_lab.serving.executors.async_tables.SeatTables` fills in. Its tokens are chosen,
verified and drafted upon on the device; in a step that is replayed the recorded graph does all of
that, so that the host has no more to send than for a step that is answered at once. And they are
copied to the host in the background, where :meth:`PendingStep.get_output` waits for them: at that
time the next step is under way.

Some steps wait all the same, because the host has to choose their tokens: requests with a
temperature that have drafts (their random numbers belong to a position that only the device knows),
a ``verifier`` of the caller's, a drafter without ``propose_async``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kimik3_lab.serving.executors.async_sampler import SampledRows, pad_tokens, put_draws
from kimik3_lab.serving.executors.async_states import AsyncKdaStates
from kimik3_lab.serving.executors.async_tables import SeatTables
from kimik3_lab.serving.executors.cuda_graphs import Ahead
from kimik3_lab.serving.executors.drafts import Draft
from kimik3_lab.serving.executors.logprobs import LogprobTensors, logprob_tensors
from kimik3_lab.serving.executors.pending_step import PendingStep
from kimik3_lab.serving.executors.pinned import OnItsWay, to_device
from kimik3_lab.serving.executors.rejection_sampler import verify_batch
from kimik3_lab.serving.executors.step_layout import (
    ScheduledRequest,
    lay_out_ahead,
    model_inputs_ahead,
)
from kimik3_lab.serving.executors.step_parts import Decodes
from kimik3_lab.serving.executors.triton_proposer import TritonProposer
from kimik3_lab.serving.outputs import SchedulerOutput

if TYPE_CHECKING:
    from kimik3_lab.serving.executors.torch_executor import TorchExecutor

__all__ = ["AsyncSteps"]


class AsyncSteps:
    """The asynchronous side of a :class:`~.torch_executor.TorchExecutor`.

    Parameters
    ----------
    executor : TorchExecutor
        Whose requests, cache and model are used.
    fused : bool
        Whether the tables have kernels of their own.

    Attributes
    ----------
    tables : SeatTables
        What the device knows of each seat.
    is_used : bool
        Whether steps are executed in this way: then the tables know how far requests have come.
    """

    def __init__(self, executor: TorchExecutor, *, fused: bool = False) -> None:
        self.executor = executor
        drafts, device = executor.num_speculative_tokens, executor.model.device
        keeps_states = bool(executor.cache.num_scratch)
        self.tables = SeatTables(
            executor.max_num_seqs, drafts, device, keeps_states=keeps_states, fused=fused
        )
        self.is_used = False
        self._states = AsyncKdaStates(executor.states, self.tables, drafts)
        self._pending: deque[PendingStep] = deque()
        self._newest: PendingStep | None = None

    def submit(self, plan: SchedulerOutput) -> PendingStep:
        """Hand a step to the device."""
        executor, self.is_used = self.executor, True
        executor._copy_blocks(plan.kv_cache_block_copies)
        starts = executor.requests.update(plan)
        self.tables.begin(executor.requests.seated)
        if not starts:
            return PendingStep([], [])
        scheduled = lay_out_ahead(plan, starts, executor.requests, self._states)
        token_ids, logits_at = model_inputs_ahead(scheduled)
        rows = [i for i, item in enumerate(scheduled) if item.draft is not None]
        sampling = [scheduled[i] for i in rows]
        waits = self._waits(sampling)
        draws = any(not item.request.sampling_params.greedy for item in sampling)
        taps = None if executor.proposer is None else executor.proposer.new_taps()
        ahead = Ahead(self.tables, settles=not (waits or draws))
        logits = executor._forward(scheduled, token_ids, logits_at, taps, ahead)
        pending = PendingStep([item.req_id for item in scheduled], sampling, rows)
        if waits:
            packed = self._sample_on_host(pending, scheduled, rows, logits)
        else:
            packed = self._sample(pending, scheduled, rows, logits)
        self._settle(scheduled, packed)
        if taps is not None:
            executor._keep_taps(taps)
            if sampling:
                self._propose(sampling, on_host=waits)
        pending.on_wait = lambda: self._count_wait(pending)
        # Not the first ones alone: of one whose wait was interrupted nobody may ever ask again.
        waiting = (step for step in self._pending if not step.is_answered)
        self._pending = deque([*waiting, pending])
        self._newest = pending
        return pending

    def _count_wait(self, step: PendingStep) -> None:
        """Count a wait for the device if nothing is queued there behind the step."""
        self.executor.num_host_waits += step is self._newest

    # -- tokens --------------------------------------------------------------------------------

    def _sample(
        self,
        pending: PendingStep,
        scheduled: Sequence[ScheduledRequest],
        rows: Sequence[int],
        logits: Tensor,
    ) -> Tensor:
        """Choose tokens and move the requests on, if the graph has not; they are the result."""
        graphs, sampling = self.executor.graphs, pending.sampling
        packed = None if graphs is None else graphs.settled
        where: SampledRows | None = None
        if packed is None:
            best = None if graphs is None else graphs.best
            if best is None and len(logits):
                largest, best = logits.max(-1)
                best = best.where(largest.isfinite(), -1)
            if best is None:
                best = logits.new_empty(0, dtype=torch.int64)
            params = [item.request.sampling_params for item in sampling]
            streams = [item.request.stream for item in sampling]
            best = put_draws(best, logits, params, streams, [item.chunk.stop for item in sampling])
            where = self._send_rows(scheduled)
            packed = self.tables.settle(where, best)
        if sampling:
            asking = [rows[i] for i in pending.asking]
            described: LogprobTensors | tuple[()] = ()
            if asking:
                index = to_device(asking, self.tables.device)
                places = (where or self._send_rows(scheduled)).logit_rows()[index].flatten()
                tokens = packed[index, :-2].flatten().clamp(min=0)
                described = logprob_tensors(logits[places], tokens, pending.most_logprobs)
            pending.copies = OnItsWay(packed, *described)
        return packed

    def _send_rows(self, scheduled: Sequence[ScheduledRequest]) -> SampledRows:
        return SampledRows.send(
            [item.draft is not None for item in scheduled],
            [item.segment.num_drafts for item in scheduled],
            [item.segment.count for item in scheduled],
            [item.segment.slot for item in scheduled],
            self.tables.device,
        )

    def _waits(self, sampling: Sequence[ScheduledRequest]) -> bool:
        """Whether the host has to choose the tokens of this step."""
        executor = self.executor
        if not sampling:
            return False
        if executor.verifier is not verify_batch:
            return True
        if executor.proposer is None:
            return False
        drawn = any(not item.request.sampling_params.greedy for item in sampling)
        return drawn or not hasattr(executor.proposer, "propose_async")

    def _sample_on_host(
        self,
        pending: PendingStep,
        scheduled: Sequence[ScheduledRequest],
        rows: Sequence[int],
        logits: Tensor,
    ) -> Tensor:
        """Choose tokens as a step does that is answered at once."""
        self._catch_up()
        executor, tables, sampling = self.executor, self.tables, pending.sampling
        known = tables.drafts.tolist()
        executor.num_host_waits += 1
        drafts = []
        for item in sampling:
            ids = known[item.segment.slot][: item.segment.num_drafts]
            drafts.append((item.request.draft or Draft([])).matching(ids))
        new_token_ids, logprobs = executor._choose(logits, drafts, sampling)
        pending.resolve(new_token_ids, logprobs)
        of_all: list[list[int]] = [[] for _ in scheduled]
        for row, ids in zip(rows, new_token_ids, strict=True):
            of_all[row] = ids
        where = self._send_rows(scheduled)
        sampled = pad_tokens(of_all, where.most, tables.device)
        tables.advance(where, sampled)
        return sampled.packed

    def _catch_up(self) -> None:
        """Make the host know all tokens of the steps before."""
        self._newest = None  # this step is queued behind all of them
        while self._pending:
            step = self._pending.popleft()
            if not step.is_answered:
                step.get_output()

    # -- after the forward pass ------------------------------------------------------------------

    def _settle(self, scheduled: Sequence[ScheduledRequest], packed: Tensor) -> None:
        """Bring KDA states to where they belong; those that verified drafts come first."""
        executor, tables = self.executor, self.tables
        exports = sum(item.chunk.checkpoint_at > 0 for item in scheduled)
        executor.counters.checkpoint_exports += exports
        verified = [item.chunk for item in scheduled if item.segment.num_drafts]
        if not verified or self._states.are_in_place:
            return
        parts = [p for p in executor.mixer.step.parts if isinstance(p, Decodes)]
        starts = torch.cat([part.starts for part in parts])[: len(verified)]
        num_accepted, commits = self._states.settle(verified, starts, packed[: len(verified), -2])
        if num_accepted is not None:
            slots = torch.cat([part.slots for part in parts])[: len(verified)]
            tables.num_accepted[slots] = num_accepted
        if not executor.cache.num_scratch:
            executor.mixer.commit_tensors(commits)

    def _propose(self, sampling: Sequence[ScheduledRequest], *, on_host: bool) -> None:
        """Draft for all that have a new token."""
        executor, tables = self.executor, self.tables
        proposer = executor.proposer
        assert proposer is not None
        before = proposer.num_forwards
        slots = [item.segment.slot for item in sampling]
        drawn = getattr(proposer, "draft_sample_method", "greedy") != "greedy"
        if on_host and (drawn or not hasattr(proposer, "propose_async")):
            drafts = executor._propose(sampling)
            width = tables.drafts.shape[1]
            ids = [drafts[item.req_id].token_ids for item in sampling]
            tokens = pad_tokens(ids, width - 1, tables.device).tokens
            tables.drafts[to_device(slots, tables.device)] = tokens
            return
        for item in sampling:
            item.request.draft = None
        if isinstance(proposer, TritonProposer):
            proposer.propose_seats(slots, max(item.chunk.stop for item in sampling), tables)
        else:
            index = to_device(slots, tables.device)
            tables.drafts[index] = proposer.propose_async(
                [item.draft_request(0, item.chunk.stop) for item in sampling],
                tables.last_token[index],
                tables.num_computed[index],
            )
        executor.counters.drafter_forwards += proposer.num_forwards - before
