"""The training loop: deterministic, resumable, and free of waits for the GPU between two log lines.

Needs torch.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kimik3_lab.config import K3Config
from kimik3_lab.reference.balancing import BiasHistogram, expert_load, load_statistics
from tools.train_tiny_k3.batches import Batches, TokenStream
from tools.train_tiny_k3.experts import batch_experts
from tools.train_tiny_k3.forward import forward_batch, token_logits
from tools.train_tiny_k3.masters import Masters, batched
from tools.train_tiny_k3.optimizer import Optimizer, learning_rate
from tools.train_tiny_k3.scoring import Rows, bits_per_byte
from tools.train_tiny_k3.start import untrained_model

__all__ = ["OutOfTime", "Settings", "Training", "to_compute_dtype"]


class OutOfTime(RuntimeError):
    """The time given ran out before the last step; the state was saved."""


@dataclass(frozen=True)
class Settings:
    """What decides the curve; two trainings with equal settings have equal curves."""

    steps: int
    batch_size: int = 8
    length: int = 2048
    learning_rate: float = 4e-3
    weight_decay: float = 0.3
    warmup: int = 100
    dropout: float = 0.15
    seed: int = 0
    balancing: bool = True
    quantize: bool = True
    log_every: int = 20
    score_every: int = 200

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "length", "log_every", "score_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must lie in [0, 1), got {self.dropout}")


class Training:
    """A model being trained.

    Parameters
    ----------
    config
        Shape of the model.
    settings
        See :class:`Settings`.
    stream
        Text to train on.
    held_out
        Rows to score from time to time.
    device, dtype
        Where the model computes, and in which type.

    Attributes
    ----------
    step
        Steps taken.
    curve
        An entry for every ``log_every`` steps: what a plot of the training needs.
    scores
        An entry for every scoring of the held-out rows.
    loads
        Step to tokens per expert ``[layer][expert]``, at a few steps.
    """

    def __init__(
        self,
        config: K3Config,
        settings: Settings,
        stream: TokenStream,
        held_out: Rows,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config, self.settings, self.held_out = config, settings, held_out
        self.device = torch.device(device)
        self.model = untrained_model(config, settings.seed)
        batch_experts(self.model)
        masters = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        to_compute_dtype(self.model, dtype)
        self.model.to(self.device).train()
        self.masters = Masters(self.model, quantize=settings.quantize)
        for name, weight in self.masters.weights.items():
            weight.copy_(masters[name])
        self.masters.refresh()
        self.optimizer = Optimizer(self.masters.weights, weight_decay=settings.weight_decay)
        self.batches = Batches(stream, settings.batch_size, settings.length, settings.seed)
        self._drop(settings.dropout)
        self.step = 0
        self.curve: list[dict[str, Any]] = []
        self.scores: list[dict[str, Any]] = []
        self.loads: dict[str, list[list[int]]] = {}
        self.seconds = 0.0
        self._loss_sum = torch.zeros((), device=self.device)
        self._loss_count = 0

    # -- running ---------------------------------------------------------------------------------

    def run(
        self,
        until: int | None = None,
        *,
        on_step: Callable[[Training], None] | None = None,
        seconds: float | None = None,
    ) -> None:
        """Take steps up to number ``until``, by default the last.

        Raises
        ------
        OutOfTime
            If ``seconds`` passed before.
        """
        last = self.settings.steps if until is None else min(until, self.settings.steps)
        started, before = time.perf_counter(), self.seconds
        while self.step < last:
            self.advance()
            self.seconds = before + time.perf_counter() - started
            if on_step is not None:
                on_step(self)
            if seconds is not None and self.seconds - before > seconds and self.step < last:
                raise OutOfTime(
                    f"{self.step} of {last} steps taken in {seconds:.0f} s: give more time, or "
                    "fewer steps from the start"
                )
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds = before + time.perf_counter() - started

    def advance(self) -> None:
        """Take one step."""
        settings, step = self.settings, self.step
        logs = step % settings.log_every == 0 or step == settings.steps - 1
        layers = batched(self.model)
        for layer in layers:
            layer.observe = settings.balancing or logs
        torch.manual_seed(settings.seed * 1_000_003 + step)  # of dropout: the same after a resume
        rows = self.batches.at(step).to(self.device, non_blocking=True)
        loss = self.loss(rows)
        loss.backward()
        lr = learning_rate(step, settings.steps, settings.learning_rate, warmup=settings.warmup)
        norm = self.optimizer.step(self.masters.gradients(), lr, step)
        if settings.balancing:
            self._balance()
        self.masters.refresh()
        self._loss_sum += loss.detach()
        self._loss_count += 1
        self.step += 1
        if logs:
            self._log(lr, norm)
        if self.step % settings.score_every == 0 or self.step == settings.steps:
            self.score()

    def score(self) -> float:
        """Score the held-out rows, unless that was just done, and return the bits per byte."""
        if not self.scores or self.scores[-1]["step"] != self.step:
            score = bits_per_byte(self.model, self.held_out, self.settings.batch_size)
            self.scores.append({"step": self.step, "held_out_bits_per_byte": round(score, 5)})
        return float(self.scores[-1]["held_out_bits_per_byte"])

    def loss(self, rows: Tensor) -> Tensor:
        """Mean loss in nats of ``rows [B, length + 1]``."""
        hidden = forward_batch(self.model, rows[:, :-1]).hidden
        logits = token_logits(self.model, hidden)
        return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    @torch.no_grad()
    def _balance(self) -> None:
        top_k = self.config.num_experts_per_token
        for layer in batched(self.model):
            assert layer.scores is not None
            bias = layer.gate.e_score_correction_bias
            histogram = BiasHistogram(bias.data)
            histogram.add(layer.scores, top_k)
            bias.copy_(histogram.solve(top_k))

    def _log(self, lr: float, norm: Tensor) -> None:
        settings = self.settings
        loads = [
            expert_load(layer.expert_ids, self.config.num_experts)
            for layer in batched(self.model)
            if layer.expert_ids is not None
        ]
        counts = torch.stack(loads).cpu() if loads else torch.zeros(0, self.config.num_experts)
        self.curve.append(
            {
                "step": self.step,
                "tokens": self.step * settings.batch_size * settings.length,
                "lr": float(f"{lr:.6g}"),
                "loss": round(float(self._loss_sum) / self._loss_count, 5),
                "gradient_norm": round(float(norm), 4),
                "load": [list(load_statistics(load)) for load in counts],
            }
        )
        tenths = {settings.steps * n // 10 // settings.log_every for n in (1, 2, 5, 10)}
        number = (self.step - 1) // settings.log_every
        if number in {0, 1, 2} | tenths or self.step == settings.steps:
            self.loads[str(self.step)] = counts.tolist()
        self._loss_sum.zero_()
        self._loss_count = 0

    def _drop(self, rate: float) -> None:
        """Drop out what each sublayer adds to the residual stream, while training."""
        if not rate:
            return

        def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            return F.dropout(output, rate, module.training)

        for layer in self.model.model.layers:
            layer.self_attn.register_forward_hook(hook)
            getattr(layer, "block_sparse_moe", getattr(layer, "mlp", None)).register_forward_hook(
                hook
            )

    # -- saving ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the training depends on, and the curve so far."""
        return {
            "settings": dataclasses.asdict(self.settings),
            "config": self.config.to_dict(),
            "step": self.step,
            "weights": dict(self.masters.weights),
            "bias": [layer.gate.e_score_correction_bias.data for layer in batched(self.model)],
            "optimizer": self.optimizer.state_dict(),
            "loss_sum": self._loss_sum,
            "loss_count": self._loss_count,
            "curve": self.curve,
            "scores": self.scores,
            "loads": self.loads,
            "seconds": self.seconds,
        }

    def save(self, path: Path) -> None:
        """Write :meth:`state_dict`, all or nothing."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        torch.save(self.state_dict(), part)
        os.replace(part, path)

    def load(self, path: Path) -> None:
        """Go on where :meth:`save` was called.

        Raises
        ------
        ValueError
            If it was a training with other settings, which would give another curve.
        """
        state = torch.load(path, map_location=self.device, weights_only=True)
        mine = dataclasses.asdict(self.settings)
        if state["settings"] != mine:
            differing = [name for name in mine if state["settings"].get(name) != mine[name]]
            raise ValueError(
                f"{path} was trained with other settings ({', '.join(differing)}): give the same "
                "ones to go on, or another folder to start anew"
            )
        with torch.no_grad():
            for name, weight in self.masters.weights.items():
                weight.copy_(state["weights"][name])
            for layer, bias in zip(batched(self.model), state["bias"], strict=True):
                layer.gate.e_score_correction_bias.copy_(bias)
        self.optimizer.load_state_dict(state["optimizer"])
        self.masters.refresh()
        self.step, self.seconds = state["step"], state["seconds"]
        self._loss_sum.copy_(state["loss_sum"])
        self._loss_count = state["loss_count"]
        self.curve, self.scores, self.loads = state["curve"], state["scores"], state["loads"]


def to_compute_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast what is bfloat16 on disk; what is float32 there computes in float32 or wider."""
    wide = ("A_log", "dt_bias", "o_norm.weight", "conv1d.weight", "e_score_correction_bias")
    for name, parameter in model.named_parameters():
        target = torch.promote_types(dtype, torch.float32) if name.endswith(wide) else dtype
        parameter.data = parameter.data.to(target)
