"""One layer of K3 on the Triton kernels, as one of several ranks runs it, with random weights.

Needs torch and Triton. :mod:`kimik3_lab.parallel.measure` times it; nothing serves with it, since
two GPUs cannot hold the model. Weights are drawn on each rank for itself: times do not ask what a
weight says. That ranks together are the layer of one is checked apart, with weights that belong
together (:mod:`kimik3_lab.parallel.check_layer`), and for whole models on the CPU.

What is fused is what vLLM fuses: q, k, v and the output gate are one product, gate and up of the
shared experts another; residual mixture and norm are one kernel, and so are a KDA step and its
norm.
"""

from __future__ import annotations

import torch
from k3_kernels import attn_res, kda_conv, kda_decode, kda_prefill, moe_experts, route
from torch import Tensor
from torch.nn import functional as F

from kimik3_lab.parallel.gpu_experts import random_experts
from kimik3_lab.parallel.groups import Ranks
from kimik3_lab.parallel.layer_shape import LayerShape
from kimik3_lab.parallel.moe import SplitMoE
from kimik3_lab.reference.kda import gated_norm
from kimik3_lab.reference.moe import Routing, situ

__all__ = ["BLOCKS", "KDA_PARTS", "PARTS", "GpuLayer"]

#: Parts that :meth:`GpuLayer.part` runs alone, named as the cost model names them.
PARTS = ("router", "latent", "experts", "shared", "kda", "mixtures")
#: Parts of ``kda``: its matrix products, and the convolution of a prompt. What is left is the scan
#: or the step, and the norm behind it.
KDA_PARTS = ("kda_products", "kda_convolution")
#: Blocks of the residual stream that the layer reads: K3 reads 5.4 sources in the mean, the running
#: sum included.
BLOCKS = 4


class GpuLayer:
    """A KDA layer with its MoE on one rank, for steps of one size.

    Parameters
    ----------
    shape
        What this rank holds.
    tokens
        T: so many requests that decode, or from ``prefill_from`` on one prompt of T tokens.
    device, dtype
        bfloat16 on a GPU; float32 for Triton's interpreter.
    weights
        Of another layer of the same shape, which then shares them.
    compiled
        Let ``torch.compile`` fuse SiTU of the shared experts, and the gated norm of a prompt.

    Notes
    -----
    :meth:`moe` maps normed rows to the MoE's output; :meth:`whole` is the layer from residual
    stream to the last sublayer's output. Both take the :class:`Ranks` to exchange with: a single
    rank in place of the real ones is the same layer with all exchanges left out.
    """

    prefill_from = 1024

    def __init__(
        self,
        shape: LayerShape,
        tokens: int,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        weights: GpuLayer | None = None,
        compiled: bool = False,
    ) -> None:
        self.shape, self.tokens, config = shape, tokens, shape.config
        self.device, self.dtype = device, dtype
        hidden, latent = config.hidden_size, config.routed_expert_hidden_size
        self.head_dim = config.linear_attn_config.head_dim
        self.width = width = shape.kda_heads * self.head_dim
        self.situ = torch.compile(situ, dynamic=True) if compiled else situ
        self.gated_norm = torch.compile(gated_norm, dynamic=True) if compiled else gated_norm
        self.side = torch.cuda.Stream(device) if device.type == "cuda" else torch.cpu.Stream()
        if weights is None:
            self.gate = self._matrix(config.num_experts, hidden)
            self.bias = torch.zeros(config.num_experts, device=device)
            self.down, self.up = self._matrix(latent, hidden), self._matrix(hidden, latent)
            self.shared_in = self._matrix(2 * shape.shared_width, hidden)
            self.shared_out = self._matrix(hidden, shape.shared_width)
            self.qkvg = self._matrix(4 * width, hidden)
            self.decay_beta = self._matrix(self.head_dim + shape.kda_heads, hidden)
            self.decay_up = self._matrix(width, self.head_dim)
            self.o = self._matrix(hidden, width)
            self.taps = torch.full((4, 3 * width), 0.25, device=device).T
            self.a_log = torch.zeros(shape.kda_heads, device=device)
            self.dt_bias = torch.zeros(width, device=device)
            self.query = self._matrix(1, hidden)
            self.experts = random_experts(
                shape.experts, latent, shape.expert_width, device, self._generator(7)
            )
        else:
            shared = ("gate", "bias", "down", "up", "shared_in", "shared_out", "qkvg",
                      "decay_beta", "decay_up", "o", "taps", "a_log", "dt_bias", "query",
                      "experts")  # fmt: skip
            for name in shared:
                setattr(self, name, getattr(weights, name))
        self.ones = {n: torch.ones(n, device=device, dtype=dtype) for n in {hidden, latent}}
        self.head_norm = torch.ones(self.head_dim, device=device)
        self.hidden, self.latent = self._rows(tokens, hidden), self._rows(tokens, latent)
        self.blocks, self.prefix = self._rows(BLOCKS, tokens, hidden), self._rows(tokens, hidden)
        self.delta = self._rows(tokens, hidden)
        seqs = 1 if self.is_prefill else tokens
        self.slots = torch.arange(seqs, device=device, dtype=torch.int32)
        square = (seqs, shape.kda_heads, self.head_dim, self.head_dim)
        self.state = torch.zeros(square, device=device)
        self.window = self._rows(seqs, 3, 3 * width).transpose(1, 2)
        self.ends = torch.tensor([0, tokens], device=device, dtype=torch.int32)
        self.projected: Tensor | None = None

    @property
    def is_prefill(self) -> bool:
        """Whether the T tokens are one prompt."""
        return self.tokens >= self.prefill_from

    def moe(
        self, hidden: Tensor, ranks: Ranks, routing: Routing, *, overlap: bool = False
    ) -> Tensor:
        """Router to shared experts: ``[T, H]`` to ``[T, H]``; ``routing`` replaces the choice.

        The router runs and its result is dropped, so that every load can be measured.
        """
        eps = self.shape.config.rms_norm_eps

        def choose(x: Tensor) -> Routing:
            self._route(x)
            return routing

        return SplitMoE(
            ranks,
            choose,
            lambda x: F.linear(x, self.down),
            self._routed,
            lambda x: F.rms_norm(x, x.shape[-1:], self.ones[x.shape[-1]], eps),
            lambda x: F.linear(x, self.up),
            self.shared,
            self.side if overlap else None,
        )(hidden)

    def shared(self, hidden: Tensor) -> Tensor:
        """Run this rank's part of the shared experts."""
        return F.linear(self.situ(*F.linear(hidden, self.shared_in).chunk(2, -1)), self.shared_out)

    def whole(self, ranks: Ranks, routing: Routing) -> Tensor:
        """KDA and MoE with their residual mixtures; returns the MoE's output ``[T, H]``."""
        x, prefix = self._mix(self.prefix, self.delta)
        attention = ranks.all_reduce(F.linear(self._kda(x), self.o))
        x, _ = self._mix(prefix, attention)
        return self.moe(x, ranks, routing)

    def part(self, name: str, routing: Routing) -> object:
        """Run one part of the layer alone, on inputs of its own.

        :data:`PARTS` and :data:`KDA_PARTS` have the names; only a prompt has a convolution.
        """
        x = self.hidden
        if name == "router":
            return self._route(x)
        if name == "latent":
            return F.linear(x, self.down), F.linear(self.latent, self.up)
        if name == "experts":
            return self._routed(self.latent, routing)
        if name == "shared":
            return self.shared(x)
        if name == "kda":
            return F.linear(self._kda(x), self.o)
        if name == "kda_products":
            projected, *_ = self._project(x)
            return F.linear(projected[:, : self.width], self.o)
        if name == "kda_convolution" and self.is_prefill:
            if self.projected is None:
                self.projected = F.linear(x, self.qkvg)
            return self._convolve(self.projected[:, : 3 * self.width])
        if name == "mixtures":
            return self._mix(self.prefix, self.delta), self._mix(self.prefix, self.delta)
        raise ValueError(f"no part {name!r}; expected one of {', '.join(PARTS)}")

    def _route(self, x: Tensor) -> object:
        config = self.shape.config
        return route(
            self._logits(x), self.bias, config.num_experts_per_token,
            renormalize=config.moe_renormalize, scale=config.routed_scaling_factor,
        )  # fmt: skip

    def _routed(self, z: Tensor, routing: Routing) -> Tensor:
        return moe_experts(
            z, self.experts, routing.expert_ids, routing.weights,
            first_expert=self.shape.first_expert,
        )  # fmt: skip

    def _mix(self, prefix: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        ones = self.ones[self.shape.config.hidden_size]
        return attn_res(self.blocks, prefix, delta, self.query, ones, ones)

    def _logits(self, x: Tensor) -> Tensor:
        if x.is_cuda and x.dtype != torch.float32:
            return torch.mm(x, self.gate.mT, out_dtype=torch.float32)
        return F.linear(x.float(), self.gate.float())

    def _kda(self, x: Tensor) -> Tensor:
        heads, dim, width = self.shape.kda_heads, self.head_dim, self.width
        projected, gate, beta = self._project(x)
        qkv, output_gate = projected[:, : 3 * width], projected[:, 3 * width :]
        small = (self.taps, self.a_log, self.dt_bias)
        if not self.is_prefill:
            return kda_decode(
                qkv, gate, beta.contiguous(), output_gate, *small, self.head_norm,
                self.window, self.state, self.slots,
            ).flatten(-2)  # fmt: skip
        mixed = self._convolve(qkv)
        q, k, v = (part.view(-1, heads, dim) for part in mixed.chunk(3, -1))
        out = kda_prefill(
            q, k, v, gate, beta.contiguous(), self.a_log, self.dt_bias, self.state, self.slots,
            cu_seqlens=self.ends,
        )  # fmt: skip
        gated = self.gated_norm(out, output_gate, self.head_norm, self.shape.config.rms_norm_eps)
        return gated.flatten(-2)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute q, k, v and output gate in one matrix, decay and beta."""
        heads, dim = self.shape.kda_heads, self.head_dim
        low = F.linear(x, self.decay_beta)
        gate = F.linear(low[:, :dim], self.decay_up).view(-1, heads, dim)
        return F.linear(x, self.qkvg), gate, low[:, dim:]

    def _convolve(self, qkv: Tensor) -> Tensor:
        return kda_conv(qkv, self.taps, self.window, self.slots, cu_seqlens=self.ends)

    def _generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    def _matrix(self, outputs: int, inputs: int) -> Tensor:
        drawn = torch.randn(outputs, inputs, device=self.device, generator=self._generator(outputs))
        return (drawn * inputs**-0.5).to(self.dtype)

    def _rows(self, *shape: int) -> Tensor:
        drawn = torch.randn(*shape, device=self.device, generator=self._generator(len(shape)))
        return drawn.to(self.dtype)
