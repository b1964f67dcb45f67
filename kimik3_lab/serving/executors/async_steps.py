"""Steps that nobody waits for: what the next one needs of them stays on the device.

Needs torch. Lesson 10 turns the switch ``async_scheduling``. In vLLM this is
``GPUModelRunner.execute_model`` with ``AsyncOutput`` (``vllm/v1/worker/gpu/model_runner.py``).

A step is begun like any other, with three differences. Its plan has gaps, which
:class:`~kimik3_lab.serving.executors.async_tables.SeatTables` fills in. Its tokens are chosen,
verified and drafted upon on the device. And they are copied to the host in the background, where
:meth:`PendingStep.get_output` waits for them: at that time the next step is under way.

Some steps wait all the same, because the host has to choose their tokens: requests with a
temperature that have drafts (their random numbers belong to a position that only the device knows),
a ``verifier`` of the caller's, a drafter without ``propose_async``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from kimik3_lab.serving.executors.async_sampler import (
    Sampled,
    SampledRows,
    pad_tokens,
    put_draws,
    verify_rows,
)
from kimik3_lab.serving.executors.async_states import AsyncKdaStates
from kimik3_lab.serving.executors.async_tables import SeatTables
from kimik3_lab.serving.executors.drafts import Draft
from kimik3_lab.serving.executors.logprobs import LogprobTensors, logprob_tensors
from kimik3_lab.serving.executors.pending_step import PendingStep
from kimik3_lab.serving.executors.pinned import OnItsWay, send_columns, to_device
from kimik3_lab.serving.executors.rejection_sampler import verify_batch
from kimik3_lab.serving.executors.step_layout import (
    ScheduledRequest,
    lay_out_ahead,
    model_inputs_ahead,
)
from kimik3_lab.serving.executors.step_metadata import StepMetadata
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

    Attributes
    ----------
    tables : SeatTables
        What the device knows of each seat.
    is_used : bool
        Whether steps are executed in this way: then the tables know how far requests have come.
    """

    def __init__(self, executor: TorchExecutor) -> None:
        self.executor = executor
        drafts, device = executor.num_speculative_tokens, executor.model.device
        self.tables = SeatTables(executor.max_num_seqs, drafts, device)
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
        filled: list[Tensor] = []

        def fill_in(step: StepMetadata, numbers: Tensor) -> None:
            filled.append(self.tables.fill_in(step, numbers))

        taps = None if executor.proposer is None else executor.proposer.new_taps()
        logits = executor._forward(scheduled, token_ids, logits_at, taps, fill_in)
        pending = self._sample(scheduled, logits_at, logits, filled[0], taps)
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
        scheduled: Sequence[ScheduledRequest],
        logits_at: Sequence[int],
        logits: Tensor,
        token_ids: Tensor,
        taps: dict[int, Tensor | None] | None,
    ) -> PendingStep:
        """Choose tokens, move the requests on, and draft."""
        executor, device = self.executor, self.tables.device
        sampling = [item for item in scheduled if item.draft is not None]
        pending = PendingStep([item.req_id for item in scheduled], sampling)
        if not sampling:
            self._settle(scheduled, None, None)
            if taps is not None:
                executor._keep_taps(taps)
            return pending
        num_drafts = [item.segment.num_drafts for item in sampling]
        slots = [item.segment.slot for item in sampling]
        first, firsts = 0, []
        for count in num_drafts:
            firsts.append(logits_at[first])
            first += count + 1
        rows = SampledRows.send(firsts, num_drafts, slots, device)
        graphs = executor.graphs
        best = None if graphs is None else graphs.best
        waits = self._waits(sampling)
        if waits:
            sampled = self._sample_on_host(pending, logits, token_ids, firsts, rows.most)
        else:
            if best is None:
                largest, best = logits.max(-1)
                best = best.where(largest.isfinite(), -1)
            params = [item.request.sampling_params for item in sampling]
            streams = [item.request.stream for item in sampling]
            best = put_draws(best, logits, params, streams, [item.chunk.stop for item in sampling])
            sampled = verify_rows(rows, token_ids, best)
            pending.copies = OnItsWay(*sampled, *self._logprobs(pending, logits, rows, sampled))
        self._settle(scheduled, rows, sampled)
        if executor.proposer is not None and taps is not None:
            executor._keep_taps(taps)
            self._propose(sampling, rows, on_host=waits)
        return pending

    def _waits(self, sampling: Sequence[ScheduledRequest]) -> bool:
        """Whether the host has to choose the tokens of this step."""
        executor = self.executor
        if executor.verifier is not verify_batch:
            return True
        if executor.proposer is None:
            return False
        drawn = any(not item.request.sampling_params.greedy for item in sampling)
        return drawn or not hasattr(executor.proposer, "propose_async")

    def _sample_on_host(
        self,
        pending: PendingStep,
        logits: Tensor,
        token_ids: Tensor,
        rows: Sequence[int],
        most: int,
    ) -> Sampled:
        """Choose tokens as a step does that is answered at once."""
        self._catch_up()
        executor, sampling = self.executor, pending.sampling
        known = token_ids.tolist()
        executor.num_host_waits += 1
        drafts = []
        for item, row in zip(sampling, rows, strict=True):
            ids = known[row + 1 : row + 1 + item.segment.num_drafts]
            drafts.append((item.request.draft or Draft([])).matching(ids))
        new_token_ids, logprobs = executor._choose(logits, drafts, sampling)
        pending.resolve(new_token_ids, logprobs)
        return pad_tokens(new_token_ids, most, self.tables.device)

    def _catch_up(self) -> None:
        """Make the host know all tokens of the steps before."""
        self._newest = None  # this step is queued behind all of them
        while self._pending:
            step = self._pending.popleft()
            if not step.is_answered:
                step.get_output()

    def _logprobs(
        self, pending: PendingStep, logits: Tensor, rows: SampledRows, sampled: Sampled
    ) -> LogprobTensors | tuple[()]:
        """Describe the new tokens of those who ask, all places of their drafts."""
        asking = pending.asking
        if not asking:
            return ()
        index = to_device(asking, self.tables.device)
        places = rows.logit_rows()[index].flatten()
        tokens = sampled.tokens[index].flatten().clamp(min=0)
        return logprob_tensors(logits[places], tokens, pending.most_logprobs)

    # -- after the forward pass ------------------------------------------------------------------

    def _settle(
        self,
        scheduled: Sequence[ScheduledRequest],
        rows: SampledRows | None,
        sampled: Sampled | None,
    ) -> None:
        """Move all requests on; those that verified drafts come first among the rows."""
        executor, tables = self.executor, self.tables
        verified = [item.chunk for item in scheduled if item.segment.num_drafts]
        slots, num_kept = send_columns(
            tables.device,
            [item.segment.slot for item in scheduled],
            [item.segment.count for item in scheduled],
        )
        num_accepted = num_kept.new_ones(len(scheduled))
        if verified:
            assert sampled is not None
            first = slice(len(verified))
            counts = sampled.num_tokens[first]
            num_kept[first] = counts
            starts = tables.num_computed[slots[first]]
            num_accepted[first], commits = self._states.settle(verified, starts, counts)
            if not executor.cache.num_scratch:
                executor.mixer.commit_tensors(commits)
        tables.advance(slots, num_kept, num_accepted)
        if rows is not None and sampled is not None:
            tables.last_token[rows.slots] = sampled.last
        exports = sum(item.chunk.checkpoint_at > 0 for item in scheduled)
        executor.counters.checkpoint_exports += exports

    def _propose(
        self, sampling: Sequence[ScheduledRequest], rows: SampledRows, *, on_host: bool
    ) -> None:
        """Draft for all that have a new token."""
        executor, tables = self.executor, self.tables
        proposer = executor.proposer
        assert proposer is not None
        before = proposer.num_forwards
        drawn = getattr(proposer, "draft_sample_method", "greedy") != "greedy"
        if on_host and (drawn or not hasattr(proposer, "propose_async")):
            drafts = executor._propose(sampling)
            width = tables.drafts.shape[1]
            ids = [drafts[item.req_id].token_ids for item in sampling]
            tokens = pad_tokens(ids, width - 1, tables.device).tokens
        else:
            for item in sampling:
                item.request.draft = None
            tokens = proposer.propose_async(
                [item.draft_request(0, item.chunk.stop) for item in sampling],
                tables.last_token[rows.slots],
                tables.num_computed[rows.slots],
            )
            executor.counters.drafter_forwards += proposer.num_forwards - before
        tables.drafts[rows.slots] = tokens
