"""Wrong routing kernels, one mistake each: the check of ``test_routing`` must refuse them all."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from mutants import Mutant, build
from routing_cases import Case, check

pytest.importorskip("triton", reason="running kernels needs Triton")

from k3_kernels.routing import RouteConfig

# NumPy, which runs the kernels here, remarks on some of the mistakes.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

#: A few small cases that between them show every mistake, quickest first.
CASES = [
    Case(3, 20, 4, scale=2.5),
    Case(2, 17, 3, renormalize=False),
    Case(2, 64, 4, bias=3.0),
    Case(3, 40, 5, logits="few", bias=0.0),
    # A key joins four neighbours: one of these choices ends inside such a group.
    *(Case(1, 300, top_k, logits="close") for top_k in (13, 14, 15)),
    Case(1, 300, 5, logits="few", bias=0.0),
    Case(1, 16, 16),
]
CONFIG = RouteConfig(1, "argmax")

# A selection that goes wrong is noticed by the count that follows it and repaired by the search: a
# mistake in it costs time and no result. To see one the search has to be off.
NO_SEARCH = Mutant("no-search", "if (chosen != TOP_K) | (not (bound < 1e30)):", "if False:")
SELECTION_CASES = [Case(1, 20, 4), Case(1, 64, 4, bias=3.0), Case(1, 16, 16), Case(3, 128, 16)]

MUTANTS = [
    # Scores and weights
    Mutant("sigmoid-without-minus", "1.0 / (1.0 + tl.exp(-logit))", "1.0 / (1.0 + tl.exp(logit))"),
    Mutant("bias-not-in-the-choice", "score, score + bias", "score, score"),
    Mutant("bias-in-the-weights", "    weight = score\n", "    weight = exact\n"),
    Mutant("bias-in-the-renormalised-weights", "weight = score / (", "weight = exact / ("),
    Mutant("scale-missing", "weight * scale", "weight"),
    Mutant("not-renormalised", "    if RENORMALIZE:", "    if False:"),
    Mutant("always-renormalised", "    if RENORMALIZE:", "    if True:"),
    Mutant("renormalised-over-all-slots", "tl.where(taken, score, 0.0), 0)", "score, 0)"),
    # Keys
    Mutant("higher-id-wins", "(ID_MASK - cols).to", "cols.to"),
    Mutant("keys-are-taken-as-exact", "if (chosen != TOP_K) |", "if False &"),
    Mutant("boundary-tie-not-counted", "keys >= (last & STEP_MASK)", "keys >= last"),
    # Exact search
    Mutant("search-repeats", "(order < last) |", "(order <= last) |"),
    Mutant("search-forgets-ties", " | ((order == last) & (cols > last_id)))", ")"),
    Mutant("search-takes-the-last-of-equals", "highest > top, first", "highest >= top, first"),
    Mutant("search-reads-one-stretch", "tl.range(0, NUM_EXPERTS, WIDTH)", "tl.range(0, 1, WIDTH)"),
    # Rank and stores
    Mutant("rank-ties-by-higher-id", "expert[None, :] < expert[:,", "expert[None, :] > expert[:,"),
    Mutant("worst-first", "order[None, :] > order[:,", "order[None, :] < order[:,"),
    Mutant("store-mask-missing", "expert, mask=taken)", "expert)"),
    Mutant("every-token-is-the-first", "tl.program_id(0).to(", "tl.program_id(1).to("),
    Mutant("rows-are-dense", "token * logits_stride", "token * NUM_EXPERTS"),
    Mutant("results-of-the-first-token", "place = token * TOP_K + rank", "place = rank"),
]


SELECTION_MUTANTS = [
    Mutant("columns-behind-the-end-win", "keys = tl.where(real, keys, 0)", "pass"),
    Mutant("negative-preferences-wrap", "(preference + bound) * step", "preference * step"),
    Mutant(
        "merge-loses-one-direction", "!= ((upper_half(n_dims, stage - 1 - step) ^ upward) != 0)", ""
    ),
    Mutant("runs-not-mirrored", "mirrored = across(mirrored,", "mirrored = 0 * across(mirrored,"),
    Mutant("winner-not-removed", "keys = tl.where(keys == largest, 0, keys)", "pass"),
    Mutant("sort-goes-one-way", "stage, upper_half(LOG_N, stage))", "stage, 0)"),
    Mutant("lower-half-kept", "tl.max(cube, LOG_N -", "tl.min(cube, LOG_N -"),
]


def first_failure(
    device: str, cases: list[Case] = CASES, configs: tuple[RouteConfig, ...] = (CONFIG,)
) -> str | None:
    """Run the check over cases and configurations, up to the first failure."""
    for config in configs:
        for case in cases:
            try:
                check(case, device, config, row_gap=24)
            except AssertionError as error:
                return f"{case} {config}: {error}"
    return None


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_check_refuses(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    module = importlib.import_module("k3_kernels.routing_kernel")
    monkeypatch.setattr(module, "route_kernel", build(module, mutant, tmp_path).route_kernel)
    assert first_failure(device), f"the wrong kernel {mutant} passed all {len(CASES)} cases"


@pytest.mark.parametrize("mutant", SELECTION_MUTANTS, ids=str)
def test_check_refuses_a_wrong_selection(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    module = importlib.import_module("k3_kernels.routing_kernel")
    without = build(module, NO_SEARCH, tmp_path)
    monkeypatch.setattr(module, "route_kernel", build(without, mutant, tmp_path).route_kernel)
    configs = (RouteConfig(1, "argmax"), RouteConfig(1, "network"))
    assert first_failure(device, SELECTION_CASES, configs), f"{mutant} passed"


def test_check_accepts_the_kernels_built_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    module = importlib.import_module("k3_kernels.routing_kernel")
    control = Mutant("control", '__all__ = ["route_kernel"]', "__all__ = []")
    monkeypatch.setattr(module, "route_kernel", build(module, control, tmp_path).route_kernel)
    assert first_failure(device) is None
    without = build(module, NO_SEARCH, tmp_path)
    monkeypatch.setattr(module, "route_kernel", without.route_kernel)
    configs = (RouteConfig(1, "argmax"), RouteConfig(1, "network"))
    assert first_failure(device, SELECTION_CASES, configs) is None
