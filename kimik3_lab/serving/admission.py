"""Which requests are refused at the door, with the numbers and the knobs to change.

Needs the standard library only. The server turns the message into an HTTP 400 (lesson 10). vLLM
refuses too long prompts in ``vllm/v1/engine/input_processor.py`` and, at start-up, a cache that
cannot hold ``max_model_len`` tokens; here a small cache is allowed, so each request is checked.
"""

from __future__ import annotations

from kimik3_lab.serving.config import CacheConfig, SchedulerConfig
from kimik3_lab.serving.kv_cache_manager import cdiv
from kimik3_lab.serving.request import Request, RequestStatus

__all__ = ["check_can_finish"]


def check_can_finish(
    request: Request, scheduler_config: SchedulerConfig, cache_config: CacheConfig
) -> None:
    """Refuse a request that could not be computed to its end even if it were alone.

    Parameters
    ----------
    request : Request
        A request that has not started.
    scheduler_config, cache_config
        What it would run under.

    Raises
    ------
    ValueError
        If it has been run before, if prompt and one output token exceed ``max_model_len``, or if
        prompt and ``max_tokens`` need more blocks than there are.

    Examples
    --------
    >>> check_can_finish(Request("a", [5] * 64), SchedulerConfig(1, 8, 64), CacheConfig(9))
    Traceback (most recent call last):
    ValueError: request a: a prompt of 64 tokens and one output token exceed max_model_len=64; \
shorten the prompt or raise max_model_len
    """
    if request.status is not RequestStatus.WAITING:
        raise ValueError(
            f"request {request.request_id} is {request.status.name}: a request runs once, make a "
            "new one"
        )
    limit = scheduler_config.max_model_len
    if request.num_prompt_tokens + 1 > limit:
        raise ValueError(
            f"request {request.request_id}: a prompt of {request.num_prompt_tokens} tokens and one "
            f"output token exceed max_model_len={limit}; shorten the prompt or raise max_model_len"
        )
    # The last token is sampled but never computed. If the others did not fit an empty cache, the
    # request would be preempted by itself again and again.
    longest = min(request.num_prompt_tokens + request.max_tokens, limit) - 1
    num_blocks = cdiv(longest, cache_config.block_size)
    if num_blocks > cache_config.num_usable_blocks:
        raise ValueError(
            f"request {request.request_id}: {request.num_prompt_tokens} prompt tokens with "
            f"max_tokens={request.max_tokens} need {num_blocks} blocks of "
            f"block_size={cache_config.block_size}, and the cache has "
            f"{cache_config.num_usable_blocks} (num_blocks={cache_config.num_blocks} less the null "
            "block); lower max_tokens or raise num_blocks"
        )
