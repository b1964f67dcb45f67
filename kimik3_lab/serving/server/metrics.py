"""``/metrics``: what the server has done and how long it took, under vLLM's names for Prometheus.

Needs prometheus_client. Used by the server; lesson 10 watches these numbers live.

Names, labels and buckets are those of vLLM, see ``vllm/v1/metrics/loggers.py``,
``vllm/v1/metrics/buckets.py`` and ``vllm/v1/spec_decode/metrics.py`` (read in 0.27.1 and 0.33.0),
so that a dashboard or a client made for vLLM reads them too: ``vllm bench serve`` takes the
acceptance rate from here. Prometheus adds ``_total`` to the name of a counter. Names that begin
with ``k3lab:`` have no counterpart in vLLM.

Two kinds of numbers are kept in two ways. How long requests took is observed as they go, in the
library's histograms. What the scheduler counts anyway is not counted twice: after each step the
engine's thread leaves a snapshot, and :class:`.engine_snapshot.EngineSnapshot` writes it down when
somebody asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from kimik3_lab.serving.request import RequestStatus
from kimik3_lab.serving.server.engine_snapshot import EngineSnapshot

if TYPE_CHECKING:
    from kimik3_lab.serving.outputs import EngineCoreOutput
    from kimik3_lab.serving.request import Request

__all__ = ["ServerMetrics"]

LABELS = ("model_name", "engine")
FINISHED_REASONS = ("stop", "length", "abort", "error")

_LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
            120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
                7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_BETWEEN_TOKENS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
                   7.5, 10.0, 20.0, 40.0, 80.0)  # fmt: skip
_STEP_TOKENS = tuple(float(2**n) for n in (0, *range(3, 15)))
_NUM_ANSWERS = (1.0, 2.0, 5.0, 10.0, 20.0)


@dataclass(slots=True)
class _Progress:
    """Times of a request, in seconds of ``time.monotonic``."""

    request: Request
    #: A stop string may end it before the engine does; until then it is not counted.
    text_may_end_first: bool = False
    #: Why and when the engine ended it, while its text is still looked at.
    ended: tuple[str, float] | None = None
    scheduled: float | None = None
    first_token: float = 0.0
    last_token: float = 0.0
    num_tokens: int = 0


class ServerMetrics:
    """Watches an engine and writes what it saw (:class:`.async_engine.EngineObserver`).

    Parameters
    ----------
    model_name
        Label of every line.
    max_model_len
        Bounds the buckets of token counts.

    Attributes
    ----------
    registry : prometheus_client.CollectorRegistry
        Of this object alone, so that two servers in a process do not mix.

    Examples
    --------
    >>> print(ServerMetrics("tiny", 64).text().split(chr(10))[2])
    vllm:num_requests_running{engine="0",model_name="tiny"} 0.0
    """

    def __init__(self, model_name: str, max_model_len: int) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._snapshot = EngineSnapshot(self._labels)
        self.registry.register(self._snapshot)
        self._progress: dict[str, _Progress] = {}
        self._unscheduled: dict[str, Request] = {}

        self._prompt_tokens = self._counter(
            "prompt_tokens", "Prompt tokens, counted with the first new token."
        )
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        success = Counter(
            "vllm:request_success",
            "Requests that have ended, by reason.",
            (*LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._success = {
            reason: success.labels(**self._labels, finished_reason=reason)
            for reason in FINISHED_REASONS
        }
        self._rejections = Counter(
            "vllm:admission_rejections",
            "Attempts that a limit on requests in flight turned away.",
            ("model_name", "reason"),
            registry=self.registry,
        ).labels(model_name, "max_num_queued_reqs")

        tokens = _one_two_five(max_model_len)
        histogram = self._histogram
        self._request_prompt_tokens = histogram(
            "request_prompt_tokens",
            "Prompt tokens, counted with the first new token.",
            tokens,
        )
        self._request_generation_tokens = histogram(
            "request_generation_tokens", "Tokens generated.", tokens
        )
        self._max_tokens = histogram(
            "request_params_max_tokens", "Most new tokens that a request asks for.", tokens
        )
        self._num_answers = histogram(
            "request_params_n", "Answers that a request asks for to a prompt.", _NUM_ANSWERS
        )
        self._iteration_tokens = histogram(
            "iteration_tokens_total",
            "Prompt and new tokens of a step.",
            _STEP_TOKENS,
        )
        self._time_to_first_token = histogram(
            "time_to_first_token_seconds",
            "From the arrival of a request to its first token.",
            _FIRST_TOKEN,
        )
        self._inter_token_latency = histogram(
            "inter_token_latency_seconds",
            "Between two steps with new tokens of a request.",
            _BETWEEN_TOKENS,
        )
        self._time_per_output_token = histogram(
            "request_time_per_output_token_seconds",
            "Mean time of a request for a token after its first.",
            _BETWEEN_TOKENS,
        )
        self._e2e_latency = histogram(
            "e2e_request_latency_seconds", "From the arrival of a request to its end.", _LATENCY
        )
        self._phase = {
            phase: histogram(
                f"request_{phase}_time_seconds",
                f"{span} of a request.",
                _LATENCY,
            )
            for phase, span in (
                ("queue", "From the arrival to the first seat"),
                ("inference", "From the first seat to the last token"),
                ("prefill", "From the first seat to the first token"),
                ("decode", "From the first token to the last"),
            )
        }

    def _counter(self, name: str, documentation: str) -> Counter:
        counter = Counter(f"vllm:{name}", documentation, LABELS, registry=self.registry)
        return counter.labels(**self._labels)

    def _histogram(self, name: str, documentation: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(
            f"vllm:{name}", documentation, LABELS, buckets=buckets, registry=self.registry
        ).labels(**self._labels)

    def text(self) -> str:
        """Write all metrics in Prometheus' text format."""
        return generate_latest(self.registry).decode()

    # -- what the endpoint tells -----------------------------------------------------------------

    def request_rejected(self, num_requests: int) -> None:
        """Count an attempt that found no room."""
        self._rejections.inc()

    def answers_asked(self, num_answers: int) -> None:
        """Count a prompt by the number of its answers."""
        self._num_answers.observe(num_answers)

    # -- what the engine's thread tells ----------------------------------------------------------

    def request_added(self, request: Request, *, text_may_end_first: bool = False) -> None:
        """Begin to time a request; it has waited since its ``arrival_time``."""
        self._progress[request.request_id] = _Progress(request, text_may_end_first)
        self._unscheduled[request.request_id] = request
        self._max_tokens.observe(request.max_tokens)

    def request_ended(
        self, request_id: str, reason: str, ended: float, num_tokens: int | None = None
    ) -> None:
        """Count a request that ended without news of the engine, or before them.

        A complete answer counts as the client has it: in vLLM, too, the stop strings are found
        before anything is counted (``vllm/v1/engine/output_processor.py``).
        """
        self._unscheduled.pop(request_id, None)
        progress = self._progress.get(request_id)
        if progress is None:
            return
        if progress.ended is not None:
            engine_reason, ended = progress.ended
            if reason == "abort":  # the client has left before it read the end
                reason, num_tokens = engine_reason, progress.num_tokens
        if num_tokens is None:
            del self._progress[request_id]
            self._success[reason].inc()
        else:
            progress.num_tokens = num_tokens
            progress.last_token = min(progress.last_token, ended)
            self._finish(progress, reason, ended)

    def step_ended(self, began: float, ended: float, outputs: Sequence[EngineCoreOutput]) -> None:
        """Count the tokens of a step and time its requests."""
        self._note_scheduled(began)
        num_prompt_tokens = num_generation_tokens = 0
        for output in outputs:
            progress = self._progress.get(output.request_id)
            if progress is None:
                continue
            if new_tokens := len(output.new_token_ids):
                num_generation_tokens += new_tokens
                if not progress.num_tokens:
                    num_prompt_tokens += progress.request.num_prompt_tokens
                    progress.first_token = ended
                    self._time_to_first_token.observe(ended - progress.request.arrival_time)
                else:
                    self._inter_token_latency.observe(ended - progress.last_token)
                progress.num_tokens += new_tokens
                progress.last_token = ended
            if output.finish_reason is not None and progress.text_may_end_first:
                progress.ended = output.finish_reason, ended
            elif output.finish_reason is not None:
                self._finish(progress, output.finish_reason, ended)
        self._prompt_tokens.inc(num_prompt_tokens)
        self._generation_tokens.inc(num_generation_tokens)
        if num_prompt_tokens or num_generation_tokens:
            self._iteration_tokens.observe(num_prompt_tokens + num_generation_tokens)

    def _note_scheduled(self, began: float) -> None:
        """Find whom the step that began then has given a seat for the first time."""
        seated = [
            name for name, r in self._unscheduled.items() if r.status is not RequestStatus.WAITING
        ]
        for name in seated:
            del self._unscheduled[name]
            self._progress[name].scheduled = began

    def _finish(self, progress: _Progress, reason: str, ended: float) -> None:
        request = progress.request
        del self._progress[request.request_id]
        self._success[reason].inc()
        self._e2e_latency.observe(ended - request.arrival_time)
        self._request_prompt_tokens.observe(request.num_prompt_tokens)
        self._request_generation_tokens.observe(progress.num_tokens)
        if progress.scheduled is None or not progress.num_tokens:
            return  # a step that failed: there are no phases to tell apart
        decode = progress.last_token - progress.first_token
        self._phase["queue"].observe(progress.scheduled - request.arrival_time)
        self._phase["prefill"].observe(progress.first_token - progress.scheduled)
        self._phase["decode"].observe(decode)
        self._phase["inference"].observe(progress.last_token - progress.scheduled)
        if progress.num_tokens > 1:
            self._time_per_output_token.observe(decode / (progress.num_tokens - 1))

    def state_changed(self, engine: Any) -> None:
        """Keep what the engine counts itself."""
        self._snapshot.take(engine)


def _one_two_five(largest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20 ... up to ``largest`` (vLLM's ``build_1_2_5_buckets``)."""
    buckets: list[float] = []
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power > largest:
                return tuple(buckets)
            buckets.append(float(digit * power))
        power *= 10
