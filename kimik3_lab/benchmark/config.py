"""One benchmark: where to send load, how much, how it arrives and when it stops.

Needs the standard library only. Used by lessons 00, 10 and 12.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from kimik3_lab.benchmark.workloads import Workload

__all__ = ["BenchmarkConfig", "Load"]

_ENDPOINTS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True, slots=True)
class Load:
    """How requests of one cell arrive.

    Closed loop: ``concurrency`` streams, each sends its next request when the last one has ended.
    Open loop: requests arrive at ``request_rate`` a second, whether or not the server keeps up.
    """

    concurrency: int | None = None
    request_rate: float | None = None

    @property
    def label(self) -> str:
        """Short name, such as ``c=4`` or ``2.5 req/s``."""
        if self.concurrency is not None:
            return f"c={self.concurrency}"
        return f"{self.request_rate:g} req/s"


@dataclass(frozen=True)
class BenchmarkConfig:
    """Everything that decides what a benchmark does.

    Attributes
    ----------
    base_url
        Address of an OpenAI-compatible server, with or without ``/v1`` at its end.
    workload
        What is asked for. Each cell draws prompts of its own from it.
    model
        Model name to send; None takes the first of ``/v1/models``.
    endpoint
        ``"chat"`` or ``"completions"``.
    concurrency
        Closed-loop cells, one each; all streams of a cell start at once.
    request_rate
        Open-loop cells, one each, in requests a second. Give this or ``concurrency``.
    arrival
        Gaps of the open loop: ``"poisson"`` (exponential) or ``"constant"``.
    max_requests, max_duration
        A cell ends after that many requests, or that many seconds; requests then in flight are
        cancelled, and counted as such. At least one of the two.
    warmup, cooldown
        Fractions of a cell that its window leaves out, as guidellm does (see :class:`.Window`).
    warmup_requests
        Requests sent before a cell's clock starts, with prompts of their own; not recorded.
    temperature
        Sampling temperature.
    ignore_eos
        Ask the server to go on to the full length, so that output lengths hold.
    extra_body
        More fields for the request body; a None value takes a field out.
    api_key
        Sent as a bearer token; never printed or saved.
    timeout
        Seconds that one request may take.
    max_errors
        The run stops when this many requests of a cell have failed.
    device
        What the server runs on, for the result file; the client cannot know it.

    Raises
    ------
    ValueError
        For a value that cannot work, with what was got and what is expected.
    """

    base_url: str
    workload: Workload
    model: str | None = None
    endpoint: Literal["chat", "completions"] = "chat"
    concurrency: tuple[int, ...] = ()
    request_rate: tuple[float, ...] = ()
    arrival: Literal["poisson", "constant"] = "poisson"
    max_requests: int | None = None
    max_duration: float | None = None
    warmup: float = 0.1
    cooldown: float = 0.1
    warmup_requests: int = 0
    temperature: float = 0.0
    ignore_eos: bool = True
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 600.0
    max_errors: int = 10
    device: str = "not stated"

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"base_url must look like http://127.0.0.1:8000, got {self.base_url!r}"
            )
        if parts.username is not None or parts.password is not None:
            raise ValueError(
                "base_url must not hold a name or password, it is written into results: pass a key "
                "with api_key instead"
            )
        if self.endpoint not in _ENDPOINTS:
            raise ValueError(f"endpoint must be 'chat' or 'completions', got {self.endpoint!r}")
        if self.arrival not in ("poisson", "constant"):
            raise ValueError(f"arrival must be 'poisson' or 'constant', got {self.arrival!r}")
        if bool(self.concurrency) == bool(self.request_rate):
            raise ValueError(
                "give either concurrency (closed loop) or request_rate (open loop), got "
                f"concurrency={self.concurrency!r} and request_rate={self.request_rate!r}"
            )
        for streams in self.concurrency:
            _whole("concurrency", streams)
        for rate in self.request_rate:
            _positive("request_rate", rate)
        if self.max_requests is None and self.max_duration is None:
            raise ValueError("a cell needs an end: give max_requests, max_duration or both")
        if self.max_requests is not None:
            _whole("max_requests", self.max_requests)
            if self.max_requests < max(self.concurrency, default=1):
                raise ValueError(
                    f"max_requests={self.max_requests} cannot fill {max(self.concurrency)} "
                    "streams: ask for at least one request a stream, better ten"
                )
        if self.max_duration is not None:
            _positive("max_duration", self.max_duration)
        for name in ("warmup", "cooldown", "temperature"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be a finite number, got {getattr(self, name)}")
        if self.warmup < 0 or self.cooldown < 0 or self.warmup + self.cooldown >= 1:
            raise ValueError(
                "warmup and cooldown are fractions of a cell and must leave a window between "
                f"them, got {self.warmup} and {self.cooldown}"
            )
        if self.warmup_requests < 0:
            raise ValueError(f"warmup_requests must be at least 0, got {self.warmup_requests}")
        if self.temperature < 0:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        _positive("timeout", self.timeout)
        _whole("max_errors", self.max_errors)

    @property
    def server_url(self) -> str:
        """``base_url`` without the parts that clients often paste along with it."""
        url = self.base_url.rstrip("/")
        for ending in ("/chat/completions", "/completions", "/v1"):
            url = url.removesuffix(ending).rstrip("/")
        return url

    @property
    def url(self) -> str:
        """Address that requests are posted to."""
        return self.server_url + _ENDPOINTS[self.endpoint]

    @property
    def loads(self) -> tuple[Load, ...]:
        """The cells in order."""
        closed = tuple(Load(concurrency=streams) for streams in self.concurrency)
        return closed + tuple(Load(request_rate=rate) for rate in self.request_rate)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for a result file; the API key is left out."""
        fields = dataclasses.asdict(self)
        del fields["api_key"]
        return {**fields, "extra_body": dict(self.extra_body)}


def _whole(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def _positive(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a positive number, got {value!r}")
