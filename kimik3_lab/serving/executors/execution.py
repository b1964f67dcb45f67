"""How a step is computed, where there is a choice: the switches that no scheduler can see.

Needs the standard library only. Lesson 10 turns them one at a time. Each follows a pull request of
vLLM, changes what a step costs, and changes no token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kimik3_lab.serving.knobs import require_one_of
from kimik3_lab.serving.presets import Preset

__all__ = ["ExecutionConfig", "MetadataTransfer", "MixedBatch"]

MixedBatch = Literal["gather", "zero_copy"]
MetadataTransfer = Literal["eager", "packed"]


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
    metadata : {"eager", "packed"}
        How a step's integers get to the device. ``"eager"`` makes each tensor by small operators
        and copies of its own; ``"packed"`` writes all into one buffer and sends that, and what can
        be worked out from it is worked out inside the graph. It stands for what #50587 collects.
    kda_prefill_in_place : bool
        Let the prefill of KDA read and write states where they belong and its output where it is
        wanted (#51311, #52458), instead of gathering states and copying both back. Only the Triton
        backend has both ways.
    skinny_gemm : bool
        Matrix products with few rows on a kernel of their own where that is quicker (#53534). Only
        the Triton backend has one.

    Raises
    ------
    ValueError
        If ``mixed_batch`` or ``metadata`` is neither.

    Examples
    --------
    >>> ExecutionConfig().mixed_batch
    'zero_copy'
    """

    mixed_batch: MixedBatch = "zero_copy"
    deferred_finalize: bool = False
    cuda_graphs: bool = False
    metadata: MetadataTransfer = "packed"
    kda_prefill_in_place: bool = True
    skinny_gemm: bool = False

    def __post_init__(self) -> None:
        require_one_of("mixed_batch", self.mixed_batch, MixedBatch)
        require_one_of("metadata", self.metadata, MetadataTransfer)

    @classmethod
    def from_preset(cls, preset: Preset, *, cuda_graphs: bool = False) -> ExecutionConfig:
        """Take from a rung of :data:`~kimik3_lab.serving.presets.LADDER` what is a switch here.

        ``other_step_changes`` gathers what was published without figures of its own; of it we have
        the transfer of metadata.

        >>> from kimik3_lab.serving.presets import MAIN_2026_09_13, V0_27_1
        >>> old, new = map(ExecutionConfig.from_preset, (V0_27_1, MAIN_2026_09_13))
        >>> old.mixed_batch, old.metadata, old.skinny_gemm
        ('gather', 'eager', False)
        >>> new.mixed_batch, new.metadata, new.skinny_gemm
        ('zero_copy', 'packed', True)
        """
        has = preset.execution.__contains__
        return cls(
            mixed_batch="zero_copy" if has("zero_copy_mixed_batch") else "gather",
            deferred_finalize=has("deferred_finalize"),
            cuda_graphs=cuda_graphs,
            metadata="packed" if has("other_step_changes") else "eager",
            kda_prefill_in_place=has("kda_prefill_in_place"),
            skinny_gemm=has("skinny_gemm"),
        )
