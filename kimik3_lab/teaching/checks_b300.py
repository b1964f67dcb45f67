"""Answer checks of lesson 11: floor of a step, chunks of a prompt, best number of drafts.

Needs numpy (through the cost model). Answers are judged by what must be true of them, or against
the cost model and vLLM's published figure; nothing is compared with the lesson's own solution.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from numbers import Real

from kimik3_lab.config import K3Config
from kimik3_lab.performance.hardware import accelerator
from kimik3_lab.performance.parallelism import Parallelism
from kimik3_lab.performance.scenarios import Scenario
from kimik3_lab.performance.step_cost import CostModel
from kimik3_lab.performance.step_work import decode_work

__all__ = ["check_1", "check_2", "check_3"]

#: Even load, and neighbours that share no more than chance: what exercise 1 assumes.
_EVEN = Scenario(name="even, independent", routing_skew=0.0, token_reuse=0.0)


def check_1(floor_ms: Callable[[int, int, int], float]) -> None:
    """Check exercise 1 against the bytes that the cost model counts, for several machines' worth.

    Raises
    ------
    AssertionError
        Naming the step, and which part of the bytes the difference looks like.
    """
    model = CostModel(K3Config.released(), "B300", Parallelism(tp=8), scenario=_EVEN)
    bandwidth = accelerator("B300").bandwidth
    cases = ((1, 8500, 0), (16, 8500, 0), (16, 8500, 8), (4, 120_000, 8), (64, 1000, 3))
    for requests, context, drafts in cases:
        work = decode_work(requests, context=context, num_speculative_tokens=drafts)
        moved = model.moved_bytes(work)
        expected = 1e3 * sum(moved.values()) / bandwidth
        name = f"{requests} requests at {context:,} tokens with {drafts} drafts each"
        answer = _number(floor_ms(requests, context, drafts), name)
        off = answer - expected
        parts = {part: 1e3 * size / bandwidth for part, size in moved.items()}
        near = min(parts, key=lambda part: abs(abs(off) - parts[part]))
        assert abs(off) <= 0.002 * expected, (
            f"{name}: expected {expected:.3f} ms, got {answer:.3f}; the difference of {off:+.3f} "
            f"is nearest to the part '{near}' ({parts[near]:.3f} ms)"
        )
    print(f"exercise 1: right in {len(cases)} cases")


def check_2(
    first_token: Callable[
        [int, int, int, int, Callable[[int], float]], tuple[Sequence[int], float]
    ],
) -> None:
    """Check exercise 2 by what must hold of any prompt that is cut up, and by the published figure.

    Raises
    ------
    AssertionError
        Naming the case and the rule that is broken.
    """

    def seconds(rows: int) -> float:
        return 0.011 + 4.1e-5 * rows + (0.21 if rows > 512 else 0.0)

    rng = random.Random(11)
    cases = [(8000, 1024, 0, 8), (8000, 1024, 3, 8), (8000, 16384, 3, 8), (27, 1024, 0, 8)]
    cases += [(997, 1024, 3, 8), (998, 1024, 3, 8)]
    cases += [
        (
            rng.randint(1, 20_000),
            rng.choice((1024, 2048, 8192)),
            rng.randint(0, 20),
            rng.randint(0, 8),
        )
        for _ in range(20)
    ]
    for prompt, limit, decoding, drafts in cases:
        name = f"prompt of {prompt} tokens, {limit} a step, {decoding} decode with {drafts} drafts"
        asked: list[int] = []

        def priced(rows: int, asked: list[int] = asked) -> float:
            asked.append(rows)
            return seconds(rows)

        answer = first_token(prompt, limit, decoding, drafts, priced)
        assert isinstance(answer, tuple) and len(answer) == 2, (
            f"{name}: expected the chunks and their seconds, got {answer!r}"
        )
        chunks, total = list(answer[0]), _number(answer[1], name)
        decodes = decoding * (1 + drafts)
        room = limit - decodes
        assert sum(chunks) == prompt, f"{name}: the chunks hold {sum(chunks)} tokens"
        assert all(0 < chunk <= room for chunk in chunks), (
            f"{name}: {decodes} rows decode, so a chunk has 1 to {room} tokens, got {chunks}"
        )
        assert all(chunk == room for chunk in chunks[:-1]), (
            f"{name}: a chunk stays below {room} though more of the prompt waits: {chunks}"
        )
        expected = sum(seconds(chunk + decodes) for chunk in chunks)
        assert math.isclose(total, expected, rel_tol=1e-9), (
            f"{name}: the steps take {expected:.4f} s, got {total:.4f}; a step has its chunk and "
            f"{decodes} rows that decode"
        )
    published, seconds_taken = first_token(8000, 1024, 0, 8, lambda rows: 0.28286)
    assert len(published) == 8 and abs(seconds_taken - 2.2629) < 1e-4, (
        f"vLLM 0.27.1 took 8 steps of 282.86 ms for 8,000 tokens, 2.2629 s; got "
        f"{len(published)} and {seconds_taken:.4f} s"
    )
    print(f"exercise 2: right on {len(cases)} prompts and on the published one")


def check_3(best_k: Callable[[float, Callable[[int], float]], int]) -> None:
    """Check exercise 3: no other number of drafts may be quicker by more than a thousandth.

    Raises
    ------
    AssertionError
        Naming the case, the answer's milliseconds a token and the best ones.
    """

    def line(base: float, row: float) -> Callable[[int], float]:
        return lambda k: base + row * (1 + k)

    def stairs(k: int) -> float:
        return 0.010 + (0.004 if k >= 4 else 0.0)

    steps = {
        "rows are free": line(0.010, 0.0),
        "rows cost a little": line(0.012, 0.0006),
        "rows are all that counts": line(0.0, 0.003),
        "a jump at 4 drafts": stairs,
    }
    count = 0
    for name, step in steps.items():
        for chance in (0.0, 0.3, 0.6, 0.8, 0.95):
            text = f"{name}, a draft is right with {chance:.0%}"
            try:
                k = best_k(chance, step)
            except ArithmeticError as error:
                raise AssertionError(
                    f"{text}: {type(error).__name__}, {error}. Every probability from 0 up to, "
                    "but not including, 1 may come"
                ) from error
            assert isinstance(k, int) and not isinstance(k, bool) and 0 <= k <= 8, (
                f"{text}: expected a whole number from 0 to 8, got {k!r}"
            )
            speeds = [step(n) / _tokens(chance, n) for n in range(9)]
            assert speeds[k] <= min(speeds) * 1.001, (
                f"{text}: K = {k} takes {1e3 * speeds[k]:.3f} ms a token, "
                f"K = {speeds.index(min(speeds))} takes {1e3 * min(speeds):.3f}"
            )
            count += 1
    print(f"exercise 3: right in {count} cases")


def _tokens(chance: float, drafts: int) -> float:
    """Tokens of a verification, counted one outcome at a time."""
    outcomes = [chance**kept * (1 - chance) for kept in range(drafts)] + [chance**drafts]
    return sum((1 + kept) * p for kept, p in enumerate(outcomes))


def _number(value: object, name: str) -> float:
    assert isinstance(value, Real) and not isinstance(value, bool), (
        f"{name}: expected a number, got {value!r}"
    )
    return float(value)
