"""Pages, groups and capacity, against published figures."""

from __future__ import annotations

import pytest

from kimik3_lab.serving import CacheConfig
from kimik3_lab.serving.kv_cache_capacity import blocks_per_request, capacity_in_tokens
from kimik3_lab.serving.kv_cache_groups import group_layers, kda_state_bytes, unify_page_size

BF16, FP8 = 576 * 2, 576


@pytest.mark.parametrize(
    ("k", "row_bytes", "state_bytes", "block_size", "padding"),
    # 768 and 1,536 are reported by users of the released model; 8.7 % is what vLLM logs.
    [
        (0, BF16, 814_080, 768, 8.7),
        (0, FP8, 814_080, 1536, 8.7),
        (7, BF16, 878_592, 768, 0.7),
        (7, FP8, 878_592, 1536, 0.7),
        (8, BF16, 887_808, 896, 16.3),
        (8, FP8, 887_808, 1664, 8.0),
    ],
)
def test_the_page_of_k3_on_eight_ranks(
    k: int, row_bytes: int, state_bytes: int, block_size: int, padding: float
) -> None:
    assert kda_state_bytes(12, 128, 4, k) == state_bytes
    page = unify_page_size(state_bytes, row_bytes)
    assert page.block_size == block_size
    assert page.page_bytes == block_size * row_bytes >= state_bytes
    assert round(100 * page.padding, 1) == padding


@pytest.mark.parametrize("k", range(8))
def test_the_page_of_k3_on_sixteen_ranks(k: int) -> None:
    state = kda_state_bytes(6, 128, 4, k)
    assert unify_page_size(state, BF16).block_size == 384
    assert unify_page_size(state, FP8).block_size == 768


def test_a_state_is_worth_700_rows() -> None:
    assert -(-kda_state_bytes(12, 128, 4) // BF16) == 707
    assert -(-kda_state_bytes(12, 128, 4) // FP8) == 1414  # 1,413 and a bit


def test_layers_of_k3_and_of_k3_with_a_drafter() -> None:
    k3 = group_layers({"mla": 24, "kda": 69})
    assert (k3.layers_per_group, k3.num_groups) == (24, {"mla": 1, "kda": 3})
    assert k3.num_padding_layers == {"mla": 0, "kda": 3}
    assert f"{k3.padding['kda']:.2%}" == "4.35%"
    # vllm-ascend#14314: five MLA layers more make the groups longer.
    drafter = group_layers({"mla": 29, "kda": 69})
    assert drafter.num_padding_layers == {"mla": 0, "kda": 18}
    assert f"{drafter.padding['kda']:.2%}" == "26.09%"


def test_nearly_equal_kinds_make_one_group_each() -> None:
    assert group_layers({"a": 24, "b": 25}).num_groups == {"a": 1, "b": 1}
    assert group_layers({"a": 24, "b": 36}).num_groups == {"a": 1, "b": 2}
    assert group_layers({"a": 7}).num_padding_layers == {"a": 0}


@pytest.mark.parametrize("kinds", [{}, {"mla": 0, "kda": 3}])
def test_a_kind_without_layers_is_refused(kinds: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least one layer"):
        group_layers(kinds)


PAGE = unify_page_size(kda_state_bytes(12, 128, 4), FP8)
BYTES_PER_BLOCK = group_layers({"mla": 24, "kda": 69}).bytes_per_block(PAGE.page_bytes)


def k3_cache(gib: float, **knobs: object) -> CacheConfig:
    blocks = int(gib * 2**30) // BYTES_PER_BLOCK
    return CacheConfig(
        blocks, PAGE.block_size, num_kda_groups=3, enable_prefix_caching=True, **knobs
    )


def test_the_two_published_capacities_come_out_to_the_token() -> None:
    # vLLM #50055: "1.933M" tokens on 25.12 GiB, "19.752M" on 34.28 GiB with context parallelism.
    alone, spread = k3_cache(25.12), k3_cache(34.28, dcp_world_size=8)
    assert (alone.num_blocks, spread.num_blocks) == (1270, 1733)
    assert capacity_in_tokens(alone, 1_048_576) == 1_932_788
    assert capacity_in_tokens(spread, 1_048_576) == 19_751_980
    # For the same memory the gain is that of the blocks of one request: 689 to 92.
    assert blocks_per_request(alone, 1_048_576).total == 689
    assert blocks_per_request(spread, 1_048_576).total == 92


def test_what_drafts_and_checkpoints_cost() -> None:
    native = k3_cache(46.48)
    records = k3_cache(46.48, speculative_states="records")
    internal = k3_cache(46.48, prefill_checkpoints="internal")
    assert blocks_per_request(native, 262_144, 7).scratch == 21
    assert blocks_per_request(records, 262_144, 7).scratch == 0
    assert blocks_per_request(internal, 262_144).states == 9
    # 262,144 tokens in fp8 with K = 7: a gain of 11.9 % where the records lie outside the page.
    gain = capacity_in_tokens(records, 262_144, 7) / capacity_in_tokens(native, 262_144, 7)
    assert f"{gain - 1:.1%}" == "11.9%"


def test_without_prefix_caching_a_request_has_one_state() -> None:
    config = CacheConfig(100, 16, num_kda_groups=3)
    blocks = blocks_per_request(config, 100, 4)
    assert (blocks.attention, blocks.states, blocks.scratch) == (7, 3, 12)
