"""AttnRes against its equations: shapes, types, strides, in-place use, refusals."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from attn_res_cases import (
    CASES,
    FEW_CASES,
    KEY_EPS,
    NORM_EPS,
    Case,
    assert_close,
    check,
    make_inputs,
    reference,
)

pytest.importorskip("triton", reason="running kernels needs Triton")

from k3_kernels import attn_res
from k3_kernels.attn_res import MAX_HIDDEN_SIZE, AttnResConfig, choose_config

F16, BF16 = torch.float16, torch.bfloat16


@pytest.fixture(params=["latency", "bandwidth"])
def regime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both configurations at token counts that the interpreter can afford."""
    limit = 10**9 if request.param == "latency" else -1
    monkeypatch.setattr(sys.modules["k3_kernels.attn_res_config"], "_LATENCY_TOKENS", limit)
    return request.param


@pytest.mark.parametrize("row_gap", [0, 24], ids=["dense", "gaps"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_equations(case: Case, row_gap: int, regime: str, device: str) -> None:
    check(case, device, row_gap=row_gap)


#: Two launches; groups of blocks out of a pipeline; all blocks in registers.
WAYS = {
    "two-launches": AttnResConfig(64, 1, 1, preload=True, slice_h=32, slice_warps=1),
    "groups": AttnResConfig(64, 1, 3, preload=False, group=2),
    "registers": AttnResConfig(32, 1, 0, preload=True, group=3),
    "slices": AttnResConfig(0, 1, 1, preload=True, slice_h=64, slice_warps=2, mix_h=32),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_every_way_equals_the_equations(case: Case, way: str, device: str) -> None:
    check(case, device, row_gap=24, config=WAYS[way])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tokens", [1, 16, 133])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stored", [True, False])
def test_launched_early_the_kernels_wait(way: str, stored: bool, tokens: int, device: str) -> None:
    """Forty calls that feed each other, each launched while the one before it still runs.

    By prefixes alone, or by blocks too. What is asked for early is not what is read.
    """
    inputs = make_inputs(Case(8, tokens, 7168, F16), device)
    weights = (inputs.query, inputs.key_norm_weight, inputs.norm_weight)
    wide = {**vars(WAYS[way]), "block_h": 1024, "num_warps": 8, "slice_warps": 4}
    wide["slice_h"] = 512 if wide["slice_h"] else 0

    def chain(pdl: bool) -> torch.Tensor:
        config = AttnResConfig(**{**wide, "pdl": pdl, "prefetch": pdl})
        bank, prefix = inputs.blocks.clone(), inputs.prefix.clone()
        for call in range(40):
            out, prefix = attn_res(bank, prefix, inputs.delta, *weights, config=config)
            if stored:
                bank[call % 8].copy_(out)
        return out

    for _ in range(5):
        assert torch.equal(chain(True), chain(False))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="bfloat16 needs a CUDA device")
@pytest.mark.parametrize("tokens", [1, 64, 132, 133, 1000])
def test_bfloat16_at_released_size(tokens: int, device: str) -> None:
    for n_blocks in range(9):
        check(Case(n_blocks, tokens, 7168, BF16), device)
        check(Case(n_blocks, tokens, 7168, BF16), device, row_gap=24)


def test_configuration_follows_the_shape() -> None:
    few, many = choose_config(132, 8, 7168), choose_config(133, 8, 7168)
    assert few.preload and not many.preload
    for hidden in (1, 100, 2048, 7168, 8192, MAX_HIDDEN_SIZE):
        for tokens, limit in ((1, 232_448), (8192, 232_448 // 2)):
            for n_blocks in range(12):
                for itemsize in (2, 4):
                    config = choose_config(tokens, n_blocks, hidden, itemsize)
                    assert config.block_h & (config.block_h - 1) == 0
                    assert 1 <= config.num_warps <= 16
                    assert 1 <= config.stages <= max(1, n_blocks + 1)
                    pieces = -(-hidden // config.block_h)
                    shared = (config.stages - 1) * pieces * config.block_h * itemsize
                    assert shared < limit


def test_weights_in_another_type(device: str) -> None:
    case = Case(4, 3, 100, F16)
    inputs = make_inputs(case, device)
    expected, _ = reference(inputs)
    wide = [w.float() for w in (inputs.query, inputs.key_norm_weight, inputs.norm_weight)]
    activations = (inputs.blocks, inputs.prefix, inputs.delta)
    out, _ = attn_res(*activations, *wide, key_eps=KEY_EPS, norm_eps=NORM_EPS)
    assert out.dtype == F16
    assert_close(case, out, expected)


def test_token_major_bank_and_projection_shaped_query(device: str) -> None:
    """A bank [T, n_max, H] works as a transposed view, and [1, H] is the checkpoint's query."""
    case = Case(4, 3, 100)
    inputs = make_inputs(case, device)
    bank = torch.full((3, 9, 100), torch.nan, device=device)
    bank[:, :4] = inputs.blocks.transpose(0, 1)
    expected, _ = reference(inputs)
    view = bank[:, :4].transpose(0, 1)
    rest = (inputs.prefix, inputs.delta, inputs.query[None])
    weights = (inputs.key_norm_weight, inputs.norm_weight)
    out, _ = attn_res(view, *rest, *weights, key_eps=KEY_EPS, norm_eps=NORM_EPS)
    assert_close(case, out, expected)


def test_prefix_in_place_and_into_the_bank(device: str) -> None:
    case = Case(3, 4, 100, F16)
    inputs = make_inputs(case, device)
    expected, expected_prefix = reference(inputs)
    bank = torch.full((8, 6, 100), torch.nan, device=device, dtype=F16)
    bank[:3, :4] = inputs.blocks
    for prefix_out in (None, bank[3, :4]):
        prefix = inputs.prefix.clone()
        target = prefix if prefix_out is None else prefix_out
        out, new_prefix = attn_res(
            bank[:3, :4], prefix, *list(vars(inputs).values())[2:],
            key_eps=KEY_EPS, norm_eps=NORM_EPS, prefix_out=target,
        )  # fmt: skip
        assert new_prefix is target
        assert torch.equal(target, expected_prefix)
        assert_close(case, out, expected)
    assert bank[4:].isnan().all() and bank[:, 4:].isnan().all()


def test_without_delta_the_prefix_is_passed_on(device: str) -> None:
    inputs = make_inputs(Case(2, 3, 64, has_delta=False), device)
    _, new_prefix = attn_res(*vars(inputs).values())
    assert new_prefix is inputs.prefix


def test_zero_query_is_the_mean_of_the_sources(device: str) -> None:
    inputs = make_inputs(Case(3, 2, 64), device)
    ones, zeros = torch.ones(64, device=device), torch.zeros(64, device=device)
    out, prefix = attn_res(inputs.blocks, inputs.prefix, inputs.delta, zeros, ones, ones)
    mean = torch.cat([inputs.blocks, prefix[None]]).mean(0)
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(mean, (64,), eps=1e-5))


def test_one_source_dominates_without_overflow(device: str) -> None:
    """Logits of +-1000 would overflow exp; the mix must be the one source with the largest."""
    hidden = 64
    ones = torch.ones(hidden, device=device)
    blocks = torch.stack([-ones, 2 * ones, -3 * ones])[:, None]
    out, _ = attn_res(blocks, -ones[None], None, ones * 16, ones, ones * 7)
    torch.testing.assert_close(out, 7 * ones[None])


def test_tokens_do_not_see_each_other(device: str) -> None:
    inputs = make_inputs(Case(4, 5, 100), device)
    out, prefix = attn_res(*vars(inputs).values())
    order = torch.tensor([3, 0, 4, 1, 2], device=device)
    shuffled = (inputs.blocks[:, order], inputs.prefix[order], inputs.delta[order])
    out_shuffled, prefix_shuffled = attn_res(*shuffled, *list(vars(inputs).values())[3:])
    assert torch.equal(out[order], out_shuffled)
    assert torch.equal(prefix[order], prefix_shuffled)


def test_not_finite_stays_in_its_token(device: str) -> None:
    inputs = make_inputs(Case(2, 3, 64), device)
    inputs.blocks[1, 1, 5] = torch.nan
    out, _ = attn_res(*vars(inputs).values())
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


GOOD = {
    "blocks": torch.zeros(2, 3, 8),
    "prefix": torch.zeros(3, 8),
    "delta": torch.zeros(3, 8),
    "query": torch.zeros(8),
    "key_norm_weight": torch.zeros(8),
    "norm_weight": torch.zeros(8),
}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"prefix": torch.zeros(8)}, ValueError, r"prefix must be a tensor \[T, H\], got \[8\]"),
        ({"prefix": torch.zeros(3, 0)}, ValueError, "hidden size 0 is outside"),
        ({"prefix": torch.zeros(0, MAX_HIDDEN_SIZE + 1)}, ValueError, "hidden size 16385"),
        ({"prefix": torch.zeros(3, 8).double()}, TypeError, "prefix is torch.float64"),
        ({"prefix": torch.zeros(8, 3).T}, ValueError, "prefix has stride 3 in its last dimension"),
        ({"blocks": torch.zeros(3, 8)}, ValueError, r"blocks must be a tensor \[n, T, H\]"),
        ({"blocks": [torch.zeros(3, 8)]}, ValueError, "blocks must be a tensor .* got list"),
        ({"blocks": torch.zeros(2, 4, 8)}, ValueError, r"blocks has shape \[2, 4, 8\], expected"),
        ({"blocks": torch.zeros(2, 3, 8).half()}, TypeError, "blocks is torch.float16, expected"),
        ({"blocks": torch.zeros(2, 3, 16)[..., ::2]}, ValueError, "blocks has stride 2"),
        ({"delta": torch.zeros(3, 7)}, ValueError, "delta has shape"),
        ({"delta": torch.zeros(3, 8, dtype=torch.int32)}, TypeError, "delta is torch.int32"),
        ({"delta": torch.zeros(3, 8, device="meta")}, ValueError, "delta is on meta"),
        ({"query": torch.zeros(2, 8)}, ValueError, r"query has shape \[2, 8\]"),
        ({"query": None}, TypeError, "query must be a torch.Tensor, got NoneType"),
        ({"key_norm_weight": torch.zeros(7)}, ValueError, "key_norm_weight has shape"),
        ({"norm_weight": torch.zeros(16)[::2]}, ValueError, "norm_weight has stride 2"),
        ({"out": torch.zeros(3, 9)}, ValueError, "out has shape"),
        ({"out": torch.zeros(1, 8).expand(3, 8)}, ValueError, "out is an expanded view"),
        ({"prefix_out": torch.zeros(3, 8).half()}, TypeError, "prefix_out is torch.float16"),
    ],
)
def test_refusals_name_the_argument(
    changes: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        attn_res(**{**GOOD, **changes})


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about the interpreter")
@pytest.mark.parametrize("which", ["activations", "norm_weight"])
def test_interpreter_refuses_bfloat16(which: str) -> None:
    changed = [which] if which in GOOD else ["blocks", "prefix", "delta"]
    arguments = {k: v.bfloat16() if k in changed else v for k, v in GOOD.items()}
    with pytest.raises(TypeError, match="computes bfloat16 wrongly without an error"):
        attn_res(**arguments)


CALL = (
    "import torch, k3_kernels as k; o = torch.ones(4);"
    "print(k.attn_res(None, torch.ones(2, 4), None, o, o, o, norm_eps=0.0)[0].sum().item())"
)


def _python(code: str, interpret: str | None) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if interpret is not None:
        environment["TRITON_INTERPRET"] = interpret
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env=environment)  # fmt: skip


@pytest.mark.parametrize(
    ("code", "interpret", "message"),
    [
        (
            f"import sys; sys.modules['triton'] = None; import k3_kernels; print('in'); {CALL}",
            None,
            "ImportError: k3_kernels.attn_res needs Triton",
        ),
        (CALL, None, "tensors are on cpu, but Triton compiles for GPUs"),
        (
            f"import os, triton; os.environ['TRITON_INTERPRET'] = '1'; {CALL}",
            None,
            "TRITON_INTERPRET changed after Triton was imported",
        ),
    ],
    ids=["no-triton", "not-interpreting", "set-too-late"],
)
def test_says_what_the_machine_lacks(code: str, interpret: str | None, message: str) -> None:
    done = _python(code, interpret)
    assert done.returncode == 1
    assert message in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about the interpreter")
def test_interpreter_may_be_chosen_after_importing_the_package() -> None:
    """Importing the package must therefore not import Triton."""
    done = _python(
        "import os, sys, k3_kernels; print('triton' in sys.modules);"
        f"os.environ['TRITON_INTERPRET'] = '1'; {CALL}",
        interpret=None,
    )
    assert done.stdout.split() == ["False", "8.0"], done.stderr
