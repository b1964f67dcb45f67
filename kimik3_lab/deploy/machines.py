"""The machines: GPUs in a node, share of memory, and what a kind of GPU asks of the command line.

Needs the standard library only. Lesson 13 uses it. Memory and links are those of
:mod:`kimik3_lab.performance.hardware`; the rest follows the vLLM recipe for Kimi K3
(https://github.com/vllm-project/recipes, ``models/moonshotai/Kimi-K3.yaml``, 2026-08-14).
"""

from __future__ import annotations

from dataclasses import dataclass

from kimik3_lab.performance.hardware import ACCELERATORS, Accelerator

__all__ = ["BLOG", "MACHINES", "RECIPE", "Machine"]

#: Sources that many reasons name.
BLOG = "https://vllm.ai/blog/2026-09-13-kimi-k3-performance-optimization"
RECIPE = "https://github.com/vllm-project/recipes models/moonshotai/Kimi-K3.yaml"


@dataclass(frozen=True, slots=True)
class Machine:
    """One kind of node.

    Attributes
    ----------
    gpus
        GPUs of a node: that many processes one host starts.
    utilization, utilization_source
        Share of the memory that vLLM may use, and who runs K3 with it.
    max_num_batched_tokens, max_num_seqs
        Bounds that the memory of this GPU sets to the recipe; None for none.
    attention_backend
        Asked for by name; None leaves it to vLLM.
    """

    name: str
    accelerator: Accelerator
    gpus: int
    utilization: float
    utilization_source: str
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    attention_backend: str | None = None

    @property
    def blackwell(self) -> bool:
        """Whether the GPU multiplies 4-bit numbers itself."""
        return self.accelerator.fp4_flops > 0

    @property
    def nvlink_across_nodes(self) -> bool:
        """Whether NVLink reaches GPUs of other nodes."""
        return self.accelerator.domain_gpus > self.gpus


MACHINES = {
    "b300": Machine("b300", ACCELERATORS["B300"], 8, 0.9, BLOG),
    # A rack of 72 GPUs in trays of 4, each a host of its own.
    "gb300": Machine("gb300", ACCELERATORS["GB300"], 4, 0.9, BLOG),
    "b200": Machine("b200", ACCELERATORS["B200"], 8, 0.9, RECIPE),
    "h200": Machine("h200", ACCELERATORS["H200"], 8, 0.97, RECIPE, 4096, 5, "FLASHMLA"),
}
