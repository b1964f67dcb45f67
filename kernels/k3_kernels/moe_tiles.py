"""The list of tiles: which programs of an expert GEMM have something to do.

Needs PyTorch; Triton when it runs. Used by :mod:`k3_kernels.moe`.

Where a program takes several blocks of an expert as one tile, most blocks start no tile: of five
programs with tiles of 128 + 32 four end at once. They still have to be started one after another,
and a multiprocessor that holds one program at a time does nothing else meanwhile. The list, one
short launch, names the tiles alone: expert, first block, blocks; then the first tile of the expert
and, with that tile, how many it has. So a program can also find its expert's other tiles. The first
entry ends with the number of tiles.
"""

from __future__ import annotations

import torch

from k3_kernels._compat import check_runs_here, load_kernels, next_power_of_2, on_device

__all__ = ["list_tiles", "max_tiles"]

#: Blocks that the kernel looks at together.
_CHUNK = 1024


def max_tiles(num_pairs: int, num_experts: int, block: int, tile: int) -> int:
    """Return how many tiles of ``tile`` blocks of ``block`` pairs any routing can need.

    Examples
    --------
    >>> max_tiles(16384, 112, 32, 5), max_tiles(3, 112, 32, 5)
    (214, 3)
    """
    return min(num_pairs, num_experts) + num_pairs // (block * tile)


def list_tiles(block_experts: torch.Tensor, most: int, tile: int) -> torch.Tensor:
    """List the tiles of up to ``tile`` blocks of one expert.

    Parameters
    ----------
    block_experts
        int32 ``[max_blocks]`` of :class:`k3_kernels.dispatch.Dispatch`.
    most
        Length of the list, from :func:`max_tiles`.
    tile
        Blocks of a tile.

    Returns
    -------
    Tensor
        int32 ``[most, 8]``, of which six are written; tiles behind the last have no blocks.
    """
    kernels = load_kernels("moe_tiles")
    check_runs_here("moe_experts", kernels.list_tiles_kernel, block_experts)
    tiles = block_experts.new_empty((most, 8))
    chunk = min(_CHUNK, next_power_of_2(len(block_experts)))
    with on_device(block_experts):
        kernels.list_tiles_kernel[(1,)](
            tiles, block_experts, len(block_experts), most, TILE=tile, CHUNK=chunk, num_warps=8
        )
    return tiles
