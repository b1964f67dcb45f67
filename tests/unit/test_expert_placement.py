"""Placements of experts: nothing lost, ranks even, and better the more they know."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimik3_lab.parallel.experts import Copies, check_slots
from kimik3_lab.performance.coverage import skewed_load
from kimik3_lab.performance.expert_placement import (
    ExpertPlacement,
    StepLoad,
    by_load,
    in_order,
    in_turns,
    step_load,
)
from kimik3_lab.performance.expert_tiles import TILED, TileCount, TileShape
from kimik3_lab.performance.layer_record import TwoGpus


@st.composite
def loads(draw):
    ranks = draw(st.integers(1, 6))
    experts = draw(st.integers(ranks, 40))
    load = draw(st.lists(st.integers(0, 1000), min_size=experts, max_size=experts))
    most = experts * (ranks - 1)
    filling = [n for n in range(most + 1) if (experts + n) % ranks == 0]
    return load, ranks, draw(st.sampled_from(filling)) if filling else 0


@settings(max_examples=150, deadline=None)
@given(loads())
def test_every_expert_has_a_place_and_every_rank_as_many(drawn):
    load, ranks, redundant = drawn
    if (len(load) + redundant) % ranks:
        with pytest.raises(ValueError, match="evenly"):
            by_load(load, ranks, redundant=redundant)
        return
    placement = by_load(load, ranks, redundant=redundant)
    assert sum(placement.copies) == len(load) + redundant
    assert len({len(slots) for slots in placement.slots}) == 1
    assert sum(placement.rank_loads(load)) == pytest.approx(sum(load))
    check_slots(placement.slots, len(load), ranks)  # what the ranks themselves ask for


@pytest.mark.parametrize("exponent", [0.3, 0.6, 1.0])
def test_what_each_placement_gains(exponent):
    """Popular experts together are the worst; turns help, load helps more, copies most."""
    load = skewed_load(896, 16, exponent).tolist()
    worst, turns, even = (
        placement.imbalance(load)
        for placement in (in_order(896, 8), in_turns(896, 8), by_load(load, 8))
    )
    copied = by_load(load, 8, redundant=32).imbalance(load)
    assert worst > turns > even > 0.999
    assert copied <= even + 1e-9
    assert copied < 1.003
    if exponent == 0.6:
        assert worst > 3
        assert turns < 1.2


def test_a_copy_goes_to_the_expert_that_needs_it():
    placement = by_load([100, 1, 1, 1, 1, 1], ranks=2, redundant=2)
    assert placement.copies[0] == 2
    assert all(0 in slots for slots in placement.slots)
    assert placement.imbalance([100, 1, 1, 1, 1, 1]) < 1.05


def test_a_forecast_that_is_wrong_helps_nobody():
    counted, real = [8.0] * 4 + [1.0] * 4, [1.0] * 4 + [8.0] * 4
    assert by_load(counted, 2).imbalance(real) == pytest.approx(1.0)
    lopsided = by_load([4, 3, 2, 1], 2)  # 0 and 3 against 1 and 2
    assert lopsided.imbalance([10, 0, 0, 10]) == 2.0


def test_pairs_go_where_the_ranks_compute_them():
    """The ranks of :mod:`kimik3_lab.parallel` and the planner agree on every pair."""
    torch = pytest.importorskip("torch")
    generator = np.random.default_rng(0)
    ids = np.argsort(generator.random((50, 12)), axis=1)[:, :3]
    placement = by_load(np.bincount(ids.ravel(), minlength=12).tolist(), 4, redundant=4)
    expected = placement.ranks_of(ids)
    copies = Copies(placement.slots, 12)
    found = copies.ranks_of(torch.from_numpy(ids), torch.arange(50))
    assert found.tolist() == expected.tolist()
    for rank, slots in enumerate(placement.slots):
        assert set(ids[expected == rank]) <= set(slots)


def test_a_step_waits_for_its_busiest_rank():
    ids = [[0, 1], [0, 1], [0, 2], [0, 3]]
    step = step_load(in_order(4, 2), ids)
    # Tokens of the experts: 4 and 2 on the first rank, one of each on the second; tiles of 8 rows.
    assert step == StepLoad((TileCount(2, 6, 2, 16), TileCount(2, 2, 2, 16)))
    assert (step.pairs, step.experts, step.imbalance) == ((6, 2), (2, 2), 1.5)
    assert step_load(in_order(4, 2), np.zeros((0, 2), dtype=int)).imbalance == 1.0
    copied = step_load(by_load([4, 2, 1, 1], 2, redundant=2), ids)
    assert max(copied.pairs) == 4
    # A copy is read once more: it costs a step that waits for weights,
    assert copied.seconds() > step.seconds()
    # and pays off in one that computes.
    many = step_load(in_order(4, 2), ids * 2000)
    assert step_load(by_load([4, 2, 1, 1], 2, redundant=2), ids * 2000).seconds() < many.seconds()


def test_a_tile_is_chosen_by_the_pairs_of_the_whole_step():
    """49 pairs for each expert of a rank are many, though its own experts got one token each."""
    ids = [[0, 1]] + [[2, 3]] * 48
    own, other = step_load(in_order(4, 2), ids).tiles
    assert own == TileShape.by_rule(98, 2).count([1, 1])
    assert (own.rows, other.rows) == (64, 256)
    # Copies are experts of their rank: with three on each, the tile is a smaller one.
    copied = step_load(by_load([1, 1, 48, 48], 2, redundant=2), ids)
    assert {count.tiles for count in copied.tiles} == {3.0}
    assert max(count.rows for count in copied.tiles) == 3 * 64


@pytest.mark.parametrize("routing", ["skewed", "placed"])
@pytest.mark.parametrize("tokens", [256, 4096])
def test_a_step_is_priced_as_the_layers_on_two_gpus_were(tokens, routing):
    """Lessons 02 and 11 say the same of the same load."""
    (row,) = TwoGpus.load().rows(layer="moe", parallel="ep", tokens=tokens, routing=routing)
    noise = np.random.default_rng(tokens).gumbel(size=(tokens, 896))
    favour = -0.6 * np.log(np.arange(1, 897))
    ids = np.argpartition(favour + noise, 880, axis=1)[:, 880:]
    step = step_load((in_order if routing == "skewed" else in_turns)(896, 2), ids)
    assert step.imbalance == pytest.approx(row.imbalance, abs=0.02)
    expected = TILED.us(row.tiles, latent=3584, width=3072)
    assert 1e6 * step.seconds() == pytest.approx(expected, rel=0.03)  # other draws


def test_in_order_is_what_ranks_take_without_a_placement():
    from kimik3_lab.parallel.groups import share

    for experts, ranks in ((6, 4), (896, 8), (7, 3)):
        expected = tuple(tuple(share(experts, ranks, rank)) for rank in range(ranks))
        assert in_order(experts, ranks).slots == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ExpertPlacement(((0,), (0,)), 2), "expert 1 lies on no rank"),
        (lambda: ExpertPlacement(((0, 0), (1,)), 2), "rank 0 holds an expert twice"),
        (lambda: ExpertPlacement(((0, 5), (1,)), 2), "no expert 5 among 2"),
        (lambda: by_load([1, 2, 3], 2), "take 1 copies, or 2 more"),
        (lambda: by_load([1, -2], 2), "at least 0, got -2"),
        (lambda: by_load([1, float("nan")], 2), "a number and at least 0, got nan"),
        (lambda: by_load([float("inf"), 1], 2), "a number and at least 0, got inf"),
        (lambda: by_load([1, 2], 2, redundant=4), "more than 2 experts can have on 2 ranks"),
        (lambda: in_order(2, 3), "2 experts cannot lie on 3 ranks"),
        (lambda: in_order(4, 2).imbalance([1.0]), "a load for each of 4, got 1"),
        (lambda: in_order(4, 2).ranks_of([0, 1]), r"must be \[T, k\], got \[2\]"),
        (lambda: in_order(4, 2).ranks_of([[-1, 0]]), "go from 0 to 3, got -1 to 0"),
        (lambda: in_order(4, 2).ranks_of([[0, 4]]), "go from 0 to 3, got 0 to 4"),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
