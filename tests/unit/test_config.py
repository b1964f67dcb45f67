from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from kimik3_lab.config import ConfigError, K3Config, LinearAttentionConfig

MEMBERS = [K3Config.released, K3Config.tiny, K3Config.micro]


def test_released_layers():
    config = K3Config.released()
    assert config.num_hidden_layers == 93
    assert len(config.kda_layer_ids) == 69
    assert config.mla_layer_ids == (*range(3, 92, 4), 92)
    assert config.moe_layer_ids == tuple(range(1, 93))
    # A rule of every fourth layer would miss the last one, which is MLA next to MLA.
    assert [config.is_kda_layer(i) for i in (0, 3, 90, 91, 92)] == [True, False, True, False, False]


def test_released_widths():
    config = K3Config.released()
    assert config.linear_attn_config.projection_size == 12_288
    assert (config.qk_head_dim, config.mla_cache_dim) == (192, 576)
    assert config.shared_intermediate_size == 6144


@pytest.mark.parametrize("make", MEMBERS)
def test_members_have_every_mechanism(make):
    config = make()
    assert config.kda_layer_ids and config.mla_layer_ids and config.moe_layer_ids
    assert not config.is_moe_layer(0)
    last = config.num_hidden_layers - 1
    assert config.mla_layer_ids[-2:] == (last - 1, last)
    assert config.num_experts_per_token < config.num_experts


def test_micro_fits_the_interpreter():
    micro = K3Config.micro()
    assert micro.num_hidden_layers <= 4 and micro.num_experts <= 4 and micro.hidden_size <= 64


@pytest.mark.parametrize("make", MEMBERS)
def test_json_round_trip(make, tmp_path):
    config = make()
    config.save(tmp_path)
    assert K3Config.load(tmp_path) == config
    body = json.loads((tmp_path / "config.json").read_text())
    assert body["architectures"] == ["KimiLinearForCausalLM"]
    assert K3Config.from_dict({"model_type": "kimi_k3", "text_config": body}) == config


def test_absent_gate_bound_means_the_older_gate():
    body = K3Config.tiny().to_dict()
    del body["linear_attn_config"]["gate_lower_bound"]
    assert K3Config.from_dict(body).linear_attn_config.gate_lower_bound is None
    body["linear_attn_config"]["gate_lower_bound"] = -3  # JSON has no floats that look whole
    assert K3Config.from_dict(body).linear_attn_config.gate_lower_bound == -3.0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("hidden_size", 0, "hidden_size must be at least 1, got 0"),
        ("hidden_size", "128", "hidden_size must be of type int, got '128'"),
        ("num_experts", True, "num_experts must be of type int, got True"),
        ("num_experts_per_token", 33, "is more than num_experts=32"),
        ("eos_token_id", 2048, "eos_token_id=2048 lies outside vocab_size=2048"),
        ("hidden_act", "silu", "hidden_act='silu' is not part of Kimi K3"),
        ("expert_dtype", "fp8", "expected 'mxfp4' or 'bf16'"),
        ("num_hidden_layers", 8, "must name each layer from 1 to num_hidden_layers=8 once"),
    ],
)
def test_bad_values_are_named(name, value, message):
    with pytest.raises(ConfigError, match=message):
        K3Config.from_dict(K3Config.tiny().to_dict() | {name: value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("kda_layers", [1, 2], "must name each layer"),
        ("kda_layers", "1-5", "must be a list of integers"),
        ("gate_lower_bound", -6.0, r"must lie in \[-5, 0\)"),
        ("use_full_rank_gate", False, "is Kimi Linear, not K3"),
        ("num_heads", None, "linear_attn_config.num_heads must be of type int"),
    ],
)
def test_bad_kda_values_are_named(name, value, message):
    body = K3Config.tiny().to_dict()
    body["linear_attn_config"][name] = value
    with pytest.raises(ConfigError, match=message):
        K3Config.from_dict(body)


def test_a_missing_field_is_named():
    body = K3Config.tiny().to_dict()
    del body["kv_lora_rank"]
    with pytest.raises(ConfigError, match="kv_lora_rank is missing"):
        K3Config.from_dict(body)


def test_every_field_has_a_source():
    rows = K3Config.released().sources()
    fields = {f.name for f in dataclasses.fields(K3Config)} - {"linear_attn_config"}
    linear = {f"linear_attn_config.{f.name}" for f in dataclasses.fields(LinearAttentionConfig)}
    assert set(rows) == fields | linear
    assert all(source for _, source, _ in rows.values())


def test_importing_the_package_is_light():
    code = (
        "import sys, kimik3_lab;"
        "print([m for m in ('torch', 'numpy', 'plotly', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
        ({"mla_norm_eps": 0.0}, "mla_norm_eps must be above 0"),
        ({"routed_scaling_factor": float("inf")}, "routed_scaling_factor must be a finite number"),
        ({"activation_situ_beta": -1.0}, "activation_situ_beta must be above 0"),
        ({"vocab_size": 10**30}, "vocab_size=.* is beyond any model"),
        ({"num_experts": 10**9}, "beyond any model"),
        ({"num_hidden_layers": 10**9}, "beyond any model"),
    ],
)
def test_numbers_that_no_model_has_are_refused(change: dict, message: str) -> None:
    body = K3Config.tiny().to_dict() | change
    with pytest.raises(ConfigError, match=message):
        K3Config.from_dict(body)
