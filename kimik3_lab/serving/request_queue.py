"""Who waits, and in which order they are admitted.

Needs the standard library only. Lesson 08 compares the two orders. Names are vLLM's, see
``vllm/v1/core/sched/request_queue.py``. Here anyone can leave in constant time (an abort), and the
order of a queue of ten thousand costs nothing until somebody is taken from its front.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from kimik3_lab.serving.request import Request
from kimik3_lab.serving.scheduler_config import Policy

__all__ = ["FCFSRequestQueue", "PriorityRequestQueue", "RequestQueue", "create_request_queue"]


class RequestQueue(Protocol):
    """What the scheduler needs of a queue."""

    def add_request(self, request: Request) -> None:
        """Put a new request in its place."""

    def prepend_request(self, request: Request) -> None:
        """Put a request back that has been taken out before."""

    def peek_request(self) -> Request:
        """Whose turn it is. The queue must not be empty."""

    def pop_request(self) -> Request:
        """Take out whose turn it is. The queue must not be empty."""

    def remove_request(self, request: Request) -> bool:
        """Take out a request wherever it stands; False if it is not here."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class FCFSRequestQueue:
    """First come, first served; who was preempted comes before all others.

    >>> queue = FCFSRequestQueue()
    >>> queue.add_request(Request("a", [5]))
    >>> queue.prepend_request(Request("b", [5]))
    >>> [request.request_id for request in queue]
    ['b', 'a']
    """

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def add_request(self, request: Request) -> None:
        """See :class:`RequestQueue`."""
        self._requests[request.request_id] = request

    def prepend_request(self, request: Request) -> None:
        """See :class:`RequestQueue`."""
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek_request(self) -> Request:
        """See :class:`RequestQueue`."""
        return next(iter(self._requests.values()))

    def pop_request(self) -> Request:
        """See :class:`RequestQueue`."""
        return self._requests.popitem(last=False)[1]

    def remove_request(self, request: Request) -> bool:
        """See :class:`RequestQueue`."""
        return self._requests.pop(request.request_id, None) is not None

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())


class PriorityRequestQueue:
    """The lowest ``priority`` first, then the earliest ``arrival_time``, then the smallest id.

    A preempted request goes back to its place in this order, not to the front.

    >>> queue = PriorityRequestQueue()
    >>> queue.add_request(Request("a", [5], priority=1))
    >>> queue.add_request(Request("b", [5], priority=0))
    >>> queue.pop_request().request_id
    'b'
    """

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        # Entries of requests that have left stay until they come to the front.
        self._heap: list[tuple[int, float, str, int, Request]] = []
        self._num_added = 0

    def add_request(self, request: Request) -> None:
        """See :class:`RequestQueue`."""
        self._requests[request.request_id] = request
        self._num_added += 1
        order = request.priority, request.arrival_time, request.request_id, self._num_added
        heapq.heappush(self._heap, (*order, request))

    prepend_request = add_request

    def peek_request(self) -> Request:
        """See :class:`RequestQueue`."""
        while self._requests.get(self._heap[0][2]) is not self._heap[0][-1]:
            heapq.heappop(self._heap)
        return self._heap[0][-1]

    def pop_request(self) -> Request:
        """See :class:`RequestQueue`."""
        request = self.peek_request()
        heapq.heappop(self._heap)
        del self._requests[request.request_id]
        return request

    def remove_request(self, request: Request) -> bool:
        """See :class:`RequestQueue`."""
        return self._requests.pop(request.request_id, None) is not None

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        waiting = self._requests.values()
        return iter(sorted(waiting, key=lambda r: (r.priority, r.arrival_time, r.request_id)))


def create_request_queue(policy: Policy) -> RequestQueue:
    """Make the queue of a policy."""
    return PriorityRequestQueue() if policy == "priority" else FCFSRequestQueue()
