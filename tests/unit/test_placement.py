"""Weights on a GPU, room beside them, bytes of a step: against figures derived elsewhere."""

from __future__ import annotations

import json
import random

import pytest

from kimik3_lab.config import K3Config
from kimik3_lab.performance.accounting import anatomy
from kimik3_lab.performance.capacity import DoesNotFitError, capacity
from kimik3_lab.performance.hardware import ACCELERATORS
from kimik3_lab.performance.placement import Layout, LayoutError, possible_layouts, rank_weights
from kimik3_lab.performance.step_bytes import distinct_experts, step_bytes

RELEASED, TINY = K3Config.released(), K3Config.tiny()
B300 = ACCELERATORS["B300"]


# -- weights ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "gigabytes", "padding"),
    [
        (Layout(8), 205.1, 0),
        (Layout(8, expert_parallel=True), 205.1, 0),
        (Layout(16), 138.4, 30.1),
        (Layout(16, expert_parallel=True), 108.3, 0),
        (Layout(1, 8, expert_parallel=True), 294.3, 0),
    ],
    ids=lambda value: value.name if isinstance(value, Layout) else None,
)
def test_a_gpu_holds(layout, gigabytes, padding):
    weights = rank_weights(RELEASED, layout)
    assert round(weights.total / 1e9, 1) == gigabytes
    assert round(weights.padding / 1e9, 1) == padding


def test_what_vllm_keeps_whole():
    weights = rank_weights(RELEASED, Layout(8))
    assert set(weights.replicated) == {
        "norms", "attn_res", "final", "router", "latent_moe", "kda", "mla"
    }  # fmt: skip
    # f_a and o_norm of KDA; q_a, kv_a and their norms of MLA.
    assert weights.replicated["kda"] == 69 * (128 * 7168 * 2 + 128 * 4)
    assert weights.replicated["mla"] == 24 * 2 * (1536 * 7168 + 576 * 7168 + 1536 + 512)
    assert round(weights.experts / 1e9, 2) == 180.81
    assert round(weights.trunk / 1e9, 2) == 23.96


@pytest.mark.parametrize("config", [RELEASED, TINY])
def test_one_gpu_holds_the_whole_text_model(config):
    report, weights = anatomy(config), rank_weights(config, Layout(1))
    vision = sum(row.bytes for row in report.components if row.component == "vision")
    heads, width = config.linear_attn_config.num_heads, config.linear_attn_config.head_dim
    zeros = 4 * len(config.kda_layer_ids) * (max(heads, width) - heads)
    assert weights.total == report.checkpoint_bytes - vision - zeros


def test_ranks_share_out_exactly_what_is_split():
    whole, part = rank_weights(RELEASED, Layout(1)), rank_weights(RELEASED, Layout(4))
    assert part.replicated == whole.replicated
    assert {name: 4 * size for name, size in part.split.items()} == dict(whole.split)


def test_layouts_that_divide():
    names = [layout.name for layout in possible_layouts(RELEASED)]
    assert names[0] == "TP1"
    assert {"TP8", "TP8 + EP8", "DP8 + EP8", "TP32 + EP32"} < set(names)
    for layout in possible_layouts(TINY):
        rank_weights(TINY, layout)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rank_weights(RELEASED, Layout(5)), "96 KDA heads; the nearest that does is TP4"),
        (lambda: rank_weights(RELEASED, Layout(64)), "the nearest that does is TP32"),
        (lambda: rank_weights(TINY, Layout(1, 3, True)), "32 experts; the nearest .* is 2"),
        (lambda: Layout(8, 2), r"use Layout\(1, 2, expert_parallel=True\)"),
        (lambda: Layout(0), "1 or more, got tensor 0"),
    ],
)
def test_layouts_that_do_not(make, message):
    with pytest.raises(LayoutError, match=message):
        make()


def test_weights_are_json():
    body = json.loads(json.dumps(rank_weights(RELEASED, Layout(16)).to_dict()))
    assert body["bytes_per_gpu"] == body["experts"] + body["trunk"] + body["embedding"]
    assert body["layout"] == "TP16"


# -- capacity --------------------------------------------------------------------------------


@pytest.mark.parametrize(("kv_dtype", "expected"), [("bf16", [191, 14, 1]), ("fp8", [319, 28, 3])])
def test_sequences_on_eight_b300(kv_dtype, expected):
    found = [
        capacity(RELEASED, B300, Layout(8), tokens, kv_dtype=kv_dtype)
        for tokens in (8192, 131_072, 1_048_576)
    ]
    assert [each.sequences for each in found] == expected
    for each in found:
        filled = each.sequences * each.sequence_bytes
        assert filled <= each.room_bytes < filled + each.sequence_bytes
        assert each.weights.total + each.room_bytes == 259_200_000_000


def test_state_is_split_and_rows_are_not():
    eight, sixteen = (capacity(RELEASED, B300, Layout(n), 1000) for n in (8, 16))
    assert eight.state_bytes == 2 * sixteen.state_bytes == 449_372_160 // 8
    assert eight.row_bytes == sixteen.row_bytes == 27_648


def test_copies_of_the_trunk_each_hold_their_own():
    found = capacity(RELEASED, B300, Layout(1, 16, True), 8192)
    assert found.sequences == 16 * (found.room_bytes // found.sequence_bytes)
    assert found.state_bytes == 449_372_160


@pytest.mark.parametrize(
    ("gpu", "layout", "tokens", "message"),
    [
        ("H200", Layout(8), 8192, r"205\.1 GB .* nearest that fits is TP16 \+ EP16 on 16 GPUs"),
        ("H200", Layout(16), 8192, r"138\.4 GB .* nearest that fits is TP16 \+ EP16 on 16 GPUs"),
        ("B300", Layout(1, 8, True), 8192, "nearest that fits is TP8 on 8 GPUs"),
        ("B200", Layout(16), 1_048_576, "nearest that fits has 852,142 tokens"),
    ],
)
def test_a_refusal_names_what_does_fit(gpu, layout, tokens, message):
    accelerator = ACCELERATORS[gpu]
    with pytest.raises(DoesNotFitError, match=message) as refusal:
        capacity(RELEASED, accelerator, layout, tokens)
    assert refusal.value.weights.layout == layout
    if "tokens" in message:  # what it names must fit, and one token more must not
        assert capacity(RELEASED, accelerator, layout, 852_142).sequences == 1
        with pytest.raises(DoesNotFitError):
            capacity(RELEASED, accelerator, layout, 852_143)
    elif gpu == "H200":
        capacity(RELEASED, accelerator, Layout(16, expert_parallel=True), tokens)


def test_a_refusal_without_a_way_out_says_so():
    with pytest.raises(DoesNotFitError, match="no layout of up to 32 GPUs"):
        capacity(RELEASED, ACCELERATORS["H200"], Layout(8), 8192, utilization=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": 0}, "1 to 1,048,576 tokens, got 0"),
        ({"context": 2_000_000}, "got 2,000,000"),
        ({"kv_dtype": "int4"}, "'int4', expected one of bf16, fp8"),
        ({"utilization": 1.5}, "up to 1, got 1.5"),
    ],
)
def test_nonsense_is_refused(change, message):
    arguments = {"context": 8192, **change}
    with pytest.raises(ValueError, match=message):
        capacity(RELEASED, B300, Layout(8), **arguments)


def test_hardware_has_sources():
    for name, gpu in ACCELERATORS.items():
        assert gpu.name == name
        assert len(gpu.sources) == 2
        assert all(source.startswith("https://") for source in gpu.sources)
    assert (B300.memory_bytes, ACCELERATORS["H200"].bandwidth) == (288 * 10**9, 4.8e12)


# -- bytes of a step -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "experts", "state", "total", "b300", "h200"),
    [
        (1, 25.8, 0.9, 138, 3.4, 5.7),
        (4, 100.6, 3.6, 216, 4.7, 7.9),
        (16, 362.3, 14.4, 491, 9.3, 15.6),
        (64, 989.9, 57.5, 1173, 21.2, 35.3),
        (256, 1432.1, 230.1, 1831, 36.2, 60.4),
    ],
)
def test_bytes_and_floor_of_a_step(batch, experts, state, total, b300, h200):
    whole, rank = step_bytes(RELEASED, batch, 8192), step_bytes(RELEASED, batch, 8192, Layout(8))
    assert round(whole.trunk / 1e9, 1) == 111.2
    assert round(whole.experts / 1e9, 1) == experts
    assert round(whole.state / 1e9, 1) == state
    assert round(whole.total / 1e9) == total
    assert rank.rows == whole.rows == batch * 8192 * 27_648
    assert round(1e3 * rank.floor_seconds(8e12), 1) == b300
    assert round(1e3 * rank.floor_seconds(4.8e12), 1) == h200


def test_experts_that_random_picks_hit():
    draw, trials, batch = random.Random(0), 200, 6
    hits = sum(
        len({e for _ in range(batch) for e in draw.sample(range(32), 4)}) for _ in range(trials)
    )
    assert hits / trials == pytest.approx(distinct_experts(TINY, batch), rel=0.02)
    assert distinct_experts(TINY, 0) == 0
    assert distinct_experts(TINY, 1) == pytest.approx(4)


def test_copies_of_the_trunk_split_the_batch_but_not_the_experts():
    one, eight = (step_bytes(RELEASED, 64, 8192, Layout(1, n, True)) for n in (1, 8))
    assert eight.rows == one.rows / 8
    assert eight.state == one.state / 8
    assert eight.experts == one.experts / 8
    assert eight.trunk == one.trunk


def test_step_refuses_nonsense():
    with pytest.raises(ValueError, match="0 or more tokens, got -1"):
        step_bytes(RELEASED, -1, 8192)
    with pytest.raises(ValueError, match="positive, got 0"):
        step_bytes(TINY, 1, 1).floor_seconds(0)
