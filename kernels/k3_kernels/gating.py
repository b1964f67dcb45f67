"""Gated products, one launch each: SiTU and SiLU of a feed-forward, the output gate of attention.

Needs PyTorch; Triton when it runs. Lesson 10 uses them in a decode step, where seven operators of
PyTorch in a row cost seven launches for a few kilobytes::

    situ_and_mul   beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta)
    silu_and_mul   g sigmoid(g) * u
    sigmoid_mul    x * sigmoid(g)

Rows may lie any distance apart, as the columns of one large projection do, in and out.
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
)
from k3_kernels._numbers import check_number

__all__ = ["sigmoid_mul", "silu_and_mul", "situ_and_mul"]


def situ_and_mul(
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    beta: float = 4.0,
    linear_beta: float = 25.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return K3's SiTU of ``gate`` and ``up``, both ``[T, D]``; computed in float32.

    The bounds ``beta`` and ``linear_beta`` are above 0.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; the message names it. The interpreter refuses bfloat16.
    ImportError, RuntimeError
        If Triton is missing or cannot run here.

    Examples
    --------
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> big = torch.full((1, 4), 1e9, device=device)
    >>> situ_and_mul(big, big).tolist()
    [[100.0, 100.0, 100.0, 100.0]]
    """
    for name, value in (("beta", beta), ("linear_beta", linear_beta)):
        check_number("situ_and_mul", name, value, above=0.0)
    return _launch("situ_and_mul", "situ", {"gate": gate, "up": up}, out, beta, linear_beta)


def silu_and_mul(
    gate: torch.Tensor, up: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``silu(gate) * up`` of ``[T, D]``, as :func:`situ_and_mul` does.

    Examples
    --------
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> silu_and_mul(torch.zeros(1, 2, device=device), torch.ones(1, 2, device=device)).tolist()
    [[0.0, 0.0]]
    """
    return _launch("silu_and_mul", "silu", {"gate": gate, "up": up}, out)


def sigmoid_mul(
    x: torch.Tensor, gate: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``x * sigmoid(gate)`` of ``[T, D]``: the output gate of MLA.

    Examples
    --------
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> sigmoid_mul(torch.ones(1, 2, device=device), torch.zeros(1, 2, device=device)).tolist()
    [[0.5, 0.5]]
    """
    return _launch("sigmoid_mul", "sigmoid", {"x": x, "gate": gate}, out)


def _launch(
    name: str,
    kind: str,
    factors: dict[str, torch.Tensor],
    out: torch.Tensor | None,
    beta: float = 1.0,
    linear_beta: float = 1.0,
) -> torch.Tensor:
    x, y = factors.values()
    check_ndim(name, next(iter(factors)), x, "[T, D]")
    tokens, width = x.shape
    for argument, factor in factors.items():
        check_tensor(name, argument, factor, (tokens, width), like=x)
    if out is None:
        out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    check_tensor(name, "out", out, (tokens, width), like=x, output=True)
    if tokens == 0 or width == 0:
        return out
    kernels = load_kernels("gating")
    check_runs_here(name, kernels.gating_kernel, x, y, out)
    # A row of few elements has a program of its own, whose lanes hold eight each.
    block = min(1024, max(64, next_power_of_2(width)))
    with on_device(x):
        kernels.gating_kernel[(tokens, -(-width // block))](
            out, x, y, out.stride(0), x.stride(0), y.stride(0), beta, linear_beta,
            WIDTH=width, KIND=kind, BLOCK=block, COMPUTE=kernels.tl.float32,
            num_warps=max(1, block // 256),
        )  # fmt: skip
    return out
