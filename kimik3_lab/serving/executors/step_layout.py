"""From a plan of the scheduler to rows of a forward pass: who stands where, and what is sampled.

Needs torch through its neighbours. Lesson 10 prints the rows of a mixed step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kimik3_lab.serving.executors.async_states import AsyncKdaStates
from kimik3_lab.serving.executors.drafts import Draft, DraftRequest
from kimik3_lab.serving.executors.kda_states import Chunk, KdaStates
from kimik3_lab.serving.executors.request_states import RequestState, RequestStates
from kimik3_lab.serving.executors.step_parts import Segment
from kimik3_lab.serving.outputs import SchedulerOutput

__all__ = ["ScheduledRequest", "lay_out", "lay_out_ahead", "model_inputs", "model_inputs_ahead"]


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """A request in a step.

    Attributes
    ----------
    request : RequestState
        The executor's copy.
    chunk : Chunk
        Its tokens of the step, drafts and placeholders included.
    segment : Segment
        Where they are computed.
    draft : Draft or None
        What is to be verified, perhaps nothing; None while the request is inside its prompt, and
        nothing is sampled.
    """

    request: RequestState
    chunk: Chunk
    segment: Segment
    draft: Draft | None

    @property
    def req_id(self) -> str:
        """The request's id."""
        return self.chunk.req_id

    def draft_request(self, anchor: int, num_context: int) -> DraftRequest:
        """Ask for a draft behind ``anchor``, which stands behind ``num_context`` tokens."""
        request = self.request
        return DraftRequest(
            self.req_id,
            anchor,
            num_context,
            request.block_ids[0],
            request.sampling_params,
            request.stream,
            request.slot,
        )


def lay_out(
    output: SchedulerOutput,
    starts: Mapping[str, int],
    requests: RequestStates,
    states: KdaStates,
) -> list[ScheduledRequest]:
    """Bring KDA states to where the step wants them, and put the requests in the order of rows.

    Parameters
    ----------
    output : SchedulerOutput
        The plan.
    starts : mapping of str to int
        What :meth:`~kimik3_lab.serving.executors.request_states.RequestStates.update` made of it.
    """
    chunks = _chunks(output, starts)
    scheduled = []
    for chunk, rows in zip(chunks, states.prepare(chunks), strict=True):
        request = requests[chunk.req_id]
        drafted = output.scheduled_spec_decode_tokens.get(chunk.req_id, [])
        draft = (request.draft or Draft([])).matching(drafted)
        inside_prompt = chunk.stop - len(drafted) < len(request.token_ids)
        segment = Segment(
            _slot(request),
            chunk.start,
            chunk.stop - chunk.start,
            len(drafted),
            rows,
            chunk.checkpoint_at,
        )
        scheduled.append(
            ScheduledRequest(request, chunk, segment, None if inside_prompt else draft)
        )
    return sorted(scheduled, key=lambda item: item.segment.order)


def lay_out_ahead(
    output: SchedulerOutput,
    starts: Mapping[str, int],
    requests: RequestStates,
    states: AsyncKdaStates,
) -> list[ScheduledRequest]:
    """Do what :func:`lay_out` does for a plan that was made before the last step has answered.

    Its drafts are placeholders, and a chunk with drafts in flight before it may begin earlier than
    the plan says.
    """
    chunks = _chunks(output, starts)
    slots = [_slot(requests[chunk.req_id]) for chunk in chunks]
    scheduled = []
    for chunk, slot, rows in zip(chunks, slots, states.prepare(chunks, slots), strict=True):
        request, start = requests[chunk.req_id], chunk.start
        count = chunk.stop - start
        num_drafts = len(output.scheduled_spec_decode_tokens.get(chunk.req_id, ()))
        inside_prompt = chunk.stop - num_drafts < request.num_given
        segment = Segment(slot, start, count, num_drafts, rows, chunk.checkpoint_at)
        draft = None if inside_prompt else Draft([-1] * num_drafts)
        scheduled.append(ScheduledRequest(request, chunk, segment, draft))
    return sorted(scheduled, key=lambda item: item.segment.order)


def _chunks(output: SchedulerOutput, starts: Mapping[str, int]) -> list[Chunk]:
    counts, checkpoints = output.num_scheduled_tokens, output.prefill_checkpoints
    return [
        Chunk(req_id, start, start + counts[req_id], checkpoints.get(req_id, 0))
        for req_id, start in starts.items()
    ]


def _slot(request: RequestState) -> int:
    assert request.slot is not None
    return request.slot


def model_inputs_ahead(scheduled: Sequence[ScheduledRequest]) -> tuple[list[int], list[int]]:
    """Token ids of all rows with -1 for those that the host does not know, and rows of logits."""
    token_ids: list[int] = []
    logits_at: list[int] = []
    for item in scheduled:
        start, request = item.chunk.start, item.request
        known = request.token_ids[start : min(item.chunk.stop, request.num_given)]
        token_ids += [*known, *[-1] * (item.segment.count - len(known))]
        if item.draft is not None:
            logits_at += range(len(token_ids) - item.segment.num_drafts - 1, len(token_ids))
    return token_ids, logits_at


def model_inputs(scheduled: Sequence[ScheduledRequest]) -> tuple[list[int], list[int]]:
    """Token ids of all rows, and the numbers of the rows that logits are wanted of.

    A request that is sampled from wants them for its last known token and for each of its drafts.
    """
    token_ids: list[int] = []
    logits_at: list[int] = []
    for item in scheduled:
        token_ids += item.request.token_ids[item.chunk.start : item.chunk.stop]
        if item.draft is not None:
            drafted = item.draft.token_ids
            # A placeholder stands for no token; any will do, its row is never looked at.
            token_ids += [max(token_id, 0) for token_id in drafted]
            logits_at += range(len(token_ids) - len(drafted) - 1, len(token_ids))
    return token_ids, logits_at
