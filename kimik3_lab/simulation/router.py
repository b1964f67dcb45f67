"""Which replica gets a request: in turn, the least loaded, or the one that knows its beginning.

Needs the standard library. Used by :mod:`kimik3_lab.simulation.fleet`; lesson 12 compares them.

A router decides when a request arrives and cannot take it back. It does not know how long the
answer will be (it expects the mean so far), nor what a replica's cache holds (it remembers what it
has sent there, as much as the cache could hold). How busy a replica is it reads from its book
(:mod:`kimik3_lab.simulation.load_estimate`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from kimik3_lab.benchmark.prefix_lru import PrefixLru
from kimik3_lab.simulation.load_estimate import Pace, ReplicaLoad
from kimik3_lab.simulation.requests import SimulationRequest

__all__ = ["LeastLoaded", "PrefixAware", "RoundRobin", "Router", "RouterName", "Routing", "route"]

RouterName = Literal["round-robin", "least-loaded", "prefix-aware"]
#: What an answer is expected to have before the first was seen.
_FIRST_GUESS = 256.0


@dataclass
class Replica:
    """What a router knows of a replica: its load, and prefixes that it was sent."""

    load: ReplicaLoad
    prefixes: PrefixLru

    def new_tokens(self, request: SimulationRequest) -> int:
        """Prompt tokens that it must compute, as far as is known; the last one always."""
        if request.hash_ids is None:
            return request.prompt_tokens
        known = self.prefixes.match(request.hash_ids) * request.hash_block_size
        return request.prompt_tokens - min(known, request.prompt_tokens - 1)


class Router(ABC):
    """Chooses replicas."""

    @abstractmethod
    def choose(
        self, request: SimulationRequest, replicas: Sequence[Replica], expected_output: float
    ) -> int:
        """Return the number of the replica that gets ``request`` at its ``arrival_s``."""


class RoundRobin(Router):
    """One after the other, whatever they do."""

    def __init__(self) -> None:
        self._next = 0

    def choose(
        self, request: SimulationRequest, replicas: Sequence[Replica], expected_output: float
    ) -> int:
        """See :class:`Router`."""
        chosen = self._next % len(replicas)
        self._next = chosen + 1
        return chosen


class LeastLoaded(Router):
    """Where the request would end first, with its whole prompt to compute."""

    def choose(
        self, request: SimulationRequest, replicas: Sequence[Replica], expected_output: float
    ) -> int:
        """See :class:`Router`. Of equal ones the first is taken."""
        now, prompt = request.arrival_s, request.prompt_tokens
        waits = [r.load.finish_s(now, prompt, expected_output) for r in replicas]
        return waits.index(min(waits))


class PrefixAware(Router):
    """Where the request would end first, with what is known of its prompt left out.

    So a replica that has the prefix is taken unless the others are so much less busy that computing
    it anew is quicker.
    """

    def choose(
        self, request: SimulationRequest, replicas: Sequence[Replica], expected_output: float
    ) -> int:
        """See :class:`Router`. Of equal ones the one that was sent least is taken."""
        now = request.arrival_s
        waits = [
            (r.load.finish_s(now, r.new_tokens(request), expected_output), len(r.prefixes))
            for r in replicas
        ]
        return waits.index(min(waits))


_ROUTERS: dict[RouterName, type[Router]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-aware": PrefixAware,
}


@dataclass
class Routing:
    """Who got what.

    Attributes
    ----------
    shares
        Requests of each replica, in order of arrival.
    prompt_tokens, expected_hits
        Prompt tokens of all requests, and those of them that the router takes for cached.
    expected_e2e_s
        Mean latency by the router's book. Compare it with the simulated one before trusting a
        router that decides by load.
    """

    shares: list[list[SimulationRequest]]
    prompt_tokens: int = 0
    expected_hits: int = 0
    expected_e2e_s: float = 0.0
    _count: int = field(default=0, repr=False)

    @property
    def expected_hit_ratio(self) -> float:
        """Share of the prompt tokens that the router takes for cached."""
        return self.expected_hits / self.prompt_tokens if self.prompt_tokens else 0.0


def route(
    requests: Iterable[SimulationRequest],
    router: RouterName | Router,
    num_replicas: int,
    pace: Pace,
    *,
    index_blocks: int = 0,
) -> Routing:
    """Send requests to replicas, in order of arrival.

    Parameters
    ----------
    requests
        Sorted by ``arrival_s``.
    router
        A router, or the name of one.
    num_replicas
        Replicas, all alike.
    pace
        How fast one of them is.
    index_blocks
        Names of blocks that are remembered for each replica; 0 if replicas cache nothing. This
        bounds the memory of the router.

    Raises
    ------
    ValueError
        If there is no such router, or no replica.

    Examples
    --------
    >>> pace = Pace(1e-4, (0.01,), batches=(1,))
    >>> asked = [SimulationRequest(f"r{i}", 0.0, 1024, 10, (i % 2, 7 + i % 2)) for i in range(6)]
    >>> [len(share) for share in route(asked, "round-robin", 4, pace).shares]
    [2, 2, 1, 1]
    """
    if num_replicas < 1:
        raise ValueError(f"num_replicas must be at least 1, got {num_replicas}")
    if isinstance(router, str):
        if router not in _ROUTERS:
            raise ValueError(
                f"router must be one of {', '.join(get_args(RouterName))}, got {router!r}"
            )
        router = _ROUTERS[router]()
    replicas = [Replica(ReplicaLoad(pace), PrefixLru(index_blocks)) for _ in range(num_replicas)]
    routing = Routing([[] for _ in replicas])
    outputs, expected = 0, _FIRST_GUESS
    for request in requests:
        chosen = router.choose(request, replicas, expected)
        replica = replicas[chosen]
        routing.shares[chosen].append(request)
        new_tokens = replica.new_tokens(request)
        # The book follows what really happens, so it knows the length of the answer.
        seconds = replica.load.send(request.arrival_s, new_tokens, request.output_tokens)
        if request.hash_ids is not None and index_blocks:
            replica.prefixes.add(request.hash_ids)
        routing._count += 1
        routing.prompt_tokens += request.prompt_tokens
        routing.expected_hits += request.prompt_tokens - new_tokens
        routing.expected_e2e_s += (seconds - routing.expected_e2e_s) / routing._count
        outputs += request.output_tokens
        expected = outputs / routing._count
    return routing
