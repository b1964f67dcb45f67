"""``probe``: find out how fast this machine trains, and with which settings it works at all.

Prints one JSON object with ``loop_experts``, ``batch_size``, ``seconds_per_step`` and ``steps``,
the steps that fit into ``--seconds``. The number of steps decides the learning-rate schedule, so it
is fixed before training starts and never changed by the clock.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback

import torch

from tools.train_tiny_k3 import experts, shape
from tools.train_tiny_k3.train_command import add_data_arguments, prepare
from tools.train_tiny_k3.training import Settings

__all__ = ["add_arguments", "run"]

WARMUP, TIMED = 3, 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_data_arguments(parser)
    parser.add_argument("--seconds", type=float, required=True, help="time for the training")
    parser.add_argument("--batch-size", type=int, default=Settings(steps=1).batch_size)
    parser.add_argument("--length", type=int, default=Settings(steps=1).length)
    parser.add_argument("--most-epochs", type=float, default=20.0)
    parser.add_argument("--margin", type=float, default=0.93, help="share of the time to plan for")


def run(options: argparse.Namespace) -> None:
    """Try settings from fast to safe; the first that works is reported."""
    loops = [options.loop_experts]
    if not options.loop_experts:
        wrong = _check_grouped_mm(options.device)
        if wrong:
            sys.stderr.write(f"torch._grouped_mm is not used: {wrong}\n")
        loops = [True] if wrong else [False, True]
    batch_size = options.batch_size
    while batch_size:
        for loop in loops:
            options.loop_experts = loop
            try:
                result = _time(options, batch_size)
            except RuntimeError:  # out of memory, or an operation that this machine lacks
                traceback.print_exc()
                if options.device != "cpu":
                    torch.cuda.empty_cache()
                continue
            sys.stdout.write(json.dumps(result) + "\n")
            return
        batch_size //= 2
    raise SystemExit("no setting works on this machine: see the errors above")


def _time(options: argparse.Namespace, batch_size: int) -> dict[str, float | int | bool]:
    settings = Settings(
        steps=10**6, batch_size=batch_size, length=options.length, log_every=10**6,
        score_every=10**6,
    )  # fmt: skip
    training = prepare(options, settings, shape.target_config())
    training.run(WARMUP)
    started = training.seconds
    training.run(WARMUP + TIMED)
    per_step = (training.seconds - started) / TIMED
    rows = training.batches.at(WARMUP + TIMED).to(training.device)
    loss = float(training.loss(rows).detach())
    if not loss < 20.0:
        raise RuntimeError(f"the loss after {WARMUP + TIMED} steps is {loss}")
    fits = int(options.seconds * options.margin / per_step)
    most = int(training.batches.steps_per_epoch * options.most_epochs)
    peak = torch.cuda.max_memory_allocated() / 2**30 if options.device != "cpu" else 0.0
    return {
        "loop_experts": options.loop_experts,
        "batch_size": batch_size,
        "seconds_per_step": round(per_step, 5),
        "steps": min(fits, most),
        "steps_per_epoch": training.batches.steps_per_epoch,
        "loss": round(loss, 3),
        "peak_gib": round(peak, 2),
    }


def _check_grouped_mm(device: str) -> str:
    """Compare the grouped product and its gradients with the loop; return what is wrong."""
    if device == "cpu":
        return "there is no GPU"
    try:
        results = []
        for works in (True, False):
            torch.manual_seed(0)
            experts.use_grouped_mm(works)
            x = torch.randn(1024, 96, device=device, dtype=torch.bfloat16, requires_grad=True)
            w = torch.randn(8, 64, 96, device=device, dtype=torch.bfloat16, requires_grad=True)
            ends = torch.tensor([8, 16, 256, 400, 408, 800, 1000, 1024], device=device)
            y = experts.grouped_product(x, w, ends)
            y.float().square().sum().backward()
            results.append((y.float(), x.grad.float(), w.grad.float()))
        for what, fast, slow in zip(("product", "dx", "dw"), *results, strict=True):
            error = float((fast - slow).norm() / slow.norm())
            if not error < 0.02:
                return f"its {what} differs from the loop's by {error:.3g}"
    except Exception as error:  # whatever it is, the loop does without
        return repr(error).splitlines()[0]
    finally:
        experts.use_grouped_mm(True)
    return ""
