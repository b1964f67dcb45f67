"""Every rung of the KDA ladders computes the same step, and the same prompt, as the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="running kernels needs Triton")

from k3_kernels.kda_ladder import DECODE_RUNGS, LadderLayer, LadderStep, climb_decode, state_passes
from k3_kernels.kda_ladder_prefill import (
    PREFILL_RUNGS,
    WALKS,
    LadderPrompt,
    WalkConfig,
    chunked_rule,
    climb_prefill,
)

from kimik3_lab.reference import kda

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def make_layer(heads: int, dim: int, draw: Any, device: str) -> LadderLayer:
    return LadderLayer(
        0.5 * draw(3 * heads * dim, 4), 0.5 * draw(heads + 2), 0.5 * draw(heads * dim),
        1 + 0.3 * draw(dim), norm_eps=1e-3,
    )  # fmt: skip


def drawer(device: str, seed: int = 6) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator).to(device)


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    error = (got.double().cpu() - want.double().cpu()).norm() / want.double().cpu().norm()
    return float(error.nan_to_num(nan=float("inf")))


def gates(x: LadderStep | LadderPrompt, layer: LadderLayer) -> tuple[torch.Tensor, torch.Tensor]:
    g = kda.gate(x.raw_gate.double(), layer.A_log.double(), layer.dt_bias.double())
    return g, torch.sigmoid(x.raw_beta.double())


# -- decode ----------------------------------------------------------------------------------------


def run_decode(
    rung: str, device: str, heads: int, dim: int, slots: tuple[int, ...], dtype: torch.dtype
) -> dict[str, float]:
    """Take two steps in a row; return the errors of outputs, states and windows."""
    draw = drawer(device)
    layer = make_layer(heads, dim, draw, device)
    count, wide, num_slots = len(slots), heads * dim, max(slots) + 3
    conv = draw(num_slots, 3, 3 * wide).to(dtype).transpose(1, 2)
    state = draw(num_slots, heads, dim, dim) / dim**0.5
    want_window, want_state = conv.double(), kda.from_cache_layout(state.double())
    numbers = torch.tensor(slots, dtype=torch.int32, device=device)
    at, errors = numbers.long(), []
    for _ in range(2):
        step = LadderStep(*(x.to(dtype) for x in (
            draw(count, 3 * wide), 2 * draw(count, heads, dim), draw(count, heads),
            draw(count, heads, dim),
        )))  # fmt: skip
        out = climb_decode(rung, step, layer, conv, state, numbers)
        assert out.dtype == dtype and out.shape == (count, heads, dim)
        y, window = kda.short_conv(
            step.qkv.double()[:, None], layer.conv_weight.double(), want_window[at]
        )
        q, k, v = y.to(dtype).double().view(count, 1, 3, heads, dim).unbind(2)
        g, beta = gates(step, layer)
        o, after = kda.recurrent(
            kda.l2norm(q) * dim**-0.5, kda.l2norm(k), v, g[:, None], beta[:, None], want_state[at]
        )
        want_state[at], want_window[at] = after, window
        want = kda.gated_norm(
            o[:, 0], step.output_gate.double(), layer.norm_weight.double(), layer.norm_eps
        )
        errors.append(off(out, want))
    return {
        "out": max(errors),
        "state": off(state, kda.to_cache_layout(want_state)),
        "window": off(conv, want_window),
    }


@pytest.mark.parametrize("rung", DECODE_RUNGS)
def test_decode_rung_is_the_step(rung: str, device: str) -> None:
    errors = run_decode(rung, device, heads=2, dim=32, slots=(3, 0), dtype=torch.float32)
    assert errors["window"] == 0.0 and max(errors.values()) < 1e-5, errors


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("rung", DECODE_RUNGS)
def test_decode_rung_in_bfloat16(rung: str) -> None:
    slots = tuple(range(16, 0, -1))
    errors = run_decode(rung, "cuda", heads=12, dim=128, slots=slots, dtype=torch.bfloat16)
    assert errors["window"] == 0.0 and max(errors.values()) < 1e-2, errors


def test_only_the_first_rungs_copy_states() -> None:
    assert [state_passes(rung) for rung in DECODE_RUNGS] == [12, 6, 2, 2, 2]


def test_refuses_an_unknown_decode_rung() -> None:
    with pytest.raises(ValueError, match="no rung 'fast', expected one of separate, fused_rule"):
        climb_decode("fast", *[torch.zeros(1)] * 5)  # type: ignore[arg-type]


# -- prefill ---------------------------------------------------------------------------------------


def make_prompt(
    tokens: int, heads: int, dim: int, dtype: torch.dtype, device: str, gate: float
) -> tuple[LadderPrompt, LadderLayer, torch.Tensor]:
    draw = drawer(device)
    layer = make_layer(heads, dim, draw, device)
    q, k, v, raw = (draw(tokens, heads, dim) for _ in range(4))
    prompt = LadderPrompt(*(x.to(dtype) for x in (q, k, v, gate * raw, draw(tokens, heads))))
    return prompt, layer, draw(3, heads, dim, dim) / dim**0.5


def prefill_errors(prompt: LadderPrompt, layer: LadderLayer, state: torch.Tensor, run: Any) -> Any:
    dim, before = prompt.q.shape[-1], state.clone()
    out = run(prompt, layer, state, 1)
    q, k, v = (x.double()[None] for x in (prompt.q, prompt.k, prompt.v))
    g, beta = (x[None] for x in gates(prompt, layer))
    o, after = kda.recurrent(
        kda.l2norm(q) * dim**-0.5, kda.l2norm(k), v, g, beta,
        kda.from_cache_layout(before[1:2].double()),
    )  # fmt: skip
    assert torch.equal(state[::2], before[::2]), "another slot was written"
    return off(out, o[0]), off(state[1], kda.to_cache_layout(after)[0])


@pytest.mark.parametrize("rung", PREFILL_RUNGS)
@pytest.mark.parametrize("gate", [1.0, 30.0])
def test_prefill_rung_is_the_recurrence(rung: str, gate: float, device: str) -> None:
    case = make_prompt(150, 1, 32, torch.float32, device, gate)
    errors = prefill_errors(*case, lambda *call: climb_prefill(rung, *call))
    assert max(errors) < 2e-5, errors


@pytest.mark.parametrize("tokens", [1, 64, 200])
def test_segments_that_would_be_empty_are_left_out(tokens: int, device: str) -> None:
    case = make_prompt(tokens, 1, 16, torch.float32, device, 1.0)
    config = WalkConfig(block_v=16, num_warps=4, segments=3)
    errors = prefill_errors(*case, lambda *call: chunked_rule(*call, config))
    assert max(errors) < 2e-5, errors


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("rung", PREFILL_RUNGS)
def test_prefill_rung_in_bfloat16(rung: str) -> None:
    case = make_prompt(1000, 12, 128, torch.bfloat16, "cuda", 1.0)
    errors = prefill_errors(*case, lambda *call: climb_prefill(rung, *call))
    assert max(errors) < 1.5e-2, errors


def test_a_rung_adds_one_idea() -> None:
    """Only what its name says differs from the rung before."""
    chunks, split, segments = (vars(WALKS[name]) for name in ("chunks", "split_values", "segments"))
    assert {k for k in chunks if chunks[k] != split[k]} == {"block_v", "num_warps"}
    assert {k for k in split if split[k] != segments[k]} == {"segments"}


def test_refuses_an_unknown_prefill_rung() -> None:
    with pytest.raises(ValueError, match="no rung 'fast', expected one of tokens, chunks"):
        climb_prefill("fast", *[torch.zeros(1)] * 4)  # type: ignore[arg-type]
