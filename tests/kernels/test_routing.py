"""Router selection against its equations: shapes, types, ties, numbers that are none, refusals."""

from __future__ import annotations

import pytest
import torch
from routing_cases import BF16, CASES, F32, Case, assert_choice, check, make_inputs

pytest.importorskip("triton", reason="running kernels needs Triton")

from k3_kernels.routing import MAX_EXPERTS, MAX_TOP_K, RouteConfig, choose_config, route

from kimik3_lab.reference.moe import route as reference_route

SELECTIONS = ("network", "argmax")


@pytest.mark.parametrize("select", SELECTIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_equations(case: Case, select: str, device: str) -> None:
    check(case, device, RouteConfig(1, select), row_gap=24)


@pytest.mark.parametrize("config", [RouteConfig(2), RouteConfig(4), RouteConfig(8)], ids=str)
def test_several_warps_share_a_row(config: RouteConfig, device: str) -> None:
    check(Case(2, 100, 6), device, config)


def test_chooses_as_the_reference_model(device: str) -> None:
    hidden = torch.randn(3, 24, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(40, 24, generator=torch.Generator().manual_seed(2)) / 5
    bias = 0.2 * torch.randn(40, generator=torch.Generator().manual_seed(3))
    expected = reference_route(hidden, weight, bias, 4, scale=2.0)
    got = route((hidden @ weight.mT).to(device), bias.to(device), 4, scale=2.0)
    assert torch.equal(got.expert_ids.long().cpu(), expected.expert_ids)
    torch.testing.assert_close(got.weights.cpu(), expected.weights)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("select", SELECTIONS)
def test_not_a_number_still_names_experts(select: str, device: str) -> None:
    """A padded row of a captured graph may hold anything; its ids are used as addresses."""
    logits, bias = (tensor.to(device) for tensor in make_inputs(Case(4, 40, 5)))
    logits[1] = torch.nan
    logits[2, 7] = torch.nan
    logits[3, 9] = torch.inf
    ids, weights = route(logits, bias, 5, config=RouteConfig(1, select))
    for row in ids.tolist():
        assert len(set(row)) == 5 and all(0 <= expert < 40 for expert in row)
    assert ids[1].tolist() == [0, 1, 2, 3, 4]
    assert int(ids[2, 0]) == 7
    assert weights[1:3].isnan().all() and weights[[0, 3]].isfinite().all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("value", [-torch.inf, torch.nan, torch.inf])
def test_bias_that_is_not_finite(value: float, device: str) -> None:
    """An expert can be switched off by its bias; the keys of such rows mean nothing."""
    case = Case(2, 40, 5)
    logits, bias = (tensor.to(device) for tensor in make_inputs(case))
    off = route(logits, bias, 5).expert_ids[0, 0]
    bias[off] = value
    ids = route(logits, bias, 5).expert_ids
    if value == -torch.inf:
        assert not bool((ids == off).any())
        scores = logits.sigmoid() + bias
        assert torch.equal(ids.long(), scores.argsort(dim=-1, descending=True, stable=True)[:, :5])
    else:
        assert bool((ids[:, 0] == off).all())


def test_rows_may_have_any_stride(device: str) -> None:
    case = Case(3, 20, 4)
    logits, bias = (tensor.to(device) for tensor in make_inputs(case))
    wide = torch.full((3, 50), torch.nan, device=device)
    wide[:, 5:25] = logits
    got = route(wide[:, 5:25], bias, 4)
    assert_choice(case, logits, bias, *got)
    again = route(logits[:1].expand(3, 20), bias, 4)
    assert torch.equal(again.expert_ids, got.expert_ids[:1].expand(3, 4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="bfloat16 needs a CUDA device")
@pytest.mark.parametrize("tokens", [1, 16, 64, 256, 1000, 8192])
def test_released_shape_on_the_gpu(tokens: int, device: str) -> None:
    """Fresh inputs in every run, with the constants that a call would choose."""
    seed = int(torch.randint(2**31, ()))
    check(Case(tokens, 896, 16, seed=seed), device)
    check(Case(tokens, 896, 16, BF16, seed=seed), device)
    for logits in ("few", "equal", "close"):
        check(Case(tokens, 896, 16, logits=logits, bias=0.0, seed=seed), device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_configuration_gives_the_same_result(device: str) -> None:
    logits, bias = (tensor.to(device) for tensor in make_inputs(Case(512, 896, 16, seed=3)))
    expected = route(logits, bias, 16)
    for warps in (1, 2, 4, 8):
        for select in (*SELECTIONS, "topk"):
            for pdl in (False, True):
                config = RouteConfig(warps, select, pdl)
                got = route(logits, bias, 16, config=config)
                assert torch.equal(got.expert_ids, expected.expert_ids), config
                torch.testing.assert_close(got.weights, expected.weights, rtol=1e-6, atol=0)


def test_configuration_by_rule_fits_every_shape() -> None:
    for experts in (1, 2, 100, 896, 1024, 1025, MAX_EXPERTS):
        for tokens in (1, 512, 513):
            config = choose_config(tokens, experts)
            constants = config.constants(experts, min(experts, 16), True, 4)
            assert 2 ** constants["LOG_E"] >= max(experts, 128 * config.num_warps)
            assert constants["LOG_E"] > constants["LOG_K"]


GOOD = {"logits": torch.zeros(3, 8), "bias": torch.zeros(8), "top_k": 2}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"logits": torch.zeros(8)}, ValueError, r"logits must be a tensor \[T, E\], got \[8\]"),
        ({"logits": None}, ValueError, "logits must be a tensor .* got NoneType"),
        ({"logits": torch.zeros(3, 0)}, ValueError, "0 experts are outside"),
        ({"logits": torch.zeros(0, MAX_EXPERTS + 1)}, ValueError, "4097 experts are outside"),
        ({"logits": torch.zeros(3, 8).double()}, TypeError, "logits is torch.float64"),
        ({"logits": torch.zeros(8, 3).T}, ValueError, "logits has stride 3 in its last dimension"),
        ({"bias": torch.zeros(9)}, ValueError, r"bias has shape \[9\], expected \[8\]"),
        ({"bias": torch.zeros(16)[::2]}, ValueError, "bias has stride 2"),
        ({"bias": torch.zeros(8, device="meta")}, ValueError, "bias is on meta"),
        ({"top_k": 0}, ValueError, "top_k must be from 1 to 8"),
        ({"top_k": 9}, ValueError, "top_k must be from 1 to 8"),
        ({"top_k": 2.0}, TypeError, "top_k must be an int, got float"),
        ({"top_k": True}, TypeError, "top_k must be an int, got bool"),
        ({"expert_ids_out": torch.zeros(3, 2)}, ValueError, "expert_ids_out must be a contiguous"),
        ({"weights_out": torch.zeros(2, 3).T}, ValueError, "weights_out must be a contiguous"),
        ({"weights_out": [0.0]}, TypeError, "weights_out must be a torch.Tensor, got list"),
    ],
)
def test_refusals_name_the_argument(
    changes: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        route(**{**GOOD, **changes})


def test_more_choices_than_the_kernel_ranks() -> None:
    with pytest.raises(ValueError, match=f"top_k must be from 1 to {MAX_TOP_K}"):
        route(torch.zeros(1, 200), torch.zeros(200), MAX_TOP_K + 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about the interpreter")
@pytest.mark.parametrize("which", ["logits", "bias"])
def test_interpreter_refuses_bfloat16(which: str) -> None:
    arguments = {**GOOD, which: GOOD[which].to(BF16)}
    with pytest.raises(TypeError, match="computes bfloat16 wrongly without an error"):
        route(**arguments)


def test_bias_in_another_type(device: str) -> None:
    case = Case(2, 20, 4)
    logits, bias = (tensor.to(device) for tensor in make_inputs(case))
    half = bias.half()
    assert_choice(case, logits, half.to(F32), *route(logits, half, 4))
