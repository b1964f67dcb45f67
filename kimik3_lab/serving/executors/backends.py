"""What computes a forward pass: the reference model, or its weights on our kernels.

Needs torch. Lesson 10 turns the backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from torch import Tensor

from kimik3_lab.reference.model import K3ForCausalLM
from kimik3_lab.serving.executors.cuda_graphs import DecodeGraphs
from kimik3_lab.serving.executors.execution import ExecutionConfig
from kimik3_lab.serving.executors.paged_cache import PagedCache
from kimik3_lab.serving.executors.paged_mixer import PagedMixer
from kimik3_lab.serving.executors.triton_model import TritonK3
from kimik3_lab.serving.knobs import require_one_of

__all__ = ["Backend", "Compute", "make_backend"]

Backend: TypeAlias = Literal["reference", "triton"]
#: Maps token ids ``[N]`` and the mixer to logits, see
#: :meth:`kimik3_lab.reference.model.K3ForCausalLM.forward`.
Compute: TypeAlias = Callable[..., Tensor]


def make_backend(
    backend: Backend, model: K3ForCausalLM, cache: PagedCache, execution: ExecutionConfig
) -> tuple[Compute, PagedMixer]:
    """Choose how a step is computed, and the mixer that belongs to it.

    Parameters
    ----------
    backend : {"reference", "triton"}
        Plain PyTorch; or the Triton kernels, on a GPU (or, slowly, in Triton's interpreter).
    model : K3ForCausalLM
        Its weights are used by both.
    cache : PagedCache
        Made for it.
    execution : ExecutionConfig
        The switches.

    Raises
    ------
    ValueError
        If the backend is unknown, or cannot be recorded in graphs.
    """
    require_one_of("backend", backend, Backend)
    if backend == "reference":
        if execution.cuda_graphs:
            raise ValueError(
                "cuda_graphs=True with backend='reference': its experts are chosen on the host, "
                "which no graph can hold; take backend='triton'"
            )
        return model, PagedMixer(model.config, cache, execution)
    fast = TritonK3(model, cache, execution)
    return (DecodeGraphs(fast, cache) if execution.cuda_graphs else fast), fast.mixer
