"""Wrong expert kernels, one mistake each: the check of ``test_moe`` must refuse them all."""

# A mutant reads best on one line.
# ruff: noqa: E501

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from moe_cases import Case, check
from mutants import Mutant, build

pytest.importorskip("triton", reason="running kernels needs Triton")

import k3_kernels  # noqa: F401

# A compiled kernel does not notice that a function it calls was exchanged.
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="mutants run in the interpreter"),
    # NumPy, which runs the kernels here, remarks on some of the mistakes.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

SMALL = {"tokens": 2, "top_k": 2, "experts": 3, "hidden": 136, "inner": 40}
DIRECT = Case(**SMALL, config={"direct": True})
SPLIT = Case(**SMALL, config={"direct": True, "gate_split": 2})
SHARED = Case(tokens=9, top_k=1, experts=1, hidden=40, inner=40, config={"direct": True})
LOCAL = Case(tokens=3, top_k=2, experts=2, hidden=40, inner=40, first=1, all_experts=4,
             config={"direct": True})  # fmt: skip
ABSENT = Case(tokens=3, top_k=1, experts=2, hidden=40, inner=40, absent=True,
              config={"direct": True})  # fmt: skip
RESIDENT = Case(tokens=1, top_k=1, experts=2, hidden=200, inner=136,
                config={"direct": True, "down_resident": True, "down_row_blocks": 2})  # fmt: skip
WIDE = Case(tokens=1, top_k=1, experts=1, hidden=40, inner=40, scales=(118, 150),
            config={"direct": True})  # fmt: skip
NIBBLES = Case(tokens=1, top_k=1, experts=1, hidden=40, inner=40, layout="nibbles",
               config={"direct": True})  # fmt: skip
SORTED = Case(**SMALL, config={"block_m": 8})
MANY = Case(**SMALL, config={"prefill": True, "block_m": 16})
PLAIN = Case(**SMALL, kind="bf16", config={"prefill": True, "block_m": 16})
PARTS = Case(tokens=1, top_k=1, experts=1, hidden=96, inner=64,
             config={"direct": True, "gate_split": 4, "down_split": 4})  # fmt: skip
LARGE = Case(tokens=1, top_k=1, experts=1, hidden=40, inner=40,
             config={"prefill": True, "block_m": 16, "gate_block_n": 128, "down_block_n": 128})  # fmt: skip
TILES = Case(tokens=75, top_k=1, experts=2, hidden=40, inner=40, kind="bf16", routing="skewed",
             config={"prefill": True, "block_m": 32, "extra_m": 16})  # fmt: skip
# 72 tokens of one expert are nine blocks of 8: a tile of five and one of four; 64, five and three.
FIT = {"prefill": True, "block_m": 32, "extra_m": 8, "fit": True, "fit_extra": True, "listed": 1}
BOXES = {**FIT, "gate_boxed": True, "down_boxed": True, "block_k": 32}
ONE = {"top_k": 1, "experts": 2, "hidden": 72, "inner": 40, "kind": "bf16", "routing": "one"}
FOUR = Case(tokens=72, **ONE, config=FIT)
LISTED = Case(tokens=75, top_k=1, experts=5, hidden=136, inner=136, kind="bf16", routing="skewed",
              config={**FIT, "listed": 4})  # fmt: skip
BOXED = Case(tokens=64, **ONE, config=BOXES)


@dataclass(frozen=True)
class Wrong:
    """A mutant of ``k3_kernels.<module>`` and the case that shows it."""

    module: str
    case: Case
    mutant: Mutant

    def __str__(self) -> str:
        return f"{self.module.removeprefix('moe_').removesuffix('_kernel')}-{self.mutant}"


def wrong(module: str, case: Case, name: str, old: str, new: str) -> Wrong:
    return Wrong(f"moe_{module}_kernel", case, Mutant(name, old, new))


MUTANTS = [
    # Unpacking
    wrong("mxfp4", DIRECT, "plane-0-one-bit-off", "rotate(q, 4) & 0x81C081C0", "rotate(q, 5) & 0x81C081C0"),
    wrong("mxfp4", DIRECT, "lowest-bit-of-plane-2", "0x00400040", "0x00000040"),
    wrong("mxfp4", DIRECT, "sign-of-plane-2-lost", "& 0x81808180", "& 0x01800180"),
    wrong("mxfp4", DIRECT, "halves-swapped", "tl.join(low, high)", "tl.join(high, low)"),
    wrong("mxfp4", DIRECT, "scale-of-the-next-plane", "(s & (0xFF << (8 * J)))", "(s & (0xFF00 << (8 * J)))"),
    wrong("mxfp4", DIRECT, "last-scale-not-shifted", "field = (s >> 1) &", "field = s &"),
    wrong("mxfp4", WIDE, "wide-factor-missing", "product * 8.507059173023462e37 *", "product *"),
    wrong("mxfp4", MANY, "scale-not-multiplied", "scaled = numbers * plane_scale(s, J, WIDE).to(COMPUTE)[:, None]", "scaled = numbers"),
    wrong("mxfp4", NIBBLES, "nibbles-in-reverse", "q << (12 - 4 * J)", "q << (4 * J)"),
    # Who computes what
    wrong("group", SHARED, "rank-not-relative", "tl.cumsum(same.to(tl.int32), 0) - 1 - before", "tl.cumsum(same.to(tl.int32), 0) - 1"),
    wrong("group", LOCAL, "first-expert-ignored", "mine - first_expert, -2", "mine, -2"),
    wrong("group", LOCAL, "foreign-expert-computed", "tl.where(local, mine - first_expert, -2)", "tl.maximum(mine - first_expert, 0)"),
    wrong("group", ABSENT, "no-expert-meets-padding", "(ids == mine) & (every < num_pairs)", "ids == mine"),
    wrong("group", TILES, "tile-too-long", "(tl.arange(0, 16) < TILE)", "(tl.arange(0, 16) < TILE + 1)"),
    wrong("group", TILES, "tiles-one-block-late", "(before % TILE == 0) &", "(before % TILE == 1) &"),
    # Few tokens
    wrong("gemm", DIRECT, "gate-and-up-swapped", "situ(gate, up, BETA, LINEAR_BETA).to", "situ(up, gate, BETA, LINEAR_BETA).to"),
    wrong("gemm", DIRECT, "bounds-swapped", "gate, up, BETA, LINEAR_BETA).to", "gate, up, LINEAR_BETA, BETA).to"),
    wrong("gemm", DIRECT, "sigmoid-of-the-bounded-gate", "bounded * tl.sigmoid(gate)", "bounded * tl.sigmoid(bounded)"),
    wrong("gemm", DIRECT, "token-is-the-pair", "tokens = pairs // TOP_K", "tokens = pairs // 1"),
    wrong("gemm", DIRECT, "last-columns-not-masked", "mask & (k[:, None] < K)", "mask & (k[:, None] >= 0)"),
    wrong("gemm", DIRECT, "first-scale-twice", "following = tl.minimum(k + 1, last - 1) * 128", "following = tl.minimum(k, last - 1) * 128"),
    wrong("gemm", DIRECT, "store-mask-missing", "mask = mask & (columns[:, None] < I)", "mask = mask & (columns[:, None] >= 0)"),
    wrong("gemm", DIRECT, "weight-missing", "tl.load(weights_ptr + pairs, mask=active, other=0.0)", "1.0 + 0.0 * tl.load(weights_ptr + pairs, mask=active, other=0.0)"),
    wrong("gemm", SPLIT, "split-adds-itself", "partial_ptr + group.to(tl.int64) * (SPLIT_K * 2", "partial_ptr + program.to(tl.int64) * (2"),
    wrong("gemm", SPLIT, "parts-overlap", "first = part * PART\n    last = tl.minimum(first + PART, K_BLOCKS)\n    # Triton", "first = 0\n    last = tl.minimum(first + PART, K_BLOCKS)\n    # Triton"),
    # Nobody uses what these read: only the bounds check sees them.
    wrong("gemm", PARTS, "gate-scales-of-no-columns", "ahead = at_most(first, K_BLOCKS, PART, SPLIT_K) * 128", "ahead = first * 128"),
    wrong("gemm", PARTS, "down-scales-of-no-columns", "start = at_most(first, K_BLOCKS, PART, SPLIT_K)", "start = first"),
    wrong("prefill_gate", LARGE, "gate-words-of-no-rows", "these rows give.\n            tile = tl.minimum(tile, ", "these rows give.\n            tile = tl.maximum(tile, "),
    wrong("prefill_down", LARGE, "down-words-of-no-rows", "!= 0:\n                tile = tl.minimum(tile, ", "!= 0:\n                tile = tl.maximum(tile, "),
    wrong("gemm", RESIDENT, "resident-columns", "x[4 * k + j], acc, j", "x[j], acc, j"),
    wrong("gemm", RESIDENT, "row-blocks-in-one-place", "tl.store(out + n_block * BLOCK_N, result, mask=mask)\n    else:", "tl.store(out + first_block * BLOCK_N, result, mask=mask)\n    else:"),
    # Many tokens
    wrong("tile", MANY, "planes-out-of-order", "p01 = side_by_side(p0, p1, BLOCK_N, 32)", "p01 = side_by_side(p1, p0, BLOCK_N, 32)"),
    wrong("prefill_gate", MANY, "up-reads-gate-scales", "words_ptr + up_offset, scales_ptr + 64", "words_ptr + up_offset, scales_ptr + 0"),
    wrong("tile", PLAIN, "columns-not-masked", "(k[None, :] < COLUMNS)", "(k[None, :] >= 0)"),
    wrong("tile", PLAIN, "tokens-not-masked", "[:, None] < COLUMNS\n        tile = tl.load(at, mask=inside", "[:, None] >= 0\n        tile = tl.load(at, mask=inside"),
    wrong("prefill_gate", TILES, "extra-tokens-are-the-first", "ids_ptr, first, first + MAIN, end, num_pairs, EXTRA\n        )\n        more =", "ids_ptr, first, first, end, num_pairs, EXTRA\n        )\n        more ="),
    wrong("prefill_gate", FOUR, "half-and-extra-for-four", "count * GRANULE == HALF + EXTRA_M", "count * GRANULE >= HALF + EXTRA_M"),
    wrong("prefill_down", FOUR, "half-for-four", "count * GRANULE <= HALF:", "count * GRANULE <= 2 * HALF:"),
    wrong("tiles", LISTED, "tiles-one-block-late", "(index % TILE == 0)", "(index % TILE == 1)"),
    wrong("tiles", LISTED, "follower-of-another-expert", "(follower == expert).to", "(follower >= 0).to"),
    wrong("tiles", LISTED, "always-the-first-tile", "(own + inside % tiles) * 8", "own * 8"),
    wrong("tiles", LISTED, "places-overlap", "program % PLACES * apart", "program % PLACES * (apart - 1)"),
    wrong("prefill_gate", BOXED, "up-is-gate", "words_ptr.load([row + I, ", "words_ptr.load([row, "),
    wrong("prefill_down", BOXED, "first-expert-for-all", "row = expert * H + n_block", "row = (expert + 1) * H + n_block"),
    wrong("prefill_down", BOXED, "extra-tokens-are-the-first", "at = [first + MAIN, step", "at = [first, step"),
    wrong("tile", TILES, "last-slots-left-out", "mask=slots < end, other=num_pairs", "mask=slots < end - 8, other=num_pairs"),
]  # fmt: skip


def use(choice: Wrong, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let the operators launch the mutant: exchange every function that came from its module."""
    parts = ("mxfp4", "group", "gemm", "tile", "tiles", "prefill_gate", "prefill_down")
    names = [f"moe_{part}_kernel" for part in parts]
    modules = [importlib.import_module(f"k3_kernels.{name}") for name in names]
    # A launch that is stopped in the middle leaves the counters of its split as they are.
    patch.setattr(importlib.import_module("k3_kernels.moe_launch"), "_COUNTERS", {})
    original = modules[names.index(choice.module)]
    mutated = build(original, choice.mutant, folder)
    for name, value in vars(original).items():
        function = getattr(value, "fn", None)  # what @triton.jit wraps
        if getattr(function, "__module__", None) != original.__name__:
            continue
        for module in modules:
            if vars(module).get(name) is value:
                patch.setattr(module, name, getattr(mutated, name))


@pytest.mark.parametrize("choice", MUTANTS, ids=str)
def test_check_refuses(
    choice: Wrong, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    use(choice, tmp_path, monkeypatch)
    with pytest.raises(AssertionError):
        check(choice.case, device)


ALL = (DIRECT, SPLIT, SHARED, LOCAL, RESIDENT, WIDE, NIBBLES, SORTED, MANY, PLAIN, TILES)
ALL += (PARTS, LARGE, ABSENT, FOUR, LISTED, BOXED)


@pytest.mark.parametrize("case", ALL, ids=str)
def test_check_accepts_the_right_kernels(case: Case, device: str) -> None:
    check(case, device)


def test_check_accepts_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """The exchange itself changes nothing."""
    control = Mutant("control", '__all__ = ["pair_group"', '__all__ = ["pair_group" ')
    use(Wrong("moe_group_kernel", SHARED, control), tmp_path, monkeypatch)
    check(SHARED, device)
