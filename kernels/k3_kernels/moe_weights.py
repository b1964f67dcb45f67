"""The weights of the routed experts as the kernels read them, and MXFP4's way from the checkpoint.

Needs PyTorch. :mod:`k3_kernels.moe` runs the experts, :mod:`k3_kernels.moe_layout` says how packed
weights lie in memory; lesson 04 uses all three.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from k3_kernels.moe_layout import (
    TILE_COLUMNS,
    TILE_ROWS,
    Layout,
    byte_table,
    pack_scales,
    pack_words,
)

__all__ = [
    "BF16Experts",
    "ExpertWeights",
    "MXFP4Experts",
    "PackedMatrices",
    "pack_mxfp4",
    "random_mxfp4",
]

#: Up to this many bytes are rearranged at once; the temporary memory is some 30 times as much.
_CHUNK_BYTES = 1 << 25
#: Scale bytes of random experts, from the first to before the second: 2 ** -9 to 2 ** -6.
_RANDOM_SCALES = (118, 122)


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
        Bit layout of a word.

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
    table = byte_table(layout).to(packed.device)
    step = max(1, _CHUNK_BYTES // max(1, packed[0].numel())) if experts else 1
    for first in range(0, experts, step):
        chunk = slice(first, first + step)
        words[chunk] = pack_words(packed[chunk], table, tiles)
        scales[chunk] = pack_scales(scale[chunk], tiles, wide)
    return PackedMatrices(words, scales, rows, 2 * half, layout, wide)
