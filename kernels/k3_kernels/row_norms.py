"""RMSNorm of pieces of rows: of an MLA layer's latents, and of KDA's output with its gate.

Needs PyTorch; Triton when it runs. Lesson 10 uses them.

``row_norm`` takes the piece of a row that one large projection left there, and copies what follows
it if asked to: MLA caches 512 normed values and 64 as they are. ``gated_norm`` normalises each head
of a KDA layer's output and *then* opens it with the sigmoid of its gate; :func:`kda_decode` does
the same inside its own launch, prompts do it here.
"""

from __future__ import annotations

import torch

from k3_kernels._compat import (
    check_ndim,
    check_runs_here,
    check_tensor,
    load_kernels,
    next_power_of_2,
    on_device,
    shape_of,
)
from k3_kernels._numbers import check_number

__all__ = ["gated_norm", "row_norm"]


def row_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-5,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise the first ``len(weight)`` elements of each row, copy the rest.

    Parameters
    ----------
    x
        ``[T, D + tail]``; rows may be any distance apart.
    weight
        ``[D]``, any float type.
    eps
        Added to the mean square, inside the root.
    out
        ``[T, D + tail]``, allocated if None.

    Returns
    -------
    Tensor
        In the type of ``x``; computed in float32.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; the message names it. The interpreter refuses bfloat16.
    ImportError, RuntimeError
        If Triton is missing or cannot run here.

    Examples
    --------
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> x = torch.tensor([[3.0, 4.0, 7.0]], device=device)
    >>> row_norm(x, torch.ones(2, device=device), eps=0.0).square().tolist()[0][2]
    49.0
    """
    check_ndim("row_norm", "x", x, "[T, D]")
    fits = isinstance(weight, torch.Tensor) and weight.ndim == 1
    if not fits or not 1 <= len(weight) <= x.shape[1]:
        raise ValueError(
            f"k3_kernels.row_norm: weight must be a tensor [D] with D from 1 to {x.shape[1]}, "
            f"got {shape_of(weight)}"
        )
    return _launch("row_norm", x, weight, None, eps, out, 1, x.shape[1] - len(weight))


def gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-5,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise each head of ``x [T, H, D]`` and multiply it by ``sigmoid(gate)``.

    ``gate`` and ``out`` have the same shape and type; heads lie together, rows any distance apart.
    ``weight`` is ``[D]`` of any float type, ``eps`` is added to the mean square of a head. Result
    and errors as for :func:`row_norm`.

    Examples
    --------
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> ones = torch.ones(1, 1, 2, device=device)
    >>> gated_norm(ones, 0 * ones, ones[0, 0], eps=0.0).tolist()
    [[[0.5, 0.5]]]
    """
    check_ndim("gated_norm", "x", x, "[T, H, D]")
    tokens, heads, width = x.shape
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for name, tensor in (("x", x), ("gate", gate), ("out", out)):
        check_tensor("gated_norm", name, tensor, (tokens, heads, width), like=x)
        if heads > 1 and tensor.numel() and tensor.stride(1) != width:
            raise ValueError(
                f"k3_kernels.gated_norm: {name} has stride {tensor.stride(1)} between heads, "
                f"expected {width}: call .contiguous() first"
            )
    if not heads:
        check_number("gated_norm", "eps", eps, at_least=0.0)
        check_tensor("gated_norm", "weight", weight, (width,), like=x, same_dtype=False)
        return out
    flat = (tokens, heads * width)
    _launch(
        "gated_norm", _rows(x, flat), weight, _rows(gate, flat), eps, _rows(out, flat), heads, 0
    )
    return out


def _rows(x: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    return x.as_strided(shape, (x.stride(0), 1))


def _launch(
    name: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    gate: torch.Tensor | None,
    eps: float,
    out: torch.Tensor | None,
    heads: int,
    tail: int,
) -> torch.Tensor:
    check_number(name, "eps", eps, at_least=0.0)
    tokens = x.shape[0]
    width = (x.shape[1] - tail) // heads
    check_tensor(name, "x", x, tuple(x.shape), like=x)
    check_tensor(name, "weight", weight, (width,), like=x, same_dtype=False)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    check_tensor(name, "out", out, tuple(x.shape), like=x, output=True)
    if tokens == 0 or width == 0:
        return out
    kernels = load_kernels("row_norms")
    check_runs_here(name, kernels.row_norms_kernel, x, weight, out)
    block = next_power_of_2(max(width, tail))
    rows = max(1, 1024 // block) if heads > 1 else 1
    with on_device(x):
        kernels.row_norms_kernel[(-(-tokens * heads // rows),)](
            # A kernel argument must be a tensor: without a gate it is given one it does not touch.
            out, x, weight, x if gate is None else gate,
            out.stride(0), x.stride(0), x.stride(0) if gate is None else gate.stride(0),
            tokens * heads, eps, WIDTH=width, HEADS=heads, TAIL=tail, HAS_GATE=gate is not None,
            ROWS=rows, BLOCK=block, COMPUTE=kernels.tl.float32, num_warps=4,
        )  # fmt: skip
    return out
