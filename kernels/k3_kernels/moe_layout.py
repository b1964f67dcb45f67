"""How packed MXFP4 weights lie in memory, and the words that hold them.

Needs PyTorch. :mod:`k3_kernels.moe_weights` packs whole experts with it, the Triton code in
:mod:`k3_kernels.moe_mxfp4_kernel` reads what it wrote; lesson 04 explains it.

A checkpoint row is ``K / 2`` bytes, low nibble first, and ``K / 32`` scale bytes. A kernel that
reads it so spends more instructions on unpacking than a memory-bound kernel can hide: at 4.3 TB/s
an H200 has to turn 35 weights a clock and multiprocessor into bfloat16, which leaves at most 3.6
instructions a weight for everything. :func:`k3_kernels.pack_mxfp4` changes the order once, when the
model is loaded, and adds no bytes:

*Tiles.* The matrix falls into tiles of 64 rows and 128 columns. A tile's words lie together (4 kB)
and a program of the GEMM walks through consecutive tiles, so every read is long and sequential.
Gate and up alternate tile by tile, because one program computes both. Rows and columns are filled
up with zeros to whole tiles.

*Words.* Word ``w`` of a row of a tile holds columns ``32 j + 2 w + b``: plane j = 0..3, half b.
A group of 32 columns with one scale is then one plane of 16 words, and the scales of a row's four
groups are one word too.

*Bits.* Two layouts. ``"rotated"``: plane 3 lies where bfloat16 wants it, planes 0 and 1 one
rotation away from there, plane 2 in the bits that are left: 9 operations for 8 weights.
``"nibbles"``: plane j in bits 4 j to 4 j + 3 of each half, 15 operations, easier to follow.
Instructions a weight in the gate-up loop (sm_90, 8 tokens): 2.55 and 3.2 with Triton 3.6, but 3.8
and 3.4 with Triton 3.9, whose LLVM cuts words into halves and joins them again.

*Scale bytes* are kept plus 126 if all are at most 128, which makes a byte the exponent field of the
scale times ``2 ** 126``. Otherwise they are kept as they are (``wide``) and cost one more
multiplication.
"""

from __future__ import annotations

from typing import Literal

import torch

__all__ = ["TILE_COLUMNS", "TILE_ROWS", "Layout", "byte_table", "pack_scales", "pack_words"]

TILE_ROWS, TILE_COLUMNS = 64, 128

Layout = Literal["rotated", "nibbles"]


def byte_table(layout: Layout) -> torch.Tensor:
    """Return int32 ``[4, 256]``: what a byte of plane j contributes to its word."""
    byte = torch.arange(256, dtype=torch.int64)
    low, high = byte & 15, byte >> 4
    if layout == "nibbles":
        planes = [(low << 4 * j) | (high << (16 + 4 * j)) for j in range(4)]
    else:

        def both(part: int, shift: int) -> torch.Tensor:
            half = ((low & part) << shift) | ((high & part) << (16 + shift))
            return half & 0xFFFFFFFF

        # Where bfloat16 wants them: sign at 15, magnitude at 8 to 6, in both halves.
        sign, upper, lowest = both(8, 12), both(6, 6), both(1, 6)

        def right(value: torch.Tensor, bits: int) -> torch.Tensor:
            return ((value >> bits) | (value << (32 - bits))) & 0xFFFFFFFF

        whole = sign | upper | lowest
        planes = [
            right(whole, 4),
            right(whole, 10),
            right(lowest, 6) | right(sign | upper, 14),
            whole,
        ]
    table = torch.stack(planes)
    return torch.where(table >= 2**31, table - 2**32, table).to(torch.int32)


def pack_words(packed: torch.Tensor, table: torch.Tensor, tiles: tuple[int, int]) -> torch.Tensor:
    """Bring uint8 ``[E, M, rows, columns / 2]`` into words, int32 ``[E, *tiles, M, 64, 16]``.

    ``table`` is that of the bit layout; ``tiles`` says how many there are along rows and columns.
    """
    experts, matrices, rows, half = packed.shape
    missing = (0, tiles[1] * 64 - half, 0, tiles[0] * TILE_ROWS - rows)
    filled = torch.nn.functional.pad(packed, missing)
    # expert, matrix, row tile, row, column tile, plane, word
    grid = filled.view(experts, matrices, tiles[0], TILE_ROWS, tiles[1], 4, 16)
    words = table[0][grid[..., 0, :].int()]
    for j in range(1, 4):
        words |= table[j][grid[..., j, :].int()]
    return words.permute(0, 2, 4, 1, 3, 5)


def pack_scales(scale: torch.Tensor, tiles: tuple[int, int], wide: bool) -> torch.Tensor:
    """Bring uint8 ``[E, M, rows, columns / 32]`` into words, int32 ``[E, *tiles, M, 64]``."""
    experts, matrices, rows, groups = scale.shape
    missing = (0, tiles[1] * 4 - groups, 0, tiles[0] * TILE_ROWS - rows)
    filled = torch.nn.functional.pad(scale, missing).long()
    grid = filled.view(experts, matrices, tiles[0], TILE_ROWS, tiles[1], 4)
    if not wide:
        grid = grid + 126
    place = torch.tensor([1, 1 << 8, 1 << 16, 1 << 24], device=scale.device)
    words = (grid * place).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return words.permute(0, 2, 4, 1, 3)
