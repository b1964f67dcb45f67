"""Accounting of the release against figures that others read from the checkpoint itself."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from kimik3_lab.config import K3Config
from kimik3_lab.performance import anatomy
from kimik3_lab.performance.accounting import VISION, sequence_memory, short_count
from kimik3_lab.performance.census import census
from kimik3_lab.performance.placement import Layout, rank_weights
from kimik3_lab.teaching import checks_anatomy, plots_anatomy
from kimik3_lab.tensors import checkpoint_tensors


@pytest.fixture(scope="module")
def released():
    return anatomy(K3Config.released())


def test_totals_are_the_published_ones(released):
    # From the index and the headers of the 96 released files.
    assert released.tensors == 497_220
    assert released.checkpoint_bytes == 1_560_860_324_864
    assert released.total_parameters == 2_779_931_837_184
    # Files hold 75,766,584 bytes of headers besides.
    assert released.checkpoint_bytes + 75_766_584 == 1_560_936_091_448


def test_parts_match_a_census_of_the_released_files(released):
    # Byte groups as a public inventory of the file headers lists them.
    size = {row.component: row.bytes for row in released.components}
    assert size["embedding"] == size["lm_head"] == 2_348_810_240
    assert size["final"] == 43_008
    assert size["routed_experts"] == 1_446_456_066_048
    assert size["shared_experts"] == 24_310_185_984
    assert size["vision"] == 802_428_928 + 92_289_024
    outside = {"embedding", "lm_head", "final", "routed_experts", "vision"}
    trunk = [row for row in released.components if row.component not in outside]
    assert sum(row.bytes for row in trunk) == 108_811_877_376
    assert sum(row.tensors for row in trunk) == 2_455


def test_active_parameters_are_the_official_104_billion(released):
    active = {row.component: row.active_parameters for row in released.components}
    assert released.active_parameters_per_token == 104_189_614_848
    assert active["embedding"] == active["vision"] == 0
    assert active["lm_head"] == 163_840 * 7168
    assert active["routed_experts"] == 92 * 16 * 3 * 3584 * 3072


def test_only_the_release_has_a_vision_part(released):
    assert released.row("vision") == VISION
    assert released.row("vision").evidence == "Published"
    assert {row.evidence for row in released.components} == {"Derived", "Published"}
    other = dataclasses.replace(K3Config.released(), num_experts=16, vocab_size=163_841)
    with pytest.raises(KeyError, match="no component 'vision'; this model has embedding"):
        anatomy(other).row("vision")


@pytest.mark.parametrize("make", [K3Config.tiny, K3Config.micro])
def test_report_sums_the_enumeration(make):
    config = make()
    specs = list(checkpoint_tensors(config))
    report = anatomy(config)
    assert report.tensors == len(specs)
    assert report.total_parameters == sum(s.parameters for s in specs)
    assert report.checkpoint_bytes == sum(s.bytes for s in specs)
    for row in report.components:
        mine = [s for s in specs if s.component == row.component]
        assert row.tensors == len(mine)
        assert row.bytes == sum(s.bytes for s in mine)


def test_active_counts_follow_top_k():
    tiny = K3Config.tiny()
    every = anatomy(dataclasses.replace(tiny, num_experts_per_token=tiny.num_experts))
    one = anatomy(dataclasses.replace(tiny, num_experts_per_token=1))
    routed = every.row("routed_experts")
    assert routed.active_parameters == routed.parameters
    assert one.row("routed_experts").active_parameters * tiny.num_experts == routed.parameters
    table = every.row("embedding").parameters
    assert every.active_parameters_per_token == every.total_parameters - table


def test_sequence_memory_of_the_release():
    memory = sequence_memory(K3Config.released())
    assert memory.kda_recurrent_bytes == 434_110_464
    assert memory.kda_conv_bytes == 15_261_696
    assert memory.mla_bytes_per_token == 27_648
    assert memory.state_in_tokens == 16_254
    assert memory.all_mla_break_even == 5_654


def test_break_even_is_the_first_context_that_pays():
    memory = sequence_memory(K3Config.released())
    n = memory.all_mla_break_even
    assert memory.bytes_at(n) <= memory.all_mla_bytes_at(n)
    assert memory.bytes_at(n - 1) > memory.all_mla_bytes_at(n - 1)
    n = memory.state_in_tokens
    assert n * memory.mla_bytes_per_token >= memory.state_bytes
    assert (n - 1) * memory.mla_bytes_per_token < memory.state_bytes


def test_sequence_memory_follows_item_sizes_and_layers():
    tiny = K3Config.tiny()
    full, half = sequence_memory(tiny), sequence_memory(tiny, recurrent_itemsize=2)
    assert full.kda_recurrent_bytes == 2 * half.kda_recurrent_bytes
    assert full.kda_conv_bytes == half.kda_conv_bytes
    assert sequence_memory(tiny, cache_itemsize=1).mla_bytes_per_token * 2 == (
        full.mla_bytes_per_token
    )
    layers = tuple(range(1, tiny.num_hidden_layers + 1))
    for kda, mla in ((layers, ()), ((), layers)):
        linear = dataclasses.replace(tiny.linear_attn_config, kda_layers=kda, full_attn_layers=mla)
        memory = sequence_memory(dataclasses.replace(tiny, linear_attn_config=linear))
        assert (memory.state_in_tokens is None) == bool(kda)
        assert (memory.all_mla_break_even == 0) == (not kda)


def test_a_negative_context_is_refused():
    with pytest.raises(ValueError, match="0 or more tokens, got -1"):
        sequence_memory(K3Config.micro()).bytes_at(-1)


def test_report_is_json(released):
    body = json.loads(json.dumps(released.to_dict()))
    assert body["components"][0]["component"] == "embedding"
    assert sum(row["parameters"] for row in body["components"]) == body["total_parameters"]
    assert body["sequence_memory"]["state_bytes"] == 449_372_160
    assert body["flops_per_token"]["matmul"] == 208_348_184_576
    tp8 = next(row for row in body["placement"] if row["layout"] == "TP8")
    assert round(tp8["bytes_per_gpu"] / 1e9, 1) == 205.1


@pytest.mark.parametrize("make", [K3Config.tiny, K3Config.micro])
def test_census_repeats_to_the_whole_checkpoint(make):
    config = make()
    specs = list(checkpoint_tensors(config, prefix=""))
    kinds = census(config)
    assert sum(count for _, count in kinds) == len(specs)
    assert sum(count * spec.bytes for spec, count in kinds) == sum(s.bytes for s in specs)
    assert len({(spec.component, spec.name) for spec, _ in kinds}) == len(kinds)


def test_short_count():
    assert [short_count(n) for n in (0, 168, 1_500, 727e6, 1.4e12)] == [
        "0", "168", "1.5 K", "727 M", "1.4 T",
    ]  # fmt: skip


def test_accounting_needs_no_torch():
    code = (
        "import sys; import kimik3_lab.performance.published, kimik3_lab.performance as p;"
        "from kimik3_lab.config import K3Config; p.anatomy(K3Config.micro());"
        "print([m for m in ('torch', 'numpy', 'scipy', 'plotly') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_exercise_check_tells_right_from_wrong(capsys):
    def right(config):
        experts = anatomy(config).row("routed_experts")
        return anatomy(config).checkpoint_bytes - experts.bytes + 2 * experts.parameters

    checks_anatomy.check_1(right)
    assert "right on 3 shapes" in capsys.readouterr().out
    wrong = (
        lambda config: anatomy(config).checkpoint_bytes,
        lambda config: 2 * anatomy(config).total_parameters,  # forgets the float32 vectors
        lambda config: right(config) + 2 * anatomy(config).row("routed_experts").tensors,
    )
    for function in wrong:
        with pytest.raises(AssertionError, match=r"got [\d,]+ bytes, expected [\d,]+"):
            checks_anatomy.check_1(function)


def test_exercise_2_check_tells_right_from_wrong(capsys):
    def account(config, memory_bytes, ranks, context, *, share=0.9, state=None, rows=1, full=False):
        weights = rank_weights(config, Layout(ranks)).total
        if full:  # everything split, nothing kept whole
            weights = rank_weights(config, Layout(1)).total // ranks
        memory = sequence_memory(config)
        state = ranks if state is None else state
        one = memory.state_bytes // state + context * memory.mla_bytes_per_token // rows
        return max(0, int((share * memory_bytes - weights) // one))

    checks_anatomy.check_2(account)
    assert "right on 4 cases" in capsys.readouterr().out
    wrong = {
        "all of the memory": lambda *a: account(*a, share=1.0),
        "state not split": lambda *a: account(*a, state=1),
        "rows split as well": lambda c, m, ranks, n: account(c, m, ranks, n, rows=ranks),
        "no tensor kept whole": lambda *a: account(*a, full=True),
        "negative counts": lambda c, m, ranks, n: (
            account(c, m, ranks, n)
            or int((0.9 * m - rank_weights(c, Layout(ranks)).total) // 10**9)
        ),
        "cache in every layer": lambda c, m, ranks, n: account(
            c, m, ranks, n * c.num_hidden_layers // len(c.mla_layer_ids)
        ),
        "one too many": lambda *a: account(*a) + 1,
    }
    for name, function in wrong.items():
        with pytest.raises(AssertionError, match=r"got -?\d+ sequences, expected \d+"):
            checks_anatomy.check_2(function)
            pytest.fail(f"{name} passed the check")


def test_figures_show_the_report(released):
    figure = plots_anatomy.component_dots(released)
    stored = next(trace for trace in figure.data if trace.name == "stored")
    assert dict(zip(stored.y, stored.x, strict=True)) == {
        row.label: row.parameters for row in released.components
    }
    used = next(trace for trace in figure.data if trace.name == "used by a token")
    assert sum(used.x) == released.active_parameters_per_token
    lines = plots_anatomy.sequence_memory_lines(released.sequence_memory)
    hybrid = lines.data[0]
    assert hybrid.y[0] * 1e9 == released.sequence_memory.bytes_at(hybrid.x[0])
    assert hybrid.x[-1] == 1_048_576
