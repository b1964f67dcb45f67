"""The drafter's training at micro size: rollouts, blocks, loss, and a run that learns."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from drafter_support import random_drafter
from torch import Tensor

from kimik3_lab.config import K3Config
from kimik3_lab.drafter_config import DSparkConfig
from kimik3_lab.reference import drafter_checkpoint
from kimik3_lab.reference.evaluation import generate_with_drafts
from kimik3_lab.reference.initialization import random_model
from kimik3_lab.reference.state import SequenceMixer
from tools.train_tiny_k3 import rollouts
from tools.train_tiny_k3.drafter_blocks import (
    Blocks,
    LossWeights,
    block_loss,
    counted,
    draft_blocks,
    leading_hits,
)
from tools.train_tiny_k3.drafter_training import DrafterSettings, DrafterTrainer, new_drafter
from tools.train_tiny_k3.drafter_walk import expected_acceptance
from tools.train_tiny_k3.rollouts import AllExperts, Rollouts, roll_out, run_all_experts

torch.set_num_threads(1)
CONFIG = K3Config.micro()


@pytest.fixture(scope="module")
def target():
    return random_model(CONFIG, seed=3).double().requires_grad_(False).eval()


def _prompts(number: int, sequences: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(3, CONFIG.vocab_size, (sequences, length), generator=generator)
    ids[:, 0] = CONFIG.bos_token_id
    return ids


def test_all_experts_is_the_same_function(target) -> None:
    moe = next(m.block_sparse_moe for m in target.model.layers if hasattr(m, "block_sparse_moe"))
    x = torch.randn(11, CONFIG.hidden_size, dtype=torch.float64)
    torch.testing.assert_close(AllExperts(moe)(x), moe(x), rtol=1e-12, atol=1e-12)


def test_a_rollout_is_what_the_target_generates_and_taps_are_its_own(target, monkeypatch) -> None:
    prompts = _prompts(0, 3, 7)
    layers = (0, 2)
    made = roll_out(target, prompts, 6, layers, batch=2)
    fast = run_all_experts(random_model(CONFIG, seed=3).double().requires_grad_(False))
    monkeypatch.setattr(rollouts, "_PREFILL", 9)  # pieces of 9 // 3 = 3 tokens, then of one
    again = roll_out(fast, prompts, 6, layers)
    assert torch.equal(made.token_ids, again.token_ids)
    for row, prompt in enumerate(prompts.tolist()):
        want = target.generate(prompt, 6, stop_token_ids=())
        assert made.token_ids[row].tolist() == prompt + want
        taps: dict = dict.fromkeys(layers)
        hidden = target.model(made.token_ids[row], SequenceMixer(target.new_state()), taps)
        joined = torch.cat([taps[i] for i in layers], -1)
        torch.testing.assert_close(made.taps[row].double(), joined, rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(made.hidden[row].double(), hidden, rtol=1e-2, atol=1e-3)


def _context(target, drafter, token_ids: Tensor) -> Tensor:
    taps = drafter.new_taps()
    target(token_ids, SequenceMixer(target.new_state()), taps=taps)
    return torch.cat([taps[i] for i in drafter.config.target_layer_ids], -1)


def test_blocks_in_parallel_equal_the_drafter_one_block_at_a_time(target) -> None:
    """Where every guess is right the drafter itself sees the true tokens; make it so."""
    config = dataclasses.replace(DSparkConfig.for_target(CONFIG), block_size=3)
    drafter = random_drafter(config, seed=5)
    token_ids = _prompts(1, 2, 20)
    token_ids[:, 1:] = torch.randint(3, 20, (2, 19), generator=torch.Generator().manual_seed(0))
    anchors = torch.tensor([9, 1, 16])
    taps = torch.stack([_context(target, drafter, row) for row in token_ids])
    head = target.lm_head.weight
    blocks = draft_blocks(drafter, target.model.embed_tokens.weight, head, token_ids, taps, anchors)
    for row in range(2):
        for column, anchor in enumerate(anchors.tolist()):
            state = drafter.new_state()
            layers = config.target_layer_ids
            split = dict(zip(layers, taps[row].chunk(len(layers), -1), strict=True))
            drafter.write_context(split, state, anchor)
            guess, seen = [], int(token_ids[row, anchor])
            hidden = _hidden(drafter, target, seen, state)
            for i in range(3):
                embedding = drafter.markov_head.markov_w1(token_ids[row, anchor + i])
                logits = head @ hidden[i] + drafter.markov_head.bias(embedding)
                torch.testing.assert_close(blocks.logits[row, column, i], logits)
                confidence = drafter.confidence_head(hidden[i], embedding)
                torch.testing.assert_close(blocks.confidence[row, column, i].sigmoid(), confidence)
                guess.append(int(logits.argmax()))
            # The first guess needs no earlier one: it must be draft()'s.
            assert int(drafter.draft(seen, state, target).token_ids[0]) == guess[0]


def _hidden(drafter, target, anchor: int, state) -> Tensor:
    """Rows that the drafter's own layers give for one block."""
    count = drafter.config.block_size
    ids = torch.full((count,), drafter.config.mask_token_id)
    ids[0] = anchor
    positions = torch.arange(state.num_tokens, state.num_tokens + count)
    x = target.model.embed_tokens(ids)
    for layer, rows in zip(drafter.layers, state.latent, strict=True):
        x = layer(x, positions, rows)
    return drafter.final_norm(x)


def _by_hand() -> tuple[Rollouts, Tensor, Tensor]:
    """One sequence, one anchor, two positions, three tokens; the head is the identity."""
    token_ids = torch.tensor([[0, 1, 2, 1, 0]])
    hidden = torch.zeros(1, 5, 3)
    hidden[0, 1] = torch.tensor([0.0, 0.0, 8.0])
    return Rollouts(token_ids, torch.zeros(1, 5, 3), hidden, 1), torch.eye(3), torch.tensor([1])


def test_loss_by_hand() -> None:
    made, head, anchors = _by_hand()
    logits = torch.zeros(1, 1, 2, 3)
    logits[0, 0, 0, 2] = 1.0
    blocks = Blocks(logits, torch.zeros(1, 1, 2))
    losses = block_loss(blocks, made, head, anchors, eos_token_id=9, weights=LossWeights())
    p = torch.softmax(torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]), -1)
    q = torch.softmax(torch.tensor([[0.0, 0.0, 8.0], [0.0, 0.0, 0.0]]), -1)
    weight = torch.tensor([1.0, torch.tensor(-0.25).exp()])
    weight = weight / weight.sum()
    ce = -(weight * torch.stack((p[0, 2], p[1, 1])).log()).sum()
    tv = (weight * (p - q).abs().sum(-1) / 2).sum()
    bce = torch.tensor(2.0).log()  # a head that says one half costs ln 2, whatever happens
    assert losses.cross_entropy.item() == pytest.approx(ce.item(), abs=1e-6)
    assert losses.total_variation.item() == pytest.approx(tv.item(), abs=1e-6)
    assert losses.confidence.item() == pytest.approx(bce.item(), abs=1e-6)
    assert losses.total.item() == pytest.approx((0.1 * ce + 0.9 * tv + bce).item(), abs=1e-6)


def test_what_follows_the_end_of_a_text_does_not_count() -> None:
    token_ids = torch.tensor([[0, 1, 5, 5, 1, 5, 5]])  # 1 is eos; the one in the prompt is text
    made = Rollouts(token_ids, token_ids, token_ids, 3)
    assert counted(made, 1).tolist() == [[True] * 5 + [False] * 2]


def test_leading_hits_stop_at_the_first_miss() -> None:
    token_ids = torch.tensor([[0, 1, 2, 3, 4, 5]])
    guesses = torch.tensor([[1, 2, 3], [2, 9, 4], [9, 4, 5]])
    logits = torch.nn.functional.one_hot(guesses, 10).float().unsqueeze(0)
    assert leading_hits(logits, token_ids, torch.tensor([0, 1, 2])).tolist() == [[3, 1, 0]]


SETTINGS = DrafterSettings(
    steps=12,
    batch=4,
    anchors=4,
    sequences=8,
    rounds=3,
    prompt_lengths=(6, 4),
    new_tokens=16,
    warmup=3,
    learning_rate=5e-3,
)


def _trainer(settings: DrafterSettings = SETTINGS) -> DrafterTrainer:
    target = run_all_experts(random_model(CONFIG, seed=3).requires_grad_(False).eval())
    drafter = new_drafter(target, num_layers=2, seed=0)
    return DrafterTrainer(target, drafter, _prompts, _prompts(99, 8, 6), settings)


def test_interrupted_training_ends_where_uninterrupted_training_does(tmp_path: Path) -> None:
    whole, file = _trainer(), tmp_path / "drafter.pt"
    whole.train(report_every=4)
    first = _trainer()
    first.train(checkpoint=file, stop_at=7, report_every=4)
    second = _trainer()
    second.train(checkpoint=file, report_every=4)
    assert second.step == whole.step == 12
    for name, value in whole.drafter.state_dict().items():
        assert torch.equal(second.drafter.state_dict()[name], value), name
    other = _trainer(dataclasses.replace(SETTINGS, batch=2))
    with pytest.raises(ValueError, match="batch=4"):
        other.train(checkpoint=file)


def test_training_learns_and_the_walk_counts_what_decoding_does(tmp_path: Path) -> None:
    """With large embeddings the last token all but decides the next: that is soon learned."""
    target = random_model(CONFIG, seed=3).requires_grad_(False).eval()
    target.model.embed_tokens.weight.mul_(30)
    settings = dataclasses.replace(
        SETTINGS, steps=60, rounds=1, sequences=48, batch=8, anchors=8, new_tokens=24
    )
    drafter = new_drafter(run_all_experts(target), num_layers=2, seed=0)
    trainer = DrafterTrainer(target, drafter, _prompts, _prompts(99, 8, 6), settings)
    before = expected_acceptance(trainer.drafter, trainer.target, trainer.watched)
    trainer.train(report_every=60)
    after = expected_acceptance(trainer.drafter, trainer.target, trainer.watched)
    assert after["tokens_per_verify"] > before["tokens_per_verify"] + 0.8
    drafter_checkpoint.save(trainer.drafter, tmp_path)
    stored = drafter_checkpoint.load(tmp_path)
    watched = trainer.watched
    walked = expected_acceptance(stored, trainer.target, watched)
    accepted: list[int] = []
    for row in watched.token_ids.tolist():
        # The walk starts at the first generated token and leaves out blocks that would overhang.
        made = generate_with_drafts(
            trainer.target, stored, row[: watched.prompt], 24, stop_token_ids=()
        )
        at = 0
        for kept in made.accepted:
            if watched.prompt + at > len(row) - 1 - 7:
                break
            accepted.append(kept)
            at += kept + 1
    assert walked["verifications"] == len(accepted)
    assert walked["accepted"] == [accepted.count(i) for i in range(8)]
