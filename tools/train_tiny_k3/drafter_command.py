"""``drafter``: train the DSpark drafter of a packaged target and write its folder."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from kimik3_lab.provenance import provenance
from kimik3_lab.reference import checkpoint, drafter_checkpoint
from tools.train_tiny_k3.batches import Batches, TokenStream
from tools.train_tiny_k3.command_line import command_line
from tools.train_tiny_k3.corpus import MANIFEST, Document, open_corpus
from tools.train_tiny_k3.drafter_blocks import LossWeights
from tools.train_tiny_k3.drafter_training import DrafterSettings, DrafterTrainer, new_drafter
from tools.train_tiny_k3.drafter_walk import expected_acceptance
from tools.train_tiny_k3.rollouts import run_all_experts
from tools.train_tiny_k3.tokenizer import encode_documents, load_tokenizer

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = DrafterSettings()
    parser.add_argument("--target", type=Path, required=True, help="folder of the packaged target")
    parser.add_argument("--corpus", type=Path, required=True, help="Lib folder, or its tar file")
    parser.add_argument("--manifest", type=Path, default=MANIFEST)
    parser.add_argument("--out", type=Path, required=True, help="folder for the drafter")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--seconds", type=float, help="cut the steps to what fits")
    parser.add_argument("--watched", type=int, default=256, help="held-out prompts to watch")
    parser.add_argument("--checkpoint", type=Path, help="file to save to and to go on from")
    parser.add_argument("--save-every", type=int, default=1000)
    for name in (
        "steps", "batch", "anchors", "sequences", "rounds", "new_tokens", "seed", "warmup",
    ):  # fmt: skip
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=int, default=getattr(defaults, name))
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    parser.add_argument("--ce", type=float, default=defaults.loss.cross_entropy)
    parser.add_argument("--tv", type=float, default=defaults.loss.total_variation)
    parser.add_argument(
        "--prompt-lengths", type=int, nargs="+", default=list(defaults.prompt_lengths)
    )


def run(options: argparse.Namespace) -> None:
    began = time.monotonic()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    settings = DrafterSettings(
        steps=options.steps,
        batch=options.batch,
        anchors=options.anchors,
        sequences=options.sequences,
        rounds=options.rounds,
        prompt_lengths=tuple(options.prompt_lengths),
        new_tokens=options.new_tokens,
        learning_rate=options.learning_rate,
        warmup=options.warmup,
        seed=options.seed,
        loss=LossWeights(cross_entropy=options.ce, total_variation=options.tv),
    )
    target = run_all_experts(checkpoint.load(options.target, device=options.device))
    corpus = open_corpus(options.corpus, options.manifest)
    tokenizer = load_tokenizer(options.target)

    def stream(documents: list[Document]) -> TokenStream:
        config = target.config
        return TokenStream.from_documents(
            encode_documents(tokenizer, documents), config.bos_token_id, config.eos_token_id
        )

    text, unseen = stream(corpus.train), stream(corpus.held_out)

    def prompts(number: int, sequences: int, length: int) -> Tensor:
        return Batches(text, sequences, length - 1, settings.seed + number).at(0)

    watched = Batches(unseen, options.watched, settings.prompt_lengths[0] - 1, 0).at(0)
    drafter = new_drafter(target, num_layers=options.layers, seed=settings.seed)
    trainer = DrafterTrainer(target, drafter, prompts, watched, settings)
    options.out.mkdir(parents=True, exist_ok=True)
    left = None if options.seconds is None else options.seconds - (time.monotonic() - began)
    trainer.train(checkpoint=options.checkpoint, save_every=options.save_every, seconds=left)
    drafter_checkpoint.save(drafter, options.out)
    stored = drafter_checkpoint.load(options.out, device=options.device)
    result = expected_acceptance(stored, target, trainer.watched)
    device = options.device
    if device == "cuda":
        device = torch.cuda.get_device_name()
    body = {
        "what": "training of the DSpark drafter on greedy rollouts of the tiny K3",
        "provenance": provenance(device=device, command=command_line()),
        "settings": {
            **dataclasses.asdict(trainer.settings),
            "layers": options.layers,
        },
        "parameters": sum(parameter.numel() for parameter in drafter.parameters()),
        "training_tokens": text.num_tokens,
        "seconds": round(trainer.seconds, 1),
        "seconds_in_all": round(time.monotonic() - began, 1),
        "held_out_prompts": result,
        "curve": trainer.curve,
    }
    scratch = options.out / "training.json.partial"
    scratch.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    os.replace(scratch, options.out / "training.json")
    sys.stdout.write(
        f"drafter: {trainer.step} steps in {trainer.seconds:.1f} s, "
        f"{result['tokens_per_verify']:.3f} tokens per verify on held-out prompts\n"
    )
