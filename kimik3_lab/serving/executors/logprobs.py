"""How likely the chosen tokens were: what a client gets that asks for ``logprobs``.

Needs torch. Lesson 10 shows them in the stream. They describe the model's own distribution, before
temperature and the rest (vLLM's default, ``logprobs_mode`` of ``raw_logprobs``): the answer to
"what did the model think", not to "what could have been drawn".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from kimik3_lab.serving.executors.pinned import to_device
from kimik3_lab.serving.outputs import TokenLogprobs

__all__ = ["LogprobTensors", "logprob_tensors", "token_logprobs"]


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Describe the token chosen in each row.

    Parameters
    ----------
    logits : Tensor
        ``[M, vocab]``, as the model gave them.
    token_ids
        The M chosen tokens.
    num_top
        How many of the most probable tokens to report for each row: ``SamplingParams.logprobs``.
        More than the vocabulary has is the whole vocabulary.

    Returns
    -------
    list of TokenLogprobs

    Examples
    --------
    >>> import torch
    >>> (entry,) = token_logprobs(torch.tensor([[0.25, 0.5, 0.25]]).log(), [2], [1])
    >>> round(entry.logprob, 4), entry.rank, entry.top[0][0]
    (-1.3863, 3, 1)
    """
    if not len(token_ids):
        return []
    chosen = to_device(token_ids, logits.device)
    return logprob_tensors(logits, chosen, max(num_top)).describe(token_ids, num_top)


class LogprobTensors(NamedTuple):
    """What :func:`token_logprobs` reports, still on the device (vLLM: ``LogprobsTensors``).

    Attributes
    ----------
    chosen, ranks : Tensor
        float64 and int64 ``[M]``, of the chosen tokens.
    values, ids : Tensor
        ``[M, most]``: the most probable tokens, the likeliest first.
    """

    chosen: Tensor
    ranks: Tensor
    values: Tensor
    ids: Tensor

    def describe(self, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
        """Read the tensors and list what they say, a row for each token."""
        best = [
            tuple(zip(row_ids[:count], row_values[:count], strict=True))
            for row_ids, row_values, count in zip(
                self.ids.tolist(), self.values.tolist(), num_top, strict=True
            )
        ]
        return [
            TokenLogprobs(token_id, logprob, rank, top)
            for token_id, logprob, rank, top in zip(
                token_ids, self.chosen.tolist(), self.ranks.tolist(), best, strict=True
            )
        ]


def logprob_tensors(logits: Tensor, token_ids: Tensor, most: int) -> LogprobTensors:
    """Compute what describes the tokens ``[M]`` chosen from ``logits [M, vocab]``.

    ``most`` is the largest number of most probable tokens that is asked for.
    """
    logprobs = logits.double().log_softmax(-1)
    chosen = logprobs.gather(-1, token_ids.unsqueeze(-1))
    ranks, most = (logprobs >= chosen).sum(-1), min(most, logprobs.shape[-1])
    # Stable, so that equals are reported in the order of their ids.
    values, ids = logprobs.sort(dim=-1, descending=True, stable=True) if most else (chosen, chosen)
    return LogprobTensors(chosen.squeeze(-1), ranks, values[:, :most], ids[:, :most])
