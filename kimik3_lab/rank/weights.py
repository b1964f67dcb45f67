"""One rank's weights, drawn on the device in the types that are served: bfloat16 and packed MXFP4.

Needs torch; packing needs nothing of Triton. The rank ladder builds its model here.

Nothing is ever there in float32: the experts of one layer are 896 x 3 x 3584 x 384 weights, 2 GB
packed and 15 GB in float32. Codes and scale bytes are drawn as they lie in a checkpoint and packed
layer by layer. Every 4-bit code is as likely as any other, scales are powers of two from 2^-9 to
2^-6, the range of the release; matrices keep the length of their input.
"""

from __future__ import annotations

import dataclasses

import torch
from k3_kernels import MXFP4Experts, pack_mxfp4
from torch import Tensor, nn

from kimik3_lab.config import K3Config
from kimik3_lab.drafter_config import DSparkConfig
from kimik3_lab.rank.routing_skew import selection_bias, stretch
from kimik3_lab.reference import meta, mxfp4
from kimik3_lab.reference.drafter import DSparkDrafter
from kimik3_lab.reference.model import DecoderLayer, K3ForCausalLM
from kimik3_lab.reference.moe import MLP, Router, routed_sum, situ
from kimik3_lab.reference.norms import RMSNorm

__all__ = ["LOGIT_STD", "PackedLatentMoE", "micro_rank", "rank_drafter", "rank_model"]

#: Spread of the router's logits: the release's initializer range times the root of its width.
LOGIT_STD = 1.7
#: Scale bytes, last one not included: 118 stands for 2^-9, 121 for 2^-6.
_SCALE_BYTES = (118, 122)


class PackedLatentMoE(nn.Module):
    """A :class:`~kimik3_lab.reference.moe.LatentMoE` whose experts exist in packed form only.

    Parameters
    ----------
    config
        Shape.
    generator
        Draws the experts, on the device that they are to be on.
    dtype
        Of everything else.
    keep_codes
        Keep the experts as a checkpoint has them, too, so that :meth:`forward` can run. For small
        members of the family.
    like
        Another layer whose experts to share, where it does not matter that layers differ.

    Attributes
    ----------
    packed : MXFP4Experts
        What the kernels read.
    """

    def __init__(
        self,
        config: K3Config,
        generator: torch.Generator,
        *,
        dtype: torch.dtype,
        keep_codes: bool = False,
        like: PackedLatentMoE | None = None,
    ) -> None:
        super().__init__()
        hidden, latent = config.hidden_size, config.routed_expert_hidden_size
        inner, experts = config.moe_intermediate_size, config.num_experts
        self.config, device = config, generator.device

        def empty(module: nn.Module) -> nn.Module:
            meta.allocate(module, device)
            return module

        to = {"dtype": dtype, "device": "meta"}
        self.gate = empty(Router(config, **to))
        self.routed_expert_down_proj = empty(nn.Linear(hidden, latent, bias=False, **to))
        self.routed_expert_norm = empty(RMSNorm(latent, config.rms_norm_eps, **to))
        self.routed_expert_up_proj = empty(nn.Linear(latent, hidden, bias=False, **to))
        self.shared_experts = empty(MLP(config, config.shared_intermediate_size, **to))

        def draw(span: tuple[int, int], *shape: int) -> Tensor:
            return torch.randint(
                *span, shape, dtype=torch.uint8, device=device, generator=generator
            )

        if like is not None:
            self.packed, self._codes = like.packed, like._codes
            return
        codes = (
            draw((0, 256), experts, 2 * inner, latent // 2),
            draw(_SCALE_BYTES, experts, 2 * inner, latent // 32),
            draw((0, 256), experts, latent, inner // 2),
            draw(_SCALE_BYTES, experts, latent, inner // 32),
        )
        self.packed: MXFP4Experts = pack_mxfp4(*codes)
        self._codes = codes if keep_codes else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[N, H]`` to ``[N, H]`` as the reference does, one expert after the other."""
        if self._codes is None:
            raise RuntimeError(
                "these experts are kept in packed form only: run them with backend='triton', or "
                "build a small model with keep_codes=True"
            )
        gate_up, gate_up_scale, down, down_scale = self._codes
        config = self.config
        z = self.routed_expert_down_proj(hidden)

        def expert(index: int, z: Tensor) -> Tensor:
            w13 = mxfp4.dequantize(gate_up[index], gate_up_scale[index], z.dtype)
            w2 = mxfp4.dequantize(down[index], down_scale[index], z.dtype)
            gate, up = (z @ w13.mT).chunk(2, -1)
            betas = config.activation_situ_beta, config.activation_situ_linear_beta
            return situ(gate, up, *betas) @ w2.mT

        experts = [lambda z, i=i: expert(i, z) for i in range(config.num_experts)]
        total = routed_sum(z, self.gate(hidden), experts).to(z.dtype)
        routed: Tensor = self.routed_expert_up_proj(self.routed_expert_norm(total))
        return routed + self.shared_experts(hidden)


def micro_rank() -> K3Config:
    """Return the smallest model that takes every step of a rank slice, for the interpreter.

    Examples
    --------
    >>> micro_rank().expert_dtype
    'mxfp4'
    """
    micro = K3Config.micro()
    # Three KDA layers, one for each of the presets' state groups.
    linear = dataclasses.replace(
        micro.linear_attn_config, kda_layers=(1, 2, 3), full_attn_layers=(4,)
    )
    return dataclasses.replace(
        micro, linear_attn_config=linear, expert_dtype="mxfp4", max_position_embeddings=1024
    )


@torch.no_grad()
def rank_model(
    config: K3Config,
    profile: list[float],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    keep_codes: bool = False,
    share_experts: bool = False,
) -> K3ForCausalLM:
    """Draw the weights of a rank slice.

    Parameters
    ----------
    config
        :meth:`K3Config.rank_slice`, or a small one with MXFP4 experts.
    profile
        Load of the experts, the busiest first, see :mod:`kimik3_lab.rank.routing_skew`.
    device, dtype
        Where, and the type of everything but experts and small vectors.
    seed
        Of everything.
    keep_codes
        See :class:`PackedLatentMoE`.
    share_experts
        Draw the experts of one layer, and let all have them.

    Returns
    -------
    K3ForCausalLM
        For inference, with the usual module names.

    Examples
    --------
    >>> model = rank_model(micro_rank(), [0.4, 0.3, 0.2, 0.1], dtype=torch.float32)
    >>> type(model.model.layers[1].block_sparse_moe).__name__
    'PackedLatentMoE'
    """
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(seed)
    # Without the routed experts, whose modules alone would be 60,000.
    frame = dataclasses.replace(config, first_k_dense_replace=config.num_hidden_layers)
    model = K3ForCausalLM(frame, dtype=dtype, device="meta")
    for layer_id in config.moe_layer_ids:
        layer = model.model.layers[layer_id]
        del layer.mlp
    meta.allocate(model, device)
    model.config = config
    share = stretch(profile, config.num_experts)
    bias = selection_bias(share, config.num_experts_per_token, LOGIT_STD).to(device)
    first: PackedLatentMoE | None = None
    for layer_id in config.moe_layer_ids:
        layer = model.model.layers[layer_id]
        assert isinstance(layer, DecoderLayer)
        moe = PackedLatentMoE(config, generator, dtype=dtype, keep_codes=keep_codes, like=first)
        layer.block_sparse_moe, layer._ffn = moe, "block_sparse_moe"
        first = (first or moe) if share_experts else None
    _fill(model, generator)
    for layer_id in config.moe_layer_ids:
        gate = model.model.layers[layer_id].block_sparse_moe.gate
        order = torch.randperm(config.num_experts, device=device, generator=generator)
        gate.e_score_correction_bias.copy_(bias[order])
    return model.eval().requires_grad_(False)


@torch.no_grad()
def rank_drafter(
    config: DSparkConfig,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 1,
) -> DSparkDrafter:
    """Draw the weights of a drafter's slice, as :func:`rank_model` does."""
    device = torch.device(device)
    drafter = DSparkDrafter(config, dtype=dtype, device="meta")
    meta.allocate(drafter, device)
    _fill(drafter, torch.Generator(device).manual_seed(seed))
    return drafter.eval().requires_grad_(False)


def _fill(module: nn.Module, generator: torch.Generator) -> None:
    for name, parameter in module.named_parameters():
        leaf = name.rsplit(".", 2)[-2] if "." in name else name
        if name.endswith("A_log"):  # the log of a rate from 1 to 16
            parameter.uniform_(1, 16, generator=generator).log_()
        elif leaf.endswith(("norm", "layernorm")):
            parameter.fill_(1)
        elif leaf in ("embed_tokens", "markov_w1"):
            parameter.normal_(generator=generator)
        elif leaf == "gate":
            if parameter.dim() == 2:
                parameter.normal_(std=LOGIT_STD * parameter.shape[1] ** -0.5, generator=generator)
            else:
                parameter.zero_()
        elif parameter.dim() == 1:  # dt_bias, the bias of the confidence head
            parameter.normal_(std=0.1, generator=generator)
        else:
            fan_in = parameter[0].numel()
            gain = 0.1 if leaf == "f_b_proj" else 1.0  # or the decay's sigmoid would saturate
            parameter.normal_(std=gain * fan_in**-0.5, generator=generator)
