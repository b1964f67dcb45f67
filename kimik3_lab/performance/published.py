"""The published result that the lab sets out to explain, with what follows from it by arithmetic.

Needs the standard library; :func:`count_ratio_interval` also needs scipy. Lesson 12 uses it.

The figures are those of the vLLM blog post of 2026-09-13: Kimi K3 on 8 B300, tensor parallel, 8,000
tokens in and 1,000 out, 150 seconds a point with a tenth cut off at each end.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimik3_lab.paths import data_dir

__all__ = [
    "BASELINE",
    "IMPROVED",
    "OUTPUT_TOKENS",
    "PROMPT_TOKENS",
    "WINDOW_S",
    "Comparison",
    "PublishedDataError",
    "PublishedPoint",
    "compare",
    "count_ratio_interval",
    "default_path",
    "load_points",
]

#: The two versions that the post compares, as the data file names them.
BASELINE, IMPROVED = "0.27.1", "main-2026-09-13"
#: Workload of the post: tokens of a prompt and of an answer.
PROMPT_TOKENS, OUTPUT_TOKENS = 8000, 1000
#: Seconds that count: 150, less 10 % of warm-up and 10 % of cool-down.
WINDOW_S = 120.0
#: Half a unit of the last printed digit of a throughput.
_THROUGHPUT_ROUNDING = 0.05

_TEXT = ("engine", "version", "date", "source_url", "notes")
_NUMBERS = ("latency_s", "throughput_tok_s", "ttft_ms")


class PublishedDataError(ValueError):
    """The data file does not say what it should; the message names the line."""


@dataclass(frozen=True)
class PublishedPoint:
    """One version at one concurrency: three of the post's figures."""

    engine: str
    version: str
    date: str
    concurrency: int
    latency_s: float
    throughput_tok_s: float
    ttft_ms: float
    source_url: str
    notes: str = ""
    evidence: str = "Published"

    def __post_init__(self) -> None:
        if type(self.concurrency) is not int or self.concurrency < 1:
            raise PublishedDataError(f"concurrency must be 1 or more, got {self.concurrency!r}")
        for name in _NUMBERS:
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise PublishedDataError(f"{name} must be a positive number, got {value!r}")
        if self.ttft_ms >= 1000 * self.latency_s:
            raise PublishedDataError(
                f"ttft_ms={self.ttft_ms} is not less than latency_s={self.latency_s}: "
                "the first token cannot come after the last; check the units"
            )
        if not self.source_url.startswith("https://"):
            raise PublishedDataError(
                f"source_url must be the https address of the figures, got {self.source_url!r}"
            )

    @property
    def completed_requests(self) -> int:
        """Requests that ended inside the window, recovered from the printed throughput.

        Raises
        ------
        PublishedDataError
            If no whole number of answers gives the printed throughput.
        """
        count = round(self.throughput_tok_s * WINDOW_S / OUTPUT_TOKENS)
        if abs(count * OUTPUT_TOKENS / WINDOW_S - self.throughput_tok_s) > _THROUGHPUT_ROUNDING:
            raise PublishedDataError(
                f"{self.throughput_tok_s} tok/s is not a whole number of {OUTPUT_TOKENS}-token "
                f"answers in {WINDOW_S:g} s; the nearest, {count}, gives "
                f"{count * OUTPUT_TOKENS / WINDOW_S:.1f}"
            )
        return count

    @property
    def exact_throughput_tok_s(self) -> float:
        """The throughput before it was rounded for print."""
        return self.completed_requests * OUTPUT_TOKENS / WINDOW_S

    @property
    def ms_per_token(self) -> float:
        """Mean milliseconds from one output token to the next, after the first."""
        return (1000 * self.latency_s - self.ttft_ms) / (OUTPUT_TOKENS - 1)

    @property
    def littles_law_requests(self) -> float:
        """Requests that the window would hold in a steady state: concurrency x window / latency."""
        return self.concurrency * WINDOW_S / self.latency_s

    @property
    def window_count_range(self) -> tuple[int, int]:
        """Fewest and most requests that the window can hold if each takes exactly the latency.

        Each of the streams fits in a whole number of requests or one more, depending on where in a
        request the window opens; the extremes are reached when all streams run in step.
        """
        each = WINDOW_S / self.latency_s
        return self.concurrency * math.floor(each), self.concurrency * math.ceil(each)


@dataclass(frozen=True)
class Comparison:
    """Both versions at one concurrency. A ratio above 1 is an improvement."""

    before: PublishedPoint
    after: PublishedPoint

    def __post_init__(self) -> None:
        if self.before.concurrency != self.after.concurrency:
            raise ValueError(
                "compare points of one concurrency, got "
                f"{self.before.concurrency} and {self.after.concurrency}"
            )

    @property
    def concurrency(self) -> int:
        """Requests in flight at any time."""
        return self.before.concurrency

    @property
    def throughput_ratio(self) -> float:
        """Completed requests, after over before."""
        return self.after.completed_requests / self.before.completed_requests

    @property
    def latency_ratio(self) -> float:
        """Seconds a request, before over after."""
        return self.before.latency_s / self.after.latency_s

    @property
    def ttft_ratio(self) -> float:
        """Time to first token, before over after."""
        return self.before.ttft_ms / self.after.ttft_ms

    @property
    def ms_per_token_ratio(self) -> float:
        """Time between output tokens, before over after."""
        return self.before.ms_per_token / self.after.ms_per_token

    @property
    def saved_s(self) -> float:
        """Seconds by which a request became shorter."""
        return self.before.latency_s - self.after.latency_s

    @property
    def ttft_share(self) -> float:
        """Part of the saved time that lies before the first token, 0 to 1."""
        return (self.before.ttft_ms - self.after.ttft_ms) / 1000 / self.saved_s

    def throughput_interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Interval of :attr:`throughput_ratio`: see :func:`count_ratio_interval`."""
        return count_ratio_interval(
            self.before.completed_requests, self.after.completed_requests, confidence
        )


def default_path() -> Path:
    """Path of the data file that ships with the lab."""
    return data_dir() / "published" / "vllm_blog_2026_09_13.csv"


def load_points(path: str | Path | None = None) -> tuple[PublishedPoint, ...]:
    """Read and check the published points.

    Parameters
    ----------
    path
        A CSV file with the columns of :class:`PublishedPoint`; by default the one that ships.

    Raises
    ------
    PublishedDataError
        If a column is missing, a figure is no number, or a point appears twice.
    FileNotFoundError
        If there is no such file.

    Examples
    --------
    >>> points = load_points()
    >>> [(p.version, p.completed_requests) for p in points if p.concurrency == 16]
    [('0.27.1', 31), ('main-2026-09-13', 87)]
    """
    path = default_path() if path is None else Path(path)
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        want = {*_TEXT, *_NUMBERS, "concurrency"}
        if missing := want - set(reader.fieldnames or ()):
            raise PublishedDataError(f"{path}: no column {', '.join(sorted(missing))}")
        points = []
        for row in reader:
            try:
                points.append(_point(row))
            except ValueError as error:
                raise PublishedDataError(f"{path}, line {reader.line_num}: {error}") from error
    keys = [(p.version, p.concurrency) for p in points]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise PublishedDataError(f"{path}: version and concurrency {twice[0]} appear twice")
    if not points:
        raise PublishedDataError(f"{path} has a header but no points")
    return tuple(points)


def _point(row: dict[str, str]) -> PublishedPoint:
    values: dict[str, Any] = {name: row[name] or "" for name in _TEXT}
    # An empty cell becomes a value that the point refuses by name.
    values |= {name: float(row[name] or "nan") for name in _NUMBERS}
    return PublishedPoint(concurrency=int(row["concurrency"] or 0), **values)


def compare(
    points: tuple[PublishedPoint, ...], before: str = BASELINE, after: str = IMPROVED
) -> tuple[Comparison, ...]:
    """Pair two versions at every concurrency, lowest first.

    Raises
    ------
    ValueError
        If the two were not measured at the same concurrencies.

    Examples
    --------
    >>> [f"{c.throughput_ratio:.1f}x" for c in compare(load_points())]
    ['2.2x', '2.5x', '2.8x']
    """
    old = {p.concurrency: p for p in points if p.version == before}
    new = {p.concurrency: p for p in points if p.version == after}
    if not old or old.keys() != new.keys():
        raise ValueError(
            f"need {before} and {after} at the same concurrencies, "
            f"got {sorted(old)} and {sorted(new)}"
        )
    return tuple(Comparison(old[c], new[c]) for c in sorted(old))


def count_ratio_interval(before: int, after: int, confidence: float = 0.95) -> tuple[float, float]:
    """Interval of the ratio ``after / before`` of two counts from windows of equal length.

    Given their sum, one of two Poisson counts is binomial, with a share that depends on the ratio
    of the rates alone. An exact (Clopper-Pearson) interval of the share, turned back into a ratio,
    is an exact interval of the ratio. Completions of a closed loop are more regular than a Poisson
    stream, so the interval is a cautious one; only repeated runs can narrow it honestly.

    Raises
    ------
    ValueError
        If a count is negative, both are zero, or ``confidence`` lies outside (0, 1).

    Examples
    --------
    >>> low, high = count_ratio_interval(10, 22)
    >>> f"{low:.2f} to {high:.2f}"
    '1.00 to 5.20'
    """
    if min(before, after) < 0 or before + after == 0:
        raise ValueError(f"need two counts, not both zero, got {before} and {after}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    from scipy.stats import binomtest  # here: scipy takes a second to import

    share = binomtest(after, before + after).proportion_ci(confidence, method="exact")
    low, high = share.low / (1 - share.low), math.inf
    if share.high < 1:
        high = share.high / (1 - share.high)
    return float(low), float(high)
