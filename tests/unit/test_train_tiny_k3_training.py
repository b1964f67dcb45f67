"""The training at micro size: it learns, resumes exactly, balances, and packs what it trained."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import pytest
import torch

from kimik3_lab.config import K3Config
from kimik3_lab.reference import checkpoint, mxfp4
from kimik3_lab.reference.initialization import random_model
from kimik3_lab.reference.state import SequenceMixer
from tools.train_tiny_k3.batches import Batches, TokenStream
from tools.train_tiny_k3.experts import batch_experts
from tools.train_tiny_k3.forward import forward_batch, load_target, token_logits
from tools.train_tiny_k3.masters import Masters, batched, reference_weights, round_mxfp4
from tools.train_tiny_k3.optimizer import Optimizer, learning_rate, orthogonalize
from tools.train_tiny_k3.packaging import check_weights, install, model_of_state
from tools.train_tiny_k3.scoring import bits_per_byte, document_rows
from tools.train_tiny_k3.training import OutOfTime, Settings, Training

torch.set_num_threads(1)
CONFIG = dataclasses.replace(K3Config.micro(), expert_dtype="mxfp4")
SETTINGS = Settings(
    steps=24, batch_size=4, length=48, warmup=3, log_every=5, score_every=8, learning_rate=8e-3
)


def documents() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(3, 11, (150,), generator=generator).repeat_interleave(2).tolist()
        for _ in range(8)
    ]


def training(**changes) -> Training:
    texts = documents()
    stream = TokenStream.from_documents(texts, CONFIG.bos_token_id, CONFIG.eos_token_id)
    held_out = document_rows(texts[:2], 600, CONFIG, 48)
    return Training(CONFIG, dataclasses.replace(SETTINGS, **changes), stream, held_out)


@pytest.fixture(scope="module")
def finished() -> Training:
    result = training()
    result.run()
    return result


# -- data ------------------------------------------------------------------------------------------


def test_every_row_begins_with_bos_and_the_rest_is_text_in_order() -> None:
    texts = [list(range(100, 160)), list(range(200, 290)), list(range(300, 341))]
    batches = Batches(TokenStream.from_documents(texts, 0, 1), batch_size=2, length=16, seed=3)
    follows = {a: {b} for text in texts for a, b in zip(text, [*text[1:], 1], strict=True)}
    follows |= {1: {0}, 0: {100, 200, 300}}
    for step in range(2 * batches.steps_per_epoch):
        rows = batches.at(step)
        assert rows.shape == (2, 17) and rows[:, 0].tolist() == [0, 0]
        for row in rows[:, 1:].tolist():
            for before, after in itertools.pairwise(row):
                assert after in follows[before]


def test_an_epoch_shows_no_token_twice_and_the_next_one_cuts_elsewhere() -> None:
    texts = [list(range(100, 300))]
    batches = Batches(TokenStream.from_documents(texts, 0, 1), batch_size=2, length=16, seed=0)
    first = torch.cat([batches.at(i)[:, 1:].flatten() for i in range(batches.steps_per_epoch)])
    assert len(first.unique()) == len(first) > 150
    starts = [
        {int(row[1]) for i in range(5) for row in batches.at(epoch * batches.steps_per_epoch + i)}
        for epoch in range(2)
    ]
    assert starts[0] != starts[1]
    with pytest.raises(ValueError, match="fewer than a batch of 20"):
        Batches(TokenStream.from_documents(texts, 0, 1), batch_size=20, length=16, seed=0)


# -- model -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 5, 64, 100])
def test_a_batch_computes_what_the_reference_computes(length: int) -> None:
    model = random_model(K3Config.micro(), seed=1, dtype=torch.float64)
    ids = torch.randint(0, 64, (3, length), generator=torch.Generator().manual_seed(length))
    want, want_taps = [], []
    for row in ids:
        taps: dict = {2: None}
        want.append(model(row, SequenceMixer(model.new_state()), taps=taps))
        want_taps.append(taps[2])
    batch_experts(model)
    out = forward_batch(model, ids, tap_layers=[2])
    torch.testing.assert_close(token_logits(model, out.hidden), torch.stack(want))
    torch.testing.assert_close(out.taps[2], torch.stack(want_taps))


def test_gradients_are_those_of_the_reference() -> None:
    model = random_model(K3Config.micro(), seed=1, dtype=torch.float64)
    ids = torch.randint(0, 64, (90,), generator=torch.Generator().manual_seed(0))
    hidden = model.model(ids, SequenceMixer(model.new_state(), form="prefill"))
    hidden.square().sum().backward()
    want = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    batch_experts(model)
    forward_batch(model, ids[None]).hidden.square().sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and name in want:
            torch.testing.assert_close(parameter.grad, want[name], rtol=1e-6, atol=1e-9)
    layer = batched(model)[0]
    expert = want["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    torch.testing.assert_close(layer.w13.grad[2].chunk(2)[1], expert, rtol=1e-6, atol=1e-9)


def test_saturated_decay_stays_finite_forward_and_backward() -> None:
    from kimik3_lab.reference import kda
    from tools.train_tiny_k3.mixing import chunked_kda

    q, k = kda.l2norm(torch.randn(2, 1, 130, 2, 8))
    v, beta = torch.randn(1, 130, 2, 8), torch.rand(1, 130, 2)
    g = torch.full((1, 130, 2, 8), -5.0)
    g[..., ::2] = -1e-4
    inputs = [x.clone().requires_grad_() for x in (q, k, v, g, beta)]
    o = chunked_kda(*inputs)
    torch.testing.assert_close(o, kda.recurrent(q, k, v, g, beta)[0], rtol=1e-4, atol=1e-5)
    o.sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in inputs)


def test_stacked_experts_keep_their_names() -> None:
    model = random_model(K3Config.micro(), seed=2)
    want = {name: value.clone() for name, value in model.state_dict().items()}
    batch_experts(model)
    got = reference_weights(model)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


# -- rounding and steps ----------------------------------------------------------------------------


def test_the_model_computes_with_rounded_masters() -> None:
    model = random_model(CONFIG, seed=0)
    batch_experts(model)
    masters = Masters(model)
    for weight in masters.weights.values():
        weight += 1e-3 * torch.randn(weight.shape)
    masters.refresh()
    computing = dict(model.named_parameters())
    for name, weight in masters.weights.items():
        want = weight.bfloat16().float()
        if name.endswith((".w13", ".w2")):
            want = torch.stack([mxfp4.dequantize(*mxfp4.quantize(expert)) for expert in weight])
            assert len(want.unique()) < want.numel() / 4
        elif name.endswith(("A_log", "dt_bias", "o_norm.weight", "conv1d.weight")):
            want = weight
        assert torch.equal(computing[name], want), name


def test_gradients_go_straight_through_to_the_masters() -> None:
    model = random_model(CONFIG, seed=0)
    batch_experts(model)
    masters = Masters(model)
    forward_batch(model, torch.arange(3, 40)[None]).hidden.sum().backward()
    at_rounded = batched(model)[0].w13.grad.clone()
    taken = masters.gradients()
    name = "model.layers.1.block_sparse_moe.w13"
    assert torch.equal(taken[name], at_rounded) and at_rounded.abs().max() > 0
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not [name for name in masters.weights if name.endswith("e_score_correction_bias")]


def test_a_muon_step_moves_every_direction_of_a_matrix_alike() -> None:
    matrix, vector = torch.zeros(16, 32), torch.ones(4)
    optimizer = Optimizer({"a.weight": matrix, "norm.weight": vector}, weight_decay=0.0)
    gradient = torch.randn(16, 32) * torch.logspace(-3, 0, 16).unsqueeze(-1)
    norm = optimizer.step({"a.weight": gradient.clone()}, lr=0.1, count=0)
    assert float(norm) == pytest.approx(float(gradient.norm()), rel=1e-5)
    moved = torch.linalg.svdvals(matrix) / (0.1 * 0.2 * math.sqrt(32))
    assert moved[5:-5].min() > 0.3 and moved.max() < 1.4
    assert float((matrix * gradient).sum()) < 0, "a step goes against the gradient"
    assert torch.equal(vector, torch.ones(4)), "no gradient, no step"


def test_adam_steps_have_the_size_of_the_learning_rate_and_decay_is_for_matrices() -> None:
    weights = {"norm.weight": torch.ones(3), "x.weight": torch.ones(4, 4)}
    optimizer = Optimizer(weights, weight_decay=0.5)
    zero = torch.zeros(4, 4)
    optimizer.step({"norm.weight": torch.tensor([0.1, -2.0, 0.0]), "x.weight": zero}, 0.01, 0)
    torch.testing.assert_close(weights["norm.weight"], torch.tensor([0.99, 1.01, 1.0]))
    torch.testing.assert_close(weights["x.weight"], torch.full((4, 4), 0.995))


def test_orthogonalize_does_tall_matrices_too() -> None:
    values = torch.linalg.svdvals(orthogonalize(torch.randn(2, 40, 8)))
    assert values.shape == (2, 8) and values.min() > 0.5 and values.max() < 1.5


def test_learning_rate_rises_and_falls() -> None:
    rates = [learning_rate(step, 100, 1.0, warmup=10) for step in range(100)]
    assert rates.index(max(rates)) == 10 and max(rates) == 1.0
    assert rates[:11] == sorted(rates[:11]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.02)


# -- the loop --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong", [{"steps": 0}, {"steps": 3, "batch_size": 0}, {"steps": 3, "dropout": 1.0}]
)
def test_settings_under_which_nothing_is_trained_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{list(wrong)[-1]} must"):
        Settings(**wrong)


def test_it_learns(finished: Training) -> None:
    # Symbols come in pairs: half of the tokens are certain, the others one of eight.
    floor = math.log(8) / 2
    losses = [entry["loss"] for entry in finished.curve]
    assert losses[0] == pytest.approx(math.log(64), abs=0.1)
    assert floor < losses[-1] < 1.9
    first, last = finished.scores[0], finished.scores[-1]
    assert last["step"] == 24 and last["held_out_bits_per_byte"] < first["held_out_bits_per_byte"]
    assert [entry["step"] for entry in finished.curve] == [1, 6, 11, 16, 21, 24]
    assert sum(finished.loads["24"][0]) == 4 * 48 * CONFIG.num_experts_per_token


def test_a_resumed_training_equals_an_undisturbed_one(finished: Training, tmp_path: Path) -> None:
    for stop in (3, 17):  # between two log lines, and in the second epoch
        interrupted = training()
        interrupted.run(stop)
        interrupted.save(tmp_path / "training.pt")
        resumed = training()
        resumed.load(tmp_path / "training.pt")
        resumed.run()
        assert resumed.curve == finished.curve and resumed.scores == finished.scores
        assert resumed.loads == finished.loads
        for name, weight in finished.masters.weights.items():
            assert torch.equal(weight, resumed.masters.weights[name]), name
        for one, other in zip(batched(finished.model), batched(resumed.model), strict=True):
            assert torch.equal(one.gate.e_score_correction_bias, other.gate.e_score_correction_bias)


def test_other_settings_do_not_go_on_with_an_old_training(tmp_path: Path) -> None:
    one = training()
    one.save(tmp_path / "training.pt")
    with pytest.raises(ValueError, match="learning_rate"):
        training(learning_rate=1e-3).load(tmp_path / "training.pt")


def test_time_that_runs_out_is_an_error_that_keeps_the_state() -> None:
    short = training()
    with pytest.raises(OutOfTime, match="1 of 24 steps"):
        short.run(seconds=0.0)
    assert short.step == 1


def test_balancing_moves_the_bias_and_evens_out_the_load(finished: Training) -> None:
    skewed = training(balancing=False)
    skewed.run()
    for layer in batched(skewed.model):
        assert not layer.gate.e_score_correction_bias.any()
    for layer in batched(finished.model):
        assert layer.gate.e_score_correction_bias.any()
    worst = [max(layer[0] for layer in run.curve[-2]["load"]) for run in (skewed, finished)]
    assert worst[1] < worst[0]


def test_dropout_is_off_when_scoring(finished: Training) -> None:
    once = bits_per_byte(finished.model, finished.held_out)
    assert once == bits_per_byte(finished.model, finished.held_out)
    assert finished.model.training


# -- packaging -------------------------------------------------------------------------------------


def test_the_packed_model_is_the_trained_model(finished: Training, tmp_path: Path) -> None:
    model = model_of_state(finished.state_dict())
    folder = tmp_path / "model"
    checkpoint.save(model, folder, max_shard_bytes=100_000)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert check_weights(model, folder) == len(list(model.parameters()))
    packed = load_target(folder, dtype=torch.float32)
    score = bits_per_byte(packed, finished.held_out)
    assert score == pytest.approx(finished.scores[-1]["held_out_bits_per_byte"], abs=1e-4)


def test_a_packed_model_that_is_another_is_refused(finished: Training, tmp_path: Path) -> None:
    model = model_of_state(finished.state_dict())
    checkpoint.save(model, tmp_path / "model")
    with torch.no_grad():
        model.model.layers[1].block_sparse_moe.experts[0].w1.weight.mul_(2.0)
    with pytest.raises(ValueError, match=r"experts\.0\.w1"):
        check_weights(model, tmp_path / "model")


def test_rounding_is_the_packing() -> None:
    weight = torch.randn(5, 64)
    assert torch.equal(round_mxfp4(weight), mxfp4.dequantize(*mxfp4.quantize(weight)))


def test_install_replaces_a_folder_whole(tmp_path: Path) -> None:
    for name, content in (("old", "1"), ("new", "2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text(content)
    install(tmp_path / "new", tmp_path / "old")
    assert [p.name for p in tmp_path.iterdir()] == ["old"]
    assert [p.name for p in (tmp_path / "old").iterdir()] == ["new.txt"]


def test_document_rows_score_every_token_once() -> None:
    ids = [list(range(3, 40)), list(range(3, 8))]
    rows = document_rows(ids, 1, CONFIG, 16)
    scored = rows.targets[rows.targets >= 0].tolist()
    assert sorted(scored) == sorted([*ids[0], *ids[1], 1, 1])
    assert (rows.inputs[:, 0] == 0).all()
