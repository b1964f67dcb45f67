"""Router, SiTU, the routed sum, and the order of things inside a MoE layer."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch.nn import functional as F

from kimik3_lab.config import K3Config
from kimik3_lab.reference import moe
from kimik3_lab.reference.initialization import random_model
from kimik3_lab.reference.moe import Routing

torch.set_num_threads(1)
F64 = torch.float64


def logit(p: float) -> float:
    return math.log(p / (1 - p))


def router_giving(scores: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden state and router weight whose sigmoid scores are ``scores``."""
    return torch.ones(1, 1, dtype=F64), torch.tensor([[logit(p)] for p in scores], dtype=F64)


def test_bias_chooses_but_does_not_weigh() -> None:
    hidden, weight = router_giving([0.9, 0.5, 0.2, 0.6])
    bias = torch.tensor([-0.8, 0.0, 0.5, 0.0], dtype=F64)  # preference 0.1 0.5 0.7 0.6
    ids, weights = moe.route(hidden, weight, bias, top_k=2)
    assert ids.tolist() == [[2, 3]]
    torch.testing.assert_close(weights, torch.tensor([[0.25, 0.75]], dtype=F64))


def test_renormalize_and_scale() -> None:
    hidden, weight = router_giving([0.9, 0.5, 0.2])
    zero = torch.zeros(3, dtype=F64)
    _, raw = moe.route(hidden, weight, zero, 2, renormalize=False)
    torch.testing.assert_close(raw, torch.tensor([[0.9, 0.5]], dtype=F64))
    _, scaled = moe.route(hidden, weight, zero, 2, scale=2.5)
    torch.testing.assert_close(scaled, torch.tensor([[2.5 * 0.9 / 1.4, 2.5 * 0.5 / 1.4]]).double())


def test_ties_go_to_the_lower_id() -> None:
    ids, weights = moe.route(torch.zeros(2, 3), torch.zeros(40, 3), torch.zeros(40), 4)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    assert weights.tolist() == [[0.25] * 4] * 2


def test_logits_of_bfloat16_inputs_are_float32() -> None:
    # 1 + 2^-9 rounds to 1 in bfloat16, where the two experts would tie and expert 0 would win.
    hidden = torch.tensor([[1.0, 2.0**-9]], dtype=torch.bfloat16)
    weight = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.bfloat16)
    ids, weights = moe.route(hidden, weight, torch.zeros(2), 1, renormalize=False)
    assert ids.item() == 1
    assert weights.dtype is torch.float32


def test_all_scores_zero_gives_no_nan() -> None:
    _, weights = moe.route(torch.ones(1, 1), torch.full((4, 1), -1e4), torch.zeros(4), 2)
    assert torch.equal(weights, torch.zeros(1, 2))


@pytest.mark.parametrize("top_k", [0, 5])
def test_route_refuses_an_impossible_top_k(top_k: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 4 experts, got {top_k}"):
        moe.route(torch.ones(1, 2), torch.ones(4, 2), torch.zeros(4), top_k)


@pytest.mark.parametrize(("a", "b"), [(0.3, -7.0), (-5.0, 40.0), (9.0, 2.0), (-0.1, -0.2)])
def test_situ_formula(a: float, b: float) -> None:
    want = 4 * math.tanh(a / 4) / (1 + math.exp(-a)) * 25 * math.tanh(b / 25)
    got = moe.situ(torch.tensor(a, dtype=F64), torch.tensor(b, dtype=F64))
    assert got.item() == pytest.approx(want, rel=1e-14)
    want = 2 * math.tanh(a / 2) / (1 + math.exp(-a)) * 3 * math.tanh(b / 3)
    got = moe.situ(torch.tensor(a, dtype=F64), torch.tensor(b, dtype=F64), 2.0, 3.0)
    assert got.item() == pytest.approx(want, rel=1e-14)


def test_situ_of_bfloat16_is_rounded_once_and_bounded() -> None:
    gate, up = (torch.randn(2, 400, generator=torch.Generator().manual_seed(0)) * 30).bfloat16()
    exact = moe.situ(gate.double(), up.double())
    assert torch.equal(moe.situ(gate, up), exact.float().bfloat16())
    assert exact.abs().max() <= 100


def test_routed_sum_against_a_loop_over_tokens() -> None:
    torch.manual_seed(0)
    matrices = torch.randn(6, 5, 5, dtype=F64)
    calls: list[int] = []

    def expert(e: int):
        def run(z):
            calls.append(e)
            return torch.tanh(z @ matrices[e])

        return run

    z = torch.randn(9, 5, dtype=F64)
    ids = torch.stack([torch.randperm(5)[:3] for _ in range(9)])  # expert 5 gets nothing
    weights = torch.rand(9, 3, dtype=F64)
    got = moe.routed_sum(z, Routing(ids, weights), [expert(e) for e in range(6)])
    want = torch.stack(
        [
            sum(weights[n, i] * torch.tanh(z[n] @ matrices[ids[n, i]]) for i in range(3))
            for n in range(9)
        ]
    )
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
    assert sorted(calls) == [0, 1, 2, 3, 4]  # each expert with tokens once, the idle one never


def test_routed_sum_when_all_tokens_choose_the_same_experts() -> None:
    z = torch.arange(4.0).unsqueeze(-1)
    routing = Routing(torch.tensor([[2, 0]] * 4), torch.tensor([[0.5, 0.25]] * 4))
    experts = [lambda z: 4 * z, lambda z: z / 0, lambda z: 2 * z]
    assert moe.routed_sum(z, routing, experts).flatten().tolist() == [0.0, 2.0, 4.0, 6.0]


def test_routed_sum_accumulates_bfloat16_in_float32() -> None:
    z = torch.ones(1, 1, dtype=torch.bfloat16)
    routing = Routing(torch.tensor([[0, 1]]), torch.tensor([[1.0, 2.0**-10]]))
    total = moe.routed_sum(z, routing, [lambda z: z, lambda z: z])
    assert total.item() == 1 + 2.0**-10


@pytest.fixture(scope="module")
def layer() -> moe.LatentMoE:
    return random_model(K3Config.micro(), 0, dtype=F64).model.layers[1].block_sparse_moe


def test_layer_is_norm_after_the_complete_sum_plus_shared(layer: moe.LatentMoE) -> None:
    torch.manual_seed(1)
    hidden = torch.randn(7, 64, dtype=F64)
    with torch.no_grad():
        ids, weights = layer.gate(hidden)
        z = hidden @ layer.routed_expert_down_proj.weight.T
        rows = []
        for n in range(7):
            r = torch.zeros(z.shape[1], dtype=F64)
            for e, w in zip(ids[n].tolist(), weights[n], strict=True):
                expert = layer.experts[e]
                h = moe.situ(expert.w1.weight @ z[n], expert.w3.weight @ z[n])
                r += w * (expert.w2.weight @ h)
            rms = (r.square().mean() + 1e-5).sqrt()
            rows.append(
                layer.routed_expert_up_proj.weight @ (r / rms * layer.routed_expert_norm.weight)
            )
        want = torch.stack(rows) + layer.shared_experts(hidden)
        torch.testing.assert_close(layer(hidden), want, rtol=1e-12, atol=1e-12)


def test_layer_has_no_memory_of_other_tokens(layer: moe.LatentMoE) -> None:
    torch.manual_seed(2)
    hidden = torch.randn(20, 64, dtype=F64)
    order = torch.randperm(20)
    with torch.no_grad():
        whole = layer(hidden)
        torch.testing.assert_close(layer(hidden[order]), whole[order], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(layer(hidden[4:5]), whole[4:5], rtol=1e-12, atol=1e-12)


def test_situ_is_used_at_all_three_sites(layer: moe.LatentMoE) -> None:
    config = dataclasses.replace(
        K3Config.micro(), activation_situ_beta=0.5, activation_situ_linear_beta=0.75
    )
    mlp = moe.MLP(config, 16, dtype=F64)
    x = torch.randn(3, 64, dtype=F64)
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    want = mlp.down_proj(0.5 * (gate / 0.5).tanh() * gate.sigmoid() * 0.75 * (up / 0.75).tanh())
    torch.testing.assert_close(mlp(x), want)
    expert = moe.Expert(config, dtype=F64)
    z = torch.randn(3, 32, dtype=F64)
    a, b = F.linear(z, expert.w1.weight), F.linear(z, expert.w3.weight)
    want = expert.w2(0.5 * (a / 0.5).tanh() * a.sigmoid() * 0.75 * (b / 0.75).tanh())
    torch.testing.assert_close(expert(z), want)


def test_router_bias_is_float32_even_in_a_bfloat16_model() -> None:
    router = moe.Router(K3Config.micro(), dtype=torch.bfloat16)
    assert router.weight.dtype is torch.bfloat16
    assert router.e_score_correction_bias.dtype is torch.float32
