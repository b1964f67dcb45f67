"""The engine: schedule, execute, book, again and again.

Needs the standard library only (and tqdm for the progress bar of :meth:`Engine.generate`). Lessons
08 and 10 run it. The loop is in :mod:`~kimik3_lab.serving.engine_steps`; the method names of the
outside are those of vLLM's ``LLMEngine``.

An engine belongs to one thread. A server gives it a thread of its own and passes messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol

from kimik3_lab.serving.async_scheduler import AsyncScheduler
from kimik3_lab.serving.engine_steps import EngineSteps
from kimik3_lab.serving.outputs import (
    EngineCoreOutput,
    ModelRunnerOutput,
    SchedulerOutput,
    SchedulerStats,
    TokenLogprobs,
)
from kimik3_lab.serving.request import Request, SamplingParams
from kimik3_lab.serving.scheduler import Scheduler

if TYPE_CHECKING:
    from tqdm.auto import tqdm

__all__ = ["Engine", "EngineStats", "Executor", "GenerationResult"]


class Executor(Protocol):
    """What computes a step: a model on a CPU or GPU, or a model of a machine.

    An executor may also have these attributes, which the engine then uses: ``vocab_size`` (a prompt
    with a larger token id is refused), ``eos_token_id`` (the default of :meth:`Engine.generate`),
    ``max_num_seqs``, ``max_model_len`` and ``cache_config`` (must suit the scheduler's);
    ``check_configs(scheduler_config, cache_config)``, which raises ValueError for what it cannot
    compute; ``take_draft_token_ids()``, drafts for the next step by request id; and
    ``execute_model_async(scheduler_output)``, which returns an
    :class:`~kimik3_lab.serving.outputs.AsyncModelRunnerOutput` without waiting for the step: then a
    scheduler with ``async_scheduling`` may have two steps in flight.
    """

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the scheduled tokens; sample one token for each row that has caught up.

        Returns an entry for each scheduled request, empty for one inside its prompt. If it raises,
        the requests of the step end with an error and the engine goes on: what this step said may
        be said again, and its requests appear in the next ``finished_req_ids``.
        """
        ...


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """Output tokens of one prompt, and why they ended (``EngineCoreOutput.finish_reason``).

    ``logprobs`` has an entry for each token, None if the request did not ask for them.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine has done since it was made, and what it holds now.

    ``num_steps`` counts steps that the executor was given, ``num_failed_steps`` those that raised;
    ``num_scheduled_tokens`` and ``num_generated_tokens`` count tokens of the others.
    ``num_wasted_tokens`` of the scheduled ones were computed for requests that had ended before
    the step answered: in the step before it, or by an abort (asynchronous scheduling).
    """

    num_steps: int
    num_failed_steps: int
    num_scheduled_tokens: int
    num_generated_tokens: int
    scheduler: SchedulerStats
    num_wasted_tokens: int = 0

    @property
    def num_forwards(self) -> int:
        """Steps that did not fail, each one forward pass over all its tokens."""
        return self.num_steps - self.num_failed_steps


class Engine:
    """Runs requests to their end (``vllm.v1.engine.core.EngineCore``).

    Parameters
    ----------
    scheduler : Scheduler
        Plans each step.
    executor : Executor
        Computes each step.

    Raises
    ------
    ValueError
        If the executor was made for fewer seats, a shorter context or another cache, or cannot
        compute what the scheduler would plan.

    Examples
    --------
    >>> from kimik3_lab.serving import CacheConfig, SchedulerConfig
    >>> class Echo:  # an executor: the next token is the number of scheduled tokens
    ...     def execute_model(self, output):
    ...         counts = output.num_scheduled_tokens
    ...         return ModelRunnerOutput(list(counts), [[n] for n in counts.values()])
    >>> scheduler = Scheduler(SchedulerConfig(4, 64, 64), CacheConfig(num_blocks=9))
    >>> engine = Engine(scheduler, Echo())
    >>> params = SamplingParams(max_tokens=3)
    >>> engine.generate([[5, 5]], params, progress=False)[0].token_ids
    [2, 1, 1]
    """

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self.scheduler = scheduler
        self._vocab_size: int | None = getattr(executor, "vocab_size", None)
        self._steps = EngineSteps(scheduler, executor)
        self._check_executor()
        self._request_numbers = itertools.count()

    @property
    def executor(self) -> Executor:
        """What computes the steps; another one may take over between two steps, unchecked."""
        executor: Executor = self._steps.executor
        return executor

    @executor.setter
    def executor(self, executor: Executor) -> None:
        self._steps.executor = executor

    def _check_executor(self) -> None:
        """Refuse an executor that could not follow the scheduler."""
        for name in ("max_num_seqs", "max_model_len"):
            wanted = getattr(self.scheduler.scheduler_config, name)
            offered = getattr(self.executor, name, wanted)
            if offered < wanted:
                raise ValueError(
                    f"the scheduler has {name}={wanted}, the executor was made for {offered}: "
                    f"lower the scheduler's {name} or make another executor"
                )
        cache = self.scheduler.cache_config
        if getattr(self.executor, "cache_config", cache) != cache:
            raise ValueError(
                f"the scheduler hands out blocks of {cache}, the executor was made for "
                f"{getattr(self.executor, 'cache_config', None)}; give both the same CacheConfig"
            )
        if self._steps.runs_ahead and not isinstance(self.scheduler, AsyncScheduler):
            raise ValueError(
                "async_scheduling=True, but this scheduler counts no placeholders for tokens in "
                "flight: make it with make_scheduler(scheduler_config, cache_config)"
            )
        check = getattr(self.executor, "check_configs", None)
        if check is not None:
            check(self.scheduler.scheduler_config, cache)

    # -- requests ----------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises
        ------
        ValueError
            If the request could never run, or its id is in use; the message has the numbers.
        """
        if self._vocab_size is not None:
            largest = max(request.prompt_token_ids)
            if largest >= self._vocab_size:
                raise ValueError(
                    f"request {request.request_id}: token id {largest} lies outside the vocabulary "
                    f"of {self._vocab_size}; was another tokenizer used?"
                )
        self.scheduler.add_request(request)

    def abort(self, request_id: str) -> None:
        """End a request for its client and free what it holds; :meth:`step` does not report it.

        Call it between steps. An id of no request, or of one that has ended, is passed over.
        """
        self.scheduler.abort(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether :meth:`step` has anything to do."""
        return self.scheduler.has_requests() or self._steps.num_in_flight > 0

    # -- steps -------------------------------------------------------------------------------

    def step(self) -> list[EngineCoreOutput]:
        """Run one step. Returns news of each request with a new token or an end.

        With ``async_scheduling`` the news are those of the step before, so the first call brings
        none. An exception of the executor is logged and ends the requests of this step with
        ``finish_reason="error"``; the engine stays usable.
        """
        return self._steps.step()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[GenerationResult]:
        """Run prompts to their end and return their outputs in order.

        Parameters
        ----------
        prompts : sequence of sequence of int
            Token ids.
        sampling_params : SamplingParams or sequence of them, optional
            One for all prompts, or one for each.
        progress : bool
            Show a progress bar of finished requests.

        Returns
        -------
        list of GenerationResult
            In the order of ``prompts``.

        Raises
        ------
        ValueError
            If a prompt could never run, or the numbers of prompts and parameters differ. Nothing
            stays queued then, nor after an interrupt.
        """
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(sampling_params)} sampling_params")
        eos_token_id: int | None = getattr(self.executor, "eos_token_id", None)
        tokens: dict[str, list[int]] = {}
        logprobs: dict[str, list[TokenLogprobs]] = {}
        reasons: dict[str, str] = {}
        try:
            for prompt, params in zip(prompts, sampling_params, strict=True):
                request_id = f"generate-{next(self._request_numbers)}"
                request = Request(request_id, prompt, params, eos_token_id=eos_token_id)
                self.add_request(request)
                tokens[request_id] = []
            with _progress_bar(len(prompts), show=progress) as bar:
                while len(reasons) < len(tokens) and self.has_unfinished_requests():
                    for news in self.step():
                        if news.request_id not in tokens:
                            continue  # a request that somebody else added
                        tokens[news.request_id] += news.new_token_ids
                        if news.new_logprobs is not None:
                            logprobs.setdefault(news.request_id, []).extend(news.new_logprobs)
                        if news.finish_reason is not None:
                            reasons[news.request_id] = news.finish_reason
                            bar.update()
            if not self.scheduler.has_requests():
                self._steps.drain()  # of those that had ended before it was known
        finally:
            for request_id in tokens.keys() - reasons.keys():
                self.abort(request_id)
        # Without a reason it was aborted behind this method's back.
        return [
            GenerationResult(
                request_id, token_ids, reasons.get(request_id, "abort"), logprobs.get(request_id)
            )
            for request_id, token_ids in tokens.items()
        ]

    def stats(self) -> EngineStats:
        """Counters of this engine and the state of its scheduler."""
        return EngineStats(
            num_steps=self._steps.num_steps,
            num_failed_steps=self._steps.num_failed_steps,
            num_scheduled_tokens=self._steps.num_scheduled_tokens,
            num_generated_tokens=self._steps.num_generated_tokens,
            num_wasted_tokens=self._steps.num_wasted_tokens,
            scheduler=self.scheduler.make_stats(),
        )


def _progress_bar(total: int, *, show: bool) -> tqdm[NoReturn]:
    # Imported here: the engine itself needs nothing outside the standard library.
    from tqdm.auto import tqdm

    return tqdm(total=total, unit="req", leave=False, disable=not show)
