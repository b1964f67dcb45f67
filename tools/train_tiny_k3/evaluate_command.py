"""``evaluate``: score a trained model and its drafter, and what they have to beat.

Three parts, which can run on different machines and write into one file: ``bits`` (the target,
packed and not; quick on a GPU), ``baselines`` (compressors and n-grams; CPU) and ``acceptance``
(decoding with drafts; CPU).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch

from kimik3_lab.provenance import provenance
from kimik3_lab.reference import checkpoint
from kimik3_lab.reference.evaluation import document_bits
from tools.train_tiny_k3.acceptance import by_quarter, choose_prompts, measure_all, summarize
from tools.train_tiny_k3.baselines import compressors, gzip_bits, kneser_ney_bits
from tools.train_tiny_k3.command_line import command_line
from tools.train_tiny_k3.corpus import (
    HELD_OUT_FOLDER,
    MANIFEST,
    Document,
    held_out_documents,
    open_corpus,
)
from tools.train_tiny_k3.rollouts import run_all_experts
from tools.train_tiny_k3.tokenizer import encode_documents, load_tokenizer

__all__ = ["add_arguments", "run"]

PARTS = ("bits", "baselines", "acceptance")
NGRAM_ORDER = 5
DEFINITION = (
    "bits per byte: -log2 of the probability of every token of a held-out file, the first "
    "included, given the bos token and the file's tokens before it (windows as in "
    "kimik3_lab.reference.evaluation.document_bits; bos and eos are not counted), summed over all "
    "files, over the sum of their sizes in UTF-8"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--target", type=Path, required=True, help="folder of the packaged target")
    parser.add_argument("--unpacked", type=Path, help="the same weights with experts in bfloat16")
    parser.add_argument("--drafter", type=Path, help="default: drafter/ below the target")
    parser.add_argument("--corpus", type=Path, help="Lib folder or its tar file (baselines)")
    parser.add_argument("--manifest", type=Path, default=MANIFEST)
    parser.add_argument("--held-out", type=Path, default=HELD_OUT_FOLDER)
    parser.add_argument("--out", type=Path, required=True, help="JSON file; parts are merged in")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--batch-tokens", type=int, default=32_768)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--float64-prompts", type=int, default=4)
    parser.add_argument("--workers", type=int, default=1)


def run(options: argparse.Namespace) -> None:
    documents = held_out_documents(options.held_out, options.manifest)
    body: dict[str, Any] = {}
    if options.out.is_file():
        body = json.loads(options.out.read_text(encoding="utf-8"))
    body.setdefault("what", "the trained tiny K3 and its drafter on text that neither has seen")
    body.setdefault("definition", DEFINITION)
    parts = {"bits": _bits, "baselines": _baselines, "acceptance": _acceptance}
    for part in options.parts:
        body[part] = parts[part](options, documents)
        _write(options.out, body)  # after each part: a later one may fail
    sys.stdout.write(_summary(body) + "\n")


def _write(path: Path, body: dict[str, Any]) -> None:
    scratch = path.with_name(path.name + ".partial")
    scratch.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    os.replace(scratch, path)


def _bits(options: argparse.Namespace, documents: list[Document]) -> dict[str, Any]:
    encoded = encode_documents(load_tokenizer(options.target), documents)
    sizes = [len(document.text.encode()) for document in documents]
    folders = {"packed": options.target}
    if options.unpacked is not None:
        folders["unpacked"] = options.unpacked
    found: dict[str, list[float]] = {}
    for name, folder in folders.items():
        model = run_all_experts(checkpoint.load(folder, device=options.device))
        found[name] = document_bits(
            model, encoded, window=options.window, batch_tokens=options.batch_tokens
        )
    per_byte = {name: math.fsum(bits) / sum(sizes) for name, bits in found.items()}
    body: dict[str, Any] = {
        "provenance": provenance(device=_device(options.device), command=command_line()),
        "window": options.window,
        "files": len(documents),
        "bytes": sum(sizes),
        "tokens": sum(map(len, encoded)),
        "bits_per_byte": {name: round(value, 5) for name, value in per_byte.items()},
    }
    body["packing"] = _packing(options.target, per_byte)
    body["bits_of_file"] = {
        document.path: round(bits, 2)
        for document, bits in zip(documents, found["packed"], strict=True)
    }
    return body


def _packing(target: Path, per_byte: dict[str, float]) -> dict[str, Any]:
    """Compare packed experts with their masters: here, or as ``package`` did, who had them."""
    if "unpacked" in per_byte:
        packed, unpacked, how = per_byte["packed"], per_byte["unpacked"], "as bits_per_byte"
    else:
        checks = json.loads((target / "PROVENANCE.json").read_text(encoding="utf-8"))["checks"]
        packed = checks["held_out_bits_per_byte"]
        unpacked = checks["held_out_bits_per_byte_of_the_masters"]
        how = f"by `package`, which had the masters: {checks['context']}"
    return {
        "packed": round(packed, 5),
        "unpacked": round(unpacked, 5),
        "costs": round(packed / unpacked - 1, 6),
        "measured": how,
    }


def _baselines(options: argparse.Namespace, documents: list[Document]) -> dict[str, Any]:
    if options.corpus is None:
        raise SystemExit("baselines are trained on the training text: give its --corpus")
    held_out = [document.text.encode() for document in documents]
    train = [
        document.text.encode() for document in open_corpus(options.corpus, options.manifest).train
    ]
    ngrams = kneser_ney_bits(train, held_out, NGRAM_ORDER)
    size = sum(map(len, held_out))
    return {
        "provenance": provenance(command=command_line()),
        "compared": ["gzip_together", f"kneser_ney_{NGRAM_ORDER}"],
        "bits_per_byte": {
            name: round(value, 5)
            for name, value in {
                **compressors(train, held_out),
                f"kneser_ney_{NGRAM_ORDER}": math.fsum(ngrams) / size,
            }.items()
        },
        "training_bytes": sum(map(len, train)),
        "gzip_bits_of_file": {
            document.path: gzip_bits(text)
            for document, text in zip(documents, held_out, strict=True)
        },
        "kneser_ney_bits_of_file": {
            document.path: round(bits, 2) for document, bits in zip(documents, ngrams, strict=True)
        },
    }


def _acceptance(options: argparse.Namespace, documents: list[Document]) -> dict[str, Any]:
    drafter = options.drafter or options.target / "drafter"
    tokenizer = load_tokenizer(options.target)
    bos = json.loads((options.target / "config.json").read_text(encoding="utf-8"))["bos_token_id"]
    least = 16 * options.prompt_tokens
    long = [document for document in documents if len(document.text) >= least]
    prompts = choose_prompts(long, tokenizer, bos, options.prompts, options.prompt_tokens)
    block = json.loads((drafter / "config.json").read_text(encoding="utf-8"))["block_size"]
    measured = measure_all(
        options.target, drafter, prompts, options.new_tokens, workers=options.workers
    )
    few = prompts[:: max(len(prompts) // max(options.float64_prompts, 1), 1)]
    few = few[: options.float64_prompts]
    double = measure_all(
        options.target,
        drafter,
        few,
        options.new_tokens,
        dtype=torch.float64,
        workers=options.workers,
    )
    return {
        "provenance": provenance(command=command_line()),
        "how": (
            f"greedy, K={block}, float32 on a CPU, {options.prompt_tokens} prompt tokens and up to "
            f"{options.new_tokens} new ones"
        ),
        "settings": {
            "prompts": options.prompts,
            "prompt_tokens": options.prompt_tokens,
            "new_tokens": options.new_tokens,
            "least_characters": least,
        },
        **summarize(measured, block),
        "tokens_per_verify_by_quarter": by_quarter(measured, options.new_tokens),
        "float64": summarize(double, block),
        "accepted_of_prompt": [
            {
                "path": prompt.path,
                "line": prompt.line,
                "accepted": "".join(map(str, one.accepted)),
                "same": one.same,
            }
            for prompt, one in zip(prompts, measured, strict=True)
        ],
    }


def _device(name: str) -> str:
    return torch.cuda.get_device_name() if name == "cuda" else name


def _summary(body: dict[str, Any]) -> str:
    lines = []
    for part in ("bits", "baselines"):
        for name, value in body.get(part, {}).get("bits_per_byte", {}).items():
            lines.append(f"{name:24} {value:.4f} bits per byte")
    if "bits" in body:
        lines.append(f"packing costs {100 * body['bits']['packing']['costs']:.3f} %")
    if "acceptance" in body:
        found = body["acceptance"]
        lines.append(
            f"{found['tokens_per_verify']:.3f} tokens per verify; "
            f"{found['prompts_same_as_without_drafts']} of {found['prompts']} prompts as without "
            f"drafts; rates by position {found['conditional_rates']}"
        )
    return "\n".join(lines)
