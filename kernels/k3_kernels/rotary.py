"""Rotary position embedding of neighbouring pairs, in place: K3's drafter has it, K3 has not.

Needs PyTorch; Triton when it runs. Lesson 10 uses it inside the drafter.

Cosines and sines are handed in: five draft layers, queries and keys share them, and they are taken
in float64 once for a step.
"""

from __future__ import annotations

import torch

from k3_kernels._compat import (
    check_runs_here,
    check_tensor,
    load_kernels,
    next_power_of_2,
    on_device,
    shape_of,
)

__all__ = ["rotate_pairs"]


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate channel pairs (0, 1), (2, 3), ... of every head.

    Parameters
    ----------
    x
        ``[T, H, P]``, changed in place; rows and heads may be any distance apart, but must not
        share memory.
    cos, sin
        float32 ``[T, P / 2]``, contiguous: of the angle of each token and pair.

    Returns
    -------
    Tensor
        ``x``.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; the message names it. The interpreter refuses bfloat16.
    ImportError, RuntimeError
        If Triton is missing or cannot run here.

    Examples
    --------
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> x = torch.tensor([[[1.0, 0.0]]], device=device)
    >>> zero, one = torch.zeros(1, 1, device=device), torch.ones(1, 1, device=device)
    >>> rotate_pairs(x, zero, one).tolist()
    [[[0.0, 1.0]]]
    """
    if not isinstance(x, torch.Tensor) or x.ndim != 3 or x.shape[2] % 2:
        raise ValueError(
            f"k3_kernels.rotary: x must be a tensor [T, H, P] with even P, got {shape_of(x)}"
        )
    tokens, heads, width = x.shape
    check_tensor("rotary", "x", x, (tokens, heads, width), like=x, output=True)
    for name, tensor in (("cos", cos), ("sin", sin)):
        check_tensor("rotary", name, tensor, (tokens, width // 2), like=x, same_dtype=False)
        if tensor.dtype != torch.float32:
            raise TypeError(
                f"k3_kernels.rotary: {name} is {tensor.dtype}, expected torch.float32: its angles "
                "need the digits, call .float()"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"k3_kernels.rotary: {name} must be contiguous, call .contiguous()")
    if not x.numel():
        return x
    reach = width  # elements from the first to behind the last of the dimensions so far
    for stride, size in sorted(((x.stride(1), heads), (x.stride(0), tokens))):
        if size > 1 and stride < reach:
            raise ValueError(
                f"k3_kernels.rotary: x has strides {list(x.stride())} for {list(x.shape)}: heads "
                "share memory and would be rotated twice, pass a real buffer"
            )
        reach += stride * (size - 1)
    kernels = load_kernels("rotary")
    check_runs_here("rotary", kernels.rotate_kernel, x, cos, sin)
    with on_device(x):
        kernels.rotate_kernel[(tokens,)](
            x, cos, sin, x.stride(0), x.stride(1), HEADS=heads, PAIRS=width // 2,
            BLOCK_H=next_power_of_2(heads), BLOCK_P=next_power_of_2(width // 2),
            COMPUTE=kernels.tl.float32, num_warps=1,
        )  # fmt: skip
    return x
