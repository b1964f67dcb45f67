"""Chat sessions whose turns share their beginning: the sharing that Mooncake's traces show.

Needs numpy. Used by the generators of :mod:`kimik3_lab.benchmark.synthetic_traces`.

A prompt begins with the blocks of a template (a system prompt, tools), goes on with what the
session said before, and ends with what is new. So its first blocks are shared by all who use the
template and those behind by the turns of one session. How long ago they were used, and thus what a
cache of a given size still holds, follows from the time between turns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kimik3_lab.benchmark.length_curve import LengthCurve
from kimik3_lab.benchmark.synthetic_arrivals import RateWaves, round_down
from kimik3_lab.benchmark.trace_request import BLOCK_TOKENS, TraceRequest

__all__ = ["ChatSessions", "Templates"]

_EVEN = RateWaves(0.0)


@dataclass(frozen=True)
class Templates:
    """Beginnings that sessions share.

    Attributes
    ----------
    count
        Different templates; the first block is the same in all of them.
    zipf
        How unevenly they are used: template ``i`` is drawn in proportion to ``i ** -zipf``.
    blocks
        Mean length in blocks (geometric, at least 1). A prompt shorter than its template holds the
        blocks that fit.
    """

    count: int = 1
    zipf: float = 1.0
    blocks: float = 1.0

    def draw(self, sessions: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Lengths of the templates, and the template of each session.

        The lengths are the same for every seed: a few templates make up most of the hits, and a
        workload keeps its name only if those stay.
        """
        shares = (np.arange(self.count) + 0.5) / self.count
        lengths = np.ones(self.count, int)
        if self.blocks > 1:
            lengths = np.ceil(np.log1p(-shares) / np.log1p(-1 / self.blocks)).astype(int)
        lengths = np.random.default_rng(self.count).permutation(lengths)
        weights = np.arange(1, self.count + 1) ** -self.zipf
        return lengths, rng.choice(self.count, sessions, p=weights / weights.sum())


_ONE_BLOCK = Templates()


@dataclass(frozen=True)
class ChatSessions:
    """Sessions that begin at random and come back after a while.

    Attributes
    ----------
    rate
        Requests a second.
    input_tokens, output_tokens
        Lengths over all requests. Turns of a session are in order of their prompts' length.
    single_share
        Share of the sessions that have one turn.
    mean_turns
        Mean turns of the others (geometric, at least 2).
    likeness
        Correlation of the normal scores of two prompts of a session, in [0, 1): how much of the
        spread of lengths lies between sessions. The more, the less a turn adds.
    return_median_s, return_spread
        Time from a turn to the next: median, and standard deviation of the logarithm (lognormal).
    templates
        What prompts begin with.
    log_correlation
        Of the normal scores of prompt and answer.
    waves
        Slow changes of the rate.
    stamp_s
        Times are rounded down to multiples of this.
    """

    rate: float
    input_tokens: LengthCurve
    output_tokens: LengthCurve
    single_share: float
    mean_turns: float
    likeness: float
    return_median_s: float
    return_spread: float
    templates: Templates = _ONE_BLOCK
    log_correlation: float = 0.0
    waves: RateWaves = _EVEN
    stamp_s: float = 0.0

    def requests(
        self, duration_s: float, rate_scale: float, rng: np.random.Generator
    ) -> list[TraceRequest]:
        """Generate ``duration_s`` seconds; sessions begin ``rate_scale`` times as often.

        Sessions begin before time 0 too, so that the load is even from the start; of them only the
        later turns are seen, as in a recording.
        """
        mean_turns = self.single_share + (1 - self.single_share) * self.mean_turns
        # Long enough for nearly all sessions that still have a turn inside.
        before = 12 * self.return_median_s * np.exp(self.return_spread**2 / 2)
        expected = self.rate * rate_scale / mean_turns * (before + duration_s)
        sessions = int(rng.poisson(expected))
        turns = np.where(
            rng.random(sessions) < self.single_share,
            1,
            1 + rng.geometric(1 / (self.mean_turns - 1), sessions),
        )
        owner = np.repeat(np.arange(sessions), turns)
        first = np.cumsum(turns) - turns
        starts = rng.uniform(-before, duration_s, sessions)
        scores = rng.standard_normal(len(owner))
        own = np.sqrt(self.likeness) * rng.standard_normal(sessions)[owner]
        # Sorted inside each session: a turn is not shorter than the one before it.
        scores = scores[np.lexsort((scores, owner))]
        scores = own + np.sqrt(1 - self.likeness) * scores
        given = self.input_tokens.tokens(scores)
        noise = np.sqrt(1 - self.log_correlation**2) * rng.standard_normal(len(owner))
        answered = self.output_tokens.tokens(self.log_correlation * scores + noise)
        gaps = self.return_median_s * np.exp(self.return_spread * rng.standard_normal(len(owner)))
        gaps[first] = 0.0
        passed = np.cumsum(gaps)
        times = starts[owner] + passed - passed[first][owner]
        times = round_down(self.waves.warp(times, duration_s, rng), self.stamp_s)
        lengths, template = self.templates.draw(sessions, rng)
        namer = _BlockNames(lengths)
        order = np.lexsort((np.arange(len(owner)), times))
        # Names count up in the order of arrival, so they must be given in that order.
        return [
            TraceRequest(
                float(times[i]),
                int(given[i]),
                int(answered[i]),
                namer.names(int(owner[i]), int(template[owner[i]]), int(given[i])),
                f"s{owner[i]}",
            )
            for i in order
            if 0 <= times[i] < duration_s
        ]


class _BlockNames:
    """Names for the blocks of prompts: new ones for what is new, in order."""

    def __init__(self, template_blocks: np.ndarray) -> None:
        self._next = 0
        self._template_blocks = template_blocks
        self._root = self._fresh(1)
        self._templates: dict[int, list[int]] = {}
        self._sessions: dict[int, list[int]] = {}

    def _fresh(self, count: int) -> list[int]:
        names = list(range(self._next, self._next + count))
        self._next += count
        return names

    def names(self, session: int, template: int, tokens: int) -> tuple[int, ...]:
        """Name the blocks of a prompt: the known full ones of its session, then new ones."""
        full, rest = divmod(tokens, BLOCK_TOKENS)
        chain = self._sessions.get(session)
        if chain is None:
            blocks = int(self._template_blocks[template])
            known = self._templates.setdefault(template, list(self._root))
            wanted = min(blocks, full)
            if len(known) < wanted:
                known += self._fresh(wanted - len(known))
            chain = self._sessions[session] = known[:wanted]
        if len(chain) < full:
            chain += self._fresh(full - len(chain))
        # The block that is not full goes on to change, so nobody else has it.
        return (*chain[:full], *(self._fresh(1) if rest else ()))
