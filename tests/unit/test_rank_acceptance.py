"""The script that stands in for a text: tokens, acceptance, and the proposer behind it."""

from __future__ import annotations

import pytest
import torch

from kimik3_lab.rank.acceptance import Script, ScriptedProposer, acceptance_rate
from kimik3_lab.serving.executors.drafts import Draft, DraftRequest
from kimik3_lab.serving.sampling_params import SamplingParams


@pytest.mark.parametrize(("mean", "drafts"), [(3.4, 8), (1.5, 2), (8.9, 8)])
def test_the_mean_is_the_one_asked_for(mean: float, drafts: int) -> None:
    script = Script(20_480, drafts, mean)
    kept = [1 + script.kept(r, p) for r in range(20) for p in range(500)]
    assert sum(kept) / len(kept) == pytest.approx(mean, rel=0.03)
    assert max(kept) <= 1 + drafts


@pytest.mark.parametrize(("mean", "drafts"), [(1.0, 8), (9.0, 8), (0.5, 2)])
def test_a_mean_out_of_reach_is_refused(mean: float, drafts: int) -> None:
    with pytest.raises(ValueError, match="drafts yield"):
        acceptance_rate(mean, drafts)


def test_tokens_belong_to_request_and_position() -> None:
    script = Script(20_480, 8, 3.4)
    text = script.tokens(3, 0, 4000)
    assert text == Script(20_480, 8, 3.4).tokens(3, 0, 4000)
    assert text[100:110] == script.tokens(3, 100, 10)
    assert text != script.tokens(4, 0, 4000) and text != Script(20_480, 8, 3.4, 1).tokens(
        3, 0, 4000
    )
    assert min(text) >= 3 and max(text) < 20_479
    assert len(set(text)) > 3000
    kept = [script.kept(3, i) for i in range(60)]
    script.write(3, 50, 20)
    assert script.tokens(3, 0, 60) == text[:60]
    assert [script.kept(3, i) for i in range(60)] == kept


def verify(script: Script, drafts: list[Draft], positions: list[int]) -> list[list[int]]:
    rows = sum(len(d.token_ids) + 1 for d in drafts)
    params = [SamplingParams(seed=i) for i in range(len(drafts))]
    return script.verify(torch.zeros(rows, 8), drafts, params, [None] * len(drafts), positions)


def test_what_is_kept_does_not_depend_on_how_it_was_cut() -> None:
    """A text comes out whole, whatever the steps."""
    script, said = Script(64, 4, 2.5), []
    while len(said) < 200:
        (new,) = verify(script, [Draft([5, 5, 5, 5])], [len(said)])
        said += new
    assert said[:200] == script.tokens(0, 0, 200)
    assert script.num_tokens / script.num_verifications == pytest.approx(2.5, rel=0.2)


def test_a_script_that_is_used_again_counts_anew() -> None:
    script = Script(64, 4, 2.5)
    script.write(0, 30)
    verify(script, [Draft([5, 5, 5, 5])], [3])
    again = script.again()
    assert script.num_verifications == 1 and again.num_verifications == again.num_tokens == 0
    assert again.tokens(0, 0, 40) == script.tokens(0, 0, 40)
    verify(again, [Draft([5, 5, 5, 5])], [3])
    assert again.num_tokens == script.num_tokens


def test_without_drafts_one_token_comes() -> None:
    script = Script(64, 4, 2.5)
    assert [len(t) for t in verify(script, [Draft([]), Draft([-1, -1])], [7, 9])] == [1, 1]
    assert script.num_verifications == 0


def test_the_drafter_works_and_the_script_speaks() -> None:
    class Counting:
        num_speculative_tokens, num_forwards = 3, 0
        new_taps = write = copy_blocks = staticmethod(lambda *_: None)

        def propose(self, requests):
            self.num_forwards += 1
            return {}

    proposer = ScriptedProposer(Counting(), Script(64, 3, 2.5))  # type: ignore[arg-type]
    asked = [DraftRequest("r", 5, 10, (), SamplingParams(seed=2))]
    draft = proposer.propose(asked)["r"]
    assert draft.token_ids == Script(64, 3, 2.5).tokens(2, 11, 3)
    assert proposer.num_forwards == 1
