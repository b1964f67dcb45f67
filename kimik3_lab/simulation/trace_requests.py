"""From a trace to what the simulator takes, one request at a time.

Needs the standard library and the benchmark's traces. Used by ``k3lab simulate``, ``k3lab plan``
and lesson 12.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

from kimik3_lab.benchmark.trace_request import BLOCK_TOKENS, TraceError, TraceRequest
from kimik3_lab.simulation.requests import SimulationRequest

__all__ = ["fixed_lengths", "to_simulation_requests"]


def to_simulation_requests(
    requests: Iterable[TraceRequest], *, block_tokens: int = BLOCK_TOKENS
) -> Iterator[SimulationRequest]:
    """Turn requests of a trace into simulated ones, as they come.

    Parameters
    ----------
    requests
        In order of arrival.
    block_tokens
        Tokens that one of the ``hash_ids`` stands for. A trace that names full blocks only gets a
        name of its own for the rest of each prompt.

    Examples
    --------
    >>> [asked] = to_simulation_requests([TraceRequest(0.5, 600, 20, (7, 8))])
    >>> asked.request_id, asked.arrival_s, asked.prompt_tokens, asked.hash_ids
    ('r0', 0.5, 600, (7, 8))
    """
    # Names that no trace has, but small enough for the simulator.
    alone = 1 << 39
    for number, request in enumerate(requests):
        names = request.hash_ids
        if names is not None and len(names) * block_tokens < request.input_tokens:
            names = (*names, alone + number)
        yield SimulationRequest(
            f"r{number}",
            request.timestamp,
            request.input_tokens,
            request.output_tokens,
            names,
            block_tokens,
        )


def fixed_lengths(
    rate: float, input_tokens: int, output_tokens: int, duration_s: float, *, seed: int = 0
) -> Iterator[TraceRequest]:
    """Generate requests of one length that arrive as a Poisson process, sharing nothing.

    Examples
    --------
    >>> asked = list(fixed_lengths(2.0, 8000, 1000, 100.0))
    >>> 150 < len(asked) < 250, asked[0].input_tokens
    (True, 8000)
    """
    if not (rate > 0 and duration_s > 0):
        raise TraceError(f"rate and duration_s must be above 0, got {rate!r} and {duration_s!r}")
    rng, moment = random.Random(f"{seed}/fixed"), 0.0
    while (moment := moment + rng.expovariate(rate)) < duration_s:
        yield TraceRequest(moment, input_tokens, output_tokens)
