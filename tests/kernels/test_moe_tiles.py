"""The list of tiles against a plain loop over blocks."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="running kernels needs Triton")

from k3_kernels.moe_tiles import list_tiles, max_tiles


def plain_list(experts: list[int], tile: int) -> list[tuple[int, int, int]]:
    """Expert, first block and blocks of every tile."""
    found, first = [], 0
    for expert, group in itertools.groupby(experts):
        blocks = len(list(group))
        if expert >= 0:
            found += [(expert, first + at, min(tile, blocks - at)) for at in range(0, blocks, tile)]
        first += blocks
    return found


@pytest.mark.parametrize(
    ("loads", "tile"),
    [
        ({0: 1}, 1),
        ({0: 5, 1: 6, 4: 11, 7: 3}, 5),
        ({2: 19, 3: 9, 5: 1, 6: 40}, 9),  # runs that cross the kernel's chunks
    ],
)
@pytest.mark.parametrize("unused", [0, 7])
def test_lists_every_tile_once(
    loads: dict[int, int], tile: int, unused: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("k3_kernels.moe_tiles._CHUNK", 16)
    experts = [e for e, blocks in loads.items() for _ in range(blocks)] + [-1] * unused
    expected = plain_list(experts, tile)
    blocks = torch.tensor(experts, dtype=torch.int32, device=device)
    most = len(expected) + 3
    tiles = list_tiles(blocks, most, tile).tolist()
    assert tiles[0][5] == len(expected)
    assert [tuple(row[:3]) for row in tiles[: len(expected)]] == expected
    assert all(row[2] == 0 for row in tiles[len(expected) :])
    # A tile names the first of its expert, which knows how many there are; unused ones themselves.
    for at, row in enumerate(tiles):
        own = row[3]
        mine = [i for i, t in enumerate(expected) if t[0] == row[0]] if at < len(expected) else [at]
        assert own == mine[0]
        assert tiles[own][4] == len(mine)


def test_no_routing_needs_more() -> None:
    """Every expert one pair more than a tile, as far as the pairs go."""
    for pairs, experts, block, tile in ((50, 3, 4, 2), (8, 20, 4, 5), (33, 4, 8, 1), (7, 1, 2, 3)):
        used, left = 0, pairs
        for expert in range(experts):
            mine = left if expert == experts - 1 else min(left, block * tile + 1)
            used += -(-mine // (block * tile))
            left -= mine
        assert used <= max_tiles(pairs, experts, block, tile)
