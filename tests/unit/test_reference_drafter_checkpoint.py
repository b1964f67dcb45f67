"""A drafter's folder: round trips, the released names, and each way in which one can be wrong."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drafter_support import random_drafter
from safetensors.torch import load_file, save_file

from kimik3_lab.config import ConfigError, K3Config
from kimik3_lab.drafter_config import DSparkConfig
from kimik3_lab.reference import checkpoint, drafter_checkpoint
from kimik3_lab.reference.drafter import DSparkDrafter
from kimik3_lab.reference.drafter_checkpoint import CheckpointError
from kimik3_lab.reference.initialization import random_model

torch.set_num_threads(1)
SMALL = DSparkConfig.for_target(K3Config.micro())
FILE = "model.safetensors"
NORM, CONFIDENCE = "layers.1.input_layernorm.weight", "confidence_head.proj.weight"
W2 = "markov_head.markov_w2.weight"


@pytest.fixture(scope="module")
def drafter() -> DSparkDrafter:
    return random_drafter(SMALL, 4, dtype=torch.float32)


@pytest.fixture
def folder(tmp_path: Path, drafter: DSparkDrafter) -> Path:
    drafter_checkpoint.save(drafter, tmp_path)
    return tmp_path


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / FILE)


def assert_same_weights(got: DSparkDrafter, want: DSparkDrafter) -> None:
    assert got.config == want.config
    want_state = want.state_dict()
    assert got.state_dict().keys() == want_state.keys()
    for name, value in got.state_dict().items():
        assert torch.equal(value.double(), want_state[name].double()), name


def test_released_names_and_shapes() -> None:
    """Listed a second time, as public readers of the released file have them."""
    want: dict[str, tuple[int, ...]] = {
        "context_proj.weight": (7168, 35_840), "context_norm.weight": (7168,),
        "final_norm.weight": (7168,),
        "markov_head.markov_w1.weight": (163_840, 256),
        "markov_head.markov_w2.weight": (163_840, 256),
        "confidence_head.proj.weight": (1, 7424), "confidence_head.proj.bias": (1,),
    }  # fmt: skip
    for i in range(5):
        want |= {
            f"layers.{i}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (7168,), "post_attention_layernorm": (7168,),
                "self_attn.q_a_proj": (1536, 7168), "self_attn.q_a_layernorm": (1536,),
                "self_attn.q_b_proj": (12_288, 1536),
                "self_attn.kv_a_proj_with_mqa": (576, 7168), "self_attn.kv_a_layernorm": (512,),
                "self_attn.kv_b_proj": (16_384, 512), "self_attn.o_proj": (7168, 8192),
                "mlp.gate_proj": (14_336, 7168), "mlp.up_proj": (14_336, 7168),
                "mlp.down_proj": (7168, 14_336),
            }.items()
        }  # fmt: skip
    assert drafter_checkpoint.drafter_tensors(DSparkConfig()) == want


@pytest.mark.parametrize("confidence_head", [True, False])
def test_round_trip(tmp_path: Path, confidence_head: bool) -> None:
    config = dataclasses.replace(SMALL, confidence_head=confidence_head)
    first = random_drafter(config, 3)
    drafter_checkpoint.save(first, tmp_path / "new")
    stored = load_file(tmp_path / "new" / FILE)
    assert {n: tuple(t.shape) for n, t in stored.items()} == drafter_checkpoint.drafter_tensors(
        config
    )
    assert {t.dtype for t in stored.values()} == {torch.bfloat16}
    loaded = drafter_checkpoint.load(tmp_path / "new")
    assert_same_weights(loaded, first)
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["config.json", FILE]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_load_in_another_type(folder: Path, drafter: DSparkDrafter, dtype: torch.dtype) -> None:
    loaded = drafter_checkpoint.load(folder, dtype=dtype)
    assert_same_weights(loaded, drafter)
    wide = torch.promote_types(dtype, torch.float32)
    for name, value in loaded.named_parameters():
        assert value.dtype is (wide if name.startswith("confidence_head") else dtype), name


def test_loaded_drafter_drafts_the_same(folder: Path, drafter: DSparkDrafter) -> None:
    target = random_model(K3Config.micro(), 0)
    taps = {i: torch.randn(4, 64) for i in SMALL.target_layer_ids}
    drafts = []
    for one in (drafter, drafter_checkpoint.load(folder)):
        state = one.new_state()
        one.write_context(taps, state)
        drafts.append(one.draft(9, state, target))
    assert all(map(torch.equal, *drafts))


def test_copies_of_the_targets_tensors_are_passed_over(
    folder: Path, drafter: DSparkDrafter
) -> None:
    copies = {name: torch.ones(64, 64).half() for name in drafter_checkpoint.TARGET_COPIES}
    edit(folder, lambda t: t.update(copies))
    assert_same_weights(drafter_checkpoint.load(folder), drafter)
    edit(folder, lambda t: t.update({"embed_tokens.weight": torch.ones(32, 64)}))
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight has shape \(32, 64\), exp"):
        drafter_checkpoint.load(folder)


def test_confidence_head_may_be_float32(folder: Path, drafter: DSparkDrafter) -> None:
    edit(folder, lambda t: t.update({n: v.float() for n, v in t.items() if "confidence" in n}))
    assert_same_weights(drafter_checkpoint.load(folder), drafter)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), f"{NORM} is missing"),
        (lambda t: t.pop(CONFIDENCE), f"{CONFIDENCE} is missing"),
        (lambda t: t.update({"fc.weight": t.pop("context_proj.weight")}),
         r"\n  context_proj\.weight is missing\n  fc\.weight is not part of this drafter"),
        (lambda t: t.update({"layers.2.mlp.up_proj.weight": torch.ones(1).bfloat16()}),
         r"layers\.2\.mlp\.up_proj\.weight is not part"),
        (lambda t: t.update({"model." + NORM: t[NORM].clone()}), f"model.{NORM} is not part"),
        (lambda t: t.update({W2: t[W2].T}), rf"{W2} has shape \(64, 64\)"),
        (lambda t: t.update({NORM: torch.ones(63).bfloat16()}),
         rf"{NORM} has shape \(63,\), expected \(64,\)"),
        (lambda t: t.update({NORM: torch.ones(64)}), f"{NORM} is F32, expected BF16"),
        (lambda t: t.update({CONFIDENCE: t[CONFIDENCE].half()}),
         f"{CONFIDENCE} is F16, expected BF16 or F32"),
    ],
)  # fmt: skip
def test_wrong_tensor_is_named(tmp_path: Path, change, message: str) -> None:
    config = dataclasses.replace(SMALL, markov_rank=32) if W2 in message else SMALL
    if config is not SMALL:
        message = message.replace(r"\(64, 64\)", r"\(32, 64\), expected \(64, 32\)")
    drafter_checkpoint.save(random_drafter(config, 3), tmp_path)
    edit(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        drafter_checkpoint.load(tmp_path)


def test_all_faults_are_named_at_once(folder: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[NORM]
        tensors["stray"] = torch.ones(1)
        tensors[W2] = tensors[W2].float()

    edit(folder, spoil)
    with pytest.raises(CheckpointError) as caught:
        drafter_checkpoint.load(folder)
    for part in (f"{NORM} is missing", "stray is not part", f"{W2} is F32"):
        assert part in str(caught.value)


def test_head_that_the_configuration_denies_is_explained(folder: Path) -> None:
    dataclasses.replace(SMALL, confidence_head=False).save(folder)
    with pytest.raises(CheckpointError, match="enable_confidence_head false, but the head is"):
        drafter_checkpoint.load(folder)


def test_folder_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no .*config\.json"):
        drafter_checkpoint.load(tmp_path)
    checkpoint.save(random_model(K3Config.micro(), 0), tmp_path)
    with pytest.raises(ConfigError, match="model_type is 'kimi_linear'"):
        drafter_checkpoint.load(tmp_path)
    SMALL.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"(?s)context_proj\.weight is missing.*output_attn"):
        drafter_checkpoint.load(tmp_path)
    (tmp_path / FILE).write_bytes(b"half a fi")
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors"):
        drafter_checkpoint.load(tmp_path)
    (tmp_path / FILE).unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        drafter_checkpoint.load(tmp_path)


def test_shards_load_and_do_not_outlive_a_save(folder: Path, drafter: DSparkDrafter) -> None:
    tensors = load_file(folder / FILE)
    parts = list(tensors)[:10], list(tensors)[10:]
    weight_map = {}
    for number, names in enumerate(parts, 1):
        shard = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, folder / shard)
        weight_map |= dict.fromkeys(names, shard)
    (folder / FILE).unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert_same_weights(drafter_checkpoint.load(folder), drafter)
    other = random_drafter(SMALL, 5)
    drafter_checkpoint.save(other, folder)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", FILE]
    assert_same_weights(drafter_checkpoint.load(folder), other)


def test_failed_save_leaves_the_old_drafter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    def disk_full(tensors, path, **options):
        Path(path).write_bytes(b"half a fi")
        raise OSError("no space left on device")

    monkeypatch.setattr(drafter_checkpoint, "save_file", disk_full)
    with pytest.raises(OSError, match="no space left"):
        drafter_checkpoint.save(random_drafter(SMALL, 5), folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_files_can_be_read_by_whoever_may_read_the_folder(folder: Path) -> None:
    modes = {p.stat().st_mode for p in folder.iterdir()}
    plain = folder / "plain"
    plain.touch()
    assert modes == {plain.stat().st_mode}
