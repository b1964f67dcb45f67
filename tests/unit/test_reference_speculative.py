"""Verification rules: lossless to rounding, by summing over every possible draft."""

from __future__ import annotations

import itertools

import pytest
import torch

from kimik3_lab.reference import speculative
from kimik3_lab.reference.speculative import Rule, block_rule, standard_rule, verify, verify_greedy

VOCAB = 3


def _model(seed: int, *, zeros: bool = False):
    """Random conditional distributions p(next | prefix) over a tiny vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    table: dict[tuple[int, ...], torch.Tensor] = {}

    def conditional(prefix: tuple[int, ...]) -> torch.Tensor:
        if prefix not in table:
            weights = torch.rand(VOCAB, generator=generator, dtype=torch.float64) + 0.01
            if zeros:
                weights[int(torch.randint(VOCAB, (), generator=generator))] = 0.0
            table[prefix] = weights / weights.sum()
        return table[prefix]

    return conditional


def _emitted(rule, draft_model, target_model, count: int) -> dict[tuple[int, ...], float]:
    """Exact distribution of the first ``count + 1`` tokens when drafting ``count`` and verifying.

    What verification leaves short is continued from the target, as the next steps would.
    """
    total: dict[tuple[int, ...], float] = {}
    for draft in itertools.product(range(VOCAB), repeat=count):
        prefixes = [draft[:i] for i in range(count + 1)]
        draft_probs = torch.stack([draft_model(p) for p in prefixes[:-1]])
        target_probs = torch.stack([target_model(p) for p in prefixes])
        chance = float(torch.stack([draft_probs[i, t] for i, t in enumerate(draft)]).prod())
        if chance == 0:
            continue
        worked = rule(torch.tensor(draft), draft_probs, target_probs)
        for kept, share in enumerate(worked.kept_length().tolist()):
            for bonus in range(VOCAB):
                start = (*draft[:kept], bonus)
                weight = chance * share * float(worked.next_token[kept, bonus])
                for rest in itertools.product(range(VOCAB), repeat=count - kept):
                    tail = weight
                    for i, token in enumerate(rest):
                        tail *= float(target_model((*start, *rest[:i]))[token])
                    key = (*start, *rest)
                    total[key] = total.get(key, 0.0) + tail
    return total


def _worst(emitted: dict, target_model, count: int) -> float:
    worst = 0.0
    for sequence in itertools.product(range(VOCAB), repeat=count + 1):
        want = 1.0
        for i, token in enumerate(sequence):
            want *= float(target_model(sequence[:i])[token])
        worst = max(worst, abs(want - emitted.get(sequence, 0.0)))
    return worst


@pytest.mark.parametrize("rule", [standard_rule, block_rule])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("zeros", [False, True])
def test_output_is_distributed_as_the_target(rule, count, zeros):
    draft, target = _model(count, zeros=zeros), _model(10 + count, zeros=zeros)
    assert _worst(_emitted(rule, draft, target, count), target, count) < 1e-12


def _keep_all_bonus_from_target(ids, draft, target):
    return standard_rule(ids, draft, target)._replace(next_token=target)


def _never_clamped(ids, draft, target):
    rule = block_rule(ids, draft, target)
    return rule._replace(keep=torch.ones_like(rule.keep))


def _last_by_rest(ids, draft, target):
    # Uses the inner formula's weight for the whole draft instead of P_N.
    rule = block_rule(ids, draft, target)
    return rule._replace(keep=torch.cat([rule.keep[:-1], rule.keep[-1:] * 0.5]))


@pytest.mark.parametrize("mistake", [_keep_all_bonus_from_target, _never_clamped, _last_by_rest])
def test_losslessness_check_catches_mistakes(mistake):
    draft, target = _model(2), _model(12)
    assert _worst(_emitted(mistake, draft, target, 2), target, 2) > 1e-3


def test_block_keeps_at_least_as_many_tokens():
    gained = 0
    for seed in range(20):
        draft, target = _model(seed), _model(100 + seed)
        mean = {}
        for rule in (standard_rule, block_rule):
            mean[rule] = 0.0
            for ids in itertools.product(range(VOCAB), repeat=3):
                prefixes = [ids[:i] for i in range(4)]
                draft_probs = torch.stack([draft(p) for p in prefixes[:-1]])
                target_probs = torch.stack([target(p) for p in prefixes])
                chance = float(torch.stack([draft_probs[i, t] for i, t in enumerate(ids)]).prod())
                lengths = rule(torch.tensor(ids), draft_probs, target_probs).kept_length()
                mean[rule] += chance * float(lengths @ torch.arange(4.0, dtype=torch.float64))
        assert mean[block_rule] >= mean[standard_rule] - 1e-12
        gained += mean[block_rule] > mean[standard_rule] + 1e-6
    assert gained >= 10


def test_equal_distributions_keep_everything():
    probs = torch.tensor([[0.2, 0.3, 0.5]] * 3, dtype=torch.float64)
    for rule in (standard_rule, block_rule):
        lengths = rule(torch.tensor([2, 0]), probs[:2], probs).kept_length()
        assert lengths.tolist() == pytest.approx([0.0, 0.0, 1.0])


def test_verify_follows_the_rule():
    rule = Rule(torch.tensor([0.5, 0.25]), torch.eye(3))
    generator = torch.Generator().manual_seed(0)
    counts = [0, 0, 0]
    for _ in range(4000):
        tokens = verify(rule, torch.tensor([7, 8]), generator)
        kept = len(tokens) - 1
        assert tokens == [*[7, 8][:kept], kept]
        counts[kept] += 1
    assert [c / 4000 for c in counts] == pytest.approx(rule.kept_length().tolist(), abs=0.03)


def test_verify_is_repeatable_by_seed():
    rule = Rule(torch.tensor([0.5, 0.5, 0.5]), torch.full((4, 5), 0.2))
    runs = [
        [
            verify(rule, torch.tensor([1, 2, 3]), generator)
            for generator in [torch.Generator().manual_seed(3)]
            for _ in range(20)
        ]
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("draft", "want"),
    [([], [4]), ([4], [4, 1]), ([4, 1], [4, 1, 2]), ([0, 1], [4]), ([4, 0], [4, 1])],
)
def test_greedy_keeps_the_matching_prefix(draft, want):
    logits = torch.zeros(len(draft) + 1, 5)
    for row, token in enumerate([4, 1, 2][: len(draft) + 1]):
        logits[row, token] = 1.0
    assert verify_greedy(torch.tensor(draft, dtype=torch.long), logits) == want


def test_wrong_shapes_and_impossible_drafts_are_named():
    probs = torch.full((2, 3), 1 / 3)
    with pytest.raises(ValueError, match=r"draft_probs must be \[2, 3\]"):
        standard_rule(torch.tensor([0, 1]), probs[:1], torch.full((3, 3), 1 / 3))
    with pytest.raises(ValueError, match=r"target_probs must be \[2, 3\]"):
        block_rule(torch.tensor([0]), probs[:1], probs[:1])
    with pytest.raises(ValueError, match="no drafted tokens"):
        block_rule(torch.tensor([], dtype=torch.long), probs[:0], probs[:1])
    with pytest.raises(ValueError, match=r"drafted token 0 \(id 2\) has probability 0"):
        block_rule(torch.tensor([2]), torch.tensor([[0.5, 0.5, 0.0]]), probs)
    with pytest.raises(ValueError, match="draft_ids must lie from 0 to 2"):
        block_rule(torch.tensor([7]), probs[:1], probs)
    with pytest.raises(ValueError, match="target_probs must be a distribution"):
        standard_rule(torch.tensor([0]), probs[:1], torch.tensor([[0.3, -0.2, 5.0]] * 2))
    with pytest.raises(ValueError, match="hold NaN"):
        verify_greedy(torch.tensor([1]), torch.full((2, 3), torch.nan))
    with pytest.raises(ValueError, match="the last row is for the bonus token"):
        verify_greedy(torch.tensor([1]), torch.zeros(1, 3))
    assert speculative.__all__
