"""Attention residuals against vLLM's own Triton kernel, run by the interpreter in float32."""

import pytest
import torch
from golden_cases import Golden, error, load, names

from kimik3_lab.reference import residuals
from kimik3_lab.reference.norms import rms_norm

MIXES = names("vllm_triton", "mix")
#: measured: 3e-7
ROUNDING = 1e-6


def sources(case: Golden, dtype=torch.float64):
    """``[S, N, H]``: stored blocks, then the running sum (with the pending output added)."""
    prefix, blocks = case.given("prefix", "blocks", dtype=dtype)
    if "delta" in case.inputs:
        prefix = prefix + case.given("delta", dtype=dtype)[0]
    stored = blocks[:, : case.params["num_blocks"]].transpose(0, 1)
    return torch.cat((stored, prefix.unsqueeze(0)))


def row_error(actual, recorded):
    """Worst token: tokens differ in magnitude by a thousand, each is judged on its own."""
    return max(error(a, r) for a, r in zip(actual, recorded, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MIXES)
def test_mixture_matches_the_vllm_kernel(name, dtype):
    case = load("vllm_triton")[name]
    query, weight = case.given("query", "norm_weight", dtype=dtype)
    mixed = residuals.mix(sources(case, dtype), query, weight, case.params["eps"])
    assert row_error(mixed, case.outputs["mixed"]) < ROUNDING
    normed = rms_norm(mixed, *case.given("output_norm_weight", dtype=dtype), case.params["eps"])
    assert row_error(normed, case.outputs["mixed_normed"]) < ROUNDING


def test_from_one_source_to_nine():
    assert {len(sources(load("vllm_triton")[name])) for name in MIXES} == set(range(1, 10))


@pytest.mark.parametrize("name", MIXES)
def test_stream_reads_the_same_mixture(name):
    case = load("vllm_triton")[name]
    *blocks, prefix = sources(case)
    if "delta" in case.inputs:
        prefix = case.given("prefix")[0]
    stream = residuals.ResidualStream(torch.zeros_like(prefix), case.params["eps"])
    stream.blocks, stream.prefix = list(blocks), prefix
    if "delta" in case.inputs:
        stream.add(*case.given("delta"))
        assert error(stream.prefix, case.outputs["prefix"]) < ROUNDING
    mixed = stream.read(*case.given("query", "norm_weight"))
    assert row_error(mixed, case.outputs["mixed"]) < ROUNDING


def normalised_values(stacked, query, weight, eps):
    return residuals.mix([rms_norm(s, weight, eps) for s in stacked], query, weight, eps)


MISTAKES = {
    "values normalised too": normalised_values,
    "scores divided by sqrt(H)": lambda s, query, weight, eps: residuals.mix(
        s, query / query.shape[-1] ** 0.5, weight, eps
    ),
    "norm weight forgotten": lambda s, query, weight, eps: residuals.mix(
        s, query, torch.ones_like(weight), eps
    ),
    "running sum left out": lambda s, query, weight, eps: residuals.mix(s[:-1], query, weight, eps),
    "plain mean": lambda s, query, weight, eps: s.mean(0),
    "eps 1e-6": lambda s, query, weight, _: residuals.mix(s, query, weight, 1e-6),
    "keys not normalised": lambda s, query, weight, _: (
        (s @ (query * weight)).softmax(0).unsqueeze(-1) * s
    ).sum(0),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("name", ["mix_5_sources", "mix_9_sources"])
def test_fixture_catches_a_wrong_mixture(name, mistake):
    case = load("vllm_triton")[name]
    arguments = *case.given("query", "norm_weight"), case.params["eps"]
    wrong = MISTAKES[mistake](sources(case), *arguments)
    assert row_error(wrong, case.outputs["mixed"]) > 100 * ROUNDING
