"""What the device knows of each seat before the host does: last token, drafts, place, state.

Needs torch. Lesson 10 turns the switch ``async_scheduling``. In vLLM these are tensors of
``RequestState`` in ``vllm/v1/worker/gpu/states.py``.

A step that is planned before the last one has answered has placeholders: its first token is the one
that the last step will sample, its drafts are those that the drafter will make of it, and it begins
behind as many of the last drafts as will be accepted. All of that lies on the device when the step
begins there. So the host sends a plan with gaps (token -1, and starts as if all drafts had been
accepted), and :meth:`SeatTables.fill_in` fills them before the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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

    def __init__(self, num_slots: int, num_speculative_tokens: int, device: torch.device) -> None:
        def full(value: int, *shape: int) -> Tensor:
            return torch.full(shape, value, dtype=torch.int64, device=device)

        self.device = device
        self.num_computed = full(0, num_slots + 1)
        self.num_accepted = full(1, num_slots + 1)
        self.last_token = full(0, num_slots + 1)
        self.drafts = full(-1, num_slots + 1, num_speculative_tokens)

    def begin(self, seated: Sequence[tuple[int, int]]) -> None:
        """Note which seats are taken anew, and how many tokens were found in the prefix cache."""
        if seated:
            slots, starts = zip(*seated, strict=True)
            index, computed = send_columns(self.device, slots, starts)
            self.num_computed[index] = computed
            self.num_accepted.index_fill_(0, index, 1)
            self.drafts.index_fill_(0, index, -1)

    def fill_in(self, step: StepMetadata, token_ids: Tensor) -> Tensor:
        """Correct a step in place: starts, positions, where states are, and tokens.

        Parameters
        ----------
        step : StepMetadata
            Its tensors say what the host knew.
        token_ids : Tensor
            int64 ``[N]`` or longer: rows of the step. -1 is filled in with what the request in that
            seat has sampled (its first row) or drafted; with 0 if it has drafted nothing.

        Returns
        -------
        Tensor
            int64 ``[N]``: the token ids, with -1 left where there is no draft.
        """
        filled = token_ids[: step.num_rows].clone()
        for part in step.parts:
            if not isinstance(part, Decodes):
                continue  # a prompt is known to the host, and where it goes on
            slots, count = part.slots, part.num_tokens
            part.starts.copy_(self.num_computed[slots])
            part.num_accepted.copy_(self.num_accepted[slots])
            offsets = torch.arange(count, device=self.device)
            positions = part.starts.unsqueeze(-1) + offsets
            step.positions[part.rows].copy_(positions.flatten())
            own = (self.last_token[slots].unsqueeze(-1), self.drafts[slots, : count - 1])
            rows = filled[part.rows]
            rows.copy_(rows.where(rows >= 0, torch.cat(own, 1).flatten()))
        token_ids[: step.num_rows].copy_(filled.clamp(min=0))
        return filled

    def advance(self, slots: Tensor, num_kept: Tensor, num_accepted: Tensor) -> None:
        """Move requests on by the rows that are kept of the step, int64 ``[n]`` each."""
        self.num_computed.index_add_(0, slots, num_kept)
        self.num_accepted[slots] = num_accepted
