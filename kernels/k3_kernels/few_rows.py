"""A matrix product with few rows: what a decode step does to every weight of the trunk.

Needs PyTorch; Triton when it runs. Lesson 10 turns its switch; in vLLM see #53534.

For T rows the weights are read once whatever T is, so up to some dozens of rows the product is a
copy with arithmetic beside it. A library built for large products cuts the output into tiles of 64
or 128 columns, too few programs to keep every multiprocessor asking for memory, or cuts along the
sum and adds up in a second launch. Here a program owns 16 to 64 columns and walks along the whole
sum with several blocks in flight; weights are the left operand of the matrix instruction, whose
smallest right operand is 8 or 16 rows wide.

Which is quicker depends on the shape. :func:`few_rows_linear` takes the constants it is given; the
executor measures them, cuBLAS included, when it is built.
"""

from __future__ import annotations

from dataclasses import dataclass

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

__all__ = ["CONFIGS", "MAX_ROWS", "FewRowsConfig", "few_rows_linear"]

#: More rows than this are no longer few.
MAX_ROWS = 64


@dataclass(frozen=True)
class FewRowsConfig:
    """Launch constants: columns of a program, step along the sum, warps, blocks in flight."""

    block_n: int
    block_k: int
    num_warps: int
    stages: int


#: Candidates, the first being the choice where nobody has measured.
CONFIGS = (
    FewRowsConfig(64, 128, 4, 4),
    FewRowsConfig(32, 128, 4, 4),
    FewRowsConfig(16, 256, 1, 4),
)


def few_rows_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    config: FewRowsConfig | None = None,
) -> torch.Tensor:
    """Return ``x @ weight.T`` for at most 64 rows.

    Parameters
    ----------
    x
        ``[T, K]``; rows may be any distance apart. float32, float16 or bfloat16; float16 is
        multiplied as float32, which a GPU does slowly.
    weight
        ``[N, K]`` in the type of ``x``.
    out
        ``[T, N]`` of any float type, allocated in the type of ``x`` if None. Sums are float32.
    config
        Constants of the launch; None takes the first of :data:`CONFIGS`.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; the message names it. The interpreter refuses bfloat16.
    ImportError, RuntimeError
        If Triton is missing or cannot run here.

    Examples
    --------
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> few_rows_linear(torch.ones(1, 3, device=device), torch.ones(2, 3, device=device)).tolist()
    [[3.0, 3.0]]
    """
    if not isinstance(x, torch.Tensor) or x.ndim != 2 or x.shape[0] > MAX_ROWS:
        raise ValueError(
            f"k3_kernels.few_rows: x must be a tensor [T, K] with T up to {MAX_ROWS}, "
            f"got {shape_of(x)}: take torch.nn.functional.linear for more"
        )
    check_ndim("few_rows", "weight", weight, "[N, K]")
    tokens, depth = x.shape
    check_tensor("few_rows", "x", x, (tokens, depth), like=x)
    check_tensor("few_rows", "weight", weight, (weight.shape[0], depth), like=x)
    if out is None:
        out = torch.empty(tokens, weight.shape[0], dtype=x.dtype, device=x.device)
    check_tensor(
        "few_rows", "out", out, (tokens, weight.shape[0]), like=x, same_dtype=False, output=True
    )
    if not out.numel():
        return out
    kernels = load_kernels("few_rows")
    check_runs_here("few_rows", kernels.few_rows_kernel, x, weight, out)
    config = config or CONFIGS[0]
    compute = kernels.tl.bfloat16 if x.dtype == torch.bfloat16 else kernels.tl.float32
    with on_device(x):
        kernels.few_rows_kernel[(-(-weight.shape[0] // config.block_n),)](
            out, x, weight, tokens, weight.shape[0], depth,
            out.stride(0), x.stride(0), weight.stride(0),
            BLOCK_T=max(16, next_power_of_2(tokens)), BLOCK_N=config.block_n,
            BLOCK_K=config.block_k, STAGES=config.stages, COMPUTE=compute,
            num_warps=config.num_warps,
        )  # fmt: skip
    return out
