"""Whether an executor and the model alone agree, as far as rounding lets them.

Needs torch. The tests of both backends ask, and so does lesson 10.

In float64 two ways to compute the same thing give the same tokens. In float32 they give the same
tokens until something was nearly a tie: two most probable tokens, or the last expert that a router
chose and the first that it did not. A tie may fall either way, and what follows is another text. So
the question is put twice: are the tokens the same up to the first step that was *close*, and does
the model, told the executor's own tokens, find each of them as probable as the executor said?
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kimik3_lab.reference.model import K3ForCausalLM, SequenceMixer
from kimik3_lab.reference.moe import Router

__all__ = ["Agreement", "compare"]


@dataclass(frozen=True)
class Agreement:
    """What came out of a comparison.

    Attributes
    ----------
    num_steps : int
        Output tokens compared.
    num_close_steps : int
        Those where a margin was under the limit.
    first_close_step : int
        The first of them, or ``num_steps``. What the prompt leaves close counts for step 0.
    first_difference : int
        First step whose token is not the one that the model finds most probable there, or
        ``num_steps``.
    logprob_error : float
        Largest difference of the logarithm of a token's probability from the model's own.
    """

    num_steps: int
    num_close_steps: int
    first_close_step: int
    first_difference: int
    logprob_error: float

    def holds(self, tolerance: float = 1e-3) -> bool:
        """Whether tokens are the same as long as they must be, and probabilities throughout."""
        return self.first_difference >= self.first_close_step and self.logprob_error <= tolerance


@torch.inference_mode()
def compare(
    model: K3ForCausalLM,
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    *,
    margin: float = 1e-4,
) -> Agreement:
    """Compare greedy output of an executor with the model alone.

    Parameters
    ----------
    model : K3ForCausalLM
        Reads prompt and output in one pass.
    prompt_ids, token_ids
        Prompt, and what the executor said to it.
    logprobs
        Of each of its tokens, as the executor reports it.
    margin : float
        A step is close if the two largest logits, or the experts on both sides of a router's
        choice, are nearer to each other than this.

    Examples
    --------
    >>> from kimik3_lab.config import K3Config
    >>> from kimik3_lab.reference.initialization import random_model
    >>> model = random_model(K3Config.micro(), seed=0)
    >>> said = model.generate([0, 5, 9], 4)
    >>> compare(model, [0, 5, 9], said, [0.0] * 4).first_difference
    4
    """
    count, known = len(token_ids), [*prompt_ids, *token_ids[:-1]]
    if count < 1 or len(logprobs) != count:
        raise ValueError(f"expected a logprob for each of 1 or more tokens, got {len(logprobs)}")
    with _router_margins(model) as margins:
        logits = model(torch.tensor(known, device=model.device), SequenceMixer(model.new_state()))
    nearest = torch.stack(margins).amin(0) if margins else logits.new_full((len(known),), torch.inf)
    # Step i is decided by row len(prompt) - 1 + i; the rows before row 0 of the output are its own.
    first = len(prompt_ids) - 1
    nearest = torch.cat((nearest[: first + 1].amin().unsqueeze(0), nearest[first + 1 :]))
    best = logits[first:].topk(2).values
    close = torch.minimum(nearest, best[:, 0] - best[:, 1]) < margin
    said = torch.tensor(list(token_ids), device=model.device)
    own = logits[first:].double().log_softmax(-1).gather(-1, said.unsqueeze(-1)).squeeze(-1)
    error = (own - own.new_tensor(list(logprobs))).abs().max()
    return Agreement(
        count,
        int(close.sum()),
        _first(close),
        _first(logits[first:].argmax(-1) != said),
        float(error),
    )


def _first(flags: Tensor) -> int:
    places = flags.nonzero()
    return int(places[0]) if len(places) else len(flags)


@contextmanager
def _router_margins(model: K3ForCausalLM) -> Iterator[list[Tensor]]:
    """Collect, for each router, how clearly it chose the experts of each row."""
    margins: list[Tensor] = []

    def look(router: Router, inputs: tuple[Tensor, ...]) -> None:
        wide = router.e_score_correction_bias.dtype
        scores = torch.sigmoid(inputs[0].to(wide) @ router.weight.to(wide).mT)
        preference = scores + router.e_score_correction_bias
        top_k = router.config.num_experts_per_token
        if top_k < preference.shape[-1]:
            ordered = preference.topk(top_k + 1).values
            margins.append(ordered[:, -2] - ordered[:, -1])

    routers = [module for module in model.modules() if isinstance(module, Router)]
    handles = [router.register_forward_pre_hook(look) for router in routers]
    try:
        yield margins
    finally:
        for handle in handles:
            handle.remove()
