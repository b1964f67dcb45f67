"""Answer checks of lesson 09. Needs the standard library only.

The second one judges by decisions that vLLM itself made (``data/golden/vllm_scheduler``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from numbers import Integral

from kimik3_lab import paths
from kimik3_lab.serving.spec_decode import max_num_new_slots_for_drafting

__all__ = ["check_1", "check_2"]

#: The version whose recordings follow the adaptive rule, and the set-up of its table.
_VERSION, _ROWS, _K, _PROMPT = "0.32.0", 8192, 8, 30_000


def check_1(largest_k: Callable[[int, int, int], int]) -> None:
    """Check exercise 1: the largest K that fits, and no larger one.

    Raises
    ------
    AssertionError
        Naming the case, and why the answer is too large or too small.
    """
    cases = ((8192, 128, 4096), (8192, 1, 8000), (2048, 64, 1024), (1024, 15, 896), (512, 200, 256))
    for budget, running, chunk in cases:
        k = largest_k(budget, running, chunk)
        name = f"budget {budget}, {running} running, chunk {chunk}"
        assert isinstance(k, Integral) and k >= 0, f"{name}: expected a number of drafts, got {k!r}"
        rows = _rows(running, chunk, k)
        assert k == 0 or rows <= budget, f"{name}: K = {k} needs {rows} rows"
        more = _rows(running, chunk, k + 1)
        assert more > budget, f"{name}: K = {k + 1} fits too, with {more} rows"
    print(f"exercise 1: right in {len(cases)} cases")


def _rows(running: int, chunk: int, k: int) -> int:
    """Rows of a step: tokens of everybody, and drafting rows for each, the prompt included."""
    return running * (1 + k) + chunk + (running + 1) * (k - 1)


def check_2(hand_out: Callable[[Sequence[int], int, int], Sequence[int]]) -> None:
    """Check exercise 2 against vLLM's recorded decisions, and on steps that are too small.

    Raises
    ------
    AssertionError
        Naming the step, what came back and what vLLM (or the rule) gives.
    """
    path = paths.data_dir() / "golden" / "vllm_scheduler" / "token_budget.json"
    table = json.loads(path.read_text(encoding="utf-8"))[_VERSION]
    seen = 0
    for row in table:
        method, running = row["method"], row["running"]
        if "prefill" not in row:
            continue
        slots = max_num_new_slots_for_drafting(method, _K if method else 0, "adaptive")
        wants = [1 + (_K if method else 0)] * (running - 1) + [_PROMPT]
        answer = hand_out(list(wants), _ROWS, slots)
        name = f"{running - 1} requests with drafts of {method}, then a long prompt"
        assert answer is not None, f"{name}: expected {len(wants)} numbers, got None"
        given = list(answer)
        assert len(given) == len(wants), f"{name}: expected {len(wants)} numbers, got {len(given)}"
        assert given[-1] == row["prefill"], (
            f"{name}: vLLM {_VERSION} gives the prompt {row['prefill']} tokens, got {given[-1]}"
        )
        assert sum(given) == row["total"], (
            f"{name}: vLLM {_VERSION} schedules {row['total']} tokens, got {sum(given)}"
        )
        seen += 1
    for wants, budget, slots, expected in (
        ([9, 9, 9], 40, 7, [9, 9, 1]),
        ([9, 9, 9], 39, 7, [9, 9, 0]),
        ([50, 9], 40, 7, [33, 0]),
        ([5, 5], 7, 7, [0, 0]),
        ([3, 2, 4], 10, 0, [3, 2, 4]),
        ([], 10, 3, []),
    ):
        given = list(hand_out(list(wants), budget, slots))
        assert given == expected, (
            f"{wants} in {budget} rows with {slots} beside each: expected {expected}, got {given}"
        )
    print(f"exercise 2: right, also on {seen} decisions of vLLM {_VERSION}")
