"""Attention over paged latent rows against its equations: shapes, pages, splits, refusals."""

from __future__ import annotations

import doctest
import importlib

import pytest
import torch
from mla_decode_cases import CASES, F32, OTHER_WAY, Case, check, make_inputs, reference, scale_of

pytest.importorskip("triton", reason="running kernels needs Triton")

from k3_kernels import mla_decode
from k3_kernels.mla_decode import MAX_RANK, MLADecodeConfig, choose_config, num_splits

BF16, F16 = torch.bfloat16, torch.float16
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("case", [*CASES, *OTHER_WAY], ids=str)
def test_equals_the_equations(case: Case, device: str) -> None:
    check(case, device, row_gap=24)


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_dense_tensors(case: Case, device: str) -> None:
    check(case, device)


def test_equals_the_reference_layer(device: str) -> None:
    """Absorbed attention of one sequence, product with ``kv_b`` included."""
    from kimik3_lab.reference import mla
    from kimik3_lab.serving.executors.triton_attention import chunk_expanded, paged_absorbed

    generator = torch.Generator().manual_seed(0)
    q, rows, kv_b = (
        torch.randn(*shape, generator=generator).to(device)
        for shape in ((5, 3, 14), (21, 24), (3 * 20, 16))
    )
    expected = mla.absorbed(q, rows, kv_b)
    numbers = torch.tensor([[2, 0, 1]], dtype=torch.int32, device=device)
    pages = torch.full((3, 8, 24), torch.nan, device=device)
    pages[[2, 0, 1]] = torch.cat((rows, rows.new_full((3, 24), torch.nan))).view(3, 8, 24)
    lengths = torch.tensor([21], dtype=torch.int32, device=device)
    torch.testing.assert_close(paged_absorbed(q, pages, numbers, lengths, kv_b), expected)
    torch.testing.assert_close(chunk_expanded(q, rows, kv_b), expected)
    alone = mla.expanded(q, rows[:5], kv_b)
    torch.testing.assert_close(chunk_expanded(q, rows[:5], kv_b), alone)


@pytest.mark.parametrize(("count", "length"), [(1, 1), (8, 8), (9, 9), (3, 17), (8, 24), (7, 32)])
def test_lengths_filled_up_to_steps_change_nothing(count: int, length: int, device: str) -> None:
    """In float32, with plain attention in cuDNN's place, which sees multiples of 8 alone."""
    from kimik3_lab.reference import mla
    from kimik3_lab.serving.executors.triton_attention import chunk_in_steps

    def attend(q, k, v, *, causal: bool):
        assert q.shape[2] % 8 == k.shape[2] % 8 == 0
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if causal:
            scores = scores.where(torch.ones_like(scores).tril() > 0, -torch.inf)
        return scores.softmax(-1) @ v, scores.logsumexp(-1, keepdim=True)

    generator = torch.Generator().manual_seed(count)
    q, rows, kv_b = (
        torch.randn(*shape, generator=generator).to(device)
        for shape in ((count, 2, 6), (length, 5), (2 * 7, 3))
    )
    ours = chunk_in_steps(q, rows, kv_b, attend, step=8)
    torch.testing.assert_close(ours, mla.expanded(q, rows, kv_b), rtol=1e-4, atol=1e-5)


def test_shards_of_a_context_merge(device: str) -> None:
    """Rows dealt out to two ranks: results weighted with e^lse are those of the whole context."""
    case = Case((37, 20), tokens=2, page=1, table_gap=0)
    inputs = make_inputs(case, device)
    expected, expected_lse = reference(case, inputs)
    outs, lses = [], []
    for rank in range(2):
        table = inputs.block_table[:, rank::2].contiguous()
        seen = inputs.lengths[:, None] - torch.tensor([1, 0], device=device, dtype=torch.int32)
        seen = (seen - rank + 1).div(2, rounding_mode="floor").int()
        lse = torch.empty(4, 2, device=device)
        outs.append(
            mla_decode(
                inputs.q_latent, inputs.q_pe, inputs.cache, table, seen, scale=scale_of(case),
                lse=lse,
            )
        )  # fmt: skip
        lses.append(lse)
    weights = torch.stack(lses).softmax(0).unsqueeze(-1)
    merged = (torch.stack(outs) * weights).sum(0)
    torch.testing.assert_close(merged.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        torch.stack(lses).logsumexp(0).double(), expected_lse, rtol=1e-4, atol=1e-5
    )


def test_heads_first_results_are_taken_as_they_are(device: str) -> None:
    """``[H, N, R]``, as a batched product leaves it, needs no copy; nor does such an output."""
    case = Case((19, 7), tokens=2, heads=3)
    inputs = make_inputs(case, device)
    expected, _ = reference(case, inputs)
    turned = inputs.q_latent.transpose(0, 1).contiguous().transpose(0, 1)
    out = torch.empty(3, 4, 32, device=device).transpose(0, 1)
    rest = list(vars(inputs).values())[1:]
    mla_decode(turned, *rest, scale=scale_of(case), out=out)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


def test_requests_do_not_see_each_other(device: str) -> None:
    case = Case((19, 33, 7), splits=2)
    inputs = make_inputs(case, device)
    rest = {"scale": scale_of(case), "splits": 2}
    alone = [
        mla_decode(
            inputs.q_latent[i : i + 1], inputs.q_pe[i : i + 1], inputs.cache,
            inputs.block_table[i : i + 1], inputs.lengths[i : i + 1], **rest,
        )
        for i in range(3)
    ]  # fmt: skip
    torch.testing.assert_close(mla_decode(*vars(inputs).values(), **rest), torch.cat(alone))


def test_configuration_follows_the_shape() -> None:
    cpu = torch.device("cpu")
    assert choose_config(12, 1, 512, cpu).block_m == 16
    assert choose_config(108, 1, 512, cpu).block_m == 64
    for rows in (1, 12, 16, 24, 108, 864):
        for itemsize in (2, 4):
            config = choose_config(rows, 16, 512, cpu, itemsize)
            # The large matrix instruction reads a tile while the copies run ahead by all stages.
            tiles = config.stages - (config.block_m < 64)
            shared = (tiles * config.block_n + config.block_m) * 576 * itemsize
            assert shared <= 232_448 - 4096
    for programs in (0, 1, 16, 200):
        for length in (0, 1, 64, 8192, 10**6):
            splits = num_splits(programs, length, MLADecodeConfig(16, 64, 4, 2))
            assert 1 <= splits <= 128 and (splits - 1) * 64 <= length


GOOD = {
    "q_latent": torch.zeros(2, 3, 8),
    "q_pe": torch.zeros(2, 3, 4),
    "cache": torch.zeros(5, 16, 12),
    "block_table": torch.zeros(2, 2, dtype=torch.int32),
    "lengths": torch.ones(2, dtype=torch.int32),
    "scale": 1.0,
}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q_latent": torch.zeros(2, 8)}, ValueError, r"q_latent must be a tensor \[N, H, R\]"),
        ({"q_latent": torch.zeros(2, 3, MAX_RANK + 1)}, ValueError, "rank 513 is outside"),
        ({"q_latent": torch.zeros(2, 3, 8).double()}, TypeError, "q_latent is torch.float64"),
        ({"q_pe": torch.zeros(2, 2, 4)}, ValueError, r"q_pe has shape \[2, 2, 4\]"),
        ({"q_pe": None}, ValueError, r"cache has shape \[5, 16, 12\], expected \[5, 16, 8\]"),
        ({"cache": torch.zeros(80, 12)}, ValueError, r"cache must be a tensor \[blocks, page"),
        ({"cache": torch.zeros(5, 16, 12).half()}, TypeError, "cache is torch.float16, expected"),
        ({"cache": torch.zeros(5, 0, 12)}, ValueError, "blocks of cache have no rows"),
        ({"block_table": torch.zeros(2, 2)}, TypeError, "block_table is torch.float32"),
        ({"block_table": torch.zeros(2, 2).long()}, TypeError, "convert with .int()"),
        ({"block_table": torch.zeros(3, 2).int()}, ValueError, "of 3 requests, lengths of 2"),
        ({"block_table": torch.zeros(2).int()}, ValueError, r"expected \[B, W\]"),
        ({"block_table": torch.zeros(2, 2).int().T}, ValueError, "has stride 2 in its last"),
        ({"block_table": torch.full((2, 2), 5).int()}, ValueError, "the cache has blocks 0..4"),
        ({"lengths": torch.tensor([33, 1]).int()}, ValueError, "33 rows does not fit the 2 blocks"),
        ({"lengths": torch.ones(2, 2).int()}, ValueError, "2 numbers for each request of 1 tokens"),
        ({"lengths": torch.ones(2, 1, 1).int()}, ValueError, r"expected \[B\] or \[B, T\]"),
        ({"lengths": [1, 1]}, TypeError, "lengths must be a torch.Tensor, got list"),
        (
            {"lengths": torch.ones(3).int(), "block_table": torch.zeros(3, 2).int()},
            ValueError,
            "2 tokens are not the same number for each of 3 requests",
        ),
        ({"out": torch.zeros(2, 3, 9)}, ValueError, "out has shape"),
        ({"lse": torch.zeros(2, 3).half()}, TypeError, "lse is torch.float16"),
        ({"splits": 0}, ValueError, "splits must be at least 1, got 0"),
    ],
)
def test_refusals_name_the_argument(
    changes: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        mla_decode(**{**GOOD, **changes})


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about the interpreter")
def test_interpreter_refuses_bfloat16() -> None:
    floats = {name: GOOD[name].bfloat16() for name in ("q_latent", "q_pe", "cache")}
    with pytest.raises(TypeError, match="computes bfloat16 wrongly without an error"):
        mla_decode(**{**GOOD, **floats})


# -- on a GPU ----------------------------------------------------------------------------------

K3 = {"heads": 12, "rank": 512, "width_pe": 64}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("tokens", [1, 4, 9])
@pytest.mark.parametrize(
    ("page", "dtype"), [(64, BF16), (16, BF16), (768, BF16), (64, F16), (64, F32)], ids=str
)
def test_released_size(tokens: int, page: int, dtype: torch.dtype, device: str) -> None:
    for lengths in ((1000, 1, 0, 63), (3000,), (700, 128, 65, 2, 9) * 9):
        case = Case(lengths, tokens=tokens, page=page, dtype=dtype, **K3)
        config = choose_config(12 * tokens, len(lengths), 512, torch.device(device), dtype.itemsize)
        check(case, device, config=config)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("heads", [8, 96])
def test_other_head_counts(heads: int, device: str) -> None:
    """A drafter's 8 heads, whose tokens see one another, and all 96 in one rank."""
    for tokens in (1, 8):
        case = Case((900, 77), tokens=tokens, heads=heads, rank=512, width_pe=64, page=64,
                    dtype=BF16, per_token=True)  # fmt: skip
        config = choose_config(heads * tokens, 2, 512, torch.device(device))
        check(case, device, config=config)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("count", "length"), [(130, 130), (1, 1), (64, 500), (300, 1000)])
def test_a_chunk_of_a_prompt(count: int, length: int, device: str) -> None:
    """Expanded beside its cached context, which is a part of its own, and absorbed."""
    from kimik3_lab.reference import mla
    from kimik3_lab.serving.executors.triton_attention import chunk_expanded, paged_absorbed

    q, rows, kv_b = (
        torch.randn(*shape, device=device, dtype=BF16)
        for shape in ((count, 12, 192), (length, 576), (12 * 256, 512))
    )
    kv_b *= 512**-0.5
    expected = mla.expanded(q.double(), rows.double(), kv_b.double())
    pages = torch.cat((rows, rows.new_full((-length % 64, 576), torch.nan))).view(-1, 64, 576)
    table = torch.arange(len(pages), device=device, dtype=torch.int32)[None]
    lengths = torch.tensor([length], device=device, dtype=torch.int32)
    for result in (
        chunk_expanded(q, rows, kv_b),
        paged_absorbed(q, pages, table, lengths, kv_b),
    ):
        error = (result.double() - expected).norm() / expected.norm()
        assert float(error) < 1e-2


@pytest.mark.gpu
@needs_gpu
def test_a_recorded_call_serves_other_lengths(device: str) -> None:
    """One CUDA graph, recorded for room of 4096 rows, replayed for contexts of any length."""
    long = Case((4096, 4000), tokens=9, page=64, dtype=BF16, table_gap=0, **K3)
    inputs = make_inputs(long, device)
    tensors = list(vars(inputs).values())
    mla_decode(*tensors, scale=scale_of(long))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mla_decode(*tensors, scale=scale_of(long))
    for lengths in ((4096, 4000), (1, 0), (129, 3000), (9, 64)):
        inputs.lengths.copy_(torch.tensor(lengths))
        graph.replay()
        case = Case(lengths, tokens=9, page=64, dtype=BF16, **K3)
        expected, _ = reference(case, inputs)
        error = (out.double() - expected).abs().amax(-1)
        assert bool((error <= 1.2e-2 * expected.abs().amax(-1) + 1e-30).all())


@pytest.mark.gpu
@needs_gpu
def test_launched_early_the_kernels_wait(device: str) -> None:
    """Calls that feed each other, each launched while the one before still runs."""
    case = Case((2000, 700), tokens=2, page=64, dtype=F16, **K3)
    inputs = make_inputs(case, device)
    rest = list(vars(inputs).values())[1:]

    def chain(pdl: bool) -> torch.Tensor:
        base = choose_config(24, 2, 512, torch.device(device))
        config = MLADecodeConfig(**{**vars(base), "pdl": pdl})
        q = inputs.q_latent
        for _ in range(40):
            q = mla_decode(q, *rest, scale=scale_of(case), config=config)
        return q

    for _ in range(5):
        assert torch.equal(chain(True), chain(False))


@pytest.mark.parametrize(
    "name",
    [
        "k3_kernels.mla_decode",
        "k3_kernels.mla_decode_config",
        "kimik3_lab.serving.executors.triton_attention",
    ],
)
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted and not result.failed
