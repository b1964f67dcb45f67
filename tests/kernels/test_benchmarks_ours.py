"""Our operators, called as the benchmark calls them, pass its check at small shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.cases import Case, MoeRank
from benchmarks.inputs import (
    attn_res,
    kda_decode,
    kda_prefill,
    kda_recover,
    mla_decode,
    moe,
    router,
)
from benchmarks.ours import moe as our_moe
from benchmarks.ours import operators

CASES = {
    "attnres8": Case("attnres8", "T=3", {"tokens": 3}),
    "router": Case("router", "T=1", {"tokens": 1}),
    "kda_decode": Case("kda_decode", "H=2,B=3", {"heads": 2, "batch": 3}),
    "kda_prefill": Case("kda_prefill", "H=1,2x40", {"heads": 1}, lengths=(40, 40)),
    "kda_recover": Case("kda_recover", "", {"heads": 2, "batch": 2, "accepted": 3}),
    "mla_decode": Case("mla_decode", "", {"heads": 3, "batch": 2, "tokens": 2, "length": 70}),
    "moe_mxfp4_tp8": Case("moe_mxfp4_tp8", "T=5", {"tokens": 5}),
    "moe_bf16_tp8": Case("moe_bf16_tp8", "T=5", {"tokens": 5}),
}
PROBLEMS = {
    "attnres8": attn_res.AttnResProblem,
    "router": router.RouterProblem,
    "kda_decode": kda_decode.KdaDecodeProblem,
    "kda_prefill": kda_prefill.KdaPrefillProblem,
    "kda_recover": kda_recover.KdaRecoverProblem,
    "mla_decode": mla_decode.MlaDecodeProblem,
}


def _float32(problem: Any) -> None:
    """The interpreter computes no bfloat16: give it the same numbers in float32."""

    def convert(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
            return value.float()
        if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
            return type(value)(convert(v) for v in value)
        return value

    for name, value in list(vars(problem).items()):
        setattr(problem, name, convert(value))
    if isinstance(problem, attn_res.AttnResProblem):
        problem.prefix = list(problem._live)  # views again, not copies


@pytest.mark.parametrize("operator", CASES)
def test_ours_is_called_rightly(
    operator: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (attn_res, kda_decode, kda_prefill, kda_recover, mla_decode, moe, router):
        monkeypatch.setattr(module, "input_sets", lambda *_, **__: 2)
    monkeypatch.setattr(moe, "RANKS", {"tp8": MoeRank(6, 64, 2)})
    monkeypatch.setattr(moe, "LATENT", 128)
    monkeypatch.setattr(attn_res, "HIDDEN", 256)
    generator = torch.Generator(device).manual_seed(3)
    case = CASES[operator]
    problem: Any
    if operator.startswith("moe"):
        weights = moe.MoeWeights(operator, generator)
        problem = moe.MoeProblem(case, weights, generator)
        if device == "cpu":
            _float32(weights)
    else:
        problem = PROBLEMS[operator](case, generator)
    if device == "cpu":
        _float32(problem)
    (adapter,) = [
        one for one in (*operators.ADAPTERS, *our_moe.ADAPTERS) if operator in one.operators
    ]
    adapter.find()
    assert problem.error(adapter.prepare(problem)) <= problem.tolerance
