"""Where the rows of a step belong, worked out once for all layers.

Needs torch. Lesson 10 prints the parts of a step.

Rows lie in the order of three classes, because each wants another operator: requests that verify
drafts, ``1 + drafts`` rows each; requests that decode one token; and chunks of prompts. The first
two are rectangles, one for each number of rows, and go through an operator all at once. vLLM orders
its batch the same way (``sort_batch_req_ids`` in ``vllm/v1/worker/gpu/model_runner.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from kimik3_lab.serving.executors.kda_records import KdaRecords
from kimik3_lab.serving.executors.paged_cache import PagedCache

__all__ = ["Context", "Decodes", "Part", "Prefill", "Segment", "StateRows", "StepMetadata"]

#: Most rows of padded context that one attention call gathers, which bounds its memory.
MAX_GATHERED_ROWS = 16_384

PartKind: TypeAlias = Literal["verify", "decode", "prefill"]


@dataclass(frozen=True, slots=True)
class StateRows:
    """Rows of the cache that a request's KDA state of one group uses in a step.

    Attributes
    ----------
    rows : list of int
        The running state's row, then those of scratch states.
    num_accepted : int
        The state to start from is in ``rows[num_accepted - 1]``; its window is in ``rows[0]``,
        ``num_accepted - 1`` columns in.
    checkpoint : int
        Row for the state that a chunk exports.
    """

    rows: list[int]
    num_accepted: int = 1
    checkpoint: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens ``start`` to ``start + count`` of the request in ``slot``, computed in this step.

    The last ``num_drafts`` of them are to be verified. ``states`` has an entry for each state
    group; at ``checkpoint_at`` tokens, if that is not 0, the chunk exports its state.
    """

    slot: int
    start: int
    count: int
    num_drafts: int = 0
    states: Sequence[StateRows] = ()
    checkpoint_at: int = 0

    @property
    def stop(self) -> int:
        """Tokens of the request in the cache after this step."""
        return self.start + self.count

    @property
    def kind(self) -> PartKind:
        """Class of its rows."""
        return "verify" if self.num_drafts else "decode" if self.count == 1 else "prefill"

    @property
    def order(self) -> tuple[int, int, int]:
        """Place in the step: by class, then alike next to alike, then the shortest context."""
        rank = ("verify", "decode", "prefill").index(self.kind)
        return rank, 0 if self.kind == "prefill" else self.count, self.start


@dataclass(frozen=True, slots=True)
class Context:
    """Cached rows that some rows of the step attend to, in one attention group.

    ``cells [n, L]`` (or ``[L]``, for a chunk) numbers the rows of a layer's pages with blocks laid
    end to end. ``hidden [n, T, L]`` is true where token t of request n must not look: behind
    itself, and where the context is padded with cell 0. None hides nothing.
    """

    rows: slice
    cells: Tensor
    hidden: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Decodes:
    """Requests with ``num_tokens`` rows each; several rows are drafts to verify.

    Attributes
    ----------
    rows : slice
        Of the step.
    num_tokens : int
        T.
    state_rows : tuple of Tensor
        int64 ``[n, S]`` for each state group, see :class:`StateRows`.
    num_accepted : Tensor
        int64 ``[n]``.
    contexts : list of list of Context
        For each attention group; several if one would take too much memory.
    """

    rows: slice
    num_tokens: int
    state_rows: tuple[Tensor, ...]
    num_accepted: Tensor
    contexts: list[list[Context]] = field(default_factory=list)

    @property
    def kind(self) -> PartKind:
        """Class of its rows."""
        return "verify" if self.num_tokens > 1 else "decode"


@dataclass(frozen=True, slots=True)
class Prefill:
    """The chunk of one prompt.

    Attributes
    ----------
    rows : slice
        Of the step.
    state_rows, checkpoint_rows : tuple of int
        For each state group, where the state is and where it is exported to.
    checkpoint_at : int
        After so many rows of the chunk; 0 for never.
    contexts : list of list of Context
        As for :class:`Decodes`.
    """

    rows: slice
    state_rows: tuple[int, ...]
    checkpoint_rows: tuple[int, ...]
    checkpoint_at: int
    contexts: list[list[Context]] = field(default_factory=list)
    kind: PartKind = "prefill"


Part: TypeAlias = Decodes | Prefill


class StepMetadata:
    """The parts of one step.

    Parameters
    ----------
    cache : PagedCache
        Its block table must be up to date.
    segments : sequence of Segment
        In the order of the rows of the step, which is that of :attr:`Segment.order`.

    Raises
    ------
    ValueError
        If the order is another one.
    """

    def __init__(self, cache: PagedCache, segments: Sequence[Segment]) -> None:
        if not all(a.order <= b.order for a, b in pairwise(segments)):
            raise ValueError(
                "segments come in the order of Segment.order: those with drafts first, then those "
                "of one token, then prompts, and alike next to alike"
            )
        self._cache, self._device = cache, cache.block_table.device
        self.num_rows = sum(segment.count for segment in segments)
        #: Where each row's token stands in its sequence, int64 ``[N]``.
        self.positions = self._positions(segments)
        #: The cell of each attention group that each row writes, ``[group, N]``: vLLM's
        #: slot_mapping.
        self.cell_mapping = self._cell_mapping(segments)
        self.parts: list[Part] = []
        row = 0
        for (kind, _), members in groupby(segments, key=lambda s: s.order[:2]):
            if kind == 2:
                for segment in members:
                    self.parts.append(self._prefill(segment, row))
                    row += segment.count
            else:
                part = self._decodes(list(members), row)
                self.parts.append(part)
                row = part.rows.stop
        #: Whether rows of several classes stand side by side.
        self.is_mixed = len({part.kind for part in self.parts}) > 1
        #: What verification leaves to be committed: for each KDA layer, in the order of the parts.
        self.records: dict[int, list[KdaRecords]] = {}

    def _integers(self, values: Sequence[int] | Sequence[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _positions(self, segments: Sequence[Segment]) -> Tensor:
        starts = self._integers([s.start for s in segments])
        counts = self._integers([s.count for s in segments])
        first_row = counts.cumsum(0) - counts
        rows = torch.arange(self.num_rows, device=self._device)
        return rows + (starts - first_row).repeat_interleave(counts)

    def _cell_mapping(self, segments: Sequence[Segment]) -> Tensor:
        size = self._cache.page_size
        counts = self._integers([s.count for s in segments])
        slots = self._integers([s.slot for s in segments]).repeat_interleave(counts)
        blocks = self._cache.block_table[:, slots, self.positions // size]
        return blocks * size + self.positions % size

    def _cells(self, group: int, slots: Tensor | int, length: int) -> Tensor:
        size = self._cache.page_size
        blocks = self._cache.block_table[group, slots, : -(-length // size)].unsqueeze(-1)
        cells = blocks * size + torch.arange(size, device=self._device)
        return cells.flatten(-2)[..., :length]

    def _prefill(self, segment: Segment, row: int) -> Prefill:
        rows = slice(row, row + segment.count)
        return Prefill(
            rows,
            tuple(state.rows[0] for state in segment.states),
            tuple(state.checkpoint for state in segment.states),
            segment.checkpoint_at - segment.start if segment.checkpoint_at else 0,
            [
                [Context(rows, self._cells(group, segment.slot, segment.stop))]
                for group in range(self._cache.num_attention_groups)
            ],
        )

    def _decodes(self, segments: list[Segment], row: int) -> Decodes:
        count = segments[0].count
        groups = range(len(segments[0].states))
        return Decodes(
            slice(row, row + count * len(segments)),
            count,
            tuple(self._integers([s.states[g].rows for s in segments]) for g in groups),
            self._integers([s.states[0].num_accepted if s.states else 1 for s in segments]),
            [
                self._decode_contexts(group, segments, row)
                for group in range(self._cache.num_attention_groups)
            ],
        )

    def _decode_contexts(self, group: int, segments: list[Segment], row: int) -> list[Context]:
        """Pad contexts to the longest of as many requests as memory allows."""
        count, contexts, low = segments[0].count, [], 0
        while low < len(segments):
            high = low + 1
            while (
                high < len(segments) and (high + 1 - low) * segments[high].stop <= MAX_GATHERED_ROWS
            ):
                high += 1
            members, longest = segments[low:high], segments[high - 1].stop
            cells = self._cells(group, self._integers([s.slot for s in members]), longest)
            hidden = None
            if count > 1 or members[0].stop < longest:
                position = torch.arange(longest, device=self._device)
                starts = self._integers([s.start for s in members])
                last = starts.unsqueeze(-1) + torch.arange(count, device=self._device)
                hidden = position > last.unsqueeze(-1)
                cells = cells.masked_fill(hidden.all(1), 0)
            contexts.append(Context(slice(row + low * count, row + high * count), cells, hidden))
            low = high
        return contexts
