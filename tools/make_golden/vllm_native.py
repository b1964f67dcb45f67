"""Record vLLM's own plain-PyTorch versions of SiTU, the router and the gated RMS norm.

The wheel is fetched (0.3 GB) but not installed. Of three files only the definitions named below
are compiled, with these stand-ins: ``CustomOp`` is a bare ``nn.Module``; ``current_platform``
answers "no GPU"; the decorators (registry, ``torch.compile``) are dropped.

    python tools/make_golden/vllm_native.py [--check] [--cache DIR]
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import torch
from fixtures import Case, Oracle, Source, main
from lift import lift, sha256
from torch import Generator, Tensor, nn
from wheels import fetch

ACTIVATION = "vllm/model_executor/layers/activation.py"
ROUTER = "vllm/model_executor/layers/fused_moe/router/grouped_topk_router.py"
NORM = "vllm/third_party/flash_linear_attention/ops/kda.py"


class CustomOp(nn.Module):
    """Stand-in for vLLM's base class: none of its dispatch is wanted here."""

    def __init__(self, **_: Any) -> None:
        super().__init__()


NO_GPU = types.SimpleNamespace(
    is_cuda=lambda: False, is_xpu=lambda: False, is_cuda_alike=lambda: False
)
# sorted=True in topk: the order of the chosen experts is then fixed
ENVS = types.SimpleNamespace(VLLM_USE_FUSED_MOE_GROUPED_TOPK=False, VLLM_BATCH_INVARIANT=True)


def _situ(rng: Generator, width: int, spread: float, dtype: torch.dtype = torch.float32) -> Case:
    gate_up = spread * torch.randn((24, 2 * width), generator=rng)
    gate_up[0, 0], gate_up[0, width] = 1e4, -1e4  # both bounds reached
    gate_up[1, 0], gate_up[1, width] = -1e4, 1e4
    gate_up[2, 0], gate_up[2, width] = 0.0, 0.0
    return Case({"gate_up": gate_up.to(dtype)}, {"beta": 4.0, "linear_beta": 25.0})


def _router(
    rng: Generator, experts: int, top_k: int, *, renormalize: bool = True, scale: float = 1.0
) -> Case:
    """Draw a router whose choices do not hang on the last bit: the margin is checked."""
    hidden = torch.randn((12, 24), generator=rng)
    weight = 0.3 * torch.randn((experts, 24), generator=rng)
    bias = 0.15 * torch.randn(experts, generator=rng)
    logits = hidden @ weight.T
    ranked = (logits.sigmoid() + bias).sort(-1, descending=True).values
    # keep the tokens whose k-th and (k+1)-th score are far apart, and need a few of them
    clear = (ranked[:, top_k - 1] - ranked[:, top_k]) > 1e-4
    if clear.sum() < 6:
        raise ValueError(
            f"only {clear.sum()} of 12 tokens have a clear top-{top_k}; change the seed"
        )
    inputs = {"hidden": hidden[clear], "weight": weight, "bias": bias, "logits": logits[clear]}
    return Case(inputs, {"top_k": top_k, "renormalize": renormalize, "scale": scale})


def _norm(rng: Generator, heads: int, width: int, spread: float, dtype: torch.dtype) -> Case:
    shape = (6, heads, width)
    inputs = {
        "x": (spread * torch.randn(shape, generator=rng)).to(dtype),
        "gate": (2 * torch.randn(shape, generator=rng)).to(dtype),
        "weight": 1 + 0.3 * torch.randn(width, generator=rng),
    }
    return Case(inputs, {"eps": 1e-5})


def make_cases(rng: Generator) -> dict[str, Case]:
    return {
        "situ_small": _situ(rng, 40, 0.5),
        "situ_typical": _situ(rng, 40, 3.0),
        "situ_saturated": _situ(rng, 40, 40.0),
        "situ_bf16": _situ(rng, 40, 3.0, torch.bfloat16),
        "router_small": _router(rng, 16, 4),
        "router_released": _router(rng, 896, 16),
        "router_plain_weights": _router(rng, 32, 4, renormalize=False, scale=2.446),
        "router_scaled": _router(rng, 32, 4, scale=2.446),
        "norm_unit": _norm(rng, 3, 32, 1.0, torch.float32),
        "norm_tiny_values": _norm(rng, 2, 128, 1e-3, torch.float32),  # eps matters
        "norm_bf16": _norm(rng, 2, 128, 1.0, torch.bfloat16),
    }


def build(cache: Path) -> Oracle:
    wheel = fetch("vllm", "0.33.0", cache)
    files = {member: wheel.extract(member) for member in (ACTIVATION, ROUTER, NORM)}
    scope = {
        "torch": torch,
        "nn": nn,
        "CustomOp": CustomOp,
        "current_platform": NO_GPU,
        "envs": ENVS,
    }
    names = {ACTIVATION: "SituAndMul", ROUTER: "grouped_topk", NORM: "FusedRMSNormGated"}
    SituAndMul, grouped_topk, FusedRMSNormGated = (
        getattr(lift(files[member], [name], scope, decorators=False), name)
        for member, name in names.items()
    )

    def run(name: str, case: Case) -> dict[str, Tensor]:
        given, params = case.inputs, case.params
        if name.startswith("situ"):
            op = SituAndMul(params["beta"], params["linear_beta"])
            return {"y": op.forward_native(given["gate_up"])}
        if name.startswith("router"):
            weights, ids = grouped_topk(
                given["hidden"],
                given["logits"],
                params["top_k"],
                params["renormalize"],
                num_expert_group=1,
                topk_group=1,
                scoring_func="sigmoid",
                routed_scaling_factor=params["scale"],
                e_score_correction_bias=given["bias"],
            )
            return {"weights": weights, "expert_ids": ids}
        op = FusedRMSNormGated(given["x"].shape[-1], eps=params["eps"], activation="sigmoid")
        op.weight.copy_(given["weight"])
        return {"y": op.forward_native(given["x"], given["gate"])}

    functions = {
        ACTIVATION: "SituAndMul.forward_native",
        ROUTER: "grouped_topk",
        NORM: "FusedRMSNormGated.forward_native (activation='sigmoid')",
    }
    how = "this definition only, compiled from the file without its decorators"
    return Oracle(
        name="vllm_native",
        package="vllm",
        version="0.33.0",
        licence="Apache-2.0, (c) contributors to the vLLM project",
        sources=[Source(m, [f], sha256(files[m]), how) for m, f in functions.items()],
        make_cases=make_cases,
        run=run,
        seed=20_002,
        wheel_sha256=wheel.sha256,
    )


if __name__ == "__main__":
    main(build, "Record or check the fixture of vLLM's native SiTU, router and gated norm.")
