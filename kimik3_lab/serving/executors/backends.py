"""What computes a forward pass: the reference model, or its weights on our kernels.

Needs torch. Lesson 10 turns the backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from torch import Tensor

from kimik3_lab.reference.drafter import DSparkDrafter
from kimik3_lab.reference.model import K3ForCausalLM
from kimik3_lab.serving.executors.cuda_graphs import DecodeGraphs
from kimik3_lab.serving.executors.execution import ExecutionConfig
from kimik3_lab.serving.executors.paged_cache import PagedCache
from kimik3_lab.serving.executors.paged_mixer import PagedMixer
from kimik3_lab.serving.executors.proposer import Proposer
from kimik3_lab.serving.executors.step_metadata import StepMetadata
from kimik3_lab.serving.executors.triton_model import TritonK3
from kimik3_lab.serving.executors.triton_proposer import TritonProposer
from kimik3_lab.serving.knobs import require_one_of

__all__ = ["Backend", "Compute", "make_backend", "make_proposer"]

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


def make_proposer(
    backend: Backend,
    drafter: DSparkDrafter,
    cache: PagedCache,
    compute: Compute,
    *args: Any,
    **kwargs: Any,
) -> Proposer:
    """Make what drafts with the same backend.

    Parameters
    ----------
    backend : {"reference", "triton"}
        As for :func:`make_backend`.
    drafter : DSparkDrafter
        On the model's device.
    cache : PagedCache
        The executor's.
    compute : callable
        From :func:`make_backend`. If it records steps, what the drafter keeps of a step is recorded
        with it, and the drafter's own passes are recorded, too.
    args, kwargs
        Target, number of drafts and so on, for
        :class:`~kimik3_lab.serving.executors.proposer.Proposer`.
    """
    if backend == "reference":
        return Proposer(drafter, *args, **kwargs)
    graphs = compute if isinstance(compute, DecodeGraphs) else None
    fast = graphs.compute if graphs is not None else compute
    assert isinstance(fast, TritonK3)
    proposer = TritonProposer(
        drafter,
        *args,
        cache=cache,
        skinny=fast.skinny,
        graphs=graphs,
        **kwargs,
    )

    def write(taps: dict[int, Tensor | None], step: StepMetadata) -> None:
        proposer.write(taps, step.positions, step.cell_mapping[0])

    if graphs is not None:
        graphs.after = write
    return proposer
