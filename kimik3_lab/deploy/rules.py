"""What vLLM or the machine rules out, checked before a command is written.

Needs pydantic. Each rule answers None or a reason with its source; lesson 13 goes through them.
"""

from __future__ import annotations

from collections.abc import Callable

from kimik3_lab.deploy.choices import at_least, cache_type, max_sequences, step_tokens
from kimik3_lab.deploy.layouts import Group
from kimik3_lab.deploy.machines import MACHINES
from kimik3_lab.deploy.memory import memory
from kimik3_lab.deploy.spec import DeploymentSpec
from kimik3_lab.deploy.workloads import PROFILES

__all__ = ["RULES", "broken_rule"]

Reason = tuple[str, str] | None

#: Heads of the drafter: all of them must find a GPU.
_DRAFTER_HEADS = 64


def _dcp_of_release(spec: DeploymentSpec, _: Group) -> Reason:
    if spec.strategy != "dcp" or at_least(spec, "0.28.0"):
        return None
    return (
        f"vLLM {spec.vllm} has the option, but Kimi K3's attention cannot use it: 0.28.0 can",
        "https://github.com/vllm-project/vllm/pull/50484",
    )


def _dcp_with_drafter(spec: DeploymentSpec, group: Group) -> Reason:
    if group.parallelism.dcp == 1 or not spec.drafted:
        return None
    source = "vLLM v1/attention/backends/mla, supports_non_causal_multi_token_dcp"
    if not MACHINES[spec.hardware].blackwell:
        return (
            "the drafter attends to its whole block at once, which FLASHMLA, the backend of this "
            "GPU, cannot do with DCP",
            source,
        )
    if not at_least(spec, "0.29.0"):
        return (
            "the drafter attends to its whole block at once, which TOKENSPEED_MLA can do with DCP "
            "from 0.29.0 on",
            source,
        )
    return None


def _dcp_cache(spec: DeploymentSpec, group: Group) -> Reason:
    if group.parallelism.dcp == 1 or not MACHINES[spec.hardware].blackwell:
        return None
    if cache_type(spec) == "fp8":
        return None
    return (
        "DCP decodes with TOKENSPEED_MLA, which reads an 8-bit cache only: kv_cache_dtype must be "
        "fp8",
        "vLLM v1/attention/backends/mla/tokenspeed_mla.py, supported_kv_cache_dtypes",
    )


def _pipeline_with_drafter(spec: DeploymentSpec, group: Group) -> Reason:
    if group.parallelism.pp == 1 or not spec.drafted or at_least(spec, "0.30.0"):
        return None
    return (
        f"vLLM {spec.vllm} refuses DSpark with a pipeline: the drafter reads what earlier stages "
        "computed, and stages hand that on from 0.30.0 only",
        "https://github.com/vllm-project/vllm/issues/50098, pull/50514; "
        "v1/worker/gpu/model_runner.py of the wheels",
    )


def _drafter_heads(spec: DeploymentSpec, group: Group) -> Reason:
    tp = group.parallelism.tp
    if not spec.drafted or _DRAFTER_HEADS % tp == 0:
        return None
    return (
        f"TP{tp} does not divide the drafter's {_DRAFTER_HEADS} heads",
        "https://huggingface.co/Inferact/Kimi-K3-DSpark config.json",
    )


def _memory(spec: DeploymentSpec, group: Group) -> Reason:
    machine, found = MACHINES[spec.hardware], memory(spec, group, cache_type(spec))
    context = spec.max_model_len or PROFILES[spec.workload].context
    if found.sequences(context):
        return None
    gpu = machine.accelerator.name
    usable = f"{found.usable / 1e9:.1f} GB usable of one {gpu}"
    taken = (found.usable - found.room) / 1e9
    parts = f"{found.weights / 1e9:.1f} GB of weights, {found.reserve / 1e9:.0f} GB kept free" + (
        f", {found.drafter / 1e9:.1f} GB of drafter" if found.drafter else ""
    )
    name = group.parallelism.name
    if found.room <= 0:
        why = f"{name} ({group.role}) takes {taken:.1f} GB ({parts}), of {usable}"
    else:
        why = (
            f"{name} ({group.role}) leaves {found.room / 1e9:.1f} GB of {usable} ({parts}); a "
            f"sequence of {context:,} tokens takes {found.sequence(context) / 1e9:.1f} GB, the "
            f"longest that fits has {found.longest:,}"
        )
    return why, "kimik3_lab.deploy.memory"


def _batch_of_drafts(spec: DeploymentSpec, group: Group) -> Reason:
    if at_least(spec, "0.28.0") or not spec.drafted:  # the budget follows the requests: vllm#51725
        return None
    found = memory(spec, group, cache_type(spec))
    sequences, _ = max_sequences(spec, group, found)
    tokens, _ = step_tokens(spec, group, sequences)
    if tokens > (spec.drafted - 1) * sequences:
        return None
    return (
        f"a step of {tokens:,} tokens leaves none for {sequences:,} sequences with "
        f"{spec.drafted} drafts: vLLM 0.27.1 sets {spec.drafted - 1} aside for each",
        "vLLM 0.27.1 config/vllm.py, _set_max_num_scheduled_tokens",
    )


#: In the order of asking: what cannot work at all comes before what does not fit.
RULES: tuple[Callable[[DeploymentSpec, Group], Reason], ...] = (
    _dcp_of_release,
    _pipeline_with_drafter,
    _dcp_with_drafter,
    _dcp_cache,
    _drafter_heads,
    _memory,
    _batch_of_drafts,
)


def broken_rule(spec: DeploymentSpec, group: Group) -> Reason:
    """First rule that a group breaks: reason and source.

    Examples
    --------
    >>> from kimik3_lab.deploy.layouts import groups
    >>> spec = DeploymentSpec(vllm="0.27.1", strategy="dcp", kv_cache_dtype="fp8")
    >>> broken_rule(spec, groups(spec)[0])[1]
    'https://github.com/vllm-project/vllm/pull/50484'
    """
    return next((found for rule in RULES if (found := rule(spec, group))), None)
