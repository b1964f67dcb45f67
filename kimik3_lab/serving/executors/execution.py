"""How a step is computed, where there is a choice: the switches that no scheduler can see.

Needs the standard library only. Lesson 10 turns them one at a time. Each follows a pull request of
vLLM, changes what a step costs, and changes no token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kimik3_lab.serving.knobs import require_one_of
from kimik3_lab.serving.presets import Preset

__all__ = ["ExecutionConfig", "MixedBatch"]

MixedBatch = Literal["gather", "zero_copy"]


@dataclass(frozen=True)
class ExecutionConfig:
    """The switches of an executor.

    Parameters
    ----------
    mixed_batch : {"gather", "zero_copy"}
        How a KDA layer gets at the rows of each class in a step that has several: requests that
        verify drafts or decode one token need another operator than prompts. ``"gather"`` copies
        the rows of each class to a buffer of its own and the results back (vLLM 0.27.1);
        ``"zero_copy"`` takes a view, because rows of a class lie together (#56159).
    deferred_finalize : bool
        Leave the weighted sum over a token's experts to the operator that reads it (#53152). Only
        the Triton backend has two operators there that could be made one.
    cuda_graphs : bool
        Replay steps that only decode from a recorded graph. Needs a GPU.

    Raises
    ------
    ValueError
        If ``mixed_batch`` is neither.

    Examples
    --------
    >>> ExecutionConfig().mixed_batch
    'zero_copy'
    """

    mixed_batch: MixedBatch = "zero_copy"
    deferred_finalize: bool = False
    cuda_graphs: bool = False

    def __post_init__(self) -> None:
        require_one_of("mixed_batch", self.mixed_batch, MixedBatch)

    @classmethod
    def from_preset(cls, preset: Preset, *, cuda_graphs: bool = False) -> ExecutionConfig:
        """Take from a rung of :data:`~kimik3_lab.serving.presets.LADDER` what is a switch here.

        ``kda_prefill_in_place`` and ``skinny_gemm`` are kernels of vLLM's without a counterpart:
        ours write in place always, and leave small matrix products to PyTorch.

        >>> from kimik3_lab.serving.presets import MAIN_2026_09_13, V0_27_1
        >>> ExecutionConfig.from_preset(V0_27_1)
        ExecutionConfig(mixed_batch='gather', deferred_finalize=False, cuda_graphs=False)
        >>> ExecutionConfig.from_preset(MAIN_2026_09_13).mixed_batch
        'zero_copy'
        """
        zero_copy = "zero_copy_mixed_batch" in preset.execution
        return cls(
            mixed_batch="zero_copy" if zero_copy else "gather",
            deferred_finalize="deferred_finalize" in preset.execution,
            cuda_graphs=cuda_graphs,
        )
