"""Ranks that really exchange: the same tokens as one rank, and mistakes that do not go unseen.

Four processes do everything, in groups of 2, 3 and 4, because starting them is what costs.
"""

from __future__ import annotations

from typing import Any

import parallel_support
import pytest
from parallel_support import SIZES

from kimik3_lab import paths
from kimik3_lab.parallel.groups import Ranks
from kimik3_lab.parallel.launch import RankFailedError, run_ranks
from kimik3_lab.reference import checkpoint

#: The second is a single token: all ranks but one begin without an MLA row.
PROMPTS = [[0, 17, 301, 44, 9, 1200, 77], [256]]


@pytest.fixture(scope="module")
def results() -> list[dict[int, dict[str, Any]]]:
    """What four ranks found, by rank and by how many of them took part."""
    folder = str(paths.default_model_dir())
    return run_ranks(parallel_support.work, max(SIZES), folder, PROMPTS)


def of_size(results: list[dict[int, dict[str, Any]]], size: int) -> list[dict[str, Any]]:
    return [result[size] for result in results[:size]]


@pytest.mark.parametrize("size", SIZES)
def test_ranks_agree_with_one(results: list[dict[int, dict[str, Any]]], size: int) -> None:
    found = of_size(results, size)
    for name in parallel_support.checks_of(size):
        error = max(result["errors"][name] for result in found)
        assert error < parallel_support.TOLERANCE, f"{name}: {error}"


def test_the_trained_model_says_the_same(results: list[dict[int, dict[str, Any]]]) -> None:
    model = checkpoint.load(paths.default_model_dir())
    greedy = [model.generate(prompt, parallel_support.NUM_TOKENS) for prompt in PROMPTS]
    assert all(len(tokens) == parallel_support.NUM_TOKENS for tokens in greedy)
    for size in SIZES:
        for result in of_size(results, size):
            for layout, tokens in result["tokens"].items():
                assert tokens == greedy, f"{size} ranks, {layout}"
    ran = {(size, layout) for size, runs in parallel_support.TRAINED.items() for layout, _ in runs}
    assert ran >= {(size, layout) for size in (2, 3) for layout in parallel_support.LAYOUTS}


def test_mistakes_are_seen(results: list[dict[int, dict[str, Any]]]) -> None:
    found = of_size(results, parallel_support.MUTANT_SIZE)
    errors = {
        name: max(result["mutants"][name] for result in found) for name in parallel_support.MUTANTS
    }
    assert {n: e for n, e in errors.items() if e < 10 * parallel_support.TOLERANCE} == {}


def test_the_mistakes_name_checks() -> None:
    assert len(parallel_support.MUTANTS) >= 12
    assert {found_by for found_by, _ in parallel_support.MUTANTS.values()} <= set(
        parallel_support.CHECKS
    )


def _fails_on_one(ranks: Ranks, culprit: int) -> None:
    if ranks.rank == culprit:
        raise RuntimeError("a mistake of its own")
    ranks.barrier()


def test_a_rank_that_fails_is_named() -> None:
    with pytest.raises(RankFailedError, match=r"(?s)rank 1: .*a mistake of its own"):
        run_ranks(_fails_on_one, 2, 1)
