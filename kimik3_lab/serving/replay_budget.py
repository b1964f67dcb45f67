"""The recorded table of token budgets: what one long prompt gets beside N - 1 requests that decode.

Needs the standard library only. Lesson 09 prints this table by version.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kimik3_lab.serving.outputs import ModelRunnerOutput, SchedulerOutput
from kimik3_lab.serving.request import Request, SamplingParams
from kimik3_lab.serving.scheduler import Scheduler
from kimik3_lab.serving.vllm_rules import VllmRules

__all__ = ["budget_row"]

#: The set-up of the recorded table: ``max_num_seqs``, ``max_num_batched_tokens`` and K.
SEQS, TOKENS, K = 1024, 8192, 8


def budget_row(
    rules: VllmRules,
    method: str | None,
    running: int,
    *,
    max_num_seqs: int = SEQS,
    max_num_batched_tokens: int = TOKENS,
    num_speculative_tokens: int = K,
) -> Mapping[str, Any]:
    """Schedule one step with ``running - 1`` requests that verify drafts, and one long prompt.

    Parameters
    ----------
    rules : VllmRules
        Of the version to follow.
    method : str, optional
        The drafter.
    running : int
        Requests in the step, the prompt included.

    Returns
    -------
    mapping
        ``prefill``: tokens of the prompt; ``decode_tokens`` and ``total``: of the others, of all;
        ``max_num_scheduled_tokens``: most tokens of any step.

    Examples
    --------
    >>> from kimik3_lab.serving.vllm_rules import vllm_rules
    >>> [budget_row(vllm_rules(v), "dspark", 1)["prefill"] for v in ("0.27.1", "0.32.0", "0.33.0")]
    [1024, 8185, 8192]
    """
    k = num_speculative_tokens if method else 0
    config, cache = rules.configs(
        {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "num_blocks": 200_000,
            "spec": method,
            "k": k,
        }
    )
    scheduler = Scheduler(config, cache)
    params = SamplingParams(max_tokens=1000, ignore_eos=True)
    decoding = [f"d{i}" for i in range(running - 1)]
    for request_id in decoding:
        scheduler.add_request(Request(request_id, range(10, 14), params))
    while any(not request.num_output_tokens for request in scheduler.requests.values()):
        _run(scheduler)
    if k:
        scheduler.update_draft_token_ids({request_id: [7] * k for request_id in decoding})
    scheduler.add_request(Request("prefill", [3] * 30_000, params))
    output = _run(scheduler)
    prefill = output.num_scheduled_tokens.get("prefill", 0)
    return {
        "prefill": prefill,
        "decode_tokens": output.total_num_scheduled_tokens - prefill,
        "total": output.total_num_scheduled_tokens,
        "max_num_scheduled_tokens": config.scheduled_token_limit,
    }


def _run(scheduler: Scheduler) -> SchedulerOutput:
    """One step; requests that are not inside their prompt get a token."""
    output = scheduler.schedule()
    tokens: list[list[int]] = [[] if r.is_prefill_chunk else [100] for r in output.scheduled]
    ids = list(output.num_scheduled_tokens)
    scheduler.update_from_output(output, ModelRunnerOutput(ids, tokens))
    return output
