"""References that are wrong in one place each: what has been got wrong when K3 was implemented.

Every one changes something that vLLM computes with code of its own. The delta rule and the residual
mixture are not among them: there the plugin shares the reference's code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kimik3_lab.reference.kda import KimiDeltaAttention, short_conv
from kimik3_lab.reference.mla import MultiHeadLatentAttention
from kimik3_lab.reference.model import DecoderLayer, K3ForCausalLM, K3Model
from kimik3_lab.reference.moe import MLP, Expert, LatentMoE, Router, Routing
from kimik3_lab.reference.norms import RMSNorm
from kimik3_lab.reference.residuals import ResidualStream
from kimik3_lab.reference.rope import rotate, yarn_frequencies
from kimik3_lab.reference.state import SequenceMixer

#: What the norm behind it hides, unless the checkpoint is made to show it: see vllm_checkpoints.
HIDDEN_IN_TINY_K3 = {"mla_epsilon_1e_6"}

Mutation = Callable[[K3ForCausalLM], type[SequenceMixer] | None]
WRONG: dict[str, Mutation] = {}


def wrong(mutation: Mutation) -> Mutation:
    """List a function that spoils a model, or returns a mixer that does."""
    WRONG[mutation.__name__] = mutation
    return mutation


def _each(model: K3ForCausalLM, kind: type, change: Callable[[Any], None]) -> None:
    found = [module for module in model.modules() if isinstance(module, kind)]
    assert found, f"the model has no {kind.__name__}"
    for module in found:
        change(module)


def _forward(module: Any, function: Callable[..., Any]) -> None:
    module.forward = MethodType(function, module)


# -- norms -----------------------------------------------------------------------------------------


@wrong
def every_epsilon_1e_6(model: K3ForCausalLM) -> None:
    _each(model, RMSNorm, lambda norm: setattr(norm, "eps", 1e-6))


@wrong
def mla_epsilon_1e_6(model: K3ForCausalLM) -> None:
    def change(layer: MultiHeadLatentAttention) -> None:
        layer.q_a_layernorm.eps = layer.kv_a_layernorm.eps = 1e-6

    _each(model, MultiHeadLatentAttention, change)


@wrong
def latent_norms_left_out(model: K3ForCausalLM) -> None:
    def change(layer: MultiHeadLatentAttention) -> None:
        _forward(layer.kv_a_layernorm, lambda self, x: x)

    _each(model, MultiHeadLatentAttention, change)


# -- MLA -------------------------------------------------------------------------------------------


@wrong
def k_pe_dropped(model: K3ForCausalLM) -> type[SequenceMixer]:
    class Mixer(SequenceMixer):
        def mla(self, layer_id: int, q: Tensor, latent: Tensor, *rest: Any) -> Tensor:
            latent = latent.clone()
            latent[:, model.config.kv_lora_rank :] = 0
            return super().mla(layer_id, q, latent, *rest)

    return Mixer


@wrong
def k_pe_rotated(model: K3ForCausalLM) -> type[SequenceMixer]:
    width = model.config.qk_rope_head_dim
    speed = yarn_frequencies(width, 10_000.0, 1.0, 4096)

    class Mixer(SequenceMixer):
        def mla(self, layer_id: int, q: Tensor, latent: Tensor, *rest: Any) -> Tensor:
            positions = torch.arange(len(q))
            q, latent = q.clone(), latent.clone()
            q[..., -width:] = rotate(q[..., -width:], positions, speed)
            latent[:, -width:] = rotate(latent[:, None, -width:], positions, speed)[:, 0]
            return super().mla(layer_id, q, latent, *rest)

    return Mixer


@wrong
def scores_scaled_by_the_nope_width(model: K3ForCausalLM) -> type[SequenceMixer]:
    config = model.config

    class Mixer(SequenceMixer):
        def mla(self, layer_id: int, q: Tensor, *rest: Any) -> Tensor:
            factor = (config.qk_head_dim / config.qk_nope_head_dim) ** 0.5
            return super().mla(layer_id, q * factor, *rest)

    return Mixer


@wrong
def mla_output_gate_left_out(model: K3ForCausalLM) -> None:
    # sigmoid(x W) = 1/2 everywhere, and the output projection makes up for the half
    def change(layer: MultiHeadLatentAttention) -> None:
        layer.g_proj.weight.zero_()
        layer.o_proj.weight.mul_(2)

    _each(model, MultiHeadLatentAttention, change)


@wrong
def mla_heads_in_reverse_order(model: K3ForCausalLM) -> None:
    def change(layer: MultiHeadLatentAttention) -> None:
        weight = layer.kv_b_proj.weight
        heads = weight.unflatten(0, (layer.config.num_attention_heads, -1))
        weight.copy_(heads.flip(0).flatten(0, 1))

    _each(model, MultiHeadLatentAttention, change)


# -- KDA, around the recurrence --------------------------------------------------------------------


@wrong
def convolution_taps_reversed(model: K3ForCausalLM) -> None:
    def change(layer: KimiDeltaAttention) -> None:
        for conv in (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d):
            conv.weight.copy_(conv.weight.flip(-1))

    _each(model, KimiDeltaAttention, change)


@wrong
def kda_output_gate_with_silu(model: K3ForCausalLM) -> None:
    # y = o_proj(norm(o) * silu(z)) = o_proj((norm(o) * sigmoid(z)) * z)
    def change(layer: KimiDeltaAttention) -> None:
        opening: list[Tensor] = []
        layer.g_proj.register_forward_hook(lambda _m, _i, z: opening.append(z))
        layer.o_proj.register_forward_pre_hook(lambda _m, inputs: (inputs[0] * opening.pop(),))

    _each(model, KimiDeltaAttention, change)


# -- experts ---------------------------------------------------------------------------------------


@wrong
def selection_without_bias(model: K3ForCausalLM) -> None:
    _each(model, Router, lambda router: router.e_score_correction_bias.zero_())


@wrong
def weights_with_bias(model: K3ForCausalLM) -> None:
    def forward(self: Router, hidden: Tensor) -> Routing:
        biased = torch.sigmoid(hidden @ self.weight.mT) + self.e_score_correction_bias
        weights, ids = biased.topk(self.config.num_experts_per_token)
        weights = weights / weights.sum(-1, keepdim=True)
        return Routing(ids, weights * self.config.routed_scaling_factor)

    _each(model, Router, lambda router: _forward(router, forward))


@wrong
def weights_not_renormalized(model: K3ForCausalLM) -> None:
    def change(router: Router) -> None:
        router.config = replace(router.config, moe_renormalize=False)

    _each(model, Router, change)


@wrong
def routed_scaling_factor_doubled(model: K3ForCausalLM) -> None:
    def change(router: Router) -> None:
        double = 2 * router.config.routed_scaling_factor
        router.config = replace(router.config, routed_scaling_factor=double)

    _each(model, Router, change)


@wrong
def one_expert_too_few(model: K3ForCausalLM) -> None:
    def change(router: Router) -> None:
        fewer = router.config.num_experts_per_token - 1
        router.config = replace(router.config, num_experts_per_token=fewer)

    _each(model, Router, change)


@wrong
def latent_moe_norm_left_out(model: K3ForCausalLM) -> None:
    _each(model, LatentMoE, lambda moe: _forward(moe.routed_expert_norm, lambda self, x: x))


@wrong
def situ_without_its_bounds(model: K3ForCausalLM) -> None:
    def change(module: MLP | Expert) -> None:
        module.betas = (1e6, 1e6)  # which makes it SwiGLU

    _each(model, MLP, change)
    _each(model, Expert, change)


@wrong
def gate_and_up_swapped(model: K3ForCausalLM) -> None:
    def change(expert: Expert) -> None:
        expert.w1, expert.w3 = expert.w3, expert.w1

    _each(model, Expert, change)


@wrong
def silu_in_the_shared_experts(model: K3ForCausalLM) -> None:
    def forward(self: MLP, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    _each(model, LatentMoE, lambda moe: _forward(moe.shared_experts, forward))


# -- residuals -------------------------------------------------------------------------------------


@wrong
def output_mixture_left_out(model: K3ForCausalLM) -> None:
    def forward(self: K3Model, token_ids: Tensor, mixer: SequenceMixer, taps: None) -> Tensor:
        stream = ResidualStream(self.embed_tokens(token_ids), self.norm.eps)
        for layer in self.layers:
            layer(stream, mixer)
        return self.norm(stream.prefix)

    _forward(model.model, forward)


@wrong
def blocks_never_closed(model: K3ForCausalLM) -> None:
    _each(model, DecoderLayer, lambda layer: setattr(layer, "starts_block", False))


@wrong
def sum_not_started_anew(model: K3ForCausalLM) -> None:
    class Stream(ResidualStream):
        def start_block(self) -> None:
            self.blocks.append(self.prefix)

    def forward(self: K3Model, token_ids: Tensor, mixer: SequenceMixer, taps: None) -> Tensor:
        stream = Stream(self.embed_tokens(token_ids), self.norm.eps)
        for layer in self.layers:
            layer(stream, mixer)
        x = stream.read(self.output_attn_res_proj.weight, self.output_attn_res_norm.weight)
        return self.norm(x)

    _forward(model.model, forward)


@wrong
def mixture_queries_swapped(model: K3ForCausalLM) -> None:
    def change(layer: DecoderLayer) -> None:
        layer.self_attention_res_proj, layer.mlp_res_proj = (
            layer.mlp_res_proj, layer.self_attention_res_proj,
        )  # fmt: skip

    _each(model, DecoderLayer, change)


# -- state -----------------------------------------------------------------------------------------


@wrong
def convolution_window_lost(model: K3ForCausalLM) -> type[SequenceMixer]:
    class Mixer(SequenceMixer):
        def conv(self, layer_id: int, u: Tensor, weight: Tensor) -> Tensor:
            # As if the first 40 tokens had been prefilled and the window was not handed over.
            return torch.cat([short_conv(part, weight)[0] for part in (u[:40], u[40:])])

    return Mixer
