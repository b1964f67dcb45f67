"""From logits to tokens: the most probable one, or a repeatable draw.

Needs torch. Lesson 10 uses it. The order of operations is vLLM's (``vllm/v1/sample/sampler.py``):
temperature first, then top-p.

A request's draws must not depend on who else is in the batch. So every request has a random
generator of its own, and each token takes exactly one number from it. A request that is preempted
keeps its generator and its tokens, and goes on where it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kimik3_lab.serving.request import SamplingParams

__all__ = ["make_generator", "sample"]


def make_generator(params: SamplingParams) -> torch.Generator | None:
    """Random generator of one request; None if it is greedy and needs none."""
    if params.greedy:
        return None
    generator = torch.Generator()
    if params.seed is None:
        generator.seed()  # from the operating system
    else:
        generator.manual_seed(params.seed)
    return generator


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    generators: Sequence[torch.Generator | None],
) -> list[int]:
    """Choose one token for each row.

    Parameters
    ----------
    logits : Tensor
        ``[M, vocab]``, float32 or wider.
    params, generators
        One for each row, see :func:`make_generator`.

    Returns
    -------
    list of int
        M token ids.

    Raises
    ------
    ValueError
        If a row has no probabilities, because a logit is NaN or +inf; it names the rows.

    Examples
    --------
    >>> sample(torch.tensor([[0.0, 2.0, 1.0]]), [SamplingParams()], [None])
    [1]
    """
    if not len(params):
        return []
    largest = logits.amax(-1)
    if not torch.isfinite(largest).all():  # NaN and inf both come through amax
        rows = (~torch.isfinite(largest)).nonzero().flatten().tolist()
        raise ValueError(f"the logits of rows {rows} are not finite, so no token can be chosen")
    token_ids: list[int] = logits.argmax(-1).tolist()
    drawn = [row for row, p in enumerate(params) if not p.greedy]
    if drawn:
        uniform = torch.stack([_uniform(generators[row]) for row in drawn])
        temperature = uniform.new_tensor([params[row].temperature for row in drawn])
        top_p = uniform.new_tensor([params[row].top_p for row in drawn])
        shifted = (logits[drawn] - largest[drawn].unsqueeze(-1)).cpu().double()
        for row, token_id in zip(
            drawn, _draw(shifted, temperature, top_p, uniform).tolist(), strict=True
        ):
            token_ids[row] = token_id
    return token_ids


def _uniform(generator: torch.Generator | None) -> Tensor:
    return torch.rand((), dtype=torch.float64, generator=generator)


def _draw(logits: Tensor, temperature: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """Invert the distribution function at ``uniform [M]``; logits ``[M, vocab]`` have maximum 0."""
    probabilities = (logits / temperature.unsqueeze(-1)).softmax(-1)
    probabilities, order = probabilities.sort(dim=-1, descending=True, stable=True)
    mass = probabilities.cumsum(-1)
    # A token belongs to the nucleus if those before it have not reached top_p; the first always
    # does. The mass of the nucleus is that of its last token.
    size = (mass - probabilities < top_p.unsqueeze(-1)).sum(-1, keepdim=True)
    nucleus = mass.gather(-1, size - 1)
    place = torch.searchsorted(mass, uniform.unsqueeze(-1) * nucleus, right=True)
    # Rounding may put the last number below 1 beyond the end.
    return order.gather(-1, place.minimum(size - 1)).squeeze(-1)
