"""The rows of a step in parts: what each request brings, and the classes that operators take.

Needs torch. :mod:`~kimik3_lab.serving.executors.step_metadata` makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from kimik3_lab.serving.executors.paged_cache import PagedCache

__all__ = ["Context", "Decodes", "Part", "PartKind", "Prefill", "Segment", "StateRows"]

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
