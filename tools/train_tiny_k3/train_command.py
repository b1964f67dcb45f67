"""``train``: train the target model, or go on with a training that was interrupted.

Writes ``training.pt`` (everything to go on with) and ``run.json`` (the curve) into ``--out``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from kimik3_lab.config import K3Config
from kimik3_lab.provenance import provenance
from tools.train_tiny_k3 import corpus, experts, shape, tokenizer
from tools.train_tiny_k3.batches import TokenStream
from tools.train_tiny_k3.command_line import command_line
from tools.train_tiny_k3.scoring import Rows, document_rows
from tools.train_tiny_k3.training import OutOfTime, Settings, Training

__all__ = ["add_arguments", "add_data_arguments", "prepare", "read_data", "run"]

STATE, CURVE = "training.pt", "run.json"


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare where text and tokenizer come from, and how the machine computes."""
    parser.add_argument("--corpus", type=Path, required=True, help="Lib folder or tar file of it")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of `tokenizer`")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--loop-experts", action="store_true", help="do not use torch's grouped product"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_data_arguments(parser)
    defaults = Settings(steps=1)
    parser.add_argument("--out", type=Path, required=True, help="folder; an old training goes on")
    parser.add_argument("--steps", type=int, required=True)
    for name in ("batch_size", "length", "warmup", "seed", "log_every", "score_every"):
        parser.add_argument(_option(name), type=int, default=getattr(defaults, name))
    for name in ("learning_rate", "weight_decay", "dropout"):
        parser.add_argument(_option(name), type=float, default=getattr(defaults, name))
    parser.add_argument("--no-balancing", dest="balancing", action="store_false")
    parser.add_argument("--no-quantize", dest="quantize", action="store_false")
    parser.add_argument("--name", default="balanced", help="of the run, in run.json")
    parser.add_argument("--save-every", type=int, default=500, help="steps between two savings")
    parser.add_argument(
        "--stop-after", type=int, help="stop after this step of the same schedule, for a contrast"
    )
    parser.add_argument("--max-seconds", type=float, help="save and stop with status 3 after this")


def read_data(
    options: argparse.Namespace, config: K3Config, length: int
) -> tuple[TokenStream, Rows]:
    """Read and encode the text: what to train on, and what to score."""
    text = corpus.open_corpus(options.corpus)
    encoder = tokenizer.load_tokenizer(options.tokenizer)
    ids = tokenizer.encode_documents(encoder, text.train)
    stream = TokenStream.from_documents(ids, config.bos_token_id, config.eos_token_id)
    size = sum(len(document.text.encode()) for document in text.held_out)
    held_out = tokenizer.encode_documents(encoder, text.held_out)
    return stream, document_rows(held_out, size, config, length)


def prepare(options: argparse.Namespace, settings: Settings, config: K3Config) -> Training:
    """Make a training on the machine that the options name."""
    torch.set_float32_matmul_precision("high")
    experts.use_grouped_mm(not options.loop_experts)
    stream, held_out = read_data(options, config, settings.length)
    dtype = getattr(torch, options.dtype)
    return Training(config, settings, stream, held_out, device=options.device, dtype=dtype)


def run(options: argparse.Namespace) -> None:
    """Train to the end, or as long as the time allows."""
    names = Settings.__dataclass_fields__
    settings = Settings(**{name: getattr(options, name) for name in names})
    training = prepare(options, settings, shape.target_config())
    state = options.out / STATE
    if state.is_file():
        training.load(state)
        sys.stdout.write(f"going on after step {training.step}\n")
    bar = tqdm(total=settings.steps, initial=training.step, mininterval=2.0, desc=options.name)

    def on_step(training: Training) -> None:
        bar.update()
        if training.curve and training.step % settings.log_every == 1:
            scored = training.scores[-1]["held_out_bits_per_byte"] if training.scores else "-"
            worst = max((layer[0] for layer in training.curve[-1]["load"]), default=0.0)
            bar.set_postfix(loss=training.curve[-1]["loss"], held_out=scored, max_load=worst)
        if training.step % options.save_every == 0:
            training.save(state)

    try:
        training.run(options.stop_after, on_step=on_step, seconds=options.max_seconds)
        score = training.score()
    except OutOfTime as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(3) from error
    finally:
        bar.close()
        training.save(state)
        _write_curve(options, training)
    sys.stdout.write(
        f"{options.name}: {training.step} steps, {training.seconds:.1f} s, "
        f"loss {training.curve[-1]['loss']}, held out {score} bits per byte\n"
    )


def _write_curve(options: argparse.Namespace, training: Training) -> None:
    device = "cpu"
    if training.device.type == "cuda":
        device = torch.cuda.get_device_name(training.device)
    body = {
        "name": options.name,
        "settings": asdict(training.settings),
        "steps_per_epoch": training.batches.steps_per_epoch,
        "train_tokens": training.batches.stream.num_tokens,
        "parameters": sum(weight.numel() for weight in training.masters.weights.values()),
        "seconds": round(training.seconds, 1),
        "dtype": options.dtype,
        "provenance": provenance(device=device, command=command_line()),
        "load_columns": ["max_over_mean", "coefficient_of_variation", "entropy", "idle"],
        "moe_layer_ids": list(training.config.moe_layer_ids),
        "curve": training.curve,
        "held_out": training.scores,
        "loads": training.loads,
    }
    part = options.out / (CURVE + ".part")
    part.write_text(json.dumps(body) + "\n", encoding="utf-8")
    os.replace(part, options.out / CURVE)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
