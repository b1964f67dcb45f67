"""Tiles of the expert kernel: counted as the kernel cuts them, and set on one GPU alone."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimik3_lab.paths import data_dir
from kimik3_lab.performance.expert_tiles import (
    TILED,
    TileCount,
    TiledExperts,
    TileShape,
    draw_counts,
)

#: Experts here, columns, picks of a token that fall on them.
SHAPES = {"moe_mxfp4_tp8": (896, 384, 16), "moe_mxfp4_ep8": (112, 3072, 2)}


def cut(counts: Sequence[int], rows: int, extra: int, fit: bool) -> tuple[int, int]:
    """Tiles and multiplied rows, one program after another as the kernel has them."""
    tiles = multiplied = 0
    for left in counts:
        granule = extra or rows
        blocks = -(-left // granule)
        while blocks:
            taken = min(blocks, (rows + extra) // granule)
            if not extra or taken == (rows + extra) // granule:
                size = rows + extra
            elif taken == 1:
                size = extra
            elif fit and taken * extra <= rows // 2:
                size = rows // 2
            else:
                size = rows
            tiles, multiplied, blocks = tiles + 1, multiplied + size, blocks - taken
    return tiles, multiplied


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 700), max_size=12),
    st.sampled_from([(8, 0), (32, 0), (64, 0), (128, 0), (128, 32), (64, 16), (32, 16)]),
    st.booleans(),
)
def test_tiles_are_those_of_the_programs(counts, shape, fit):
    rows, extra = shape
    found = TileShape(rows, extra, fit and bool(extra)).count(counts)
    assert (found.tiles, found.rows) == cut(counts, rows, extra, fit)
    assert (found.experts, found.pairs) == (sum(n > 0 for n in counts), sum(counts))
    assert found.tiles >= found.experts
    assert found.rows >= found.pairs


def test_the_rule_is_the_kernels():
    torch = pytest.importorskip("torch")
    pytest.importorskip("k3_kernels")
    from k3_kernels.moe_config import choose_config

    from kimik3_lab.parallel.gpu_experts import random_experts

    experts = random_experts(4, 64, 64, torch.device("cpu"), torch.Generator())
    for tokens in (1, 5, 16, 24, 47, 48, 49, 50, 96, 97, 192, 193, 400):
        config = choose_config(experts, tokens, 1)
        expected = TileShape(config.block_m, config.extra_m, config.fit)
        if tokens > 4 * 12:
            assert config.prefill
        assert TileShape.by_rule(tokens, 4) == expected, tokens


@functools.cache
def one_gpu() -> list[tuple[TileCount, int, float]]:
    """Every MXFP4 row of one H200: tiles of the tuned kernel, columns, microseconds."""
    k3_kernels = pytest.importorskip("k3_kernels.tuned")
    path = data_dir() / "results" / "h200x2" / "one_gpu.json"
    body = json.loads(path.read_text(encoding="utf-8"))
    found = []
    for row in body["rows"]:
        if row["operator"] not in SHAPES:
            continue
        experts, width, top_k = SHAPES[row["operator"]]
        tokens = int(row["case"].partition(",")[0].removeprefix("T="))
        config = k3_kernels.pick(body["tiles"][row["operator"]], tokens)
        tile = TileShape(
            config.get("block_m", 8), config.get("extra_m", 0), config.get("fit", False)
        )
        generator = np.random.default_rng(tokens)
        load = row["inputs"]["load"]
        drawn = tile.count(draw_counts(experts, top_k, tokens, load, generator))
        more = row["inputs"]["distinct_experts"] / drawn.experts
        count = TileCount(drawn.experts * more, drawn.pairs, drawn.tiles * more, drawn.rows * more)
        found.append((count, width, row["ours_us"]))
    return found


def errors(line: TiledExperts) -> np.ndarray:
    return np.array(
        [line.us(count, latent=3584, width=width) / us - 1 for count, width, us in one_gpu()]
    )


def test_it_goes_through_one_gpus_rows():
    off = errors(TILED)
    assert len(off) == 24
    assert 0.05 < abs(off).max() <= TILED.within
    assert np.sqrt((off**2).mean()) < 0.055


@pytest.mark.parametrize("name", ["start_s", "bandwidth", "rate"])
def test_its_numbers_are_the_least_squares_of_those_rows(name):
    """Moved by a twentieth either way each fits worse: nothing else pulled at them."""
    least = (errors(TILED) ** 2).sum()
    for factor in (0.95, 1.05):
        moved = dataclasses.replace(TILED, **{name: factor * getattr(TILED, name)})
        assert (errors(moved) ** 2).sum() > least


def test_what_a_count_of_experts_and_pairs_does_not_see():
    def us(count: TileCount) -> float:
        return TILED.us(count, latent=3584, width=1536)

    # Eight tokens more for one expert are a tile more; eight for eight experts are none.
    even, heavy = TileShape(8).count([4] * 64), TileShape(8).count([12] + [4] * 63)
    spread = TileShape(8).count([5] * 8 + [4] * 56)
    assert (even.tiles, heavy.tiles, spread.tiles) == (64, 65, 64)
    assert us(heavy) > us(spread)
    # 73 tokens of an expert are multiplied as 128.
    assert TileShape(128, 32).count([73] * 10).rows == 1280
    nothing = TileShape(8).count([0, 0])
    assert nothing == (0, 0, 0, 0)
    assert us(nothing) == pytest.approx(1e6 * TILED.start_s)


def test_a_draw_has_every_token_once():
    for load in ("uniform", "skewed"):
        counts = draw_counts(50, 4, 100, load, np.random.default_rng(1))
        assert counts.sum() == 400
        assert counts.max() <= 100
    assert counts[:10].sum() > 2 * counts[-10:].sum()
