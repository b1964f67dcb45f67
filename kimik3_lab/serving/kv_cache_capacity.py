"""How many tokens a cache holds, counted as vLLM prints it at start-up.

Needs the standard library only. Lesson 07 reproduces two published figures with it. See
``get_max_concurrency_for_kv_cache_config`` in ``vllm/v1/core/kv_cache_utils.py``.

The figure is that of requests at their longest: blocks of the pool by blocks of such a request,
times its tokens. A request needs a block for each ``block_size`` tokens in every attention group,
and a handful of states in every state group, however long it is. So the figure depends on the
length that is asked for, and states cost the more the shorter requests are.
"""

from __future__ import annotations

from dataclasses import dataclass

from kimik3_lab.serving.cache_config import CacheConfig
from kimik3_lab.serving.knobs import require_at_least
from kimik3_lab.serving.prefill_checkpoint import cdiv

__all__ = ["RequestBlocks", "blocks_per_request", "capacity_in_tokens"]


@dataclass(frozen=True, slots=True)
class RequestBlocks:
    """Blocks of one request at its longest, in all groups.

    Attributes
    ----------
    attention, states, scratch : int
        For rows; for the states of its prefix; for the states that drafts write.
    """

    attention: int
    states: int
    scratch: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.attention + self.states + self.scratch


def blocks_per_request(
    config: CacheConfig, num_tokens: int, num_speculative_tokens: int = 0
) -> RequestBlocks:
    """Count the blocks that a request of ``num_tokens`` tokens needs.

    Parameters
    ----------
    config : CacheConfig
        In "align" mode two states are held for each group, the running one and the one it was
        copied from, and one more for an exported checkpoint; else one.
    num_tokens : int
        Prompt, output and look-ahead of a drafter.
    num_speculative_tokens : int
        K. With ``speculative_states="slots"`` each draft has a state of its own.

    Examples
    --------
    >>> k3 = CacheConfig(1270, 1536, num_kda_groups=3, enable_prefix_caching=True)
    >>> blocks_per_request(k3, 1_048_576).total
    689
    """
    states = 1
    if config.mamba_cache_mode == "align":
        states = 2 + (config.prefill_checkpoints == "internal")
    scratch = num_speculative_tokens if config.speculative_states == "slots" else 0
    return RequestBlocks(
        attention=cdiv(num_tokens, config.scheduler_block_size) * config.num_attention_groups,
        states=states * config.num_kda_groups,
        scratch=scratch * config.num_kda_groups,
    )


def capacity_in_tokens(
    config: CacheConfig, max_model_len: int, num_speculative_tokens: int = 0
) -> int:
    """Tokens of the cache for requests of ``max_model_len``: vLLM's "GPU KV cache size".

    Examples
    --------
    K3 in fp8 at 1,048,576 tokens on 25.12 GiB of each of eight GPUs (#50055), and on 34.28 GiB with
    the rows of a sequence spread over all eight:

    >>> page = 24 * 884_736  # a block has a page of 1,536 rows in 24 layers
    >>> def k3(gib, **knobs):
    ...     return CacheConfig(int(gib * 2**30) // page, 1536, num_kda_groups=3,
    ...                        enable_prefix_caching=True, **knobs)
    >>> capacity_in_tokens(k3(25.12), 1_048_576)
    1932788
    >>> capacity_in_tokens(k3(34.28, dcp_world_size=8), 1_048_576)
    19751980
    """
    require_at_least(1, "max_model_len", max_model_len, "a request has tokens")
    per_request = blocks_per_request(config, max_model_len, num_speculative_tokens).total
    return int(config.num_blocks / per_request * max_model_len)
