"""Record a whole small K3, run by NVIDIA's NeMo AutoModel: the oracle of how the parts connect.

``KimiK3ForCausalLM`` and its checkpoint adapter are imported as published from the unpacked wheel,
and run in float32 on the CPU. The model calls three GPU operators of flash-linear-attention; on a
CPU other people's plain PyTorch takes their place: transformers' short convolution, its gated RMS
norm and L2 norm, and FLA's own naive recurrence.

The checkpoint has the released tensor names, as the adapter writes them, and MXFP4 experts.

    python tools/make_golden/automodel_k3.py [--check] [--cache DIR]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch
from fixtures import Case, Oracle, Source, main
from lift import load, sha256
from torch import Generator, Tensor, nn
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from wheels import fetch

MODEL = "nemo_automodel/components/models/kimi_k3/model.py"
SITU = "nemo_automodel/components/models/kimi_k3/situ.py"
ADAPTER = "nemo_automodel/components/models/kimi_k3/state_dict_adapter.py"
LAYERS, TOKENS, HIDDEN = 8, 24, 32
CONFIG = {
    "vocab_size": 48,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_experts": 12,
    "num_experts_per_token": 3,
    "moe_intermediate_size": 32,
    "routed_expert_hidden_size": 64,
    "num_shared_experts": 2,
    "attn_res_block_size": 3,
    "rms_norm_eps": 1e-5,
    "linear_attn_config": {
        "num_heads": 2,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
        "kda_layers": [1, 2, 3, 5, 6],
        "full_attn_layers": [4, 7, 8],  # as in the release, the last two are neighbours
    },
}


class ShortConvolution(nn.Module):
    """transformers' causal convolution behind the interface of FLA's module."""

    def __init__(
        self, hidden_size: int, kernel_size: int, activation: str, dtype: torch.dtype, **_: Any
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, 1, kernel_size, dtype=dtype))
        self.activation = activation

    def forward(self, x: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Map ``[batch, tokens, channels]`` to the same."""
        taps = self.weight.squeeze(1)
        y = kimi.causal_conv1d_fn(x.transpose(1, 2), weight=taps, activation=self.activation)
        return y.transpose(1, 2), None


def _import_model(root: Path, naive_recurrent_kda: Any) -> Any:
    """Import the package and put the CPU operators in place of FLA's."""
    sys.path.insert(0, str(root))
    from nemo_automodel.components.models.kimi_k3 import model

    def chunk_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
        if not options["use_qk_l2norm_in_kernel"] or options["initial_state"] is not None:
            raise NotImplementedError(f"the stand-in does not cover {options}")
        return naive_recurrent_kda(kimi.l2norm(q), kimi.l2norm(k), v, g, beta)

    model.ShortConvolution = ShortConvolution
    model.FusedRMSNormGated = kimi.KimiLinearRMSNormGated
    model.chunk_kda = chunk_kda
    for name in ("SHORT_CONV", "FUSED_RMSNORM_GATED", "CHUNK_KDA", "RECURRENT_KDA", "KDA_GATE"):
        setattr(model, f"_{name}_OK", True)
    return model


def _new_model(module: Any) -> nn.Module:
    config = module.KimiK3TextConfig(**CONFIG, kda_use_fused_gate=False, torch_dtype="float32")
    backend = module.BackendConfig(attn="eager", linear="torch", rms_norm="torch", experts="torch")
    return module.KimiK3ForCausalLM(config, backend=backend).eval()


def _random_checkpoint(model: nn.Module, rng: Generator) -> dict[str, Tensor]:
    """Released names, types and padding from the adapter; values that keep activations near one."""
    checkpoint: dict[str, Tensor] = {}
    for name, like in model.state_dict_adapter.to_hf(model.state_dict()).items():
        noise = torch.randn(like.shape, generator=rng)
        if re.search(r"experts\.\d+\.w[123]\.weight$", name):
            rows, columns = like.shape
            packed = torch.randint(0, 256, (rows, columns // 2), generator=rng)
            scale = torch.randint(121, 125, (rows, columns // 32), generator=rng)
            checkpoint[f"{name}_packed"] = packed.to(torch.uint8)
            checkpoint[f"{name}_scale"] = scale.to(torch.uint8)
        elif name.endswith("A_log"):
            heads = CONFIG["linear_attn_config"]["num_heads"]
            checkpoint[name] = torch.zeros_like(like)
            checkpoint[name][:heads] = (0.3 + 2.7 * torch.rand(heads, generator=rng)).log()
        elif name.endswith("dt_bias"):
            checkpoint[name] = noise
        elif name.endswith("e_score_correction_bias"):
            checkpoint[name] = 0.15 * noise
        elif "conv1d" in name:
            checkpoint[name] = noise / 2
        elif name.endswith("o_norm.weight"):
            checkpoint[name] = 1 + 0.2 * noise
        elif "norm" in name:
            checkpoint[name] = (1 + 0.2 * noise).bfloat16()
        elif name.endswith("res_proj.weight"):
            checkpoint[name] = (3 * noise / HIDDEN**0.5).bfloat16()
        elif name.endswith("embed_tokens.weight"):
            checkpoint[name] = noise.bfloat16()
        else:
            checkpoint[name] = (noise / like.shape[-1] ** 0.5).bfloat16()
    return checkpoint


def _run(model: nn.Module, case: Case) -> dict[str, Tensor]:
    given = dict(case.inputs)
    token_ids = given.pop("token_ids")
    weights = model.state_dict_adapter.from_hf(given)
    model.load_state_dict(weights)
    names = ("attention_in", "attention", "ffn_in", "ffn", "prefix", "ids")
    seen: dict[str, list[Tensor]] = {name: [] for name in names}

    def keep_attention(_module: Any, _: Any, named: dict[str, Any], output: Tensor) -> None:
        seen["attention_in"].append(named["hidden_states"][0])
        seen["attention"].append(output[0])

    def keep_ffn(_module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen["ffn_in"].append(inputs[0][0])
        seen["ffn"].append(output[0])

    def keep_layer(_module: Any, _inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        seen["prefix"].append(output[0][0])
        seen["blocks"] = [output[1]]

    def keep_route(gate: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        scores = (inputs[0] @ gate.weight.T).sigmoid() + gate.e_score_correction_bias
        ranked = scores.sort(-1, descending=True).values
        margin = (ranked[:, gate.topk - 1] - ranked[:, gate.topk]).min()
        if margin < 2e-5:
            raise ValueError(f"a choice of experts hangs on {margin:.1e}; change the seed")
        seen["ids"].append(output[1].sort(-1).values.int())

    handles = []
    for layer in model.model.layers.values():
        handles.append(layer.register_forward_hook(keep_layer))
        attention = layer.self_attn.register_forward_hook(keep_attention, with_kwargs=True)
        handles += [attention, layer.mlp.register_forward_hook(keep_ffn)]
        if layer.is_moe_layer:
            handles.append(layer.mlp.gate.register_forward_hook(keep_route))
    output = model(token_ids[None])
    logits = output if isinstance(output, Tensor) else output.logits
    for handle in handles:
        handle.remove()
    ids, blocks = seen.pop("ids"), seen.pop("blocks")[0]
    return {
        "logits": logits[0],
        "expert_ids": torch.stack(ids),
        "blocks": blocks.transpose(0, 1),
        **{name: torch.stack(rows) for name, rows in seen.items()},
    }


def build(cache: Path) -> Oracle:
    wheel = fetch("nemo-automodel", "0.7.0", cache)
    root = wheel.extract("nemo_automodel/").parent
    naive = load(fetch("fla-core", "0.6.0", cache).extract("fla/ops/kda/naive.py"))
    model = _new_model(_import_model(root, naive.naive_recurrent_kda))

    def make_cases(rng: Generator) -> dict[str, Case]:
        checkpoint = _random_checkpoint(model, rng)
        token_ids = torch.randint(0, CONFIG["vocab_size"], (TOKENS,), generator=rng)
        return {"model": Case({"token_ids": token_ids, **checkpoint}, {"config": CONFIG})}

    functions = {
        MODEL: ["KimiK3ForCausalLM"],
        SITU: ["_apply_attn_res", "dense_situ"],
        ADAPTER: ["KimiK3StateDictAdapter", "dequantize_mxfp4"],
    }
    how = (
        "the package, imported as published from the unpacked wheel; FLA's GPU operators replaced "
        "by transformers 5.19.0 (causal_conv1d_fn, KimiLinearRMSNormGated, l2norm) and fla-core "
        "0.6.0 (naive_recurrent_kda)"
    )
    return Oracle(
        name="automodel_k3",
        package="nemo-automodel",
        version="0.7.0",
        licence="Apache-2.0, (c) 2026 NVIDIA CORPORATION",
        sources=[Source(m, f, sha256(root / m), how) for m, f in functions.items()],
        make_cases=make_cases,
        run=lambda _, case: _run(model, case),
        seed=20_006,
        wheel_sha256=wheel.sha256,
        tolerance=1e-4,  # rounding grows through eight layers
    )


if __name__ == "__main__":
    main(build, "Record or check the fixture of a whole small K3.")
