"""Where the chunks of a prompt end, and which states are kept."""

from __future__ import annotations

import pytest

from kimik3_lab.serving import CacheConfig, Request
from kimik3_lab.serving.prefill_checkpoint import (
    BlockAlignedSplit,
    get_mamba_prefill_checkpoint_position,
    is_mamba_prefill_checkpoint_valid,
    replay_boundaries,
)
from kimik3_lab.serving.state_retention import StateRetention


def hybrid(block_size: int = 768, **knobs: object) -> CacheConfig:
    return CacheConfig(999, block_size, num_kda_groups=3, enable_prefix_caching=True, **knobs)


def chunks(
    config: CacheConfig, length: int, budget: int = 16384, *, eagle: bool = False, start: int = 0
) -> list[int]:
    split = BlockAlignedSplit(config, budget, eagle)
    request, sizes = Request("a", [5] * length), []
    while start < length:
        size = split.num_new_tokens(request, start, min(budget, length - start))
        assert size > 0
        sizes.append(size)
        start += size
    return sizes


@pytest.mark.parametrize("block_size", [768, 1536])
def test_8000_tokens_take_two_passes_or_one(block_size: int) -> None:
    assert chunks(hybrid(block_size), 8000) == [7680, 320]
    assert chunks(hybrid(block_size, prefill_checkpoints="internal"), 8000) == [8000]


def test_a_finer_unit_costs_a_third_pass() -> None:
    assert chunks(hybrid(prefix_match_unit=128), 8000) == [7680, 256, 64]
    fine = hybrid(prefix_match_unit=128, prefill_checkpoints="internal")
    assert chunks(fine, 8000) == [8000]


def test_an_eagle_drafter_moves_the_kept_state_one_block_back() -> None:
    assert chunks(hybrid(), 8000, eagle=True) == [6912, 1088]
    # K = 7, vLLM 0.27.1: the old budget of 2,048 tokens rounds down to two blocks as well.
    old = hybrid(exact_prompt_boundaries=False)
    assert chunks(old, 8000, 2048, eagle=True) == [1536, 1536, 1536, 1536, 768, 1088]
    assert chunks(old, 8000, 8186, eagle=True) == [6912, 1088]


def test_a_prompt_that_ends_on_a_block_keeps_the_block_before() -> None:
    assert chunks(hybrid(16), 32) == [16, 16]
    assert chunks(hybrid(16), 48) == [32, 16]
    assert chunks(hybrid(16, exact_prompt_boundaries=False), 32) == [32]


def test_a_chunk_that_starts_inside_a_block_goes_to_its_end_and_exports_nothing() -> None:
    internal = hybrid(prefill_checkpoints="internal")
    assert chunks(internal, 8000, start=100) == [668, 7232]


def test_a_budget_that_holds_no_block_waits_unless_none_ever_could() -> None:
    config, request = hybrid(896), Request("a", [5] * 8000)
    # 0.27.1 with K = 8: a budget of 1,024, of which fifteen that decode leave 889.
    assert BlockAlignedSplit(config, 1024).num_new_tokens(request, 0, 889) == 0
    assert BlockAlignedSplit(config, 1024).num_new_tokens(request, 0, 1000) == 896
    # fp8: the block has 1,664 tokens, and a budget of 1,024 cuts it.
    fp8 = BlockAlignedSplit(hybrid(1664), 1024)
    assert fp8.num_new_tokens(request, 0, 889) == 889
    assert fp8.num_new_tokens(request, 889, 1024) == 1664 - 889


def test_a_junction_is_a_stop() -> None:
    request = Request("a", [5] * 8000)
    request.shared_prefix_boundary = 4000
    assert BlockAlignedSplit(hybrid(), 16384).num_new_tokens(request, 0, 8000) == 3840
    fine = hybrid(prefix_match_unit=16, enable_mamba_shared_prefix_checkpoint=True)
    keeps = BlockAlignedSplit(fine, 16384, keeps_junctions=True)
    assert keeps.num_new_tokens(request, 0, 8000) == 4000


def test_a_junction_that_cuts_a_chunk_brings_the_other_stops_back() -> None:
    # From inside a block, a checkpoint at the end of the prompt in sight: but the junction comes
    # first, so nothing is exported, and the chunk must not run past the end of its first block.
    config = hybrid(8, prefix_match_unit=4, prefill_checkpoints="internal", checkpoint_alignment=4)
    request = Request("a", [5] * 30)
    split = BlockAlignedSplit(config, 64)
    assert split.num_new_tokens(request, 4, 26) == 26
    request.shared_prefix_boundary = 20
    assert split.num_new_tokens(request, 4, 26) == 4


def test_output_tokens_of_a_resumed_request_are_a_prompt() -> None:
    request = Request("a", [5] * 20, max_tokens=99)
    request.append_output_token_ids([7] * 30, 1000)
    split = BlockAlignedSplit(hybrid(16), 1000)
    assert split.num_new_tokens(request, 0, 50) == 48
    assert split.num_new_tokens(request, 48, 2) == 2
    assert split.num_new_tokens(request, 49, 9) == 9  # decoding: not a prompt any more


@pytest.mark.parametrize("unit", [1, 16, 128, 768])
def test_the_kept_position_leaves_a_token_to_compute(unit: int) -> None:
    for length in range(1, 2000, 7):
        position = get_mamba_prefill_checkpoint_position(length, unit)
        assert position % unit == 0
        assert length - unit <= position < length
        dropped = get_mamba_prefill_checkpoint_position(length, unit, drop_eagle_block=True)
        assert dropped == max(length // unit * unit - unit, 0)


@pytest.mark.parametrize(
    ("start", "end", "position", "valid"),
    [
        (0, 8000, 7680, True),
        (768, 8000, 7680, True),
        (0, 8000, 7681, False),  # no multiple of the kernel's chunk
        (0, 8000, 8000, False),  # the end is no place inside
        (100, 8000, 7680, False),  # the start has no hash
        (7680, 8448, 8192, False),  # less than a unit behind the start
        (0, 768, 512, False),  # no column before that of the running state
        (0, 1536, 768, True),
    ],
)
def test_which_states_a_kernel_can_export(start: int, end: int, position: int, valid: bool) -> None:
    assert is_mamba_prefill_checkpoint_valid(start, end, position, 768, 768, 16) is valid


def test_places_to_resume_at() -> None:
    assert replay_boundaries(97, 16, drops_eagle_block=False) == (96,)
    assert replay_boundaries(97, 16, drops_eagle_block=True) == (80,)
    assert replay_boundaries(96, 16, drops_eagle_block=True) == (64, 80)
    assert replay_boundaries(10, 16, drops_eagle_block=True) == (0,)


def test_retention_keeps_all_few_or_one_in_a_while() -> None:
    def kept(interval: int | None) -> set[int] | None:
        retention = StateRetention(hybrid(16, retention_interval=interval))
        return retention.columns(2, 20, [255, 100])

    assert kept(None) is None
    assert kept(16) is None
    assert kept(0) == {5, 14}
    assert kept(64) == {3, 5, 7, 11, 14, 15, 19}


def test_which_checkpoints_get_a_hash() -> None:
    request = Request("a", [5] * 100)
    sparse = StateRetention(hybrid(16, retention_interval=0))
    assert sparse.keeps_checkpoint(request, 96)
    assert not sparse.keeps_checkpoint(request, 48)  # transient
    request.shared_prefix_boundary = 48
    assert sparse.keeps_checkpoint(request, 48)
    assert StateRetention(hybrid(16)).keeps_checkpoint(request, 64)  # dense
