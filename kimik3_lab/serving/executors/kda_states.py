"""Which block holds a request's KDA state: columns that move on, and drafts that are taken back.

Needs torch through the cache that it moves states in. Lesson 10 follows a request through its
columns. In vLLM this is ``vllm/v1/worker/mamba_utils.py``.

A request has a table in each state group. With prefix caching, column ``p`` belongs to the tokens
up to ``(p + 1) * block_size``, and the *running* state is in the column of the last token that a
step plans. When that column changes, the state moves there first, and what stays behind is the
state at the block boundary, which others may start from. Without prefix caching there is one
column. Behind the running state come K scratch rows, if verification keeps a state for each draft::

    [ null, ..., null, boundary, running, scratch x K ]

A step that verifies drafts does not know yet which of its states will be right. Afterwards
:meth:`KdaStates.accept` says so: with n tokens accepted the next step starts from scratch row
``n - 1``, or, with records, from the state that the records lead to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kimik3_lab.serving.config import CacheConfig
from kimik3_lab.serving.executors.paged_cache import PagedCache, StateMove
from kimik3_lab.serving.executors.pinned import send_columns, to_device
from kimik3_lab.serving.executors.step_parts import StateRows
from kimik3_lab.serving.prefill_checkpoint import cdiv

__all__ = ["Chunk", "Commit", "CommitTensors", "KdaStates"]


class Chunk(NamedTuple):
    """Tokens ``start`` to ``stop`` of a request, planned for a step.

    After ``checkpoint_at`` tokens, if that is not 0, a state is exported on the way.
    """

    req_id: str
    start: int
    stop: int
    checkpoint_at: int = 0


class Commit(NamedTuple):
    """What of a verified chunk becomes final.

    The first ``num_accepted`` rows; ``state_rows`` of each group is where the state before them is
    and the one behind them goes to. If ``boundary`` is not 0, the state after so many of them also
    goes to ``boundary_rows``.
    """

    num_accepted: int
    state_rows: tuple[int, ...]
    boundary: int
    boundary_rows: tuple[int, ...]


class CommitTensors(NamedTuple):
    """n commits on the device, in the order of the rows of the step.

    Attributes
    ----------
    num_accepted : Tensor
        int64 ``[n]``.
    boundary : Tensor or None
        int64 ``[n]``, 0 for none; None if nobody reaches one.
    boundary_rows : Tensor or None
        int64 ``[group, n]``, any row where there is no boundary.
    known_boundaries : tuple of int
        ``boundary`` again, for who counts; empty if the device alone knows.
    """

    num_accepted: Tensor
    boundary: Tensor | None = None
    boundary_rows: Tensor | None = None
    known_boundaries: tuple[int, ...] = ()

    @classmethod
    def send(cls, commits: Sequence[Commit], device: torch.device) -> CommitTensors:
        """Send what the host knows."""
        counts, boundaries = [c.num_accepted for c in commits], [c.boundary for c in commits]
        if not any(boundaries):
            return cls(to_device(counts, device))
        groups = zip(*(c.boundary_rows for c in commits), strict=True)
        rows = [row for group in groups for row in group]
        count, boundary, targets = send_columns(device, counts, boundaries, rows)
        return cls(count, boundary, targets.view(-1, len(counts)), tuple(boundaries))

    def members(self, low: int, high: int) -> CommitTensors:
        """Take some of them."""
        known = self.known_boundaries[low:high]
        if self.boundary is None or self.boundary_rows is None or (known and not any(known)):
            return CommitTensors(self.num_accepted[low:high])
        return CommitTensors(
            self.num_accepted[low:high],
            self.boundary[low:high],
            self.boundary_rows[:, low:high],
            known,
        )

    @property
    def num_boundaries(self) -> int:
        """Commits that reach a boundary, as far as the host knows."""
        return sum(boundary > 0 for boundary in self.known_boundaries)


@dataclass(slots=True)
class _Running:
    """Tables of a request, and where in them its state is."""

    tables: list[list[int]]
    column: int
    num_accepted: int = 1
    num_tokens: int = 0


class KdaStates:
    """The state columns of all running requests.

    Parameters
    ----------
    cache : PagedCache
        Where the states are.
    cache_config : CacheConfig
        The scheduler's.
    """

    def __init__(self, cache: PagedCache, cache_config: CacheConfig) -> None:
        self.cache, self.cache_config = cache, cache_config
        self._aligned = cache_config.mamba_cache_mode == "align"
        self._running: dict[str, _Running] = {}

    # -- requests come and go ------------------------------------------------------------------

    def begin(self, req_id: str, tables: Sequence[Sequence[int]], num_computed_tokens: int) -> None:
        """Give a request its tables; the state after its hit, if any, is in the last column of it.

        Raises
        ------
        ValueError
            If it is to start behind tokens whose state nobody has kept.
        """
        if num_computed_tokens and not self._aligned:
            raise ValueError(
                f"request {req_id} is to start at token {num_computed_tokens}, but no KDA state "
                "was kept there: without enable_prefix_caching and num_kda_groups requests start "
                "at 0"
            )
        column = self._column(num_computed_tokens) if num_computed_tokens else 0
        running = _Running([list(t) for t in tables], column, num_tokens=num_computed_tokens)
        self._running[req_id] = running
        self._own(tables)

    def extend(self, req_id: str, new_block_ids: Sequence[Sequence[int]]) -> None:
        """Add what the scheduler has added to a request's tables."""
        for table, ids in zip(self._running[req_id].tables, new_block_ids, strict=True):
            table += ids
        self._own(new_block_ids)

    def drop(self, req_id: str) -> None:
        """Forget a request that was preempted or has ended; blocks with a hash stay as they are."""
        self._running.pop(req_id, None)

    def _own(self, tables: Sequence[Sequence[int]]) -> None:
        if self.cache_config.num_kda_groups:
            first = self.cache_config.num_attention_groups
            for group, ids in enumerate(tables, start=first):
                self.cache.own(group, (block_id for block_id in ids if block_id))

    def _column(self, num_tokens: int) -> int:
        """Column of the state after ``num_tokens`` tokens."""
        return cdiv(num_tokens, self.cache_config.block_size) - 1 if self._aligned else 0

    # -- a step --------------------------------------------------------------------------------

    def prepare(self, chunks: Sequence[Chunk]) -> list[tuple[StateRows, ...]]:
        """Bring states to where the step will write them; rows of each chunk, for each group.

        Done before the forward pass: a request that has computed nothing starts from zero, and one
        whose column changes takes its state along.
        """
        empty: list[int] = []
        moves: list[StateMove] = []
        for chunk in chunks:
            running, column = self._running[chunk.req_id], self._column(chunk.stop)
            if running.num_tokens != chunk.start:
                raise RuntimeError(
                    f"request {chunk.req_id} is planned from token {chunk.start}, its state has "
                    f"read {running.num_tokens}: were all plans executed, in their order?"
                )
            if chunk.start == 0:
                empty += [table[column] for table in running.tables]
            elif column != running.column:
                moves += self._moves(running, running.num_accepted, column)
            else:
                continue
            running.column, running.num_accepted = column, 1
        self.cache.reset_states(empty)
        self.cache.move_states(moves)
        return [self._rows(chunk) for chunk in chunks]

    def _rows(self, chunk: Chunk) -> tuple[StateRows, ...]:
        running = self._running[chunk.req_id]
        last = running.column + self.cache.num_scratch
        return tuple(
            StateRows(
                table[running.column : last + 1],
                running.num_accepted,
                table[running.column - 1] if chunk.checkpoint_at else 0,
            )
            for table in running.tables
        )

    def _moves(self, running: _Running, num_read: int, column: int) -> list[StateMove]:
        """Plan to copy the state after ``num_read`` tokens of the last step to ``column``."""
        offset = num_read - 1
        state = running.column + (offset if self.cache.num_scratch else 0)
        return [
            StateMove(table[state], table[running.column], offset, table[column])
            for table in running.tables
        ]

    def finish(self, req_id: str, stop: int) -> None:
        """Note that a chunk without drafts is computed: its state is the running one."""
        running = self._running[req_id]
        running.num_tokens, running.num_accepted = stop, 1

    def accept(self, verified: Sequence[tuple[Chunk, int]]) -> list[Commit]:
        """Set requests back to the tokens that verification left of their chunks.

        Where a state at a block boundary lies among them, it goes to its column. With scratch rows
        that is a copy, made here; with records everything is left to whoever commits them.

        Parameters
        ----------
        verified : sequence of tuple
            A chunk, and how many of its rows are accepted: at least 1.

        Returns
        -------
        list of Commit
            In the same order, for records.
        """
        moves: list[StateMove] = []
        commits = []
        for chunk, count in verified:
            running = self._running[chunk.req_id]
            running.num_tokens, running.num_accepted = chunk.start + count, count
            boundary = self._boundary(chunk.start, running.num_tokens)
            column = self._column(boundary) if boundary else 0
            to_boundary = boundary - chunk.start if boundary else 0
            commits.append(
                Commit(
                    count,
                    tuple(table[running.column] for table in running.tables),
                    to_boundary,
                    tuple(table[column] for table in running.tables),
                )
            )
            if not self.cache.num_scratch:
                running.num_accepted = 1
            elif boundary:
                moves += self._moves(running, to_boundary, column)
                if column == running.column:  # the last row of the chunk: all is accepted
                    running.num_accepted = 1
        self.cache.move_states(moves)
        return commits

    def _boundary(self, start: int, stop: int) -> int:
        """Last block boundary behind ``start`` and not behind ``stop``; 0 if there is none."""
        boundary = stop - stop % self.cache_config.block_size
        return boundary if self._aligned and boundary > start else 0
