"""Hold prompts back for some steps, so that others decode without interruption.

Needs the standard library only. In vLLM 0.33 this is ``local_prefill_interval`` in
``Scheduler.schedule`` (``--prefill-schedule-interval``).
"""

from __future__ import annotations

from collections.abc import Iterable

from kimik3_lab.serving.request import Request

__all__ = ["PrefillCadence"]


class PrefillCadence:
    """Decides for each step whether prompts are computed.

    Parameters
    ----------
    interval : int
        Steps between two that compute prompts; 1 holds nothing back.

    Attributes
    ----------
    holds : bool
        Whether this step holds prompts back.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.holds = False
        self._num_steps = 0
        self._last_prefill = -interval  # the first step is free
        self._capacity_bound = False

    def new_step_starts(self, running: Iterable[Request]) -> None:
        """Decide for the step that begins.

        Nothing is held back if nobody decodes, or if the last chance left requests waiting: then
        the cadence would only let the queue grow.
        """
        self.holds = (
            self.interval > 1
            and not self._capacity_bound
            and self._num_steps + 1 - self._last_prefill < self.interval
            and any(not request.is_prefill_chunk for request in running)
        )

    def admission_ends(self, num_left_waiting: int) -> None:
        """Hear how many requests could not be admitted in this step."""
        if not self.holds:
            self._capacity_bound = num_left_waiting > 0

    def step_ends(self, *, executes: bool, prefills: bool) -> None:
        """Hear whether the step computes anything, and a prompt among it."""
        self._num_steps += executes
        if prefills:
            self._last_prefill = self._num_steps
