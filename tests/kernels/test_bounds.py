"""The bounds check that ``conftest.py`` puts around every kernel test: what it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="running kernels needs Triton")

import triton
import triton.language as tl
from bounds import OutOfBoundsError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this is about the interpreter")


@triton.jit
def unused_prefetch_kernel(out_ptr, x_ptr, N: tl.constexpr):
    ahead = tl.load(x_ptr)
    for i in range(N):
        now = ahead
        ahead = tl.load(x_ptr + i + 1)
        tl.store(out_ptr + i, now)


@triton.jit
def prefetch_kernel(out_ptr, x_ptr, N: tl.constexpr):
    ahead = tl.load(x_ptr)
    for i in range(N):
        now = ahead
        ahead = tl.load(x_ptr + tl.minimum(i + 1, N - 1))
        tl.store(out_ptr + i, now)


@triton.jit
def shifted_kernel(out_ptr, x_ptr, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at + SHIFT))


@triton.jit
def store_kernel(out_ptr, n, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if MASKED:
        tl.store(out_ptr + at, 1.0, mask=at < n)
    else:
        tl.store(out_ptr + at, 1.0)


@triton.jit
def count_kernel(counts_ptr, ids_ptr, n, SWAP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + at, mask=at < n, other=1_000_000)
    if SWAP:
        tl.atomic_cas(counts_ptr + tl.min(ids), 0, 1)
    else:
        tl.atomic_add(counts_ptr + ids, 1, mask=at < n)


@triton.jit
def read_row(x_ptr, row, stride, columns):
    return tl.load(x_ptr + row * stride + columns)


@triton.jit
def row_kernel(out_ptr, x_ptr, row, stride, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    tl.store(out_ptr + columns, read_row(x_ptr, row, stride, columns))


@triton.jit
def tiles_kernel(out_ptr, x_ptr, rows, pitch, row, BLOCK: tl.constexpr):
    tiles = tl.make_tensor_descriptor(x_ptr, [rows, pitch], [pitch, 1], [2, BLOCK])
    tile = tiles.load([row, 0])
    at = tl.arange(0, 2)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(out_ptr + at, tile)


@triton.jit
def pairs_kernel(out_ptr, x_ptr, BLOCK: tl.constexpr):
    pairs = x_ptr.to(tl.pointer_type(tl.int64))
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(pairs + at))


@triton.jit
def choice_kernel(out_ptr, x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(tl.where(at % 2 == 0, x_ptr, y_ptr) + at))


def some(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def view() -> torch.Tensor:
    """Three rows of 8 that lie 16 apart, with more behind them."""
    return some(5, 16)[:3, :8]


def neighbours() -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors, one directly behind the other."""
    both = some(16)
    return both[:8], both[8:]


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "unused prefetch": (
        lambda: unused_prefetch_kernel[(1,)](some(5), some(5), N=5),
        r"unused_prefetch_kernel, program \(0, 0, 0\): load of 1 element "
        r"up to 1 behind the end of x_ptr \(of 5\)\n"
        r"test_bounds.py:\d+: ahead = tl.load\(x_ptr \+ i \+ 1\)",
    ),
    "before the start": (
        lambda: shifted_kernel[(1,)](some(8), some(8), SHIFT=-1, BLOCK=8),
        r"load of 1 element up to 1 before the start of x_ptr \(of 8\)",
    ),
    "before the start, in the storage": (
        lambda: shifted_kernel[(1,)](some(8), some(16)[8:], SHIFT=-3, BLOCK=8),
        r"load of 3 elements up to 3 before the start of x_ptr",
    ),
    "into the next argument": (
        lambda: shifted_kernel[(1,)](*reversed(neighbours()), SHIFT=2, BLOCK=8),
        "load of 2 elements up to 2 behind the end of x_ptr",
    ),
    "store without a mask": (
        lambda: store_kernel[(2,)](some(13), 13, MASKED=False, BLOCK=8),
        r"program \(1, 0, 0\): store of 3 elements up to 3 behind the end of out_ptr \(of 13\)",
    ),
    "store into an empty tensor": (
        lambda: store_kernel[(1,)](some(0), 1, MASKED=True, BLOCK=8),
        r"store of 1 element up to 1 behind the end of out_ptr \(of 0\)",
    ),
    "atomic": (
        lambda: count_kernel[(1,)](ids(0, 0, 0), ids(0, 1, 3), 3, SWAP=False, BLOCK=4),
        "atomic of 1 element up to 1 behind the end of counts_ptr",
    ),
    "compare and swap": (
        lambda: count_kernel[(1,)](ids(0, 0, 0), ids(7, 9), 2, SWAP=True, BLOCK=2),
        "atomic of 1 element up to 5 behind the end of counts_ptr",
    ),
    "behind a view's last row": (
        lambda: row_kernel[(1,)](some(16), view(), 2, 16, BLOCK=16),
        r"load of 8 elements up to 8 behind the end of x_ptr \(of 40\)\n.*: return tl.load",
    ),
    "descriptor of too many rows": (
        lambda: tiles_kernel[(1,)](some(2, 16), some(3, 16), 4, 16, 2, BLOCK=16),
        r"load of 16 elements up to 16 behind the end of x_ptr \(of 48\)",
    ),
    "half of a wider element": (
        lambda: pairs_kernel[(1,)](some(4, dtype=torch.int64), ids(0, 1, 2, 3, 4, 5, 6), BLOCK=4),
        r"load of 1 element up to 1 behind the end of x_ptr \(of 7\)",
    ),
    "no argument to blame": (
        lambda: choice_kernel[(1,)](some(8), some(8), some(7), BLOCK=8),
        "load of 1 element up to 1 behind the end of y_ptr",
    ),
}

RIGHT: dict[str, Callable[[], object]] = {
    "prefetch": lambda: prefetch_kernel[(1,)](some(5), some(5), N=5),
    "masked store": lambda: store_kernel[(2,)](some(13), 13, MASKED=True, BLOCK=8),
    "nothing to store": lambda: store_kernel[(1,)](some(0), 0, MASKED=True, BLOCK=8),
    "masked atomic": lambda: count_kernel[(1,)](ids(0, 0), ids(0, 1, 1), 3, SWAP=False, BLOCK=4),
    "compare and swap": lambda: count_kernel[(1,)](ids(0, 0), ids(1, 9), 2, SWAP=True, BLOCK=2),
    "all of a descriptor": lambda: tiles_kernel[(1,)](some(2, 16), some(3, 16), 3, 16, 2, BLOCK=16),
    "wider elements": lambda: pairs_kernel[(1,)](
        some(2, dtype=torch.int64), ids(0, 1, 2, 3), BLOCK=2
    ),
    "two arguments in turns": lambda: choice_kernel[(1,)](some(8), some(7), some(8), BLOCK=8),
    # What the extent of a tensor cannot tell: that its rows end before the next one begins.
    "between two rows of a view": lambda: row_kernel[(1,)](some(16), view(), 1, 16, BLOCK=16),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_address_outside_is_refused(name: str) -> None:
    launch, message = WRONG[name]
    with pytest.raises(OutOfBoundsError, match=message):
        launch()


@pytest.mark.parametrize("name", RIGHT)
def test_what_stays_inside_passes(name: str) -> None:
    RIGHT[name]()
    with pytest.raises(OutOfBoundsError):  # the check was on, and stays on
        WRONG["unused prefetch"][0]()


def test_a_refusal_ends_with_its_launch() -> None:
    with pytest.raises(OutOfBoundsError):
        WRONG["unused prefetch"][0]()
    out = torch.zeros(5)
    prefetch_kernel[(1,)](out, torch.arange(5.0), N=5)
    assert out.tolist() == [0, 1, 2, 3, 4]


def test_other_errors_of_a_kernel_stay_what_they_are() -> None:
    from triton.runtime.errors import InterpreterError

    with pytest.raises(InterpreterError, match="arange"):
        shifted_kernel[(1,)](some(8), some(8), SHIFT=0, BLOCK=7)
