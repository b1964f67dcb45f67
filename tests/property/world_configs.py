"""Configurations for :mod:`serving_world`: any combination of switches, and vLLM's versions."""

from __future__ import annotations

from random import Random
from typing import Any

from kimik3_lab.serving import CacheConfig, SchedulerConfig
from kimik3_lab.serving.async_scheduler import make_scheduler
from kimik3_lab.serving.presets import LADDER
from kimik3_lab.serving.vllm_rules import VLLM_RULES

__all__ = ["draw_configs"]

#: Up to 0.33.0 vLLM has it the other way round, which lets a hit expose what was never computed:
#: see tests/unit/test_known_bugs_cache.py. The proofs are about the right rules.
SOUND_SCHEDULER = {"forget_unscheduled_hashes": True, "preempt_latest_of_equals": True}
SOUND_CACHE = {"hash_written_states_only": True, "defer_unwritten_copies": True}

_METHODS = ("ngram", "eagle3", "eagle3-parallel", "mtp", "draft_model", "pard", "dspark", "dflash")
#: 0.27.1 cuts a padded row where a block ends, and leaves it more drafts than it has rows.
SOUND_PADDING = {"pad_spec_decode": "any"}


def draw_configs(rng: Random) -> tuple[SchedulerConfig, CacheConfig]:
    """Draw until nothing refuses what was drawn."""
    while True:
        try:
            configs = _rung(rng) if rng.random() < 0.15 else _draw(rng)
            make_scheduler(*configs)  # refuses what the two cannot do together
            return configs
        except ValueError:
            continue


def _rung(rng: Random) -> tuple[SchedulerConfig, CacheConfig]:
    """Take a rung of the ladder between the published command lines, with K = 8, in miniature."""
    preset = rng.choice(LADDER)
    seqs = rng.randint(1, 4)
    sizes = {
        "max_num_seqs": seqs,
        "max_num_batched_tokens": rng.choice([25, 40, 400]) + 8 * seqs,
        "async_scheduling": rng.random() < 0.3,
        **SOUND_SCHEDULER,
    }
    cache = preset.cache_config(rng.choice([42, 45, 60, 200]), block_size=16, **SOUND_CACHE)
    if cache.mamba_cache_mode == "align":
        sizes |= SOUND_PADDING
    return preset.scheduler_config(rng.choice([40, 64]), **sizes), cache


def _draw(rng: Random) -> tuple[SchedulerConfig, CacheConfig]:
    scheduler: dict[str, Any] = {}
    cache: dict[str, Any] = {}
    if rng.random() < 0.5:
        rules = VLLM_RULES[rng.choice(sorted(VLLM_RULES))]
        scheduler |= rules.scheduler
        cache |= rules.cache
    else:
        scheduler |= {
            "token_budget": rng.choice(["static", "adaptive", "lookahead_cap"]),
            "threshold_when_alone": rng.random() < 0.5,
            "pad_spec_decode": rng.choice(["any", "beside_decodes"]),
            "exact_preemption_index": rng.random() < 0.7,
            "continue_after_self_preemption": rng.random() < 0.7,
            "cache_verified_tokens": rng.random() < 0.7,
            "eagle_block_rule": rng.choice(["lookahead_hash", "drop_eagle_only", "drop"]),
        }
        cache |= {
            "exact_prompt_boundaries": rng.random() < 0.7,
            "free_state_gaps": rng.random() < 0.7,
            "exact_state_count": rng.random() < 0.7,
            "keep_known_keys": rng.random() < 0.7,
            "uncached_reuse": rng.choice(["lifo", "fifo"]),
        }
    kda = rng.choice([0, 0, 1, 1, 3])
    caching = rng.random() < 0.75
    block_size = rng.choice([8, 8, 16] if kda and caching else [1, 2, 4, 8])
    method = rng.choice([None, None, *_METHODS])
    k = rng.randint(1, 4) if method else 0
    scheduler |= {
        "speculative_method": method,
        "num_speculative_tokens": k,
        "batching": rng.choice(["continuous", "continuous", "continuous", "static"]),
        "policy": rng.choice(["fcfs", "fcfs", "priority"]),
        "long_prefill_token_threshold": rng.choice([0, 0, 0, 5, 9]),
        "long_prefill_token_threshold_adaptive": rng.random() < 0.2,
        "scheduler_reserve_full_isl": rng.random() < 0.7,
        "watermark": rng.choice([0.0, 0.0, 0.1]),
        "prefill_schedule_interval": rng.choice([1, 1, 1, 3]),
        "async_scheduling": rng.random() < 0.3,
    }
    cache["num_kda_groups"] = kda
    cache["enable_prefix_caching"] = caching
    if not kda:
        cache["num_attention_groups"] = rng.choice([1, 1, 2])
    if kda:
        cache["speculative_states"] = rng.choice(["slots", "records"])
    if caching:
        cache["dcp_world_size"] = rng.choice([1, 1, 1, 2])
        if kda:
            cache["prefix_match_unit"] = rng.choice([None, block_size // 2, block_size // 4])
            size = block_size * cache["dcp_world_size"]
            cache["retention_interval"] = rng.choice([None, 0, 0, size, 2 * size])
            cache["prefill_checkpoints"] = rng.choice(["split", "internal"])
            cache["checkpoint_alignment"] = rng.choice([1, 2, 4])
            cache["enable_mamba_shared_prefix_checkpoint"] = rng.random() < 0.4
    max_model_len = rng.choice([40, 48, 64])
    pages = cache.get("num_attention_groups", 1)
    need = -(-(max_model_len + k + 1) // block_size) * pages + kda * (4 + k) + 2
    seqs = rng.randint(1, 5)
    budget = rng.choice([2 * k + 2, 2 * k + 5, 16, 64, 400])
    if scheduler.get("token_budget") == "static":
        budget += k * seqs
    if rng.random() < 0.3:
        scheduler["max_num_active_seqs"] = rng.randint(1, seqs)
    scheduler |= SOUND_SCHEDULER
    cache |= SOUND_CACHE
    if kda and caching:
        scheduler |= SOUND_PADDING
    return (
        SchedulerConfig(seqs, budget, max_model_len, **scheduler),
        CacheConfig(need + rng.choice([0, 1, 2, 4, need // 2, need * 2]), block_size, **cache),
    )
