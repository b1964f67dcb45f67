"""One rank's shape, weights and uneven routing."""

from __future__ import annotations

import json

import pytest
import torch

from kimik3_lab.config import ConfigError, K3Config
from kimik3_lab.drafter_config import DSparkConfig
from kimik3_lab.performance.placement import Layout, rank_weights
from kimik3_lab.rank.routing_skew import load_profile, selection_bias, stretch
from kimik3_lab.rank.weights import LOGIT_STD, micro_rank, rank_drafter, rank_model
from kimik3_lab.reference.state import SequenceMixer


def test_a_slice_holds_what_a_rank_of_eight_holds() -> None:
    """All 93 layers at a rank's widths weigh what the placement says a rank keeps."""
    slice_of_all = K3Config.rank_slice(tp=8, layers=93)
    alone = rank_weights(slice_of_all, Layout(1))
    of_eight = rank_weights(K3Config.released(), Layout(8))
    assert alone.experts == of_eight.experts
    # The vectors A_log are padded per rank; nothing else differs.
    assert alone.trunk == pytest.approx(of_eight.trunk, rel=1e-5)


def test_the_first_layers_are_the_release_s() -> None:
    config, released = K3Config.rank_slice(layers=24), K3Config.released()
    for layer in range(24):
        assert config.is_kda_layer(layer) == released.is_kda_layer(layer)
        assert config.is_moe_layer(layer) == released.is_moe_layer(layer)
    assert (config.hidden_size, config.routed_expert_hidden_size) == (7168, 3584)
    assert config.shared_intermediate_size == 768


@pytest.mark.parametrize(("tp", "layers"), [(7, 24), (0, 24), (8, 0), (8, 94)])
def test_a_slice_that_cannot_be_cut_is_refused(tp: int, layers: int) -> None:
    with pytest.raises(ConfigError):
        K3Config.rank_slice(tp=tp, layers=layers)


def test_the_drafter_s_slice_fits_its_target() -> None:
    drafter = DSparkConfig.rank_slice(K3Config.rank_slice())
    whole = DSparkConfig()
    assert drafter.num_attention_heads * 8 == whole.num_attention_heads
    assert drafter.intermediate_size * 8 == whole.intermediate_size
    assert drafter.q_lora_rank == whole.q_lora_rank
    with pytest.raises(ConfigError):
        DSparkConfig.rank_slice(K3Config.rank_slice(layers=4))


# -- routing -----------------------------------------------------------------------------------


def test_the_recorded_profile_is_sorted_and_uneven() -> None:
    profile = load_profile()
    assert profile == sorted(profile, reverse=True)
    assert 1.2 < max(profile) * len(profile) < 3


def test_the_bias_gives_the_loads_that_were_asked_for() -> None:
    share = stretch([0.5, 0.3, 0.2], 96)
    assert float(share.sum()) == pytest.approx(1.0)
    assert torch.equal(share, share.sort(descending=True).values)
    bias = selection_bias(share, 4, LOGIT_STD)
    generator = torch.Generator().manual_seed(0)
    score = torch.sigmoid(LOGIT_STD * torch.randn(40_000, 96, generator=generator))
    load = torch.bincount((score + bias).topk(4).indices.flatten(), minlength=96).double()
    load /= load.sum()
    assert float((load - share).abs().max()) < 0.15 * float(share.mean())
    # Without the bias the profile is flat.
    flat = torch.bincount(score.topk(4).indices.flatten(), minlength=96).double()
    assert float((flat / flat.sum() - share).abs().max()) > 0.3 * float(share.mean())


def test_an_expert_cannot_get_more_than_all_tokens() -> None:
    with pytest.raises(ValueError, match="no bias gives it more"):
        selection_bias(torch.tensor([0.7, 0.1, 0.1, 0.1]), 2, 1.0)


# -- weights -----------------------------------------------------------------------------------


def test_a_small_slice_runs_and_its_packed_experts_have_its_shape() -> None:
    config = micro_rank()
    model = rank_model(config, load_profile(), dtype=torch.float32, keep_codes=True)
    again = rank_model(config, load_profile(), dtype=torch.float32, keep_codes=True)
    tokens = torch.tensor([5, 9, 11])
    logits = model(tokens, SequenceMixer(model.new_state()))
    assert logits.isfinite().all() and logits.std() > 0.1
    assert torch.equal(logits, again(tokens, SequenceMixer(again.new_state())))
    packed = model.model.layers[1].block_sparse_moe.packed
    assert packed.num_experts == config.num_experts
    assert packed.intermediate_size == config.moe_intermediate_size
    bias = model.model.layers[1].block_sparse_moe.gate.e_score_correction_bias
    other = model.model.layers[2].block_sparse_moe.gate.e_score_correction_bias
    assert torch.equal(bias.sort().values, other.sort().values)


def test_without_codes_only_the_kernels_can_run_it() -> None:
    model = rank_model(micro_rank(), load_profile(), dtype=torch.float32)
    with pytest.raises(RuntimeError, match="packed form only"):
        model(torch.tensor([5]), SequenceMixer(model.new_state()))


def test_a_drafter_s_slice_is_drawn_too() -> None:
    drafter = rank_drafter(DSparkConfig.for_target(micro_rank()), dtype=torch.float32)
    assert all(p.isfinite().all() for p in drafter.parameters())
    assert float(drafter.final_norm.weight.min()) == 1.0


def test_the_recorded_profile_says_where_it_comes_from() -> None:
    from kimik3_lab.paths import data_dir
    from kimik3_lab.rank.routing_skew import PROFILE_FILE

    body = json.loads((data_dir() / PROFILE_FILE).read_text(encoding="utf-8"))
    assert body["provenance"]["command"].endswith("measure_skew")
    assert body["busiest_over_mean"] == pytest.approx(
        max(body["profile"]) * body["experts"], abs=1e-3
    )
