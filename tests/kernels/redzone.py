"""Tensors with guarded surroundings, to catch a kernel that reads or writes out of bounds.

On a CPU a stray access of a kernel usually passes unnoticed. Every tensor made here lies inside a
larger buffer full of one bit pattern, before it, behind it and, with ``row_gap``, between its rows:

* a stray *write* changes the pattern: :meth:`RedZone.check` says how far from the tensor;
* a stray *read* of a float tensor picks up a NaN, which the comparison with the reference sees; if
  nobody uses what was read, only the bounds check sees it (``bounds.py``, in the interpreter);
* an element of an output that the kernel *forgot* still holds the pattern: :meth:`RedZone.check`
  reports it, for tensors made with :meth:`RedZone.empty`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["RedZone"]

# Quiet NaNs with a recognisable payload; for integers the same bits are an absurd index. Arithmetic
# keeps the payload, so inputs have another one: what a kernel computed from a guard is not mistaken
# for an element it never wrote.
_PATTERNS = {
    1: (torch.uint8, 0x7F, 0x7E),
    2: (torch.int16, 0x7FE5, 0x7FD3),
    4: (torch.int32, 0x7FE5A5A5, 0x7FD3C3C3),
    8: (torch.int64, 0x7FF8A5A5A5A5A5A5, 0x7FF8C3C3C3C3C3C3),
}


@dataclass(frozen=True)
class _Guarded:
    name: str
    bits: torch.Tensor  # the whole buffer as integers
    owned: torch.Tensor  # bool: which elements belong to the tensor
    pattern: int
    must_be_written: bool


class RedZone:
    """Makes guarded tensors for one kernel call and checks their surroundings afterwards.

    Parameters
    ----------
    device
        Device of the tensors.
    row_gap
        Guard elements between consecutive rows (a row is the last dimension) of the first tensor,
        so that a missing mask shows at every row and not only at the last. Every further tensor
        gets 8 more, so that no two have the same stride to confuse. 0 gives contiguous tensors.

    Examples
    --------
    >>> zone = RedZone(row_gap=3)
    >>> out = zone.empty("out", (2, 5), torch.float32)
    >>> _ = out.fill_(1.0)
    >>> zone.check()
    >>> out.as_strided((1,), (1,), out.storage_offset() + 5).fill_(0.0)  # one past the first row
    tensor([0.])
    >>> zone.check()
    Traceback (most recent call last):
    AssertionError: out: 1 element outside the tensor overwritten, first in the gap behind row 0
    """

    def __init__(self, device: str | torch.device = "cpu", row_gap: int = 0) -> None:
        self.device = torch.device(device)
        self.row_gap = row_gap
        self._guarded: list[_Guarded] = []

    def empty(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, *, must_be_written: bool = True
    ) -> torch.Tensor:
        """Return a tensor that holds the guard pattern itself, for a kernel's output."""
        columns = shape[-1]
        pitch = columns + (self.row_gap + 8 * len(self._guarded) if self.row_gap else 0)
        n_rows = 1
        for size in shape[:-1]:
            n_rows *= size
        strides = [1]
        for size in reversed(shape[1:]):
            strides.append(strides[-1] * (pitch if len(strides) == 1 else size))
        strides.reverse()
        # A step too far along the outermost dimension must land in the guard as well, and the
        # tensor has to start where a real allocation would: at a multiple of 16 bytes.
        margin = max(1024, strides[0] if len(shape) > 1 else 0)
        margin = -(-margin // 16) * 16
        integer, output_pattern, input_pattern = _PATTERNS[dtype.itemsize]
        pattern = output_pattern if must_be_written else input_pattern
        bits = torch.full(
            (margin + n_rows * pitch + margin,), pattern, dtype=integer, device=self.device
        )
        tensor = bits.view(dtype).as_strided(tuple(shape), tuple(strides), margin)
        owned = torch.zeros(bits.shape, dtype=torch.bool, device=self.device)
        owned.as_strided(tuple(shape), tuple(strides), margin).fill_(True)
        self._guarded.append(_Guarded(name, bits, owned, pattern, must_be_written))
        return tensor

    def copy(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return a guarded copy of ``values``, for a kernel's input."""
        tensor = self.empty(name, values.shape, values.dtype, must_be_written=False)
        tensor.copy_(values)
        return tensor

    def check(self) -> None:
        """Raise AssertionError if a guard changed or an output element was never written."""
        for guarded in self._guarded:
            changed = guarded.bits != guarded.pattern
            stray = (changed & ~guarded.owned).nonzero().flatten()
            if stray.numel():
                count = f"{stray.numel()} element" + ("s" if stray.numel() > 1 else "")
                raise AssertionError(
                    f"{guarded.name}: {count} outside the tensor overwritten, "
                    f"first {self._where(guarded, int(stray[0]))}"
                )
            if guarded.must_be_written:
                missed = (~changed & guarded.owned).nonzero().flatten()
                if missed.numel():
                    raise AssertionError(
                        f"{guarded.name}: {missed.numel()} of {int(guarded.owned.sum())} elements "
                        "were never written"
                    )

    def _where(self, guarded: _Guarded, position: int) -> str:
        inside = guarded.owned.nonzero().flatten()
        if not inside.numel():
            return "around an empty tensor"
        first, last = int(inside[0]), int(inside[-1])
        if position < first:
            return f"{first - position} before its start"
        if position > last:
            return f"{position - last} behind its end"
        row = int((inside[inside < position].diff() > 1).sum())
        return f"in the gap behind row {row}"
