"""Kimi K3 done wrong on purpose: small wrong variants, and the checks that must see them.

Each variant replaces one function or method of the reference, with pytest's ``monkeypatch``, by
what somebody really shipped. ``test_k3_mistakes.py`` lists them with symptom, cause and source.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import NamedTuple

import pytest
import test_accounting
import test_reference_drafter
import test_reference_kda
import test_reference_moe
import torch
from drafter_support import random_drafter
from numpy_k3 import NumpyK3
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from kimik3_lab.config import ConfigError, K3Config
from kimik3_lab.drafter_config import DSparkConfig
from kimik3_lab.performance.accounting import sequence_memory
from kimik3_lab.reference import (
    checkpoint,
    drafter_checkpoint,
    drafter_layers,
    kda,
    kda_chunked,
    mla,
    model,
    moe,
    norms,
    residuals,
    state,
)
from kimik3_lab.reference.drafter import DSparkDrafter
from kimik3_lab.reference.initialization import random_model
from kimik3_lab.reference.state import SequenceMixer
from kimik3_lab.tensors import checkpoint_tensors

__all__ = ["MUTATIONS", "Mutation"]

MICRO = K3Config.micro()
F64 = torch.float64
Patch = pytest.MonkeyPatch


class Mutation(NamedTuple):
    """A wrong variant, the check that must see it, and what else is known of the symptom."""

    number: int
    name: str
    apply: Callable[[Patch], object]
    check: Callable[[], object]
    symptom: Callable[[], object] | None = None


MUTATIONS: list[Mutation] = []


def mutation(
    number: int, check: Callable[[], object], symptom: Callable[[], object] | None = None
) -> Callable[[Callable[[Patch], object]], Callable[[Patch], object]]:
    """Enter a variant into the list."""

    def enter(apply: Callable[[Patch], object]) -> Callable[[Patch], object]:
        name = apply.__name__.replace("_", "-")
        MUTATIONS.append(Mutation(number, name, apply, check, symptom))
        return apply

    return enter


# -- checks ----------------------------------------------------------------------------------------


@functools.cache
def micro() -> model.K3ForCausalLM:
    return random_model(MICRO, 1, dtype=F64)


@functools.cache
def token_ids() -> Tensor:
    return torch.randint(0, MICRO.vocab_size, (18,), generator=torch.Generator().manual_seed(1))


@functools.cache
def second_implementation() -> Tensor:
    weights = {name: value.numpy() for name, value in micro().state_dict().items()}
    return torch.from_numpy(NumpyK3(MICRO, weights).logits(token_ids().tolist()))


@torch.inference_mode()
def run(taps: dict[int, Tensor | None] | None = None) -> Tensor:
    """Logits: a prompt in two pieces, then two tokens one by one, so that every state is used."""
    mixer = SequenceMixer(micro().new_state())
    kept: dict[int, list[Tensor]] = {i: [] for i in taps or ()}
    logits = []
    for step in token_ids().split((9, 7, 1, 1)):
        seen: dict[int, Tensor | None] = dict.fromkeys(kept)
        logits.append(micro()(step, mixer, taps=seen))
        for i, rows in seen.items():
            kept[i].append(rows)
    if taps is not None:
        taps.update({i: torch.cat(rows) for i, rows in kept.items()})
    return torch.cat(logits)


def equals_second_implementation() -> None:
    torch.testing.assert_close(run(), second_implementation(), rtol=0, atol=1e-10)


@torch.inference_mode()
def prefix_hit_equals_recompute() -> None:
    """A second request that starts from the first one's snapshot."""
    first = SequenceMixer(micro().new_state())
    micro()(token_ids()[:8], first)
    snapshot = first.state.clone()
    micro()(token_ids()[8:], first)
    hit = micro()(token_ids()[8:], SequenceMixer(snapshot))
    torch.testing.assert_close(hit, second_implementation()[8:], rtol=0, atol=1e-10)


@contextlib.contextmanager
def refusal_is_failure(*kinds: type[Exception]) -> Iterator[None]:
    """Turn an error into a failed check: here the right thing to do is to accept."""
    try:
        yield
    except kinds as error:
        raise AssertionError(f"refused: {error}") from error


def top_1_flips() -> None:
    assert (run().argmax(-1) != second_implementation().argmax(-1)).any()


# -- KDA -------------------------------------------------------------------------------------------


@mutation(2, equals_second_implementation)
def rate_read_per_channel(patch: Patch) -> None:
    assert micro().model.layers[0].self_attn.A_log.numel() == MICRO.linear_attn_config.head_dim

    def gate(raw: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float = -5.0) -> Tensor:
        return lower_bound * torch.sigmoid(A_log.exp() * (raw + dt_bias.view(raw.shape[-2:])))

    patch.setattr(kda, "gate", gate)


@mutation(11, equals_second_implementation)
def chunks_read_the_state_as_value_by_key(patch: Patch) -> None:
    right = kda.chunked

    def chunked(q, k, v, g, beta, state=None, *rest, **options):
        return right(q, k, v, g, beta, None if state is None else state.mT, *rest, **options)

    patch.setattr(kda, "chunked", chunked)


@mutation(12, lambda: test_reference_kda.test_float32_is_stable_for_correlated_keys("open"))
def inverse_by_doubling(patch: Patch) -> None:
    def solve(lower: Tensor, right: Tensor, **_: bool) -> Tensor:
        power = lower.tril(-1)
        one = torch.eye(power.shape[-1], dtype=power.dtype)
        inverse, reach = one - power, 1
        while (reach := 2 * reach) < power.shape[-1]:
            power = power @ power
            inverse = inverse @ (one + power)
        return inverse @ right

    patch.setattr(torch.linalg, "solve_triangular", solve)


@mutation(13, test_reference_kda.test_a_later_gate_does_not_reach_an_earlier_output)
def diagonal_anchored_at_a_later_row(patch: Patch) -> None:
    def scores(x: Tensor, k: Tensor, G: Tensor) -> Tensor:
        anchor = G[..., -1:, :]
        return (x * (G - anchor).exp()) @ (k * (anchor - G).exp()).mT

    patch.setattr(kda_chunked, "_decayed_scores", scores)


def later_logits_are_not_numbers() -> None:
    """All tokens after the first chunk, whatever the text: one token id over and over."""
    logits = run()
    assert logits[9:].isnan().all() and not logits[:9].isnan().any()
    assert len(logits[9:].argmax(-1).unique()) == 1


@mutation(26, equals_second_implementation, later_logits_are_not_numbers)
def state_left_unwritten_at_a_boundary(patch: Patch) -> None:
    right = kda_chunked._carry

    def carry(*arguments):
        after = right(*arguments).clone()
        after[..., 0, 0] = torch.nan
        return after

    patch.setattr(kda_chunked, "_carry", carry)


@mutation(15, prefix_hit_equals_recompute)
def snapshot_without_the_recurrent_state(patch: Patch) -> None:
    _forget(patch, "recurrent")


@mutation(15, prefix_hit_equals_recompute)
def snapshot_without_the_convolution_window(patch: Patch) -> None:
    _forget(patch, "conv")


def _forget(patch: Patch, group: str) -> None:
    right = state.SequenceState.clone

    def clone(self):
        copy = right(self)
        for tensor in getattr(copy, group).values():
            tensor.zero_()
        return copy

    patch.setattr(state.SequenceState, "clone", clone)


@mutation(18, equals_second_implementation)
def output_gate_of_kda_without_the_norm(patch: Patch) -> None:
    patch.setattr(kda, "gated_norm", lambda o, gate, *_: o * gate.view(o.shape).sigmoid())


@mutation(18, equals_second_implementation)
def output_gate_of_mla_with_a_norm(patch: Patch) -> None:
    right = SequenceMixer.mla

    def attend(self, *arguments):
        o = right(self, *arguments)
        return norms.rms_norm(o, o.new_ones(o.shape[-1]))

    patch.setattr(SequenceMixer, "mla", attend)


# -- residual stream -------------------------------------------------------------------------------


def _stream(patch: Patch, methods: dict[str, Callable]) -> None:
    patch.setattr(model, "ResidualStream", type("Wrong", (residuals.ResidualStream,), methods))


def _is_output(query: Tensor) -> bool:
    return query is micro().model.output_attn_res_proj.weight


@mutation(3, equals_second_implementation, top_1_flips)
def final_mixture_left_out(patch: Patch) -> None:
    def read(self, query, norm_weight):
        if _is_output(query):
            return self.prefix
        return residuals.ResidualStream.read(self, query, norm_weight)

    _stream(patch, {"read": read})


@mutation(3, equals_second_implementation, top_1_flips)
def output_buffer_aliases_the_running_sum(patch: Patch) -> None:
    def read(self, query, norm_weight):
        if _is_output(query):
            self.prefix.zero_()  # clearing the buffer to accumulate into
        return residuals.ResidualStream.read(self, query, norm_weight)

    _stream(patch, {"read": read})


LAST_START = max(i for i in range(MICRO.num_hidden_layers) if i % MICRO.attn_res_block_size == 0)


@functools.cache
def right_taps() -> dict[int, Tensor]:
    """Running sums of the unchanged model."""
    taps = dict.fromkeys(range(MICRO.num_hidden_layers))
    run(taps)
    return taps


def only_layers_of_the_last_block_are_wrong() -> None:
    taps = dict.fromkeys(range(MICRO.num_hidden_layers))
    run(taps)
    for layer_id, rows in taps.items():
        same = torch.allclose(rows, right_taps()[layer_id], rtol=0, atol=1e-10)
        assert same == (layer_id < LAST_START), layer_id


@mutation(4, equals_second_implementation, only_layers_of_the_last_block_are_wrong)
def last_block_used_as_scratch(patch: Patch) -> None:
    right_taps()
    blocks = LAST_START // MICRO.attn_res_block_size + 1

    def add(self, output):
        residuals.ResidualStream.add(self, output)
        if len(self.blocks) == blocks:
            self.blocks[-1] = output

    _stream(patch, {"add": add})


def logits_drift_by_little() -> None:
    drift = (run() - second_implementation()).abs().max()
    assert 1e-4 < drift < 0.5, drift


@mutation(5, equals_second_implementation, logits_drift_by_little)
def mixture_scored_in_bfloat16(patch: Patch) -> None:
    def mix(sources, query, norm_weight, eps=1e-5):
        values = torch.stack(tuple(sources))
        keys = norms.rms_norm(values.bfloat16(), norm_weight.bfloat16(), eps)
        share = (keys @ query.reshape(-1).bfloat16()).to(values.dtype).softmax(0)
        return (share.unsqueeze(-1) * values).sum(0)

    patch.setattr(residuals, "mix", mix)


def taps_are_running_sums() -> None:
    drafter = DSparkDrafter(DSparkConfig.for_target(MICRO), device="meta")
    taps = drafter.new_taps()
    prompt = torch.tensor(test_reference_drafter.PROMPT)
    with torch.inference_mode():
        micro()(prompt, SequenceMixer(micro().new_state()), taps=taps)
    test_reference_drafter.test_taps_are_the_running_sum_and_not_the_mixture(micro(), drafter, taps)


@mutation(6, taps_are_running_sums)
def mixture_tapped_in_place_of_the_sum(patch: Patch) -> None:
    def forward(self, token_ids, mixer, taps=None):
        stream = model.ResidualStream(self.embed_tokens(token_ids), self.norm.eps)
        for layer_id, layer in enumerate(self.layers):
            layer(stream, mixer)
            if taps is not None and layer_id in taps:
                reader = self.layers[layer_id + 1]
                taps[layer_id] = stream.read(
                    reader.self_attention_res_proj.weight, reader.self_attention_res_norm.weight
                )
        x = stream.read(self.output_attn_res_proj.weight, self.output_attn_res_norm.weight)
        return self.norm(x)

    patch.setattr(model.K3Model, "forward", forward)


# -- experts ---------------------------------------------------------------------------------------


@functools.cache
def router_inputs() -> tuple[Tensor, Tensor, Tensor]:
    """A router of the released width in experts, and tokens, all on the grid of bfloat16."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1500, 64, generator=generator).bfloat16()
    weight = (torch.randn(896, 64, generator=generator) / 8).bfloat16()
    return hidden, weight, 0.05 * torch.randn(896, generator=generator)


def rerouted() -> float:
    """Share of tokens that get another set of experts than in float64."""
    hidden, weight, bias = router_inputs()
    got = moe.route(hidden, weight, bias, 16).expert_ids.sort(-1).values
    scores = (hidden.double() @ weight.double().mT).sigmoid() + bias.double()
    want = scores.topk(16, -1).indices.sort(-1).values
    return (got != want).any(-1).double().mean().item()


def tokens_route_as_in_float64() -> None:
    assert rerouted() < 2e-3


def some_tokens_route_differently() -> None:
    assert 0.01 < rerouted() < 0.9


@mutation(7, tokens_route_as_in_float64, some_tokens_route_differently)
def router_logits_in_bfloat16(patch: Patch) -> None:
    right = moe.compute_dtype
    patch.setattr(torch, "sigmoid", lambda x, f=torch.sigmoid: f(x.bfloat16().to(right(x.dtype))))


def loaded_bias_ranks_experts() -> None:
    router = moe.Router(MICRO, dtype=torch.bfloat16)
    bias = torch.tensor([1.0, 1 + 2.0**-12, 0.0, 0.0])
    router.load_state_dict({"weight": torch.zeros(4, 64), "e_score_correction_bias": bias})
    best = router(torch.ones(1, 64, dtype=torch.bfloat16)).expert_ids[0, 0]
    assert best == 1


@mutation(8, loaded_bias_ranks_experts)
def selection_bias_created_in_bfloat16(patch: Patch) -> None:
    right = moe.Router.__init__

    def init(self, *arguments, **options):
        right(self, *arguments, **options)
        narrow = self.e_score_correction_bias.data.bfloat16()
        self.e_score_correction_bias = torch.nn.Parameter(narrow)  # the router upcasts it later

    patch.setattr(moe.Router, "__init__", init)


@mutation(9, lambda: test_reference_moe.test_situ_is_used_at_all_three_sites(None))
def silu_in_the_shared_and_dense_feed_forward(patch: Patch) -> None:
    patch.setattr(
        moe.MLP,
        "forward",
        lambda self, x: self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)),
    )


@mutation(9, equals_second_implementation)
def silu_everywhere(patch: Patch) -> None:
    patch.setattr(moe, "situ", lambda gate, up, *_: F.silu(gate) * up)


def _combine(patch: Patch, combine: Callable[[moe.LatentMoE, Tensor, Tensor], Tensor]) -> None:
    def forward(self, hidden):
        total = combine(self, self.routed_expert_down_proj(hidden), hidden)
        return self.routed_expert_up_proj(total) + self.shared_experts(hidden)

    patch.setattr(moe.LatentMoE, "forward", forward)


@mutation(10, equals_second_implementation)
def norm_of_the_routed_sum_dropped(patch: Patch) -> None:
    _combine(patch, lambda layer, z, h: moe.routed_sum(z, layer.gate(h), layer.experts))


@mutation(10, equals_second_implementation)
def norm_before_the_sum_over_ranks(patch: Patch) -> None:
    def combine(layer, z, hidden):
        routing, total = layer.gate(hidden), 0
        for rank in range(2):  # two ranks with every other expert
            mine = routing.weights * (routing.expert_ids % 2 == rank)
            part = moe.routed_sum(z, routing._replace(weights=mine), layer.experts)
            total = total + layer.routed_expert_norm(part)
        return total

    _combine(patch, combine)


# -- checkpoint and accounting ---------------------------------------------------------------------


def nested_checkpoint_loads() -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(micro(), folder, prefix="language_model.")
        with refusal_is_failure(checkpoint.CheckpointError):
            loaded = checkpoint.load(folder, dtype=F64)
    torch.testing.assert_close(loaded.state_dict(), dict(micro().state_dict()), rtol=0, atol=0)


@mutation(19, nested_checkpoint_loads)
def nested_names_not_known(patch: Patch) -> None:
    patch.setattr(checkpoint, "RELEASED_PREFIX", "")


def nested_configuration_is_read() -> None:
    nested = {"model_type": "kimi_k3", "text_config": MICRO.to_dict()}
    with refusal_is_failure(ConfigError):
        assert K3Config.from_dict(nested) == MICRO


@mutation(19, nested_configuration_is_read)
def configuration_read_at_the_top_level(patch: Patch) -> None:
    right = K3Config.from_dict

    def from_dict(body):
        return right({name: value for name, value in body.items() if name != "text_config"})

    patch.setattr(K3Config, "from_dict", from_dict)


def layer_1() -> list:
    """Tensors of the released layer 1, which has a file to itself."""
    upto = itertools.takewhile(
        lambda spec: spec.layer_id in (None, 0, 1), checkpoint_tensors(K3Config.released())
    )
    return [spec for spec in upto if spec.layer_id == 1]


def layer_1_has_the_size_of_its_file() -> None:
    assert sum(spec.bytes for spec in layer_1()) == 16_990_911_504 - 818_704


def estimate_is_5_45_trillion() -> None:
    experts = [spec for spec in layer_1() if spec.component == "routed_experts"]
    assert round(92 * sum(spec.parameters for spec in experts) / 1e12, 2) == 5.45


@mutation(20, layer_1_has_the_size_of_its_file, estimate_is_5_45_trillion)
def experts_as_wide_as_the_model(patch: Patch) -> None:
    wide = dataclasses.replace(K3Config(), routed_expert_hidden_size=7168)
    patch.setattr(K3Config, "released", lambda: wide)


def cache_is_3_9_times_too_large() -> None:
    assert round(sequence_memory(K3Config.released()).mla_bytes_per_token / 27_648, 1) == 3.9


@mutation(20, test_accounting.test_sequence_memory_of_the_release, cache_is_3_9_times_too_large)
def cache_counted_on_every_layer(patch: Patch) -> None:
    every = property(lambda config: tuple(range(config.num_hidden_layers)))
    patch.setattr(K3Config, "mla_layer_ids", every)


# -- drafter ---------------------------------------------------------------------------------------


def renamed_draft_tensor_is_refused() -> None:
    drafter = random_drafter(DSparkConfig.for_target(MICRO), dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        drafter_checkpoint.save(drafter, folder)
        file = Path(folder) / "model.safetensors"
        tensors = load_file(file)
        save_file({name.replace("context_proj", "fc"): t for name, t in tensors.items()}, file)
        try:
            drafter_checkpoint.load(folder)
        except drafter_checkpoint.CheckpointError as error:
            assert "context_proj.weight is missing" in str(error) and "fc.weight" in str(error)
        else:
            raise AssertionError("a drafter without its context projection was loaded")


@mutation(25, renamed_draft_tensor_is_refused)
def unknown_draft_tensors_skipped(patch: Patch) -> None:
    def load(folder, **_):
        drafter = DSparkDrafter(DSparkConfig.load(folder))
        drafter.load_state_dict(load_file(Path(folder) / "model.safetensors"), strict=False)
        return drafter

    patch.setattr(drafter_checkpoint, "load", load)


def all_68_tensors_of_the_release_are_accounted_for() -> None:
    config = DSparkConfig()
    shapes = drafter_checkpoint.drafter_tensors(config)
    names = {*shapes, "embed_tokens.weight"}
    assert len(names) == 68
    # 2 bytes each, with the copy of the embedding: the payload of the published 3.56 B.
    total = sum(map(prod, shapes.values())) + config.vocab_size * config.hidden_size
    assert 2 * total == 7_124_625_922


@mutation(25, all_68_tensors_of_the_release_are_accounted_for)
def confidence_head_not_known(patch: Patch) -> None:
    right = DSparkDrafter.__init__

    def init(self, config, **options):
        right(self, dataclasses.replace(config, confidence_head=False), **options)

    patch.setattr(DSparkDrafter, "__init__", init)


def drafter_knows_positions() -> None:
    drafter = random_drafter(test_reference_drafter.SMALL, 1)
    generator = torch.Generator().manual_seed(0)
    taps = {
        i: torch.randn(9, 64, generator=generator, dtype=F64)
        for i in drafter.config.target_layer_ids
    }
    test_reference_drafter.test_positions_matter(drafter, taps)


@mutation(17, drafter_knows_positions)
def drafter_left_without_rotation(patch: Patch) -> None:
    patch.setattr(drafter_layers, "rotate", lambda x, *_: x)


@mutation(17, equals_second_implementation)
def unrotated_key_left_out_of_the_scores(patch: Patch) -> None:
    for name in ("expanded", "absorbed"):
        right = getattr(mla, name)

        def attend(q, latent, kv_b, *, right=right, **options):
            q = q.clone()
            q[..., -MICRO.qk_rope_head_dim :] = 0
            return right(q, latent, kv_b, **options)

        patch.setattr(mla, name, attend)
