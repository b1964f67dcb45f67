"""Copies of the KDA states of running requests, out of the cache and in the reference's layout.

Needs torch. Part of :mod:`~kimik3_lab.serving.executors.state_probe`.

Who knows where a state is depends on how steps are executed: the host does if each is answered at
once. With steps in flight only the device does, since that depends on how many drafts it accepted.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kimik3_lab.serving.executors.request_states import RequestState
from kimik3_lab.serving.executors.torch_executor import TorchExecutor
from kimik3_lab.serving.outputs import CachedRequestData, NewRequestData, SchedulerOutput

__all__ = ["LayerState", "ScheduledRows", "StateCopy", "read_state", "scheduled_rows"]


class LayerState(NamedTuple):
    """State of one KDA layer in the reference's layout: ``[H, K, V]``, and ``[3P, kernel - 1]``."""

    recurrent: Tensor
    conv: Tensor


class ScheduledRows(NamedTuple):
    """Where a request's rows of a step begin, and the drafts among them (-1: none)."""

    req_id: str
    start: int
    drafts: list[int]


class StateCopy(NamedTuple):
    """States of a request behind a step, by layer: after ``stop`` tokens of ``request``."""

    rows: ScheduledRows
    request: RequestState
    stop: int
    layers: dict[int, LayerState]

    @classmethod
    def of(cls, executor: TorchExecutor, rows: ScheduledRows) -> StateCopy:
        """Read them."""
        return cls(rows, executor.requests[rows.req_id], *read_state(executor, rows.req_id))


def scheduled_rows(executor: TorchExecutor, plan: SchedulerOutput) -> list[ScheduledRows]:
    """Say what a step is to compute, before it is executed.

    A plan that was made with a step in flight starts as if all drafts had been accepted, and has
    placeholders for those of its own. The device knows better.
    """
    scheduled: list[CachedRequestData | NewRequestData]
    scheduled = [*plan.scheduled_cached_reqs, *plan.scheduled_new_reqs]
    rows = []
    for data in scheduled:
        start = data.num_computed_tokens
        drafts = plan.scheduled_spec_decode_tokens.get(data.req_id, [])
        goes_on = isinstance(data, CachedRequestData) and not data.resumed_from_preemption
        if goes_on and executor.async_steps.is_used:
            tables, slot = executor.async_steps.tables, executor.requests[data.req_id].slot
            start = int(tables.num_computed[slot])
            drafts = tables.drafts[slot, : len(drafts)].tolist()
        rows.append(ScheduledRows(data.req_id, start, drafts))
    return rows


def read_state(executor: TorchExecutor, req_id: str) -> tuple[int, dict[int, LayerState]]:
    """Copy a running request's states out of the cache, between two steps.

    Returns
    -------
    num_tokens : int
        Tokens that they have read.
    layers : dict of int to LayerState
        By layer.

    Raises
    ------
    ValueError
        If the request is not running, or its last verification is kept as records: then no row
        holds its state yet.
    """
    states, cache = executor.states, executor.cache
    running = states._running.get(req_id)
    if running is None:
        raise ValueError(f"request {req_id!r} is not running: it has no state between two steps")
    num_tokens, num_accepted = running.num_tokens, running.num_accepted
    if executor.async_steps.is_used:
        tables, slot = executor.async_steps.tables, executor.requests[req_id].slot
        num_tokens, num_accepted = int(tables.num_computed[slot]), int(tables.num_accepted[slot])
    offset = num_accepted - 1
    if offset and not cache.num_scratch:
        raise ValueError(f"request {req_id!r} keeps records: commit them first")
    layers = {}
    for layer_id in executor.model.config.kda_layer_ids:
        memory = cache.kda_layer(layer_id)
        table = running.tables[memory.group]
        state = memory.recurrent[table[running.column + offset]]
        window = memory.conv[table[running.column], :, offset : offset + cache.history]
        layers[layer_id] = LayerState(state.transpose(-1, -2).clone(), window.clone())
    return num_tokens, layers
