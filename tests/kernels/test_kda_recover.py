"""Recovery against the recurrence in float64, and against a verify step that it follows."""

from __future__ import annotations

import sys

import pytest
import torch
from kda_recover_cases import CASES, LEFT_ALONE, Case, check, check_left_alone, make_inputs

pytest.importorskip("triton", reason="running kernels needs Triton")

import kda_decode_cases
from k3_kernels import KDARecords, kda_decode, kda_recover
from k3_kernels.kda_recover import KDARecoverConfig, choose_config

BF16 = torch.bfloat16
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


#: Loads that the compiler may not move, and u of a slice read in its turn.
HELD = [
    KDARecoverConfig(32, 8, 2, ahead=2, pin=True, late_u=True),
    KDARecoverConfig(128, 8, 2, pin=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_recurrence(case: Case, device: str) -> None:
    check(case, device)


@pytest.mark.parametrize(
    "config", [KDARecoverConfig(16, 16, 1), KDARecoverConfig(32, 8, 2)], ids=str
)
@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_any_cut_of_the_values(case: Case, config: KDARecoverConfig, device: str) -> None:
    check(case, device, config=config)


@pytest.mark.parametrize("config", HELD, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_loads_may_be_held_where_they_are(
    case: Case, config: KDARecoverConfig, device: str
) -> None:
    check(case, device, config=config)


@pytest.mark.parametrize("config", [None, *HELD], ids=str)
@pytest.mark.parametrize("what", LEFT_ALONE, ids=str)
def test_what_does_not_exist_is_left_alone(
    what: tuple[int, dict[str, tuple[int, int]]], config: KDARecoverConfig | None, device: str
) -> None:
    check_left_alone(what, device, config=config)


@pytest.mark.parametrize("accepted", [1, 2, 4])
def test_follows_a_verify_step(accepted: int, device: str) -> None:
    """Records of four tokens, ``accepted`` of them committed, equal to decoding just those."""
    case = kda_decode_cases.Case(tokens=(4,), slots=(2,), records=True, columns=6)
    inputs = kda_decode_cases.make_inputs(case, device)
    plain = {name: tensor.clone() for name, tensor in inputs.items()}
    records = KDARecords.empty(1, 4, case.heads, case.dim, dtype=torch.float32, device=device)
    inputs["conv_state"] = inputs["conv_state"].transpose(1, 2)
    kda_decode(**inputs, records=records)
    count = torch.tensor([accepted], dtype=torch.int32, device=device)
    kda_recover(
        inputs["state"], records, inputs["state_slots"], count, inputs["A_log"], inputs["dt_bias"],
        conv_state=inputs["conv_state"],
    )  # fmt: skip

    for name in ("qkv", "raw_gate", "raw_beta", "output_gate"):
        plain[name] = plain[name][:accepted]
    plain["cu_seqlens"] = torch.tensor([0, accepted], dtype=torch.int32, device=device)
    plain["conv_state"] = plain["conv_state"].transpose(1, 2)
    kda_decode(**plain)
    torch.testing.assert_close(inputs["state"], plain["state"], rtol=1e-4, atol=1e-5)
    assert torch.equal(inputs["conv_state"][2, :, :3], plain["conv_state"][2, :, :3])


def test_nothing_accepted_changes_nothing(device: str) -> None:
    """A discarded step counts 0; record -1 is the last one (vllm#51508, #50021)."""
    inputs = _on(device, _good())
    before = {name: inputs[name].clone() for name in ("state", "conv_state")}  # type: ignore[attr-defined]
    inputs["num_accepted"] = torch.zeros_like(inputs["num_accepted"])  # type: ignore[call-overload]
    kda_recover(**inputs)  # type: ignore[arg-type]
    for name, tensor in before.items():
        assert torch.equal(inputs[name], tensor)  # type: ignore[arg-type]


def _on(device: str, inputs: dict[str, object]) -> dict[str, object]:
    records = inputs["records"]
    assert isinstance(records, KDARecords)
    moved = KDARecords(records.u.to(device), records.key.to(device), records.gate.to(device))
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in {**inputs, "records": moved}.items()
    }


def test_configuration_follows_the_shape() -> None:
    for dim in (16, 32, 64, 128):
        for programs in (1, 12, 64, 65, 100_000):
            config = choose_config(programs, dim, torch.device("cpu"))
            assert dim % config.block_v == 0 and config.block_v % config.slice_v == 0


def _good() -> dict[str, object]:
    inputs: dict[str, object] = dict(make_inputs(Case(), "cpu"))
    inputs["conv_state"] = inputs["conv_state"].transpose(1, 2)  # type: ignore[attr-defined]
    inputs["records"] = KDARecords(*(inputs.pop(name) for name in ("u", "key", "gate")))  # type: ignore[arg-type]
    return inputs


def _numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"records": None}, TypeError, "records must be KDARecords, got NoneType"),
        ({"records": KDARecords.empty(3, 4, 2, 32)}, ValueError, "records.u has shape"),
        (
            {"records": KDARecords.empty(2, 4, 2, 32, layers=1)},
            ValueError,
            r"records.u must have 4 dimensions .* got \[1, 2, 4, 2, 32\]",
        ),
        ({"state": torch.zeros(5, 2, 32, 32).half()}, TypeError, "state is torch.float16"),
        ({"state_slots": _numbers(1)}, ValueError, "records.u has shape"),
        ({"state_slots": _numbers(1, 1)}, ValueError, "names slot 1 more than once"),
        ({"num_accepted": _numbers(1, 5)}, ValueError, "num_accepted is up to 5, but there are"),
        ({"num_accepted": _numbers(1)}, ValueError, "num_accepted has shape"),
        ({"final_slots": _numbers(1, 9)}, ValueError, "final_slots names slot 9"),
        ({"boundary": _numbers(1, 1)}, ValueError, "boundary and boundary_slots go together"),
        ({"A_log": torch.zeros(1)}, ValueError, "A_log must hold a value for each of 2 heads"),
        ({"dt_bias": torch.zeros(60)}, ValueError, "dt_bias has shape"),
        ({"conv_state": torch.zeros(5, 190, 6)}, ValueError, "conv_state has shape"),
        ({"conv_state": torch.zeros(5, 192, 6).half()}, TypeError, "conv_state is torch.float16"),
        (
            {"conv_state": torch.zeros(5, 192, 5)},
            ValueError,
            "keeps 5 inputs, but after 4 accepted tokens 4 taps need 6",
        ),
        (
            {"boundary": _numbers(1, 2), "boundary_slots": _numbers(0, 1)},
            ValueError,
            "boundary_slots names slot 1 for request 1, whose last state goes there",
        ),
        (
            {
                "boundary": _numbers(1, 2),
                "boundary_slots": _numbers(0, 2),
                "final_slots": _numbers(3, 2),
            },
            ValueError,
            "boundary_slots names slot 2 for request 1, whose last state goes there",
        ),
        (
            {"boundary": _numbers(1, 2), "boundary_slots": _numbers(1, 0)},
            ValueError,
            "boundary_slots names slot 1 for request 0, but request 1 has it in state_slots",
        ),
        (
            {"boundary": _numbers(1, 2), "boundary_slots": _numbers(0, 0)},
            ValueError,
            "boundary_slots names slot 0 for request 1, but request 0 has it in boundary_slots",
        ),
        (
            {"state_slots": _numbers(1, 2), "final_slots": _numbers(2, 3)},
            ValueError,
            "final_slots names slot 2 for request 0, but request 1 has it in state_slots",
        ),
        (
            {"final_slots": _numbers(0, 0)},
            ValueError,
            "final_slots names slot 0 for request 1, but request 0 has it in final_slots",
        ),
        (  # a request of which nothing is accepted keeps its state
            {"num_accepted": _numbers(2, 0), "final_slots": _numbers(1, 0)},
            ValueError,
            "final_slots names slot 1 for request 0, but request 1 has it in state_slots",
        ),
    ],
)
def test_refusals_name_the_argument(
    changes: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        kda_recover(**{**_good(), **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"boundary": (1, 2), "boundary_slots": (3, 1), "final_slots": (0, 2)},  # over their starts
        {"boundary": (0, 5), "boundary_slots": (1, 1)},  # at none of their tokens
        {"boundary": (1, 1), "boundary_slots": (-1, -1)},
        {"num_accepted": (0, 2), "final_slots": (0, 0)},
        {"state_slots": (-1, 1), "final_slots": (0, 0)},
        {"num_accepted": (2, 3), "state_slots": (3, 3), "null_slot": 3},
    ],
    ids=str,
)
def test_slots_that_nobody_shares(changes: dict[str, object], device: str) -> None:
    numbers = {
        name: _numbers(*value) if isinstance(value, tuple) else value
        for name, value in changes.items()
    }
    given = _on(device, {**_good(), **numbers})
    before = given["state"].clone()
    kda_recover(**given)  # type: ignore[arg-type]
    assert torch.equal(given["state"], before) == (numbers.get("null_slot") == 3)  # all padding


def test_layers_of_windows_are_wanted_with_layers_of_states() -> None:
    inputs = make_inputs(Case(layers=2), "cpu")
    inputs["conv_state"] = inputs["conv_state"].transpose(-1, -2)[0]
    records = KDARecords(*(inputs.pop(name) for name in ("u", "key", "gate")))
    with pytest.raises(ValueError, match=r"conv_state must be a tensor \[layers, slots, C, L\]"):
        kda_recover(**inputs, records=records)


@pytest.mark.parametrize("limit", [1, 5])
def test_more_layers_than_a_grid_holds(
    limit: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """950 requests of 69 layers are more programs than CUDA takes along one axis."""
    monkeypatch.setattr(sys.modules["k3_kernels.kda_recover"], "GRID_LIMIT", limit)
    check(Case(layers=3, boundary=(1, 3), boundary_slots=(0, 2)), device)
    check(Case(layers=5, final=(4, 1), window=False), device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about the interpreter")
def test_interpreter_refuses_bfloat16() -> None:
    with pytest.raises(TypeError, match="computes bfloat16 wrongly without an error"):
        check(Case(dtype=BF16), "cpu")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    "config",
    [
        None,
        *(
            KDARecoverConfig(*c)
            for c in (
                (16, 16, 1),
                (64, 8, 1),
                (128, 8, 2, True),
                (16, 8, 2, True, 2, True),
                (16, 8, 2, True, 1, True, True),
                (32, 8, 2, True, 2, True, True, True),
                (128, 8, 2, True, 1, False, True),
            )
        ),
    ],
    ids=str,
)
def test_released_shape(config: KDARecoverConfig | None, device: str) -> None:
    for heads in (12, 96):
        case = Case(
            heads=heads, dim=128, dtype=BF16, slots=(7, 2, 0, 11, 5, 9, 3, -1, 8),
            accepted=(9, 1, 2, 3, 4, 5, 6, 7, 8), max_tokens=9,
            final=(19, 2, 20, 11, 21, 9, 22, -1, 8), boundary=(4, 1, 0, 4, 2, 5, 1, 1, 9),
            boundary_slots=(7, 12, 13, 14, 5, 15, 16, 17, 18), seed=heads,
        )  # fmt: skip
        check(case, device, config=config)
