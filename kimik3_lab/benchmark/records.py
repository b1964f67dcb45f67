"""What is kept of each request: when its tokens came, how many, and how it ended.

Needs the standard library only. Used by lessons 00, 10 and 12.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

__all__ = ["RequestRecord"]


@dataclass(slots=True)
class RequestRecord:
    """One request, with times in seconds since its cell began.

    Attributes
    ----------
    index
        Order of sending within the cell, from 0.
    start
        When it was sent.
    scheduled
        When the open loop meant to send it; None in a closed loop.
    status
        ``"running"`` until it has ended; ``"cancelled"`` when the cell ended first.
    token_times
        Arrival of each chunk that carried generated content, reasoning included. One token a
        chunk is usual; a server that speculates may send several in one.
    end
        Arrival of the last such chunk; for a request without any, when it ended.
    prompt_tokens
        From the server's usage; None if it sent none.
    output_tokens
        From the server's usage, or else the number of chunks; ``output_tokens_from`` says which.
    cached_tokens
        Prompt tokens that the server took from its cache; None if it does not say.
    requested_prompt_tokens, requested_output_tokens
        What the workload asked for.
    finish_reason, error
        From the server; what went wrong.

    Examples
    --------
    >>> record = RequestRecord(0, start=1.0, token_times=[1.5, 1.75, 2.0], end=2.0, output_tokens=3)
    >>> record.ttft, record.tpot, record.e2e, record.itl
    (0.5, 0.25, 1.0, [0.25, 0.25])
    """

    index: int
    start: float
    scheduled: float | None = None
    status: Literal["running", "completed", "failed", "cancelled"] = "running"
    token_times: list[float] = field(default_factory=list)
    end: float = 0.0
    prompt_tokens: int | None = None
    output_tokens: int = 0
    output_tokens_from: Literal["usage", "chunks"] = "chunks"
    cached_tokens: int | None = None
    requested_prompt_tokens: int | None = None
    requested_output_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None

    @property
    def first_token(self) -> float | None:
        """Arrival of the first generated content."""
        return self.token_times[0] if self.token_times else None

    @property
    def ttft(self) -> float | None:
        """Time to first token, seconds."""
        return self.token_times[0] - self.start if self.token_times else None

    @property
    def e2e(self) -> float:
        """End-to-end latency, seconds."""
        return self.end - self.start

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, seconds: ``(end - first) / (n - 1)``."""
        if not self.token_times or self.output_tokens < 2:
            return None
        return (self.end - self.token_times[0]) / (self.output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: gaps between chunks, seconds."""
        return [later - earlier for earlier, later in pairwise(self.token_times)]

    @property
    def tokens_per_chunk(self) -> float | None:
        """Output tokens for each chunk; above 1 the gaps are those of chunks, not of tokens."""
        return self.output_tokens / len(self.token_times) if self.token_times else None

    def as_dict(self) -> dict[str, Any]:
        """Return a compact JSON form: token times as whole microseconds since the one before."""
        previous, gaps = round(self.start * 1e6), []
        for moment in self.token_times:
            gaps.append(round(moment * 1e6) - previous)
            previous = round(moment * 1e6)
        row = {name: getattr(self, name) for name in self.__slots__ if name != "token_times"}
        for name in ("start", "end", "scheduled"):
            row[name] = None if row[name] is None else round(row[name], 6)
        return {**{k: v for k, v in row.items() if v is not None}, "token_gaps_us": gaps}

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> RequestRecord:
        """Rebuild a record from :meth:`as_dict`."""
        row = dict(row)
        moment, times = round(row["start"] * 1e6), []
        for gap in row.pop("token_gaps_us"):
            moment += gap
            times.append(moment / 1e6)
        return cls(token_times=times, **row)
