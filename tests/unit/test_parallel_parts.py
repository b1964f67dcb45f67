"""Shares, context-parallel attention and dispatch plans, in one process; no ranks are started."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimik3_lab.config import K3Config
from kimik3_lab.parallel import dcp
from kimik3_lab.parallel.dispatch import masked, plan_dispatch
from kimik3_lab.parallel.experts import check_slots
from kimik3_lab.parallel.groups import Ranks, share, sizes
from kimik3_lab.parallel.launch import run_ranks
from kimik3_lab.parallel.model import ParallelK3
from kimik3_lab.reference import mla
from kimik3_lab.reference.initialization import random_model


@given(st.integers(0, 200), st.integers(1, 9))
def test_shares_cover_everything_once(total, size):
    held = [list(share(total, size, rank)) for rank in range(size)]
    assert [number for part in held for number in part] == list(range(total))
    assert sizes(total, size) == [len(part) for part in held]
    assert max(map(len, held)) - min(map(len, held)) <= 1


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 12), st.integers(1, 4))
def test_parts_of_the_rows_give_the_whole(seed, size, length, count):
    """Any number of ranks, some without a row, any number of queries: one softmax over all."""
    generator = torch.Generator().manual_seed(seed)
    count = min(count, length)
    heads, nope, rope, lora, value = 2, 4, 3, 5, 6

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, rows = normal(count, heads, nope + rope), 3 * normal(length, lora + rope)
    kv_b = normal(heads * (nope + value), lora)
    expected = mla.absorbed(q, rows, kv_b)
    per_head = kv_b.view(heads, nope + value, lora)
    query = torch.cat(
        (torch.einsum("nhd,hdr->nhr", q[..., :nope], per_head[:, :nope]), q[..., nope:]), -1
    )
    positions = torch.arange(length - count, length)
    parts = [
        dcp.attend(
            query, rows[rank::size], lora, (nope + rope) ** -0.5, positions,
            torch.tensor(range(rank, length, size), dtype=torch.int64),
        )
        for rank in range(size)
    ]  # fmt: skip
    merged = dcp.merge(torch.stack([o for o, _ in parts]), torch.stack([s for _, s in parts]))
    found = torch.einsum("nhr,hvr->nhv", merged, per_head[:, nope:])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_a_part_without_rows_weighs_nothing():
    out, lse = dcp.attend(
        torch.ones(2, 1, 3), torch.ones(0, 3), 2, 1.0, torch.arange(2), torch.arange(0)
    )
    assert out.shape == (2, 1, 2)
    assert not out.any()
    assert (lse == -torch.inf).all()
    weights = dcp.merge_weights(torch.stack([lse, torch.full_like(lse, -1e4)]))
    assert weights[:, 0, 0].tolist() == [0.0, 1.0]
    assert not dcp.merge_weights(torch.stack([lse, lse])).isnan().any()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(0, 8), st.integers(1, 4))
def test_every_pair_travels_to_its_rank_once(seed, size, tokens, top_k):
    generator = torch.Generator().manual_seed(seed)
    pair_ranks = torch.randint(size, (tokens, top_k), generator=generator)
    plan = plan_dispatch(pair_ranks, size)
    assert sum(plan.send) == len(plan.tokens)
    there = torch.repeat_interleave(torch.arange(size), torch.tensor(plan.send))
    sent = set(zip(plan.tokens.tolist(), there.tolist(), strict=True))
    assert len(sent) == len(plan.tokens)
    assert sent == {(t, r) for t, ranks in enumerate(pair_ranks.tolist()) for r in ranks}
    weights = torch.rand(tokens, top_k, generator=generator)
    kept = masked(weights[plan.tokens], pair_ranks[plan.tokens], there)
    total = torch.zeros(tokens, top_k).index_add_(0, plan.tokens, kept)
    assert torch.equal(total, weights)  # each weight arrives at one rank, whole


def test_one_rank_is_the_reference():
    model = random_model(K3Config.micro(), seed=4)
    expected = model.generate([3, 9, 1], 6, stop_token_ids=())
    for experts in ("sliced", "whole", "all_to_all"):
        for split in (False, True):
            parallel = ParallelK3(model, experts=experts, context_parallel=split)
            assert parallel.generate([3, 9, 1], 6, stop_token_ids=()) == expected


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (torch.tensor([], dtype=torch.int64), r"at least one token, got torch.int64 \(0,\)"),
        (torch.tensor([3, -1]), "from 0 to 63, got -1"),
        (torch.tensor([3, 64]), "from 0 to 63, got 64"),
        (torch.tensor([[3]]), r"got torch.int64 \(1, 1\)"),
        (torch.tensor([3], dtype=torch.int32), "got torch.int32"),
        ([3, 5], "got a list: make one with torch.tensor"),
    ],
)
def test_a_step_that_the_reference_refuses(step, message):
    """No rank has the row of a token that does not exist: the sum would silently be zeros."""
    model = random_model(K3Config.micro(), seed=4)
    for rank in range(2):
        parallel = ParallelK3(model, Ranks(rank, 2))
        with pytest.raises(ValueError, match=message):
            parallel(step, parallel.new_mixer())


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([1] * 300, 1, "300 tokens leaves no room in a context of 256: give at most 255"),
        ([1] * 250, 7, "from 1 to 6: the context of 256 tokens already holds a prompt of 250"),
        ([1], 0, "max_tokens must be from 1 to 255: .* got 0"),
        ([1], -1, "got -1"),
        ([1], 2.5, "whole numbers"),
        ([1.5], 2, "whole numbers"),
        ([], 2, "the prompt is empty"),
        ([3, 64], 2, "from 0 to 63, got 64"),
    ],
)
def test_a_prompt_that_the_reference_refuses(prompt, max_tokens, message):
    """Every rank refuses it before it exchanges anything: nobody waits for another."""
    model = random_model(K3Config.micro(), seed=4)
    with pytest.raises(ValueError):  # in words of its own
        model.generate(prompt, max_tokens)
    for rank in range(2):
        with pytest.raises(ValueError, match=message):
            ParallelK3(model, Ranks(rank, 2)).generate(prompt, max_tokens)


def test_a_prompt_fills_the_context_to_the_last_token():
    model = random_model(K3Config.micro(), seed=4)
    prompt = torch.arange(254).remainder(64)
    expected = model.generate(prompt, 2, stop_token_ids=())
    assert ParallelK3(model).generate(prompt, 2, stop_token_ids=()) == expected


def test_a_rank_has_its_own_memory():
    model = random_model(K3Config.micro(), seed=4)
    parallel = ParallelK3(model, Ranks(0, 2))
    kda = parallel.layers[0].self_attn.part
    assert kda.q_proj.weight.shape == (16, 64)
    assert kda.q_proj.weight.data_ptr() != model.model.layers[0].self_attn.q_proj.weight.data_ptr()
    assert parallel.new_state().recurrent[0].shape == (1, 16, 16)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: share(4, 2, 2), "from 0 to 1, got 2"),
        (lambda: run_ranks(print, 0), "at least one rank"),
        (lambda: run_ranks(print, 64, backend="nccl"), "need a GPU each, found"),
        (lambda: Ranks().all_gather(torch.ones(2), [3]), "brought 2 rows"),
        (lambda: Ranks(0, 2).reduce_scatter(torch.ones(3), [1, 1]), "do not add up to 3"),
        (lambda: Ranks(0, 3).reduce_scatter(torch.ones(4), [2, 2]), "for 3 ranks do not add up"),
        (lambda: Ranks().reduce_scatter(torch.ones(3), [2]), "do not add up to 3"),
        (lambda: Ranks(0, 2).all_to_all(torch.ones(3), [1, 1], [1, 1]), "3 rows for 2 ranks"),
        (lambda: check_slots([[0]], 1, 2), "2 ranks need a list of experts each, got 1"),
        (lambda: check_slots([[0, 0]], 1, 1), "rank 0 holds an expert twice"),
        (lambda: check_slots([[0, 7]], 1, 1), "no expert 7"),
        (lambda: ParallelK3(random_model(K3Config.micro()), experts="sharded"), "'sharded'"),
        (
            lambda: ParallelK3(random_model(K3Config.micro()), slots={1: [[0, 1, 2, 3]]}),
            "set experts='whole'",
        ),
        (
            lambda: ParallelK3(
                random_model(K3Config.micro()), experts="whole", slots={0: [[0, 1, 2, 3]]}
            ),
            "slots name layer 0, which has no routed experts",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_layer_that_ranks_do_not_divide_is_not_measured():
    from kimik3_lab.parallel.layer_shape import LayerShape

    with pytest.raises(ValueError, match="3 ranks do not divide 896 experts"):
        LayerShape.of(K3Config.released(), "ep", Ranks(0, 3))
    shape = LayerShape.of(K3Config.released(), "tp", Ranks(1, 2))
    assert (shape.experts, shape.expert_width, shape.kda_heads) == (896, 1536, 48)
    bytes_ = 3 * 3584 * shape.expert_width * shape.experts * 17 // 32
    assert round(bytes_ / 1e9, 1) == 7.9


def test_a_run_that_may_be_cut_short_begins_where_it_is_told():
    from kimik3_lab.parallel.measure_cases import Plan, layer_cases

    usual = list(layer_cases(Plan.make(on_gpu=True, quick=False, ranks=2)))
    assert usual[0] == ("tp", 1, "uniform")
    moved = list(layer_cases(Plan.make(on_gpu=True, quick=False, ranks=2, first=("ep", 4096))))
    assert moved[:3] == [("ep", 4096, load) for load in ("uniform", "skewed", "placed")]
    assert moved[3:] == [case for case in usual if case[:2] != ("ep", 4096)]


def test_what_a_measured_row_says_of_its_draws():
    """Counted on the busiest rank; popular experts lie together unless they were dealt out."""
    from kimik3_lab.parallel.gpu_experts import draw_routing
    from kimik3_lab.parallel.layer_shape import LayerShape
    from kimik3_lab.parallel.measure_cases import _facts, _spread_out

    config, ranks = K3Config.released(), Ranks(0, 2)
    order = _spread_out(8, 2, torch.device("cpu"))
    assert order.tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    moved = _spread_out(896, 2, torch.device("cpu"))
    facts = {}
    for name, load, place in (
        ("uniform", "uniform", None), ("skewed", "skewed", None), ("placed", "skewed", moved),
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        draws = [draw_routing(64, config, load, generator, place) for _ in range(2)]
        assert all((d.expert_ids.sort(-1).values.diff(dim=-1) > 0).all() for d in draws)
        assert all(torch.allclose(d.weights.sum(-1), torch.ones(64)) for d in draws)
        facts[name] = _facts(draws, LayerShape.of(config, "ep", ranks), ranks)
    assert facts["skewed"]["imbalance"] > 1.4 > 1.1 > facts["placed"]["imbalance"]
    assert facts["uniform"]["imbalance"] < 1.1
    experts, pairs, tiles, rows = facts["skewed"]["tiles_busiest_rank"]
    assert pairs == facts["skewed"]["pairs_busiest_rank"]
    assert tiles > experts > 200
    assert rows == 8 * tiles
    whole = _facts(draws, LayerShape.of(config, "tp", ranks), ranks)
    assert whole["pairs_busiest_rank"] == 64 * 16
    assert whole["imbalance"] == 1.0
