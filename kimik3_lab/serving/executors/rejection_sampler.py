"""What is kept of the drafts of a step: one call for all requests, drafting or not.

Needs torch. Lesson 09 explains the rules, the engine of lesson 10 calls this. Names are vLLM's, see
``vllm/v1/sample/rejection_sampler.py`` and ``rejection_sample_method``.

A greedy request keeps its draft as long as it is what the target would have said. A request with a
temperature has three rules to choose from, and all three leave its tokens distributed exactly as
the target's, whatever the drafter does:

``standard``
    Token by token with probability ``p_target / p_draft`` (:func:`~kimik3_lab.reference.
    speculative.standard_rule`).
``block``
    The whole draft at once, which keeps no fewer on average
    (:func:`~kimik3_lab.reference.speculative.block_rule`).
``coupled``
    Draw from the target as if there were no draft, with the numbers of seed and position; keep the
    draft while it agrees. A little less is kept, but a seed now gives the same *tokens* with any
    drafts and with none, where the others give the same *distribution*: with them a step that had
    no room for the whole draft changes the text. Best with a drafter that draws with the same
    numbers (``shared_noise`` of the proposer), see "drafter-invariant" in arXiv 2408.07978.

A draft without probabilities was not drawn but chosen, so its distribution is one-hot. Then both
first rules say the same as the third: keep draft x with probability ``p_target(x)``, otherwise
draw from what is left. So such drafts always go by ``coupled``, and a draft whose probabilities
are lost may be passed without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from kimik3_lab.reference.speculative import block_rule, standard_rule, verify
from kimik3_lab.serving.executors.drafts import Draft
from kimik3_lab.serving.executors.logprobs import token_logprobs
from kimik3_lab.serving.executors.random_stream import RandomStream
from kimik3_lab.serving.executors.sampler import check_logits, distribution, draw
from kimik3_lab.serving.outputs import TokenLogprobs
from kimik3_lab.serving.request import SamplingParams

__all__ = ["RejectionSampleMethod", "batch_logprobs", "verify_batch"]

RejectionSampleMethod: TypeAlias = Literal["standard", "block", "coupled"]
_METHODS = get_args(RejectionSampleMethod)
_RULES = {"standard": standard_rule, "block": block_rule}


def verify_batch(
    logits: Tensor,
    drafts: Sequence[Draft],
    params: Sequence[SamplingParams],
    streams: Sequence[RandomStream | None],
    positions: Sequence[int],
    *,
    method: RejectionSampleMethod = "standard",
    best: Tensor | None = None,
) -> list[list[int]]:
    """Choose the new tokens of all requests of a step.

    Parameters
    ----------
    logits : Tensor
        ``[sum of (len(draft) + 1), vocab]``, float32 or wider. A request's rows are those of its
        last known token and of its draft tokens, placeholders included, one request after another.
    drafts, params, streams
        One for each request; without a draft, ``Draft([])``.
    positions
        Of each request's first new token: the number of its known tokens.
    method : {"standard", "block", "coupled"}
        The rule for drafts that were drawn. Greedy requests have their own.
    best : Tensor, optional
        int64, for each row the token of the largest logit, -1 if the logits are not finite, for who
        has worked it out already.

    Returns
    -------
    list of list of int
        For each request the drafted tokens kept and one more: 1 to N + 1 token ids.

    Raises
    ------
    ValueError
        If the method is unknown, the rows do not fit the drafts, or a row that matters has no
        probabilities.

    Examples
    --------
    >>> logits = torch.eye(4)[[1, 2, 3, 0]]  # the target says 1 2 3; and 0 for the second request
    >>> greedy = [SamplingParams()] * 2
    >>> verify_batch(logits, [Draft([1, 3]), Draft([])], greedy, [None] * 2, [5, 9])
    [[1, 2], [0]]
    """
    if method not in _METHODS:
        raise ValueError(f"method must be one of {_METHODS}, got {method!r}")
    firsts = _first_rows(logits, drafts)
    needed = [
        row
        for first, draft in zip(firsts, drafts, strict=True)
        for row in range(first, first + draft.num_known + 1)
    ]
    if not needed:
        return []
    if best is None:
        largest, best = logits.max(-1)  # NaN and inf both come through
        best = best.where(largest.isfinite(), -1)
    choices: list[int] = best.tolist()  # the one time that the host waits for the device
    if any(choices[row] < 0 for row in needed):
        check_logits(logits[needed], needed)
    # The target's distributions, of all rows that are not greedy at once.
    drawn = [i for i, p in enumerate(params) if not p.greedy]
    rows = [firsts[i] + n for i in drawn for n in range(drafts[i].num_known + 1)]
    owners = [i for i in drawn for _ in range(drafts[i].num_known + 1)]
    probabilities = distribution(logits[rows], [params[i] for i in owners]) if rows else logits
    by_rule = {i for i in drawn if method != "coupled" and _has_distribution(drafts[i])}
    chosen = [place for place, i in enumerate(owners) if i not in by_rule]
    if chosen:
        winners = draw(
            probabilities[chosen],
            [streams[owners[place]] for place in chosen],
            [positions[owners[place]] + rows[place] - firsts[owners[place]] for place in chosen],
        )
        for place, winner in zip(chosen, winners, strict=True):
            choices[rows[place]] = winner
    new_token_ids, place = [], 0
    for i, draft in enumerate(drafts):
        count = draft.num_known
        if i in by_rule:
            target = probabilities[place : place + count + 1]
            new_token_ids.append(_by_rule(method, draft, target, streams[i], positions[i]))
        else:
            kept, choice = 0, choices[firsts[i] : firsts[i] + count + 1]
            while kept < count and draft.token_ids[kept] == choice[kept]:
                kept += 1
            new_token_ids.append(choice[: kept + 1])
        place += 0 if params[i].greedy else count + 1
    return new_token_ids


def _has_distribution(draft: Draft) -> bool:
    return draft.probs is not None and draft.num_known > 0


def _by_rule(
    method: RejectionSampleMethod,
    draft: Draft,
    target: Tensor,
    stream: RandomStream | None,
    position: int,
) -> list[int]:
    """Verify a drawn draft by a rule of :mod:`kimik3_lab.reference.speculative`."""
    if stream is None:
        raise ValueError(
            "a request with a temperature needs a random stream: pass RandomStream.for_request"
        )
    assert draft.probs is not None
    count = len(target) - 1
    ids = torch.tensor(draft.token_ids[:count], device=target.device)
    rule = _RULES[method](ids, draft.probs[:count].to(target.device), target)
    # A verification is the only one that begins at its position, so its numbers are fresh.
    return verify(rule, ids.cpu(), stream.generator(position, "verify"))


def batch_logprobs(
    logits: Tensor,
    drafts: Sequence[Draft],
    sampled: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
) -> list[list[TokenLogprobs]] | None:
    """Describe the tokens that :func:`verify_batch` returned: ``ModelRunnerOutput.logprobs``.

    Returns
    -------
    list of list of TokenLogprobs, or None
        An entry for each token, none for a request that did not ask. None if nobody asked.

    Examples
    --------
    >>> asks, silent = SamplingParams(logprobs=0), SamplingParams()
    >>> entries = batch_logprobs(torch.zeros(3, 4), [Draft([1]), Draft([])], [[0], [2]],
    ...                          [asks, silent])
    >>> len(entries[0]), entries[0][0].rank, entries[1]
    (1, 4, [])
    """
    if all(p.logprobs is None for p in params):
        return None
    firsts = _first_rows(logits, drafts)
    rows: list[int] = []
    token_ids: list[int] = []
    num_top: list[int] = []
    for first, tokens, p in zip(firsts, sampled, params, strict=True):
        if p.logprobs is not None:
            rows += range(first, first + len(tokens))
            token_ids += tokens
            num_top += [p.logprobs] * len(tokens)
    entries = iter(token_logprobs(logits[rows], token_ids, num_top))
    return [
        [] if p.logprobs is None else [next(entries) for _ in tokens]
        for tokens, p in zip(sampled, params, strict=True)
    ]


def _first_rows(logits: Tensor, drafts: Sequence[Draft]) -> list[int]:
    ends = list(accumulate(len(draft.token_ids) + 1 for draft in drafts))
    total = ends[-1] if ends else 0
    if logits.dim() != 2 or len(logits) != total:
        raise ValueError(
            f"{len(drafts)} requests with {total - len(drafts)} draft tokens need logits "
            f"[{total}, vocab], got {list(logits.shape)}: a row for each draft token, and one "
            "before them for each request"
        )
    return [0, *ends[:-1]] if ends else []
