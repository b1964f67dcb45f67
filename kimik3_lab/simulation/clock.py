"""A clock that moves when it is told to: seconds of a simulated machine.

Needs the standard library only. Lessons 07 to 09 count steps on it, lessons 11 and 12 seconds.
"""

from __future__ import annotations

__all__ = ["VirtualClock"]


class VirtualClock:
    """Seconds since a run began.

    Attributes
    ----------
    now : float
        The moment, in seconds.

    Examples
    --------
    >>> clock = VirtualClock()
    >>> clock.advance(1.5)
    >>> clock.wait_until(1.0)  # a moment that has passed: nothing happens
    >>> clock.now
    1.5
    """

    __slots__ = ("now",)

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def advance(self, seconds: float) -> None:
        """Let time pass.

        Raises
        ------
        ValueError
            If ``seconds`` is negative or not a number: a step cannot take that long.
        """
        if not seconds >= 0.0:
            raise ValueError(f"time goes forward only: a step must take 0 s or more, got {seconds}")
        self.now += seconds

    def wait_until(self, moment: float) -> None:
        """Let time pass up to ``moment``, if that lies ahead."""
        if moment > self.now:
            self.now = moment
