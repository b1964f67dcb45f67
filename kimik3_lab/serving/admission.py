"""What is refused at the door, with the numbers and the knobs to change.

Needs the standard library only. The server turns the message into an HTTP 400 (lesson 10). vLLM
refuses too long prompts in ``vllm/v1/engine/input_processor.py`` and, at start-up, a cache that
cannot hold ``max_model_len`` tokens; here a small cache is allowed (``k3lab serve`` refuses
one), so each request is checked.
"""

from __future__ import annotations

from kimik3_lab.serving.budget import TokenBudget
from kimik3_lab.serving.config import CacheConfig, SchedulerConfig
from kimik3_lab.serving.kv_cache_capacity import blocks_per_request
from kimik3_lab.serving.request import Request, RequestStatus

__all__ = ["blocks_to_compute", "check_can_finish", "check_configs"]


def check_configs(config: SchedulerConfig, cache_config: CacheConfig) -> None:
    """Refuse settings under which a request could wait for ever, or a state would be lost.

    Verification may pass one block boundary and leave the state there behind, not two.

    A chunk inside a prompt ends on a block boundary, unless no budget could ever hold a block. The
    room for a request's own drafts is not part of that rule, so a budget that is a block without
    it and less with it would never hold one (vLLM 0.28 and later accept that).

    Raises
    ------
    ValueError
        If so; the message has the numbers.
    """
    if cache_config.mamba_cache_mode != "align":
        return
    k = config.num_speculative_tokens
    if cache_config.block_size < k + 1:
        raise ValueError(
            f"one state is kept at a block boundary for each verification (speculative_states="
            f"{cache_config.speculative_states!r}): block_size={cache_config.block_size} must be "
            f"at least 1 + num_speculative_tokens = {k + 1}"
        )
    size, alone = cache_config.block_size, TokenBudget(config).remaining
    if alone < size <= config.scheduled_token_limit:
        raise ValueError(
            f"a prompt that is alone gets {alone} tokens of a step, less than block_size={size}, "
            f"and so would never begin: raise max_num_batched_tokens="
            f"{config.max_num_batched_tokens} by {size - alone}, or set max_num_scheduled_tokens "
            f"below {size}"
        )


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
    num_blocks = _most_blocks(request, scheduler_config, cache_config)
    if num_blocks > cache_config.num_usable_blocks:
        raise ValueError(
            f"request {request.request_id}: {request.num_prompt_tokens} prompt tokens with "
            f"max_tokens={request.max_tokens} need {num_blocks} blocks of "
            f"block_size={cache_config.block_size}, and the cache has "
            f"{cache_config.num_usable_blocks} (num_blocks={cache_config.num_blocks} less the null "
            "block); lower max_tokens or raise num_blocks"
        )


def _most_blocks(
    request: Request, scheduler_config: SchedulerConfig, cache_config: CacheConfig
) -> int:
    """Count the blocks that a request may hold at a time.

    If there were fewer, it would preempt itself again and again.
    """
    limit, k = scheduler_config.max_model_len, scheduler_config.num_speculative_tokens
    # The last token is sampled but never computed. Drafts are, and the drafter writes behind them.
    computed = min(request.num_prompt_tokens + request.max_tokens - 1 + k, limit - 1)
    return blocks_to_compute(computed, limit, scheduler_config, cache_config)


def blocks_to_compute(
    num_tokens: int,
    max_model_len: int,
    scheduler_config: SchedulerConfig,
    cache_config: CacheConfig,
) -> int:
    """Count the blocks of a sequence with so many computed tokens.

    Parameters
    ----------
    num_tokens : int
        Of a sequence of at most ``max_model_len``, drafts included.
    max_model_len : int
        Nothing is written behind it. It may be another than the scheduler's.
    scheduler_config, cache_config
        What it runs under.

    Examples
    --------
    >>> blocks_to_compute(63, 64, SchedulerConfig(1, 8, 64), CacheConfig(9))
    4
    """
    slots = min(num_tokens + scheduler_config.num_lookahead_tokens, max_model_len)
    most = blocks_per_request(cache_config, slots, scheduler_config.num_speculative_tokens).total
    if cache_config.partial_hash_hits:  # a hit inside a block is copied
        most += cache_config.num_groups
    return most
