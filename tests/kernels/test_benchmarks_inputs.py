"""The benchmark's references against the lab's, and that its checks refuse wrong results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from benchmarks import inputs, timing
from benchmarks.cases import Case, MoeRank
from benchmarks.inputs import (
    attn_res,
    kda_decode,
    kda_prefill,
    kda_recover,
    mla_decode,
    moe,
    router,
    routings,
)
from benchmarks.peers import torch_peers

from kimik3_lab.reference import kda, mla, mxfp4, residuals
from kimik3_lab.reference import moe as reference_moe
from kimik3_lab.reference.norms import rms_norm

D = 128
GENERATOR = torch.Generator().manual_seed(7)


@pytest.fixture(autouse=True)
def few_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (attn_res, kda_decode, kda_prefill, kda_recover, mla_decode, moe, router):
        monkeypatch.setattr(module, "input_sets", lambda *_, **__: 2)


def _moe(format_: str, monkeypatch: pytest.MonkeyPatch, load: str = "uniform") -> moe.MoeProblem:
    monkeypatch.setattr(moe, "RANKS", {"tp8": MoeRank(6, 64, 2)})
    monkeypatch.setattr(moe, "LATENT", 128)
    operator = f"moe_{format_}_tp8"
    case = Case(operator, "T=5", {"tokens": 5}, None, load)  # type: ignore[arg-type]
    return moe.MoeProblem(case, moe.MoeWeights(operator, GENERATOR), GENERATOR)


def _experts(problem: moe.MoeProblem, situ: Callable[..., torch.Tensor]) -> Callable[[int], object]:
    """Token by token, with the lab's reference."""
    shared = problem.shared

    def matrices(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        if shared.format == "bf16":
            return shared.w13[expert].double(), shared.w2[expert].double()
        return (
            mxfp4.dequantize(shared.w13[expert], shared.s13[expert], torch.float64),
            mxfp4.dequantize(shared.w2[expert], shared.s2[expert], torch.float64),
        )

    def call(index: int) -> torch.Tensor:
        rows = []
        for x, ids, weights in zip(
            problem.x[index], problem.expert_ids[index], problem.weights[index], strict=True
        ):
            parts = []
            for expert, weight in zip(ids.tolist(), weights.double(), strict=True):
                w13, w2 = matrices(expert)
                gate, up = (w13 @ x.double()).chunk(2)
                parts.append(weight * (w2 @ situ(gate, up)))
            rows.append(sum(parts))
        return torch.stack(rows)

    return call


@pytest.mark.parametrize("format_", ["mxfp4", "bf16"])
def test_expert_reference(format_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _moe(format_, monkeypatch)
    assert problem.error(_experts(problem, reference_moe.situ)) < 1e-6
    wrong = problem.error(_experts(problem, lambda gate, up: reference_moe.situ(up, gate)))
    assert wrong > problem.tolerance
    assert problem.error(lambda _: torch.full((5, 128), torch.nan)) == float("inf")
    assert problem.facts()["distinct_experts"] <= 6


def test_scales_span_what_the_released_experts_have(monkeypatch: pytest.MonkeyPatch) -> None:
    scales = _moe("mxfp4", monkeypatch).shared.s13
    assert sorted(torch.exp2(scales.unique().float() - 127).tolist()) == [
        2.0**-9, 2.0**-8, 2.0**-7, 2.0**-6,
    ]  # fmt: skip


def test_routings(tmp_path: Path) -> None:
    even = routings.popularity(896, "uniform", GENERATOR)
    skewed = routings.popularity(896, "skewed", GENERATOR)
    assert even.sum() == pytest.approx(1) and skewed.sum() == pytest.approx(1)
    assert skewed.max() / skewed.min() == pytest.approx(896**routings.ZIPF_EXPONENT, rel=1e-3)
    for share in (even, skewed):
        ids = routings.draw_experts(300, 16, share, GENERATOR)
        assert ids.dtype == torch.int32 and ids.shape == (300, 16)
        assert bool((ids.sort(-1).values.diff(dim=-1) > 0).all())
    hot = routings.draw_experts(2000, 16, skewed, GENERATOR).flatten().bincount(minlength=896)
    assert hot.argmax() == skewed.argmax() and hot.max() > 8 * hot.float().mean()
    file = tmp_path / "load.json"
    file.write_text(json.dumps([1.0, 3.0]))
    loaded = routings.popularity(2, "skewed", GENERATOR, file)
    assert loaded.tolist() == [0.25, 0.75]
    with pytest.raises(ValueError, match="one positive number for each of 3 experts"):
        routings.popularity(3, "skewed", GENERATOR, file)
    file.write_text("[1.0, -1.0]")
    with pytest.raises(ValueError, match="positive"):
        routings.popularity(2, "skewed", GENERATOR, file)


def test_attn_res_reference() -> None:
    problem = attn_res.AttnResProblem(Case("attnres8", "T=3", {"tokens": 3}), GENERATOR)

    def lab(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        prefix = problem.prefix[index] + problem.delta[index]
        sources = [*problem.blocks[index].double(), prefix.double()]
        mix = residuals.mix(sources, problem.query.double(), problem.key_norm.double())
        return rms_norm(mix, problem.norm.double()), prefix

    assert problem.error(lab) < 1e-9
    assert problem.error(torch_peers._prepare_attn_res(problem)) < problem.tolerance
    kept = problem.error(lambda i: (lab(i)[0], problem.prefix[i]))
    assert kept > problem.tolerance  # the prefix without delta
    assert torch.equal(problem.blocks[1].transpose(0, 1), problem.blocks_by_token[1])


def test_router_check() -> None:
    problem = router.RouterProblem(Case("router", "T=3", {"tokens": 3}), GENERATOR)
    right = torch_peers._prepare_router(problem)
    assert problem.error(right) < 1e-6
    assert problem.error(lambda i: (right(i)[0], right(i)[1].roll(1, -1))) > problem.tolerance
    assert problem.error(lambda i: (right(i)[0] * 2.5, right(i)[1])) > problem.tolerance
    worst = problem.logits[1].sigmoid().add(problem.bias).topk(17).indices[:, 1:]  # misses the best
    assert problem.error(lambda i: (right(i)[0], worst)) == float("inf")
    assert problem.error(lambda i: (right(i)[0], right(i)[1] * 0)) == float("inf")
    assert problem.error(lambda i: (right(i)[0], right(i)[1] + 896)) == float("inf")


def _lab_step(problem: kda_decode.KdaDecodeProblem, *, keep_window: bool = False):
    def call(index: int) -> torch.Tensor:
        outs = []
        for b, slot in enumerate(problem.slots[index].tolist()):
            u, window = kda.short_conv(
                problem.qkv[index][b : b + 1].double(), problem.conv_weight.double(),
                problem.conv_state[slot].double().T,
            )  # fmt: skip
            q, k, v = (part.view(1, 1, problem.heads, D) for part in u.chunk(3, -1))
            gate = kda.gate(
                problem.raw_gate[index][:, b : b + 1].double(), problem.A_log.double(),
                problem.dt_bias.double().view(-1, D),
            )  # fmt: skip
            out, state = kda.recurrent(
                kda.l2norm(q) * D**-0.5, kda.l2norm(k), v, gate,
                problem.beta[index][:, b : b + 1].double().sigmoid(),
                kda.from_cache_layout(problem.state[slot][None].double()),
            )  # fmt: skip
            problem.state[slot] = kda.to_cache_layout(state)[0].float()
            if not keep_window:
                problem.conv_state[slot] = window.T.to(torch.bfloat16)
            gated = kda.gated_norm(
                out[0, 0], problem.output_gate[index][b].double(), problem.norm_weight.double()
            )
            outs.append(gated)
        return torch.stack(outs)

    return call


def test_kda_decode_reference() -> None:
    case = Case("kda_decode", "", {"heads": 2, "batch": 3})
    problem = kda_decode.KdaDecodeProblem(case, GENERATOR)
    before = problem.state.clone()
    assert problem.error(_lab_step(problem)) < 1e-6
    assert torch.equal(problem.state, before), "the check leaves the states as it found them"
    assert problem.error(_lab_step(problem, keep_window=True)) > problem.tolerance
    assert 0 not in torch.stack(problem.slots), "slot 0 belongs to nobody"


def test_kda_prefill_reference() -> None:
    case = Case("kda_prefill", "", {"heads": 2}, lengths=(7, 7))
    problem = kda_prefill.KdaPrefillProblem(case, GENERATOR)

    def lab(index: int, carried: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, g = (
            part[index].view(2, 7, 2, D).double()
            for part in (problem.q, problem.k, problem.v, problem.g)
        )
        gate = kda.gate(g, problem.A_log.double(), problem.dt_bias.double().view(2, D))
        out, state = kda.recurrent(
            kda.l2norm(q) * D**-0.5, kda.l2norm(k), v, gate,
            problem.beta[index].view(2, 7, 2).double().sigmoid(),
            carried * kda.from_cache_layout(problem.state.double()),
        )  # fmt: skip
        problem.v[index].fill_(torch.nan)  # as an implementation that writes its output there
        return out, kda.to_cache_layout(state)

    assert problem.error(lab) < 1e-9
    assert problem.error(lambda index: lab(index, 0.0)) > problem.tolerance
    assert bool(problem.v[-1].isfinite().all())
    assert problem.cu_seqlens.tolist() == [0, 7, 14]


def test_kda_recover_reference() -> None:
    case = Case("kda_recover", "", {"heads": 2, "batch": 2, "accepted": 3})
    problem = kda_recover.KdaRecoverProblem(case, GENERATOR)

    def lab(index: int, tokens: int = 3) -> None:
        gate = kda.gate(
            problem.gate[index].double(),
            problem.A_log.double(),
            problem.dt_bias.double().view(2, D),
        )
        key = kda.l2norm(problem.key[index].double())
        for b, slot in enumerate(problem.slots[index].tolist()):
            state = kda.from_cache_layout(problem.state[slot].double())
            for t in range(tokens):
                update = key[b, t][..., None] * problem.u[index][b, t].double()[:, None]
                state = state * gate[b, t].exp()[..., None] + update
            problem.state[slot] = kda.to_cache_layout(state).float()

    assert problem.error(lab) < 1e-6
    assert problem.error(lambda index: lab(index, 2)) > problem.tolerance


def test_mla_decode_reference() -> None:
    """With the identity for ``kv_b`` of one head, expanded attention is absorbed attention."""
    sizes = {"heads": 1, "batch": 2, "tokens": 3, "length": 70}
    problem = mla_decode.MlaDecodeProblem(Case("mla_decode", "", sizes), GENERATOR)
    identity = torch.eye(512, dtype=torch.float64)

    def lab(index: int, causal: bool = True) -> torch.Tensor:
        outs = []
        for table, q_latent, q_pe in zip(
            problem.tables[index], problem.q_latent[index].split(3), problem.q_pe[index].split(3),
            strict=True,
        ):  # fmt: skip
            rows = problem.pool[table.long()].flatten(0, 1)[:70].double()
            q = torch.cat((q_latent, q_pe), -1).double()
            kv_b = torch.cat((identity, identity))
            outs.append(mla.absorbed(q, rows, kv_b, scale=192**-0.5, causal=causal))
        return torch.cat(outs)

    assert problem.error(lab) < 1e-9
    assert problem.error(lambda index: lab(index, causal=False)) > problem.tolerance
    (torch_alone,) = [one for one in torch_peers.ADAPTERS if "mla_decode" in one.operators]
    assert problem.error(torch_alone.prepare(problem)) < 2 * problem.tolerance


def test_rotation_outlasts_the_cache() -> None:
    cache = timing._cache_bytes()
    assert timing.input_sets(cache) == timing.CACHE_MULTIPLE
    assert timing.input_sets(10 * cache) == 2
    assert timing.input_sets(1) == timing.MAX_SETS
    assert inputs.__doc__
