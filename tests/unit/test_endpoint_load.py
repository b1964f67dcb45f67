"""The endpoint under load, on real sockets: many streams, clients and engines that misbehave."""

from __future__ import annotations

import endpoint_checks as checks
import pytest


def test_200_streams_at_once_are_neither_lost_mixed_nor_cut() -> None:
    checks.check_many_streams(200)


def test_clients_that_vanish_give_back_what_they_held() -> None:
    checks.check_clients_that_vanish(40)


@pytest.mark.parametrize("seed", range(4))
def test_an_executor_that_throws_at_a_random_step(seed: int) -> None:
    checks.check_random_failures(seed)


def test_slow_readers_hold_up_nobody_and_cost_little() -> None:
    checks.check_slow_readers()
