"""Bounds of every address that a kernel touches in Triton's interpreter.

``conftest.py`` runs each kernel test under :func:`checked`. A load, store or atomic whose active
lanes leave the tensor that their pointer was made from fails the test, even if the value is never
used: on a GPU such a read may lie behind the allocation and end the process ("illegal memory
access"). No kernel is excepted. Needs NumPy, and Triton's interpreter once it is entered.

A tensor reaches from its first element to its last, with what lies between its rows, and not to the
end of its storage. So unseen remain a read between two rows of a view (``redzone.py`` sees a write
there, and a read whose value counts), a wrong element of the right tensor, and where a pointer lost
its argument (an integer made into a pointer, ``tl.where`` of two): it may go to any argument.
"""

from __future__ import annotations

import contextlib
import linecache
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np

__all__ = ["OutOfBoundsError", "checked"]

#: What gives a pointer on, by the position of the pointer among its arguments.
_PASS_ON = {
    "create_addptr": 0, "create_expand_dims": 0, "create_broadcast": 0, "create_splat": 1,
    "create_unsplat": 0, "create_bitcast": 0, "create_trans": 0, "create_reshape": 0,
}  # fmt: skip
#: What touches memory, by the positions of pointers and mask. The interpreter makes all else of it.
_ACCESSES = {
    "create_masked_load": ("load", 0, 1),
    "create_masked_store": ("store", 0, 2),
    "create_atomic_rmw": ("atomic", 1, 3),
    "create_atomic_cas": ("atomic", 0, None),
}


class OutOfBoundsError(AssertionError):
    """A kernel touched what does not belong to the tensor it was given."""


@dataclass(frozen=True)
class Extent:
    """Addresses of one argument, ``start`` to before ``stop``."""

    name: str
    start: int
    stop: int
    itemsize: int

    def holds(self, low: int, end: int) -> bool:
        """Whether the bytes from ``low`` to before ``end`` belong to it."""
        return self.start <= low and end <= self.stop

    @property
    def elements(self) -> int:
        """Elements from the first to the last, those between its rows too."""
        return (self.stop - self.start) // self.itemsize

    def distance(self, low: int, end: int) -> int:
        """Bytes by which those leave it, on one side."""
        return max(self.start - low, end - self.stop)


@dataclass
class Launch:
    """One launch: its tensors by ``id``, and the fault that ends it."""

    kernel: str
    extents: dict[int, Extent] = field(default_factory=dict)
    fault: OutOfBoundsError | None = None

    def add(self, name: str, value: Any) -> None:
        """Note the extent of an argument that is a tensor, or holds some."""
        if isinstance(value, tuple):
            for place, item in enumerate(value):
                self.add(f"{name}[{place}]", item)
        elif hasattr(value, "block_shape"):  # a descriptor
            self.add(name, value.base)
        elif hasattr(value, "data_ptr"):
            tensor = getattr(value, "base", value)  # what triton.reinterpret wraps
            start, size = tensor.data_ptr(), tensor.element_size()
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            last = sum((count - 1) * stride for count, stride in steps)
            stop = start + (last + 1) * size if tensor.numel() else start
            self.extents[id(value)] = Extent(name, start, stop, size)

    def check(self, access: str, pointers: Any, mask: Any, program: Any) -> None:
        """Raise if an active lane leaves the argument of its pointer."""
        addresses = pointers.data
        if not addresses.size:
            return
        width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        owner = getattr(pointers, "owner", None)
        allowed = self.extents.values() if owner is None else (owner,)
        low, end = int(addresses.min()), int(addresses.max()) + width
        if any(extent.holds(low, end) for extent in allowed):
            return
        if mask is not None:
            addresses = addresses[np.broadcast_to(mask.data, addresses.shape)]
            if not addresses.size:
                return
        inside = np.zeros(addresses.shape, dtype=bool)
        for extent in allowed:
            if extent.stop - extent.start >= width:
                last = np.uint64(extent.stop - width)
                inside |= (addresses >= np.uint64(extent.start)) & (addresses <= last)
        stray = addresses[~inside]
        if not stray.size:
            return
        self.fault = OutOfBoundsError(
            f"{self.kernel}, program {program}: {access} of {stray.size} "
            f"element{'s' if stray.size > 1 else ''} {_farthest(stray, width, allowed)}{_line()}"
        )
        raise self.fault


def _farthest(stray: np.ndarray, width: int, allowed: Any) -> str:
    """Say how far the farthest of some addresses leaves its argument, or else the nearest one."""
    if not allowed:
        return "by a kernel that got no tensor"
    ends = [(int(address), int(address) + width) for address in (stray.min(), stray.max())]
    nearest = [(end, min(allowed, key=lambda extent: extent.distance(*end))) for end in ends]
    (low, stop), extent = max(nearest, key=lambda pair: pair[1].distance(*pair[0]))
    side = "before the start" if low < extent.start else "behind the end"
    count = -(-extent.distance(low, stop) // extent.itemsize)
    return f"up to {count} {side} of {extent.name} (of {extent.elements})"


def _line() -> str:
    """Say which line of a kernel is being interpreted."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        file = frame.f_code.co_filename
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if file != __file__ and package != "triton":
            source = linecache.getline(file, frame.f_lineno).strip()
            return f"\n{Path(file).name}:{frame.f_lineno}: {source}"
        frame = frame.f_back
    return ""


#: Launches under way: one, or none.
_under_way: list[Launch] = []


def _pass_on(method: Callable[..., Any], position: int) -> Callable[..., Any]:
    """Let the result know the argument that its pointers were made from."""

    def passing(builder: Any, *args: Any) -> Any:
        result = method(builder, *args)
        owner = getattr(args[position], "owner", None)
        if owner is not None:
            result.owner = owner
        return result

    return passing


def _watch(
    method: Callable[..., Any], access: str, pointers: int, mask: int | None
) -> Callable[..., Any]:
    """Check before the access; ``pointers`` and ``mask`` are positions of arguments."""

    def watching(builder: Any, *args: Any, **options: Any) -> Any:
        if _under_way:
            at = None if mask is None else args[mask]
            _under_way[-1].check(access, args[pointers], at, builder.grid_idx)
        return method(builder, *args, **options)

    return watching


def _launch(method: Callable[..., Any]) -> Callable[..., Any]:
    """Note what is launched, and raise a fault as what it is and not as the interpreter's error."""

    def launching(executor: Any, *args: Any, **kwargs: Any) -> Any:
        launch = Launch(executor.fn.__name__)
        _under_way.append(launch)
        try:
            return method(executor, *args, **kwargs)
        except Exception:
            if launch.fault is None:
                raise
            raise launch.fault from None
        finally:
            _under_way.pop()

    return launching


def _arguments(method: Callable[..., Any]) -> Callable[..., Any]:
    """Note the extents of tensors where the interpreter has them on the CPU."""

    def copying(executor: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        on_cpu = method(executor, args, kwargs)
        for name, value in [*zip(executor.arg_names, on_cpu[0], strict=False), *on_cpu[1].items()]:
            _under_way[-1].add(name, value)
        return on_cpu

    return copying


def _pointer(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Let a pointer know its argument from the start."""

    def converting(value: Any) -> Any:
        result = convert(value)
        if _under_way and hasattr(value, "data_ptr"):
            result.handle.owner = _under_way[-1].extents.get(id(value))
        return result

    return converting


def _descriptor(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let pointers of a descriptor know its tensor."""

    def making(descriptor: Any, offsets: Any) -> Any:
        pointers, mask = method(descriptor, offsets)
        pointers.owner = getattr(descriptor.base, "owner", None)
        return pointers, mask

    return making


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Check every launch in the interpreter until the end of the block.

    Raises
    ------
    OutOfBoundsError
        From a launch, in place of the interpreter's own error: an AssertionError that names kernel,
        program, access, distance, argument and source line.
    """
    from triton.runtime import interpreter

    with contextlib.ExitStack() as stack:

        def exchange(owner: Any, name: str, wrap: Callable[..., Any], *options: Any) -> None:
            new = wrap(getattr(owner, name), *options)
            stack.enter_context(mock.patch.object(owner, name, new))

        exchange(interpreter.GridExecutor, "__call__", _launch)
        exchange(interpreter.GridExecutor, "_init_args_hst", _arguments)
        exchange(interpreter, "_implicit_cvt", _pointer)
        exchange(interpreter.TensorDescHandle, "materialize_pointers", _descriptor)
        for name, position in _PASS_ON.items():
            exchange(interpreter.InterpreterBuilder, name, _pass_on, position)
        for name, options in _ACCESSES.items():
            exchange(interpreter.InterpreterBuilder, name, _watch, *options)
        yield
