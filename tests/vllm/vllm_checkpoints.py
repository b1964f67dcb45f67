"""A second checkpoint for vLLM, as unlike ``data/tiny-k3`` as vLLM's CPU kernels allow."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from kimik3_lab.config import K3Config, LinearAttentionConfig
from kimik3_lab.reference import checkpoint
from kimik3_lab.reference.initialization import random_model


def interleaved_config() -> K3Config:
    """Layers in the released order: three KDA, one MLA, ..., and a last MLA after an MLA.

    ``kv_lora_rank`` and ``qk_rope_head_dim`` stay: vLLM's MLA kernel for the CPU knows no others.
    ``rms_norm_eps`` stays: vLLM's norm after KDA has 1e-5 whatever the configuration says.
    """
    return dataclasses.replace(
        K3Config.tiny(),
        vocab_size=640,
        hidden_size=192,
        num_hidden_layers=9,
        intermediate_size=160,
        linear_attn_config=LinearAttentionConfig(
            num_heads=3,
            head_dim=16,
            gate_lower_bound=-4.0,
            kda_layers=(1, 2, 3, 5, 6, 7),
            full_attn_layers=(4, 8, 9),
        ),
        num_attention_heads=4,
        q_lora_rank=80,
        qk_nope_head_dim=48,
        v_head_dim=96,
        attn_res_block_size=4,
        activation_situ_beta=1.5,
        activation_situ_linear_beta=6.0,
        num_experts=12,
        num_experts_per_token=3,
        moe_intermediate_size=64,
        routed_expert_hidden_size=96,
        num_shared_experts=1,
        first_k_dense_replace=2,
        routed_scaling_factor=2.5,
        expert_dtype="bf16",  # the tiny K3 has MXFP4
    )


def save_interleaved(folder: Path) -> Path:
    """Write it with random weights that are quiet before three norms, and return where.

    A norm hides the size of its input, unless that is near the root of its epsilon. Loud routed
    experts would hide ``moe_renormalize`` and ``routed_scaling_factor``, loud latents of MLA would
    hide ``mla_norm_eps``: the wrong values would change nothing that float32 can show.
    """
    model = random_model(interleaved_config(), seed=20)
    for name, parameter in model.named_parameters():
        if ".experts." in name and name.endswith("w2.weight"):
            parameter.data *= 2**-9
        if name.endswith("q_a_proj.weight"):
            parameter.data *= 2**-8
        if name.endswith("kv_a_proj_with_mqa.weight"):
            parameter.data[: model.config.kv_lora_rank] *= 2**-8  # k_pe has no norm
    checkpoint.save(model, folder)
    return folder
