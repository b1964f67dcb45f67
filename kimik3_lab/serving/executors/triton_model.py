"""Kimi K3 on the Triton kernels: the reference's weights, another way through them.

Needs torch, and Triton when it runs: on a GPU, or small shapes in Triton's interpreter
(``TRITON_INTERPRET=1``, float32). Lesson 10 turns the backend.

What is a kernel of ours here: attention residuals together with the norm behind them, the short
convolution, the delta rule with its gated norm, routing, dispatch and the experts. Matrix products,
SiTU of the dense feed-forward and MLA are PyTorch's.
"""

from __future__ import annotations

from typing import cast

import torch
from k3_kernels import attn_res
from torch import Tensor

from kimik3_lab.reference.kda import KimiDeltaAttention
from kimik3_lab.reference.mla import MultiHeadLatentAttention
from kimik3_lab.reference.model import DecoderLayer, K3ForCausalLM
from kimik3_lab.reference.norms import RMSNorm, compute_dtype
from kimik3_lab.serving.executors.execution import ExecutionConfig
from kimik3_lab.serving.executors.paged_cache import PagedCache
from kimik3_lab.serving.executors.step_counters import StepCounters
from kimik3_lab.serving.executors.triton_mixer import KdaInputs, KdaWeights, TritonMixer
from kimik3_lab.serving.executors.triton_moe import TritonMoE

__all__ = ["TritonK3", "TritonStream"]


class TritonStream:
    """The residual stream of one step: sums wait until somebody reads them.

    :func:`k3_kernels.attn_res` adds the last sublayer's output, mixes the closed blocks with the
    running sum, and normalises, in one launch. So an output is kept aside until the next read.

    Parameters
    ----------
    embedding : Tensor
        ``[N, H]``: the first running sum.
    num_blocks : int
        Blocks that the model closes.
    eps : float
        Of the norm of the keys.
    counters : StepCounters
        Launches are counted here.

    Examples
    --------
    >>> stream = TritonStream(torch.ones(2, 4), 1, 1e-5, StepCounters())
    >>> stream.add(torch.full((2, 4), 2.0))
    >>> stream.prefix[0].tolist()  # asked for before anybody read
    [3.0, 3.0, 3.0, 3.0]
    """

    def __init__(
        self, embedding: Tensor, num_blocks: int, eps: float, counters: StepCounters
    ) -> None:
        self._bank = embedding.new_empty(num_blocks, *embedding.shape)
        self._num_closed = 0
        self._sum: Tensor | None = embedding
        self._delta: Tensor | None = None
        self._eps, self._counters = eps, counters

    def read(
        self, query: Tensor, key_norm: Tensor, norm: RMSNorm, *, closes_block: bool = False
    ) -> Tensor:
        """Return the normed input of the next sublayer; then perhaps close the running sum."""
        if self._sum is None:
            raise RuntimeError("a block was just started: add a sublayer output before reading")
        x, prefix = attn_res(
            self._bank[: self._num_closed] if self._num_closed else None,
            self._sum,
            self._delta,
            query,
            key_norm,
            norm.weight,
            key_eps=self._eps,
            norm_eps=norm.eps,
            prefix_out=self._bank[self._num_closed] if closes_block else None,
        )
        self._counters.launches += 1
        self._num_closed += closes_block
        self._sum, self._delta = None if closes_block else prefix, None
        return x

    def add(self, output: Tensor) -> None:
        """Add a sublayer's output ``[N, H]``, or begin a block with it."""
        if self._sum is None:
            self._sum = output
        elif self._delta is None:
            self._delta = output
        else:
            raise RuntimeError("two outputs without a read between them")

    @property
    def prefix(self) -> Tensor:
        """The running sum, for a drafter's tap."""
        if self._sum is None:
            raise RuntimeError("a block was just started and is still empty")
        return self._sum if self._delta is None else self._sum + self._delta


class TritonK3:
    """Computes a step as :class:`~kimik3_lab.reference.model.K3ForCausalLM` does.

    Parameters
    ----------
    model : K3ForCausalLM
        Its weights are used where they are; experts are packed once, which takes their memory a
        second time.
    cache : PagedCache
        Made for this model.
    execution : ExecutionConfig, optional
        The switches.

    Attributes
    ----------
    mixer : TritonMixer
        Set its ``step`` before each call.

    Raises
    ------
    TypeError
        If the model is float64.

    Examples
    --------
    >>> from kimik3_lab.config import K3Config
    >>> from kimik3_lab.reference.initialization import random_model
    >>> from kimik3_lab.serving.config import CacheConfig
    >>> model = random_model(K3Config.micro(), seed=0)
    >>> fast = TritonK3(model, PagedCache(model.config, CacheConfig(num_blocks=4), num_slots=1))
    >>> len(fast.mixer.layers)
    2
    """

    def __init__(
        self, model: K3ForCausalLM, cache: PagedCache, execution: ExecutionConfig | None = None
    ) -> None:
        execution = execution or ExecutionConfig()
        config = model.config
        self.model, self.config, self.counters = model, config, cache.counters
        self._layers = cast(list[DecoderLayer], list(model.model.layers))
        kda = {layer_id: _kda_weights(self._layers[layer_id]) for layer_id in config.kda_layer_ids}
        self.mixer = TritonMixer(config, cache, kda, execution)
        self._moe = {
            layer_id: TritonMoE(
                layer.block_sparse_moe,
                config,
                deferred_finalize=execution.deferred_finalize,
                counters=cache.counters,
            )
            for layer_id, layer in enumerate(self._layers)
            if config.is_moe_layer(layer_id)
        }
        self._num_blocks = sum(layer.starts_block for layer in self._layers)

    def __call__(
        self,
        token_ids: Tensor,
        mixer: TritonMixer,
        *,
        logits_at: Tensor | None = None,
        taps: dict[int, Tensor | None] | None = None,
    ) -> Tensor:
        """See :meth:`K3ForCausalLM.forward`."""
        body = self.model.model
        embedding = body.embed_tokens(token_ids)
        stream = TritonStream(embedding, self._num_blocks, body.norm.eps, self.counters)
        for layer_id, layer in enumerate(self._layers):
            x = stream.read(
                layer.self_attention_res_proj.weight,
                layer.self_attention_res_norm.weight,
                layer.input_layernorm,
                closes_block=layer.starts_block,
            )
            stream.add(self._attention(layer, x, mixer))
            x = stream.read(
                layer.mlp_res_proj.weight, layer.mlp_res_norm.weight, layer.post_attention_layernorm
            )
            stream.add(self._moe[layer_id](x) if layer_id in self._moe else layer.mlp(x))
            if taps is not None and layer_id in taps:
                taps[layer_id] = stream.prefix
        hidden = stream.read(
            body.output_attn_res_proj.weight, body.output_attn_res_norm.weight, body.norm
        )
        if logits_at is not None:
            hidden = hidden[logits_at]
        wide = compute_dtype(hidden.dtype)
        logits: Tensor = hidden.to(wide) @ self.model.lm_head.weight.to(wide).mT
        return logits

    @staticmethod
    def _attention(layer: DecoderLayer, x: Tensor, mixer: TritonMixer) -> Tensor:
        attention = layer.self_attn
        if isinstance(attention, MultiHeadLatentAttention):
            out: Tensor = attention(x, mixer)
            return out
        heads = (attention.num_heads, attention.head_dim)
        inputs = KdaInputs(
            torch.cat((attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)), -1),
            attention.f_b_proj(attention.f_a_proj(x)).view(-1, *heads),
            attention.b_proj(x),
            attention.g_proj(x).view(-1, *heads),
        )
        out = attention.o_proj(mixer.kda_block(attention.layer_id, inputs).flatten(-2))
        return out


def _kda_weights(layer: DecoderLayer) -> KdaWeights:
    assert isinstance(layer.self_attn, KimiDeltaAttention)
    return KdaWeights.of(layer.self_attn)
