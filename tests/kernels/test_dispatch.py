"""Dispatch against a pair-by-pair reference: sizes, empty experts, expert parallelism, refusals."""

from __future__ import annotations

import pytest
import torch
from dispatch_cases import CASES, Case, check, make_inputs

pytest.importorskip("triton", reason="running kernels needs Triton")

from k3_kernels.dispatch import (
    DispatchConfig,
    choose_config,
    dispatch,
    max_padded_pairs,
)

ONE = DispatchConfig(1)
#: Two launches: slices of 16 pairs, whose counts are read two at a time.
SLICES = DispatchConfig(1, single=0, slice_pairs=16, place_warps=1, rows=2)


@pytest.mark.parametrize("config", [ONE, SLICES], ids=["one", "slices"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_reference(case: Case, config: DispatchConfig, device: str) -> None:
    check(case, device, config)


@pytest.mark.parametrize("config", [ONE, SLICES], ids=["one", "slices"])
def test_without_counts(config: DispatchConfig, device: str) -> None:
    check(Case(5, 4, 9, 4), device, config, counts=False)


@pytest.mark.parametrize("warps", [2, 4, 8])
def test_several_warps(warps: int, device: str) -> None:
    check(Case(9, 7, 11, 4), device, DispatchConfig(warps))
    check(Case(40, 7, 11, 4), device, DispatchConfig(warps, 0, 64, warps))


def test_length_is_the_worst_case() -> None:
    """As many experts as possible get one pair more than fills their blocks."""
    for pairs, experts, block in ((5, 3, 4), (16, 896, 8), (100, 7, 16), (9, 4, 1), (0, 4, 8)):
        longest = max_padded_pairs(pairs, experts, block)
        hit = min(pairs, experts)
        worst = (pairs - hit) // block + hit if hit else 0
        assert longest % block == 0
        assert worst * block <= longest < (worst + 1) * block + block


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tokens", [1, 4, 16, 64, 256, 1024, 8192])
def test_released_shape_on_the_gpu(tokens: int, device: str) -> None:
    """Fresh routing in every run, both ranks of the benchmarks, constants as a call chooses."""
    seed = int(torch.randint(2**31, ()))
    block = 8 if tokens <= 64 else 64
    check(Case(tokens, 16, 896, block, seed=seed), device, None)
    check(Case(tokens, 16, 112, block, where="middle", all_experts=896, seed=seed), device, None)
    check(Case(tokens, 16, 112, block, where="map", all_experts=896, seed=seed), device, None)
    check(Case(tokens, 16, 896, block, routing="one"), device, None)
    check(Case(tokens, 16, 896, block, routing="few", dtype=torch.int64), device, None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("pdl", [False, True])
def test_a_captured_graph_follows_its_input(pdl: bool, device: str) -> None:
    """Replays must not depend on what an earlier one left in the buffers."""
    cases = [Case(256, 16, 896, 16, seed=seed) for seed in range(4)]
    ids = make_inputs(cases[0])[0].to(device)
    config = DispatchConfig(4, 0, 512, pdl=pdl)
    dispatch(ids, 896, 16, counts=True, config=config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = dispatch(ids, 896, 16, counts=True, config=config)
    for case in cases:
        ids.copy_(make_inputs(case)[0])
        graph.replay()
        expected = dispatch(ids, 896, 16, counts=True, config=DispatchConfig(16, 4096))
        for got, want in zip(captured, expected, strict=True):
            assert torch.equal(got, want)


def test_configuration_by_rule() -> None:
    for pairs in (1, 31, 32, 1024, 1025, 4096, 16384, 131072, 2**20):
        config = choose_config(pairs)
        assert config.slice_pairs & (config.slice_pairs - 1) == 0
        assert 1 <= config.num_warps <= 16
        if pairs > config.single:
            assert config.slice_pairs >= 32 * config.num_warps


GOOD = {
    "expert_ids": torch.zeros(3, 2, dtype=torch.int32),
    "num_experts": 4,
    "block_size": 8,
}
MAP = torch.zeros(8, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"expert_ids": torch.zeros(6, dtype=torch.int32)}, ValueError, r"tensor \[T, k\], got"),
        ({"expert_ids": [[0, 1]]}, ValueError, "expert_ids must be a tensor .* got list"),
        ({"expert_ids": torch.zeros(3, 2)}, TypeError, "expert_ids is torch.float32, expected int"),
        ({"expert_ids": MAP.view(2, 4).T}, ValueError, "expert_ids has strides"),
        ({"num_experts": 0}, ValueError, "num_experts must be at least 1"),
        ({"num_experts": 4.0}, TypeError, "num_experts must be an int, got float"),
        ({"num_experts": 2**15}, ValueError, "num_experts must be at most 16384"),
        ({"block_size": 12}, ValueError, "block_size must be a power of two up to 256, got 12"),
        ({"block_size": 512}, ValueError, "block_size must be a power of two up to 256"),
        ({"block_size": True}, TypeError, "block_size must be an int, got bool"),
        ({"first_expert": -1}, ValueError, "first_expert must be at least 0"),
        ({"expert_map": MAP.float()}, TypeError, "expert_map is torch.float32"),
        ({"expert_map": MAP[None]}, ValueError, r"expert_map must be a tensor \[E\] of .* got \["),
        ({"expert_map": MAP[::2]}, ValueError, "expert_map has strides"),
        ({"expert_map": MAP, "first_expert": 2}, ValueError, "both say which experts are local"),
        ({"expert_map": MAP.to("meta")}, ValueError, "expert_map is on meta"),
    ],
)
def test_refusals_name_the_argument(
    changes: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        dispatch(**{**GOOD, **changes})
