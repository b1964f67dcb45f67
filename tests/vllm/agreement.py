"""How well the reference agrees with answers of vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kimik3_lab.reference.model import K3ForCausalLM
from kimik3_lab.reference.moe import Router
from kimik3_lab.reference.state import SequenceMixer

if TYPE_CHECKING:
    from vllm_engine import Answer

torch.set_num_threads(1)

#: Largest difference of the log-probability of a generated token that float32 explains.
TOLERANCE = 5e-4
#: The same for the tokens of a random prompt, some of which are most unlikely.
PROMPT_TOLERANCE = 2e-3
#: Where the reference's two best tokens are closer than this, either may win.
CLOSE = 1e-3
#: Where an expert is chosen over the next one by less than this, rounding may choose the other, and
#: everything after is another computation. Rounding moves these scores by up to 1e-4.
CLOSE_ROUTING = 5e-5


@dataclass(frozen=True)
class Agreement:
    """The comparison of some answers with the reference."""

    answers: int
    difference: float  # largest of a log-probability, generated tokens
    prompt_difference: float  # the same, tokens of the prompts
    steps: int  # greedy choices compared
    close_calls: int  # of these, choices that rounding may decide
    wrong_choices: int  # of the others, those where the reference prefers another token
    rerouted: int  # answers that part after a close choice of experts; compared up to there

    @property
    def holds(self) -> bool:
        return (
            self.difference <= TOLERANCE
            and self.prompt_difference <= PROMPT_TOLERANCE
            and self.wrong_choices == 0
            and self.rerouted <= min(2, self.answers // 4)
        )

    def __str__(self) -> str:
        return (
            f"{self.answers} answers, max |dlogprob| {self.difference:.1e} "
            f"(prompts {self.prompt_difference:.1e}), {self.steps} greedy steps, "
            f"{self.close_calls} too close to call, {self.wrong_choices} wrong, "
            f"{self.rerouted} rerouted"
        )


@torch.inference_mode()
def compare(
    model: K3ForCausalLM, answers: Sequence[Answer], mixer: type[SequenceMixer] = SequenceMixer
) -> Agreement:
    """Let the reference read what vLLM read and wrote, and compare each token."""
    worst = prompt_worst = 0.0
    steps = close_calls = wrong = rerouted = 0
    for answer in answers:
        ids = torch.tensor(answer.prompt + answer.tokens)
        with _routing_margins(model) as margins:
            ours = model(ids, mixer(model.new_state())).log_softmax(-1)[:-1]  # row i: token i + 1
        theirs = torch.tensor(answer.prompt_logprobs + answer.logprobs)
        ours, ids = ours[-len(theirs) :], ids[-len(theirs) :]
        difference = (ours.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - theirs).abs()
        difference = difference.nan_to_num(torch.inf)

        best = ours.topk(2)
        margin = best.values[:, 0] - best.values[:, 1]
        generated = torch.arange(len(ids)) >= len(ids) - len(answer.tokens)
        differs = generated & (best.indices[:, 0] != ids) & (margin > CLOSE)
        limit = torch.where(generated, TOLERANCE, PROMPT_TOLERANCE)

        end = len(ids)
        if margins:  # per token the closest choice of experts so far
            closest = torch.stack(margins).amin(0)[:-1].cummin(0).values[-len(ids) :]
            parts = ((difference > limit) | differs) & (closest < CLOSE_ROUTING)
            if parts.any():
                end, rerouted = int(parts.int().argmax()), rerouted + 1
        generated, kept = generated[:end], difference[:end]
        worst = max([worst, *kept[generated].tolist()])
        prompt_worst = max([prompt_worst, *kept[~generated].tolist()])
        steps += int(generated.sum())
        close_calls += int((generated & (margin[:end] <= CLOSE)).sum())
        wrong += int(differs[:end].sum())
    return Agreement(len(answers), worst, prompt_worst, steps, close_calls, wrong, rerouted)


@contextmanager
def _routing_margins(model: K3ForCausalLM) -> Iterator[list[Tensor]]:
    """Collect per layer and token by how much the last chosen expert beat the next: ``[N]``."""
    margins: list[Tensor] = []

    def note(router: Router, inputs: tuple[Any, ...], _: Any) -> None:
        scores = torch.sigmoid(inputs[0] @ router.weight.mT) + router.e_score_correction_bias
        ranked = scores.topk(router.config.num_experts_per_token + 1).values
        margins.append(ranked[:, -2] - ranked[:, -1])

    routers = [module for module in model.modules() if isinstance(module, Router)]
    hooks = [router.register_forward_hook(note) for router in routers]
    try:
        yield margins
    finally:
        for hook in hooks:
            hook.remove()
