"""A scheduler of our own inside real vLLM: the shortest waiting prompt goes first.

Needs vLLM, but imports without it. It is run with 0.32.0 on the CPU, and was read against 0.27.1
and 0.33.0. Lesson 13 runs it::

    k3lab vllm-cpu serve -- --max-num-seqs 1
        --scheduler-cls kimik3_lab.vllm_cpu.shortest_first.ShortestPromptFirst

vLLM takes any class that it can import by name (``SchedulerConfig.get_scheduler_cls``) and warns
that the interface is not public. On a GPU the name is ``AsyncShortestPromptFirst``. Both derive
from vLLM's own scheduler, whose queue is the only thing exchanged: budget, cache and preemption
stay vLLM's. A queue decides about *order*, and order decides no token: each request's tokens depend
on its own prompt alone.

Short prompts first lowers the mean wait, as in any queue. The price is that a long prompt may wait
for ever while short ones keep coming, so a prompt that has waited for :data:`MAX_OVERTAKEN` others
goes next whatever its length.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib import import_module
from typing import Any

__all__ = ["MAX_OVERTAKEN", "ShortestFirstQueue"]

#: Name of a scheduler: module and name of the class of vLLM that it derives from. The CPU build
#: plans a step when the last one has ended; on GPUs the next step is planned while one runs, and a
#: class without that would lose it.
_BASES = {
    "ShortestPromptFirst": ("vllm.v1.core.sched.scheduler", "Scheduler"),
    "AsyncShortestPromptFirst": ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler"),
}
#: Requests that may overtake one that came before them.
MAX_OVERTAKEN = 16


class ShortestFirstQueue:
    """vLLM's ``RequestQueue`` in another order; holds anything with ``num_prompt_tokens``.

    A request that was put back (preempted, or it could not start yet) gets the place that it has by
    its length, and counts anew who overtakes it.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> queue = ShortestFirstQueue()
    >>> for length in (300, 20, 100):
    ...     queue.add_request(SimpleNamespace(num_prompt_tokens=length))
    >>> [queue.pop_request().num_prompt_tokens for _ in range(3)]
    [20, 100, 300]
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Any]] = []
        self._arrivals = itertools.count()
        self._popped = 0
        #: Requests that had been popped when one came: its age is what was popped since.
        self._came: dict[int, int] = {}

    def add_request(self, request: Any) -> None:
        """Put a request into its place."""
        # The number breaks ties: first come, first served, and requests are never compared.
        number = next(self._arrivals)
        heapq.heappush(self._heap, (request.num_prompt_tokens, number, request))
        self._came.setdefault(id(request), self._popped)

    def _first(self) -> tuple[int, int, Any]:
        if not self._heap:
            raise IndexError("no request is waiting: look at len() before you take one")
        oldest = min(self._heap, key=lambda entry: self._came[id(entry[2])])
        if self._popped - self._came[id(oldest[2])] >= MAX_OVERTAKEN:
            return oldest
        return self._heap[0]

    def peek_request(self) -> Any:
        """Return the request that goes next, and leave it there."""
        return self._first()[2]

    def pop_request(self) -> Any:
        """Take the request that goes next."""
        entry = self._first()
        self._take_out([entry[2]])
        self._popped += 1
        return entry[2]

    def prepend_request(self, request: Any) -> None:
        """Put one back: its place is by length, as for a new one."""
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Put several back."""
        for request in requests:
            self.add_request(request)

    def remove_request(self, request: Any) -> None:
        """Forget a request that was aborted."""
        if all(entry[2] is not request for entry in self._heap):
            raise ValueError(f"the request is not waiting here: {request!r}")
        self._take_out([request])

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Forget several; those that are not here do not matter."""
        self._take_out(requests)

    def _take_out(self, requests: Iterable[Any]) -> None:
        gone = {id(request) for request in requests}
        self._heap = [entry for entry in self._heap if id(entry[2]) not in gone]
        heapq.heapify(self._heap)
        for key in gone:
            self._came.pop(key, None)

    def __bool__(self) -> bool:
        return bool(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Any]:
        return iter([entry[2] for entry in sorted(self._heap, key=lambda entry: entry[:2])])


@lru_cache
def _scheduler(name: str, module: str, base: str) -> type:
    class WithShortestFirst(getattr(import_module(module), base)):  # type: ignore[misc]
        """vLLM's scheduler, with another queue for what waits."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.waiting = ShortestFirstQueue()

    WithShortestFirst.__module__ = __name__
    WithShortestFirst.__name__ = WithShortestFirst.__qualname__ = name
    return WithShortestFirst


def __getattr__(name: str) -> Any:
    # When somebody asks, because the base classes need vLLM.
    if name in _BASES:
        return _scheduler(name, *_BASES[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
