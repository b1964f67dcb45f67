"""Matrix products of the Triton backend: projections of one input in one product, few rows apart.

Needs torch, and Triton when it runs with few rows. Lesson 10 turns the switch ``skinny_gemm``.

A layer projects the same input several times: a KDA layer to queries, keys, values, gates and
decays. :class:`JoinedLinear` lays their weights behind one another, so that one product computes
all, and hands out views of its output. vLLM loads them merged, too (``gate_up_proj``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from k3_kernels.few_rows import CONFIGS, MAX_ROWS, FewRowsConfig, few_rows_linear
from torch import Tensor, nn

from kimik3_lab.reference.norms import compute_dtype
from kimik3_lab.serving.executors.step_counters import StepCounters

__all__ = ["JoinedLinear", "Skinny", "join_columns", "join_rows", "library_linear"]

_ROW_MULTIPLE = 16


def join_rows(linears: Sequence[nn.Linear]) -> Tensor:
    """Lay weights ``[N_i, K]`` below one another; the modules keep views of the result.

    So nothing is there twice, and who reads a module still finds its weight. Zeros fill up the rows
    to a multiple of 16: then every row of the product begins at a multiple of 32 bytes, and whoever
    reads a piece of it can read 16 bytes at a time.

    Examples
    --------
    >>> one, two = nn.Linear(3, 2, bias=False), nn.Linear(3, 4, bias=False)
    >>> joined = join_rows([one, two])
    >>> joined.shape, one.weight.data_ptr() == joined.data_ptr()
    (torch.Size([16, 3]), True)
    """
    with torch.no_grad():
        weights = [linear.weight.detach() for linear in linears]
        missing = -sum(map(len, weights)) % _ROW_MULTIPLE
        joined = torch.cat([*weights, weights[0].new_zeros(missing, weights[0].shape[1])])
        first = 0
        for linear in linears:
            linear.weight.data = joined[first : first + linear.out_features]
            first += linear.out_features
    return joined


def join_columns(linears: Sequence[nn.Linear]) -> Tensor:
    """Lay weights ``[N, K_i]`` side by side, so that one product sums over both inputs.

    Examples
    --------
    >>> joined = join_columns([nn.Linear(3, 2, bias=False), nn.Linear(4, 2, bias=False)])
    >>> joined.shape
    torch.Size([2, 7])
    """
    with torch.no_grad():
        joined = torch.cat([linear.weight.detach() for linear in linears], 1)
        widths = [x.in_features for x in linears]
        for linear, columns in zip(linears, torch.split(joined, widths, 1), strict=True):
            linear.weight.data = columns
    return joined


class Skinny:
    """Chooses how a product with few rows is computed.

    Parameters
    ----------
    enabled : bool
        Otherwise every product is the library's.
    counters : StepCounters
        Where launches are counted.

    Attributes
    ----------
    choices : dict
        ``(N, K, rows up to)`` to launch constants, None where the library is quicker. What is not
        there takes the kernel's first constants, and up to 16 rows only.
    """

    def __init__(self, *, enabled: bool, counters: StepCounters) -> None:
        self.enabled, self.counters = enabled, counters
        self.choices: dict[tuple[int, int, int], FewRowsConfig | None] = {}

    def linear(self, x: Tensor, weight: Tensor, *, wide: bool = False) -> Tensor:
        """Return ``x @ weight.T`` in the type of ``x``, or in float32 if ``wide``."""
        self.counters.launches += 1
        rows = len(x)
        if self.enabled and rows <= MAX_ROWS:
            size = max(16, 1 << (rows - 1).bit_length())
            default = CONFIGS[0] if size == 16 else None
            config = self.choices.get((*weight.shape, size), default)
            if config is not None:
                dtype = compute_dtype(x.dtype) if wide else x.dtype
                out = torch.empty(rows, weight.shape[0], dtype=dtype, device=x.device)
                return few_rows_linear(x, weight, out=out, config=config)
        return library_linear(x, weight, wide=wide)


def library_linear(x: Tensor, weight: Tensor, *, wide: bool = False) -> Tensor:
    """Multiply with the library; float32 out of 16-bit operands without converting the weight."""
    dtype = compute_dtype(x.dtype)
    if not wide or x.dtype == dtype:
        return torch.nn.functional.linear(x, weight)
    if x.is_cuda:
        return torch.mm(x, weight.mT, out_dtype=dtype)
    return x.to(dtype) @ weight.to(dtype).mT


class JoinedLinear:
    """Several projections of one input.

    Parameters
    ----------
    linears : sequence of nn.Linear
        Without bias, of the same input. Their weights become views of the joined one.
    skinny : Skinny
        Computes.
    sizes : sequence of int, optional
        Widths to cut the output into, if not one for each projection.

    Examples
    --------
    >>> skinny = Skinny(enabled=False, counters=StepCounters())
    >>> both = JoinedLinear([nn.Linear(3, 2, bias=False), nn.Linear(3, 4, bias=False)], skinny)
    >>> [tuple(y.shape) for y in both(torch.ones(5, 3))]
    [(5, 2), (5, 4)]
    """

    def __init__(
        self, linears: Sequence[nn.Linear], skinny: Skinny, sizes: Sequence[int] = ()
    ) -> None:
        self.sizes = list(sizes) or [linear.out_features for linear in linears]
        # One alone stays where it is.
        self.weight = join_rows(linears) if len(linears) > 1 else linears[0].weight.detach()
        self._padding = len(self.weight) - sum(self.sizes)
        self._skinny = skinny

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """Map ``[N, K]`` to a view ``[N, N_i]`` of the product for each projection."""
        product = self._skinny.linear(x, self.weight)
        return torch.split(product, [*self.sizes, self._padding], -1)[:-1]
