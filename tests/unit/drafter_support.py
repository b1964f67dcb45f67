"""Drafters with repeatable random weights, and speculative decoding written out, for tests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from kimik3_lab.drafter_config import DSparkConfig
from kimik3_lab.reference import meta
from kimik3_lab.reference.drafter import Draft, DSparkDrafter
from kimik3_lab.reference.model import K3ForCausalLM
from kimik3_lab.reference.speculative import verify_greedy
from kimik3_lab.reference.state import SequenceMixer, SequenceState


def random_drafter(
    config: DSparkConfig, seed: int = 0, *, dtype: torch.dtype = torch.float64
) -> DSparkDrafter:
    """Weights that keep activations near one and give every part a say, from a private generator.

    They lie on the grid of bfloat16, as what is loaded from a file does.
    """
    generator = torch.Generator().manual_seed(seed)
    drafter = DSparkDrafter(config, dtype=dtype, device="meta")
    meta.allocate(drafter, "cpu")
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                value = 1 + 0.2 * noise
            elif name.endswith("markov_w1.weight") or parameter.dim() == 1:
                value = noise
            else:
                value = noise * parameter.shape[-1] ** -0.5
            parameter.copy_(value.bfloat16())
    return drafter.eval().requires_grad_(False)


def teach_bigrams(drafter: DSparkDrafter, token_ids: Sequence[int]) -> None:
    """Make the Markov head say what followed each token last time; needs rank >= vocabulary."""
    w1, w2 = drafter.markov_head.markov_w1.weight, drafter.markov_head.markov_w2.weight
    w1.copy_(torch.eye(*w1.shape))
    w2.zero_()
    for before, after in itertools.pairwise(token_ids):
        w2[:, before] = 0.0
        w2[after, before] = 100.0


class Speculation:
    """One sequence decoded with drafts: what an engine does around both models.

    ``accepted`` is the number of drafted tokens kept in each step.
    """

    def __init__(self, target: K3ForCausalLM, drafter: DSparkDrafter, prompt: Sequence[int]):
        self.target, self.drafter = target, drafter
        self.state, self.context = target.new_state(), drafter.new_state()
        self.accepted: list[int] = []
        logits, taps = self.forward(torch.tensor(prompt), self.state)
        drafter.write_context(taps, self.context)
        self.output = [int(logits[-1].argmax())]

    def forward(self, step: Tensor, state: SequenceState) -> tuple[Tensor, dict]:
        taps = self.drafter.new_taps()
        return self.target(step, SequenceMixer(state), taps=taps), taps

    def propose(self) -> Draft:
        return self.drafter.draft(self.output[-1], self.context, self.target)

    def step(self) -> None:
        """Draft, score the anchor and all drafts in one forward, keep, roll back."""
        draft = self.propose()
        before = self.state.clone()
        tokens = torch.cat([torch.tensor(self.output[-1:]), draft.token_ids])
        logits, taps = self.forward(tokens, self.state)
        new = verify_greedy(draft.token_ids, logits)
        verified = len(new)  # the anchor and the kept drafts; the bonus is the next anchor
        self.drafter.write_context(taps, self.context, verified)
        if verified < len(tokens):
            self.state = before
            self.forward(tokens[:verified], self.state)
        self.accepted.append(verified - 1)
        self.output += new
