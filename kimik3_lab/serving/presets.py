"""The two published command lines as settings, and the ladder between them, one switch a rung.

Needs the standard library only. Lessons 08, 09 and 11 climb it; the simulator takes its settings
from here. The command lines are those of the vLLM blog post of 2026-09-13: K3 on 8 B300, TP8, a
DSpark drafter with K = 8, prefix caching off. So the published gain owes nothing to checkpoints,
recovery records or context parallelism; rungs that switch those on are marked ``beyond_published``.

A rung either changes what the scheduler or the cache decides, or how a step is computed
(``execution``), which only an executor or a cost model can notice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kimik3_lab.serving.cache_config import CacheConfig
from kimik3_lab.serving.scheduler_config import SchedulerConfig

__all__ = ["LADDER", "MAIN_2026_09_13", "V0_27_1", "Preset"]


@dataclass(frozen=True)
class Preset:
    """Settings under a name.

    Attributes
    ----------
    name : str
        Of the rung.
    change : str
        What it changes from the rung before.
    prs : tuple of int
        Pull requests of vLLM that made the change, or the issue that asked for it.
    scheduler, cache : mapping
        Fields of the two configurations that differ from their defaults, without sizes.
    execution : frozenset of str
        Names of faster ways to compute a step that are in use.
    beyond_published : bool
        Whether the published command lines leave this switched off.

    Examples
    --------
    >>> V0_27_1.scheduler_config(max_model_len=9216).scheduled_token_limit
    1024
    >>> MAIN_2026_09_13.scheduler_config(max_model_len=9216).scheduled_token_limit
    16384
    """

    name: str
    change: str
    prs: tuple[int, ...] = ()
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    cache: Mapping[str, Any] = field(default_factory=dict)
    execution: frozenset[str] = frozenset()
    beyond_published: bool = False

    def scheduler_config(self, max_model_len: int, **overrides: Any) -> SchedulerConfig:
        """Make settings of the scheduler; ``overrides`` are fields of it."""
        return SchedulerConfig(**{"max_model_len": max_model_len, **self.scheduler, **overrides})

    def cache_config(self, num_blocks: int, **overrides: Any) -> CacheConfig:
        """Make settings of the cache; ``overrides`` are fields of it."""
        return CacheConfig(**{"num_blocks": num_blocks, **self.cache, **overrides})

    def _with(
        self,
        name: str,
        change: str,
        *prs: int,
        scheduler: Mapping[str, Any] | None = None,
        cache: Mapping[str, Any] | None = None,
        execution: str | None = None,
        beyond_published: bool = False,
    ) -> Preset:
        """Make the next rung."""
        return replace(
            self,
            name=name,
            change=change,
            prs=prs,
            scheduler={**self.scheduler, **(scheduler or {})},
            cache={**self.cache, **(cache or {})},
            execution=self.execution | ({execution} if execution else frozenset()),
            beyond_published=beyond_published,
        )


#: vLLM 0.27.1 with the published command line. A block has 896 tokens: with K = 8 a state takes
#: 887,808 bytes of each layer on one of eight ranks, and a row in bf16 1,152.
V0_27_1 = Preset(
    name="v0.27.1",
    change="the baseline of the published comparison",
    scheduler={
        "max_num_seqs": 1024,
        "max_num_batched_tokens": 8192,
        "speculative_method": "dspark",
        "num_speculative_tokens": 8,
        "token_budget": "static",
        "threshold_when_alone": True,
        "pad_spec_decode": "beside_decodes",
        "exact_preemption_index": False,
        "continue_after_self_preemption": False,
        "cache_verified_tokens": False,
        "eagle_block_rule": "drop",
    },
    cache={
        "block_size": 896,
        "num_kda_groups": 3,
        "enable_prefix_caching": False,
        "exact_prompt_boundaries": False,
        "free_state_gaps": False,
        "exact_state_count": False,
        "keep_known_keys": False,
        "uncached_reuse": "fifo",
    },
)

_BATCH = V0_27_1._with(
    "batch of 16,384",
    "default of max_num_batched_tokens for GPUs of 160 GiB and more",
    51726,
    scheduler={"max_num_batched_tokens": 16384},
)
_BUDGET = _BATCH._with(
    "adaptive budget",
    "room for drafts is set aside for the requests of the step, not for 1,024",
    51725,
    scheduler={"token_budget": "adaptive"},
)
_PREFILL = _BUDGET._with(
    "KDA prefill",
    "FlashKDA writes its output and final states where they belong",
    51311,
    52458,
    execution="kda_prefill_in_place",
)
_SKINNY = _PREFILL._with(
    "skinny GEMM",
    "matrix products with few rows on a kernel of their own",
    53534,
    execution="skinny_gemm",
)
_FINALIZE = _SKINNY._with(
    "deferred finalize",
    "the weighted sum over experts is taken in the next kernel",
    53152,
    53327,
    execution="deferred_finalize",
)
#: A decode step became shorter by more than all published claims together: see
#: :mod:`kimik3_lab.performance.constants`, ``decode_step_residual``.
_OTHER = _FINALIZE._with(
    "other step changes",
    "everything else between the two versions; no gain of it was published",
    50587,
    execution="other_step_changes",
)
#: vLLM's main branch on the day of the post (commit 82a85dc1) with the published command line.
MAIN_2026_09_13 = _OTHER._with(
    "main 2026-09-13",
    "mixed KDA batches are sliced, not gathered",
    56159,
    execution="zero_copy_mixed_batch",
)

_PADDING = MAIN_2026_09_13._with(
    "padding alone",
    "a last token is padded with placeholder drafts though nobody else decodes",
    55798,
    scheduler={"pad_spec_decode": "any"},
    beyond_published=True,
)
_CACHING = _PADDING._with(
    "prefix caching",
    "blocks are shared between sequences that begin alike",
    50991,
    cache={"enable_prefix_caching": True},
    beyond_published=True,
)
_BOUNDARIES = _CACHING._with(
    "exact prompt boundaries",
    "the kept state is one that a repetition can resume at",
    50235,
    50409,
    cache={"exact_prompt_boundaries": True},
    beyond_published=True,
)
_CHECKPOINTS = _BOUNDARIES._with(
    "internal checkpoints",
    "a state is exported from inside a chunk instead of ending the chunk there",
    52789,
    53196,
    53212,
    53614,
    cache={"prefill_checkpoints": "internal"},
    beyond_published=True,
)
_RETENTION = _CHECKPOINTS._with(
    "sparse retention",
    "only states that somebody can resume at keep their hash",
    52216,
    cache={"retention_interval": 0},
    beyond_published=True,
)
_RECORDS = _RETENTION._with(
    "recovery records",
    "verification keeps inputs of the recurrence instead of a state for each draft",
    51855,
    cache={"speculative_states": "records"},
    beyond_published=True,
)
_CAP = _RECORDS._with(
    "look-ahead cap",
    "DSpark drafts in a pass of its own and costs the target no rows",
    52922,
    52996,
    53080,
    scheduler={"token_budget": "lookahead_cap"},
    beyond_published=True,
)
_DCP = _CAP._with(
    "context parallelism",
    "the rows of a sequence are spread over eight ranks",
    50484,
    cache={"dcp_world_size": 8},
    beyond_published=True,
)

#: From the baseline to the published result, and beyond.
LADDER: tuple[Preset, ...] = (
    V0_27_1,
    _BATCH,
    _BUDGET,
    _PREFILL,
    _SKINNY,
    _FINALIZE,
    _OTHER,
    MAIN_2026_09_13,
    _PADDING,
    _CACHING,
    _BOUNDARIES,
    _CHECKPOINTS,
    _RETENTION,
    _RECORDS,
    _CAP,
    _DCP,
)
