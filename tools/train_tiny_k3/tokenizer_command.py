"""``tokenizer``: train the tokenizer on the training files and write it into a folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.train_tiny_k3 import corpus, shape, tokenizer

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--corpus", type=Path, required=True, help="Lib folder or tar file of it")
    parser.add_argument("--out", type=Path, required=True, help="folder; made if need be")


def run(options: argparse.Namespace) -> None:
    """Train and write."""
    config = shape.target_config()
    text = corpus.open_corpus(options.corpus)
    trained = tokenizer.train_tokenizer(config, text.train)
    tokenizer.save_tokenizer(trained, config, options.out)
    ids = tokenizer.encode_documents(trained, text.held_out)
    size = sum(len(document.text.encode()) for document in text.held_out)
    sys.stdout.write(
        f"{config.vocab_size} tokens; {size / sum(map(len, ids)):.2f} bytes a token on held-out\n"
    )
