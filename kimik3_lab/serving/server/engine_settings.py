"""From the switches of a server to the settings of its scheduler and cache.

Needs the standard library only. Lesson 10 turns each switch and looks at what changes.

A switch that is not set has the value of the preset, and without a preset the default of
:class:`~kimik3_lab.serving.config.SchedulerConfig` or
:class:`~kimik3_lab.serving.config.CacheConfig`. Presets were made for eight B300s and 2.78T
parameters; what depends on the size of model and machine (seats, blocks, groups) follows from the
model that is served instead, and the length of a draft is at most the drafter's own.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Any

from kimik3_lab.serving.admission import blocks_to_compute
from kimik3_lab.serving.config import CacheConfig, SchedulerConfig
from kimik3_lab.serving.kv_cache_capacity import blocks_per_request
from kimik3_lab.serving.kv_cache_groups import group_layers
from kimik3_lab.serving.presets import LADDER, Preset
from kimik3_lab.serving.server.options import ServeOptions

__all__ = ["EngineSettings", "find_preset", "preset_names"]

logger = logging.getLogger(__name__)

#: Fields of the two configurations that an option of the same name sets.
_SCHEDULER_SWITCHES = (
    "policy",
    "token_budget",
    "long_prefill_token_threshold",
    "async_scheduling",
)
_CACHE_SWITCHES = (
    "enable_prefix_caching",
    "prefix_match_unit",
    "prefill_checkpoints",
    "speculative_states",
)


def preset_names() -> list[str]:
    """Names that :func:`find_preset` knows, from the baseline on."""
    return [_slug(preset.name) for preset in LADDER]


def find_preset(name: str) -> Preset:
    """Return a rung of :data:`~kimik3_lab.serving.presets.LADDER`; spaces may be hyphens.

    Raises
    ------
    ValueError
        If there is none of this name.

    Examples
    --------
    >>> find_preset("adaptive-budget").scheduler["token_budget"]
    'adaptive'
    """
    for preset in LADDER:
        if _slug(preset.name) == _slug(name):
            return preset
    raise ValueError(f"preset must be one of {', '.join(preset_names())}, got {name!r}")


def _slug(name: str) -> str:
    return "-".join(name.lower().replace("-", " ").replace(",", "").split())


@dataclass(frozen=True)
class EngineSettings:
    """How an engine schedules and what its cache holds.

    Attributes
    ----------
    scheduler, cache
        The two configurations. ``scheduler.max_model_len`` is what is served: less than was worked
        out from the model if ``num_blocks`` holds less.
    preset
        Where unset switches came from, if it was asked for.
    """

    scheduler: SchedulerConfig
    cache: CacheConfig
    preset: Preset | None = None

    @classmethod
    def from_options(
        cls,
        options: ServeOptions,
        *,
        max_model_len: int,
        num_layers: dict[str, int],
        most_draft_tokens: int,
    ) -> EngineSettings:
        """Work the settings out.

        Parameters
        ----------
        options
            The switches.
        max_model_len
            Longest prompt and answer together. If ``options`` leave it open, it is lowered to what
            ``num_blocks`` hold.
        num_layers
            Layers of each kind, ``{"mla": ..., "kda": ...}``.
        most_draft_tokens
            Longest draft of the drafter, 0 without one.

        Raises
        ------
        ValueError
            If the switches contradict each other or the model, or ``num_blocks`` cannot hold one
            sequence of the length that was asked for.
        """
        preset = None if options.preset is None else find_preset(options.preset)
        num_drafts = _draft_length(options, preset, most_draft_tokens)
        scheduler = _scheduler_config(options, preset, max_model_len, num_drafts)
        cache = _cache_config(options, preset, scheduler, num_layers)
        return cls(_fit(options, scheduler, cache), cache, preset)


def _draft_length(options: ServeOptions, preset: Preset | None, most: int) -> int:
    asked = options.num_speculative_tokens
    if asked is None:
        published = preset.scheduler.get("num_speculative_tokens", 0) if preset is not None else 0
        return min(published, most)
    if asked > most:
        raise ValueError(
            f"num_speculative_tokens={asked}, but "
            + (f"the drafter makes {most} at a time" if most else "there is no drafter")
        )
    return asked


def _scheduler_config(
    options: ServeOptions, preset: Preset | None, max_model_len: int, num_drafts: int
) -> SchedulerConfig:
    fields: dict[str, Any] = dict(preset.scheduler) if preset is not None else {}
    fields.setdefault("max_num_batched_tokens", ServeOptions.DEFAULT_MAX_NUM_BATCHED_TOKENS)
    if options.max_num_batched_tokens is not None:
        fields["max_num_batched_tokens"] = options.max_num_batched_tokens
    fields |= _given(options, _SCHEDULER_SWITCHES)
    fields |= {
        "max_num_seqs": options.max_num_seqs,
        "max_model_len": max_model_len,
        "batching": options.batching,
        "speculative_method": "dspark" if num_drafts else None,
        "num_speculative_tokens": num_drafts,
    }
    return SchedulerConfig(**fields)


def _cache_config(
    options: ServeOptions,
    preset: Preset | None,
    scheduler: SchedulerConfig,
    num_layers: dict[str, int],
) -> CacheConfig:
    fields: dict[str, Any] = dict(preset.cache) if preset is not None else {}
    fields |= _given(options, _CACHE_SWITCHES)
    if options.prefix_cache_retention_interval is not None:
        fields["retention_interval"] = options.prefix_cache_retention_interval
    if fields.get("dcp_world_size", 1) > 1:
        raise ValueError(
            f"preset {options.preset!r} spreads the rows of a sequence over "
            f"{fields['dcp_world_size']} ranks, and this server is one: use it with k3lab simulate"
        )
    # Blocks hold states where states are shared; else the executor has a slot for each request.
    shares_states = preset is not None or bool(fields.get("enable_prefix_caching"))
    fields["num_kda_groups"] = group_layers(num_layers).num_groups["kda"] if shares_states else 0
    fields["block_size"] = options.block_size
    num_blocks = options.num_blocks
    if num_blocks is None:
        longest = scheduler.max_model_len + scheduler.num_lookahead_tokens
        config = CacheConfig(num_blocks=2, **fields)
        per_sequence = blocks_per_request(config, longest, scheduler.num_speculative_tokens).total
        if config.partial_hash_hits:  # a hit inside a block is copied
            per_sequence += config.num_groups
        num_blocks = scheduler.max_num_seqs * per_sequence + 1  # block 0 is never handed out
    return CacheConfig(num_blocks=num_blocks, **fields)


def _fit(options: ServeOptions, scheduler: SchedulerConfig, cache: CacheConfig) -> SchedulerConfig:
    """See that the longest sequence fits into the cache if it is alone.

    vLLM, too, does not start otherwise, and names the length that fits; ``--max-model-len auto``
    takes it (``check_enough_kv_cache_memory`` and ``_auto_fit_max_model_len`` in
    ``vllm/v1/core/kv_cache_utils.py``). A server that started anyway would look healthy and refuse
    every chat that does not limit its answer.
    """

    def blocks(length: int) -> int:  # its last token is sampled and never computed
        return blocks_to_compute(length - 1, length, scheduler, cache)

    asked, usable = scheduler.max_model_len, cache.num_usable_blocks
    longest = bisect_right(range(1, asked + 1), usable, key=blocks)
    if longest == asked:
        return scheduler
    enough = f"raise num_blocks to at least {blocks(asked) + 1}"
    if longest < 2:
        raise ValueError(f"num_blocks={cache.num_blocks} cannot hold even two tokens: {enough}")
    if options.max_model_len is not None:
        raise ValueError(
            f"max_model_len={asked} needs {blocks(asked)} blocks and num_blocks="
            f"{cache.num_blocks} has {usable} to hand out: lower max_model_len to at most "
            f"{longest}, or {enough}"
        )
    logger.warning(
        "num_blocks=%d is enough for a sequence of %d tokens: max_model_len is %d and not %d. For "
        "that, %s",
        *(cache.num_blocks, longest, longest, asked, enough),
    )
    return replace(scheduler, max_model_len=longest)


def _given(options: ServeOptions, names: tuple[str, ...]) -> dict[str, Any]:
    values = {name: getattr(options, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}
