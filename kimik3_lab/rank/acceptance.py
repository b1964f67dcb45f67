"""Acceptance by script: the drafter computes, a seeded stream decides how much of it is kept.

Needs torch through the drafts it hands on. The rank ladder runs on it.

Random weights draft nothing that random weights would say, so nothing would be accepted. The
drafter's pass is run for its cost, and its tokens are exchanged for those of a script: a text that
was drawn for each request beforehand. Of eight drafted places as many are kept as a geometric law
says, whose mean with the token that comes on top is the one asked for. Both depend on the request's
seed and on the position alone, so every rung of the ladder does the same work.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from kimik3_lab.serving.executors.drafts import Draft, DraftRequest
from kimik3_lab.serving.executors.proposer import Proposer
from kimik3_lab.serving.executors.random_stream import RandomStream
from kimik3_lab.serving.sampling_params import SamplingParams

__all__ = ["Script", "ScriptedProposer", "acceptance_rate"]

_MASK = (1 << 64) - 1


def acceptance_rate(tokens_per_verify: float, num_drafts: int) -> float:
    """Chance of each draft, given those before it, that yields a mean with ``num_drafts`` places.

    Raises
    ------
    ValueError
        If the mean is not above 1, the token that always comes, and below 1 + ``num_drafts``.

    Examples
    --------
    >>> rate = acceptance_rate(3.4, 8)
    >>> round(rate, 3), round(1 + sum(rate**i for i in range(1, 9)), 3)
    (0.721, 3.4)
    """
    if not 1 < tokens_per_verify < 1 + num_drafts:
        raise ValueError(
            f"{num_drafts} drafts yield more than 1 and less than {1 + num_drafts} tokens a "
            f"verification, got {tokens_per_verify}"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        mean = 1 + sum(middle**i for i in range(1, num_drafts + 1))
        low, high = (middle, high) if mean < tokens_per_verify else (low, middle)
    return (low + high) / 2


class Script:
    """The text of every request, and how many drafts are kept at each position.

    Parameters
    ----------
    vocab_size : int
        Token ids are drawn below it, the special ones 0 to 2 and the last one left out.
    num_drafts : int
        K.
    tokens_per_verify : float
        Mean, the token that comes on top included.
    seed : int
        Of everything.

    Examples
    --------
    >>> script = Script(1000, 8, 3.4)
    >>> script.token(5, 17) == Script(1000, 8, 3.4).token(5, 17)
    True
    >>> 0 <= script.kept(5, 17) <= 8
    True
    """

    def __init__(
        self, vocab_size: int, num_drafts: int, tokens_per_verify: float, seed: int = 0
    ) -> None:
        self.vocab_size, self.num_drafts, self.seed = vocab_size, num_drafts, seed
        self.tokens_per_verify = tokens_per_verify
        self._log_rate = math.log(acceptance_rate(tokens_per_verify, num_drafts))
        self._texts: dict[int, list[int]] = {}
        self._kept: dict[int, dict[int, int]] = {}
        #: Verifications of full drafts so far, and tokens that they yielded.
        self.num_verifications = self.num_tokens = 0

    def again(self) -> Script:
        """Return the same script for another run: it counts anew, and nothing is drawn twice."""
        other = copy.copy(self)
        other.num_verifications = other.num_tokens = 0
        return other

    def token(self, request: int, position: int) -> int:
        """Token of a request's text."""
        return 3 + self._number(request, position, 1) % (self.vocab_size - 4)

    def tokens(self, request: int, start: int, count: int) -> list[int]:
        """Tokens from a position on."""
        text = self._texts.get(request, [])
        if start + count <= len(text):
            return text[start : start + count]
        return [self.token(request, start + i) for i in range(count)]

    def write(self, request: int, count: int, first: int = 0) -> None:
        """Draw a text beforehand, and from ``first`` on what is kept: no time is taken for it."""
        if len(self._texts.get(request, [])) < count:
            self._texts[request] = [self.token(request, i) for i in range(count)]
            kept = {i: self._draw_kept(request, i) for i in range(first, count)}
            self._kept.setdefault(request, {}).update(kept)

    def kept(self, request: int, position: int) -> int:
        """Drafts kept of a block whose first place is ``position``."""
        drawn = self._kept.get(request, {}).get(position)
        return self._draw_kept(request, position) if drawn is None else drawn

    def _draw_kept(self, request: int, position: int) -> int:
        uniform = (self._number(request, position, 2) + 1) / (_MASK + 2)
        return min(self.num_drafts, int(math.log(uniform) / self._log_rate))

    def verify(
        self,
        logits: Tensor,
        drafts: Sequence[Draft],
        params: Sequence[SamplingParams],
        streams: Sequence[RandomStream | None],
        positions: Sequence[int],
        *,
        method: str = "standard",
        best: Tensor | None = None,
    ) -> list[list[int]]:
        """Take the place of :func:`~kimik3_lab.serving.executors.rejection_sampler.verify_batch`.

        The most probable tokens are still chosen on the device and brought to the host, which waits
        for them as it has to.
        """
        (logits.argmax(-1) if best is None else best).tolist()
        chosen = []
        for draft, p, position in zip(drafts, params, positions, strict=True):
            request, known = p.seed or 0, draft.num_known
            count = 1 + min(known, self.kept(request, position)) if known else 1
            if known == self.num_drafts:
                self.num_verifications += 1
                self.num_tokens += count
            chosen.append(self.tokens(request, position, count))
        return chosen

    def _number(self, request: int, position: int, purpose: int) -> int:
        """64 bits that belong to a request, a position and a purpose (splitmix64)."""
        z = self.seed
        for word in (request, position, purpose):
            z = (z ^ word) * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15 & _MASK
            z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
            z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
            z ^= z >> 31
        return z


class ScriptedProposer:
    """A proposer whose passes are run and whose tokens are exchanged for the script's.

    Parameters
    ----------
    proposer : Proposer
        Does the work.
    script : Script
        Says the tokens.
    """

    def __init__(self, proposer: Proposer, script: Script) -> None:
        self.proposer, self.script = proposer, script
        self.num_speculative_tokens = proposer.num_speculative_tokens
        self.new_taps, self.write = proposer.new_taps, proposer.write
        self.copy_blocks = proposer.copy_blocks

    @property
    def num_forwards(self) -> int:
        """See :class:`~kimik3_lab.serving.executors.proposer.Proposer`."""
        return self.proposer.num_forwards

    def propose(self, requests: Sequence[DraftRequest]) -> Mapping[str, Draft]:
        """Run the drafter, then take what the script says next."""
        self.proposer.propose(requests)
        return {
            r.req_id: Draft(
                self.script.tokens(
                    r.params.seed or 0, r.num_context + 1, self.num_speculative_tokens
                )
            )
            for r in requests
        }
