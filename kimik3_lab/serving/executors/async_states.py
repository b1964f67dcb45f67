"""KDA states of steps that are planned ahead: columns from the plan, offsets from the device.

Needs torch through the cache. Part of :mod:`~kimik3_lab.serving.executors.async_steps`; read
:mod:`~kimik3_lab.serving.executors.kda_states` first.

The column of a state follows from the plan, which counts all drafts in flight as accepted, so the
host knows it. What it does not know is how many were accepted: which scratch row holds the state,
and whether a block boundary lies among the accepted tokens. So it sends all rows that may be meant,
and the device takes the one that is. vLLM does so in ``preprocess_mamba_align_fused_kernel``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kimik3_lab.serving.executors.async_tables import SeatTables
from kimik3_lab.serving.executors.kda_states import Chunk, CommitTensors, KdaStates
from kimik3_lab.serving.executors.paged_cache import StateMove
from kimik3_lab.serving.executors.pinned import send_columns
from kimik3_lab.serving.executors.step_parts import StateRows

__all__ = ["AsyncKdaStates"]


class AsyncKdaStates:
    """Does for steps planned ahead what :class:`KdaStates` does for those that are answered.

    Parameters
    ----------
    states : KdaStates
        Knows the tables of the requests, and is told the columns.
    tables : SeatTables
        Know what was accepted.
    num_speculative_tokens : int
        K. A plan is made with one step in flight, so it may be ahead of the truth by so much.
    """

    def __init__(self, states: KdaStates, tables: SeatTables, num_speculative_tokens: int) -> None:
        self.states, self.tables, self.cache = states, tables, states.cache
        self._slack = num_speculative_tokens
        self._block_size = states.cache_config.block_size

    def prepare(self, chunks: Sequence[Chunk], slots: Sequence[int]) -> list[tuple[StateRows, ...]]:
        """Bring states to the columns that the plan writes, see :meth:`KdaStates.prepare`.

        ``slots`` are the seats of the chunks.
        """
        states, scratch = self.states, self.cache.num_scratch
        empty: list[int] = []
        moves: list[StateMove] = []
        moved: list[tuple[int, list[list[int]], list[int]]] = []  # slot, candidates, targets
        for chunk, slot in zip(chunks, slots, strict=True):
            running, column = states._running[chunk.req_id], states._column(chunk.stop)
            # Two steps may have been answered since, and lost all their drafts.
            if not 0 <= running.num_tokens - chunk.start <= 2 * self._slack:
                raise RuntimeError(
                    f"request {chunk.req_id} is planned from token {chunk.start}, its state has "
                    f"read up to {running.num_tokens}: were all plans executed, in their order?"
                )
            if chunk.start == 0:
                empty += [table[column] for table in running.tables]
            elif column != running.column and scratch:
                first = running.column
                candidates = [table[first : first + 1 + scratch] for table in running.tables]
                moved.append((slot, candidates, [table[column] for table in running.tables]))
            elif column != running.column:
                moves += states._moves(running, 1, column)
            running.column, running.num_tokens = column, chunk.stop
            running.num_accepted = 1  # filled in on the device
        self.cache.reset_states(empty)
        self.cache.move_states(moves)
        self._move(moved)
        return [states._rows(chunk) for chunk in chunks]

    def _move(self, moved: Sequence[tuple[int, list[list[int]], list[int]]]) -> None:
        if not moved:
            return
        groups, width = len(moved[0][2]), 1 + self.cache.num_scratch
        wide = [_wide(table, width) for _, candidates, _ in moved for table in candidates]
        slots, rows, targets = send_columns(
            self.tables.device,
            [slot for slot, _, _ in moved],
            [row for table in wide for row in table],
            [row for _, _, rows_of in moved for row in rows_of],
        )
        rows = rows.view(-1, width)
        offset = (self.tables.num_accepted[slots] - 1).unsqueeze(-1).expand(-1, groups).flatten()
        state = rows.gather(1, offset.unsqueeze(-1)).squeeze(-1)
        self.cache.move_state_rows(state, rows[:, 0], offset, targets)
        self.tables.num_accepted.index_fill_(0, slots, 1)

    @property
    def are_in_place(self) -> bool:
        """Whether verification leaves all states where they belong: scratch rows, one column."""
        return bool(self.cache.num_scratch) and not self.states._aligned

    def settle(
        self, verified: Sequence[Chunk], starts: Tensor, counts: Tensor
    ) -> tuple[Tensor | None, CommitTensors]:
        """Keep what verification left, see :meth:`KdaStates.accept`.

        Parameters
        ----------
        verified
            n chunks with drafts, as planned.
        starts, counts : Tensor
            int64 ``[n]``: where they really began, and how many of their rows are accepted.

        Returns
        -------
        num_accepted : Tensor or None
            int64 ``[n]``: where the state is now; None if that is what the tables say.
        commits : CommitTensors
            For records.
        """
        size, scratch = self._block_size, self.cache.num_scratch
        lowest = [max(chunk.start - self._slack, 0) // size for chunk in verified]
        most = max(chunk.stop // size - low for chunk, low in zip(verified, lowest, strict=True))
        if not self.states._aligned or most == 0:
            return None, CommitTensors(counts)
        running = [self.states._running[chunk.req_id] for chunk in verified]
        groups = range(self.cache.num_state_groups)
        low, column, targets, rows = send_columns(
            self.tables.device,
            lowest,
            [r.column for r in running],
            [
                row
                for g in groups
                for r, first in zip(running, lowest, strict=True)
                for row in _wide(r.tables[g][first : first + most], most)
            ],
            [
                row
                for g in groups
                for r in running
                for row in _wide(r.tables[g][r.column : r.column + 1 + scratch], 1 + scratch)
            ],
        )
        stops = starts + counts
        boundary = stops - stops % size
        crosses = boundary > starts
        its_column = boundary // size - 1
        place = (its_column - low).clamp(0, most - 1)
        targets = targets.view(len(groups), -1, most)
        target = targets.gather(2, place.expand(len(groups), -1).unsqueeze(-1)).squeeze(-1)
        behind = (boundary - starts).where(crosses, 0)
        if not scratch:
            return None, CommitTensors(counts, behind, target)
        # Where nothing is to be kept, the row that belongs to nobody is copied to itself.
        nobody = self.cache.recurrent.shape[1] - 1
        offset = (behind - 1).clamp(min=0)
        rows = rows.view(len(groups), -1, 1 + scratch)
        state = rows.gather(2, offset.expand(len(groups), -1).unsqueeze(-1)).squeeze(-1)
        self.cache.move_state_rows(
            state.where(crosses, nobody).flatten(),
            rows[..., 0].where(crosses, nobody).flatten(),
            offset.repeat(len(groups)),
            target.where(crosses, nobody).flatten(),
        )
        # In the column of the running state it is the state behind the last row: all is accepted.
        accepted = counts.where(~(crosses & (its_column == column)), 1)
        return accepted, CommitTensors(counts)


def _wide(rows: Sequence[int], width: int) -> list[int]:
    """Fill up with rows that are not meant."""
    return [*rows, *[0] * (width - len(rows))]
