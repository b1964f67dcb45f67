"""What fits: the room beside the weights, and how many sequences of a length it holds.

Needs the standard library only. Lesson 01 asks how many sequences run on 8 B300.

This is plain division by the bytes of a sequence. The blocks that vLLM really hands out are the
subject of lesson 07, and what it sets aside for activations, communication and captured graphs is
not counted, so every figure is an upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from kimik3_lab.config import K3Config
from kimik3_lab.performance.hardware import Accelerator
from kimik3_lab.performance.placement import (
    Layout,
    RankWeights,
    possible_layouts,
    rank_weights,
)
from kimik3_lab.performance.sequence_memory import sequence_memory

__all__ = ["KV_ITEMSIZE", "UTILIZATION", "Capacity", "DoesNotFitError", "capacity"]

#: Bytes of a cached value, by the type of the cache (``--kv-cache-dtype``).
KV_ITEMSIZE = {"bf16": 2, "fp8": 1}
#: Share of a GPU's memory that the server may use (``--gpu-memory-utilization``).
UTILIZATION = 0.9


class DoesNotFitError(ValueError):
    """Weights or a sequence exceed a GPU; the message names the nearest that fits.

    Attributes
    ----------
    weights, usable_bytes
        What was asked to fit, and into how much.
    """

    def __init__(self, message: str, weights: RankWeights, usable_bytes: int) -> None:
        super().__init__(message)
        self.weights = weights
        self.usable_bytes = usable_bytes


@dataclass(frozen=True)
class Capacity:
    """Sequences of one length beside the weights. Bytes are those of one GPU.

    Attributes
    ----------
    usable_bytes
        What the server may use.
    state_bytes
        KDA state of a sequence: its heads are split over the tensor-parallel ranks.
    row_bytes
        MLA rows of a token. Heads share a row, so there is nothing to split: each rank has all.
    """

    accelerator: Accelerator
    weights: RankWeights
    context: int
    usable_bytes: int
    state_bytes: int
    row_bytes: int

    @property
    def room_bytes(self) -> int:
        """What the weights leave."""
        return self.usable_bytes - self.weights.total

    @property
    def sequence_bytes(self) -> int:
        """One sequence of ``context`` tokens."""
        return self.state_bytes + self.context * self.row_bytes

    @property
    def sequences(self) -> int:
        """Sequences that run at a time, on all GPUs of the layout together."""
        copies = self.weights.layout.data_parallel
        return copies * (max(0, self.room_bytes) // self.sequence_bytes)

    @property
    def longest_context(self) -> int:
        """Tokens of the longest sequence that would fit alone."""
        return max(0, self.room_bytes - self.state_bytes) // self.row_bytes


def capacity(
    config: K3Config,
    accelerator: Accelerator,
    layout: Layout,
    context: int,
    *,
    kv_dtype: str = "bf16",
    utilization: float = UTILIZATION,
) -> Capacity:
    """Work out how many sequences of ``context`` tokens fit beside the weights.

    Parameters
    ----------
    context
        Tokens of a sequence, prompt and answer together.
    kv_dtype
        A key of :data:`KV_ITEMSIZE`. The KDA state stays in float32.
    utilization
        Share of the memory that may be used.

    Raises
    ------
    DoesNotFitError
        If the weights leave no room for one such sequence; the message names what would fit.
    LayoutError
        If the model cannot be split like that.
    ValueError
        If the context, the type or the share makes no sense.

    Examples
    --------
    >>> from kimik3_lab.performance.hardware import ACCELERATORS
    >>> config, b300 = K3Config.released(), ACCELERATORS["B300"]
    >>> [capacity(config, b300, Layout(8), n).sequences for n in (8192, 131_072, 1_048_576)]
    [191, 14, 1]
    """
    if not 1 <= context <= config.max_position_embeddings:
        raise ValueError(
            f"a sequence has 1 to {config.max_position_embeddings:,} tokens, got {context:,}"
        )
    if kv_dtype not in KV_ITEMSIZE:
        raise ValueError(f"got KV type {kv_dtype!r}, expected one of {', '.join(KV_ITEMSIZE)}")
    if not 0 < utilization <= 1:
        raise ValueError(f"utilization is a share above 0 and up to 1, got {utilization}")
    found = _capacity(config, accelerator, layout, context, kv_dtype, utilization)
    if found.sequences == 0:
        raise DoesNotFitError(
            _refusal(config, found, kv_dtype, utilization), found.weights, found.usable_bytes
        )
    return found


def _capacity(
    config: K3Config,
    accelerator: Accelerator,
    layout: Layout,
    context: int,
    kv_dtype: str,
    utilization: float,
) -> Capacity:
    rows = sequence_memory(config, cache_itemsize=KV_ITEMSIZE[kv_dtype]).mla_bytes_per_token
    return Capacity(
        accelerator=accelerator,
        weights=rank_weights(config, layout),
        context=context,
        # Rounded first: 0.9 of a GPU is a whole number of bytes to us, not to a float.
        usable_bytes=round(accelerator.memory_bytes * utilization),
        state_bytes=sequence_memory(config).state_bytes // layout.tensor_parallel,
        row_bytes=rows,
    )


def _refusal(config: K3Config, found: Capacity, kv_dtype: str, utilization: float) -> str:
    name, layout = found.accelerator.name, found.weights.layout
    usable = f"{found.usable_bytes / 1e9:.1f} GB usable of one {name}"
    if found.longest_context >= 1:
        return (
            f"{layout.name} leaves {found.room_bytes / 1e9:.1f} GB of {usable}, and a sequence of "
            f"{found.context:,} tokens takes {found.sequence_bytes / 1e9:.1f} GB; the nearest that "
            f"fits has {found.longest_context:,} tokens"
        )
    candidates = [
        other
        for other in possible_layouts(config)
        if _capacity(
            config, found.accelerator, other, found.context, kv_dtype, utilization
        ).sequences > 0
    ]  # fmt: skip
    why = f"{layout.name} needs {found.weights.total / 1e9:.1f} GB for weights, of {usable}"
    if not candidates:
        return f"{why}; no layout of up to 32 GPUs holds a sequence of {found.context:,} tokens"
    nearest = min(candidates, key=lambda other: (other.gpus, rank_weights(config, other).total))
    size = rank_weights(config, nearest).total / 1e9
    return f"{why}; the nearest that fits is {nearest.name} on {nearest.gpus} GPUs, {size:.1f} GB"
