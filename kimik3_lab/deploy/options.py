"""Which options a group of nodes gets, each with its reason and source.

Needs pydantic. Lesson 13 reads the reasons aloud (``k3lab deploy --explain``). The order is that of
the published command, so that the two can be laid side by side. How nodes find each other is in
:mod:`kimik3_lab.deploy.launch`.
"""

from __future__ import annotations

import json
from typing import Any

from kimik3_lab.deploy.choices import (
    cache_type,
    max_sequences,
    prefix_caching,
    retention_by,
    step_tokens,
)
from kimik3_lab.deploy.command import Option
from kimik3_lab.deploy.flags import load_release
from kimik3_lab.deploy.layouts import Group
from kimik3_lab.deploy.machines import BLOG, MACHINES, RECIPE
from kimik3_lab.deploy.memory import Memory
from kimik3_lab.deploy.spec import DeploymentSpec
from kimik3_lab.deploy.workloads import PROFILES

__all__ = ["DRAIN_S", "group_options"]

#: Seconds that answers under way may go on when a server is told to stop.
DRAIN_S = 300

_COUNT = "kimik3_lab.deploy.memory"


def group_options(spec: DeploymentSpec, group: Group, found: Memory) -> list[Option]:
    """Options that all nodes of a group share.

    Examples
    --------
    >>> from kimik3_lab.deploy.layouts import groups
    >>> from kimik3_lab.deploy.memory import memory
    >>> spec = DeploymentSpec()
    >>> group = groups(spec)[0]
    >>> [o.name for o in group_options(spec, group, memory(spec, group, "auto"))][:2]
    ['--trust-remote-code', '--tensor-parallel-size']
    """
    return [
        _option("--trust-remote-code", None, "the tokenizer is code of the checkpoint", BLOG),
        *_parallel(spec, group),
        *_start(spec, group),
        *_prefix(spec, group),
        *_speculation(spec),
        *_batch(spec, group, found),
        *_cache(spec),
        *_backends(spec, group),
        *_transfer(spec, group),
        *_stop(spec),
    ]


def _option(name: str, value: object, why: str, source: str) -> Option:
    return Option(name=name, value=None if value is None else str(value), why=why, source=source)


def _json(body: dict[str, Any]) -> str:
    return json.dumps(body, separators=(",", ":"))


def _parallel(spec: DeploymentSpec, group: Group) -> list[Option]:
    sizes = group.parallelism
    options = [
        _option(
            "--tensor-parallel-size",
            sizes.tp,
            f"{sizes.tp} GPUs split every matrix; 96 KDA and 96 MLA heads leave {96 // sizes.tp} "
            "for each",
            BLOG,
        )
    ]
    if sizes.pp > 1:
        why = f"93 layers in {sizes.pp} stages: only the residual stream crosses between nodes"
        options.append(_option("--pipeline-parallel-size", sizes.pp, why, RECIPE))
    if sizes.dp > 1:
        why = f"{sizes.dp} copies of everything but the experts, each with requests of its own"
        options.append(_option("--data-parallel-size", sizes.dp, why, RECIPE))
    if sizes.whole_experts:
        why = (
            f"896 experts over {sizes.ep} GPUs, {896 // sizes.ep} whole ones each"
            + (
                ": slices narrower than 256 columns would be padded with zeros"
                if sizes.tp > 12
                else ", instead of a slice of every expert"
            )
        )  # fmt: skip
        source = "vLLM models/kimi_k3/nvidia/model.py, min_moe_intermediate_per_partition"
        options.append(_option("--enable-expert-parallel", None, why, source))
    if sizes.dcp > 1:
        source = "https://github.com/vllm-project/vllm/pull/50484 (0.28.0)"
        options += [
            _option(
                "--decode-context-parallel-size",
                sizes.dcp,
                f"every GPU keeps 1/{sizes.dcp} of a sequence's MLA rows; without it all keep all, "
                "since heads share a row",
                source,
            ),
            _option(
                "--dcp-comm-backend",
                "a2a",
                "partial results are exchanged directly: one exchange instead of gather and reduce",
                source,
            ),
        ]
    return options


def _start(spec: DeploymentSpec, group: Group) -> list[Option]:
    machine = MACHINES[spec.hardware]
    share, source = spec.gpu_memory_utilization, "asked for"
    if share is None:
        share, source = machine.utilization, machine.utilization_source
    length = "auto" if spec.max_model_len is None else spec.max_model_len
    return [
        _option(
            "--load-format",
            "fastsafetensors",
            "1.56 TB of weights come from disk: this reads them straight to the GPUs",
            BLOG,
        ),
        _option(
            "--gpu-memory-utilization",
            f"{share:g}",
            "share of the memory for weights and cache; the rest is for what vLLM does not count",
            source,
        ),
        _option("--reasoning-parser", "kimi_k3", "keeps thoughts apart from the answer", BLOG),
        _option("--enable-auto-tool-choice", None, "lets the model decide to call tools", BLOG),
        _option("--tool-call-parser", "kimi_k3", "reads the model's own form of calls", BLOG),
        _option(
            "--host", "0.0.0.0", "answers on every interface, so put it behind a firewall", BLOG
        ),
        _option("--port", spec.port, "where requests go", BLOG),
        _option(
            "--max-model-len",
            length,
            "the longest sequence that fits is found at the start"
            if length == "auto"
            else "asked for",
            BLOG,
        ),
    ]


def _prefix(spec: DeploymentSpec, group: Group) -> list[Option]:
    profile = PROFILES[spec.workload]
    why_off = profile.why_prefix
    if group.role == "decode" and profile.prefix_caching:
        why_off = "states arrive from the prefill nodes, which do the caching"
    moved = "a hybrid model's default became on in 0.28.0 (vllm#50991), so it is written down"
    if not prefix_caching(spec, group):
        shown = "--disable-prefix-caching"
        if shown not in load_release(spec.vllm):
            shown = "--no-enable-prefix-caching"
        return [_option(shown, None, f"{why_off}; {moved}", BLOG)]
    options = [
        _option("--enable-prefix-caching", None, f"{profile.why_prefix}; {moved}", RECIPE),
    ]
    # The recipe has `--prefix-match-unit 128` too; `_notes` of the plan says why it is not here.
    if retention_by(spec, group) == "option":
        why = "keeps states only where somebody can resume, instead of one a block"
        source = "https://github.com/vllm-project/vllm/pull/52216"
        options.append(_option("--prefix-cache-retention-interval", 0, why, source))
    return options


def _speculation(spec: DeploymentSpec) -> list[Option]:
    if not spec.drafted:
        return []
    body = {
        "model": spec.drafter,
        "method": "dspark",
        "num_speculative_tokens": spec.drafted,
        "draft_sample_method": "probabilistic",
        "rejection_sample_method": "standard",
    }
    why = (
        f"{spec.drafted} tokens are guessed in one pass and verified in the next; each running "
        f"sequence keeps {spec.drafted} more KDA states for taking them back"
    )
    return [_option("--speculative-config", _json(body), why, BLOG)]


def _batch(spec: DeploymentSpec, group: Group, found: Memory) -> list[Option]:
    sequences, why_sequences = max_sequences(spec, group, found)
    tokens, why_tokens = step_tokens(spec, group, sequences)
    source = f"{_COUNT} and the workload {spec.workload}"
    return [
        _option("--max-num-seqs", sequences, why_sequences, source),
        _option("--max-num-batched-tokens", tokens, why_tokens, source),
    ]


def _cache(spec: DeploymentSpec) -> list[Option]:
    if cache_type(spec) != "fp8":
        return []
    options = [
        _option("--kv-cache-dtype", "fp8", "halves the MLA rows; KDA states stay float32", RECIPE)
    ]
    if not MACHINES[spec.hardware].blackwell:
        return options
    prefill = "trtllm_ragged" if spec.strategy == "dcp" else "flashinfer"
    body = {"use_prefill_query_quantization": True, "mla_prefill_backend": prefill}
    why = "prefill multiplies in 8 bits too, without unpacking the cache first"
    return [*options, _option("--attention-config", _json(body), why, RECIPE)]


def _backends(spec: DeploymentSpec, group: Group) -> list[Option]:
    machine, options = MACHINES[spec.hardware], []
    if spec.strategy == "dcp" and machine.blackwell:
        why = "the decode kernel that returns what DCP needs to join partial results, 8-bit only"
        options.append(_option("--attention-backend", "TOKENSPEED_MLA", why, RECIPE))
    elif machine.attention_backend is not None:
        why = "the MLA kernel of the recipe on this GPU"
        options.append(_option("--attention-backend", machine.attention_backend, why, RECIPE))
    if not machine.blackwell:
        why = "this GPU has no 4-bit units: Marlin unpacks the experts to bfloat16 on the way"
        options.append(_option("--moe-backend", "marlin", why, RECIPE))
        why = "the recipe turns it off on this GPU"
        options.append(_option("--disable-custom-all-reduce", None, why, RECIPE))
        why = "saves minutes at the start; the recipe turns it off"
        options.append(_option("--no-enable-flashinfer-autotune", None, why, RECIPE))
    elif group.data_parallel and machine.nvlink_across_nodes:
        why = "dispatch, experts and combine in one kernel, over NVLink between nodes"
        options.append(_option("--moe-backend", "deep_gemm_mega_moe", why, RECIPE))
    elif group.data_parallel and group.nodes > 1:
        why = "tokens travel to their experts over RDMA"
        options.append(_option("--all2all-backend", "deepep_v2", why, RECIPE))
    return options


def _transfer(spec: DeploymentSpec, group: Group) -> list[Option]:
    if group.role == "serve":
        return []
    role = "kv_producer" if group.role == "prefill" else "kv_consumer"
    body = {"kv_connector": "NixlConnector", "kv_role": role}
    hybrid = "--enable-hybrid-kv-cache-manager"
    if hybrid not in load_release(spec.vllm):
        hybrid = "--no-disable-hybrid-kv-cache-manager"
    nixl = "https://docs.vllm.ai/en/stable/features/nixl_connector_usage.html"
    options = [
        _option("--kv-transfer-config", _json(body), "states and rows move by RDMA", nixl),
        _option(hybrid, None, "a connector would turn off what keeps two kinds of state", RECIPE),
    ]
    if group.role == "prefill":
        why = "prompts differ in length every step: a recorded graph would never be reused"
        options.append(_option("--enforce-eager", None, why, RECIPE))
    return options


def _stop(spec: DeploymentSpec) -> list[Option]:
    if spec.defaults == "release":
        return []
    why = (
        f"told to stop, a server takes nothing new and goes on for {DRAIN_S} s with what it has; "
        "by default answers are cut off. Set it to the length of your longest answer"
    )
    return [_option("--shutdown-timeout", DRAIN_S, why, "vLLM config/vllm.py, v1/engine/core.py")]
