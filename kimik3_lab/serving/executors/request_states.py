"""The executor's copies of the requests: tokens, seats and block tables.

Needs torch through the cache. Lesson 10 uses it inside the executor. In vLLM this is
``vllm/v1/worker/gpu/states.py`` and ``block_table.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kimik3_lab.serving.executors.drafts import Draft
from kimik3_lab.serving.executors.kda_states import KdaStates
from kimik3_lab.serving.executors.paged_cache import PagedCache
from kimik3_lab.serving.executors.random_stream import RandomStream
from kimik3_lab.serving.outputs import SchedulerOutput
from kimik3_lab.serving.request import SamplingParams

__all__ = ["RequestState", "RequestStates"]


@dataclass(slots=True)
class RequestState:
    """The executor's copy of a request (vLLM: ``CachedRequestState``).

    ``slot`` is its row in the block table, None while it has no seat; ``block_ids`` has a list for
    each attention group; ``draft`` is what was proposed to it last. The first ``num_given`` tokens
    came with the plan that gave it its seat, the others were sampled here.
    """

    token_ids: list[int]
    sampling_params: SamplingParams
    stream: RandomStream | None
    slot: int | None = None
    block_ids: list[list[int]] = field(default_factory=list)
    draft: Draft | None = None
    num_given: int = 0


class RequestStates:
    """All requests that have not ended.

    Parameters
    ----------
    cache : PagedCache
        Its block table is kept up to date.
    states : KdaStates
        Told who begins, goes on and ends.
    max_num_seqs : int
        Seats.

    Attributes
    ----------
    seated : list of (int, int)
        Seats that the last plan gave away, with the tokens that were found for each.
    """

    def __init__(self, cache: PagedCache, states: KdaStates, max_num_seqs: int) -> None:
        self.cache, self.states = cache, states
        self.max_num_seqs = max_num_seqs
        # Otherwise the scheduler hands out no blocks for states, and a seat has rows of its own.
        self._has_state_groups = states.cache_config.num_kda_groups > 0
        self._requests: dict[str, RequestState] = {}
        self._free_slots = list(reversed(range(max_num_seqs)))
        self.seated: list[tuple[int, int]] = []

    def __getitem__(self, req_id: str) -> RequestState:
        return self._requests[req_id]

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_free_slots(self) -> int:
        """Seats that nobody has."""
        return len(self._free_slots)

    def update(self, output: SchedulerOutput) -> dict[str, int]:
        """Follow the scheduler's news. Returns each scheduled request's first token of the step.

        Raises
        ------
        RuntimeError
            If there is no seat left.
        """
        self.seated = []
        self._leave(output.preempted_req_ids)
        self._leave(output.finished_req_ids)
        for req_id in output.finished_req_ids:
            self._requests.pop(req_id, None)

        starts: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            params = new.sampling_params
            stream = RandomStream.for_request(params)
            self._requests[new.req_id] = RequestState(list(new.prompt_token_ids), params, stream)
            self._sit_down(new.req_id, new.block_ids, new.num_computed_tokens)
            starts[new.req_id] = new.num_computed_tokens
        for cached in output.scheduled_cached_reqs:
            req_id, blocks = cached.req_id, cached.new_block_ids
            if cached.resumed_from_preemption:
                assert cached.all_token_ids is not None
                self._requests[req_id].token_ids = list(cached.all_token_ids)
                self._sit_down(req_id, blocks, cached.num_computed_tokens)
            else:
                self._add_pages(self._requests[req_id], blocks)
                if self._has_state_groups:
                    self.states.extend(req_id, blocks[self.cache.num_attention_groups :])
            starts[req_id] = cached.num_computed_tokens
        return starts

    def _sit_down(
        self, req_id: str, block_ids: tuple[list[int], ...], num_computed_tokens: int
    ) -> None:
        """Give a request a seat and its tables."""
        if not self._free_slots:
            raise RuntimeError(
                f"no free slot for request {req_id}: all max_num_seqs={self.max_num_seqs} are "
                "taken; make the executor with the scheduler's max_num_seqs"
            )
        request, pages = self._requests[req_id], self.cache.num_attention_groups
        request.slot, request.draft = self._free_slots.pop(), None
        request.num_given = len(request.token_ids)
        self.seated.append((request.slot, num_computed_tokens))
        request.block_ids = [[] for _ in range(pages)]
        self._add_pages(request, block_ids)
        if self._has_state_groups:
            self.states.begin(req_id, block_ids[pages:], num_computed_tokens)
        else:
            size = 1 + self.cache.num_scratch
            rows = list(range(request.slot * size, (request.slot + 1) * size))
            self.states.begin(req_id, [rows], num_computed_tokens)

    def _add_pages(self, request: RequestState, block_ids: tuple[list[int], ...]) -> None:
        assert request.slot is not None
        for group, table in enumerate(request.block_ids):
            self.cache.set_blocks(request.slot, len(table), block_ids[group], group=group)
            table += block_ids[group]

    def _leave(self, req_ids: Iterable[str]) -> None:
        """Take seats back. A request that failed before it was heard of has none."""
        for req_id in req_ids:
            request = self._requests.get(req_id)
            if request is not None and request.slot is not None:
                self._free_slots.append(request.slot)
                request.slot = None
                self.states.drop(req_id)
