"""Pages and slots: where the sequences of many requests lie, and how a step finds its rows there.

Needs torch. Lesson 07 looks into it. What one sequence keeps in
:class:`~kimik3_lab.reference.state.SequenceState` lies here in tensors shared by all requests:

=============  =======================================  ==========================================
``latent``     ``[mla layer, block, block_size, 576]``  a row per token, found by the block table
``recurrent``  ``[kda layer, slot, H, V, K]``           float32 or wider, V-major as kernels want it
``conv``       ``[kda layer, slot, 3P, kernel - 1]``    the last inputs of the convolution
=============  =======================================  ==========================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kimik3_lab.config import K3Config
from kimik3_lab.reference.norms import compute_dtype
from kimik3_lab.serving.config import CacheConfig

__all__ = ["Context", "PagedCache", "Segment", "StepMetadata"]

#: Most rows of padded context that one attention call gathers, which bounds its memory.
MAX_GATHERED_ROWS = 16_384


class PagedCache:
    """All that outlives a step, for all requests.

    Parameters
    ----------
    config : K3Config
        Shape of the model.
    cache_config : CacheConfig
        Number and size of blocks, as the scheduler has them. Block 0 stays zero: what is padded
        reads it, and nothing writes it.
    num_slots : int
        Requests that can hold a KDA state at the same time.
    dtype, device
        Of the activations. Recurrent states are float32 or wider.

    Examples
    --------
    >>> cache = PagedCache(K3Config.micro(), CacheConfig(num_blocks=4), num_slots=2)
    >>> cache.latent.shape, cache.recurrent.shape
    (torch.Size([2, 4, 16, 48]), torch.Size([2, 2, 2, 16, 16]))
    """

    def __init__(
        self,
        config: K3Config,
        cache_config: CacheConfig,
        num_slots: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        linear = config.linear_attn_config
        heads, width = linear.num_heads, linear.head_dim
        window = linear.short_conv_kernel_size - 1
        num_kda, num_mla = len(config.kda_layer_ids), len(config.mla_layer_ids)
        blocks, block_size = cache_config.num_blocks, cache_config.block_size

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.block_size = block_size
        self.latent = zeros(num_mla, blocks, block_size, config.mla_cache_dim)
        self.recurrent = zeros(num_kda, num_slots, heads, width, width, dtype=compute_dtype(dtype))
        self.conv = zeros(num_kda, num_slots, 3 * linear.projection_size, window)
        # Row s names the blocks of the request in slot s, in the order of its tokens.
        self.block_table = zeros(num_slots, cache_config.num_usable_blocks, dtype=torch.int64)

    def reset_slots(self, slots: Sequence[int]) -> None:
        """Empty the KDA memory of ``slots``: their next requests start from zero."""
        if slots:
            index = torch.tensor(slots, device=self.conv.device)
            self.recurrent.index_fill_(1, index, 0)
            self.conv.index_fill_(1, index, 0)

    def set_blocks(self, slot: int, first: int, block_ids: Sequence[int]) -> None:
        """Enter ``block_ids`` into the table of ``slot`` from its block number ``first`` on."""
        if block_ids:
            row = self.block_table[slot, first : first + len(block_ids)]
            row.copy_(torch.tensor(block_ids))

    @property
    def nbytes(self) -> int:
        """Bytes of latent rows, states and windows."""
        return self.latent.nbytes + self.recurrent.nbytes + self.conv.nbytes


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens ``start`` to ``start + count`` of the request in ``slot``, computed in this step."""

    slot: int
    start: int
    count: int

    @property
    def stop(self) -> int:
        """Tokens of the request in the cache after this step."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Context:
    """Cached rows that the step's rows ``rows`` attend to.

    ``cells [n, L]`` numbers the rows of ``latent`` with blocks laid end to end. Where ``padding``
    is true the number is 0, a cell of the null block.
    """

    rows: slice
    cells: Tensor
    padding: Tensor | None = None


class StepMetadata:
    """Where the rows of one step belong, worked out once for all layers.

    Parameters
    ----------
    cache : PagedCache
        Its block table must be up to date.
    segments : sequence of Segment
        In the order of the rows of the step: segments of one token first, and these sorted by
        their start, so that contexts of like length are padded together.

    Raises
    ------
    ValueError
        If the order is another one.
    """

    def __init__(self, cache: PagedCache, segments: Sequence[Segment]) -> None:
        self.num_decodes = sum(segment.count == 1 for segment in segments)
        self.prefills = segments[self.num_decodes :]
        decodes = segments[: self.num_decodes]
        in_order = all(a.start <= b.start for a, b in pairwise(decodes))
        if any(segment.count != 1 for segment in decodes) or not in_order:
            raise ValueError("segments of one token come first and in the order of their starts")
        device, size = cache.block_table.device, cache.block_size

        def integers(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        slots = integers([s.slot for s in segments])
        starts, counts = (
            integers([s.start for s in segments]),
            integers([s.count for s in segments]),
        )
        self.decode_slots = slots[: self.num_decodes]

        # The cell that each row of the step writes: vLLM's slot_mapping.
        first_row = counts.cumsum(0) - counts
        position = torch.arange(sum(segment.count for segment in segments), device=device)
        position += (starts - first_row).repeat_interleave(counts)
        block = cache.block_table[slots.repeat_interleave(counts), position // size]
        self.cell_mapping = block * size + position % size

        def cells(slots: Tensor | int, length: int) -> Tensor:
            blocks = cache.block_table[slots, : -(-length // size)].unsqueeze(-1)
            return (blocks * size + torch.arange(size, device=device)).flatten(-2)[..., :length]

        self.decode_contexts: list[Context] = []
        low = 0
        while low < self.num_decodes:
            high = low + 1
            while (
                high < self.num_decodes
                and (high + 1 - low) * decodes[high].stop <= MAX_GATHERED_ROWS
            ):
                high += 1
            longest, group = decodes[high - 1].stop, slice(low, high)
            context, padding = cells(self.decode_slots[group], longest), None
            if decodes[low].stop < longest:
                seen = starts[group].unsqueeze(-1)
                padding = torch.arange(longest, device=device) > seen
                context = context.masked_fill(padding, 0)
            self.decode_contexts.append(Context(group, context, padding))
            low = high

        self.prefill_contexts: list[Context] = []
        row = self.num_decodes
        for segment in self.prefills:
            rows = slice(row, row + segment.count)
            self.prefill_contexts.append(Context(rows, cells(segment.slot, segment.stop)))
            row = rows.stop
