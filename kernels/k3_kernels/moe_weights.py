"""The weights of the routed experts as the kernels read them, and MXFP4's way from the checkpoint.

Needs PyTorch. :mod:`k3_kernels.moe` runs the experts; lesson 04 uses both.

Packed MXFP4
------------
A checkpoint row is ``K / 2`` bytes, low nibble first, and ``K / 32`` scale bytes. A kernel that
reads it so spends more instructions on unpacking than a memory-bound kernel can hide: at 4.3 TB/s
an H200 has to turn 35 weights a clock and multiprocessor into bfloat16, which leaves at most 3.6
instructions a weight for everything. :func:`pack_mxfp4` changes the order once, when the model is
loaded, and adds no bytes:

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

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

__all__ = [
    "BF16Experts",
    "ExpertWeights",
    "MXFP4Experts",
    "PackedMatrices",
    "pack_mxfp4",
    "random_mxfp4",
]

TILE_ROWS, TILE_COLUMNS = 64, 128
#: Up to this many bytes are rearranged at once; the temporary memory is some 30 times as much.
_CHUNK_BYTES = 1 << 25
#: Scale bytes of random experts, from the first to before the second: 2 ** -9 to 2 ** -6.
_RANDOM_SCALES = (118, 122)

Layout = Literal["rotated", "nibbles"]


@dataclass(frozen=True)
class PackedMatrices:
    """One packed matrix (or gate and up) of every expert.

    Attributes
    ----------
    words
        int32 ``[E, ceil(rows / 64), ceil(columns / 128), M, 64, 16]``; M = 2 for gate and up.
    scales
        int32 ``[E, ceil(rows / 64), ceil(columns / 128), M, 64]``, four scale bytes each.
    rows, columns
        Size of one matrix without filling.
    layout
        ``"rotated"`` or ``"nibbles"``.
    wide
        Scale bytes are the checkpoint's own; some are above 128.
    """

    words: torch.Tensor
    scales: torch.Tensor
    rows: int
    columns: int
    layout: Layout
    wide: bool


@dataclass(frozen=True)
class MXFP4Experts:
    """Experts with packed MXFP4 weights, made by :func:`pack_mxfp4`."""

    gate_up: PackedMatrices
    down: PackedMatrices

    @property
    def num_experts(self) -> int:
        """Experts that are here."""
        return self.gate_up.words.shape[0]

    @property
    def hidden_size(self) -> int:
        """Width of what goes in and comes out (K3: 3584, the latent width)."""
        return self.gate_up.columns

    @property
    def intermediate_size(self) -> int:
        """Width between gate-up and down."""
        return self.gate_up.rows

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.gate_up.words.device


@dataclass(frozen=True)
class BF16Experts:
    """Experts with plain weights: ``gate_up [E, 2 I, H]`` (gate first) and ``down [E, H, I]``.

    Any float type, contiguous; the name says what a GPU runs.

    Examples
    --------
    >>> experts = BF16Experts(torch.zeros(4, 16, 32), torch.zeros(4, 32, 8))
    >>> experts.num_experts, experts.hidden_size, experts.intermediate_size
    (4, 32, 8)
    """

    gate_up: torch.Tensor
    down: torch.Tensor

    def __post_init__(self) -> None:
        up, down = self.gate_up, self.down
        if up.ndim != 3 or down.ndim != 3 or up.shape[1] % 2:
            raise ValueError(
                "BF16Experts: expected gate_up [E, 2 I, H] and down [E, H, I], got "
                f"{list(up.shape)} and {list(down.shape)}"
            )
        expected = (up.shape[0], up.shape[2], up.shape[1] // 2)
        if tuple(down.shape) != expected:
            raise ValueError(
                f"BF16Experts: gate_up {list(up.shape)} needs down {list(expected)}, "
                f"got {list(down.shape)}"
            )
        for name, tensor in (("gate_up", up), ("down", down)):
            if not tensor.is_floating_point():
                raise TypeError(f"BF16Experts: {name} is {tensor.dtype}, expected a float type")
            if not tensor.is_contiguous():
                raise ValueError(f"BF16Experts: {name} must be contiguous, call .contiguous()")
        if up.dtype != down.dtype or up.device != down.device:
            raise ValueError(
                f"BF16Experts: gate_up is {up.dtype} on {up.device}, down is {down.dtype} on "
                f"{down.device}; they must agree"
            )

    @property
    def num_experts(self) -> int:
        """Experts that are here."""
        return self.gate_up.shape[0]

    @property
    def hidden_size(self) -> int:
        """Width of what goes in and comes out."""
        return self.gate_up.shape[2]

    @property
    def intermediate_size(self) -> int:
        """Width between gate-up and down."""
        return self.down.shape[2]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.gate_up.device


ExpertWeights = MXFP4Experts | BF16Experts


def pack_mxfp4(
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    *,
    layout: Layout = "rotated",
) -> MXFP4Experts:
    """Bring checkpoint weights into the order the kernels read, once, when a model is loaded.

    Parameters
    ----------
    gate_up
        uint8 ``[E, 2 I, H / 2]``: rows of the gate (``w1``), then of up (``w3``); two weights a
        byte, the even column in the low nibble.
    gate_up_scale
        uint8 ``[E, 2 I, ceil(H / 32)]``; byte s stands for ``2 ** (s - 127)``.
    down, down_scale
        uint8 ``[E, H, I / 2]`` (``w2``) and ``[E, H, ceil(I / 32)]``.
    layout
        Bit layout of a word, see the module.

    Returns
    -------
    MXFP4Experts
        On the device of the arguments, in as many bytes (plus filling to whole tiles).

    Raises
    ------
    TypeError, ValueError
        If types or shapes do not fit, or a scale byte is 255 (NaN).

    Examples
    --------
    >>> weights = torch.zeros(2, 16, 16, dtype=torch.uint8), torch.full((2, 16, 1), 127).byte()
    >>> down = torch.zeros(2, 32, 4, dtype=torch.uint8), torch.full((2, 32, 1), 127).byte()
    >>> experts = pack_mxfp4(*weights, *down)
    >>> experts.num_experts, experts.hidden_size, experts.intermediate_size
    (2, 32, 8)
    >>> list(experts.gate_up.words.shape)
    [2, 1, 1, 2, 64, 16]
    """
    if layout not in ("rotated", "nibbles"):
        raise ValueError(f"pack_mxfp4: layout must be 'rotated' or 'nibbles', got {layout!r}")
    names = ("gate_up", "gate_up_scale", "down", "down_scale")
    for name, tensor in zip(names, (gate_up, gate_up_scale, down, down_scale), strict=True):
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.uint8:
            kind = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise TypeError(f"pack_mxfp4: {name} must be a uint8 tensor, got {kind}")
        if tensor.ndim != 3 or tensor.device != gate_up.device:
            raise ValueError(
                f"pack_mxfp4: {name} must have three dimensions and be on {gate_up.device}, "
                f"got {list(tensor.shape)} on {tensor.device}"
            )
    experts, rows, half = gate_up.shape
    hidden, intermediate = 2 * half, rows // 2
    expected = {
        "gate_up": (experts, 2 * intermediate, half),
        "gate_up_scale": (experts, rows, -(-hidden // 32)),
        "down": (experts, hidden, intermediate // 2),
        "down_scale": (experts, hidden, -(-intermediate // 32)),
    }
    for name, tensor in zip(names, (gate_up, gate_up_scale, down, down_scale), strict=True):
        if tuple(tensor.shape) != expected[name] or intermediate % 2:
            raise ValueError(
                f"pack_mxfp4: {name} has shape {list(tensor.shape)}, expected "
                f"{list(expected[name])} for E={experts}, H={hidden}, I={intermediate} (I even)"
            )
    pack = partial(_pack, layout=layout)
    return MXFP4Experts(
        pack(
            "gate_up",
            gate_up.unflatten(1, (2, intermediate)),
            gate_up_scale.unflatten(1, (2, intermediate)),
        ),
        pack("down", down[:, None], down_scale[:, None]),
    )


def random_mxfp4(
    num_experts: int,
    hidden: int,
    inner: int,
    *,
    device: torch.device | str,
    generator: torch.Generator | None = None,
    copies: bool = True,
) -> MXFP4Experts:
    """Draw experts to measure with, in the order the kernels read: nothing has to be packed.

    Parameters
    ----------
    num_experts, hidden, inner
        E, H and I. What fills tiles that these do not is drawn too.
    device
        Where they are drawn.
    generator
        On that device; None takes PyTorch's own.
    copies
        False lets all experts share the memory of one: enough to compile for, not to run.

    Examples
    --------
    >>> experts = random_mxfp4(2, 128, 64, device="cpu")
    >>> experts.num_experts, experts.hidden_size, experts.intermediate_size
    (2, 128, 64)
    """

    def draw(shape: tuple[int, ...], low: int, high: int, dtype: torch.dtype) -> torch.Tensor:
        drawn = torch.randint(low, high, shape, dtype=dtype, device=device, generator=generator)
        return drawn.view(torch.int32)

    def matrices(count: int, rows: int, columns: int) -> PackedMatrices:
        tiles = (-(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS), count, TILE_ROWS)
        size = (num_experts if copies else 1, *tiles)
        # Any word is eight valid weights; a byte of a scale that is not wide is kept plus 126.
        words = draw((*size, 16), -(2**31), 2**31, torch.int32)
        low, high = (126 + byte for byte in _RANDOM_SCALES)
        scales = draw((*size, 4), low, high, torch.uint8).squeeze(-1)
        words, scales = (x.expand(num_experts, *x.shape[1:]) for x in (words, scales))
        return PackedMatrices(words, scales, rows, columns, "rotated", False)

    return MXFP4Experts(matrices(2, inner, hidden), matrices(1, hidden, inner))


def _pack(name: str, packed: torch.Tensor, scale: torch.Tensor, layout: Layout) -> PackedMatrices:
    """Pack ``[E, M, rows, columns / 2]`` chunk by chunk."""
    experts, matrices, rows, half = packed.shape
    tiles = (-(-rows // TILE_ROWS), -(-2 * half // TILE_COLUMNS))
    words = packed.new_empty((experts, *tiles, matrices, TILE_ROWS, 16), dtype=torch.int32)
    scales = packed.new_empty((experts, *tiles, matrices, TILE_ROWS), dtype=torch.int32)
    highest = int(scale.max()) if scale.numel() else 0
    if highest == 255:
        raise ValueError(
            f"pack_mxfp4: {name}_scale holds the byte 255, which stands for NaN: "
            "the checkpoint is damaged or was quantized from values that are not finite"
        )
    wide = highest > 128
    lookup = _lookup(layout).to(packed.device)
    step = max(1, _CHUNK_BYTES // max(1, packed[0].numel())) if experts else 1
    for first in range(0, experts, step):
        chunk = slice(first, first + step)
        words[chunk] = _words(packed[chunk], lookup, tiles)
        scales[chunk] = _scales(scale[chunk], tiles, wide)
    return PackedMatrices(words, scales, rows, 2 * half, layout, wide)


def _lookup(layout: Layout) -> torch.Tensor:
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


def _words(packed: torch.Tensor, lookup: torch.Tensor, tiles: tuple[int, int]) -> torch.Tensor:
    experts, matrices, rows, half = packed.shape
    missing = (0, tiles[1] * 64 - half, 0, tiles[0] * TILE_ROWS - rows)
    filled = torch.nn.functional.pad(packed, missing)
    # expert, matrix, row tile, row, column tile, plane, word
    grid = filled.view(experts, matrices, tiles[0], TILE_ROWS, tiles[1], 4, 16)
    words = lookup[0][grid[..., 0, :].int()]
    for j in range(1, 4):
        words |= lookup[j][grid[..., j, :].int()]
    return words.permute(0, 2, 4, 1, 3, 5)


def _scales(scale: torch.Tensor, tiles: tuple[int, int], wide: bool) -> torch.Tensor:
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
