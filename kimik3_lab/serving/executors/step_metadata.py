"""Where the rows of a step belong, worked out once for all layers.

Needs torch. Lesson 10 prints the parts of a step.

Rows lie in the order of three classes, because each wants another operator: requests that verify
drafts, ``1 + drafts`` rows each; requests that decode one token; and chunks of prompts. The first
two are rectangles, one for each number of rows, and go through an operator all at once. vLLM orders
its batch the same way (``sort_batch_req_ids`` in ``vllm/v1/worker/gpu/model_runner.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from kimik3_lab.serving.executors.kda_records import KdaRecords
from kimik3_lab.serving.executors.paged_cache import PagedCache

__all__ = [
    "Context",
    "Decodes",
    "Part",
    "Prefill",
    "Segment",
    "StateRows",
    "StepMetadata",
    "step_numbers",
]

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


@dataclass(eq=False)
class Decodes:
    """Requests with ``num_tokens`` rows each; several rows are drafts to verify.

    What an attention needs is worked out when it is first asked for, on the device: one that walks
    through pages wants block tables, one that gathers rows wants their cells.

    Attributes
    ----------
    cache : PagedCache
        Whose block table is read.
    rows : slice
        Of the step.
    num_tokens : int
        T.
    state_rows : tuple of Tensor
        int64 ``[n, S]`` for each state group, see :class:`StateRows`.
    num_accepted : Tensor
        int64 ``[n]``.
    slots, starts : Tensor
        int64 ``[n]``: rows of the block table, and tokens in the cache before this step.
    stops : tuple of int
        Tokens in the cache after it, the fewest first.
    bound : int
        A recorded step's stops change from replay to replay: none is more than this. 0 if they are
        what they are.
    exact : bool
        False if the host knows stops only as at most: how many drafts of the step before were
        accepted is known on the device alone.
    """

    cache: PagedCache
    rows: slice
    num_tokens: int
    state_rows: tuple[Tensor, ...]
    num_accepted: Tensor
    slots: Tensor
    starts: Tensor
    stops: tuple[int, ...]
    bound: int = 0
    exact: bool = True

    @property
    def kind(self) -> PartKind:
        """Class of its rows."""
        return "verify" if self.num_tokens > 1 else "decode"

    @property
    def max_len(self) -> int:
        """Tokens in the cache after this step, at most."""
        return self.bound or self.stops[-1]

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens in the cache after this step, int32 ``[n]``."""
        return (self.starts + self.num_tokens).int()

    @cached_property
    def block_tables(self) -> tuple[Tensor, ...]:
        """Blocks of each request, int32 ``[n, blocks]`` for each attention group."""
        count = -(-self.max_len // self.cache.page_size)
        return tuple(table[self.slots, :count].int() for table in self.cache.block_table)

    @cached_property
    def contexts(self) -> list[list[Context]]:
        """For each attention group; several if one would take too much memory."""
        return [self._contexts(group) for group in range(self.cache.num_attention_groups)]

    def _contexts(self, group: int) -> list[Context]:
        """Pad contexts to the longest of as many requests as memory allows."""
        count, first = self.num_tokens, self.rows.start
        contexts, low, number = [], 0, len(self.slots)
        while low < number:
            high = number if self.bound else low + 1
            while high < number and (high + 1 - low) * self.stops[high] <= MAX_GATHERED_ROWS:
                high += 1
            longest = self.bound or self.stops[high - 1]
            members = slice(low, high)
            cells = self.cache.cells(group, self.slots[members], longest)
            hidden = None
            if count > 1 or self.bound or not self.exact or self.stops[low] < longest:
                device = cells.device
                last = self.starts[members].unsqueeze(-1) + torch.arange(count, device=device)
                hidden = torch.arange(longest, device=device) > last.unsqueeze(-1)
                cells = cells.masked_fill(hidden.all(1), 0)
            rows = slice(first + low * count, first + high * count)
            contexts.append(Context(rows, cells, hidden))
            low = high
        return contexts


@dataclass(eq=False)
class Prefill:
    """The chunk of one prompt.

    Attributes
    ----------
    cache : PagedCache
    rows : slice
        Of the step.
    state_rows, checkpoint_rows : tuple of int
        For each state group, where the state is and where it is exported to.
    checkpoint_at : int
        After so many rows of the chunk; 0 for never.
    slot, start : int
        Row of the block table, and tokens in the cache before this step.
    """

    cache: PagedCache
    rows: slice
    state_rows: tuple[int, ...]
    checkpoint_rows: tuple[int, ...]
    checkpoint_at: int
    slot: int
    start: int
    kind: PartKind = "prefill"

    @property
    def stop(self) -> int:
        """Tokens of the request in the cache after this step."""
        count: int = self.rows.stop - self.rows.start
        return self.start + count

    @cached_property
    def block_tables(self) -> tuple[Tensor, ...]:
        """Blocks of the request, int32 ``[1, blocks]`` for each attention group."""
        count = -(-self.stop // self.cache.page_size)
        return tuple(
            table[self.slot : self.slot + 1, :count].int() for table in self.cache.block_table
        )

    @cached_property
    def contexts(self) -> list[list[Context]]:
        """As for :class:`Decodes`."""
        groups = range(self.cache.num_attention_groups)
        return [
            [Context(self.rows, self.cache.cells(group, self.slot, self.stop))] for group in groups
        ]


Part: TypeAlias = Decodes | Prefill


def step_numbers(
    token_ids: Sequence[int], segments: Sequence[Segment], logits_at: Sequence[int] = ()
) -> list[int]:
    """Write all integers of a step one behind the other, to be sent to the device in one copy.

    They are what :class:`StepMetadata` takes apart again: token ids, positions and slots of the
    rows; for each rectangle slots, starts, accepted tokens and the rows of the states of each
    group; the rows that logits are wanted of.
    """
    numbers = list(token_ids)
    for s in segments:
        numbers += range(s.start, s.stop)
    for s in segments:
        numbers += [s.slot] * s.count
    for (kind, _), group in groupby(segments, key=lambda s: s.order[:2]):
        if kind == 2:
            continue
        members = list(group)
        numbers += [s.slot for s in members]
        numbers += [s.start for s in members]
        numbers += [s.states[0].num_accepted if s.states else 1 for s in members]
        for states in zip(*(s.states for s in members), strict=True):
            for state in states:
                numbers += state.rows
    numbers += logits_at
    return numbers


class StepMetadata:
    """The parts of one step.

    Parameters
    ----------
    cache : PagedCache
        Its block table must be up to date.
    segments : sequence of Segment
        In the order of the rows of the step, which is that of :attr:`Segment.order`.
    numbers : Tensor, optional
        :func:`step_numbers` on the device: everything is a view of it. Left out, each tensor is
        made by small operators of its own and sent alone, as vLLM 0.27.1 did.
    bound : int
        For a recorded step, see :class:`Decodes`.
    exact : bool
        Whether the starts of decoding requests are known, see there.

    Raises
    ------
    ValueError
        If the order is another one.
    """

    def __init__(
        self,
        cache: PagedCache,
        segments: Sequence[Segment],
        *,
        numbers: Tensor | None = None,
        bound: int = 0,
        exact: bool = True,
    ) -> None:
        if not all(a.order <= b.order for a, b in pairwise(segments)):
            raise ValueError(
                "segments come in the order of Segment.order: those with drafts first, then those "
                "of one token, then prompts, and alike next to alike"
            )
        self._cache, self._device = cache, cache.block_table.device
        self._numbers, self._bound, self._exact = numbers, bound, exact
        self.segments = segments
        self.num_rows = count = sum(segment.count for segment in segments)
        self._taken = 3 * count
        #: Where each row's token stands in its sequence, int64 ``[N]``.
        self.positions = (
            self._positions(segments) if numbers is None else numbers[count : 2 * count]
        )
        #: Row of the block table of each row's request, int64 ``[N]``.
        self.row_slots = (
            self._row_slots(segments) if numbers is None else numbers[2 * count : 3 * count]
        )
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
        """Bring integers to the device: the next of the numbers, or in a copy of their own."""
        if self._numbers is None:
            return torch.tensor(values, dtype=torch.int64, device=self._device)
        first = values[0]
        shape: tuple[int, ...] = (len(values),)
        if not isinstance(first, int):
            shape += (len(first),)
        low, self._taken = self._taken, self._taken + math.prod(shape)
        return self._numbers[low : self._taken].view(shape)

    def _positions(self, segments: Sequence[Segment]) -> Tensor:
        starts = self._integers([s.start for s in segments])
        counts = self._integers([s.count for s in segments])
        first_row = counts.cumsum(0) - counts
        rows = torch.arange(self.num_rows, device=self._device)
        return rows + (starts - first_row).repeat_interleave(counts)

    def _row_slots(self, segments: Sequence[Segment]) -> Tensor:
        counts = self._integers([s.count for s in segments])
        return self._integers([s.slot for s in segments]).repeat_interleave(counts)

    @cached_property
    def cell_mapping(self) -> Tensor:
        """The cell of each attention group that each row writes, ``[group, N]``: slot_mapping.

        Worked out when it is first asked for: until then positions may be corrected.
        """
        size = self._cache.page_size
        blocks = self._cache.block_table[:, self.row_slots, self.positions // size]
        return blocks * size + self.positions % size

    def _prefill(self, segment: Segment, row: int) -> Prefill:
        return Prefill(
            self._cache,
            slice(row, row + segment.count),
            tuple(state.rows[0] for state in segment.states),
            tuple(state.checkpoint for state in segment.states),
            segment.checkpoint_at - segment.start if segment.checkpoint_at else 0,
            segment.slot,
            segment.start,
        )

    def _decodes(self, segments: list[Segment], row: int) -> Decodes:
        count = segments[0].count
        groups = range(len(segments[0].states))
        # In the order of step_numbers.
        slots = self._integers([s.slot for s in segments])
        starts = self._integers([s.start for s in segments])
        accepted = self._integers([s.states[0].num_accepted if s.states else 1 for s in segments])
        return Decodes(
            self._cache,
            slice(row, row + count * len(segments)),
            count,
            tuple(self._integers([s.states[g].rows for s in segments]) for g in groups),
            accepted,
            slots,
            starts,
            tuple(s.stop for s in segments),
            self._bound,
            self._exact,
        )
