"""The checkpoint that ships with the lab: small, complete, and what its provenance says."""

from __future__ import annotations

import hashlib
import json

import jinja2
import pytest
import torch
from tokenizers import Tokenizer

from kimik3_lab.config import K3Config
from kimik3_lab.paths import default_model_dir
from kimik3_lab.reference import checkpoint
from kimik3_lab.reference.initialization import random_model

torch.set_num_threads(1)
FOLDER = default_model_dir()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def tokenizer_config() -> dict:
    return json.loads((FOLDER / "tokenizer_config.json").read_text(encoding="utf-8"))


def test_folder_is_small_and_as_its_provenance_says() -> None:
    paths = {path.name: path for path in FOLDER.iterdir()}
    assert sum(path.stat().st_size for path in paths.values()) <= 5_000_000
    listed = json.loads(paths.pop("PROVENANCE.json").read_text(encoding="utf-8"))["files"]
    assert listed.keys() == paths.keys()
    for name, path in paths.items():
        data = path.read_bytes()
        found = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        assert found == listed[name], name


def test_model_is_the_random_tiny_k3() -> None:
    model = checkpoint.load(FOLDER)
    assert model.config == K3Config.tiny()
    seed = json.loads((FOLDER / "PROVENANCE.json").read_text(encoding="utf-8"))["seed"]
    fresh = random_model(K3Config.tiny(), seed).state_dict()
    for name, value in model.state_dict().items():
        # One step of bfloat16, should another machine's random normals differ in the last bit.
        torch.testing.assert_close(value, fresh[name], rtol=2**-7, atol=1e-6, msg=name)


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
    assert tokenizer.get_vocab_size() == config.vocab_size == 1024
    assert tokenizer_config["model_max_length"] == config.max_position_embeddings


@pytest.mark.parametrize(
    "text",
    ["Hello, world!", "def f(x):\n    return x + 1\n", "naïve 日本語 🙂 \x00\t", " a  b ", ""],
)
def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < 1024 for i in ids)
    assert not set(ids) & set(range(6)), "plain text must not produce special tokens"


def test_tokenizer_has_learned_to_compress(tokenizer: Tokenizer) -> None:
    text = "The function returns a list of strings, or None if there is no such file.\n" * 3
    assert len(tokenizer.encode(text).ids) < 0.5 * len(text)


def test_chat_template(tokenizer: Tokenizer, tokenizer_config) -> None:
    def raise_exception(message: str):
        raise jinja2.TemplateError(message)

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(tokenizer_config["chat_template"])

    def render(messages, **options) -> str:
        specials = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
        return template.render(
            messages=messages, raise_exception=raise_exception, **specials, **options
        )

    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi\n"}]
    text = render(messages, add_generation_prompt=True)
    assert text == "<|bos|><|system|>Be brief.<|eos|><|user|> Hi\n<|eos|><|assistant|>"
    assert render(messages) == text.removesuffix("<|assistant|>")
    ids = tokenizer.encode(text).ids
    assert [i for i in ids if i < 6] == [0, 3, 1, 4, 1, 5]
    with pytest.raises(jinja2.TemplateError, match="got tool"):
        render([{"role": "tool", "content": ""}])
