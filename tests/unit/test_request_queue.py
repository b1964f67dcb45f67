"""Who waits, in which order."""

from __future__ import annotations

import random
import time

from kimik3_lab.serving import Request
from kimik3_lab.serving.request_queue import FCFSRequestQueue, PriorityRequestQueue


def request(name: str, priority: int = 0, arrival_time: float = 0.0) -> Request:
    return Request(name, [5], priority=priority, arrival_time=arrival_time)


def names(queue: object) -> list[str]:
    return [r.request_id for r in queue]


def test_first_come_first_served_and_the_preempted_before_all() -> None:
    queue = FCFSRequestQueue()
    for name in "abc":
        queue.add_request(request(name))
    first = queue.pop_request()
    assert first.request_id == "a"
    queue.prepend_request(first)
    assert names(queue) == ["a", "b", "c"]
    assert queue.remove_request(first) and not queue.remove_request(first)
    assert queue.peek_request().request_id == "b"
    assert len(queue) == 2


def test_priority_then_arrival_then_id() -> None:
    queue = PriorityRequestQueue()
    for r in (request("d", 1), request("c", 0, 2.0), request("b", 0, 1.0), request("a", 0, 2.0)):
        queue.add_request(r)
    assert names(queue) == ["b", "a", "c", "d"]
    assert [queue.pop_request().request_id for _ in range(4)] == ["b", "a", "c", "d"]
    assert len(queue) == 0


def test_a_preempted_request_goes_back_to_its_place() -> None:
    queue = PriorityRequestQueue()
    late, early = request("late", 1), request("early", 0)
    queue.add_request(early)
    queue.prepend_request(late)
    assert names(queue) == ["early", "late"]


def test_who_left_does_not_come_to_the_front() -> None:
    queue, rng = PriorityRequestQueue(), random.Random(0)
    alive = {}
    for i in range(300):
        r = request(str(i), rng.randint(0, 3), float(rng.randint(0, 3)))
        queue.add_request(r)
        alive[r.request_id] = r
        if rng.random() < 0.4:
            gone = alive.pop(rng.choice(sorted(alive)))
            assert queue.remove_request(gone)
    expected = sorted(alive.values(), key=lambda r: (r.priority, r.arrival_time, r.request_id))
    assert [queue.pop_request() for _ in range(len(queue))] == expected


def test_an_id_may_come_back() -> None:
    queue = PriorityRequestQueue()
    first, second = request("a", 0), request("a", 2)
    queue.add_request(first)
    queue.add_request(request("b", 1))
    queue.remove_request(first)
    queue.add_request(second)
    assert queue.pop_request().request_id == "b"
    assert queue.pop_request() is second


def test_a_long_queue_costs_no_more_at_its_front() -> None:
    def seconds(length: int) -> float:
        queue = PriorityRequestQueue()
        for i in range(length):
            queue.add_request(request(str(i)))
        start = time.process_time()
        for _ in range(2000):
            queue.peek_request()
        return time.process_time() - start

    seconds(10)
    assert seconds(20_000) < 20 * min(seconds(20) for _ in range(3)) + 0.01
