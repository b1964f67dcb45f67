"""The weighted sum over experts and its norm: shapes, types, strides, absent rows, refusals."""

from __future__ import annotations

import pytest
import torch
from finalize_cases import BF16, CASES, F16, F32, Case, check

pytest.importorskip("triton", reason="running kernels needs Triton")

from k3_kernels.finalize import MAX_WIDTH, FinalizeConfig, choose_config, finalize

from kimik3_lab.reference.norms import rms_norm


@pytest.mark.parametrize("row_gap", [0, 24], ids=["dense", "gaps"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_equations(case: Case, row_gap: int, device: str) -> None:
    check(case, device, row_gap=row_gap)


@pytest.mark.parametrize(("block_d", "pieces"), [(16, 1), (16, 2), (16, 3), (32, 5), (128, 1)])
def test_any_pieces(block_d: int, pieces: int, device: str) -> None:
    config = FinalizeConfig(block_d, 1, pieces)
    check(Case(2, 3, 100), device, config, row_gap=24)
    check(Case(2, 3, 100, norm=True), device, config, row_gap=24)


def test_equals_the_reference_model(device: str) -> None:
    """The order of roundings is the model's: sum in float32, kept in its own type, normalised."""
    pairs = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)).half()
    weights = torch.rand(2, 3, generator=torch.Generator().manual_seed(1))
    norm = torch.rand(40, generator=torch.Generator().manual_seed(2)).half()
    total = (pairs.view(2, 3, 40).float() * weights[..., None]).sum(1).half()
    expected = rms_norm(total, norm)
    got = finalize(pairs.to(device), weights.to(device), norm_weight=norm.to(device))
    torch.testing.assert_close(got.cpu(), expected, rtol=2**-10, atol=1e-6)


def test_a_token_does_not_depend_on_the_others(device: str) -> None:
    pairs = torch.randn(20, 50, device=device)
    weights = torch.rand(5, 4, device=device)
    whole = finalize(pairs, weights)
    for token in range(5):
        alone = finalize(pairs[4 * token : 4 * token + 4], weights[token : token + 1])
        assert torch.equal(alone[0], whole[token])


def test_not_finite_stays_in_its_token(device: str) -> None:
    pairs = torch.randn(6, 20, device=device)
    pairs[2, 3] = torch.nan
    out = finalize(pairs, torch.ones(3, 2, device=device), norm_weight=torch.ones(20).to(device))
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="bfloat16 needs a CUDA device")
@pytest.mark.parametrize("tokens", [1, 16, 64, 132, 133, 1024])
def test_released_shape_on_the_gpu(tokens: int, device: str) -> None:
    """Fresh inputs in every run, with the constants that a call would choose."""
    seed = int(torch.randint(2**31, ()))
    for norm in (False, True):
        for local in (None, "range", "map"):
            check(Case(tokens, 16, 3584, BF16, norm, local=local, seed=seed), device)
        check(Case(tokens, 16, 3584, BF16, norm, seed=seed), device, row_gap=24)
        check(Case(tokens, 16, 3584, F32, norm, out_dtype=BF16, seed=seed), device)


def test_configuration_by_rule() -> None:
    for width in (1, 100, 3584, MAX_WIDTH):
        for tokens in (1, 132, 133, 8192):
            for norm in (False, True):
                config = choose_config(tokens, width, norm)
                assert config.block_d & (config.block_d - 1) == 0
                assert 1 <= config.num_warps <= 16
                assert not norm or config.block_d * config.pieces >= width


GOOD = {"pairs": torch.zeros(6, 8), "weights": torch.zeros(3, 2)}
IDS = torch.zeros(3, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"pairs": torch.zeros(8)}, ValueError, r"pairs must be a tensor \[T \* k, D\], got \[8\]"),
        ({"pairs": torch.zeros(6, 0)}, ValueError, "rows of 0 elements"),
        ({"pairs": torch.zeros(7, 8)}, ValueError, "7 pairs are not a multiple of top_k=2"),
        ({"pairs": torch.zeros(8, 8)}, ValueError, r"weights has shape \[3, 2\], expected \[4, 2"),
        ({"pairs": torch.zeros(6, 8).double()}, TypeError, "pairs is torch.float64"),
        ({"pairs": torch.zeros(8, 6).T}, ValueError, "pairs has stride 6"),
        ({"weights": None}, TypeError, "without weights top_k must be given as an int"),
        ({"weights": torch.zeros(6)}, ValueError, r"weights must be a tensor \[T, k\] or None"),
        ({"weights": torch.zeros(3, 2).half()}, ValueError, "weights must be contiguous float32"),
        ({"weights": torch.zeros(2, 3).T}, ValueError, "weights has stride 3"),
        ({"top_k": 3}, ValueError, "top_k is 3, but weights has 2 a row"),
        ({"weights": None, "top_k": 0}, ValueError, "top_k must be from 1 to 64"),
        ({"norm_weight": torch.zeros(9)}, ValueError, "norm_weight has shape"),
        ({"out": torch.zeros(3, 9)}, ValueError, "out has shape"),
        ({"out": torch.zeros(1, 8).expand(3, 8)}, ValueError, "out is an expanded view"),
        ({"first_expert": 1}, ValueError, "and need expert_ids"),
        ({"num_experts": 4}, ValueError, "and need expert_ids"),
        ({"expert_ids": IDS}, ValueError, "expert_ids needs num_experts"),
        ({"expert_ids": IDS[:2], "num_experts": 4}, ValueError, "expert_ids has shape"),
        ({"expert_ids": IDS.float(), "num_experts": 4}, TypeError, "expert_ids is torch.float32"),
        (
            {"expert_ids": IDS, "num_experts": 4, "expert_map": [0, 1]},
            ValueError,
            r"expert_map must be a tensor \[E\] of int32, got list",
        ),
        (
            {"expert_ids": IDS, "num_experts": 4, "first_expert": 1, "expert_map": IDS[0]},
            ValueError,
            "first_expert=1 and expert_map both say",
        ),
    ],
)
def test_refusals_name_the_argument(
    changes: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        finalize(**{**GOOD, **changes})


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about the interpreter")
@pytest.mark.parametrize("which", ["pairs", "norm_weight", "out"])
def test_interpreter_refuses_bfloat16(which: str) -> None:
    tensors = {"pairs": GOOD["pairs"], "norm_weight": torch.zeros(8), "out": torch.zeros(3, 8)}
    tensors[which] = tensors[which].to(BF16)
    with pytest.raises(TypeError, match="computes bfloat16 wrongly without an error"):
        finalize(weights=GOOD["weights"], **tensors)


def test_weights_of_the_norm_in_another_type(device: str) -> None:
    pairs, weights = torch.randn(6, 8, device=device).to(F16), torch.rand(3, 2, device=device)
    norm = torch.rand(8, device=device).to(F16)
    narrow = finalize(pairs, weights, norm_weight=norm)
    wide = finalize(pairs, weights, norm_weight=norm.to(F32))
    assert torch.equal(narrow, wide)
