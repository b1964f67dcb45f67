"""Speculative verification: how many drafted tokens to keep, and which token to add after them.

Needs torch. Lesson 09 schedules around it; the engine of lesson 10 calls it.

A drafter proposes N tokens, the target scores all of them in one forward, and a rule keeps a prefix
and adds one token of the target's own (the *bonus*). Greedy keeps what the target would have said.
The two sampling rules keep tokens so that the output is distributed exactly as the target's:
``standard`` decides token by token (arXiv 2211.17192, 2302.01318), ``block`` decides for the whole
draft at once and never keeps fewer on average (arXiv 2403.10444).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kimik3_lab.reference.norms import compute_dtype

__all__ = [
    "Rule",
    "block_rule",
    "standard_rule",
    "verify",
    "verify_greedy",
]


class Rule(NamedTuple):
    """A verification rule, worked out for one draft.

    Attributes
    ----------
    keep
        ``[N]``: keep the draft up to token i (counted from 1) with probability ``keep[i-1]``, given
        that every longer prefix was turned down.
    next_token
        ``[N + 1, V]``: distribution of the bonus token when exactly i drafted tokens are kept.
    """

    keep: Tensor
    next_token: Tensor

    def kept_length(self) -> Tensor:
        """Probability of each kept length, ``[N + 1]``.

        Examples
        --------
        >>> Rule(torch.tensor([0.5, 0.5]), torch.ones(3, 1)).kept_length()
        tensor([0.2500, 0.2500, 0.5000])
        """
        # Longest first: length i wins if i is kept and everything longer was not.
        keep = torch.cat([self.keep.new_ones(1), self.keep]).flip(0)
        turned_down = torch.cat([keep.new_ones(1), (1 - keep[:-1]).cumprod(0)])
        return (keep * turned_down).flip(0)


def standard_rule(draft_ids: Tensor, draft_probs: Tensor, target_probs: Tensor) -> Rule:
    """Token by token: keep with probability ``min(1, p_target / p_draft)``, stop at the first miss.

    Parameters
    ----------
    draft_ids
        ``[N]`` int64, sampled from ``draft_probs``.
    draft_probs
        ``[N, V]``: what each drafted token was sampled from.
    target_probs
        ``[N + 1, V]``: the target's distributions at the same positions and one past the draft.

    Examples
    --------
    A draft that equals the target's distribution is always kept whole:

    >>> p = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    >>> standard_rule(torch.tensor([1]), p[:1], p).kept_length()
    tensor([0., 1.])
    """
    draft, target = _checked(draft_ids, draft_probs, target_probs)
    ratio = _ratio(draft_ids, draft, target).clamp(max=1)
    # The chain of single decisions, restated as "given that no longer prefix was kept":
    # P(kept = i) = r_1..r_i (1 - r_{i+1}), so keep_i = P(kept = i) / P(kept <= i).
    reach = torch.cat([ratio.new_ones(1), ratio.cumprod(0)])
    exactly = reach - torch.cat([reach[1:], reach.new_zeros(1)])
    at_most = exactly.cumsum(0)
    keep = torch.where(at_most > 0, exactly / at_most.clamp(min=torch.finfo(ratio.dtype).tiny), 0.0)
    return Rule(keep[1:], _next_token(torch.ones_like(reach), draft, target))


def block_rule(draft_ids: Tensor, draft_probs: Tensor, target_probs: Tensor) -> Rule:
    """Decide for the whole draft at once: a likely continuation can rescue an unlikely token.

    With ``P_0 = 1`` and ``P_i = min(1, P_{i-1} p_t(x_i) / p_d(x_i))``, a prefix of i < N tokens is
    kept with probability ``rho_i / (rho_i + 1 - P_i)``, where ``rho_i`` is the mass of
    ``max(P_i p_t - p_d, 0)`` one position on; the whole draft with ``P_N``.

    Parameters are those of :func:`standard_rule`.

    Examples
    --------
    >>> p = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    >>> block_rule(torch.tensor([0]), torch.tensor([[0.5, 0.5]]), p).kept_length()
    tensor([0.5000, 0.5000])
    """
    draft, target = _checked(draft_ids, draft_probs, target_probs)
    prefix = [target.new_ones(())]
    for ratio in _ratio(draft_ids, draft, target):
        prefix.append((prefix[-1] * ratio).clamp(max=1))
    weight = torch.stack(prefix)
    rest = (weight[:-1, None] * target[:-1] - draft).clamp(min=0).sum(-1)[1:]
    inner = weight[1:-1]
    denominator = rest + 1 - inner
    # 0 / 0: nothing is missing so far and nothing will be missing next, so going on is certain.
    safe = denominator.clamp(min=torch.finfo(rest.dtype).tiny)
    keep = torch.where(denominator > 0, rest / safe, 1.0)
    return Rule(torch.cat([keep, weight[-1:]]), _next_token(weight, draft, target))


def verify(rule: Rule, draft_ids: Tensor, generator: torch.Generator | None = None) -> list[int]:
    """Draw the outcome of ``rule``: the kept drafted tokens and one bonus token.

    Returns
    -------
    list of int
        1 to N + 1 token ids.

    Examples
    --------
    >>> verify(Rule(torch.tensor([1.0]), torch.eye(2)), torch.tensor([5]))
    [5, 1]
    """
    uniform = torch.rand(len(rule.keep), generator=generator, dtype=rule.keep.dtype)
    passed = (uniform < rule.keep.cpu()).nonzero()
    kept = int(passed[-1]) + 1 if len(passed) else 0
    bonus = torch.multinomial(rule.next_token[kept].cpu(), 1, generator=generator)
    return [*draft_ids[:kept].tolist(), int(bonus)]


def verify_greedy(draft_ids: Tensor, target_logits: Tensor) -> list[int]:
    """Keep drafted tokens as long as each is the target's own first choice; then add that choice.

    Parameters
    ----------
    draft_ids
        ``[N]`` int64; N may be 0.
    target_logits
        ``[N + 1, V]``.

    Returns
    -------
    list of int
        1 to N + 1 token ids: exactly what N + 1 greedy steps would have given, cut at the miss.

    Examples
    --------
    >>> logits = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    >>> verify_greedy(torch.tensor([1, 1]), logits)
    [1, 0]
    """
    if target_logits.dim() != 2 or len(target_logits) != len(draft_ids) + 1:
        raise ValueError(
            f"{len(draft_ids)} drafted tokens need target logits [{len(draft_ids) + 1}, V], got "
            f"{list(target_logits.shape)}: the last row is for the bonus token"
        )
    if bool(target_logits.isnan().any()):
        raise ValueError("target_logits hold NaN: the first choice would be token 0, silently")
    choice = target_logits.argmax(-1)
    kept = int((draft_ids == choice[:-1]).long().cumprod(0).sum())
    return choice[: kept + 1].tolist()


def _checked(draft_ids: Tensor, draft_probs: Tensor, target_probs: Tensor) -> tuple[Tensor, Tensor]:
    count, vocab = len(draft_ids), target_probs.shape[-1]
    for name, tensor, rows in (
        ("draft_probs", draft_probs, count),
        ("target_probs", target_probs, count + 1),
    ):
        if tensor.shape != (rows, vocab):
            raise ValueError(
                f"{name} must be [{rows}, {vocab}] for {count} drafted tokens, got "
                f"{list(tensor.shape)}"
            )
        sums_to_one = (tensor.sum(-1) - 1).abs() < 1e-2
        if not bool(sums_to_one.all() and (tensor >= 0).all()):
            raise ValueError(f"each row of {name} must be a distribution: apply softmax to logits")
    if count == 0:
        raise ValueError("no drafted tokens: sample from the target directly")
    if bool(((draft_ids < 0) | (draft_ids >= vocab)).any()):
        raise ValueError(f"draft_ids must lie from 0 to {vocab - 1}, got {draft_ids.tolist()}")
    dtype = compute_dtype(torch.promote_types(draft_probs.dtype, target_probs.dtype))
    draft, target = draft_probs.to(dtype), target_probs.to(dtype)
    drawn = draft.gather(1, draft_ids[:, None]).squeeze(1)
    if bool((drawn <= 0).any()):
        where = int((drawn <= 0).nonzero()[0])
        raise ValueError(
            f"drafted token {where} (id {int(draft_ids[where])}) has probability 0 in draft_probs: "
            "pass the distribution that it was sampled from"
        )
    return draft, target


def _ratio(draft_ids: Tensor, draft: Tensor, target: Tensor) -> Tensor:
    column = draft_ids[:, None]
    return (target[:-1].gather(1, column) / draft.gather(1, column)).squeeze(1)


def _next_token(weight: Tensor, draft: Tensor, target: Tensor) -> Tensor:
    """Bonus distributions: what the kept prefix still owes the target, or the target at the end."""
    owed = (weight[:-1, None] * target[:-1] - draft).clamp(min=0)
    mass = owed.sum(-1, keepdim=True)
    # No mass means that this length is never the outcome; any distribution will do.
    owed = torch.where(mass > 0, owed / mass.clamp(min=torch.finfo(mass.dtype).tiny), target[:-1])
    return torch.cat([owed, target[-1:]])
