"""The drafter's training loop: deterministic, resumable, with a curve.

Needs torch and tqdm. Rounds of fresh rollouts alternate with steps on them; the same settings, seed
and machine give the same drafter, and an interrupted run goes on from its last checkpoint as if
nothing had happened.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from kimik3_lab.drafter_config import DSparkConfig
from kimik3_lab.reference import meta
from kimik3_lab.reference.drafter import DSparkDrafter
from kimik3_lab.reference.model import K3ForCausalLM
from tools.train_tiny_k3.drafter_blocks import LossWeights, block_loss, draft_blocks
from tools.train_tiny_k3.drafter_walk import expected_acceptance
from tools.train_tiny_k3.rollouts import Rollouts, roll_out

__all__ = ["DrafterSettings", "DrafterTrainer", "new_drafter"]


#: Tokens of a round, to bound its memory: 2 kB of taps and hidden state each.
_MOST_TOKENS = 1_310_720


@dataclass(frozen=True)
class DrafterSettings:
    """Everything that decides the result, apart from target, text and machine."""

    steps: int = 4000
    #: Sequences in a step, and blocks drafted in each of them.
    batch: int = 256
    anchors: int = 32
    #: Sequences generated in a round (fewer if they are long), and rounds in all.
    sequences: int = 4096
    rounds: int = 5
    #: Prompt lengths, one a round in turn, and tokens generated after each prompt.
    prompt_lengths: tuple[int, ...] = (96, 32, 448, 192)
    new_tokens: int = 128
    #: Share of the anchors that lie in the prompt, where the text decides and not the target.
    prompt_share: float = 0.2
    learning_rate: float = 2e-3
    warmup: int = 100
    weight_decay: float = 0.05
    seed: int = 0
    loss: LossWeights = field(default_factory=LossWeights)


def new_drafter(target: K3ForCausalLM, *, num_layers: int, seed: int) -> DSparkDrafter:
    """Make a drafter for ``target`` with fresh weights from a private generator.

    Its last norm starts as the target's, whose output head it uses; layers start near the
    identity, and the Markov head at no correction.
    """
    config = DSparkConfig.for_target(target.config, num_hidden_layers=num_layers)
    drafter = DSparkDrafter(config, device="meta")
    meta.allocate(drafter, "cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            std = parameter.shape[-1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std *= (2 * num_layers) ** -0.5
            elif name.endswith("markov_w1.weight"):
                std = 0.1
            elif name.endswith(("markov_w2.weight", "confidence_head.proj.weight")):
                std = 0.0
            parameter.copy_(noise * std)
        drafter.final_norm.weight.copy_(target.model.norm.weight)
    return drafter.to(target.device)


class DrafterTrainer:
    """Trains one drafter.

    Parameters
    ----------
    target
        Frozen, float32, with fast experts (:func:`~tools.train_tiny_k3.rollouts.run_all_experts`).
    drafter
        Changed in place.
    prompts
        ``prompts(round, sequences, length)`` gives int64 ``[sequences, length]``: the same for the
        same arguments.
    held_out
        Prompts ``[S, P]`` that acceptance is watched on; never trained on.
    """

    def __init__(
        self,
        target: K3ForCausalLM,
        drafter: DSparkDrafter,
        prompts: Callable[[int, int, int], Tensor],
        held_out: Tensor,
        settings: DrafterSettings,
    ) -> None:
        self.target, self.drafter, self.prompts = target, drafter, prompts
        self.settings, self.step = settings, 0
        self.curve: list[dict[str, float]] = []
        self.seconds = 0.0
        for layer in drafter.layers:  # else every rotation would copy them over, and wait
            layer.self_attn.frequencies = layer.self_attn.frequencies.to(target.device)
        matrices = [p for p in drafter.parameters() if p.dim() > 1]
        vectors = [p for p in drafter.parameters() if p.dim() <= 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": settings.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=settings.learning_rate,
            betas=(0.9, 0.98),
            fused=target.device.type == "cuda",
        )
        self._rollouts: Rollouts | None = None
        self._round = -1
        self.watched = roll_out(
            target, held_out.to(target.device), settings.new_tokens, self._layers
        )

    @property
    def _layers(self) -> tuple[int, ...]:
        return self.drafter.config.target_layer_ids

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine to a hundredth."""
        settings = self.settings
        if step < settings.warmup:
            return settings.learning_rate * (step + 1) / settings.warmup
        done = (step - settings.warmup) / max(settings.steps - settings.warmup, 1)
        return settings.learning_rate * (0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2)

    def train(
        self,
        *,
        checkpoint: Path | None = None,
        save_every: int = 500,
        report_every: int = 100,
        stop_at: int | None = None,
        seconds: float | None = None,
    ) -> None:
        """Run to the last step (or to ``stop_at``), going on from ``checkpoint`` if it exists.

        ``seconds`` bounds the time: when the first steps show that there is not enough of it, the
        number of steps is cut once, and the cut number is what ``settings.steps`` then says.
        """
        if checkpoint is not None and checkpoint.is_file():
            self.load(checkpoint)
        began = time.monotonic()
        end = self.settings.steps if stop_at is None else min(stop_at, self.settings.steps)
        bar = tqdm(total=end, initial=self.step, desc="drafter", mininterval=2.0, disable=None)
        while self.step < end:
            losses = self._one_step()
            self.step += 1
            bar.update()
            late = seconds is not None and time.monotonic() - began > seconds
            last = self.step == end or late
            if self.step % report_every == 0 or last:
                self._report(losses, bar, measure=self.step % (5 * report_every) == 0 or last)
            if checkpoint is not None and (self.step % save_every == 0 or last):
                self.save(checkpoint)
            if late:  # the estimate was too low: keep what there is
                break
            if seconds is not None and self.step == 50:
                end = self._fit_into(seconds - (time.monotonic() - began), end)
                bar.total = end
        self.seconds += time.monotonic() - began
        bar.close()

    def _fit_into(self, left: float, end: int) -> int:
        """Cut the number of steps to what fits into ``left`` seconds, going by 30 steps."""
        settings = self.settings
        began = self._now()
        for _ in range(30):
            self._one_step()
            self.step += 1
        pace = (self._now() - began) / 30
        began = self._now()
        self._next_round(self._round)
        rollout = self._now() - began
        left -= 30 * pace + rollout
        # Longer prompts take longer, in part: blocks cost the same whatever they hang on.
        lengths = [
            settings.prompt_lengths[i % len(settings.prompt_lengths)]
            for i in range(settings.rounds)
        ]
        totals = [length + settings.new_tokens for length in lengths]
        relative = [0.5 + 0.5 * total / totals[0] for total in totals]
        left -= rollout * sum(relative[1:])
        fits = self.step + max(int(left / (pace * sum(relative) / len(relative))), 100)
        if fits < end:
            end = fits
            self.settings = dataclasses.replace(settings, steps=fits)
        return end

    def _now(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic()

    def _one_step(self) -> Any:
        settings, drafter = self.settings, self.drafter
        number = self.step * settings.rounds // settings.steps
        if number != self._round:
            self._next_round(number)
        rollouts = self._rollouts
        assert rollouts is not None
        device = self.target.device
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + self.step)
        which = torch.randperm(len(rollouts.token_ids), generator=generator)[: settings.batch]
        anchors = self._anchors(rollouts, generator)
        chosen = rollouts.rows(which.to(device, non_blocking=True))
        anchors = anchors.to(device, non_blocking=True)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(self.step)
        embedding, head = self.target.model.embed_tokens.weight, self.target.lm_head.weight
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            blocks = draft_blocks(drafter, embedding, head, chosen.token_ids, chosen.taps, anchors)
        losses = block_loss(
            blocks, chosen, head, anchors, self.target.config.eos_token_id, settings.loss
        )
        self.optimizer.zero_grad(set_to_none=True)
        losses.total.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        self.optimizer.step()
        return losses

    def _anchors(self, rollouts: Rollouts, generator: torch.Generator) -> Tensor:
        """Positions to hang blocks on: most where the target wrote, some in the prompt."""
        settings, block = self.settings, self.drafter.config.block_size
        first, last = rollouts.prompt - 1, rollouts.token_ids.shape[1] - 1 - block
        in_prompt = min(int(settings.anchors * settings.prompt_share), max(first - 1, 0))
        early = 1 + torch.randperm(max(first - 1, 1), generator=generator)[:in_prompt]
        late = first + torch.randperm(last - first + 1, generator=generator)
        return torch.cat((early, late[: settings.anchors - in_prompt]))

    def _next_round(self, number: int) -> None:
        settings = self.settings
        self._rollouts = None  # frees its memory before the next is made
        length = settings.prompt_lengths[number % len(settings.prompt_lengths)]
        room = _MOST_TOKENS // (length + settings.new_tokens)
        prompts = self.prompts(number, min(settings.sequences, room), length)
        prompts = prompts.to(self.target.device)
        self._rollouts = roll_out(self.target, prompts, settings.new_tokens, self._layers)
        self._round = number

    def _report(self, losses: Any, bar: Any, *, measure: bool) -> None:
        row: dict[str, float] = {"step": self.step}
        row |= {name: round(float(value.detach()), 5) for name, value in losses._asdict().items()}
        if measure:
            row["held_out_tokens_per_verify"] = expected_acceptance(
                self.drafter, self.target, self.watched
            )["tokens_per_verify"]
        self.curve.append(row)
        shown = {name: value for name, value in row.items() if name != "step"}
        bar.set_postfix({name[:12]: f"{value:.3f}" for name, value in shown.items()})
        if bar.disable and measure:  # no terminal to draw a bar in
            sys.stderr.write(f"{json.dumps(row)}\n")

    def save(self, path: Path) -> None:
        """Write everything that the next step depends on."""
        body = {
            "step": self.step,
            "seconds": self.seconds,
            "settings": dataclasses.asdict(self.settings),
            "curve": self.curve,
            "drafter": self.drafter.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        scratch = path.with_name(path.name + ".partial")
        torch.save(body, scratch)
        os.replace(scratch, path)

    def load(self, path: Path) -> None:
        """Go on from a file of :meth:`save`.

        Raises
        ------
        ValueError
            If it was made with other settings; the number of steps may have been cut.
        """
        body = torch.load(path, map_location=self.target.device, weights_only=True)
        ours, theirs = dataclasses.asdict(self.settings), body["settings"]
        differ = [n for n in ours if n != "steps" and _plain(ours[n]) != _plain(theirs[n])]
        if differ:
            name = differ[0]
            raise ValueError(
                f"{path} was made with {name}={theirs[name]!r}, this run has {ours[name]!r}: "
                "remove the file to begin anew"
            )
        self.settings = dataclasses.replace(self.settings, steps=theirs["steps"])
        self.step, self.curve, self.seconds = body["step"], body["curve"], body["seconds"]
        self.drafter.load_state_dict(body["drafter"])
        self.optimizer.load_state_dict(body["optimizer"])


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
