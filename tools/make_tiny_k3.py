"""Make ``data/tiny-k3``: a K3 small enough for a laptop, with random weights and a real tokenizer.

    python tools/make_tiny_k3.py [--output data/tiny-k3] [--seed 0]

The weights are drawn by ``kimik3_lab.reference.initialization``: the model computes exactly what
Kimi K3 computes, and knows nothing. The tokenizer is a byte-level BPE of 1024 tokens, trained on
the Python standard library (its tests left out), so that text and code split into plausible pieces.
The same seed, torch and Python versions give the same bytes; PROVENANCE.json records them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from kimik3_lab.config import K3Config
from kimik3_lab.reference import checkpoint
from kimik3_lab.reference.initialization import random_model

REPOSITORY = Path(__file__).resolve().parents[1]
SEED = 0
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
ROLES = ("system", "user", "assistant")
#: In id order: bos 0, eos 1, pad 2, then a marker for each role.
SPECIAL_TOKENS = (BOS, EOS, PAD, *(f"<|{role}|>" for role in ROLES))
#: Folders that are not the library's own code, and encodings, which are tables rather than text.
NOT_CORPUS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings"}
MAX_BYTES = 5_000_000

# A turn is its role's marker, its text and <|eos|>: the model ends a turn as it ends a text.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('role must be system, user or assistant, got ' ~ message.role) -}}
{%- endif -%}
{{- '<|' ~ message.role ~ '|>' ~ message.content ~ eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""


def corpus_files() -> list[Path]:
    """Return the Python standard library's own modules, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (path for path in root.rglob("*.py"))
    kept = [path for path in files if not NOT_CORPUS & set(path.relative_to(root).parts)]
    return sorted(kept, key=lambda path: path.relative_to(root).as_posix())


def read_corpus(files: list[Path], digest: Any) -> Iterator[str]:
    """Yield the text of each file and feed its bytes to ``digest``."""
    for path in files:
        data = path.read_bytes()
        digest.update(data)
        yield data.decode("utf-8", errors="replace")


def train_tokenizer(config: K3Config, texts: Iterator[str]) -> Tokenizer:
    """Train the byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    ids = [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS]
    expected = [config.bos_token_id, config.eos_token_id, config.pad_token_id]
    if ids[:3] != expected or tokenizer.get_vocab_size() != config.vocab_size:
        raise SystemExit(f"tokenizer does not fit the configuration: special tokens got ids {ids}")
    return tokenizer


def tokenizer_config(config: K3Config) -> dict[str, Any]:
    """Return what transformers and the lab's server read beside tokenizer.json."""
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


def write_json(path: Path, body: dict[str, Any]) -> None:
    """Write readable JSON."""
    path.write_text(json.dumps(body, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def make(folder: Path, seed: int) -> None:
    """Fill ``folder`` with everything but its PROVENANCE.json, then write that too."""
    config = K3Config.tiny()
    files = corpus_files()
    digest = hashlib.sha256()
    tokenizer = train_tokenizer(config, read_corpus(files, digest))
    checkpoint.save(random_model(config, seed), folder)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    write_json(folder / "tokenizer_config.json", tokenizer_config(config))
    special_ids = {
        name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    write_json(folder / "generation_config.json", {**special_ids, "do_sample": False})

    made = sorted(path for path in folder.iterdir() if path.name != "PROVENANCE.json")
    provenance = {
        "what": "Kimi K3 at toy size: random weights, trained tokenizer. It has learned nothing.",
        "made_by": "tools/make_tiny_k3.py",
        "seed": seed,
        "weights": "kimik3_lab.reference.initialization.random_model(K3Config.tiny(), seed)",
        "tokenizer_corpus": {
            "what": "standard library of CPython, without tests and encodings (PSF-2.0)",
            "python": platform.python_version(),
            "files": len(files),
            "bytes": sum(path.stat().st_size for path in files),
            "sha256": digest.hexdigest(),
        },
        "packages": {name: version(name) for name in ("torch", "safetensors", "tokenizers")},
        "license": "Apache-2.0",
        "files": {
            path.name: {
                "bytes": path.stat().st_size,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            }
            for path in made
        },
    }
    write_json(folder / "PROVENANCE.json", provenance)
    total = sum(path.stat().st_size for path in folder.iterdir())
    if total > MAX_BYTES:
        raise SystemExit(f"{folder} has {total} bytes, more than {MAX_BYTES}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=REPOSITORY / "data" / "tiny-k3")
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    output: Path = options.output
    output.mkdir(parents=True, exist_ok=True)
    # Made beside its place and moved file by file, so that a failure leaves the old folder whole.
    with tempfile.TemporaryDirectory(prefix=".making-", dir=output.parent) as scratch:
        staging = Path(scratch)
        make(staging, options.seed)
        for path in sorted(staging.iterdir()):
            os.replace(path, output / path.name)
    total = sum(path.stat().st_size for path in output.iterdir())
    sys.stdout.write(f"{output}: {total:,} bytes\n")


if __name__ == "__main__":
    main()
