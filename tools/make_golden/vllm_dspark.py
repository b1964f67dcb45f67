"""Record vLLM's parts of the DSpark drafter for Kimi K3: YaRN positions, context rows, Markov loop.

The wheel is fetched (0.3 GB) but not installed. Only the definitions named below are compiled, with
stand-ins for what they stand on:

* ``DeepseekScalingRotaryEmbedding`` and the YaRN functions: base class a bare ``nn.Module``;
* ``K3DSparkModel``, of which the path from taps to cached context rows runs: linears and norms are
  torch's; its CUDA operators are torch's RMS norm and vLLM's own native rotation; the cache keeps
  what it is given;
* ``DSparkMarkovHead``, ``DSparkConfidenceHead`` and ``DSparkSpeculator._sample_sequential``, the
  loop that draws a block token by token.

    python tools/make_golden/vllm_dspark.py [--check] [--cache DIR]
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from dspark_cases import BLOCK, HIDDEN, RANK, VOCAB, make_cases
from fixtures import Case, Oracle, Source, main
from lift import lift, sha256
from torch import Tensor, nn
from torch.nn import functional as F
from wheels import fetch

ROPE = "vllm/model_executor/layers/rotary_embedding/deepseek_scaling_rope.py"
YARN = "vllm/model_executor/layers/rotary_embedding/common.py"
HEADS = "vllm/model_executor/models/qwen3_dspark.py"
MODEL = "vllm/models/kimi_k3/nvidia/dspark_mla.py"
LOOP = "vllm/v1/worker/gpu/spec_decode/dspark/speculator.py"


class _Rotary(nn.Module):
    """Stand-in for vLLM's base class: keeps the shape, and the table if one is wanted."""

    def __init__(
        self, head_size: int, rotary_dim: int, length: int, base: float, neox: bool,
        dtype: torch.dtype, init_cache: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.head_size, self.rotary_dim, self.base = head_size, rotary_dim, base
        self.max_position_embeddings, self.is_neox_style, self.dtype = length, neox, dtype
        if init_cache:
            self.cos_sin_cache = self._compute_cos_sin_cache().to(dtype)

    @classmethod
    def enabled(cls) -> bool:
        return False


class _Linear(nn.Linear):
    """Stand-in for vLLM's linears, which a head or a projection is."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False, **_: Any) -> None:
        super().__init__(inputs, outputs, bias=bias)


class _Head(_Linear):
    """Stand-in for ``ParallelLMHead``, whose arguments come in the other order."""

    def __init__(self, vocab: int, width: int, **options: Any) -> None:
        super().__init__(width, vocab, **options)


def build(cache: Path) -> Oracle:
    wheel = fetch("vllm", "0.33.0", cache)
    files = {member: wheel.extract(member) for member in (ROPE, YARN, HEADS, MODEL, LOOP)}
    yarn = lift(
        files[YARN],
        [
            "rotate_gptj",
            "rotate_neox",
            "yarn_find_correction_dim",
            "yarn_find_correction_range",
            "yarn_linear_ramp_mask",
        ],
        {"torch": torch, "math": math},
    )
    no_gpu = types.SimpleNamespace(is_cuda=lambda: False)
    rope = lift(
        files[ROPE],
        ["yarn_get_mscale", "DeepseekScalingRotaryEmbedding"],
        {
            "torch": torch,
            "math": math,
            "RotaryEmbeddingBase": _Rotary,
            "current_platform": no_gpu,
            "has_flashinfer": lambda: False,
            **vars(yarn),
        },
    )
    heads = lift(
        files[HEADS],
        ["DSparkMarkovHead", "DSparkConfidenceHead"],
        {
            "torch": torch,
            "nn": nn,
            "QuantizationConfig": Any,
            "LogitsProcessor": Any,
            "ParallelLMHead": _Head,
            "ReplicatedLinear": _Linear,
            "maybe_prefix": lambda *_: "",
        },
    )

    def rotary(shape: dict[str, Any]) -> Any:
        return rope.DeepseekScalingRotaryEmbedding(
            shape["width"],
            shape["width"],
            shape["original"],
            shape["theta"],
            False,
            shape["factor"],
            torch.float32,
            mscale=1.0,
            mscale_all_dim=1.0,
        )

    def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
        out.copy_(F.rms_norm(x, x.shape[-1:], eps=eps) * weight.unsqueeze(1))  # a row per layer

    def rotary_embedding(
        positions: Tensor, q: Tensor, _: None, head: int, table: Tensor, neox: bool
    ) -> None:
        static = rope.DeepseekScalingRotaryEmbedding.forward_static
        q.copy_(static(positions, q.clone(), q.clone(), head, head, table, neox)[0])

    def workspace(*shapes: Any) -> tuple[Tensor, ...]:
        return tuple(torch.empty(size, dtype=dtype) for size, dtype in shapes)

    model = lift(
        files[MODEL],
        ["K3DSparkModel"],
        {
            "torch": torch,
            "nn": nn,
            "VllmConfig": Any,
            "Iterable": Iterable,
            "MultiHeadLatentAttention": Any,
            "is_quantized_kv_cache": lambda _: False,
            "_GROUPED_KV_CACHE_DTYPES": frozenset(),
            "ops": types.SimpleNamespace(rms_norm=rms_norm, rotary_embedding=rotary_embedding),
            "current_workspace_manager": lambda: types.SimpleNamespace(get_simultaneous=workspace),
        },
    ).K3DSparkModel
    loop = lift(
        files[LOOP],
        ["DSparkSpeculator"],
        {
            "torch": torch,
            "DFlashSpeculator": object,
            "VllmConfig": Any,
            "Any": Any,
            "CUDAGraphMode": types.SimpleNamespace(NONE=None),
        },
    ).DSparkSpeculator

    def run_rope(case: Case) -> dict[str, Tensor]:
        embedding, given = rotary(case.params), case.inputs
        q, k = embedding.forward_native(given["positions"], given["q"], given["k"])
        return {
            "q": q,
            "k": k,
            "frequencies": embedding._compute_inv_freq(case.params["factor"]),
            "cos_sin": embedding.cos_sin_cache[given["positions"]],
            "attention_factor": torch.tensor(rope.yarn_get_mscale(case.params["factor"], 1.0)),
        }

    def run_context(case: Case) -> dict[str, Tensor]:
        given, params = case.inputs, case.params
        stored: list[Tensor] = []

        def keep(latent: Tensor, k_pe: Tensor, *_: Any) -> None:
            stored.append(torch.cat((latent, k_pe.squeeze(1)), -1))

        def attention(layer: int) -> types.SimpleNamespace:
            norm = types.SimpleNamespace(
                weight=given["kv_a_layernorm"][layer], variance_epsilon=params["eps"]
            )
            return types.SimpleNamespace(
                q_lora_rank=1,
                kv_lora_rank=params["latent"],
                qk_rope_head_dim=params["width"],
                kv_a_layernorm=norm,
                kv_cache_dtype="none",
                kv_cache=None,
                _k_scale=None,
                rotary_emb=rotary(params),
                impl=types.SimpleNamespace(do_kv_cache_update=keep),
            )

        drafter = model.__new__(model)
        nn.Module.__init__(drafter)
        layers = [
            types.SimpleNamespace(self_attn=attention(layer)) for layer in range(params["layers"])
        ]
        object.__setattr__(drafter, "layers", layers)
        drafter._max_num_context_tokens = 64
        drafter.context_proj = lambda x: x @ given["context_proj"].mT
        drafter.context_norm = lambda x: (
            F.rms_norm(x, x.shape[-1:], eps=params["eps"]) * given["context_norm"]
        )
        drafter.context_kv_proj = lambda x: x @ given["kv_a_proj"].flatten(0, 1).mT
        context = drafter.combine_hidden_states(given["taps"])
        slots = torch.arange(len(context))
        drafter.precompute_and_store_context_kv(context, given["positions"], slots)
        return {"context": context, "rows": torch.stack(stored).clone()}

    def run_loop(case: Case) -> dict[str, Tensor]:
        given, requests = case.inputs, len(case.inputs["anchor"])
        markov = heads.DSparkMarkovHead(VOCAB, VOCAB, RANK, prefix="")
        markov.markov_w1.weight.copy_(given["markov_w1"])
        markov.markov_w2.weight.copy_(given["markov_w2"])
        confidence = heads.DSparkConfidenceHead(HIDDEN + RANK, prefix="", bias=True)
        confidence.proj.weight.copy_(given["confidence_weight"])
        confidence.proj.bias.copy_(given["confidence_bias"])
        seen: list[Tensor] = []

        class Speculator(loop):
            def _sample_logits(self, logits: Tensor, *rest: Any) -> Tensor:
                seen.append(logits.clone())
                return super()._sample_logits(logits, *rest)

            def _maybe_predict_acceptance(self, *_: Any) -> None:
                return None

        speculator = Speculator.__new__(Speculator)
        rows = torch.arange(requests * BLOCK)
        speculator.__dict__.update(
            model=types.SimpleNamespace(
                compute_draft_logits=lambda x: x @ given["lm_head"].mT,
                markov_embed=markov.embed,
                markov_bias=lambda e: markov.bias(e, lambda head, x: head(x)),
                compute_confidence=lambda x, e: torch.sigmoid(confidence(x, e)),
                map_draft_to_target=lambda ids: ids,
            ),
            num_speculative_steps=BLOCK,
            sample_indices=rows,
            sample_idx_mapping=rows // BLOCK,
            sample_pos=rows,
            input_buffers=types.SimpleNamespace(
                input_ids=given["anchor"].repeat_interleave(BLOCK)  # only the first of each is read
            ),
            _anchor_idx=torch.arange(requests) * BLOCK,
            _step_cols=torch.arange(BLOCK),
            _draft_topk=None,
            draft_logits=None,
            use_confidence_head=True,
            draft_tokens=torch.zeros(requests, BLOCK, dtype=torch.int64),
            draft_token_confidence_probs=torch.zeros(requests, BLOCK),
        )
        speculator._sample_sequential(requests, given["hidden"])
        logits = torch.stack(seen, 1)
        margins = logits.topk(2).values
        if (margins[..., 0] - margins[..., 1]).min() < 1e-3:
            raise ValueError("a drafted token hangs on less than 1e-3; change the seed")
        return {
            "token_ids": speculator.draft_tokens,
            "logits": logits,
            "confidence": speculator.draft_token_confidence_probs,
        }

    def run(name: str, case: Case) -> dict[str, Tensor]:
        if name.startswith("rope"):
            return run_rope(case)
        return run_context(case) if name == "context" else run_loop(case)

    functions = {
        ROPE: ["DeepseekScalingRotaryEmbedding", "yarn_get_mscale"],
        YARN: ["rotate_gptj", "yarn_find_correction_range", "yarn_linear_ramp_mask"],
        HEADS: ["DSparkMarkovHead", "DSparkConfidenceHead"],
        MODEL: [
            "K3DSparkModel.combine_hidden_states",
            "K3DSparkModel._precompute_fused_context_kv",
        ],
        LOOP: ["DSparkSpeculator._sample_sequential"],
    }
    how = "these definitions only, compiled from the file; CUDA operators replaced by torch's"
    return Oracle(
        name="vllm_dspark",
        package="vllm",
        version="0.33.0",
        licence="Apache-2.0, (c) contributors to the vLLM project",
        sources=[Source(m, f, sha256(files[m]), how) for m, f in functions.items()],
        make_cases=make_cases,
        run=run,
        seed=20_008,
        wheel_sha256=wheel.sha256,
    )


if __name__ == "__main__":
    main(build, "Record or check the fixture of vLLM's DSpark parts.")
