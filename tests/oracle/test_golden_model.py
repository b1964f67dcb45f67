"""A whole small K3 against NVIDIA's NeMo AutoModel: how the parts connect, token ids to logits.

Eight layers in blocks of three (so the last block is a partial one), the last two layers both MLA,
MXFP4 experts, released tensor names.
"""

import dataclasses
import functools

import pytest
import torch
from golden_cases import error, load

from kimik3_lab.config import K3Config, LinearAttentionConfig
from kimik3_lab.reference import mxfp4, residuals
from kimik3_lab.reference.model import K3ForCausalLM, SequenceMixer

PREFIX = "language_model."
CASE = load("automodel_k3")["model"]
#: of one sublayer on its recorded input; measured: 9e-7
ROUNDING = 3e-6
#: from token ids to logits; measured: 2e-5, and 3e-5 between our own float32 and float64
MODEL_ROUNDING = 1e-4


def recorded_config() -> K3Config:
    body = dict(CASE.params["config"])
    linear = body.pop("linear_attn_config")
    linear |= {name: tuple(linear[name]) for name in ("kda_layers", "full_attn_layers")}
    return dataclasses.replace(
        K3Config.micro(),
        **body,
        linear_attn_config=LinearAttentionConfig(**linear),
        mla_norm_eps=1e-6,  # theirs, as in the Hugging Face class
    )


def recorded_checkpoint(model: K3ForCausalLM) -> dict[str, torch.Tensor]:
    """Recorded tensors under the names of ``model``: prefix off, experts unpacked, A_log cut."""
    tensors = {
        name.removeprefix(PREFIX): tensor
        for name, tensor in CASE.inputs.items()
        if name != "token_ids"
    }
    for packed in [name for name in tensors if name.endswith("_packed")]:
        name = packed.removesuffix("_packed")
        tensors[name] = mxfp4.dequantize(tensors.pop(packed), tensors.pop(f"{name}_scale"))
    wanted = model.state_dict()
    for name in [name for name in tensors if name.endswith("A_log")]:
        tensors[name] = tensors[name][: wanted[name].numel()]  # always 128 long in theirs
    return tensors


@functools.cache
def recorded_model() -> K3ForCausalLM:
    model = K3ForCausalLM(recorded_config(), dtype=torch.float64).requires_grad_(False)
    model.load_state_dict(recorded_checkpoint(model))
    return model


def new_mixer(**options) -> SequenceMixer:
    return SequenceMixer(recorded_model().new_state(), **options)


def run(model: K3ForCausalLM, *, first_step: int | None = None, form: str = "auto"):
    """Logits of the recorded tokens, taken in as a prompt and then one by one."""
    ids = CASE.inputs["token_ids"]
    first_step = first_step or len(ids)
    mixer = new_mixer(form=form)
    steps = [ids[:first_step], *(ids[t : t + 1] for t in range(first_step, len(ids)))]
    return torch.cat([model(step, mixer) for step in steps])


def test_tensor_names_are_those_that_automodel_writes():
    model = recorded_model()
    assert recorded_checkpoint(model).keys() == model.state_dict().keys()


@pytest.mark.parametrize("first_step", [24, 17, 1])
def test_logits_match_automodel(first_step):
    logits = run(recorded_model(), first_step=first_step)
    assert error(logits, CASE.outputs["logits"]) < MODEL_ROUNDING


@pytest.mark.parametrize("form", ["prefill", "decode"])
def test_either_form_matches_automodel(form):
    assert error(run(recorded_model(), form=form), CASE.outputs["logits"]) < MODEL_ROUNDING


@pytest.mark.parametrize("layer_id", range(8))
def test_sublayers_match_automodel_on_their_recorded_inputs(layer_id):
    model = recorded_model()
    layer, recorded = model.model.layers[layer_id], CASE.outputs
    attention = layer.self_attn(recorded["attention_in"][layer_id].double(), new_mixer())
    assert error(attention, recorded["attention"][layer_id]) < ROUNDING
    ffn = layer.mlp if layer_id == 0 else layer.block_sparse_moe
    hidden = recorded["ffn_in"][layer_id].double()
    assert error(ffn(hidden), recorded["ffn"][layer_id]) < ROUNDING
    if layer_id:
        chosen = ffn.gate(hidden).expert_ids.sort(-1).values
        assert torch.equal(chosen, recorded["expert_ids"][layer_id - 1].long())


def replay(stream: residuals.ResidualStream, monkeypatch):
    """Worst error of the sublayers' inputs when their outputs are the recorded ones, and logits."""
    model, recorded, errors = recorded_model(), CASE.outputs, []

    def stand_in(given: torch.Tensor, result: torch.Tensor):
        def forward(x, *_):
            errors.append(error(x, given))
            return result.double()

        return forward

    for layer_id, layer in enumerate(model.model.layers):
        ffn = layer.mlp if layer_id == 0 else layer.block_sparse_moe
        for module, name in ((layer.self_attn, "attention"), (ffn, "ffn")):
            both = recorded[f"{name}_in"][layer_id], recorded[name][layer_id]
            monkeypatch.setattr(module, "forward", stand_in(*both))
    monkeypatch.setattr("kimik3_lab.reference.model.ResidualStream", stream)
    logits = model(CASE.inputs["token_ids"], new_mixer())
    assert len(errors) == 16
    return max(errors), error(logits, recorded["logits"])


def test_wiring_alone_matches_automodel(monkeypatch):
    """Every mixture, reset and norm, with no sublayer of ours in between."""
    inputs, logits = replay(residuals.ResidualStream, monkeypatch)
    assert inputs < ROUNDING
    assert logits < ROUNDING


def test_blocks_start_where_the_recording_says():
    embedding = CASE.inputs[f"{PREFIX}model.embed_tokens.weight"][CASE.inputs["token_ids"]]
    blocks, prefix = CASE.outputs["blocks"], CASE.outputs["prefix"]
    assert len(blocks) == 3
    assert torch.equal(blocks[0], embedding.float())
    assert torch.equal(blocks[1], prefix[2])
    assert torch.equal(blocks[2], prefix[5])


# -- mistakes --------------------------------------------------------------------------------------


def changed_model(**changes) -> K3ForCausalLM:
    """The recorded weights in a model of a slightly different configuration."""
    config = dataclasses.replace(recorded_config(), **changes)
    model = K3ForCausalLM(config, dtype=torch.float64).requires_grad_(False)
    model.load_state_dict(recorded_checkpoint(model))
    return model


# moe_renormalize=False is not among them: routed_expert_norm divides by the same factor again
CONFIG_MISTAKES = {
    "blocks of four layers": {"attn_res_block_size": 4},
    "one block for all layers": {"attn_res_block_size": 8},
    "another SiTU bound": {"activation_situ_beta": 3.0},
    "no SiTU bound on the second half": {"activation_situ_linear_beta": 1e9},
    "one expert fewer": {"num_experts_per_token": 2},
}


@pytest.mark.parametrize("mistake", CONFIG_MISTAKES)
def test_fixture_catches_a_wrong_configuration(mistake):
    wrong = run(changed_model(**CONFIG_MISTAKES[mistake]))
    assert error(wrong, CASE.outputs["logits"]) > 100 * MODEL_ROUNDING


def test_fixture_catches_the_other_mla_epsilon():
    layer = changed_model(mla_norm_eps=1e-5).model.layers[3].self_attn
    wrong = layer(CASE.outputs["attention_in"][3].double(), new_mixer())
    assert error(wrong, CASE.outputs["attention"][3]) > ROUNDING


def swap(tensors, left: str, right: str):
    """Exchange all tensors whose names differ in ``left`` and ``right`` only."""
    return {
        name.replace(left, "\0").replace(right, left).replace("\0", right): tensor
        for name, tensor in tensors.items()
    }


def constant(tensors, suffix: str, value: float):
    """Set all tensors whose names end in ``suffix`` to ``value``."""
    return {
        name: torch.full_like(tensor, value) if name.endswith(suffix) else tensor
        for name, tensor in tensors.items()
    }


CHECKPOINT_MISTAKES = {
    "w1 and w3 swapped": lambda t: swap(t, ".w1.", ".w3."),
    "norms of both mixtures swapped": lambda t: swap(t, ".self_attention_res_", ".mlp_res_"),
    "selection bias forgotten": lambda t: constant(t, "e_score_correction_bias", 0.0),
    "routed norm weight forgotten": lambda t: constant(t, "routed_expert_norm.weight", 1.0),
    "output gates forgotten": lambda t: constant(t, "g_proj.weight", 0.0),
    "final mixture uniform": lambda t: constant(t, "output_attn_res_proj.weight", 0.0),
    "shared experts forgotten": lambda t: constant(t, "shared_experts.down_proj.weight", 0.0),
}


@pytest.mark.parametrize("mistake", CHECKPOINT_MISTAKES)
def test_fixture_catches_a_wrong_checkpoint(mistake):
    model = K3ForCausalLM(recorded_config(), dtype=torch.float64).requires_grad_(False)
    model.load_state_dict(CHECKPOINT_MISTAKES[mistake](recorded_checkpoint(model)))
    assert error(run(model), CASE.outputs["logits"]) > 100 * MODEL_ROUNDING


class NeverReset(residuals.ResidualStream):
    """Keeps adding to the running sum after a block was closed."""

    def start_block(self):
        self.blocks.append(self.prefix)


class ReadsBlocksOnly(residuals.ResidualStream):
    """Leaves the running sum out of the mixture."""

    def read(self, query, norm_weight):
        return residuals.mix(self.blocks or [self.prefix], query, norm_weight, self.eps)


class PlainSum(residuals.ResidualStream):
    """An ordinary transformer's residual stream."""

    def read(self, query, norm_weight):
        return sum(self.blocks, torch.zeros_like(self.prefix)) + self.prefix


@pytest.mark.parametrize("stream", [NeverReset, ReadsBlocksOnly, PlainSum])
def test_fixture_catches_wrong_wiring(stream, monkeypatch):
    inputs, logits = replay(stream, monkeypatch)
    assert inputs > 100 * ROUNDING
    assert logits > 100 * ROUNDING
