"""What a request met before its first token."""

from __future__ import annotations

import pytest

from kimik3_lab.serving.presets import MAIN_2026_09_13, V0_27_1
from kimik3_lab.simulation import SimulationRequest, SimulationSpec, simulate_arrivals
from kimik3_lab.simulation.first_token import FirstToken, watch_first_token

PROBE = SimulationRequest("probe", 0.5, 8000, 20)


def watch(spec: SimulationSpec, *before: SimulationRequest) -> FirstToken:
    return watch_first_token(spec, [*before, PROBE], "probe")


def test_alone_it_waits_for_nobody() -> None:
    found = watch(SimulationSpec(MAIN_2026_09_13))
    assert (found.steps, found.tokens_per_step) == (1, 8000.0)
    assert (found.idle_s, found.neighbour_tokens, found.preemptions) == (0.0, 0.0, 0)
    assert found.seats_taken == 1
    assert found.queue_s < 0.05  # the way from the client to the scheduler


def test_the_parts_add_up_to_what_the_client_saw() -> None:
    spec = SimulationSpec(V0_27_1)
    requests = [SimulationRequest("long", 0.0, 30_000, 20), PROBE]
    found = watch_first_token(spec, requests, "probe")
    seen = simulate_arrivals(spec, requests, keep_records=True).records
    assert seen is not None and seen[1].ttft == found.ttft_s
    assert found.queue_s + found.prefill_s == pytest.approx(found.ttft_s)


def test_a_long_prompt_takes_the_step_while_seats_are_free() -> None:
    found = watch(SimulationSpec(MAIN_2026_09_13), SimulationRequest("long", 0.0, 100_000, 20))
    assert found.queue_s > 5 * found.prefill_s
    assert found.neighbour_tokens > 8000
    assert found.seats_taken < found.seats


def test_seats_run_out() -> None:
    crowd = [SimulationRequest(f"r{i}", 0.0, 500, 300) for i in range(4)]
    found = watch(SimulationSpec(MAIN_2026_09_13, scheduler={"max_num_seqs": 4}), *crowd)
    assert found.queue_s > 0.5 and found.neighbour_tokens < 100
    assert (found.seats_taken, found.seats) == (4, 4)


def test_a_hit_and_a_preemption() -> None:
    names = tuple(range(16))
    first = SimulationRequest("first", 0.0, 8000, 2, names)
    again = SimulationRequest("again", 5.0, 8000, 20, names)
    spec = SimulationSpec(MAIN_2026_09_13, cache={"enable_prefix_caching": True})
    assert watch_first_token(spec, [first, again], "again").cached_tokens > 4000
    assert watch_first_token(spec, [first, again], "first").cached_tokens == 0

    crowd = [SimulationRequest(f"r{i}", 0.01 * i, 650 + 25 * i, 600) for i in range(8)]
    long = SimulationRequest("probe", 1.0, 40_000, 20)
    tight = SimulationSpec(V0_27_1, num_blocks=299)
    lost = watch_first_token(tight, [*crowd, long], "probe")
    roomy = watch_first_token(SimulationSpec(V0_27_1, num_blocks=400), [*crowd, long], "probe")
    assert (lost.preemptions, roomy.preemptions) == (1, 0)
    assert lost.queue_s == pytest.approx(roomy.queue_s)  # the first wait alone is counted
    assert lost.steps > roomy.steps and lost.kv_cache_usage > 0.99


def test_who_is_not_there_or_got_nothing_is_refused() -> None:
    spec = SimulationSpec(MAIN_2026_09_13, max_model_len=4000)
    with pytest.raises(ValueError, match="no request 'other' to watch; there are probe"):
        watch_first_token(spec, [PROBE], "other")
    with pytest.raises(ValueError, match=r"request probe got no token: .*max_model_len"):
        watch(spec)
