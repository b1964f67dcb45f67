"""The rules of one version of vLLM, as settings of our scheduler and cache.

Needs the standard library only. Lessons 07 to 09 compare versions with it, and the replay of
recorded decisions takes its settings from here. A switch is listed under the first version that was
looked at and has it; 0.28 to 0.31 were not recorded, so what is said of 0.32 may have come earlier.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kimik3_lab.serving.cache_config import CacheConfig
from kimik3_lab.serving.scheduler_config import SchedulerConfig

__all__ = ["VLLM_RULES", "VllmRules", "vllm_rules"]


@dataclass(frozen=True)
class VllmRules:
    """Settings that a version of vLLM amounts to.

    Attributes
    ----------
    version : str
        The release that was recorded.
    scheduler, cache : mapping
        Fields of :class:`~kimik3_lab.serving.scheduler_config.SchedulerConfig` and
        :class:`~kimik3_lab.serving.cache_config.CacheConfig`.
    """

    version: str
    scheduler: Mapping[str, Any]
    cache: Mapping[str, Any]

    def configs(self, recorded: Mapping[str, Any]) -> tuple[SchedulerConfig, CacheConfig]:
        """Make settings for the ``config`` of a recording, whose names are those of the recorder.

        Raises
        ------
        ValueError
            If it has a setting that is not known here.
        """
        unknown = recorded.keys() - _RECORDED
        if unknown:
            raise ValueError(f"unknown settings in the recording: {', '.join(sorted(unknown))}")
        fields = {"scheduler": dict(self.scheduler), "cache": dict(self.cache)}
        scheduler, cache = fields["scheduler"], fields["cache"]
        for name, (owner, field) in _RENAMED.items():
            if name in recorded and (recorded[name] is not None or name == "retention_interval"):
                fields[owner][field] = recorded[name]
        if self.version != "0.33.0":  # needs data parallelism there, which is not recorded
            scheduler["prefill_schedule_interval"] = 1
        caching = recorded.get("prefix_caching", False)
        if recorded.get("kda"):
            cache["num_kda_groups"] = recorded.get("num_kda_groups", 1)
        if not (recorded.get("kda") and caching):
            cache.pop("retention_interval", None)
        elif recorded.get("prefill_checkpoint_alignment"):
            cache["prefill_checkpoints"] = "internal"
        scheduler.setdefault("max_model_len", 32768)
        return SchedulerConfig(**scheduler), CacheConfig(**cache)


#: Settings of a recording, and the field that each becomes.
_RENAMED = {
    **{
        name: ("scheduler", name)
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "long_prefill_token_threshold",
            "long_prefill_token_threshold_adaptive",
            "policy",
            "watermark",
            "async_scheduling",
            "max_num_active_seqs",
            "max_num_scheduled_tokens",
            "prefill_schedule_interval",
            "scheduler_reserve_full_isl",
        )
    },
    "spec": ("scheduler", "speculative_method"),
    "k": ("scheduler", "num_speculative_tokens"),
    **{
        name: ("cache", name)
        for name in (
            "num_blocks",
            "block_size",
            "prefix_match_unit",
            "retention_interval",
            "enable_mamba_shared_prefix_checkpoint",
        )
    },
    "prefix_caching": ("cache", "enable_prefix_caching"),
    "prefill_checkpoint_alignment": ("cache", "checkpoint_alignment"),
    "decode_context_parallel_size": ("cache", "dcp_world_size"),
}
_RECORDED = {*_RENAMED, "kda", "num_kda_groups"}

_OLDEST = VllmRules(
    version="0.27.1",
    scheduler={
        "token_budget": "static",
        "threshold_when_alone": True,
        "pad_spec_decode": "beside_decodes",
        "exact_preemption_index": False,
        "continue_after_self_preemption": False,
        "cache_verified_tokens": False,
        "eagle_block_rule": "drop",
        "forget_unscheduled_hashes": False,
        "preempt_latest_of_equals": False,
    },
    cache={
        "exact_prompt_boundaries": False,
        "free_state_gaps": False,
        "exact_state_count": False,
        "keep_known_keys": False,
        "hash_written_states_only": False,
        "defer_unwritten_copies": False,
        "uncached_reuse": "fifo",
    },
)
_MIDDLE = VllmRules(
    version="0.32.0",
    scheduler={
        **_OLDEST.scheduler,
        "token_budget": "adaptive",
        "threshold_when_alone": False,
        "pad_spec_decode": "any",
        "exact_preemption_index": True,
    },
    cache={
        **_OLDEST.cache,
        "exact_prompt_boundaries": True,
        "free_state_gaps": True,
        "exact_state_count": True,
        "uncached_reuse": "lifo",
    },
)
_NEWEST = VllmRules(
    version="0.33.0",
    scheduler={
        **_MIDDLE.scheduler,
        "token_budget": "lookahead_cap",
        "continue_after_self_preemption": True,
        "cache_verified_tokens": True,
        "eagle_block_rule": "lookahead_hash",
    },
    cache={**_MIDDLE.cache, "keep_known_keys": True},
)

#: By release.
VLLM_RULES = {rules.version: rules for rules in (_OLDEST, _MIDDLE, _NEWEST)}


def vllm_rules(version: str) -> VllmRules:
    """Rules of a version of vLLM; a local part such as ``+cpu`` is passed over.

    Raises
    ------
    ValueError
        If that version was not recorded.

    Examples
    --------
    >>> vllm_rules("0.27.1+cpu").scheduler["token_budget"]
    'static'
    """
    rules = VLLM_RULES.get(version.partition("+")[0])
    if rules is None:
        raise ValueError(f"no rules for vLLM {version}; there are some for {', '.join(VLLM_RULES)}")
    return rules
