"""Arithmetic of a token: against figures derived elsewhere, and against PyTorch's own counter."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kimik3_lab.config import K3Config
from kimik3_lab.performance.accounting import anatomy
from kimik3_lab.performance.flops import flops_per_token
from kimik3_lab.reference.initialization import random_model
from kimik3_lab.reference.model import K3ForCausalLM, SequenceMixer


@pytest.fixture(scope="module")
def released():
    return flops_per_token(K3Config.released())


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return random_model(K3Config.tiny(), seed=0)


def counted(model: K3ForCausalLM, cached: int) -> int:
    """Operations in matrix products that PyTorch sees while one token is decoded."""
    mixer = SequenceMixer(model.new_state())
    with torch.inference_mode():
        model(torch.arange(cached), mixer)
        with FlopCounterMode(display=False) as counter:
            model(torch.tensor([300]), mixer)
    return counter.get_total_flops()


def test_the_release_costs_what_its_shapes_say(released):
    assert round(released.matmul_total / 1e9, 2) == 208.35
    assert round(released.kda_recurrence / 1e9, 2) == 0.76
    assert round(released.kda_chunked / 1e9, 1) == 1.2
    assert round(released.residual_mix / 1e9, 2) == 0.04
    assert released.mla_per_cached_token == 24 * 96 * 2 * (576 + 512) == 5_013_504
    assert released.mla_per_pair == 24 * 96 * 2 * (192 + 128) == 1_474_560
    assert round(8192 * released.mla_per_cached_token / 1e9) == 41
    assert round(131_072 * released.mla_per_cached_token / 1e9) == 657
    assert round(1_048_576 * released.mla_per_cached_token / 1e12, 2) == 5.26


def test_matrices_are_all_but_the_vectors_of_what_is_active(released):
    report = anatomy(K3Config.released())
    vectors = 2 * report.active_parameters_per_token - released.matmul_total
    # Norms, taps, biases and residual queries, weighed twice.
    assert vectors == 31_045_120
    for row in report.components:
        if row.component in ("dense_mlp", "shared_experts", "lm_head", "routed_experts"):
            assert released.matmul[row.component] == 2 * row.active_parameters
    assert "embedding" not in released.matmul


def test_a_running_model_multiplies_as_much(model):
    flops = flops_per_token(model.config)
    assert counted(model, 60) - counted(model, 20) == 40 * flops.mla_per_cached_token
    rest = counted(model, 20) - 21 * flops.mla_per_cached_token
    # Of the recurrence only the look-up and the read are matrix products: 4 of 7.
    assert rest == flops.matmul_total + flops.kda_recurrence * 4 // 7


def test_crossover_is_the_first_context_where_attention_leads(released):
    n = released.decode_crossover
    assert n == 41_722
    assert released.decode(n) >= 2 * released.fixed > released.decode(n - 1)


def test_a_prompt_adds_up_over_its_tokens(released):
    each = released.fixed - released.kda_recurrence + released.kda_chunked
    by_hand = sum(each + position * released.mla_per_pair for position in range(1, 101))
    assert released.prefill(100) == by_hand
    assert released.prefill(0) == 0


def test_negative_counts_are_refused(released):
    with pytest.raises(ValueError, match="0 or more tokens, got -1"):
        released.decode(-1)
    with pytest.raises(ValueError, match="0 or more tokens, got -2"):
        released.prefill(-2)


def test_report_is_json(released):
    body = json.loads(json.dumps(released.to_dict()))
    assert body["matmul"] == sum(body["matmul_by_component"].values())
    assert body["fixed"] == released.fixed
