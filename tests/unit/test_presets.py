"""The two published command lines, and one switch at a time between them."""

from __future__ import annotations

import dataclasses
import re
from itertools import pairwise

import pytest

from kimik3_lab.serving.cache_config import CacheConfig
from kimik3_lab.serving.presets import LADDER, MAIN_2026_09_13, V0_27_1, Preset
from kimik3_lab.serving.scheduler_config import SchedulerConfig
from kimik3_lab.serving.vllm_rules import VLLM_RULES, vllm_rules

#: Mended rules that have no effect without priorities or prefix caching.
_WITHOUT_EFFECT = (
    "forget_unscheduled_hashes",
    "preempt_latest_of_equals",
    "hash_written_states_only",
    "defer_unwritten_copies",
)
RUNGS = list(pairwise(LADDER))


def switches(preset: Preset) -> dict[str, object]:
    config = dataclasses.asdict(preset.scheduler_config(9216))
    cache = dataclasses.asdict(preset.cache_config(1000))
    return {**config, **{f"cache {k}": v for k, v in cache.items()}}


@pytest.mark.parametrize(("lower", "upper"), RUNGS, ids=lambda preset: preset.name)
def test_a_rung_throws_one_switch_and_names_its_pull_request(lower: Preset, upper: Preset) -> None:
    before, after = switches(lower), switches(upper)
    changed = {name for name in before if before[name] != after[name]}
    assert len(changed) + len(upper.execution - lower.execution) == 1
    assert lower.execution <= upper.execution
    assert upper.prs and upper.change


def test_the_ladder_goes_from_the_baseline_through_the_published_result() -> None:
    published = LADDER.index(MAIN_2026_09_13)
    assert LADDER[0] is V0_27_1
    assert [p.beyond_published for p in LADDER] == [i > published for i in range(len(LADDER))]
    assert len({p.name for p in LADDER}) == len(LADDER)


@pytest.mark.parametrize("preset", [V0_27_1, MAIN_2026_09_13], ids=lambda preset: preset.name)
def test_the_published_command_lines(preset: Preset) -> None:
    config, cache = preset.scheduler_config(9216), preset.cache_config(1000)
    assert (config.speculative_method, config.num_speculative_tokens) == ("dspark", 8)
    assert config.max_num_seqs == 1024
    assert not cache.enable_prefix_caching
    assert cache.prefill_checkpoints == "split"
    assert (cache.speculative_states, cache.dcp_world_size) == ("slots", 1)
    assert (cache.block_size, cache.num_groups) == (896, 4)


def test_the_budgets_of_both() -> None:
    assert V0_27_1.scheduler_config(9216).scheduled_token_limit == 1024
    assert MAIN_2026_09_13.scheduler_config(9216).scheduled_token_limit == 16384


def test_overrides_win() -> None:
    assert V0_27_1.scheduler_config(9216, max_num_seqs=4).max_num_seqs == 4
    assert V0_27_1.cache_config(1000, block_size=16).block_size == 16


def test_the_baseline_is_what_was_recorded_of_its_version() -> None:
    rules = VLLM_RULES["0.27.1"]
    config, cache = V0_27_1.scheduler_config(9216), V0_27_1.cache_config(1000)
    for fields, owner in ((rules.scheduler, config), (rules.cache, cache)):
        for name, value in fields.items():
            if name not in _WITHOUT_EFFECT:
                assert getattr(owner, name) == value, name


def test_an_unknown_version_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"0\.11\.0.*0\.27\.1, 0\.32\.0, 0\.33\.0"):
        vllm_rules("0.11.0")


@pytest.mark.parametrize("kind", [SchedulerConfig, CacheConfig])
def test_a_switch_that_tells_releases_apart_names_its_pull_request(
    kind: type[SchedulerConfig] | type[CacheConfig],
) -> None:
    field = "scheduler" if kind is SchedulerConfig else "cache"
    names = {name for rules in VLLM_RULES.values() for name in getattr(rules, field)}
    assert names
    paragraphs = dict(re.findall(r"^    (\w+) : .*\n((?:        .*\n)+)", kind.__doc__ or "", re.M))
    assert sorted(n for n in names if not re.search(r"#\d{5}", paragraphs[n])) == []
