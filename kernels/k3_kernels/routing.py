"""Router selection: score 896 experts, choose 16, weigh them, in one kernel.

Needs PyTorch; Triton when it runs. Lessons 02 and 04 use it.

For one token with router logits ``x`` and the selection bias ``b``::

    score_e      = 1 / (1 + exp(-x_e))
    preference_e = score_e + b_e
    experts      = the top_k of preference; of equal ones the lower id
    weight_e     = scale * score_e / (sum of the chosen scores + 1e-20)

in float32. The matrix product that makes the logits is a plain GEMM and not part of this.

How the kernel spends its time
------------------------------
A row is 3.6 kB: at 4.3 TB/s even 8192 tokens need only 7 us. The time goes into choosing.

*Keys.* The preference and the expert's id go into one 32-bit integer: the upper 22 bits say where
in its possible range, from ``-max |b|`` to ``1 + max |b|``, the preference lies, the lower 10 bits
hold the id, complemented. Keys are distinct, one comparison orders preferences and ids together,
and the winner's id is in the key. Exact 64-bit keys would need three times the instructions.

*What the key loses.* Two preferences within 2^-22 of the range have equal upper bits. The order
among the chosen is settled afterwards with exact numbers, gathered for those 16 alone. The set is
right unless the last one chosen and the first one left out have equal upper bits: the kernel counts
how many keys share or exceed the last one's upper bits, and if that is not 16 it takes the row
again, exactly, by 16 searches. Of random rows a few in ten thousand do so; rows with many equal
logits always. The result never depends on the path, and a mistake in the selection would cost time
and no result: the tests switch the search off to see one.

*Selection.* A bitonic network sorts runs of 16 and then merges them pairwise, keeping the upper 16
of 32. Its comparisons are minimum and maximum instructions as long as both elements belong to one
thread, so indices are renamed to make that the common case. Counted in the machine code (sm_90, one
warp a row, whole kernel): 680 minima and maxima and 340 compares and selections. Triton's own
``tl.topk`` in its place has 420 and 1 200, because it sorts half of the runs upward, and sixteen
argmax rounds have 290 and 1 100, each round ending in an exchange between threads that the next one
waits for. On an H200 at 8192 tokens: 31, 43 and 35 us.

*Few tokens*: several warps share a row, because one is alone on its multiprocessor and every
instruction is latency. *Many tokens*: one warp a row, no exchange through shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from k3_kernels import tuned
from k3_kernels._compat import check_ndim, check_runs_here, check_tensor, load_kernels, on_device
from k3_kernels._numbers import check_number

__all__ = ["MAX_EXPERTS", "MAX_TOP_K", "RouteConfig", "Routing", "choose_config", "route"]

#: More experts leave the preference too few bits of a key.
MAX_EXPERTS = 4096
#: More choices than this do not fit the registers that rank them.
MAX_TOP_K = 64


class Routing(NamedTuple):
    """Which experts each token goes to, and how much each of them counts.

    ``expert_ids`` is int32 ``[T, top_k]``, best first; ``weights`` is float32 ``[T, top_k]``.
    """

    expert_ids: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class RouteConfig:
    """Launch constants.

    ``select`` is ``"network"``, ``"topk"`` (Triton's own network) or ``"argmax"``; ``num_warps``
    work on one token; ``pdl`` launches the kernel while the one before it still runs (it waits for
    that one before it reads anything).
    """

    num_warps: int
    select: str = "network"
    pdl: bool = False

    def constants(
        self, num_experts: int, top_k: int, renormalize: bool, itemsize: int
    ) -> dict[str, int | bool | str]:
        """Return the kernel's compile-time arguments, all but the compute type."""
        vector = max(1, 16 // itemsize)
        row = max(num_experts, 32 * vector * self.num_warps, 2 * top_k)
        return {
            "NUM_EXPERTS": num_experts,
            "TOP_K": top_k,
            "RENORMALIZE": renormalize,
            "LOG_E": (row - 1).bit_length(),
            "LOG_K": max(1, (top_k - 1).bit_length()),
            "VECTOR": vector,
            "WARPS": self.num_warps,
            "SELECT": self.select,
            "PDL": self.pdl,
        }

    def options(self) -> dict[str, int | bool]:
        """Return the options of the launch."""
        options: dict[str, int | bool] = {"num_warps": self.num_warps}
        if self.pdl:
            options["launch_pdl"] = True
        return options


def choose_config(num_tokens: int, num_experts: int) -> RouteConfig:
    """Choose constants by rule, for a device and shape that have not been measured.

    Examples
    --------
    >>> choose_config(1, 896).num_warps, choose_config(8192, 896).num_warps
    (4, 1)
    """
    if num_tokens <= 512:
        return RouteConfig(num_warps=min(4, max(1, num_experts // 128)))
    return RouteConfig(num_warps=1 if num_experts <= 1024 else 2)


def route(
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    *,
    renormalize: bool = True,
    scale: float = 1.0,
    expert_ids_out: torch.Tensor | None = None,
    weights_out: torch.Tensor | None = None,
    config: RouteConfig | None = None,
) -> Routing:
    """Choose ``top_k`` experts for each token and weigh them.

    Parameters
    ----------
    logits
        Router logits ``[T, E]``, float32, float16 or bfloat16. K3 computes them in float32: in
        bfloat16 many experts tie. Rows may have any stride.
    bias
        Selection bias ``[E]`` (``e_score_correction_bias``), any of the three types. It takes part
        in the choice and not in the weights.
    top_k
        Experts for a token, at most 64.
    renormalize
        Whether the weights of a token sum to ``scale``.
    scale
        ``routed_scaling_factor``.
    expert_ids_out, weights_out
        Contiguous buffers ``[T, top_k]``, int32 and float32; allocated if None.
    config
        Constants of the launch; None takes measured ones, or :func:`choose_config`'s.

    Returns
    -------
    Routing
        A row always names ``top_k`` different experts, even if its logits are not numbers (nothing
        ranks above NaN, and the weights are NaN then).

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; the message names it. The interpreter refuses bfloat16.
    ImportError
        If Triton is missing.
    RuntimeError
        If the tensors are on the CPU and ``TRITON_INTERPRET=1`` was not set in time.

    Examples
    --------
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> bias = torch.tensor([0.0, 0.3, 0.0, 0.1], device=device)
    >>> chosen = route(torch.zeros(1, 4, device=device), bias, top_k=2)
    >>> chosen.expert_ids.tolist(), chosen.weights.tolist()
    ([[1, 3]], [[0.5, 0.5]])
    """
    check_ndim("routing", "logits", logits, "[T, E]")
    num_tokens, num_experts = logits.shape
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(
            f"k3_kernels.routing: {num_experts} experts are outside 1..{MAX_EXPERTS}, the range "
            "in which a key keeps at least 20 bits of a preference"
        )
    if isinstance(top_k, bool) or not isinstance(top_k, int):
        raise TypeError(f"k3_kernels.routing: top_k must be an int, got {type(top_k).__name__}")
    if not 1 <= top_k <= min(num_experts, MAX_TOP_K):
        raise ValueError(
            f"k3_kernels.routing: top_k must be from 1 to {min(num_experts, MAX_TOP_K)} "
            f"(there are {num_experts} experts, and the kernel ranks at most {MAX_TOP_K}), "
            f"got {top_k}"
        )
    check_number("routing", "scale", scale)
    check_tensor("routing", "logits", logits, (num_tokens, num_experts), like=logits)
    check_tensor("routing", "bias", bias, (num_experts,), like=logits, same_dtype=False)
    shape = (num_tokens, top_k)
    expert_ids = _output("expert_ids_out", expert_ids_out, shape, torch.int32, logits.device)
    weights = _output("weights_out", weights_out, shape, torch.float32, logits.device)
    if num_tokens == 0:
        return Routing(expert_ids, weights)

    kernels = load_kernels("routing")
    check_runs_here("routing", kernels.route_kernel, logits, bias)
    if config is None:
        config = _config(num_tokens, num_experts, top_k, logits.device)
    with on_device(logits):
        kernels.route_kernel[(num_tokens,)](
            expert_ids, weights, logits, bias, logits.stride(0), float(scale),
            **config.constants(num_experts, top_k, renormalize, logits.element_size()),
            COMPUTE=kernels.tl.float32, **config.options(),
        )  # fmt: skip
    return Routing(expert_ids, weights)


def _config(num_tokens: int, num_experts: int, top_k: int, device: torch.device) -> RouteConfig:
    measured = tuned.lookup("routing", f"E={num_experts},k={top_k}", num_tokens, device)
    return RouteConfig(**measured) if measured else choose_config(num_tokens, num_experts)


def _output(
    name: str,
    tensor: torch.Tensor | None,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    if tensor is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"k3_kernels.routing: {name} must be a torch.Tensor, got {type(tensor).__name__}"
        )
    got = (tuple(tensor.shape), tensor.dtype, tensor.device)
    if got != (shape, dtype, device) or not tensor.is_contiguous():
        raise ValueError(
            f"k3_kernels.routing: {name} must be a contiguous {dtype} tensor {list(shape)} on "
            f"{device}, got {tensor.dtype} {list(tensor.shape)} with strides "
            f"{list(tensor.stride())} on {tensor.device}"
        )
    return tensor
