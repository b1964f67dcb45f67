"""Router and SiTU against vLLM's native functions, and the router against transformers too."""

import pytest
import torch
from golden_cases import Golden, error, load, names
from torch.nn import functional as F

from kimik3_lab.reference import moe

# -- SiTU ------------------------------------------------------------------------------------------


def halves(case: Golden):
    """Gate and up half, and the two bounds."""
    (gate_up,) = case.given("gate_up", dtype=case.inputs["gate_up"].dtype)
    return *gate_up.chunk(2, -1), case.params["beta"], case.params["linear_beta"]


@pytest.mark.parametrize("name", names("vllm_native", "situ"))
def test_situ_matches_vllm(name):
    case = load("vllm_native")[name]
    y = moe.situ(*halves(case))
    assert y.dtype == case.outputs["y"].dtype
    # bit-equal where it was recorded; tanh and exp differ a little between processors
    rounding = 2**-8 if y.dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(y, case.outputs["y"], rtol=rounding, atol=1e-6)


SITU_MISTAKES = {
    "SiLU": lambda gate, up, *_: F.silu(gate) * up,
    "halves swapped": lambda gate, up, *betas: moe.situ(up, gate, *betas),
    "bounds swapped": lambda gate, up, beta, linear: moe.situ(gate, up, linear, beta),
    "second half unbounded": lambda gate, up, beta, _: moe.situ(gate, up, beta, 1e9),
    "sigmoid of the bounded gate": lambda gate, up, beta, linear: (
        (beta * (gate / beta).tanh() * (beta * (gate / beta).tanh()).sigmoid())
        * (linear * (up / linear).tanh())
    ),
}


@pytest.mark.parametrize("mistake", SITU_MISTAKES)
def test_fixture_catches_a_wrong_situ(mistake):
    case = load("vllm_native")["situ_typical"]
    # without the extreme rows, which alone would give the mistake away
    y, recorded = SITU_MISTAKES[mistake](*halves(case))[3:], case.outputs["y"][3:]
    assert error(y, recorded) > 1e-3


# -- router ----------------------------------------------------------------------------------------


def by_expert(ids, weights):
    """Order the choices of each token by expert id: implementations need not rank them."""
    ids, order = ids.long().sort(-1)
    return ids, weights.gather(-1, order)


def route(case: Golden, dtype=torch.float64, **changes):
    params = case.params | changes
    arguments = params["top_k"], params["renormalize"], params["scale"]
    return moe.route(*case.given("hidden", "weight", "bias", dtype=dtype), *arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", names("vllm_native", "router"))
def test_router_matches_vllm(name, dtype):
    case = load("vllm_native")[name]
    ids, weights = by_expert(*route(case, dtype))
    recorded_ids, recorded = by_expert(case.outputs["expert_ids"], case.outputs["weights"])
    assert torch.equal(ids, recorded_ids)
    assert error(weights, recorded) < 1e-6


def test_router_ranks_the_best_expert_first_as_vllm_does():
    case = load("vllm_native")["router_released"]
    assert torch.equal(route(case).expert_ids, case.outputs["expert_ids"].long())


def test_router_matches_transformers():
    case = load("transformers_layers")["router"]
    hidden, weight, bias = case.given("x", "weight", "e_score_correction_bias")
    top_k = case.outputs["weights"].shape[-1]
    ids, weights = by_expert(*moe.route(hidden, weight, bias, top_k))
    recorded_ids, recorded = by_expert(case.outputs["expert_ids"], case.outputs["weights"])
    assert torch.equal(ids, recorded_ids)
    assert error(weights, recorded) < 1e-6


def test_fixture_catches_a_router_that_ignores_the_bias():
    case = load("vllm_native")["router_released"]
    hidden, weight, bias = case.given("hidden", "weight", "bias")
    ids, _ = moe.route(hidden, weight, torch.zeros_like(bias), case.params["top_k"])
    assert (ids.sort().values != case.outputs["expert_ids"].long().sort().values).any()


def biased_weights(case: Golden):
    hidden, weight, bias = case.given("hidden", "weight", "bias")
    ids = route(case).expert_ids
    scores = (hidden @ weight.mT).sigmoid() + bias
    chosen = scores.gather(-1, ids)
    return chosen / chosen.sum(-1, keepdim=True)


ROUTER_MISTAKES = {
    "weights not normalised": lambda case: route(case, renormalize=False).weights,
    "weights from the biased scores": biased_weights,
    "softmax over the chosen": lambda case: (
        case.inputs["logits"].gather(-1, route(case).expert_ids).softmax(-1)
    ),
}


@pytest.mark.parametrize("mistake", ROUTER_MISTAKES)
def test_fixture_catches_wrong_router_weights(mistake):
    case = load("vllm_native")["router_released"]
    assert error(ROUTER_MISTAKES[mistake](case), case.outputs["weights"]) > 0.01
