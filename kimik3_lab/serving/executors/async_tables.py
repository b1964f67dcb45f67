"""What the device knows of each seat before the host does: last token, drafts, place, state.

Needs torch, and Triton for the kernels. Lesson 10 turns the switch ``async_scheduling``. In vLLM
these are tensors of ``RequestState`` in ``vllm/v1/worker/gpu/states.py``.

A step that is planned before the last one has answered has placeholders: its first token is the one
that the last step will sample, its drafts are those that the drafter will make of it, and it begins
behind as many of the last drafts as will be accepted. All of that lies on the device when the step
begins there. So the host sends a plan with gaps (token -1, and starts as if all drafts had been
accepted), :meth:`SeatTables.fill_in` fills them before the forward pass, and
:meth:`SeatTables.settle` behind it writes what the next step will ask for.

Each is one kernel on the Triton backend (:mod:`k3_kernels.seat_tables`), and part of the recorded
graph where there is one. Here is the same once more in small operators, for the reference backend.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from k3_kernels import Seats, fill_in_seats, settle_seats
from torch import Tensor

from kimik3_lab.serving.executors.async_sampler import Sampled, SampledRows, verify_rows
from kimik3_lab.serving.executors.pinned import send_columns
from kimik3_lab.serving.executors.step_metadata import StepMetadata
from kimik3_lab.serving.executors.step_parts import Decodes

__all__ = ["SeatTables"]


class SeatTables:
    """A row for each seat, and one for the empty requests of recorded steps.

    Parameters
    ----------
    num_slots : int
        Seats.
    num_speculative_tokens : int
        K.
    device : torch.device
        Of the model.
    keeps_states : bool
        Whether verification keeps the KDA state behind each row.
    fused : bool
        Whether the kernels do it.

    Attributes
    ----------
    num_computed : Tensor
        int64 ``[S + 1]``: tokens in the cache, rejected drafts taken off.
    num_accepted : Tensor
        int64 ``[S + 1]``: where the KDA state is, see
        :class:`~kimik3_lab.serving.executors.step_parts.StateRows`.
    last_token : Tensor
        int64 ``[S + 1]``: sampled and not computed yet.
    drafts : Tensor
        int64 ``[S + 1, K]``: what was drafted behind it; -1 for nothing.

    Examples
    --------
    >>> tables = SeatTables(2, 3, torch.device("cpu"))
    >>> tables.begin([(1, 16)])
    >>> tables.num_computed.tolist(), tables.drafts[1].tolist()
    ([0, 16, 0], [-1, -1, -1])
    """

    def __init__(
        self,
        num_slots: int,
        num_speculative_tokens: int,
        device: torch.device,
        *,
        keeps_states: bool = False,
        fused: bool = False,
    ) -> None:
        def full(value: int, *shape: int) -> Tensor:
            return torch.full(shape, value, dtype=torch.int64, device=device)

        self.device, self.num_slots = device, num_slots
        self.keeps_states, self.fused = keeps_states, fused
        self.num_computed = full(0, num_slots + 1)
        self.num_accepted = full(1, num_slots + 1)
        self.last_token = full(0, num_slots + 1)
        self.drafts = full(-1, num_slots + 1, num_speculative_tokens)

    @property
    def seats(self) -> Seats:
        """The tables, as the kernels want them."""
        return Seats(self.num_computed, self.num_accepted, self.last_token, self.drafts)

    def begin(self, seated: Sequence[tuple[int, int]]) -> None:
        """Note which seats are taken anew, and how many tokens were found in the prefix cache."""
        if seated:
            slots, starts = zip(*seated, strict=True)
            index, computed = send_columns(self.device, slots, starts)
            self.num_computed[index] = computed
            self.num_accepted.index_fill_(0, index, 1)
            self.drafts.index_fill_(0, index, -1)

    def fill_in(self, step: StepMetadata, token_ids: Tensor) -> None:
        """Correct a step in place: starts, positions, where states are, and tokens.

        Parameters
        ----------
        step : StepMetadata
            Its tensors say what the host knew.
        token_ids : Tensor
            int64 ``[N]`` or longer: rows of the step. -1 is filled in with what the request in that
            seat has sampled (its first row) or drafted; with 0 if it has drafted nothing. A prompt
            is known to the host, and where it goes on.
        """
        for part in step.parts:
            if not isinstance(part, Decodes):
                continue
            rows, positions = token_ids[part.rows], step.positions[part.rows]
            if self.fused:
                fill_in_seats(
                    self.seats, part.slots, rows, positions, part.starts, part.num_accepted
                )
                continue
            slots, count = part.slots, part.num_tokens
            part.starts.copy_(self.num_computed[slots])
            part.num_accepted.copy_(self.num_accepted[slots])
            offsets = torch.arange(count, device=self.device)
            positions.copy_((part.starts.unsqueeze(-1) + offsets).flatten())
            own = (self.last_token[slots].unsqueeze(-1), self.drafts[slots, : count - 1])
            rows.copy_(rows.where(rows >= 0, torch.cat(own, 1).flatten()).clamp(min=0))

    def settle(self, rows: SampledRows, best: Tensor, enabled: Tensor | None = None) -> Tensor:
        """Verify what the seats have drafted, and move them on.

        Parameters
        ----------
        rows : SampledRows
            Where everything is.
        best : Tensor
            int64 ``[M]``: what is chosen in each row of the logits, -1 if they are not finite.
        enabled : Tensor, optional
            int64 ``[1]``; with 0 in it the tables stay as they are. Left out, it stands for 1.

        Returns
        -------
        Tensor
            int64 ``[n, most + 3]``: :attr:`Sampled.packed`.
        """
        if self.fused:
            return settle_seats(
                self.seats, rows.slots, best, rows.firsts, rows.num_drafts, rows.counts, rows.most,
                keeps_states=self.keeps_states, enabled=enabled,
            )  # fmt: skip
        sampled = verify_rows(rows, self.drafts[rows.slots, : rows.most], best)
        self.advance(rows, sampled, enabled)
        return sampled.packed

    def advance(self, rows: SampledRows, sampled: Sampled, enabled: Tensor | None = None) -> None:
        """Move requests on by the rows that are kept of the step."""
        slots, verified = rows.slots, rows.num_drafts > 0
        moves_on = slots < self.num_slots
        if enabled is not None:
            moves_on = moves_on & (enabled != 0)
        num_kept = sampled.num_tokens.where(verified, rows.counts)
        num_accepted = num_kept.where(verified & self.keeps_states, 1)
        is_sampled = moves_on & (rows.firsts >= 0)
        self.num_computed.index_add_(0, slots, num_kept.where(moves_on, 0))
        self.num_accepted[slots] = num_accepted.where(moves_on, self.num_accepted[slots])
        self.last_token[slots] = sampled.last.where(is_sampled, self.last_token[slots])
