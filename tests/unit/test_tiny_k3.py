"""The checkpoint that ships with the lab: small, complete, trained, and as its provenance says."""

from __future__ import annotations

import gzip
import hashlib
import json
import math

import jinja2
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch.nn import functional as F

from kimik3_lab.config import K3Config
from kimik3_lab.paths import data_dir, default_model_dir
from kimik3_lab.reference import checkpoint
from kimik3_lab.reference.balancing import expert_load, load_statistics
from kimik3_lab.reference.model import K3ForCausalLM
from kimik3_lab.reference.state import SequenceMixer

torch.set_num_threads(1)
FOLDER = default_model_dir()
#: A held-out file of ordinary code, about 6 kB.
SAMPLE = data_dir() / "held_out" / "sched.py"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def tokenizer_config() -> dict:
    return json.loads((FOLDER / "tokenizer_config.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model() -> K3ForCausalLM:
    return checkpoint.load(FOLDER)


@pytest.fixture(scope="module")
def training() -> dict:
    runs = json.loads((FOLDER / "training.json").read_text(encoding="utf-8"))["runs"]
    return {run["name"]: run for run in runs}


def test_folder_is_small_and_as_its_provenance_says() -> None:
    paths = {p.relative_to(FOLDER).as_posix(): p for p in FOLDER.rglob("*") if p.is_file()}
    sizes = {name: path.stat().st_size for name, path in paths.items()}
    assert sum(sizes.values()) <= 32 * 2**20
    assert max(sizes.values()) <= 15 * 2**20
    listed = json.loads(paths.pop("PROVENANCE.json").read_text(encoding="utf-8"))["files"]
    assert listed.keys() == paths.keys()
    for name, path in paths.items():
        data = path.read_bytes()
        found = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        assert found == listed[name], name


def test_it_has_the_shape_of_the_family(model: K3ForCausalLM) -> None:
    config = model.config
    assert config == K3Config.tiny()
    assert config.num_hidden_layers % config.attn_res_block_size, "the last block is partial"
    assert config.mla_layer_ids[-2:] == (config.num_hidden_layers - 2, config.num_hidden_layers - 1)
    assert config.num_experts >= 32 and config.num_experts_per_token == 4


def test_experts_lie_there_in_mxfp4_and_the_rest_does_not() -> None:
    types: dict[str, set[str]] = {"experts": set(), "rest": set()}
    for shard in FOLDER.glob("model-*.safetensors"):
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - a safetensors file is not a dict
                kind = "experts" if ".experts." in name else "rest"
                types[kind].add(file.get_slice(name).get_dtype())
    assert types == {"experts": {"U8"}, "rest": {"BF16", "F32"}}


def test_held_out_code_takes_fewer_bits_than_gzip(
    model: K3ForCausalLM, tokenizer: Tokenizer
) -> None:
    data = SAMPLE.read_bytes()
    ids = [0, *tokenizer.encode(data.decode()).ids, 1]
    logits = model(torch.tensor(ids[:-1]), SequenceMixer(model.new_state()))
    nats = F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum")
    bits_per_byte = float(nats) / math.log(2) / len(data)
    compressed = 8 * len(gzip.compress(data, 9, mtime=0)) / len(data)
    assert bits_per_byte < 1.8 < compressed


def test_it_completes_code(model: K3ForCausalLM, tokenizer: Tokenizer) -> None:
    ids = [0, *tokenizer.encode("import os\nimport sys\n\n\nclass Counter:\n    def __init__(").ids]
    text = tokenizer.decode(model.generate(ids, 24))
    assert text.startswith("self"), text


def test_the_training_curve_is_complete(training: dict) -> None:
    balanced, unbalanced = training["balanced"], training["unbalanced"]
    assert balanced["settings"]["seed"] == unbalanced["settings"]["seed"]
    assert balanced["settings"]["balancing"] and not unbalanced["settings"]["balancing"]
    curve = balanced["curve"]
    assert curve[-1]["step"] == balanced["settings"]["steps"]
    assert curve[0]["loss"] == pytest.approx(math.log(K3Config.tiny().vocab_size), abs=0.5)
    assert curve[-1]["loss"] < 3.0
    assert balanced["held_out"][-1]["held_out_bits_per_byte"] < 1.6
    assert "H200" in balanced["provenance"]["device"]


def test_balancing_evened_out_the_load(training: dict) -> None:
    columns = training["balanced"]["load_columns"]
    worst = columns.index("max_over_mean")
    last = training["unbalanced"]["curve"][-1]["step"]

    def mean_over_layers(run: dict) -> float:
        entry = next(entry for entry in run["curve"] if entry["step"] >= last)
        return sum(layer[worst] for layer in entry["load"]) / len(entry["load"])

    assert mean_over_layers(training["balanced"]) < 0.6 * mean_over_layers(training["unbalanced"])


def test_the_shipped_bias_spreads_held_out_tokens(
    model: K3ForCausalLM, tokenizer: Tokenizer
) -> None:
    """Without it the router is as skewed as training left it."""
    ids = torch.tensor([0, *tokenizer.encode(SAMPLE.read_text(encoding="utf-8")).ids[:600]])
    routers = [model.model.layers[i].block_sparse_moe.gate for i in model.config.moe_layer_ids]
    seen: list[torch.Tensor] = []
    hooks = [
        r.register_forward_hook(lambda m, i, out: seen.append(out.expert_ids)) for r in routers
    ]
    try:
        model(ids, SequenceMixer(model.new_state()))
    finally:
        for hook in hooks:
            hook.remove()
    loads = [load_statistics(expert_load(x, model.config.num_experts)) for x in seen]
    assert sum(load.entropy for load in loads) / len(loads) > 0.9
    assert all(router.e_score_correction_bias.std() > 0.01 for router in routers)


def test_special_tokens_have_the_ids_of_every_file(tokenizer: Tokenizer, tokenizer_config) -> None:
    config = K3Config.load(FOLDER)
    generation = json.loads((FOLDER / "generation_config.json").read_text(encoding="utf-8"))
    for name, want in (("bos", 0), ("eos", 1), ("pad", 2)):
        token = tokenizer_config[f"{name}_token"]
        assert token == f"<|{name}|>"
        assert tokenizer.token_to_id(token) == want
        assert getattr(config, f"{name}_token_id") == generation[f"{name}_token_id"] == want
    for token_id, entry in tokenizer_config["added_tokens_decoder"].items():
        assert tokenizer.id_to_token(int(token_id)) == entry["content"]
    assert tokenizer.get_vocab_size() == config.vocab_size == 2048
    assert tokenizer_config["model_max_length"] == config.max_position_embeddings


@pytest.mark.parametrize(
    "text",
    ["Hello, world!", "def f(x):\n    return x + 1\n", "naïve 日本語 🙂 \x00\t", " a  b ", ""],
)
def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < 2048 for i in ids)
    assert not set(ids) & {0, 1, 2}, "plain text must not produce special tokens"


def test_tokenizer_has_learned_to_compress(tokenizer: Tokenizer) -> None:
    text = SAMPLE.read_text(encoding="utf-8")
    assert len(tokenizer.encode(text).ids) < 0.4 * len(text)


def test_chat_template_continues_what_was_said(tokenizer: Tokenizer, tokenizer_config) -> None:
    def raise_exception(message: str):
        raise jinja2.TemplateError(message)

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(tokenizer_config["chat_template"])

    def render(messages, **options) -> str:
        specials = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
        return template.render(
            messages=messages, raise_exception=raise_exception, **specials, **options
        )

    messages = [
        {"role": "system", "content": "Be brief."},  # means nothing to a base model
        {"role": "user", "content": "def fib(n):\n"},
        {"role": "assistant", "content": "    return n\n"},
        {"role": "user", "content": "\n\ndef f(x):\n    "},
    ]
    text = render(messages, add_generation_prompt=True)
    assert text == "<|bos|>def fib(n):\n    return n\n\n\ndef f(x):" == render(messages)
    assert [i for i in tokenizer.encode(text).ids if i < 3] == [0]
    with pytest.raises(jinja2.TemplateError, match="got tool"):
        render([{"role": "tool", "content": ""}])
