"""Kimi K3 on the Triton kernels: the reference's weights, another way through them.

Needs torch, and Triton when it runs: on a GPU, or small shapes in Triton's interpreter
(``TRITON_INTERPRET=1``, float32). Lesson 10 turns the backend.

What is a kernel of ours here: attention residuals together with the norm behind them, the short
convolution, the delta rule with its gated norm, attention over pages, routing, dispatch, the
experts, and the small norms and gates between. Matrix products with more than a few rows are
PyTorch's.
"""

from __future__ import annotations

from typing import cast

import torch
from k3_kernels import attn_res, row_norm, sigmoid_mul
from torch import Tensor

from kimik3_lab.reference.kda import KimiDeltaAttention
from kimik3_lab.reference.mla import MultiHeadLatentAttention
from kimik3_lab.reference.model import DecoderLayer, K3ForCausalLM
from kimik3_lab.reference.norms import RMSNorm
from kimik3_lab.serving.executors.execution import ExecutionConfig
from kimik3_lab.serving.executors.paged_cache import PagedCache
from kimik3_lab.serving.executors.step_counters import StepCounters
from kimik3_lab.serving.executors.triton_kda_inputs import KdaInputs, KdaWeights
from kimik3_lab.serving.executors.triton_linear import JoinedLinear, Skinny
from kimik3_lab.serving.executors.triton_mixer import TritonMixer
from kimik3_lab.serving.executors.triton_moe import TritonMLP, TritonMoE

__all__ = ["TritonK3", "TritonKda", "TritonMla", "TritonStream"]


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
    >>> import torch
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
        Its weights are used. Those of one input are joined, and the model keeps views of them;
        experts are packed once, which takes their memory a second time.
    cache : PagedCache
        Made for this model.
    execution : ExecutionConfig, optional
        The switches.

    Attributes
    ----------
    mixer : TritonMixer
        Set its ``step`` before each call.
    skinny : Skinny
        Computes the products; its ``choices`` may be filled with measured ones.

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
        self.skinny = Skinny(enabled=execution.skinny_gemm, counters=cache.counters)
        kda = {layer_id: _kda_weights(self._layers[layer_id]) for layer_id in config.kda_layer_ids}
        self.mixer = TritonMixer(config, cache, kda, execution)
        self._attention = [
            (TritonKda if config.is_kda_layer(layer_id) else TritonMla)(layer, self.skinny)
            for layer_id, layer in enumerate(self._layers)
        ]
        self._ffn = [
            TritonMoE(
                layer.block_sparse_moe,
                config,
                deferred_finalize=execution.deferred_finalize,
                skinny=self.skinny,
            )
            if config.is_moe_layer(layer_id)
            else TritonMLP(layer.mlp, self.skinny)
            for layer_id, layer in enumerate(self._layers)
        ]
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
            stream.add(self._attention[layer_id](x, mixer))
            x = stream.read(
                layer.mlp_res_proj.weight, layer.mlp_res_norm.weight, layer.post_attention_layernorm
            )
            stream.add(self._ffn[layer_id](x))
            if taps is not None and layer_id in taps:
                taps[layer_id] = stream.prefix
        hidden = stream.read(
            body.output_attn_res_proj.weight, body.output_attn_res_norm.weight, body.norm
        )
        if logits_at is not None:
            hidden = hidden[logits_at]
        return self.skinny.linear(hidden, self.model.lm_head.weight, wide=True)

    @property
    def moe_layers(self) -> list[TritonMoE]:
        """The layers with routed experts."""
        return [part for part in self._ffn if isinstance(part, TritonMoE)]

    def weights(self) -> dict[tuple[int, ...], list[Tensor]]:
        """Weights that a step multiplies with, by shape, for who measures products."""
        found: dict[tuple[int, ...], list[Tensor]] = {}
        head = [self.model.lm_head.weight.detach()]
        for weights in (head, *(part.weights() for part in (*self._attention, *self._ffn))):
            for weight in weights:
                found.setdefault(tuple(weight.shape), []).append(weight)
        return found


class TritonKda:
    """A KDA layer: one product for all it reads of the input, then one call of the mixer.

    Parameters
    ----------
    layer : DecoderLayer
        Its ``self_attn`` is used; the weights become views of the joined one.
    skinny : Skinny
        Computes the products.
    """

    def __init__(self, layer: DecoderLayer, skinny: Skinny) -> None:
        attention = layer.self_attn
        assert isinstance(attention, KimiDeltaAttention)
        self.attention, self.skinny = attention, skinny
        self._heads = (attention.num_heads, attention.head_dim)
        width = attention.num_heads * attention.head_dim
        names = ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj")
        self.inputs = JoinedLinear(
            [getattr(attention, name) for name in names],
            skinny,
            (3 * width, width, attention.head_dim, attention.num_heads),
        )

    def __call__(self, x: Tensor, mixer: TritonMixer) -> Tensor:
        """Map ``[N, H]`` to ``[N, H]``."""
        attention, linear = self.attention, self.skinny.linear
        qkv, output_gate, low, beta = self.inputs(x)
        inputs = KdaInputs(
            qkv,
            linear(low, attention.f_b_proj.weight).view(-1, *self._heads),
            beta,
            torch.unflatten(output_gate, -1, self._heads),
        )
        out = mixer.kda_block(attention.layer_id, inputs).flatten(-2)
        return linear(out, attention.o_proj.weight)

    def weights(self) -> list[Tensor]:
        """Weights of the layer's products."""
        attention = self.attention
        return [self.inputs.weight, attention.f_b_proj.weight, attention.o_proj.weight]


class TritonMla:
    """An MLA layer: one product for all it reads of the input, norms and gate in a launch each."""

    def __init__(self, layer: DecoderLayer, skinny: Skinny) -> None:
        attention = layer.self_attn
        assert isinstance(attention, MultiHeadLatentAttention)
        self.attention, self.skinny = attention, skinny
        names = ("q_a_proj", "kv_a_proj_with_mqa", "g_proj")
        self.inputs = JoinedLinear([getattr(attention, name) for name in names], skinny)

    def __call__(self, x: Tensor, mixer: TritonMixer) -> Tensor:
        """Map ``[N, H]`` to ``[N, H]``."""
        attention, config = self.attention, self.attention.config
        q_low, cached, gate = self.inputs(x)
        norm = attention.q_a_layernorm
        q = self.skinny.linear(
            row_norm(q_low, norm.weight, eps=norm.eps), attention.q_b_proj.weight
        )
        norm = attention.kv_a_layernorm
        latent = row_norm(cached, norm.weight, eps=norm.eps)
        q = q.view(-1, config.num_attention_heads, config.qk_head_dim)
        o = mixer.mla(attention.layer_id, q, latent, attention.kv_b_proj.weight, config)
        self.skinny.counters.launches += 3
        return self.skinny.linear(sigmoid_mul(o.flatten(-2), gate), attention.o_proj.weight)

    def weights(self) -> list[Tensor]:
        """Weights of the layer's products."""
        attention = self.attention
        return [self.inputs.weight, attention.q_b_proj.weight, attention.o_proj.weight]


def _kda_weights(layer: DecoderLayer) -> KdaWeights:
    assert isinstance(layer.self_attn, KimiDeltaAttention)
    return KdaWeights.of(layer.self_attn)
