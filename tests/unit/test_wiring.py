"""The reads of the residual stream: derived, and counted on a model of the released depth."""

from __future__ import annotations

import dataclasses
from unittest.mock import patch

import pytest
import torch

from kimik3_lab.config import K3Config
from kimik3_lab.performance.wiring import ResidualRead, residual_reads
from kimik3_lab.reference import residuals
from kimik3_lab.reference.initialization import random_model
from kimik3_lab.reference.model import SequenceMixer


def skeleton() -> K3Config:
    """Depth, layer kinds and blocks of the release, at the widths of the smallest model."""
    release, micro = K3Config.released(), K3Config.micro()
    linear = dataclasses.replace(
        micro.linear_attn_config,
        kda_layers=release.linear_attn_config.kda_layers,
        full_attn_layers=release.linear_attn_config.full_attn_layers,
    )
    return dataclasses.replace(
        micro,
        num_hidden_layers=release.num_hidden_layers,
        attn_res_block_size=release.attn_res_block_size,
        linear_attn_config=linear,
    )


def mixtures(config: K3Config) -> list[int]:
    return [read.sources for read in residual_reads(config) if read.is_mixture]


def test_the_release_mixes_186_times():
    found = mixtures(K3Config.released())
    assert (len(found), sum(found), max(found)) == (186, 1002, 9)
    assert mixtures(skeleton()) == found


@pytest.mark.parametrize("config", [K3Config.tiny(), K3Config.micro(), skeleton()])
def test_a_running_model_reads_as_derived(config):
    torch.set_num_threads(1)
    model = random_model(config, seed=0)
    with patch.object(residuals, "mix", wraps=residuals.mix) as spy, torch.inference_mode():
        model(torch.tensor([1]), SequenceMixer(model.new_state()))
    assert [len(call.args[0]) for call in spy.call_args_list] == mixtures(config)


def test_reads_name_their_sublayer():
    reads = list(residual_reads(K3Config.micro()))
    assert reads[0] == ResidualRead(0, "attention", 0)
    assert not reads[0].is_mixture
    assert reads[1] == ResidualRead(0, "feed-forward", 1)
    assert reads[-1].layer_id is None
    assert len(reads) == 2 * K3Config.micro().num_hidden_layers + 1
