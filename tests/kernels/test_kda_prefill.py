"""KDA prefill against the recurrence in float64: lengths, slots, checkpoints, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kda_prefill_cases import CASES, Case, check, make_inputs

pytest.importorskip("triton", reason="running kernels needs Triton")

from k3_kernels import kda_prefill
from k3_kernels.kda_prefill import KDAPrefillConfig, choose_config

BF16 = torch.bfloat16
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_recurrence(case: Case, device: str) -> None:
    check(case, device, row_gap=24)


@pytest.mark.parametrize(
    "case",
    [
        CASES[4],
        CASES[5],
        Case(lengths=(300,), continued=(True,)),
        Case(lengths=(300, 130), slots=(1, 2), continued=(True, False), checkpoints=(130, 64),
             checkpoint_slots=(3, 4)),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("segments", [2, 4])
def test_walks_pieces_at_the_same_time(case: Case, segments: int, device: str) -> None:
    check(case, device, config=KDAPrefillConfig(32, 4, 0, 32, 4, 2, segments))


def test_in_two_calls_is_in_one(device: str) -> None:
    """A prompt in two pieces, the second from the state of the first: chunked prefill."""
    inputs = make_inputs(Case(lengths=(100,)), device)
    one = {name: tensor.clone() for name, tensor in inputs.items()}
    out = kda_prefill(**one)
    pieces = []
    for start, end in ((0, 37), (37, 100)):
        step = {**inputs, "has_initial_state": torch.tensor([start > 0], device=device)}
        for name in ("q", "k", "v", "raw_gate", "raw_beta"):
            step[name] = inputs[name][start:end]
        step["cu_seqlens"] = torch.tensor([0, end - start], dtype=torch.int32, device=device)
        pieces.append(kda_prefill(**step))
    torch.testing.assert_close(torch.cat(pieces), out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(inputs["state"], one["state"], rtol=1e-4, atol=1e-5)


def test_one_sequence_needs_no_lengths(device: str) -> None:
    inputs = make_inputs(Case(lengths=(70,)), device)
    one = {name: tensor.clone() for name, tensor in inputs.items()}
    out = kda_prefill(**one)
    del inputs["cu_seqlens"]
    assert torch.equal(kda_prefill(**inputs), out)
    assert torch.equal(inputs["state"], one["state"])


def test_zero_as_the_null_slot(device: str) -> None:
    inputs = make_inputs(Case(lengths=(20, 20), slots=(0, 1)), device)
    before = inputs["state"].clone()
    out = kda_prefill(**inputs, null_slot=0)
    assert not out[:20].any() and out[20:].any()
    assert torch.equal(inputs["state"][0], before[0])
    assert not torch.equal(inputs["state"][1], before[1])


@pytest.mark.parametrize(
    ("at", "slots"), [((0, 0), (0, 0)), ((4, 3), (0, 0)), ((1, 1), (-1, -1)), ((3, 0), (2, 1))]
)
def test_checkpoints_that_nobody_asks_for(
    at: tuple[int, int], slots: tuple[int, int], device: str
) -> None:
    """None, behind the end, of padding: their slots may be any, and any number of times."""
    inputs = make_inputs(Case(lengths=(3, 2), dim=16, slots=(0, 1)), device)
    kda_prefill(
        **inputs,
        checkpoint_at=_numbers(*at).to(device),
        checkpoint_slots=_numbers(*slots).to(device),
    )


def test_configuration_follows_the_shape() -> None:
    for dim in (16, 32, 64, 128):
        for heads, tokens in ((1, 1), (12, 8192), (96, 1024), (1000, 100)):
            config = choose_config(heads, tokens, dim, torch.device("cpu"))
            assert dim % config.block_v == 0 and dim % min(dim, config.block_k) == 0
            assert config.segments == 1 or tokens >= 1024


def test_float32_fits_a_multiprocessor() -> None:
    """Two chunks in flight, and what lies transposed beside them: no more than Hopper has."""
    for dim in (16, 32, 64, 128):
        for heads, tokens in ((1, 1), (12, 8192), (96, 1024)):
            config = choose_config(heads, tokens, dim, torch.device("cuda"), torch.float32)
            chunk = 3 * 64 * dim + 2 * 64 * 64 + 64 * config.block_v
            transposed = 2 * 64 * dim + 64 * config.block_v
            assert 4 * ((config.scan_stages - 1) * chunk + transposed) < 232_448 - 4096
            assert config.segments == 1  # a survey's maps would not fit


GOOD = make_inputs(Case(lengths=(3, 2), slots=(0, 1)), "cpu")


def _numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": torch.zeros(5, 32)}, ValueError, r"q must be a tensor \[N, H, D\]"),
        ({"q": torch.zeros(5, 2, 32)}, ValueError, r"q has shape \[5, 2, 32\]"),
        ({"k": torch.zeros(4, 1, 32)}, ValueError, r"k has shape \[4, 1, 32\]"),
        ({"v": torch.zeros(5, 1, 32).half()}, TypeError, "v is torch.float16"),
        ({"raw_gate": torch.zeros(5, 1, 64)[..., ::2]}, ValueError, "raw_gate has stride 2"),
        ({"raw_beta": torch.zeros(5)}, ValueError, "raw_beta has shape"),
        ({"A_log": torch.zeros(0)}, ValueError, "A_log must hold a value for each of 1 heads"),
        ({"dt_bias": torch.zeros(31)}, ValueError, "dt_bias has shape"),
        ({"state": torch.zeros(3, 1, 32, 32).double()}, TypeError, "state is torch.float64"),
        ({"state_slots": _numbers(0, 7)}, ValueError, "names slot 7, but there are only"),
        ({"state_slots": _numbers(1, 1)}, ValueError, "names slot 1 more than once"),
        ({"cu_seqlens": None}, ValueError, "2 sequences need cu_seqlens"),
        ({"cu_seqlens": _numbers(0, 5)}, ValueError, r"cu_seqlens has shape \[2\], expected \[3\]"),
        ({"cu_seqlens": torch.tensor([0, 3, 5])}, TypeError, "cu_seqlens is torch.int64"),
        ({"has_initial_state": torch.tensor([True])}, ValueError, "has_initial_state has shape"),
        (
            {"has_initial_state": [True, True]},
            TypeError,
            "has_initial_state must be a torch.Tensor",
        ),
        ({"has_initial_state": torch.ones(2)}, TypeError, "has_initial_state is torch.float32"),
        ({"has_initial_state": torch.ones(4).bool()[::2]}, ValueError, "has_initial_state has st"),
        ({"cu_seqlens": _numbers(0, 3, 6)}, ValueError, r"cu_seqlens is \[0, 3, 6\], expected"),
        ({"cu_seqlens": _numbers(0, 4, 3)}, ValueError, r"cu_seqlens is \[0, 4, 3\], expected"),
        ({"cu_seqlens": _numbers(-1, 3, 5)}, ValueError, r"cu_seqlens is \[-1, 3, 5\], expected"),
        ({"state": torch.zeros(1, 1, 32, 32).expand(3, -1, -1, -1)}, ValueError, "expanded view"),
        ({"v": None}, TypeError, "v must be a torch.Tensor, got NoneType"),
        ({"only": "scan"}, ValueError, "only is 'scan', expected None or one of prepare, survey"),
        ({"checkpoint_at": _numbers(1, 1)}, ValueError, "checkpoint_at and checkpoint_slots"),
        ({"lower_bound": None}, ValueError, "lower_bound is None, expected -5 to 0"),
        ({"lower_bound": -6.0}, ValueError, "lower_bound is -6.0, expected -5 to 0"),
        ({"lower_bound": 0.0}, ValueError, "lower_bound is 0.0, expected -5 to 0"),
        ({"out": torch.zeros(5, 1, 31)}, ValueError, "out has shape"),
        (
            {"checkpoint_at": _numbers(1, 1), "checkpoint_slots": _numbers(0, 2)},
            ValueError,
            "checkpoint_slots names slot 0 for request 0, whose last state goes there",
        ),
        (
            {"checkpoint_at": _numbers(1, 1), "checkpoint_slots": _numbers(1, 2)},
            ValueError,
            "checkpoint_slots names slot 1 for request 0, but request 1 has it in state_slots",
        ),
        (
            {"checkpoint_at": _numbers(1, 2), "checkpoint_slots": _numbers(2, 2)},
            ValueError,
            "checkpoint_slots names slot 2 for request 1, but request 0 has it in checkpoint_slots",
        ),
    ],
)
def test_refusals_name_the_argument(
    changes: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        kda_prefill(**{**GOOD, **changes})  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about the interpreter")
def test_interpreter_refuses_bfloat16() -> None:
    with pytest.raises(TypeError, match="computes bfloat16 wrongly without an error"):
        kda_prefill(**make_inputs(Case(dtype=BF16), "cpu"))


# -- on a GPU --------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("config", [None, KDAPrefillConfig(32, 4, 0, 128, 8, 2, 3)], ids=str)
@pytest.mark.parametrize("heads", [12, 96])
def test_released_shape(heads: int, config: KDAPrefillConfig | None, device: str) -> None:
    several = Case(
        lengths=(300, 65, 1, 128), slots=(4, 0, 2, 1), heads=heads, dim=128, dtype=BF16,
        continued=(True, True, False, True), checkpoints=(100, 64, 0, 128),
        checkpoint_slots=(5, 6, 7, 8),
    )  # fmt: skip
    check(several, device, config=config)
    long = Case(lengths=(1500,), heads=heads, dim=128, dtype=BF16, seed=1)
    for case in (long, replace(long, gate=40.0), replace(long, alike=True)):
        check(case, device, config=config)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_float32_heads(dim: int, device: str) -> None:
    """The heads of the trained tiny K3 and of the released one, in float32."""
    case = Case(
        lengths=(300, 65, 1), slots=(4, 0, 2), heads=8, dim=dim, continued=(True, True, False),
        checkpoints=(100, 64, 0), checkpoint_slots=(5, 6, 7),
    )  # fmt: skip
    check(case, device)
