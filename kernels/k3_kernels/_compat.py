"""What every operator asks of Triton and of its arguments before it launches a kernel.

Needs PyTorch; Triton only once a kernel is loaded. Used by the operators of this package.

Two ways to run a kernel. With a CUDA device Triton compiles it. With ``TRITON_INTERPRET=1``
Triton's interpreter runs it on NumPy arrays instead, about half a millisecond per program: good for
learning and for tests on a machine without a GPU. Triton reads that variable when ``@triton.jit``
decorates a function, and its own library (``tl.sum`` and the like) is decorated when Triton is
imported, so the variable has to be set before the first ``import triton`` of the process.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from types import ModuleType
from typing import Any

import torch

__all__ = [
    "check_integers",
    "check_ndim",
    "check_runs_here",
    "check_tensor",
    "load_kernels",
    "next_power_of_2",
    "on_device",
    "shape_of",
]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
#: CUDA's limit on programs along the second and the third axis of a grid.
GRID_LIMIT = 65_535


def load_kernels(operator: str, name: str | None = None) -> ModuleType:
    """Import Triton code of an operator: ``k3_kernels.<name>_kernel``, by its own name if None.

    Raises
    ------
    ImportError
        If Triton is not installed or does not load; the message says what to install.
    """
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"k3_kernels.{operator} needs Triton, which could not be imported ({error}). "
            "Triton 3.6 or newer runs on Linux: 'pip install triton'. "
            "On another system use the plain PyTorch reference instead."
        ) from error
    return importlib.import_module(f"k3_kernels.{name or operator}_kernel")


def shape_of(value: Any) -> list[int] | str:
    """Return the shape of a tensor, the type of anything else: what a message says it got.

    Examples
    --------
    >>> shape_of(torch.zeros(2, 3)), shape_of([2, 3])
    ([2, 3], 'list')
    """
    return list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__


def check_ndim(operator: str, name: str, tensor: Any, layout: str) -> None:
    """Refuse anything but a tensor of as many dimensions as ``layout`` names.

    Parameters
    ----------
    operator, name
        Used in the message.
    tensor
        The argument.
    layout
        Such as ``"[T, H]"``. What stands behind the bracket is for the message alone.

    Raises
    ------
    ValueError
        If it is something else.
    """
    ndim = layout.partition("]")[0].count(",") + 1
    if not isinstance(tensor, torch.Tensor) or tensor.ndim != ndim:
        raise ValueError(
            f"k3_kernels.{operator}: {name} must be a tensor {layout}, got {shape_of(tensor)}"
        )


def check_tensor(
    operator: str,
    name: str,
    tensor: Any,
    shape: tuple[int, ...],
    *,
    like: torch.Tensor,
    same_dtype: bool = True,
    output: bool = False,
) -> None:
    """Refuse a tensor that a kernel would read wrongly, naming what is wrong and the mend.

    Parameters
    ----------
    operator, name
        Used in the message.
    tensor
        The argument. Its last dimension must be contiguous; the others may have any stride.
    shape
        The expected shape.
    like
        The operator's main input: the device, and with ``same_dtype`` the dtype, must equal its.
    same_dtype
        False for weights, which may be kept in another float type than the activations.
    output
        True for a tensor that the kernel writes: its elements must not share memory.

    Raises
    ------
    TypeError
        If it is not a tensor or has another dtype.
    ValueError
        If the shape, the device or the strides do not fit.
    """
    where = f"k3_kernels.{operator}: {name}"
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{where} must be a torch.Tensor, got {type(tensor).__name__}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{where} has shape {list(tensor.shape)}, expected {list(shape)}")
    if tensor.dtype not in FLOATS:
        raise TypeError(f"{where} is {tensor.dtype}, expected float32, float16 or bfloat16")
    if same_dtype and tensor.dtype != like.dtype:
        raise TypeError(f"{where} is {tensor.dtype}, expected {like.dtype}: convert with .to()")
    if tensor.device != like.device:
        raise ValueError(f"{where} is on {tensor.device}, expected {like.device}")
    if tensor.numel() == 0:
        return
    if shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{where} has stride {tensor.stride(-1)} in its last dimension, expected 1: "
            "rows must be contiguous, call .contiguous() first"
        )
    if output and any(s == 0 and n > 1 for s, n in zip(tensor.stride(), shape, strict=True)):
        raise ValueError(f"{where} is an expanded view whose rows share memory: pass a real buffer")


def check_integers(
    operator: str, name: str, tensor: Any, shape: tuple[int, ...], *, like: torch.Tensor
) -> None:
    """Refuse anything but a contiguous int32 or int64 tensor of a shape, on the device of ``like``.

    Raises
    ------
    TypeError
        If it is not a tensor of integers.
    ValueError
        If the shape, the device or the strides do not fit.
    """
    where = f"k3_kernels.{operator}: {name}"
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{where} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{where} is {tensor.dtype}, expected int32 or int64")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{where} has shape {list(tensor.shape)}, expected {list(shape)}")
    if tensor.device != like.device:
        raise ValueError(f"{where} is on {tensor.device}, expected {like.device}")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{where} has strides {list(tensor.stride())}, expected it contiguous: "
            "call .contiguous() first"
        )


def check_runs_here(operator: str, kernel: Any, *tensors: torch.Tensor | None) -> None:
    """Refuse a launch that Triton would fail obscurely or compute silently wrong.

    Raises
    ------
    RuntimeError
        If the tensors are not on a CUDA device and the kernel is compiled, or if
        ``TRITON_INTERPRET`` changed after Triton had been imported.
    TypeError
        If a bfloat16 tensor meets the interpreter, which multiplies and adds the bit patterns of
        bfloat16 and truncates where it should round, with no error
        (https://github.com/triton-lang/triton/issues/11584).
    """
    import triton
    import triton.language as tl

    # JITFunction is what @triton.jit makes when it will compile; the interpreter has its own class.
    compiled = isinstance(kernel, triton.JITFunction)
    if compiled != isinstance(tl.sum, triton.JITFunction):
        raise RuntimeError(
            f"k3_kernels.{operator}: TRITON_INTERPRET changed after Triton was imported, so only "
            "half of the code would be interpreted. Restart Python with the variable already set."
        )
    present = [tensor for tensor in tensors if tensor is not None]
    if compiled and present[0].device.type != "cuda":
        late = (
            " It is set now, but was not yet when Triton was imported: restart Python."
            if os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")
            else ""
        )
        raise RuntimeError(
            f"k3_kernels.{operator}: tensors are on {present[0].device}, but Triton compiles for "
            "GPUs. Move them to a CUDA device, or set TRITON_INTERPRET=1 in the environment "
            f"before Triton is imported, to run small shapes in its interpreter.{late}"
        )
    if not compiled and any(tensor.dtype == torch.bfloat16 for tensor in present):
        raise TypeError(
            f"k3_kernels.{operator}: Triton's interpreter computes bfloat16 wrongly without an "
            "error (it works on the bit patterns, triton-lang/triton#11584). Use float32 or "
            "float16 under TRITON_INTERPRET=1, and bfloat16 on a GPU."
        )


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is not less than a positive number.

    Triton has the same, but it may not be there when constants are chosen.

    Examples
    --------
    >>> next_power_of_2(1), next_power_of_2(5), next_power_of_2(64)
    (1, 8, 64)
    """
    return 1 << (number - 1).bit_length()


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Make the tensor's GPU the current one: Triton launches on the current device, not on its."""
    if tensor.device.type == "cuda" and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()
