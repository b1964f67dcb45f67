"""A real model behind the scheduler: clients who come and go, any switches, and what must hold.

The model is the micro K3 in float64, so a token differs from what the model says alone only if a
wrong row, state or window was read. What no request wrote is NaN: a fresh cache, and a block whose
pages have become states or the other way round, as their bytes would be in one pool.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from kimik3_lab.config import K3Config
from kimik3_lab.drafter_config import DSparkConfig
from kimik3_lab.reference.drafter import DSparkDrafter
from kimik3_lab.reference.initialization import random_model
from kimik3_lab.reference.model import K3ForCausalLM
from kimik3_lab.serving import CacheConfig, Engine, Request, SamplingParams, SchedulerConfig
from kimik3_lab.serving.async_scheduler import make_scheduler
from kimik3_lab.serving.executors.drafts import Draft, DraftRequest
from kimik3_lab.serving.executors.execution import ExecutionConfig
from kimik3_lab.serving.executors.paged_cache import PagedCache
from kimik3_lab.serving.executors.torch_executor import TorchExecutor

__all__ = [
    "ExecutorWorld",
    "GuessingDrafter",
    "WrongToken",
    "micro_drafter",
    "micro_model",
    "poison",
    "quiet",
    "raised_by",
]

NAN = float("nan")


class WrongToken(AssertionError):
    """A request got another token than it gets alone."""


def micro_model(seed: int = 7) -> K3ForCausalLM:
    """The model of all worlds."""
    model = random_model(K3Config.micro(), seed=seed, dtype=torch.float64)
    return model.requires_grad_(False)


def micro_drafter(model: K3ForCausalLM) -> DSparkDrafter:
    """A drafter for it, with weights of torch's own choice."""
    torch.manual_seed(0)
    drafter = DSparkDrafter(DSparkConfig.for_target(model.config), dtype=torch.float64)
    return drafter.requires_grad_(False).eval()


class GuessingDrafter:
    """Knows how each text goes on, and says so for a random number of tokens, or says nothing.

    It has the methods of :class:`kimik3_lab.serving.executors.proposer.Proposer`, and raises
    :class:`WrongToken` if a request is not where it should be in its text.
    """

    def __init__(self, num_speculative_tokens: int, rng: Random, vocab: int) -> None:
        self.num_speculative_tokens, self.rng, self.vocab = num_speculative_tokens, rng, vocab
        self.texts: dict[str, list[int]] = {}
        self.num_forwards = 0

    def new_taps(self) -> dict[int, Tensor | None]:
        return {}

    def write(self, taps: Any, positions: Tensor, cells: Tensor) -> None:
        assert len(positions) == len(cells)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        pass

    def propose(self, requests: Sequence[DraftRequest]) -> dict[str, Draft]:
        self.num_forwards += bool(requests)
        return {request.req_id: Draft(self._guess(request)) for request in requests}

    def propose_async(
        self, requests: Sequence[DraftRequest], anchors: Tensor, num_context: Tensor
    ) -> Tensor:
        self.num_forwards += 1
        rows = []
        for request, anchor, known in zip(
            requests, anchors.tolist(), num_context.tolist(), strict=True
        ):
            if not 0 < known <= request.num_context:
                raise WrongToken(f"{request.req_id}: {known} of at most {request.num_context}")
            guess = self._guess(replace(request, anchor=anchor, num_context=known))
            rows.append([*guess, *[-1] * (self.num_speculative_tokens - len(guess))])
        return torch.tensor(rows)

    def _guess(self, request: DraftRequest) -> list[int]:
        text, first = self.texts[request.req_id], request.num_context + 1
        if first <= len(text) and text[first - 1] != request.anchor:
            raise WrongToken(f"{request.req_id} says {request.anchor} at place {first - 1}")
        if self.rng.random() < 0.15:
            return []
        right = self.rng.randint(0, self.num_speculative_tokens)
        guess = []
        for place in range(first, first + self.num_speculative_tokens):
            known = place < len(text) and place - first < right
            wrong = (text[place] + 1) % self.vocab if place < len(text) else 0
            guess.append(text[place] if known else wrong)
        return guess


@contextmanager
def quiet() -> Iterator[None]:
    """Steps that are made to fail are no news."""
    logger = logging.getLogger("kimik3_lab")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


class _Watched:
    """A step in flight that notes what is raised when it is answered."""

    def __init__(self, pending: Any, raised: list[Exception]) -> None:
        self.pending, self.raised = pending, raised

    def get_output(self) -> Any:
        try:
            return self.pending.get_output()
        except Exception as error:
            self.raised.append(error)
            raise


def raised_by(executor: TorchExecutor) -> list[Exception]:
    """Collect what steps raise, begun or answered: the engine only logs it."""
    raised: list[Exception] = []

    def watch(execute: Any, wrap: Any) -> Any:
        def execute_and_watch(plan: Any) -> Any:
            try:
                return wrap(execute(plan))
            except Exception as error:
                raised.append(error)
                raise

        return execute_and_watch

    executor.execute_model = watch(  # type: ignore[method-assign]
        executor.execute_model, lambda result: result
    )
    executor.execute_model_async = watch(  # type: ignore[method-assign]
        executor.execute_model_async, lambda pending: _Watched(pending, raised)
    )
    return raised


def poison(cache: PagedCache) -> None:
    """Make it show when somebody reads what was never written there."""
    cache.latent[:, 1:] = NAN
    cache.recurrent.fill_(NAN)
    cache.conv.fill_(NAN)
    own, pages = cache.own, cache.num_attention_groups

    def own_alone(group: int, block_ids: Any) -> None:
        ids = list(block_ids)
        for block_id in ids:
            before = cache.owner[block_id]
            if before >= 0 and (before < pages) != (group < pages):
                cache.latent[:, block_id] = NAN
                if block_id < cache.recurrent.shape[1]:
                    cache.recurrent[:, block_id] = NAN
                    cache.conv[:, block_id] = NAN
        own(group, ids)

    cache.own = own_alone  # type: ignore[method-assign]


class ExecutorWorld:
    """One run.

    Parameters
    ----------
    model : K3ForCausalLM
        In float64.
    configs : tuple of SchedulerConfig, CacheConfig
        What to run under.
    rng : random.Random
        Draws prompts, drafts and who leaves.
    execution : ExecutionConfig, optional
        Drawn if left out.
    """

    def __init__(
        self,
        model: K3ForCausalLM,
        configs: tuple[SchedulerConfig, CacheConfig],
        rng: Random,
        execution: ExecutionConfig | None = None,
    ) -> None:
        self.model, self.rng = model, rng
        self.config, self.cache_config = configs
        vocab, k = model.config.vocab_size, self.config.num_speculative_tokens
        self.drafter = GuessingDrafter(k, rng, vocab) if k else None
        if execution is None:
            execution = ExecutionConfig(mixed_batch=rng.choice(["gather", "zero_copy"]))
        self.executor = TorchExecutor(
            model,
            self.cache_config,
            self.config.max_num_seqs,
            drafter=self.drafter,  # type: ignore[arg-type]
            execution=execution,
        )
        poison(self.executor.cache)
        self._raised = raised_by(self.executor)
        self.engine = Engine(make_scheduler(*configs), self.executor)
        self.trunks = [[rng.randrange(3, vocab) for _ in range(40)] for _ in range(2)]
        self.wanted: dict[str, list[int]] = {}
        self.got: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.counts: Counter[str] = Counter()

    def arrive(self) -> None:
        """Add a request, often one that begins like another."""
        rng, name = self.rng, f"r{len(self.wanted)}"
        length = rng.randint(1, min(30, self.config.max_model_len - 1))
        prompt = list(rng.choice(self.trunks)[: rng.randint(0, length)])
        while len(prompt) < length:
            prompt.append(rng.randrange(3, self.model.config.vocab_size))
        max_tokens = rng.randint(1, 14)
        request = Request(
            name,
            prompt,
            SamplingParams(max_tokens),
            eos_token_id=self.model.config.eos_token_id,
            arrival_time=float(len(self.wanted) // 2),
            priority=rng.randint(0, 2),
        )
        try:
            self.engine.add_request(request)
        except ValueError:
            self.counts["refused"] += 1
            return
        room = self.config.max_model_len - length
        self.wanted[name] = self.model.generate(prompt, min(max_tokens, room))
        self.got[name] = []
        if self.drafter is not None:
            self.drafter.texts[name] = prompt + self.wanted[name]
        if rng.random() < 0.4:
            self.trunks[rng.randrange(2)] = prompt + self.wanted[name]

    def leave(self) -> None:
        """Abort somebody."""
        if self.engine.scheduler.requests:
            name = self.rng.choice(sorted(self.engine.scheduler.requests))
            self.engine.abort(name)
            self.reasons[name] = "abort"
            self.counts["aborts"] += 1

    def step(self, *, fails: str | None = None) -> None:
        """Step the engine; the executor may fail ``"before"``, ``"inside"`` or ``"after"``.

        A step in flight may also fail ``"late"``, when it is asked for its output.
        """
        if fails:
            self._fail(fails)
            return
        with quiet():
            news_of_step = self.engine.step()
        if self._raised:
            raise self._raised[0]
        for news in news_of_step:
            self._book(news)
        self.counts["steps"] += 1

    def _fail(self, when: str) -> None:
        executor = self.executor
        name = "execute_model_async" if self.config.async_scheduling else "execute_model"
        execute, attend = getattr(executor, name), executor.mixer.mla

        def fail(*arguments: Any) -> Any:
            raise RuntimeError("made to fail")

        def execute_and_fail(plan: Any) -> Any:
            pending = execute(plan)
            if when != "late":
                fail()
            pending.get_output = fail
            return pending

        if when == "inside":  # KDA states are written by then
            executor.mixer.mla = fail  # type: ignore[method-assign]
        else:
            setattr(executor, name, fail if when == "before" else execute_and_fail)
        try:
            with quiet():
                for news in self.engine.step():
                    self._book(news)
        finally:
            setattr(executor, name, execute)
            executor.mixer.mla = attend  # type: ignore[method-assign]
            self._raised.clear()
        self.counts["failed"] = self.engine.stats().num_failed_steps

    def _book(self, news: Any) -> None:
        name = news.request_id
        self.got[name] += news.new_token_ids
        if self.got[name] != self.wanted[name][: len(self.got[name])]:
            raise WrongToken(f"{name} got {self.got[name]}, alone {self.wanted[name]}")
        if news.finish_reason is not None:
            self.reasons[name] = news.finish_reason
            if news.finish_reason != "error" and self.got[name] != self.wanted[name]:
                raise WrongToken(f"{name} ended after {self.got[name]} of {self.wanted[name]}")

    def drain(self, limit: int = 800) -> None:
        """Step until all have ended."""
        for _ in range(limit):
            if not self.engine.has_unfinished_requests():
                break
            self.step()
        else:
            raise WrongToken(f"{limit} steps and no end")
        assert self.wanted.keys() == self.reasons.keys()
        stats = self.engine.stats().scheduler
        assert stats.kv_cache_usage == 0.0
        self.counts["hits"] = stats.prefix_cache_hits
        self.counts["preemptions"] = stats.num_preemptions
        self.counts["requests"] = len(self.wanted)
        self.counts["wasted"] = self.engine.stats().num_wasted_tokens
        self.counts["host_waits"] = self.executor.num_host_waits
        self.counts.update(asdict(self.executor.counters))

    def run(self, rounds: int = 15) -> ExecutorWorld:
        """Let clients come and go at random for a while, then wait for the rest."""
        rng = self.rng
        for _ in range(rng.randint(3, rounds)):
            while rng.random() < 0.4:
                self.arrive()
            if rng.random() < 0.05:
                self.leave()
            ways = ["before", "inside", "after", *["late"] * self.config.async_scheduling]
            fails = rng.choice(ways) if rng.random() < 0.05 else None
            self.step(fails=fails)
        self.drain()
        return self
