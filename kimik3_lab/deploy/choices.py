"""Numbers that a deployment chooses by its traffic, its GPU and its release.

Needs the standard library only. The options and the rules of a deployment both use them, and so
does lesson 13. Each number comes with its reason.
"""

from __future__ import annotations

from kimik3_lab.deploy.flags import load_release
from kimik3_lab.deploy.layouts import Group
from kimik3_lab.deploy.machines import MACHINES
from kimik3_lab.deploy.memory import Memory
from kimik3_lab.deploy.spec import DeploymentSpec
from kimik3_lab.deploy.workloads import PROFILES, Profile

__all__ = [
    "at_least",
    "cache_type",
    "max_sequences",
    "prefix_caching",
    "retention_by",
    "step_tokens",
]


def at_least(spec: DeploymentSpec, version: str) -> bool:
    """Whether the release is ``version`` or a later one."""

    def key(text: str) -> list[int]:
        return [int(part) for part in text.split(".")]

    return key(spec.vllm) >= key(version)


def cache_type(spec: DeploymentSpec) -> str:
    """Type of the MLA rows in the cache: what was asked for, or what strategy and traffic want."""
    if spec.kv_cache_dtype is not None:
        return spec.kv_cache_dtype
    blackwell = MACHINES[spec.hardware].blackwell
    wanted = PROFILES[spec.workload].fp8_cache or spec.strategy == "dcp"
    return "fp8" if blackwell and wanted else "auto"


def prefix_caching(spec: DeploymentSpec, group: Group) -> bool:
    """Whether a group keeps beginnings; decode nodes get their states from prefill nodes."""
    return PROFILES[spec.workload].prefix_caching and group.role != "decode"


def retention_by(spec: DeploymentSpec, group: Group) -> str | None:
    """Say how states are thinned out: by an ``option``, a ``variable``, or not at all (None).

    The option came in 0.29.0 and thins out by default. Before 0.30.0 a drafter forbids it: the
    lookup drops the last block of a hit, and the one state that was kept lay in it, so that nothing
    was ever found (0.29.0 ``engine/arg_utils.py``; 0.30.0 ``v1/core/kv_cache_coordinator.py``).
    """
    if not prefix_caching(spec, group) or (spec.drafted and not at_least(spec, "0.30.0")):
        return None
    if "--prefix-cache-retention-interval" in load_release(spec.vllm):
        return "option"
    return "variable" if spec.defaults == "common" else None


def max_sequences(spec: DeploymentSpec, group: Group, found: Memory) -> tuple[int, str]:
    """Sequences that run at once on one engine, and why."""
    profile, machine = PROFILES[spec.workload], MACHINES[spec.hardware]
    wanted, why = profile.max_num_seqs, profile.why_seqs
    if group.role == "decode" and group.data_parallel:
        wanted, why = min(wanted, 8), "each of the many copies decodes few sequences (recipe)"
    if machine.max_num_seqs is not None and machine.max_num_seqs < wanted:
        wanted = machine.max_num_seqs
        why = f"what the recipe runs on {machine.accelerator.name}, where memory is short"
    if profile.capped:
        context = spec.max_model_len or profile.context
        fits = found.sequences(context)
        if fits < wanted:
            wanted, why = fits, f"sequences of {context:,} tokens that fit beside the weights"
    return wanted, why


def step_tokens(spec: DeploymentSpec, group: Group, sequences: int) -> tuple[int, str]:
    """Tokens of a step, and why."""
    profile, machine = PROFILES[spec.workload], MACHINES[spec.hardware]
    rows = sequences * (1 + spec.drafted)
    if group.role == "decode":
        tokens = max(32, 1 << (2 * rows - 1).bit_length())
        return tokens, f"decode only: twice the {rows} rows of a full step, no room for prompts"
    tokens, why = _wanted_tokens(spec, profile)
    limit = machine.max_num_batched_tokens
    if limit is not None and limit < tokens:
        tokens, why = limit, "what the recipe runs on this GPU, where memory is short"
    if group.parallelism.pp > 1 and tokens > 8192:
        tokens, why = 8192, "a longer step could run a pipeline stage out of memory (recipe)"
    if group.role == "prefill" and machine.blackwell:
        tokens, why = 16384, "prefill nodes have nothing that waits for short steps (recipe)"
    return tokens, why


def _wanted_tokens(spec: DeploymentSpec, profile: Profile) -> tuple[int, str]:
    if profile.max_num_batched_tokens is not None:
        return profile.max_num_batched_tokens, profile.why_tokens
    if spec.defaults == "release" and not at_least(spec, "0.28.0"):
        return 8192, f"{profile.why_tokens} (vllm#51726)"
    if spec.defaults == "common":
        return 16384, "the default of 0.28.0 and later, for older releases too (vllm#51726)"
    return 16384, f"{profile.why_tokens} (vllm#51726)"
