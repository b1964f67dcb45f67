"""What the server asks of an engine, and how an engine can fail it.

Needs the standard library only. Part of :mod:`kimik3_lab.serving.server.async_engine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kimik3_lab.serving.outputs import EngineCoreOutput
    from kimik3_lab.serving.request import Request

__all__ = [
    "EngineDeadError",
    "EngineObserver",
    "EngineStepError",
    "EngineStoppingError",
    "QueueFullError",
    "SteppedEngine",
]


class EngineDeadError(RuntimeError):
    """The engine takes no more requests: it has stopped, or it could not recover from a failure."""


class EngineStoppingError(EngineDeadError):
    """The server is shutting down."""


class EngineStepError(RuntimeError):
    """A step failed while this request was running; the engine itself goes on."""


class QueueFullError(RuntimeError):
    """There are as many requests as may be in flight; the same one may do later."""


class SteppedEngine(Protocol):
    """What is asked of an engine; :class:`kimik3_lab.serving.engine.Engine` has it."""

    def add_request(self, request: Request) -> None:
        """Queue a request; ValueError if it can never run."""

    def abort(self, request_id: str) -> None:
        """Drop a request and free what it holds."""

    def step(self) -> list[EngineCoreOutput]:
        """Run the model once and return the new tokens."""

    def has_unfinished_requests(self) -> bool:
        """Whether there is anything to step for."""


class EngineObserver(Protocol):
    """Who is told what the engine does; :class:`.metrics.ServerMetrics` counts it.

    All calls but :meth:`request_rejected` come from the engine's thread. Times are those of
    ``time.monotonic``.
    """

    def request_rejected(self, num_requests: int) -> None:
        """Note that there was no room for so many requests."""

    def request_added(self, request: Request, *, text_may_end_first: bool = False) -> None:
        """Note that the engine has taken a request.

        One whose text may end first, at a stop string, is over when :meth:`request_ended` says so,
        also if the engine has ended it before.
        """

    def request_ended(
        self, request_id: str, reason: str, ended: float, num_tokens: int | None = None
    ) -> None:
        """Note that a request was ended from outside, or by a failed step.

        The engine may have ended it meanwhile. ``num_tokens`` is what the client got, if the
        answer is complete: fewer than the engine made when a stop string cut the text.
        """

    def step_ended(self, began: float, ended: float, outputs: Sequence[EngineCoreOutput]) -> None:
        """Note that a step has run and what came out."""

    def state_changed(self, engine: object) -> None:
        """Read the engine's counters, now that they may have changed; at no other time."""
