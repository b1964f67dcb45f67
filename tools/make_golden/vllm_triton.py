"""Record two of vLLM's Triton kernels for K3, run on the CPU by Triton's interpreter in float32.

``attn_res`` mixes the residual sources; ``fused_recurrent_kda`` is the decode path of KDA, from raw
gates and raw q and k to the state after every token (V-major, as vLLM stores it). Both files are
imported as published; the modules that they import from vLLM are replaced by stand-ins that answer
"no GPU" and re-export Triton.

    python tools/make_golden/vllm_triton.py [--check] [--cache DIR]
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import types
from pathlib import Path

import numpy as np
import torch
import triton
import triton.language as tl
from fixtures import Case, Oracle, Source, main
from lift import load, sha256
from torch import Generator, Tensor
from wheels import fetch

ATTN_RES = "vllm/models/kimi_k3/nvidia/ops/attn_res.py"
RECURRENT = "vllm/models/kimi_k3/nvidia/ops/third_party/kda/fused_recurrent.py"
# the interpreter's sigmoid is 1 / (1 + exp(-x)): overflow is its way to 0
np.seterr(over="ignore")
NO_GPU = types.SimpleNamespace(
    is_device_capability_family=lambda _: False, is_arch_support_pdl=lambda: False
)


@triton.jit
def _exp(x):
    return tl.exp(x)


@triton.jit
def _log(x):
    return tl.log(x)


STAND_INS = {
    "vllm": {"_custom_ops": None},
    "vllm.platforms": {"current_platform": NO_GPU},
    "vllm.triton_utils": {"tl": tl, "triton": triton},
    "vllm.third_party": {},
    "vllm.third_party.flash_linear_attention": {},
    "vllm.third_party.flash_linear_attention.ops": {},
    # the real module takes tl.exp and tl.log (unless FLA_USE_FAST_OPS=1); the interpreter cannot
    # call those by another name, but can call a function that calls them
    "vllm.third_party.flash_linear_attention.ops.op": {"exp": _exp, "log": _log},
    "vllm.utils": {},
    "vllm.utils.math_utils": {"cdiv": triton.cdiv, "next_power_of_2": triton.next_power_of_2},
}


def _mix(
    rng: Generator, blocks: int, hidden: int, *, sharp: float = 1.0, delta: bool = False
) -> Case:
    """``blocks`` stored sources and the live one; ``sharp`` scales the logits."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng)

    scales = torch.tensor([0.02, 1.0, 30.0])  # per token: eps matters, unit, large
    inputs = {
        "prefix": normal(3, hidden) * scales[:, None],
        "blocks": normal(3, max(blocks, 1), hidden) * scales[:, None, None],
        "norm_weight": 1 + 0.2 * normal(hidden),
        "query": sharp * normal(hidden) / hidden**0.5,
        "output_norm_weight": 1 + 0.2 * normal(hidden),
    }
    if delta:
        inputs["delta"] = normal(3, hidden) * scales[:, None]
    return Case(inputs, {"num_blocks": blocks, "eps": 1e-5})


def _decode(
    rng: Generator, lengths: list[int], heads: int, key: int, value: int, spread: float
) -> Case:
    """Raw rows of several sequences after one another, as vLLM batches them."""
    tokens = sum(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng)

    inputs = {
        "q": normal(1, tokens, heads, key),
        "k": normal(1, tokens, heads, key),
        "v": normal(1, tokens, heads, value),
        "raw_g": spread * normal(1, tokens, heads, key),
        "raw_beta": normal(1, tokens, heads),
        "A_log": (1 + 15 * torch.rand(heads, generator=rng)).log(),
        "dt_bias": normal(heads * key),
        "state": normal(len(lengths), heads, value, key),  # V-major
    }
    return Case(inputs, {"lengths": lengths, "lower_bound": -5.0})


def make_cases(rng: Generator) -> dict[str, Case]:
    cases = {f"mix_{n + 1}_sources": _mix(rng, n, 96, sharp=3.0) for n in range(9)}
    return cases | {
        "mix_uniform": _mix(rng, 8, 64, sharp=0.0),  # a zero query gives the plain mean
        "mix_delta": _mix(rng, 5, 64, sharp=3.0, delta=True),
        "decode": _decode(rng, [6, 1, 4], 2, 16, 16, 0.5),
        "decode_wide_gate": _decode(rng, [5, 3], 2, 16, 8, 4.0),
    }


def build(cache: Path) -> Oracle:
    wheel = fetch("vllm", "0.33.0", cache)
    files = {member: wheel.extract(member) for member in (ATTN_RES, RECURRENT)}
    attn_res = load(files[ATTN_RES], STAND_INS).attn_res
    fused_recurrent_kda = load(files[RECURRENT]).fused_recurrent_kda

    def mix(case: Case) -> dict[str, Tensor]:
        given, eps = case.inputs, case.params["eps"]

        def call(output_norm: Tensor | None) -> tuple[Tensor, Tensor]:
            prefix = given["prefix"].clone()  # the kernel adds delta in place
            tensors = (
                prefix,
                given.get("delta"),
                given["blocks"],
                given["norm_weight"],
                given["query"],
            )
            return attn_res(*tensors, output_norm, case.params["num_blocks"], -1, eps, eps), prefix

        mixed, prefix = call(None)
        outputs = {"mixed": mixed, "mixed_normed": call(given["output_norm_weight"])[0]}
        return outputs | ({"prefix": prefix} if "delta" in given else {})

    def decode(case: Case) -> dict[str, Tensor]:
        given, lengths = case.inputs, case.params["lengths"]
        longest, sequences = max(lengths), len(lengths)
        # one slot a token, so that the state after each token stays; slot 0 means "none", the
        # first slot of a sequence holds its initial state and is overwritten by token 0
        slots = 1 + torch.arange(sequences * longest, dtype=torch.int32).view(sequences, longest)
        bank = torch.zeros(1 + sequences * longest, *given["state"].shape[1:])
        bank[slots[:, 0].long()] = given["state"]
        starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        rows = torch.zeros(
            given["q"].flatten(2).shape
        )  # the kernel wants q, k, v rows equally far apart
        v = rows[..., : given["v"].flatten(2).shape[-1]].unflatten(-1, given["v"].shape[2:])
        v.copy_(given["v"])
        o, bank = fused_recurrent_kda(
            given["q"],
            given["k"],
            v,
            given["raw_g"],
            given["raw_beta"],
            given["A_log"],
            given["dt_bias"],
            case.params["lower_bound"],
            initial_state=bank,
            cu_seqlens=starts,
            ssm_state_indices=slots,
        )
        states = [bank[slots[i, t].long()] for i, n in enumerate(lengths) for t in range(n)]
        return {"o": o, "states": torch.stack(states)}

    def run(name: str, case: Case) -> dict[str, Tensor]:
        return mix(case) if name.startswith("mix") else decode(case)

    how = "the file, imported with stand-ins for vLLM's modules; Triton interpreter, float32"
    return Oracle(
        name="vllm_triton",
        package="vllm",
        version="0.33.0",
        licence="Apache-2.0, (c) contributors to the vLLM project; kernels adapted from "
        "flash-linear-attention, MIT, (c) 2023-2026 Songlin Yang, Yu Zhang, Zhiyuan Li",
        sources=[
            Source(ATTN_RES, ["attn_res", "_attn_res_kernel"], sha256(files[ATTN_RES]), how),
            Source(
                RECURRENT,
                ["fused_recurrent_kda", "fused_recurrent_kda_fwd_kernel"],
                sha256(files[RECURRENT]),
                how,
            ),
        ],
        make_cases=make_cases,
        run=run,
        seed=20_003,
        wheel_sha256=wheel.sha256,
    )


if __name__ == "__main__":
    main(build, "Record or check the fixture of vLLM's AttnRes and recurrent KDA kernels.")
