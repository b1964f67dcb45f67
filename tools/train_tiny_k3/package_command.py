"""``package``: make a model folder of a finished training, and check that it is the same model."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from kimik3_lab.provenance import provenance
from kimik3_lab.reference import checkpoint
from tools.train_tiny_k3 import corpus, packaging, scoring, tokenizer
from tools.train_tiny_k3.command_line import command_line
from tools.train_tiny_k3.forward import load_target
from tools.train_tiny_k3.train_command import CURVE, STATE
from tools.train_tiny_k3.training import to_compute_dtype

__all__ = ["add_arguments", "run"]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
LENGTH = 2048


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--training", type=Path, required=True, help="folder of `train`")
    parser.add_argument("--contrast", type=Path, help="folder of a training without balancing")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of `tokenizer`")
    parser.add_argument("--out", type=Path, required=True, help="replaced if it exists")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--documents", type=int, help="held-out files to score; all by default")


def run(options: argparse.Namespace) -> None:
    """Write, check, and only then put in place."""
    state = torch.load(options.training / STATE, map_location="cpu", weights_only=True)
    if state["step"] < state["settings"]["steps"]:
        raise SystemExit(
            f"{options.training} stopped after {state['step']} of {state['settings']['steps']} "
            "steps: finish it with `train`"
        )
    model = packaging.model_of_state(state)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".packaging-", dir=options.out.parent))
    try:
        staging = scratch / "model"
        checkpoint.save(model, staging, max_shard_bytes=packaging.SHARD_BYTES)
        for name in TOKENIZER_FILES:
            shutil.copyfile(options.tokenizer / name, staging / name)
        shutil.copyfile(corpus.MANIFEST, staging / corpus.MANIFEST.name)
        runs = [json.loads((options.training / CURVE).read_text(encoding="utf-8"))]
        if options.contrast is not None:
            runs.append(json.loads((options.contrast / CURVE).read_text(encoding="utf-8")))
        packaging.write_json(staging / "training.json", {"runs": runs}, indent=None)
        checks = _check(options, model, staging)
        packaging.write_json(
            staging / "PROVENANCE.json",
            {
                "what": "Kimi K3 at toy size, trained on Python's standard library",
                "made_by": "python -m tools.train_tiny_k3 package",
                "checks": checks,
                "settings": state["settings"],
                "made_on": provenance(device=str(options.device), command=command_line()),
                "files": packaging.file_entries(staging),
            },
        )
        packaging.install(staging, options.out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    sys.stdout.write(json.dumps(checks) + "\n")


def _check(
    options: argparse.Namespace, masters: Any, staging: Path
) -> dict[str, float | int | str]:
    """Weights bit by bit, then bits per byte of the packed model and of the masters."""
    compared = packaging.check_weights(masters, staging)
    dtype = getattr(torch, options.dtype)
    documents = corpus.held_out_documents()[: options.documents]
    size = sum(len(document.text.encode()) for document in documents)
    ids = tokenizer.encode_documents(tokenizer.load_tokenizer(staging), documents)
    rows = scoring.document_rows(ids, size, masters.config, LENGTH)
    packed = scoring.bits_per_byte(load_target(staging, options.device, dtype), rows, 8)
    # The same weights before their experts were packed: what four bits cost.
    to_compute_dtype(masters, dtype)
    unpacked = scoring.bits_per_byte(masters.to(options.device), rows, 8)
    return {
        "tensors_equal_to_the_rounded_masters": compared,
        "held_out_bytes": size,
        "held_out_bits_per_byte": round(packed, 5),
        "held_out_bits_per_byte_of_the_masters": round(unpacked, 5),
        "context": f"windows of {LENGTH} tokens, none seeing the last; eos scored too",
    }
