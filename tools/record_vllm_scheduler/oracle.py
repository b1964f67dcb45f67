"""vLLM's own V1 scheduler for a recorded configuration: no model, no weights, no GPU.

Needs vLLM and torch. :func:`make_scheduler` is the only place that knows how the names of a
recording map to vLLM's settings.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

# The import above prepares vLLM for a machine without a GPU, so it stays before these.
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
)
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm_versions import (
    AsyncScheduler,
    Scheduler,
    keep_known,
    require_known,
    resolve_kv_cache_block_sizes,
    retention,
    set_drafter,
)

__all__ = ["STOP_TOKEN", "make_request", "make_scheduler"]

#: Ends a request that has ``stop_after``.
STOP_TOKEN = 2
#: Settings of a recording that are vLLM's ``SchedulerConfig`` fields under the same name.
_SCHEDULER_FIELDS = (
    "policy",
    "watermark",
    "max_num_active_seqs",
    "max_num_scheduled_tokens",
    "long_prefill_token_threshold_adaptive",
    "prefill_schedule_interval",
    "scheduler_reserve_full_isl",
)
_CACHE_FIELDS = ("prefix_match_unit", "enable_mamba_shared_prefix_checkpoint")
#: Drafters whose layers share the attention group, so that it drops its last block on a hit.
_EAGLE_FAMILY = ("eagle3", "eagle3-parallel", "mtp", "dflash", "dspark")


@functools.lru_cache(maxsize=64)
def _model_config(max_model_len: int) -> ModelConfig:
    """Describe a model that is never loaded."""
    folder = Path(tempfile.mkdtemp(prefix="record-vllm-scheduler-"))
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 1024,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": max_model_len,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "eos_token_id": STOP_TOKEN,
        "bos_token_id": 1,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return ModelConfig(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=max_model_len,
        seed=0,
    )


def make_scheduler(config: dict[str, Any]) -> Scheduler:
    """Build vLLM's scheduler for the ``config`` of a scenario.

    Raises ``UnknownToThisVersion`` if this release lacks a setting, and whatever vLLM raises for a
    configuration that it refuses.
    """
    vllm_config = _vllm_config(config)
    kv_cache_config = KVCacheConfig(
        num_blocks=config["num_blocks"],
        kv_cache_tensors=[],
        kv_cache_groups=_groups(config, vllm_config),
    )
    block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    asynchronous = config.get("async_scheduling", False)
    with retention(config, kv_cache_config):
        scheduler = (AsyncScheduler if asynchronous else Scheduler)(
            vllm_config=vllm_config,
            kv_cache_config=kv_cache_config,
            block_size=block_size,
            hash_block_size=hash_block_size,
            structured_output_manager=StructuredOutputManager(vllm_config),
            log_stats=False,
        )
    scheduler.record_block_hasher = None
    if config["prefix_caching"]:
        init_none_hash(sha256)
        scheduler.record_block_hasher = keep_known(
            get_request_block_hasher,
            hash_block_size=hash_block_size,
            caching_hash_fn=sha256,
            num_hash_lookahead_tokens=getattr(vllm_config, "num_hash_lookahead_tokens", 0),
        )
    return scheduler


def _vllm_config(config: dict[str, Any]) -> VllmConfig:
    max_model_len = config.get("max_model_len", 32768)
    model_config = _model_config(max_model_len)
    fields = {name: config[name] for name in _SCHEDULER_FIELDS if name in config}
    scheduler_config = keep_known(
        SchedulerConfig,
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"],
        max_model_len=max_model_len,
        enable_chunked_prefill=True,
        async_scheduling=False,
        is_encoder_decoder=False,
        long_prefill_token_threshold=config["long_prefill_token_threshold"],
        **require_known(SchedulerConfig, fields),
    )
    fields = {name: config[name] for name in _CACHE_FIELDS if name in config}
    cache_config = keep_known(
        CacheConfig,
        block_size=config["block_size"],
        gpu_memory_utilization=0.9,
        cache_dtype="auto",
        enable_prefix_caching=config["prefix_caching"],
        **require_known(CacheConfig, {k: v for k, v in fields.items() if v}),
    )
    drafter = None
    if config["spec"]:
        drafter = SpeculativeConfig(method="ngram", num_speculative_tokens=config["k"])
    vllm_config = VllmConfig(
        model_config=model_config,
        scheduler_config=scheduler_config,
        cache_config=cache_config,
        speculative_config=drafter,
    )
    if config["spec"] and config["spec"] != "ngram":
        set_drafter(vllm_config, config["spec"])
    # vLLM's CPU platform changes some of these; a recording is about the values asked for.
    scheduler_config.async_scheduling = config.get("async_scheduling", False)
    cache_config.block_size = config["block_size"]
    cache_config.enable_prefix_caching = config["prefix_caching"]
    cache_config.num_gpu_blocks = config["num_blocks"]
    vllm_config.parallel_config.decode_context_parallel_size = config.get(
        "decode_context_parallel_size", 1
    )
    if config["kda"]:
        caching = config["prefix_caching"]
        cache_config.mamba_cache_mode = "align" if caching else "none"
        cache_config.mamba_block_size = config["block_size"] if caching else max_model_len
    return vllm_config


def _groups(config: dict[str, Any], vllm_config: VllmConfig) -> list[KVCacheGroupSpec]:
    """Return one attention group, and behind it the KDA groups of a hybrid model."""
    block_size = config["block_size"]
    sharded = config.get("decode_context_parallel_size", 1) > 1
    shard = require_known(MLAAttentionSpec, {"dcp_sharded": True}) if sharded else {}
    if not config["kda"]:
        attention = keep_known(
            FullAttentionSpec,
            block_size=block_size,
            num_kv_heads=1,
            head_size=32,
            dtype=torch.bfloat16,
            **shard,
        )
        return [KVCacheGroupSpec(["attn.0"], attention)]
    mla = keep_known(
        MLAAttentionSpec,
        block_size=block_size,
        num_kv_heads=1,
        head_size=576,
        dtype=torch.bfloat16,
        **shard,
    )
    checkpoints = {}
    if config.get("prefill_checkpoint_alignment"):
        checkpoints["prefill_checkpoint_alignment"] = config["prefill_checkpoint_alignment"]
        checkpoints["num_prefill_checkpoint_blocks"] = 1
    kda = keep_known(
        MambaSpec,
        block_size=vllm_config.cache_config.mamba_block_size,
        shapes=((3, 3 * 128), (1, 128, 128)),
        dtypes=(torch.bfloat16, torch.float32),
        mamba_cache_mode=vllm_config.cache_config.mamba_cache_mode,
        num_speculative_blocks=config["k"] if config["spec"] else 0,
        **require_known(MambaSpec, checkpoints),
    )
    count = config.get("num_kda_groups", 1)
    return [
        KVCacheGroupSpec(["mla.0"], mla, is_eagle_group=config["spec"] in _EAGLE_FAMILY),
        *(KVCacheGroupSpec([f"kda.{i}"], kda) for i in range(count)),
    ]


def make_request(scheduler: Scheduler, request: dict[str, Any], prompt: list[int]) -> Request:
    """Build vLLM's request for an entry of ``arrivals``."""
    params = SamplingParams(
        max_tokens=request["max_tokens"],
        ignore_eos=True,
        temperature=0.0,
        stop_token_ids=[STOP_TOKEN] if request.get("stop_after") else None,
    )
    return keep_known(
        Request,
        request_id=request["id"],
        prompt_token_ids=prompt,
        sampling_params=params,
        pooling_params=None,
        block_hasher=scheduler.record_block_hasher,
        arrival_time=request.get("arrival_time", 0.0),
        priority=request.get("priority", 0),
    )
