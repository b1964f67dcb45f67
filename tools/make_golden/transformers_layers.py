"""Record single layers of transformers where they overlap with K3, with their random weights.

* ``kda_softplus``: the Kimi Linear KDA layer (K3's layer with the older gate);
* ``kda_bounded``: the GLM-5.3-Flash KDA layer, whose gate is bounded as K3's is;
* ``mla``: the Kimi Linear MLA layer without rotation (K3's layer without the output gate);
* ``router``: the Kimi Linear router.

Both KDA layers factor the output gate, ``g_b_proj(g_a_proj(x))``, where K3 has one full matrix.
They run as on a machine without a GPU: transformers' own PyTorch code, 64-token chunks for a prompt
and the recurrence for a single token.

    python tools/make_golden/transformers_layers.py [--check]
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from fixtures import Case, Oracle, Source, main
from lift import sha256
from torch import Generator, Tensor, nn
from transformers import DynamicCache
from transformers.models.glm5_next import modeling_glm5_next as glm
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig

VERSION = "5.19.0"
HIDDEN, HEADS, WIDTH = 32, 2, 16
KDA = {
    "hidden_size": HIDDEN,
    "linear_head_dim": WIDTH,
    "linear_num_heads": HEADS,
    "rms_norm_eps": 1e-5,
    "num_hidden_layers": 2,
}
MLA = {
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
ROUTER = {
    "num_local_experts": 24,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}


def _kimi_config() -> KimiLinearConfig:
    config = KimiLinearConfig(
        **KDA, **MLA, **ROUTER, layer_types=["linear_attention", "full_attention"]
    )
    config._attn_implementation = "eager"
    return config


def _layer(name: str) -> nn.Module:
    config = _kimi_config()
    if name == "kda_softplus":
        return kimi.KimiLinearDeltaAttention(config, 0)
    if name == "kda_bounded":
        types = ["linear_attention", "indexed_attention"]
        return glm.Glm5NextTextLinearAttention(Glm5NextTextConfig(**KDA, layer_types=types), 0)
    if name == "mla":
        return kimi.KimiLinearAttention(config, 1)
    return kimi.KimiLinearTopkRouter(config)


def _random_weights(name: str, rng: Generator) -> dict[str, Tensor]:
    """Weights that keep activations near one and reach every part of the gate."""
    weights = {}
    for key, value in _layer(name).state_dict().items():
        noise = torch.randn(value.shape, generator=rng)
        if key.endswith("A_log"):
            weights[key] = (0.3 + 2.7 * torch.rand(value.shape, generator=rng)).log()
        elif "norm" in key:
            weights[key] = 1 + 0.2 * noise
        elif key.endswith(("dt_bias", "e_score_correction_bias")):
            weights[key] = noise if key.endswith("dt_bias") else 0.15 * noise
        else:
            weights[key] = noise / value[0].numel() ** 0.5
    if name == "mla":
        # small inputs to the two norms, so that their epsilon shows
        weights["q_a_proj.weight"] *= 0.1
        weights["kv_a_proj_with_mqa.weight"][: MLA["kv_lora_rank"]] *= 0.1
    return weights


def make_cases(rng: Generator) -> dict[str, Case]:
    cases = {}
    for name, tokens in {"kda_softplus": 70, "kda_bounded": 70, "mla": 19, "router": 10}.items():
        weights = _random_weights(name, rng)
        inputs = {"x": torch.randn((tokens, HIDDEN), generator=rng), **weights}
        params = {"split": 61} if name.startswith("kda") else {}
        cases[name] = Case(inputs, params)
    return cases


def _run_kda(layer: nn.Module, name: str, x: Tensor, split: int) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}
    layer.forget_gate.register_forward_hook(lambda _m, _i, g: seen.__setitem__("g", g[0]))
    layer.o_norm.register_forward_pre_hook(lambda _m, given: seen.__setitem__("o", given[0]))
    y = layer(x[None])[0]
    o = seen["o"].reshape(x.shape[0], HEADS, WIDTH)
    module = kimi if name == "kda_softplus" else glm
    rows = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], -1)
    conv = module.causal_conv1d_fn(
        rows.T[None], weight=layer.conv1d.weight.squeeze(1), activation="silu"
    )
    outputs = {"y": y, "g": seen["g"], "o": o, "u": rows, "conv": conv[0].T}
    # the same tokens as a prompt and then one by one
    cache = DynamicCache(config=_kimi_config())
    parts = [layer(x[None, :split], cache_params=cache)]
    parts += [layer(x[None, t : t + 1], cache_params=cache) for t in range(split, len(x))]
    state = cache.layers[0]
    return outputs | {
        "y_decode": torch.cat(parts, 1)[0],
        "state": state.recurrent_states[0][0],
        "conv_window": state.conv_states[0][0],
    }


def _run_mla(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}
    layer.o_proj.register_forward_pre_hook(lambda _m, given: seen.__setitem__("o", given[0][0]))
    layer.q_b_proj.register_forward_hook(lambda _m, _i, q: seen.__setitem__("q", q[0]))
    layer.kv_a_layernorm.register_forward_hook(lambda _m, _i, c: seen.__setitem__("c", c[0]))
    future = torch.full((len(x), len(x)), -torch.inf).triu(1)
    y, probabilities = layer(x[None], attention_mask=future[None, None])
    key_rest = layer.kv_a_proj_with_mqa(x)[:, MLA["kv_lora_rank"] :]
    return {
        "y": y[0],
        "o": seen["o"].reshape(len(x), HEADS, MLA["v_head_dim"]),
        "q": seen["q"].reshape(len(x), HEADS, -1),
        "latent": torch.cat([seen["c"], key_rest], -1),
        "probabilities": probabilities[0],
    }


def run(name: str, case: Case) -> dict[str, Tensor]:
    layer = _layer(name).eval()
    weights = {key: value for key, value in case.inputs.items() if key != "x"}
    layer.load_state_dict(weights)
    x = case.inputs["x"]
    if name.startswith("kda"):
        return _run_kda(layer, name, x, case.params["split"])
    if name == "mla":
        return _run_mla(layer, x)
    logits, chosen, ids = layer(x)
    return {"logits": logits, "weights": chosen, "expert_ids": ids}


def build(_: Path) -> Oracle:
    if transformers.__version__ != VERSION:
        raise RuntimeError(
            f"transformers is {transformers.__version__}, the fixture is of {VERSION}: "
            "pip install -r tools/make_golden/requirements.txt"
        )
    classes = {
        kimi: ["KimiLinearDeltaAttention", "KimiLinearAttention", "KimiLinearTopkRouter"],
        glm: ["Glm5NextTextLinearAttention"],
    }
    root = Path(transformers.__file__).parent.parent
    sources = [
        Source(
            str(Path(module.__file__).relative_to(root)),
            names,
            sha256(Path(module.__file__)),
            "the installed package",
        )
        for module, names in classes.items()
    ]
    return Oracle(
        name="transformers_layers",
        package="transformers",
        version=VERSION,
        licence="Apache-2.0, (c) 2026 The HuggingFace Inc. team",
        sources=sources,
        make_cases=make_cases,
        run=run,
        seed=20_005,
        tolerance=5e-6,
    )


if __name__ == "__main__":
    main(build, "Record or check the fixture of transformers' KDA, MLA and router.")
