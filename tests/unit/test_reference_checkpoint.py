"""Checkpoints: round trips in every layout, and each way in which one can be wrong."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kimik3_lab.config import ConfigError, K3Config
from kimik3_lab.reference import checkpoint, mxfp4
from kimik3_lab.reference.checkpoint import CheckpointError
from kimik3_lab.reference.initialization import random_model
from kimik3_lab.reference.model import K3ForCausalLM
from kimik3_lab.tensors import checkpoint_tensors

torch.set_num_threads(1)
BF16 = K3Config.micro()
MXFP4 = dataclasses.replace(BF16, expert_dtype="mxfp4")
#: An expert width that is no multiple of 32: the last group of each row is short.
RAGGED = dataclasses.replace(MXFP4, moe_intermediate_size=40)
NORM = "model.layers.1.input_layernorm.weight"
CONV = "model.layers.0.self_attn.k_conv1d.weight"


@pytest.fixture(scope="module")
def model() -> K3ForCausalLM:
    return random_model(BF16, 3)


def assert_same_weights(got: K3ForCausalLM, want: K3ForCausalLM) -> None:
    got_state, want_state = got.state_dict(), want.state_dict()
    assert got_state.keys() == want_state.keys()
    for name, value in want_state.items():
        assert torch.equal(got_state[name], value), name


def stored(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type of every tensor in a folder."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                view = file.get_slice(name)
                found[name] = (tuple(view.get_shape()), view.get_dtype())
    return found


# -- round trips -----------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "language_model."])
@pytest.mark.parametrize("max_shard_bytes", [None, 50_000])
@pytest.mark.parametrize("config", [BF16, MXFP4, RAGGED])
def test_files_are_as_tensors_lists_them(
    tmp_path: Path, config: K3Config, prefix: str, max_shard_bytes: int | None
) -> None:
    first = random_model(config, 3)
    checkpoint.save(first, tmp_path, prefix=prefix, max_shard_bytes=max_shard_bytes)
    want = {s.name: (s.shape, s.dtype) for s in checkpoint_tensors(config, prefix=prefix)}
    assert stored(tmp_path) == want
    files = sorted(path.name for path in tmp_path.iterdir())
    if max_shard_bytes is None:
        assert files == ["config.json", "model.safetensors"]
    else:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(want)
        assert len(set(index["weight_map"].values())) > 3
        assert index["metadata"]["total_size"] == sum(
            s.bytes for s in checkpoint_tensors(config, prefix=prefix)
        )

    loaded = checkpoint.load(tmp_path)
    assert loaded.config == config
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())
    if config.expert_dtype == "bf16":
        assert_same_weights(loaded, first)
    else:
        for name, value in loaded.state_dict().items():
            want_value = first.state_dict()[name]
            if ".experts." in name:
                want_value = mxfp4.dequantize(*mxfp4.quantize(want_value))
            assert torch.equal(value, want_value), name
        # Once packed, nothing is lost any more.
        checkpoint.save(loaded, tmp_path / "again")
        assert_same_weights(checkpoint.load(tmp_path / "again"), loaded)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_load_in_another_type(tmp_path: Path, model: K3ForCausalLM, dtype: torch.dtype) -> None:
    checkpoint.save(model, tmp_path)
    loaded = checkpoint.load(tmp_path, dtype=dtype)
    assert loaded.dtype is dtype
    assert_same_weights(loaded, random_model(BF16, 3, dtype=dtype))
    bias = loaded.model.layers[1].block_sparse_moe.gate.e_score_correction_bias
    assert bias.dtype is torch.promote_types(dtype, torch.float32)


def test_packed_experts_load_exactly_in_bfloat16_and_float64(tmp_path: Path) -> None:
    checkpoint.save(random_model(RAGGED, 3), tmp_path)
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    raw = load_file(tmp_path / "model.safetensors")
    assert raw[name + "_packed"].shape == (32, 20) and raw[name + "_scale"].shape == (32, 2)
    want = mxfp4.dequantize(raw[name + "_packed"], raw[name + "_scale"], torch.float64)
    for dtype in (torch.bfloat16, torch.float64):
        got = checkpoint.load(tmp_path, dtype=dtype).state_dict()[name]
        assert got.dtype is dtype and torch.equal(got.double(), want)


def test_conv_taps_may_be_two_dimensional(tmp_path: Path, model: K3ForCausalLM) -> None:
    checkpoint.save(model, tmp_path)
    edit(tmp_path, lambda t: t.update({n: v.squeeze(1) for n, v in t.items() if "conv1d" in n}))
    assert stored(tmp_path)[CONV] == ((32, 4), "F32")
    assert_same_weights(checkpoint.load(tmp_path), model)


def test_vision_tensors_of_the_release_are_passed_over(
    tmp_path: Path, model: K3ForCausalLM
) -> None:
    checkpoint.save(model, tmp_path, prefix="language_model.")
    extra = {
        "vision_tower.patch_embed.weight": torch.ones(2),
        "mm_projector.proj.0.weight": torch.ones(2),
    }
    edit(tmp_path, lambda t: t.update(extra))
    assert_same_weights(checkpoint.load(tmp_path), model)


def test_saving_over_another_layout_leaves_nothing_of_it(
    tmp_path: Path, model: K3ForCausalLM
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    checkpoint.save(model, tmp_path, max_shard_bytes=50_000)
    other = random_model(BF16, 4)
    checkpoint.save(other, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json",
    }  # fmt: skip
    assert_same_weights(checkpoint.load(tmp_path), other)
    checkpoint.save(model, tmp_path, max_shard_bytes=80_000)
    assert not (tmp_path / "model.safetensors").exists()
    assert_same_weights(checkpoint.load(tmp_path), model)


@pytest.mark.parametrize("max_shard_bytes", [None, 50_000])
def test_failed_save_leaves_the_old_checkpoint(
    tmp_path: Path,
    model: K3ForCausalLM,
    monkeypatch: pytest.MonkeyPatch,
    max_shard_bytes: int | None,
) -> None:
    checkpoint.save(model, tmp_path, max_shard_bytes=max_shard_bytes)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    calls = []

    def disk_full(tensors, path, **options):
        calls.append(path)
        if len(calls) > (max_shard_bytes is not None):
            Path(path).write_bytes(b"half a fi")
            raise OSError("no space left on device")
        save_file(tensors, path, **options)

    monkeypatch.setattr(checkpoint, "save_file", disk_full)
    with pytest.raises(OSError, match="no space left"):
        checkpoint.save(random_model(BF16, 4), tmp_path, max_shard_bytes=max_shard_bytes)
    assert calls
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_files_can_be_read_by_whoever_may_read_the_folder(
    tmp_path: Path, model: K3ForCausalLM
) -> None:
    checkpoint.save(model, tmp_path)
    modes = {p.stat().st_mode for p in tmp_path.iterdir()}
    plain = tmp_path / "plain"
    plain.touch()
    assert modes == {plain.stat().st_mode}


# -- errors ----------------------------------------------------------------------------------------


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Load the single weight file, change its tensors, write it back."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("prefix", ["", "language_model."])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, p: t.pop(p + NORM), rf"{NORM} is missing"),
        (lambda t, p: t.pop(p + "lm_head.weight"), r"lm_head\.weight is missing"),
        (lambda t, p: t.update({p + "model.layers.9.x": torch.ones(1)}),
         r"model\.layers\.9\.x is not part of this model"),
        (lambda t, p: t.update({p + NORM: torch.ones(63).bfloat16()}),
         rf"{NORM} has shape \(63,\), expected \(64,\)"),
        (lambda t, p: t.update({p + NORM: torch.ones(64, 1).bfloat16()}),
         rf"{NORM} has shape \(64, 1\)"),
        (lambda t, p: t.update({p + NORM: torch.ones(64)}), rf"{NORM} is F32, expected BF16"),
        (lambda t, p: t.update({p + NORM: torch.ones(64).half()}), rf"{NORM} is F16, expected BF"),
        (lambda t, p: t.update({p + CONV: t[p + CONV].bfloat16()}), rf"{CONV} is BF16, expected F"),
        (lambda t, p: t.update({p + CONV: t[p + CONV].reshape(4, 1, 32)}),
         rf"{CONV} has shape \(4, 1, 32\), expected \(32, 1, 4\) or \(32, 4\)"),
    ],
)  # fmt: skip
def test_wrong_tensor_is_named(
    tmp_path: Path, model: K3ForCausalLM, prefix: str, change, message: str
) -> None:
    checkpoint.save(model, tmp_path, prefix=prefix)
    edit(tmp_path, lambda t: change(t, prefix))
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(tmp_path)


def test_flat_name_in_a_nested_checkpoint_is_an_error(tmp_path: Path, model: K3ForCausalLM) -> None:
    checkpoint.save(model, tmp_path, prefix="language_model.")
    edit(tmp_path, lambda t: t.update({NORM: t.pop("language_model." + NORM)}))
    with pytest.raises(CheckpointError, match=f"language_model.{NORM} is missing"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("part", ["_packed", "_scale"])
def test_packed_expert_tensors_are_checked(tmp_path: Path, part: str) -> None:
    name = "model.layers.1.block_sparse_moe.experts.0.w3.weight" + part
    checkpoint.save(random_model(MXFP4, 0), tmp_path)
    original = (tmp_path / "model.safetensors").read_bytes()
    for change, message in (
        (lambda t: t.pop(name), f"{name} is missing"),
        (lambda t: t.update({name: t[name].char()}), f"{name} is I8, expected U8"),
        (lambda t: t.update({name: t[name][1:]}), f"{name} has shape"),
    ):
        (tmp_path / "model.safetensors").write_bytes(original)
        edit(tmp_path, change)
        with pytest.raises(CheckpointError, match=message):
            checkpoint.load(tmp_path)


@pytest.mark.parametrize(("saved", "claimed"), [(BF16, MXFP4), (MXFP4, BF16)])
def test_wrong_expert_type_in_the_configuration_is_explained(
    tmp_path: Path, saved: K3Config, claimed: K3Config
) -> None:
    checkpoint.save(random_model(saved, 0), tmp_path)
    claimed.save(tmp_path)
    with pytest.raises(CheckpointError, match=f"needs expert_dtype {saved.expert_dtype}"):
        checkpoint.load(tmp_path)


def test_folder_without_config_or_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model folder"):
        checkpoint.load(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        checkpoint.load(tmp_path)
    BF16.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not safetensors at all", None])
def test_unreadable_weight_file_is_named(
    tmp_path: Path, model: K3ForCausalLM, content: bytes | None
) -> None:
    checkpoint.save(model, tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5] if content is None else content)
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors"):
        checkpoint.load(tmp_path)


@pytest.fixture
def sharded(tmp_path: Path, model: K3ForCausalLM) -> tuple[Path, Path]:
    checkpoint.save(model, tmp_path, max_shard_bytes=50_000)
    return tmp_path, tmp_path / "model.safetensors.index.json"


def test_missing_shard_is_named(sharded: tuple[Path, Path]) -> None:
    folder, _ = sharded
    shard = sorted(folder.glob("model-*"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"cannot read .*{shard.name}"):
        checkpoint.load(folder)


def test_index_and_shards_must_agree(sharded: tuple[Path, Path]) -> None:
    folder, index = sharded
    body = json.loads(index.read_text())
    home, others = body["weight_map"][NORM], sorted(set(body["weight_map"].values()))
    for change, message in (
        ({"ghost": home}, f"ghost is missing from {home}"),
        ({NORM: next(s for s in others if s != home)}, f"{NORM} lies in {home}"),
        ({NORM: None}, f"puts {NORM} in None"),
        ({NORM: "../" + home}, f"puts {NORM} in '../"),
    ):
        index.write_text(json.dumps({"weight_map": body["weight_map"] | change}))
        with pytest.raises(CheckpointError, match=message):
            checkpoint.load(folder)
    del body["weight_map"][NORM]
    index.write_text(json.dumps(body))
    with pytest.raises(CheckpointError, match=f"{NORM} lies in {home}, but .* nothing about it"):
        checkpoint.load(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}'])
def test_broken_index_is_named(sharded: tuple[Path, Path], text: str) -> None:
    folder, index = sharded
    index.write_text(text)
    with pytest.raises(CheckpointError, match="is not a safetensors index"):
        checkpoint.load(folder)
