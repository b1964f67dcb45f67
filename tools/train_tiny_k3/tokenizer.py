"""The tokenizer: a byte-level BPE of the training files, and a template that completes code.

Needs ``tokenizers``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from kimik3_lab.config import K3Config
from tools.train_tiny_k3.corpus import Document

__all__ = [
    "SPECIAL_TOKENS",
    "encode_documents",
    "load_tokenizer",
    "save_tokenizer",
    "train_tokenizer",
]

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
#: In id order: bos 0, eos 1, pad 2.
SPECIAL_TOKENS = (BOS, EOS, PAD)

# A base model has never seen a turn of a chat, only files. So a chat becomes the beginning of a
# file, all turns one after the other, and the model's answer is how the file goes on. Blanks and
# line ends after the last turn are taken off: a token holds a line end *and* the indentation after
# it, and a prompt that ends in a bare line end tells the model that the next line has none.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('role must be system, user or assistant, got ' ~ message.role) -}}
{%- endif -%}
{%- if message.role != 'system' -%}
{{- message.content.rstrip() if loop.last else message.content -}}
{%- endif -%}
{%- endfor -%}
"""


def train_tokenizer(config: K3Config, documents: Iterable[Document]) -> Tokenizer:
    """Train it to ``config.vocab_size`` tokens.

    Raises
    ------
    ValueError
        If the special tokens did not get the ids that the configuration names, or the text is too
        small for so many tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    ids = [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS]
    expected = [config.bos_token_id, config.eos_token_id, config.pad_token_id]
    if ids != expected or tokenizer.get_vocab_size() != config.vocab_size:
        raise ValueError(
            f"expected special tokens {expected} and {config.vocab_size} tokens in all, got {ids} "
            f"and {tokenizer.get_vocab_size()}: is the text too small?"
        )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, config: K3Config, folder: Path) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``generation_config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(config))
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    special = {name: getattr(config, name) for name in names}
    _write_json(folder / "generation_config.json", {**special, "do_sample": False})


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read ``tokenizer.json``."""
    if not (folder / "tokenizer.json").is_file():
        raise FileNotFoundError(f"no tokenizer.json in {folder}: give a folder of `tokenizer`")
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def encode_documents(tokenizer: Tokenizer, documents: Iterable[Document]) -> list[list[int]]:
    """Token ids of each document, without bos and eos."""
    texts = [document.text for document in documents]
    return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]


def _tokenizer_config(config: K3Config) -> dict[str, Any]:
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_position_embeddings,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            str(token_id): {"content": token, "special": True, **flags}
            for token_id, token in enumerate(SPECIAL_TOKENS)
        },
        "chat_template": CHAT_TEMPLATE,
    }


def _write_json(path: Path, body: dict[str, Any]) -> None:
    path.write_text(json.dumps(body, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
