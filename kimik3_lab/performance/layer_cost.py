"""Time of one layer on ranks that really exchange: the lab's own kernels, on the lab's own GPUs.

Needs numpy. Lessons 11 and 13 hold it against two H200s. :mod:`kimik3_lab.performance.step_cost`
prices vLLM on machines that nobody here has; this prices the same terms where both sides of the
equation can be measured, so that the *form* of the model is tested: kernels timed alone on one GPU,
and exchanges timed alone on two, add up to a layer on two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kimik3_lab.config import K3Config
from kimik3_lab.performance.constants import constants_with
from kimik3_lab.performance.hardware import accelerator
from kimik3_lab.performance.measured_collectives import MeasuredCollectives

__all__ = ["KERNELS", "KernelLine", "LayerCost", "LayerTime"]

#: Bytes of a weight: bfloat16, and MXFP4 with its share of a scale.
_BF16, _MXFP4 = 2, 17 / 32


@dataclass(frozen=True, slots=True)
class KernelLine:
    """A kernel's time as ``latency + bytes / bandwidth + operations / rate``, on an H200.

    Attributes
    ----------
    latency_s, bandwidth, rate
        Seconds, bytes a second, operations a second; a rate of 0 stands for no arithmetic.
    within
        Largest relative distance of the measured cases from the line.
    evidence
        Which cases.
    """

    latency_s: float
    bandwidth: float
    rate: float
    within: float
    evidence: str

    def us(self, size: float, operations: float = 0.0) -> float:
        """Microseconds for so many bytes and operations."""
        seconds = self.latency_s + size / self.bandwidth
        if self.rate:
            seconds += operations / self.rate
        return seconds * 1e6


_ONE_GPU = "data/results/h200x2/one_gpu.json"
#: The lab's kernels on one H200, set on that GPU alone: no run of two GPUs went into them.
KERNELS: Mapping[str, KernelLine] = {
    "experts": KernelLine(
        13.8e-6, 4.05e12, 0.47e15, 0.13,
        f"{_ONE_GPU}, moe_mxfp4_tp8 and moe_mxfp4_ep8, T = 1 to 8192, even and skewed; a slice of "
        "384 columns and a whole expert of 3072 give the same line within 4 %",
    ),
    "kda_decode": KernelLine(
        3.5e-6, 3.95e12, 0.0, 0.12, f"{_ONE_GPU}, kda_decode, 12 and 96 heads, 1 to 256 requests"
    ),
    "attn_res": KernelLine(
        4.6e-6, 4.2e12, 0.0, 0.15, f"{_ONE_GPU}, attnres8, T = 1 to 8192"
    ),
    "router": KernelLine(2.8e-6, 1.03e12, 0.0, 0.1, f"{_ONE_GPU}, router, T = 1 to 8192"),
}  # fmt: skip
#: Chunked scan of a prompt: seconds a head and token where all heads of a layer are here, and its
#: start (kda_prefill, 96 heads); the convolution before it moves its rows twice. The kernel has
#: become 1.8 times as quick since; the price stays, because the recorded layers were predicted with
#: it.
_SCAN_HEAD_TOKEN, _SCAN_START = 3.3e-9, 30e-6
#: A small kernel of PyTorch in a captured graph, and the rows of which it reads and writes many.
#: Assumed: no run of one GPU has it alone.
_SMALL = 2.0e-6


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Microseconds of a layer, by part."""

    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """All of it: parts follow each other."""
        return sum(self.parts.values())

    @property
    def exchanges(self) -> float:
        """What of it is exchanged between ranks."""
        return self.parts["all_reduce"]


class LayerCost:
    """Prices a KDA layer with its MoE on one of several ranks.

    Parameters
    ----------
    config
        Shape of the model.
    hardware
        Name of the GPU: its peaks, of which dense products reach the shares of
        :mod:`~kimik3_lab.performance.constants`.
    collectives
        Times of the exchanges.
    constants
        Values that replace those shares.

    Examples
    --------
    >>> table = MeasuredCollectives({"all_reduce": ([4096, 1 << 28], [1e-5, 1e-3])}, ranks=2)
    >>> cost = LayerCost(K3Config.released(), "H200", table)
    >>> time = cost.layer_us("moe", 1, ranks=2, whole_experts=False, distinct=16, pairs=16)
    >>> 80 < time.total < 200, time.exchanges > 20
    (True, True)
    """

    #: Blocks of the residual stream that the measured layer reads.
    blocks = 4
    #: Tokens from which a step is one prompt instead of requests that decode.
    prefill_from = 1024

    def __init__(
        self,
        config: K3Config,
        hardware: str,
        collectives: MeasuredCollectives,
        constants: Mapping[str, float] | None = None,
    ) -> None:
        gpu, values = accelerator(hardware), constants_with(constants)
        self.config, self.collectives = config, collectives
        self._start = values["gemm_latency"]
        self._read = gpu.bandwidth * values["gemm_bandwidth"]
        self._multiply = gpu.bf16_flops * values["gemm_flops"]
        self._stream = gpu.bandwidth * values["elementwise_bandwidth"]

    def layer_us(
        self,
        layer: str,
        tokens: int,
        *,
        ranks: int,
        whole_experts: bool,
        distinct: float,
        pairs: float,
        experts_us: float | None = None,
    ) -> LayerTime:
        """Predict one layer.

        Parameters
        ----------
        layer
            ``"moe"``, or ``"whole"`` for KDA and residual mixtures besides.
        tokens
            T.
        ranks
            GPUs that share the layer out: as many as the exchanges were timed on, or 1, which
            exchanges nothing.
        whole_experts
            Expert parallel instead of slices of every expert.
        distinct, pairs
            Experts that the busiest rank reads, and pairs that it computes.
        experts_us
            Time of the routed experts if it is known otherwise, as from
            :mod:`~kimik3_lab.performance.expert_tiles`; None prices them by ``distinct`` and
            ``pairs``.

        Raises
        ------
        ValueError
            If the layer is unknown, or the exchanges were timed on another number of GPUs.
        """
        if layer not in ("moe", "whole"):
            raise ValueError(f"layer must be 'moe' or 'whole', got {layer!r}")
        if ranks not in (1, self.collectives.ranks):
            raise ValueError(
                f"the exchanges were timed on {self.collectives.ranks} GPUs, not on {ranks}: give "
                f"ranks={self.collectives.ranks}, 1 for none, or a table of {ranks} GPUs"
            )
        config = self.config
        hidden, latent = config.hidden_size, config.routed_expert_hidden_size
        width = config.moe_intermediate_size / (1 if whole_experts else ranks)
        shared = config.shared_intermediate_size / ranks
        row, small_row = _BF16 * hidden * tokens, _BF16 * latent * tokens

        def reduce(size: float) -> float:
            return 0.0 if ranks == 1 else 1e6 * self.collectives.seconds("all_reduce", size)

        if experts_us is None:
            experts_us = KERNELS["experts"].us(
                distinct * 3 * latent * width * _MXFP4, pairs * 6 * latent * width
            )
        parts = {
            "router": self._product(config.num_experts, hidden, tokens)
            + KERNELS["router"].us(4.0 * config.num_experts * tokens),
            "latent": 2 * self._product(latent, hidden, tokens),
            "experts": experts_us,
            "shared": self._product(2 * shared, hidden, tokens)
            + self._small(3 * _BF16 * shared * tokens)
            + self._product(hidden, shared, tokens),
            "small": self._small(2 * small_row) + self._small(3 * row),
            "all_reduce": reduce(small_row) + reduce(row),
        }
        if layer == "whole":
            parts["mixtures"] = 2 * KERNELS["attn_res"].us((self.blocks + 4) * row)
            parts["kda"] = sum(self.kda_us(tokens, ranks).values())
            parts["all_reduce"] += reduce(row)
        return LayerTime(parts)

    def kda_us(self, tokens: int, ranks: int) -> dict[str, float]:
        """Predict the parts of the KDA layer: its matrix products, and what is between them.

        Returns
        -------
        dict
            ``products``; then ``step`` for requests that decode, or ``convolution`` and ``scan``
            for a prompt, each with the small kernels around it.
        """
        linear, hidden = self.config.linear_attn_config, self.config.hidden_size
        heads, dim = linear.num_heads / ranks, linear.head_dim
        width = heads * dim
        products = (
            self._product(4 * width, hidden, tokens) + self._product(dim + heads, hidden, tokens)
            + self._product(width, dim, tokens) + self._product(hidden, width, tokens)
        )  # fmt: skip
        small = self._small(2 * _BF16 * heads * tokens)
        if tokens < self.prefill_from:
            state = 2 * 4 * heads * dim * dim * tokens  # float32, read and written
            step = KERNELS["kda_decode"].us(state + 9 * _BF16 * width * tokens)
            return {"products": products, "step": small + step}
        scan = 1e6 * (_SCAN_START + _SCAN_HEAD_TOKEN * heads * tokens)
        return {
            "products": products,
            "convolution": self._small(2 * 3 * _BF16 * width * tokens),
            "scan": small + scan + self._small(3 * _BF16 * width * tokens),  # and the gated norm
        }

    def _product(self, outputs: float, inputs: float, rows: int) -> float:
        read = _BF16 * outputs * inputs / self._read
        return 1e6 * (self._start + max(read, 2 * outputs * inputs * rows / self._multiply))

    def _small(self, moved: float) -> float:
        return 1e6 * (_SMALL + moved / self._stream)
