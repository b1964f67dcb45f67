"""The routed experts against their equations: formats, routings, shapes, launch constants."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from moe_cases import BF16, F16, F32, Case, check, make_inputs

pytest.importorskip("triton", reason="running kernels needs Triton")

HAS_GPU = torch.cuda.is_available()
DIRECT = {"direct": True}
SORTED = {"block_m": 8}
MANY = {"prefill": True, "block_m": 16}
TILES = {"prefill": True, "block_m": 64, "extra_m": 16, "down_resident": True}
FIT = {**TILES, "fit": True}
LISTED = {**FIT, "fit_extra": True, "listed": 1}
BOXED = {"gate_boxed": True, "down_boxed": True, "down_resident": False}


CASES = [
    Case(inner=72, config=DIRECT),
    Case(config={**DIRECT, "gate_split": 2, "down_row_blocks": 2}),
    Case(config={**DIRECT, "down_resident": True, "down_row_blocks": 2}),
    Case(tokens=1, hidden=40, inner=200, config={**DIRECT, "down_split": 2}),
    Case(tokens=9, hidden=40, routing="one", config=DIRECT),
    Case(first=2, all_experts=8, config=DIRECT),
    Case(layout="nibbles", config=DIRECT),
    Case(hidden=40, scales=(100, 160), config=DIRECT),
    Case(tokens=1, hidden=40, inner=136, config={**DIRECT, "down_resident": True}),
    Case(tokens=4, inner=72, config=SORTED),
    Case(hidden=40, first=2, all_experts=8, config={"block_m": 16}),
    Case(tokens=9, hidden=40, routing="skewed", config=SORTED),
    Case(inner=72, config=MANY),
    Case(hidden=40, layout="nibbles", scales=(100, 160), config=MANY),
    Case(tokens=17, top_k=1, hidden=40, routing="one", config={**MANY, "down_resident": True}),
    Case(first=3, all_experts=8, kind="bf16", config=MANY),
    Case(tokens=100, top_k=1, experts=2, routing="skewed", hidden=32, inner=32, config=TILES),
    Case(tokens=60, top_k=1, experts=3, hidden=40, inner=40, kind="bf16",
         config={**TILES, "block_k": 32}),
    Case(tokens=100, top_k=1, experts=2, routing="skewed", hidden=32, inner=32, config=FIT),
    Case(tokens=3, hidden=128, inner=32, config={**MANY, "fit": True}),
    Case(tokens=40, top_k=1, experts=2, hidden=32, inner=32,
         config={"prefill": True, "block_m": 16, "extra_m": 8}),
    Case(tokens=40, top_k=1, experts=2, hidden=32, inner=32,
         config={"prefill": True, "block_m": 16, "extra_m": 8, "fit": True}),
    # The list of tiles. Eight blocks of an expert are one tile of five and one of half and extra.
    Case(tokens=128, top_k=1, experts=2, routing="one", hidden=32, inner=32, config=LISTED),
    Case(tokens=40, top_k=1, experts=9, hidden=200, inner=72,
         config={**LISTED, "listed": 4, "block_m": 16, "extra_m": 8}),
    Case(tokens=60, top_k=1, experts=3, hidden=40, inner=40, kind="bf16",
         config={**LISTED, "listed": 4, "block_k": 32}),
    Case(tokens=60, top_k=2, experts=3, first=3, all_experts=8, hidden=32, inner=40, kind="bf16",
         config={**LISTED, **BOXED}),
    Case(tokens=20, top_k=1, experts=2, hidden=40, inner=72, kind="bf16",
         config={"prefill": True, "block_m": 16, "block_k": 32, "listed": 4, **BOXED,
                 "down_row_blocks": 2}),
    Case(tokens=60, top_k=1, experts=2, hidden=136, inner=72, kind="bf16",
         config={**LISTED, **BOXED, "block_k": 32, "down_row_blocks": 2}),
    # Rows of 18 numbers lie at no multiple of 16 bytes: no copy engine.
    Case(tokens=3, hidden=18, inner=18, kind="bf16", config={**MANY, "block_k": 32, **BOXED}),
    Case(kind="bf16", dtype=F16),
    Case(hidden=40, dtype=F16),
    # Parts without columns: one block for four parts, and five, which leave the last part none.
    Case(tokens=1, hidden=96, inner=64, config={**DIRECT, "gate_split": 4, "down_split": 4}),
    Case(tokens=1, top_k=1, experts=1, hidden=600, inner=600,
         config={**DIRECT, "gate_split": 4, "down_split": 4}),
    # A block of more rows than there are tiles of 64.
    Case(hidden=40, config={**MANY, "gate_block_n": 128, "down_block_n": 128}),
    Case(hidden=136, inner=136, config={**MANY, "gate_block_n": 128, "down_block_n": 128,
                                        "down_row_blocks": 2, "down_resident": True}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_equations(case: Case, device: str) -> None:
    check(case, device)


@pytest.mark.parametrize(
    "case",
    [
        Case(tokens=0),
        Case(tokens=1, hidden=40, inner=200, config={**DIRECT, "down_split": 2}),
        Case(tokens=3, hidden=40, first=2, all_experts=8, config=SORTED),
        Case(tokens=1, kind="bf16"),
    ],
    ids=str,
)
def test_one_call(case: Case, device: str) -> None:
    check(case, device, one_call=True)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="bfloat16 needs a CUDA device")
@pytest.mark.parametrize("case", [c for c in CASES if c.dtype == F32], ids=str)
def test_bfloat16_at_small_sizes(case: Case) -> None:
    check(replace(case, dtype=BF16), "cuda")


TP8 = {"experts": 896, "hidden": 3584, "inner": 384, "top_k": 16, "dtype": BF16}
EP8 = {"experts": 112, "hidden": 3584, "inner": 3072, "top_k": 2, "dtype": BF16}
RELEASED = [
    Case(tokens=tokens, kind=kind, routing=routing, seed=tokens, **rank)
    for rank in (TP8, EP8)
    for kind in ("mxfp4", "bf16")
    for routing in ("uniform", "skewed")
    for tokens in (1, 4, 17, 64, 250, 1000, 2050, 4096)
]


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="bfloat16 needs a CUDA device")
@pytest.mark.parametrize("case", RELEASED, ids=str)
def test_bfloat16_at_released_size(case: Case) -> None:
    check(case, "cuda", one_call=True)


GPU_CONFIGS = [
    Case(tokens=16, config={**DIRECT, "gate_split": 4}, **TP8),
    Case(tokens=3, config={**DIRECT, "gate_split": 7, "gate_unroll": 1, "down_split": 4}, **EP8),
    Case(tokens=64, config={"block_m": 16, "down_resident": True, "down_row_blocks": 7}, **TP8),
    Case(tokens=64, config={"block_m": 8}, layout="nibbles", **TP8),
    Case(tokens=64, config={"block_m": 8}, scales=(100, 140), **TP8),
    Case(tokens=600, config={"prefill": True, "block_m": 32}, scales=(100, 140), **TP8),
    Case(tokens=600, config={"prefill": True, "block_m": 64}, layout="nibbles", **TP8),
    # What 8192 tokens take, with fewer of them and a load that makes tiles of every size.
    *(
        Case(
            tokens=tokens,
            kind="bf16",
            routing="skewed",
            **EP8,
            config={
                **LISTED,
                **BOXED,
                "listed": places,
                "block_m": 128,
                "extra_m": 32,
                "block_k": 64,
                "down_block_n": 128,
                "down_warps": 8,
                "down_registers": 128,
            },
        )
        for tokens, places in ((1000, 1), (4096, 4))
    ),
    Case(
        tokens=3000,
        kind="bf16",
        routing="skewed",
        **TP8,
        config={
            **LISTED,
            "block_m": 128,
            "extra_m": 32,
            "block_k": 64,
            "gate_boxed": True,
            "down_resident": False,
            "down_row_blocks": 14,
        },
    ),
    Case(
        tokens=3000,
        config={
            "prefill": True,
            "block_m": 128,
            "extra_m": 32,
            "listed": 1,
            "gate_block_n": 128,
            "gate_warps": 8,
            "down_block_n": 128,
            "down_warps": 8,
            "down_resident": True,
            "down_row_blocks": 14,
        },
        routing="skewed",
        **TP8,
    ),
    Case(tokens=40, first=32, all_experts=896, config={"block_m": 8}, **EP8),
    Case(tokens=16, first=32, all_experts=896, config=DIRECT, **EP8),
]


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="bfloat16 needs a CUDA device")
@pytest.mark.parametrize("case", GPU_CONFIGS, ids=str)
def test_bfloat16_with_other_constants(case: Case) -> None:
    check(case, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="CUDA graphs need a CUDA device")
def test_graphs_that_split_do_not_share_counters() -> None:
    """The second graph is replayed first, then both in turns, and gives the same bits each time."""
    from k3_kernels import moe_experts, pack_mxfp4
    from k3_kernels.moe_config import MoEConfig

    case = Case(tokens=2, config={**DIRECT, "gate_split": 4}, **TP8)
    inputs = make_inputs(case, "cuda")
    experts = pack_mxfp4(*inputs.tensors)
    config = MoEConfig(**case.config)

    def call() -> torch.Tensor:
        return moe_experts(inputs.x, experts, inputs.expert_ids, inputs.weights, config=config)

    expected = call()
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()
        graphs.append((graph, out))
    for graph, out in [*graphs[::-1], *graphs, *graphs]:
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)
