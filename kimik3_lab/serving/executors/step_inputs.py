"""The forward pass of a step: its integers go to the device, logits come out.

Needs torch. Lesson 10 turns the switches ``metadata`` and ``cuda_graphs``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kimik3_lab.serving.executors.cuda_graphs import Ahead, DecodeGraphs
from kimik3_lab.serving.executors.paged_mixer import PagedMixer
from kimik3_lab.serving.executors.pinned import to_device
from kimik3_lab.serving.executors.step_metadata import StepMetadata, step_numbers
from kimik3_lab.serving.executors.step_parts import Segment

__all__ = ["StepInputs"]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a forward pass is told.

    Attributes
    ----------
    segments
        Requests in the order of their rows.
    token_ids
        Of all rows; -1 for one that ``ahead`` fills in.
    logits_at
        Rows that logits are wanted of.
    taps
        For the drafter's sake, see :meth:`~.proposer.Proposer.new_taps`.
    ahead
        Corrects the numbers on the device, where more is known than on the host. Then starts of
        decoding requests are taken for upper bounds.
    """

    segments: Sequence[Segment]
    token_ids: Sequence[int]
    logits_at: Sequence[int]
    taps: dict[int, Tensor | None] | None = None
    ahead: Ahead | None = None

    def run(self, compute: Callable[..., Tensor], mixer: PagedMixer) -> Tensor:
        """Send all numbers in one copy, or into the buffer of a recorded step."""
        device, count = mixer.cache.conv.device, len(self.token_ids)
        if isinstance(compute, DecodeGraphs):
            logits = compute.replay(
                self.segments,
                self.token_ids,
                mixer,
                num_logits=len(self.logits_at),
                taps=self.taps,
                ahead=self.ahead,
            )
            if logits is not None:
                return logits
        numbers = to_device(step_numbers(self.token_ids, self.segments, self.logits_at), device)
        exact = self.ahead is None
        mixer.step = StepMetadata(mixer.cache, self.segments, numbers=numbers, exact=exact)
        if self.ahead is not None:
            self.ahead.tables.fill_in(mixer.step, numbers)
        chosen = numbers[len(numbers) - len(self.logits_at) :]
        return compute(numbers[:count], mixer, logits_at=chosen, taps=self.taps)

    def run_eagerly(self, compute: Callable[..., Tensor], mixer: PagedMixer) -> Tensor:
        """Send each tensor in a copy of its own."""
        device, exact = mixer.cache.conv.device, self.ahead is None
        mixer.step = StepMetadata(mixer.cache, self.segments, exact=exact)
        rows = torch.tensor(self.token_ids, device=device)
        if self.ahead is not None:
            self.ahead.tables.fill_in(mixer.step, rows)
        chosen = torch.tensor(self.logits_at, dtype=torch.int64, device=device)
        return compute(rows, mixer, logits_at=chosen, taps=self.taps)
