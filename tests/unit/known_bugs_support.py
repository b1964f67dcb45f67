"""A few steps by hand, for the tests of known bugs."""

from __future__ import annotations

from typing import Any

from kimik3_lab.serving import ModelRunnerOutput, Request, Scheduler, SchedulerOutput

__all__ = ["finish", "hits", "prefix", "request", "step"]


def prefix(length: int, own: int = 0, token: int = 900) -> list[int]:
    """Return a prompt that counts up, and then repeats a ``token`` of its own."""
    return [*range(10, 10 + length), *[token] * own]


def request(name: str, prompt: list[int], max_tokens: int = 2, **options: Any) -> Request:
    return Request(name, prompt, max_tokens=max_tokens, **options)


def step(scheduler: Scheduler, drafts: dict[str, list[int]] | None = None) -> SchedulerOutput:
    """Plan a step and answer it: a token for whoever is at the end of what is known of it."""
    output = scheduler.schedule()
    tokens = [[] if r.is_prefill_chunk else [7] for r in output.scheduled]
    result = ModelRunnerOutput(list(output.num_scheduled_tokens), tokens)
    scheduler.update_from_output(output, result)
    if drafts:
        scheduler.update_draft_token_ids(drafts)
    return output


def finish(scheduler: Scheduler, limit: int = 200) -> list[SchedulerOutput]:
    """Step until nobody is left."""
    outputs = []
    while scheduler.has_requests():
        outputs.append(step(scheduler))
        assert len(outputs) < limit, "no end in sight"
    return outputs


def hits(scheduler: Scheduler, *prompts: list[int]) -> list[int]:
    """Run prompts one after another; return how much of each was found."""
    found = []
    for number, prompt in enumerate(prompts):
        name = f"{number} of {len(prompts)}, {len(prompt)} tokens"
        scheduler.add_request(request(name, prompt))
        found.append(finish(scheduler)[0].scheduled_new_reqs[0].num_computed_tokens)
    return found
