from __future__ import annotations

import dataclasses
import re
from collections import Counter

import pytest

from kimik3_lab.config import K3Config
from kimik3_lab.tensors import DTYPE_BYTES, TensorSpec, checkpoint_tensors


@pytest.fixture(scope="module")
def released() -> list[TensorSpec]:
    return list(checkpoint_tensors(K3Config.released()))


def test_released_names_are_unique_and_nested(released):
    # 165 vision and 3 projector tensors make up the published 497,220.
    assert len(released) == 497_220 - 168
    assert len({spec.name for spec in released}) == len(released)
    assert all(spec.name.startswith("language_model.") for spec in released)


def test_bytes_of_layer_1_are_those_of_its_shard(released):
    # Layer 1 lies alone in one released file: 16,990,911,504 bytes of which 818,704 are header.
    layer = sum(spec.bytes for spec in released if spec.layer_id == 1)
    assert layer == 16_990_911_504 - 818_704


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("lm_head.weight", (163_840, 7168), "BF16"),
        ("model.output_attn_res_proj.weight", (1, 7168), "BF16"),
        ("model.layers.0.mlp.down_proj.weight", (7168, 33_792), "BF16"),
        # 96 heads, padded to 128 values in the release.
        ("model.layers.0.self_attn.A_log", (128,), "F32"),
        ("model.layers.1.self_attn.q_conv1d.weight", (12_288, 1, 4), "F32"),
        ("model.layers.3.self_attn.kv_b_proj.weight", (24_576, 512), "BF16"),
        ("model.layers.92.self_attn.kv_a_proj_with_mqa.weight", (576, 7168), "BF16"),
        ("model.layers.1.block_sparse_moe.gate.e_score_correction_bias", (896,), "F32"),
        ("model.layers.92.block_sparse_moe.experts.895.w1.weight_packed", (3072, 1792), "U8"),
        ("model.layers.92.block_sparse_moe.experts.895.w2.weight_scale", (3584, 96), "U8"),
    ],
)
def test_released_shapes(released, name, shape, dtype):
    spec = next(s for s in released if s.name == "language_model." + name)
    assert (spec.shape, spec.dtype) == (shape, dtype)


def test_packed_weights_count_twice_and_scales_do_not(released):
    expert = [s for s in released if ".layers.1.block_sparse_moe.experts.0." in s.name]
    assert len(expert) == 6
    weights = 3 * 3584 * 3072
    assert sum(s.parameters for s in expert) == weights
    # Four bits a weight and one byte of scale for 32 of them: 4.25 bits.
    assert sum(s.bytes for s in expert) * 8 == weights * 4.25


def test_layers_carry_the_right_attention():
    config = K3Config.tiny()
    for spec in checkpoint_tensors(config):
        if spec.component in ("kda", "mla"):
            assert (spec.component == "kda") == config.is_kda_layer(spec.layer_id)
        if spec.layer_id is not None:
            assert f".layers.{spec.layer_id}." in spec.name


def test_flat_layout_drops_the_prefix_only():
    config = K3Config.micro()
    nested = [s.name for s in checkpoint_tensors(config)]
    flat = [s.name for s in checkpoint_tensors(config, prefix="")]
    assert flat == [name.removeprefix("language_model.") for name in nested]
    assert flat[0] == "model.embed_tokens.weight" and flat[-1] == "lm_head.weight"


def test_both_expert_formats_hold_the_same_weights():
    mxfp4 = K3Config.tiny()
    bf16 = dataclasses.replace(mxfp4, expert_dtype="bf16")
    count = {c.expert_dtype: Counter() for c in (bf16, mxfp4)}
    for config in (bf16, mxfp4):
        for spec in checkpoint_tensors(config):
            count[config.expert_dtype][spec.component] += spec.parameters
    assert count["bf16"] == count["mxfp4"]


def test_a_ragged_scale_group_is_rounded_up():
    config = dataclasses.replace(
        K3Config.micro(), expert_dtype="mxfp4", routed_expert_hidden_size=48
    )
    scale = next(s for s in checkpoint_tensors(config) if s.name.endswith("w1.weight_scale"))
    assert scale.shape == (32, 2)


def test_dtypes_are_known_and_experts_are_numbered():
    config = K3Config.micro()
    specs = list(checkpoint_tensors(config))
    assert {s.dtype for s in specs} <= DTYPE_BYTES.keys()
    numbers = {int(m[1]) for s in specs if (m := re.search(r"\.experts\.(\d+)\.", s.name))}
    assert numbers == set(range(config.num_experts))
