"""Time of the dense matrix products: they read weights, or compute, whichever takes longer.

Needs the standard library only. Lesson 11 builds its first term from this.
"""

from __future__ import annotations

from collections.abc import Mapping

from kimik3_lab.config import K3Config
from kimik3_lab.performance.hardware import Accelerator
from kimik3_lab.performance.matmuls import matrix_products
from kimik3_lab.performance.step_work import StepWork

__all__ = ["SKINNY_ROWS", "DenseProducts"]

#: Most rows that vLLM's kernel for few rows takes (#53534).
SKINNY_ROWS = 16


class DenseProducts:
    """All dense products of a pass on one rank; the output head apart, which has rows of its own.

    Parameters
    ----------
    skinny
        Whether products of up to :data:`SKINNY_ROWS` rows have a kernel of their own.
    """

    def __init__(
        self,
        config: K3Config,
        gpu: Accelerator,
        tp: int,
        constants: Mapping[str, float],
        *,
        skinny: bool,
    ) -> None:
        products = matrix_products(config, tp)
        self._body = tuple(p for p in products if p.part != "lm_head")
        (self._head,) = (p for p in products if p.part == "lm_head")
        self._latency = constants["gemm_latency"]
        self._bandwidth = gpu.bandwidth * constants["gemm_bandwidth"]
        self._flops = gpu.bf16_flops * constants["gemm_flops"]
        self._skinny = 1.0 - constants["skinny_gemm_gain"] if skinny else 1.0
        #: Bytes of weights that a pass reads, output head included; ``rank_weights(...).trunk``.
        self.weight_bytes = sum(max(1, p.calls) * p.weight_bytes for p in products)

    def parts(self, rows: int) -> dict[str, float]:
        """Seconds by component, output head left out."""
        parts: dict[str, float] = {}
        for p in self._body:
            if p.calls:
                seconds = p.calls * self._call(p.weight_bytes, rows * p.flops_per_row, rows)
                parts[p.part] = parts.get(p.part, 0.0) + seconds
        return parts

    def head(self, rows: int) -> float:
        """Seconds of the output head for ``rows`` rows."""
        if not rows:
            return 0.0
        return self._call(self._head.weight_bytes, rows * self._head.flops_per_row, rows)

    def call(self, weight_bytes: float, rows: int) -> float:
        """Seconds of a product of one more matrix, in BF16."""
        return self._call(weight_bytes, rows * weight_bytes, rows)

    def flops(self, work: StepWork) -> float:
        """Operations of a step."""
        body = sum(p.calls * p.flops_per_row for p in self._body) * work.num_tokens
        return body + self._head.flops_per_row * work.num_logits

    def _call(self, weight_bytes: float, flops: float, rows: int) -> float:
        gain = self._skinny if rows <= SKINNY_ROWS else 1.0
        return self._latency + max(gain * weight_bytes / self._bandwidth, flops / self._flops)
