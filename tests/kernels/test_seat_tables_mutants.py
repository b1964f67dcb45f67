"""Wrong kernels of the seat tables, one mistake each: the checks must refuse them all."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutants import CONTROL, Mutant, first_failure, use
from seat_cases import I32, Case, check

pytest.importorskip("triton", reason="running kernels needs Triton")

# NumPy, which runs the kernels here, remarks on some of the mistakes.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CASES = [
    Case(9, 2, 4, seed=3),
    Case(6, 3, 3, I32, seed=5),
    Case(4, 0, 4, seed=0),
    Case(6, 3, 3, keeps_states=False, seed=6),
    *(Case(6, 3, 3, enabled=enabled, seed=7) for enabled in (False, True)),
]

MUTANTS = [
    # Filling in
    Mutant("last-token-in-no-row", "own = tl.where(place == 0,", "own = tl.where(place < 0,"),
    Mutant("drafts-one-row-early", "num_drafts + place - 1", "num_drafts + place"),
    Mutant("drafts-of-the-request-s-number", "draft = drafts_ptr + slot *",
           "draft = drafts_ptr + request *"),
    Mutant("known-tokens-are-lost", "tl.where(planned < 0, own, planned)", "own"),
    Mutant("a-missing-draft-stays-negative", "tl.maximum(token, 0)", "token"),
    Mutant("every-row-at-the-start", "start + place, mask", "start + 0 * place, mask"),
    Mutant("position-behind-the-last-token", "start + place, mask", "start + place + 1, mask"),
    Mutant("start-as-planned", "tl.store(starts_ptr + request, start)", "pass"),
    Mutant("state-as-planned",
           "tl.store(accepted_ptr + request, tl.load(num_accepted_ptr + slot))", "pass"),
    Mutant("rows-of-the-first-request", "row = request * num_tokens + place", "row = place"),
    Mutant("one-row-missing", "inside = place < num_tokens", "inside = place < num_tokens - 1"),
    Mutant("one-row-too-many", "inside = place < num_tokens", "inside = place <= num_tokens"),
    # Verification
    Mutant("one-draft-too-many", "tl.where(place <= num_kept, choice, -1)",
           "tl.where(place <= num_kept + 1, choice, -1)"),
    Mutant("no-token-behind-the-drafts", "tl.where(is_sampled, num_kept + 1, 0)",
           "tl.where(is_sampled, num_kept, 0)"),
    Mutant("drafts-are-believed", "(drafted >= 0) & (drafted == choice)", "drafted >= 0"),
    Mutant("no-draft-is-right-if-nothing-is-chosen", "(drafted >= 0) & (drafted == choice)",
           "drafted == choice"),
    Mutant("drafts-from-the-second-on", "drafts_ptr + slot * num_drafts + place, mask",
           "drafts_ptr + slot * num_drafts + tl.minimum(place + 1, num_drafts - 1), mask"),
    Mutant("drafts-of-the-first-seat", "drafts_ptr + slot * num_drafts + place, mask",
           "drafts_ptr + place, mask"),
    Mutant("rows-that-do-not-matter-break", " & (place <= num_known)", ""),
    Mutant("only-kept-rows-break", "(place <= num_known)", "(place <= num_kept)"),
    Mutant("nothing-breaks", "broken.to(tl.int64)", "0 * broken.to(tl.int64)"),
    Mutant("logits-of-the-first-request", "best_ptr + first + place", "best_ptr + place"),
    Mutant("rows-behind-the-logits", "mask=place <= last_row", "mask=place <= most + last_row"),
    Mutant("who-is-not-sampled-from-speaks", "tl.where(is_sampled, num_kept + 1, 0)",
           "num_kept + 1"),
    # Moving on
    Mutant("nobody-moves-on", "moves_on = slot < num_slots", "moves_on = slot <= num_slots"),
    Mutant("moves-on-unasked", "(tl.load(enabled_ptr) != 0)", "(tl.load(enabled_ptr) >= 0)"),
    Mutant("rejected-rows-are-kept", "tl.where(verified > 0, num_new.to(tl.int64), planned)",
           "planned"),
    Mutant("rows-of-a-prompt-are-forgotten",
           "tl.where(verified > 0, num_new.to(tl.int64), planned)", "num_new.to(tl.int64)"),
    Mutant("seats-start-again", "before + num_rows", "num_rows"),
    Mutant("state-behind-all-rows", "state = tl.where(verified > 0, num_new, 1)",
           "state = tl.where(verified > 0, verified + 1, 1)"),
    Mutant("state-of-a-prompt", "state = tl.where(verified > 0, num_new, 1)", "state = num_new"),
    Mutant("first-of-the-new-tokens-is-fed", "tl.where(place == num_kept, choice, 0)",
           "tl.where(place == 0, choice, 0)"),
    Mutant("nothing-is-fed-as-no-token", "tl.maximum(last, 0)", "last"),
    Mutant("last-token-without-a-new-one", "mask=moves_on & is_sampled", "mask=moves_on"),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_check_refuses(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    use("seat_tables", mutant, tmp_path, monkeypatch)
    runs = [(check, case, {}) for case in CASES]
    assert first_failure(runs, device), f"the wrong kernel {mutant} passed all {len(CASES)} cases"


def test_check_accepts_the_kernel_built_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    use("seat_tables", CONTROL, tmp_path, monkeypatch)
    assert first_failure([(check, case, {}) for case in CASES], device) is None
