"""What a simulated client writes down: each request in full, or only what it adds up to.

Needs the standard library and the benchmark's records. Lessons 11 and 12 read the outcome
(:class:`kimik3_lab.simulation.results.SimulationResult`).
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from kimik3_lab.benchmark.records import RequestRecord
from kimik3_lab.benchmark.window import Window
from kimik3_lab.simulation.latency_sketch import LatencySketch

__all__ = ["LATENCIES", "RunLog"]

#: What is kept of each request: time to first token, time per output token, gaps between chunks,
#: and the whole.
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_s")


class RunLog:
    """Follows the requests of a run.

    Parameters
    ----------
    window : Window
        The part of the run that counts, by the rule of the benchmark client: latencies of requests
        that touch it, ends inside it.
    keep_records : bool
        Keep a :class:`RequestRecord` with every moment of each request; memory then grows with the
        run. Otherwise only requests in flight take memory.

    Attributes
    ----------
    records : list of RequestRecord
        In the order of sending; empty unless kept.
    latencies : dict of str to LatencySketch
        By name, see :data:`LATENCIES`.
    attempted, completed, cancelled, refused, in_window : int
        Requests that were sent; that ended; that were in flight at the end; that the engine would
        not take; that completed and touch the window.
    completed_in_window, output_tokens_in_window : int
        Requests that ended inside the window, and their output tokens.
    """

    def __init__(self, window: Window, *, keep_records: bool) -> None:
        self.window = window
        self.keep_records = keep_records
        self.records: list[RequestRecord] = []
        self.latencies = {name: LatencySketch() for name in LATENCIES}
        self.attempted = self.completed = self.cancelled = self.refused = 0
        self.in_window = self.completed_in_window = self.output_tokens_in_window = 0
        self._open: dict[str, RequestRecord] = {}
        self._moment = 0.0
        self._chunks_since: Counter[float] = Counter()

    def sent(
        self, request_id: str, start: float, prompt_tokens: int, output_tokens: int,
        *, scheduled: float | None = None,
    ) -> None:  # fmt: skip
        """Begin a request."""
        record = RequestRecord(
            index=self.attempted,
            start=start,
            scheduled=scheduled,
            output_tokens_from="usage",
            prompt_tokens=prompt_tokens,
            requested_prompt_tokens=prompt_tokens,
            requested_output_tokens=output_tokens,
        )
        self.attempted += 1
        self._open[request_id] = record
        if self.keep_records:
            self.records.append(record)

    def refuse(self, request_id: str, reason: str) -> None:
        """Take note that the engine would not take a request."""
        record = self._open.pop(request_id)
        record.status, record.error, record.end = "failed", reason, record.start
        self.refused += 1

    def chunk(self, request_id: str, moment: float, num_tokens: int) -> None:
        """Take note of tokens that came together."""
        record = self._open[request_id]
        record.output_tokens += num_tokens
        times = record.token_times
        if self.keep_records or len(times) < 2:
            times.append(moment)
        else:
            times[1] = moment  # the first and the last are enough
        if not self.keep_records:
            if moment != self._moment:
                self._count_gaps()
                self._moment = moment
            if len(times) > 1:
                self._chunks_since[record.end] += 1
            record.end = moment

    def _count_gaps(self) -> None:
        """Count the gaps that the last moment ended; most of them began together."""
        if self.window.contains(self._moment):
            add = self.latencies["itl_ms"].add
            for earlier, times in self._chunks_since.items():
                add((self._moment - earlier) * 1e3, times)
        self._chunks_since.clear()

    def finish(
        self, request_id: str, moment: float, reason: str, cached_tokens: int | None
    ) -> RequestRecord:
        """End a request whose last tokens have come, and count it."""
        record = self._open.pop(request_id)
        record.status, record.end, record.finish_reason = "completed", moment, reason
        record.cached_tokens = cached_tokens
        self.completed += 1
        if not self.window.touches(record):
            return record
        self.in_window += 1
        add = {name: sketch.add for name, sketch in self.latencies.items()}
        if record.ttft is not None:
            add["ttft_ms"](record.ttft * 1e3)
        if record.tpot is not None:
            add["tpot_ms"](record.tpot * 1e3)
        if self.keep_records:
            for earlier, later in pairwise(record.token_times):
                add["itl_ms"]((later - earlier) * 1e3)
        add["e2e_s"](record.e2e)
        if self.window.contains(moment):
            self.completed_in_window += 1
            self.output_tokens_in_window += record.output_tokens
        return record

    def stop(self, moment: float) -> None:
        """End the run: what is still in flight is cancelled."""
        self._count_gaps()
        for record in self._open.values():
            record.status, record.end = "cancelled", moment
        self.cancelled += len(self._open)
        self._open.clear()
