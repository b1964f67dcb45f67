"""Routers and fleets: who gets what, and that nothing depends on processes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimik3_lab.benchmark.prefix_lru import PrefixLru
from kimik3_lab.benchmark.synthetic_traces import synthetic_trace
from kimik3_lab.benchmark.traces import TraceRequest
from kimik3_lab.simulation import SimulationError, SimulationRequest, SimulationSpec
from kimik3_lab.simulation.arrivals import simulate_arrivals
from kimik3_lab.simulation.fleet import simulate_fleet
from kimik3_lab.simulation.load_estimate import Pace, ReplicaLoad
from kimik3_lab.simulation.router import (
    LeastLoaded,
    PrefixAware,
    Replica,
    RoundRobin,
    Router,
    Routing,
    route,
)
from kimik3_lab.simulation.switches import find_preset
from kimik3_lab.simulation.trace_requests import fixed_lengths, to_simulation_requests

#: A tenth of a millisecond for each prompt token, 10 ms for each token of a request that is alone.
PACE = Pace(1e-4, (0.01, 0.011, 0.02), batches=(1, 2, 16))
CACHING = SimulationSpec(find_preset("look-ahead-cap"))


def asked(number: int, arrival: float, prompt: int, names: tuple[int, ...] | None = None,
          output: int = 100) -> SimulationRequest:  # fmt: skip
    return SimulationRequest(f"r{number}", arrival, prompt, output, names)


def talk(turns: int = 40, sessions: int = 6) -> list[SimulationRequest]:
    """Sessions that take turns; each turn adds two blocks to a prompt that only it has."""
    return [
        asked(i, 0.5 * i, 1024 * (1 + i // sessions),
              tuple(1000 * (i % sessions) + b for b in range(2 * (1 + i // sessions))))
        for i in range(turns)
    ]  # fmt: skip


def places(routing: Routing) -> dict[str, int]:
    return {r.request_id: i for i, share in enumerate(routing.shares) for r in share}


# -- the book --------------------------------------------------------------------------------------


def test_the_book_of_a_replica() -> None:
    load = ReplicaLoad(PACE)
    assert load.finish_s(5.0, 8000, 100) == pytest.approx(0.8 + 1.0)
    assert load.send(5.0, 8000, 100) == pytest.approx(1.8)
    assert (load.in_flight(5.0), load.in_flight(6.79), load.in_flight(6.81)) == (1, 1, 0)
    assert load.prefill_wait_s(5.3) == pytest.approx(0.5)
    assert load.prefill_wait_s(9.0) == 0.0
    # Prompts took 0.8 s of the last minute, so that answers are slower by that share.
    load = ReplicaLoad(PACE)
    load.send(0.0, 8000, 100)
    share = load.prefill_share(0.0)
    assert share == pytest.approx(0.8 / 60)
    assert load.finish_s(0.0, 1000, 100) == pytest.approx(0.8 + 0.1 + 1.1 / (1 - share))
    assert load.prefill_share(120.0) == pytest.approx(share * 2.718281828**-2)


def test_pace_between_and_beyond_its_batches() -> None:
    assert PACE.output_token_s(1) == 0.01
    assert PACE.output_token_s(9) == pytest.approx((0.011 + 0.02) / 2)
    assert PACE.output_token_s(32) == pytest.approx(0.04)
    pace = Pace.of(CACHING)
    assert list(pace.token_s) == sorted(pace.token_s)
    assert 0 < pace.row_s <= pace.prefill_token_s < pace.token_s[0] < pace.step_s


# -- routers ---------------------------------------------------------------------------------------


def test_round_robin_goes_round() -> None:
    routing = route([asked(i, 0.0, 10) for i in range(7)], "round-robin", 3, PACE)
    assert [places(routing)[f"r{i}"] for i in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_least_loaded_avoids_who_is_busy() -> None:
    routing = route([asked(0, 0.0, 90_000), *(asked(i, 0.1 * i, 100) for i in range(1, 9))],
                    "least-loaded", 2, PACE)  # fmt: skip
    assert places(routing)["r0"] == 0
    assert [len(share) for share in routing.shares] == [1, 8]


def test_prefix_aware_keeps_sessions_together() -> None:
    routing = route(talk(), "prefix-aware", 3, PACE, index_blocks=10_000)
    homes = {(int(name[1:]) % 6, place) for name, place in places(routing).items()}
    assert len(homes) == 6
    assert {place for _, place in homes} == {0, 1, 2}
    blind = route(talk(), "round-robin", 4, PACE, index_blocks=10_000)
    assert routing.expected_hit_ratio > 0.7 > 0.6 > blind.expected_hit_ratio


def test_prefix_aware_leaves_a_replica_that_is_too_busy() -> None:
    known = asked(0, 0.0, 2048, (1, 2, 3, 4))
    rush = [asked(i, 3.0, 50_000, tuple(range(100 * i, 100 * i + 98))) for i in (1, 2)]
    again = asked(3, 3.1, 2560, (1, 2, 3, 4, 5))
    # Both replicas are busy for 5 s: the one that knows the prefix is taken.
    both = places(route([known, *rush, again], "prefix-aware", 2, PACE, index_blocks=500))
    assert both["r3"] == both["r0"]
    # With a third one idle, computing 2,560 tokens anew is quicker than waiting.
    third = places(route([known, *rush, again], "prefix-aware", 3, PACE, index_blocks=500))
    assert third["r3"] not in (third["r1"], third["r2"])


def test_a_router_forgets_beyond_its_index() -> None:
    many = [asked(i, float(i), 512 * 20, tuple(range(20 * i, 20 * i + 20))) for i in range(50)]
    again = asked(99, 60.0, 512 * 20, tuple(range(20)))
    assert route([*many, again], "prefix-aware", 2, PACE, index_blocks=10_000).expected_hits > 0
    assert route([*many, again], "prefix-aware", 2, PACE, index_blocks=100).expected_hits == 0
    index = PrefixLru(100)
    for request in many:
        index.add(request.hash_ids)
        assert len(index) <= 100
    with pytest.raises(ValueError, match="at least 0"):
        PrefixLru(-1)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 5), st.integers(1, 20_000), st.integers(1, 300),
                       st.integers(0, 3)), max_size=40),
    st.integers(1, 5),
    st.sampled_from(["round-robin", "least-loaded", "prefix-aware"]),
)  # fmt: skip
def test_every_request_goes_to_one_replica_in_order(rows, replicas, router) -> None:
    moment, requests = 0.0, []
    for number, (gap, prompt, output, family) in enumerate(rows):
        moment += gap
        names = tuple(family * 100 + b for b in range(-(-prompt // 512)))
        requests.append(asked(number, moment, prompt, names, output))
    routing = route(requests, router, replicas, PACE, index_blocks=64)
    assert len(routing.shares) == replicas
    together = sorted((r for share in routing.shares for r in share),
                      key=lambda r: int(r.request_id[1:]))  # fmt: skip
    assert together == requests
    for share in routing.shares:
        assert [r.arrival_s for r in share] == sorted(r.arrival_s for r in share)
    assert 0 <= routing.expected_hits <= max(0, routing.prompt_tokens - len(requests))
    again = route(requests, router, replicas, PACE, index_blocks=64)
    assert again.shares == routing.shares


class _AlwaysTheFirst(Router):
    def choose(self, request: SimulationRequest, replicas: Sequence[Replica], _: float) -> int:
        return 0


class _MostHitsWhateverTheLoad(Router):
    def choose(self, request: SimulationRequest, replicas: Sequence[Replica], _: float) -> int:
        left = [r.new_tokens(request) for r in replicas]
        return left.index(min(left))


class _MostLoaded(LeastLoaded):
    def choose(
        self, request: SimulationRequest, replicas: Sequence[Replica], expected_output: float
    ) -> int:
        now, prompt = request.arrival_s, request.prompt_tokens
        waits = [r.load.finish_s(now, prompt, expected_output) for r in replicas]
        return waits.index(max(waits))


def _is_prefix_aware(router: Router) -> bool:
    """Keeps sessions together, and everybody at work. Eleven sessions do not go round by fours."""
    routing = route(talk(240, 11), router, 4, PACE, index_blocks=10_000)
    counts = [len(share) for share in routing.shares]
    return routing.expected_hit_ratio > 0.8 and min(counts) > 0.4 * max(counts)


@pytest.mark.parametrize(
    "wrong", [RoundRobin, LeastLoaded, _AlwaysTheFirst, _MostHitsWhateverTheLoad, _MostLoaded]
)
def test_wrong_routers_are_caught(wrong: type[Router]) -> None:
    assert _is_prefix_aware(PrefixAware())
    assert not _is_prefix_aware(wrong())


# -- fleets ----------------------------------------------------------------------------------------


def some_load(rate: float = 2.0, duration: float = 15.0) -> list[SimulationRequest]:
    return list(to_simulation_requests(fixed_lengths(rate, 4000, 60, duration, seed=2)))


def figures(fleet) -> tuple:
    sketches = [(s.count, s.total, s.quantile(0.9)) for s in fleet.latencies.values()]
    return fleet.requests_per_replica, fleet.row(), sketches, fleet.utilization


def test_a_fleet_of_one_is_a_replica() -> None:
    load = some_load()
    fleet = simulate_fleet(CACHING, load, replicas=1, seed=3)
    alone = simulate_arrivals(CACHING, load, seed=3)
    assert fleet.latency("ttft_ms", "p90") == alone.latency("ttft_ms", "p90")
    assert fleet.latency("e2e_s") == alone.latency("e2e_s")
    assert fleet.output_tokens_per_s == alone.output_tokens_per_s
    assert fleet.completed == alone.completed == len(load)
    assert fleet.utilization == pytest.approx(alone.utilization)


def test_processes_change_nothing() -> None:
    load = some_load()
    here = simulate_fleet(CACHING, load, replicas=3, router="least-loaded", processes=1)
    apart = simulate_fleet(CACHING, load, replicas=3, router="least-loaded", processes=2,
                           progress=True)  # fmt: skip
    assert figures(here) == figures(apart)
    assert len({r.seed for r in apart.replicas}) == 3


def test_a_fleet_adds_up() -> None:
    load = some_load()
    fleet = simulate_fleet(CACHING, load, replicas=3, processes=1, keep_records=True,
                           warmup_s=2.0, duration_s=14.0)  # fmt: skip
    records = [record for result in fleet.replicas for record in result.records]
    assert fleet.attempted == len(records)
    assert fleet.completed + fleet.cancelled + fleet.refused == fleet.attempted
    inside = [r for result in fleet.replicas for r in result.records
              if r.status == "completed" and result.window.touches(r)]  # fmt: skip
    assert fleet.latencies["e2e_s"].count == len(inside)
    assert fleet.latency("e2e_s") == pytest.approx(sum(r.e2e for r in inside) / len(inside))
    assert fleet.output_tokens_per_s == pytest.approx(
        sum(r.output_tokens_in_window for r in fleet.replicas) / 12.0
    )
    assert 0 < fleet.utilization <= 1
    assert fleet.imbalance >= 1


def test_sharing_pays_and_balancing_pays() -> None:
    trace = synthetic_trace("mooncake-conversation", 120.0, rate_scale=0.5, seed=6)
    trace = [TraceRequest(r.timestamp, min(r.input_tokens, 40_000), min(r.output_tokens, 30),
                          r.hash_ids and r.hash_ids[: -(-min(r.input_tokens, 40_000) // 512)],
                          r.session) for r in trace]  # fmt: skip
    load = list(to_simulation_requests(trace))
    blind, least, aware = (
        simulate_fleet(CACHING, load, replicas=3, router=router, processes=1)
        for router in ("round-robin", "least-loaded", "prefix-aware")
    )
    assert aware.cached_tokens > 1.3 * blind.cached_tokens
    assert least.latency("ttft_ms", "p90") < blind.latency("ttft_ms", "p90")
    # The book is no simulation, but it must not be off by an order of magnitude.
    assert 0.2 < least.expected_e2e_s / least.latency("e2e_s") < 3


def test_what_a_fleet_refuses_and_notes() -> None:
    load = some_load(duration=3.0)
    with pytest.raises(ValueError, match=r"router must be one of round-robin.*'random'"):
        simulate_fleet(CACHING, load, replicas=2, router="random")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_replicas must be at least 1"):
        simulate_fleet(CACHING, load, replicas=0)
    with pytest.raises(ValueError, match="processes must be at least 1"):
        simulate_fleet(CACHING, load, replicas=2, processes=0)
    plain = SimulationSpec(find_preset("main-2026-09-13"))
    fleet = simulate_fleet(plain, load, replicas=20, router="prefix-aware", processes=1)
    assert "prefix caching is off" in fleet.notes[0]
    assert "a replica got no request" in fleet.notes[1]
    assert fleet.completed == len(load)


def test_an_error_of_a_replica_ends_the_fleet() -> None:
    backwards = [asked(0, 1.0, 100), asked(1, 0.5, 100), asked(2, 0.4, 100), asked(3, 0.3, 100)]
    for processes in (1, 2):
        with pytest.raises((ValueError, SimulationError), match="sort the requests"):
            simulate_fleet(CACHING, backwards, replicas=2, processes=processes)
