"""What the steps of a run come to: counts, and seconds by kind of step and by part.

Needs the standard library and the cost model's counts. Lesson 11 prints it with
``k3lab simulate --explain``. Its size does not depend on the length of the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from kimik3_lab.performance.step_work import StepWork

__all__ = ["KindTotals", "StepKind", "StepTotals", "step_kind"]

StepKind = Literal["prefill", "decode", "mixed"]


def step_kind(work: StepWork) -> StepKind:
    """Whether a step computes prompts, decodes, or does both.

    >>> step_kind(StepWork(num_tokens=9, num_decode_tokens=9, num_decode_seqs=1))
    'decode'
    """
    if not work.num_prefill_seqs:
        return "decode"
    return "mixed" if work.num_decode_seqs else "prefill"


@dataclass(slots=True)
class KindTotals:
    """Steps of one kind.

    Attributes
    ----------
    steps, seconds
        Their number and length.
    parts
        Seconds of each part that the cost model names.
    tokens, prefill_tokens, decode_seqs
        Rows, rows of prompts, and requests that decoded, summed over the steps.
    rest
        The other counts of :class:`StepWork`, summed in the order of :data:`_REST`.
    """

    steps: int = 0
    seconds: float = 0.0
    parts: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    prefill_tokens: int = 0
    decode_seqs: int = 0
    rest: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)

    def add(self, other: KindTotals) -> None:
        """Count the steps of another run too."""
        self.steps += other.steps
        self.seconds += other.seconds
        self.parts.update(other.parts)
        self.tokens += other.tokens
        self.prefill_tokens += other.prefill_tokens
        self.decode_seqs += other.decode_seqs
        self.rest = _sums(self.rest, other.rest)

    def mean_work(self, num_speculative_tokens: int) -> StepWork:
        """Make the step that all steps of this kind are on average, in whole numbers."""
        steps = max(self.steps, 1)
        prefill = round(self.prefill_tokens / steps)
        decode = round((self.tokens - self.prefill_tokens) / steps)
        return StepWork(
            num_tokens=prefill + decode,
            num_prefill_tokens=prefill,
            num_decode_tokens=decode,
            num_decode_seqs=round(self.decode_seqs / steps),
            num_speculative_tokens=num_speculative_tokens,
            **{name: round(n / steps) for name, n in zip(_REST, self.rest, strict=True)},
        )


@dataclass(slots=True)
class StepTotals:
    """All steps of a run.

    Attributes
    ----------
    kinds
        By kind of step.
    draft_tokens, accepted_tokens
        Drafts that were verified, and those that were right.
    verifications
        How often a request had drafts verified.
    sampled_tokens
        Tokens that came out of the steps, with those behind the end of a request.
    cached_tokens
        Prompt tokens that requests found in the prefix cache when they took a seat.
    preemptions
        Requests that lost their blocks.
    """

    kinds: dict[StepKind, KindTotals] = field(
        default_factory=lambda: {kind: KindTotals() for kind in get_args(StepKind)}
    )
    draft_tokens: int = 0
    accepted_tokens: int = 0
    verifications: int = 0
    sampled_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0

    def count(self, work: StepWork, seconds: float, parts: Mapping[str, float]) -> None:
        """Count one step."""
        kind = self.kinds[step_kind(work)]
        kind.steps += 1
        kind.seconds += seconds
        kind.tokens += work.num_tokens
        kind.prefill_tokens += work.num_prefill_tokens
        kind.decode_seqs += work.num_decode_seqs
        seqs, context, pairs, logits, drafts = kind.rest
        kind.rest = (
            seqs + work.num_prefill_seqs,
            context + work.decode_context,
            pairs + work.prefill_pairs,
            logits + work.num_logits,
            drafts + work.num_draft_seqs,
        )
        sums = kind.parts
        for name, part in parts.items():
            sums[name] += part  # type: ignore[assignment]  # a Counter of seconds

    def add(self, other: StepTotals) -> None:
        """Count another run too, for example that of another replica."""
        for name, kind in other.kinds.items():
            self.kinds[name].add(kind)
        for count in _COUNTS:
            setattr(self, count, getattr(self, count) + getattr(other, count))

    @property
    def steps(self) -> int:
        """Steps of all kinds."""
        return sum(kind.steps for kind in self.kinds.values())

    @property
    def seconds(self) -> float:
        """Time in which a step ran; the rest of a run the machine was idle."""
        return sum(kind.seconds for kind in self.kinds.values())

    @property
    def tokens(self) -> int:
        """Rows that were computed, rejected drafts and repetitions included."""
        return sum(kind.tokens for kind in self.kinds.values())

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part over all kinds, the largest first."""
        total: Counter[str] = Counter()
        for kind in self.kinds.values():
            total.update(kind.parts)
        return dict(total.most_common())

    @property
    def acceptance_length(self) -> float | None:
        """Tokens that a verification brought on average; None without one."""
        if not self.verifications:
            return None
        return 1.0 + self.accepted_tokens / self.verifications


_REST = ("num_prefill_seqs", "decode_context", "prefill_pairs", "num_logits", "num_draft_seqs")


def _sums(
    one: tuple[int, int, int, int, int], other: tuple[int, int, int, int, int]
) -> tuple[int, int, int, int, int]:
    a, b, c, d, e = (x + y for x, y in zip(one, other, strict=True))
    return a, b, c, d, e


_COUNTS = (
    "draft_tokens",
    "accepted_tokens",
    "verifications",
    "sampled_tokens",
    "cached_tokens",
    "preemptions",
)
