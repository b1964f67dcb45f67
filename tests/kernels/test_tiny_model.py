"""The large operators at the shapes of the trained tiny K3, with the constants an H200 takes.

A GPU launches these in the lessons. The model's rows are shorter than the blocks that K3's own rows
are cut into; what a kernel asks for behind them is seen by the bounds check (``bounds.py``).
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import attn_res_cases
import dispatch_cases
import finalize_cases
import kda_decode_cases
import kda_prefill_cases
import kda_recover_cases
import mla_decode_cases
import moe_cases
import pytest
import routing_cases
import torch

pytest.importorskip("triton", reason="running kernels needs Triton")

from k3_kernels import kda_prefill_config, mla_decode_config, moe_config, pack_mxfp4, tuned

from kimik3_lab.config import K3Config

TINY = K3Config.tiny()
HEADS, DIM = TINY.linear_attn_config.num_heads, TINY.linear_attn_config.head_dim
EXPERTS, TOP_K = TINY.num_experts, TINY.num_experts_per_token
LATENT = TINY.routed_expert_hidden_size
#: As many bytes as bfloat16, which the interpreter does not compute: constants depend on it.
HALF = torch.float16


@pytest.fixture(autouse=True)
def constants_of_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look constants up as on an H200. The interpreter knows no launches that overlap, though."""
    file = tuned.folder() / tuned.device_file("NVIDIA H200")
    shapes = json.loads(file.read_text(encoding="utf-8"))["operators"]

    def lookup(operator: str, shape: str, size: int, device: torch.device) -> dict[str, Any] | None:
        entry = shapes.get(operator, {}).get(shape)
        found = tuned.pick(entry["buckets"], size) if entry else None
        return {**found, "pdl": False} if found and "pdl" in found else found

    monkeypatch.setattr(tuned, "lookup", lookup)


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("blocks", [1, 5])
def test_attn_res(blocks: int, tokens: int, device: str) -> None:
    case = attn_res_cases.Case(blocks, tokens, TINY.hidden_size, HALF)
    attn_res_cases.check(case, device, row_gap=16)


@pytest.mark.parametrize("tokens", [1, 9])
def test_route(tokens: int, device: str) -> None:
    routing_cases.check(routing_cases.Case(tokens, EXPERTS, TOP_K), device)


@pytest.mark.parametrize(("tokens", "block"), [(1, 8), (9, 16), (40, 16), (100, 32)])
def test_dispatch(tokens: int, block: int, device: str) -> None:
    case = dispatch_cases.Case(tokens, TOP_K, EXPERTS, block)
    dispatch_cases.check(case, device, None, counts=False)


# Direct, direct with fewer programs, sorted, and two kinds of tiles for many tokens. With so few
# experts the last one is hit for sure, behind whose weights there is nothing.
@pytest.mark.parametrize("tokens", [1, 9, 40, 100, 400])
def test_moe_experts(tokens: int, device: str) -> None:
    shape = {"hidden": LATENT, "inner": TINY.moe_intermediate_size}
    case = moe_cases.Case(experts=EXPERTS, **shape)
    experts = pack_mxfp4(*moe_cases.make_inputs(case, device).tensors)
    config = moe_config.choose_config(experts, tokens, TOP_K)
    case = moe_cases.Case(2, TOP_K, TOP_K, **shape, config=asdict(config))
    moe_cases.check(case, device)


def test_all_experts_for_one_token(device: str) -> None:
    case = moe_cases.Case(1, TOP_K, EXPERTS, LATENT, TINY.moe_intermediate_size)
    moe_cases.check(case, device)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("tokens", [1, 9])
def test_finalize(tokens: int, norm: bool, device: str) -> None:
    finalize_cases.check(finalize_cases.Case(tokens, TOP_K, LATENT, HALF, norm), device)


@pytest.mark.parametrize(
    "options",
    [
        {"slots": (3,)},
        {"slots": (3, 1, 0)},
        {"tokens": (4, 2), "records": True, "columns": 6},
        {"tokens": (4, 2), "drafts": 4, "columns": 6},
    ],
    ids=str,
)
def test_kda_decode(options: dict[str, Any], device: str) -> None:
    case = kda_decode_cases.Case(heads=HEADS, dim=DIM, dtype=HALF, **options)
    kda_decode_cases.check(case, device)


def test_kda_recover(device: str) -> None:
    case = kda_recover_cases.Case(heads=HEADS, dim=DIM, dtype=HALF)
    kda_recover_cases.check(case, device)


# 1,300 tokens of a sequence are walked in five pieces; 300 are enough to have five.
@pytest.mark.parametrize("lengths", [(1,), (70, 33), (300,)], ids=str)
def test_kda_prefill(lengths: tuple[int, ...], device: str) -> None:
    case = kda_prefill_cases.Case(lengths, tuple(range(len(lengths))), dim=DIM, dtype=HALF)
    tokens = 1300 if len(lengths) == 1 else 50
    config = kda_prefill_config.choose_config(
        len(lengths) * HEADS, tokens, DIM, torch.device(device)
    )
    kda_prefill_cases.check(case, device, config=config)


@pytest.mark.parametrize("tokens", [1, 9])
def test_mla_decode(tokens: int, device: str) -> None:
    heads, rank, lengths = TINY.num_attention_heads, TINY.kv_lora_rank, (40, 17)
    case = mla_decode_cases.Case(
        lengths, tokens, heads, rank, TINY.qk_rope_head_dim, dtype=HALF, splits=None
    )
    config = mla_decode_config.choose_config(
        tokens * heads, len(lengths), rank, torch.device(device)
    )
    mla_decode_cases.check(case, device, config=config)
