"""Record a whole small DSpark drafter, run by NVIDIA's NeMo AutoModel: taps in, drafted block out.

AutoModel trains DSpark drafters of several forms. Its form for Kimi K3 keeps K3's own attention (no
rotation, an output gate, SiTU); the drafter that is released for K3 has rotary MLA without a gate
and a SwiGLU, which is AutoModel's form for GLM-5.2. So that one is the oracle. It is imported as
published from the unpacked wheel and run in float32 on the CPU: positions, mask, noise block,
backbone, Markov sampling and confidence are all its own functions.

    python tools/make_golden/automodel_dspark.py [--check] [--cache DIR]
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import torch
from fixtures import Case, Oracle, Source, main
from lift import sha256
from torch import Generator, Tensor, nn
from wheels import fetch

DRAFT = "nemo_automodel/components/speculative/dspark/draft_glm_5_2.py"
MARKOV = "nemo_automodel/components/speculative/dspark/markov_head.py"
COMMON = "nemo_automodel/components/speculative/dspark/common.py"
MASK = "nemo_automodel/components/attention/dflash_mask.py"
ROPE = "nemo_automodel/components/models/deepseek_v3/rope_utils.py"
SCALE = "nemo_automodel/components/models/glm_moe_dsa/rope_utils.py"

#: Tapped tokens; the block starts at ANCHOR, and the rows from there on must not be seen.
TOKENS, ANCHOR = 21, 17
SHAPE = {
    "vocab_size": 40,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "moe_intermediate_size": 48,  # width of the dense feed-forward
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 12,
    "v_head_dim": 10,
    "max_position_embeddings": 4096,
    "target_layer_ids": [1, 3, 4],
    "mask_token_id": 38,
    "block_size": 7,
    "num_anchors": 1,
    "markov_rank": 6,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
#: Speeds and a trained context for which 17 tokens turn every pair, and the ramp has a middle.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 8.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
ROPES = {"yarn": YARN, "plain": {"rope_type": "default", "rope_theta": 100.0}}


def _new_model(module: Any, rope: dict[str, Any]) -> nn.Module:
    # YaRN is read from rope_scaling, the speeds' base from rope_parameters.
    scaling = rope if rope["rope_type"] == "yarn" else None
    config = types.SimpleNamespace(**SHAPE, rope_parameters=rope, rope_scaling=scaling)
    return module.Glm5_2DSparkModel(config).eval()


def _random_weights(model: nn.Module, rng: Generator) -> dict[str, Tensor]:
    weights = {}
    for name, like in model.state_dict().items():
        noise = torch.randn(like.shape, generator=rng)
        if "norm" in name:
            weights[name] = 1 + 0.2 * noise
        elif name == "embed_tokens.weight" or name.endswith("markov_w1.weight"):
            weights[name] = noise
        elif name.endswith("bias"):
            weights[name] = 0.3 * noise
        else:
            weights[name] = noise / like.shape[-1] ** 0.5
    return weights


def _run(module: Any, common: Any, case: Case) -> dict[str, Tensor]:
    given = dict(case.inputs)
    taps, token_ids = given.pop("taps"), given.pop("token_ids")
    model = _new_model(module, case.params["rope"])
    model.load_state_dict(given)
    seen: dict[str, Tensor] = {}
    first = model.layers[0].self_attn
    first.register_forward_hook(lambda _m, _i, out: seen.__setitem__("attention", out[0][0]))
    first.kv_a_layernorm.register_forward_hook(lambda _m, _i, c: seen.__setitem__("latent", c[0]))
    model.layers[0].register_forward_hook(lambda _m, _i, out: seen.__setitem__("layer", out[0]))

    size, anchors, keep = SHAPE["block_size"], torch.tensor([[ANCHOR]]), torch.tensor([[True]])
    noise = common.create_noise_embed(
        model.embed_tokens,
        token_ids[None],
        anchors,
        keep,
        mask_token_id=SHAPE["mask_token_id"],
        block_size=size,
    )
    positions = torch.cat(
        [torch.arange(TOKENS)[None], common.create_position_ids(anchors, size)], 1
    )
    mask = module.create_dflash_sdpa_mask(
        anchors, keep, TOKENS, size, torch.device("cpu"), torch.float32
    )
    hidden = model._forward_backbone(
        position_ids=positions,
        noise_embedding=noise,
        target_hidden_states=taps.transpose(0, 1).flatten(1)[None],
        attention_mask=mask,
    )
    base = model.compute_logits(hidden)
    anchor = token_ids[ANCHOR : ANCHOR + 1]
    drafted, logits = model.sample_draft_tokens(
        base, first_prev_token_ids=anchor, hidden_states=hidden
    )
    previous = torch.cat([anchor, drafted[0, :-1]])
    confidence = model.predict_confidence_step(hidden[0], previous).sigmoid()
    margins = logits[0].topk(2).values
    if (margins[:, 0] - margins[:, 1]).min() < 1e-3:
        raise ValueError("a drafted token hangs on less than 1e-3; change the seed")
    return {
        "positions": positions[0].clone(),
        "hidden": hidden[0],
        "base_logits": base[0],
        "logits": logits[0],
        "token_ids": drafted[0],
        "confidence": confidence,
        **seen,
    }


def build(cache: Path) -> Oracle:
    wheel = fetch("nemo-automodel", "0.7.0", cache)
    root = wheel.extract("nemo_automodel/").parent
    sys.path.insert(0, str(root))
    from nemo_automodel.components.speculative.dspark import common, draft_glm_5_2

    def make_cases(rng: Generator) -> dict[str, Case]:
        cases = {}
        for name, rope in ROPES.items():
            weights = _random_weights(_new_model(draft_glm_5_2, rope), rng)
            taps = torch.randn(
                len(SHAPE["target_layer_ids"]), TOKENS, SHAPE["hidden_size"], generator=rng
            )
            token_ids = torch.randint(0, SHAPE["vocab_size"], (TOKENS,), generator=rng)
            params = {"shape": SHAPE, "rope": rope, "anchor": ANCHOR}
            cases[name] = Case({"taps": taps, "token_ids": token_ids, **weights}, params)
        return cases

    functions = {
        DRAFT: ["Glm5_2DSparkModel", "Glm5_2DSparkAttention", "Glm5_2DSparkMLP"],
        MARKOV: ["VanillaMarkov"],
        COMMON: ["create_noise_embed", "create_position_ids", "AcceptRatePredictor"],
        MASK: ["create_dflash_sdpa_mask"],
        ROPE: ["precompute_freqs_cis", "freqs_cis_from_position_ids", "apply_rotary_emb"],
        SCALE: ["mla_softmax_scale"],
    }
    how = "the package, imported as published from the unpacked wheel"
    return Oracle(
        name="automodel_dspark",
        package="nemo-automodel",
        version="0.7.0",
        licence="Apache-2.0, (c) 2026 NVIDIA CORPORATION",
        sources=[Source(m, f, sha256(root / m), how) for m, f in functions.items()],
        make_cases=make_cases,
        run=lambda _, case: _run(draft_glm_5_2, common, case),
        seed=20_007,
        wheel_sha256=wheel.sha256,
        tolerance=1e-5,
    )


if __name__ == "__main__":
    main(build, "Record or check the fixture of a whole small DSpark drafter.")
