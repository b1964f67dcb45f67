"""Lesson 10: serve the same requests under different switches, and count what changes.

Needs torch. A switch must change what steps cost and leave every token as it was; :func:`serve`
returns both, so that a lesson can put them side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kimik3_lab.reference.drafter import DSparkDrafter
from kimik3_lab.reference.model import K3ForCausalLM
from kimik3_lab.serving import (
    CacheConfig,
    Engine,
    SamplingParams,
    SchedulerConfig,
    make_scheduler,
)
from kimik3_lab.serving.executors.execution import ExecutionConfig
from kimik3_lab.serving.executors.torch_executor import TorchExecutor

__all__ = ["Served", "compare", "serve"]


@dataclass(frozen=True)
class Served:
    """What a run of requests said and cost.

    Attributes
    ----------
    token_ids
        Output of each request, in order.
    counts
        What :class:`~kimik3_lab.serving.executors.step_counters.StepCounters` counted, and the
        tokens found in the prefix cache as ``cached_tokens``.
    host_waits
        How often the host waited for the device.
    wasted_tokens
        Tokens computed for requests that had already ended, with asynchronous scheduling.
    """

    token_ids: tuple[tuple[int, ...], ...]
    counts: Mapping[str, int]
    host_waits: int = 0
    wasted_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(map(len, self.token_ids))


def serve(
    model: K3ForCausalLM,
    rounds: Sequence[Sequence[Sequence[int]]],
    *,
    max_tokens: int = 24,
    seats: int = 4,
    budget: int = 512,
    num_blocks: int = 512,
    block_size: int = 16,
    drafter: DSparkDrafter | None = None,
    num_speculative_tokens: int | None = None,
    scheduler: Mapping[str, Any] | None = None,
    cache: Mapping[str, Any] | None = None,
    **execution: Any,
) -> Served:
    """Run requests through a fresh engine, one round after the other, greedily.

    Parameters
    ----------
    model
        Its precision is that of the run.
    rounds
        Prompts of each round as token ids. A round starts when the one before has ended, so that it
        can find what that has left in the prefix cache.
    max_tokens, seats, budget, num_blocks, block_size
        Output tokens of a request, requests that run at once, tokens of a step, and the cache.
    drafter, num_speculative_tokens
        Turn speculation on; K is the drafter's own if left out.
    scheduler, cache, **execution
        Further fields of :class:`~kimik3_lab.serving.SchedulerConfig`,
        :class:`~kimik3_lab.serving.CacheConfig` and
        :class:`~kimik3_lab.serving.executors.execution.ExecutionConfig`: the switches.

    Examples
    --------
    >>> from kimik3_lab.config import K3Config
    >>> from kimik3_lab.reference.initialization import random_model
    >>> run = serve(random_model(K3Config.micro()), [[[0, 5, 9]]], max_tokens=4)
    >>> run.num_tokens, run.counts["forwards"]
    (4, 4)
    """
    speculation: dict[str, Any] = {}
    if drafter is not None:
        k = num_speculative_tokens or drafter.config.block_size
        speculation = {"speculative_method": "dspark", "num_speculative_tokens": k}
    cache_config = CacheConfig(num_blocks, block_size, **(cache or {}))
    longest = max(len(prompt) for prompts in rounds for prompt in prompts) + max_tokens
    scheduler_config = SchedulerConfig(
        seats, budget, longest, **{**speculation, **(scheduler or {})}
    )
    executor = TorchExecutor(
        model,
        cache_config,
        seats,
        drafter=drafter,
        num_speculative_tokens=speculation.get("num_speculative_tokens"),
        execution=ExecutionConfig(**execution),
    )
    engine = Engine(make_scheduler(scheduler_config, cache_config), executor)
    params = SamplingParams(max_tokens, ignore_eos=True)
    said = [
        tuple(result.token_ids)
        for prompts in rounds
        for result in engine.generate(prompts, params, progress=False)
    ]
    counts = asdict(executor.counters)
    stats = engine.stats()
    counts["cached_tokens"] = stats.scheduler.prefix_cache_hits
    return Served(tuple(said), counts, executor.num_host_waits, stats.num_wasted_tokens)


def compare(before: Served, after: Served) -> dict[str, tuple[int, int]]:
    """Return the counts that a switch changed, as (before, after).

    Raises
    ------
    AssertionError
        If it changed a token too, or how many there are; the message names the first place.

    Examples
    --------
    >>> compare(Served(((1,),), {"forwards": 4}), Served(((1,),), {"forwards": 2}))
    {'forwards': (4, 2)}
    """
    was, now = len(before.token_ids), len(after.token_ids)
    assert was == now, f"there were {was} requests and are {now}"
    for number, (one, other) in enumerate(zip(before.token_ids, after.token_ids, strict=True)):
        for place, (a, b) in enumerate(zip(one, other, strict=False)):
            assert a == b, f"request {number}: token {place} was {a} and is {b}"
        assert len(one) == len(other), (
            f"request {number}: there were {len(one)} tokens and are {len(other)}"
        )
    return {
        name: (before.counts[name], after.counts[name])
        for name in before.counts
        if before.counts[name] != after.counts[name]
    }
