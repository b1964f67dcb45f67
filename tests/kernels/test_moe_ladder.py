"""Every rung of the ladder computes the same layer."""

from __future__ import annotations

import pytest
import torch
from moe_cases import BETA, BF16, LINEAR_BETA, Case, make_inputs, reference

pytest.importorskip("triton", reason="running kernels needs Triton")

from k3_kernels.moe_ladder import RUNGS, LadderWeights, climb

EPS = 1e-3


def run(rung: str, case: Case, device: str) -> float:
    inputs = make_inputs(case, device)
    norm = torch.linspace(0.5, 1.5, case.hidden, device=device)
    weights = LadderWeights(*inputs.tensors, norm)
    out = climb(
        rung, inputs.x, weights, inputs.expert_ids, inputs.weights, beta=BETA,
        linear_beta=LINEAR_BETA, eps=EPS,
    )  # fmt: skip
    assert out.dtype == case.dtype
    total = reference(case, inputs)
    expected = norm.double() * total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS)
    return float((out.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("rung", RUNGS)
def test_rung_computes_the_layer(rung: str, device: str) -> None:
    assert run(rung, Case(tokens=2, experts=3, hidden=40, inner=40), device) < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="bfloat16 needs a CUDA device")
@pytest.mark.parametrize("rung", RUNGS)
def test_rung_in_bfloat16(rung: str) -> None:
    case = Case(tokens=33, top_k=16, experts=64, hidden=3584, inner=384, dtype=BF16)
    assert run(rung, case, "cuda") < 8e-3


def test_refuses_an_unknown_rung() -> None:
    with pytest.raises(ValueError, match="there is no rung 'cuda', expected one of loop, grouped"):
        climb("cuda", *[torch.zeros(1)] * 4)  # type: ignore[arg-type]
