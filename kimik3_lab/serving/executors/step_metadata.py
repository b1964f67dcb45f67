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
from functools import cached_property
from itertools import groupby, pairwise

import torch
from torch import Tensor

from kimik3_lab.serving.executors.kda_records import KdaRecords
from kimik3_lab.serving.executors.paged_cache import PagedCache
from kimik3_lab.serving.executors.step_parts import Decodes, Part, Prefill, Segment

__all__ = ["StepMetadata", "step_numbers"]


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
