from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_support import BOS, byte_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from kimik3_lab.serving.server import Detokenizer, Tokenizer, TokenizerError

BYTES = byte_tokenizer()


def pieces(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.step(token_id) for token_id in token_ids), detokenizer.flush()]


@given(st.text())
def test_text_survives_encode_and_decode(text: str) -> None:
    assert BYTES.decode(BYTES.encode(text)) == text


@given(st.lists(st.integers(0, BYTES.vocab_size - 1), max_size=40))
def test_pieces_join_to_the_decoded_whole_for_any_tokens(token_ids: list[int]) -> None:
    assert "".join(pieces(BYTES, token_ids)) == BYTES.decode(token_ids)


@given(st.text(max_size=12))
def test_a_character_comes_whole_with_its_last_byte(text: str) -> None:
    *steps, rest = pieces(BYTES, BYTES.encode(text))
    assert all(len(piece) <= 1 for piece in steps)
    if "\ufffd" not in text:
        assert rest == ""
        assert [piece for piece in steps if piece] == list(text)


def test_bytes_that_never_become_a_character_come_at_the_end() -> None:
    euro = BYTES.encode("€")  # three bytes
    assert pieces(BYTES, euro[:2]) == ["", "", "\ufffd"]


def test_invalid_bytes_are_not_held_for_ever() -> None:
    continuation = BYTES.encode("€")[1]  # means nothing without the byte before it
    steps = pieces(BYTES, [continuation] * 10)
    assert steps == ["", *["\ufffd"] * 10]


def test_words_keep_their_spaces_where_the_first_word_is_written_differently() -> None:
    vocab = {"<unk>": 0, "▁the": 1, "▁end": 2, "s": 3}
    backend = Backend(models.WordLevel(vocab, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(backend)
    assert pieces(tokenizer, [1, 2, 3, 1]) == ["the", " end", "s", " the", ""]


def test_special_tokens_add_no_text() -> None:
    token_ids = [BYTES.bos_token_id, *BYTES.encode("hi"), BYTES.eos_token_id]
    assert pieces(BYTES, token_ids) == ["", "h", "i", "", ""]
    assert BYTES.decode(token_ids, skip_special_tokens=False) == "<bos>hi<eos>"


def test_special_tokens_are_added_only_when_asked() -> None:
    tokenizer = byte_tokenizer(adds_bos=True)
    assert tokenizer.encode("a")[0] == tokenizer.bos_token_id == 0
    assert tokenizer.encode("a", add_special_tokens=False) == tokenizer.encode("a")[1:]


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(TokenizerError, match="character 1"):
        BYTES.encode("a\ud800")


# -- chats ---------------------------------------------------------------------------------------


def test_chat_template() -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert BYTES.apply_chat_template(messages) == f"{BOS}user: hi\nassistant:"
    assert BYTES.apply_chat_template(messages, add_generation_prompt=False) == f"{BOS}user: hi\n"


def test_a_template_may_refuse() -> None:
    with pytest.raises(TokenizerError, match="no robots"):
        BYTES.apply_chat_template([{"role": "robot", "content": "beep"}])


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "no chat template"),
        ("{% for %}", "not valid Jinja"),
        ("{{ messages.append(1) }}", "refuses"),  # templates may only write
        ("{{ ''.__class__.__mro__ }}", "refuses"),
    ],
)
def test_bad_templates(template: str | None, words: str) -> None:
    tokenizer = Tokenizer(Backend(models.BPE()), {"chat_template": template})
    with pytest.raises(TokenizerError, match=words):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_named_templates_and_template_file(tmp_path) -> None:
    named = [{"name": "tool", "template": "no"}, {"name": "default", "template": "yes"}]
    assert (
        Tokenizer(Backend(models.BPE()), {"chat_template": named}).apply_chat_template([]) == "yes"
    )
    Backend(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("from a file")
    assert Tokenizer.load(tmp_path).apply_chat_template([]) == "from a file"


# -- files ---------------------------------------------------------------------------------------


def test_load(tmp_path) -> None:
    BYTES._backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    loaded = Tokenizer.load(tmp_path)
    assert (loaded.vocab_size, loaded.bos_token_id, loaded.eos_token_id) == (258, None, 1)
    assert loaded.decode(loaded.encode("é")) == "é"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "no tokenizer at"),
        ({"tokenizer.json": "{"}, "is not a tokenizer"),
        ({"tokenizer.json": None, "tokenizer_config.json": "{"}, "not valid JSON"),
        ({"tokenizer.json": None, "tokenizer_config.json": "[]"}, "JSON object"),
    ],
)
def test_broken_files_are_named(tmp_path, files: dict[str, str | None], words: str) -> None:
    for name, text in files.items():
        if text is None:
            BYTES._backend.save(str(tmp_path / name))
        else:
            (tmp_path / name).write_text(text)
    with pytest.raises(TokenizerError, match=words):
        Tokenizer.load(tmp_path)


def test_the_tokenizer_needs_no_web_framework() -> None:
    code = (
        "import sys; from kimik3_lab.serving.server import Tokenizer;"
        "print(sorted({'fastapi', 'uvicorn', 'pydantic', 'torch'} & set(sys.modules)))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert printed.stdout == "[]\n", printed.stderr
