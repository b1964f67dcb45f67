"""The KDA decode step against the float64 reference: shapes, modes, refusals, real sizes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from kda_decode_cases import (
    CASES,
    Case,
    assert_close,
    check,
    check_left_alone,
    make_inputs,
    reference,
)

pytest.importorskip("triton", reason="running kernels needs Triton")

from k3_kernels import KDARecords, kda_decode, tuned
from k3_kernels.kda_decode import KDADecodeConfig, choose_config, verify_config
from k3_kernels.kda_prefill import KDAPrefillConfig
from k3_kernels.kda_recover import KDARecoverConfig

from kimik3_lab.reference import kda

F16, BF16 = torch.float16, torch.bfloat16
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PLAIN = [case for case in CASES if case.tokens is None]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_reference(case: Case, device: str) -> None:
    check(case, device, row_gap=24)


@pytest.mark.parametrize("case", [CASES[0], CASES[13], CASES[15]], ids=str)
def test_dense_rows(case: Case, device: str) -> None:
    check(case, device)


@pytest.mark.parametrize("case", PLAIN[:6], ids=str)
def test_walks_over_slices_of_values(case: Case, device: str) -> None:
    check(case, device, config=KDADecodeConfig(8, 16, 1, 3))
    check(case, device, config=KDADecodeConfig(16, 32, 1, 2, early=True))


#: Loads before the branch on whether the slot exists: the whole head, a last slice, the window.
PINNED = [
    KDADecodeConfig(32, 32, 1, 1, pin=True),
    KDADecodeConfig(16, 16, 1, 2, early=True, pin=True),
    KDADecodeConfig(16, 16, 1, 2, pin=True),
]


@pytest.mark.parametrize("config", PINNED, ids=str)
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_loads_before_the_branch(case: Case, config: KDADecodeConfig, device: str) -> None:
    if config.block_v <= case.dim:
        check(case, device, row_gap=24, config=config)


@pytest.mark.parametrize("columns", [4, 5])
def test_tokens_that_do_not_fit_the_window(columns: int, device: str) -> None:
    check_left_alone(columns, device)


def test_rows_of_no_request_are_not_written(device: str) -> None:
    inputs = make_inputs(Case(dim=16, tokens=(2, 2)), device)
    inputs["cu_seqlens"] = torch.tensor([1, 2, 3], dtype=torch.int32, device=device)
    out = torch.full((4, 2, 16), 1234.5, device=device)
    _call(inputs, out=out)
    assert (out[[0, 3]] == 1234.5).all() and (out[1:3] != 1234.5).all()


def test_slots_nobody_has_named_stay_out(device: str) -> None:
    """With 0 as the null slot, as in an engine's block pool, slot 0 is padding too."""
    case = Case(slots=(2, 0))
    inputs = make_inputs(case, device)
    before = {name: inputs[name].clone() for name in ("state", "conv_state")}
    slots = torch.tensor([2, -1], dtype=torch.int32, device=device)
    expected = reference(case, {**inputs, "state_slots": slots})
    out = _call(inputs, null_slot=0)
    assert torch.equal(inputs["state"][0], before["state"][0])
    assert torch.equal(inputs["conv_state"][0], before["conv_state"][0])
    assert not out[1].any()
    assert_close("state", inputs["state"], expected["state"], 2e-5, dims=2)


def _call(inputs: dict[str, torch.Tensor], **more: object) -> torch.Tensor:
    conv_state = inputs["conv_state"].transpose(1, 2)
    arguments = {**inputs, "conv_state": conv_state, "norm_eps": 1e-3, "l2_eps": 1e-4}
    return kda_decode(**{**arguments, **more})  # type: ignore[arg-type]


def test_token_by_token_is_all_at_once(device: str) -> None:
    """Three steps of one token and one step of three leave the same state, window and outputs."""
    case = Case(tokens=(3, 3), slots=(1, 3))
    inputs = make_inputs(case, device)
    together = {name: tensor.clone() for name, tensor in inputs.items()}
    out = _call(together)
    lengths = inputs.pop("cu_seqlens")
    per_token = ("qkv", "raw_gate", "raw_beta", "output_gate")
    for t in range(3):
        rows = lengths[:-1].long() + t
        step = {**inputs, **{name: inputs[name][rows].contiguous() for name in per_token}}
        torch.testing.assert_close(_call(step), out[rows], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(inputs["state"], together["state"], rtol=1e-5, atol=1e-6)
    assert torch.equal(inputs["conv_state"], together["conv_state"])


@pytest.mark.parametrize("accepted", [1, 2, 4])
def test_draft_slots_roll_back(accepted: int, device: str) -> None:
    """After a verify of 4 tokens with ``accepted`` right ones, the next step continues there."""
    case = Case(tokens=(4,), slots=(2,), drafts=4, columns=6)
    inputs = make_inputs(case, device)
    plain = {name: tensor.clone() for name, tensor in inputs.items()}
    _call(inputs)
    torch.manual_seed(1)
    per_token = ("qkv", "raw_gate", "raw_beta", "output_gate")
    following = {name: torch.randn_like(inputs[name][:1]) for name in per_token}
    count = torch.tensor([accepted], dtype=torch.int32, device=device)
    step = {**inputs, **following, "num_accepted": count}
    del step["cu_seqlens"]
    out = _call(step)

    # The same without speculation: the accepted tokens and the following one in a row.
    straight = dict(plain)
    for name in per_token:
        straight[name] = torch.cat((plain[name][:accepted], following[name]))
    straight["cu_seqlens"] = torch.tensor([0, accepted + 1], dtype=torch.int32, device=device)
    straight["state_slots"] = plain["state_slots"][:, 0].contiguous()
    expected = _call(straight)
    torch.testing.assert_close(out, expected[-1:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(inputs["state"][2], straight["state"][2], rtol=1e-4, atol=1e-5)
    assert torch.equal(inputs["conv_state"][2, :3], straight["conv_state"][2, :3])


def test_saturated_gates_forget_or_keep_everything(device: str) -> None:
    """A raw gate of +-1000 is a decay of e^-5 or 1, not a NaN."""
    case = Case(heads=1, slots=(0,))
    inputs = make_inputs(case, device)
    inputs["raw_gate"] = torch.where(torch.arange(32, device=device) < 16, 1000.0, -1000.0)[None]
    inputs["raw_beta"] = torch.full((1, 1), -1000.0, device=device)  # beta 0: nothing is written
    before = inputs["state"].clone()
    out = _call(inputs)
    assert out.isfinite().all()
    decay = torch.tensor([-5.0] * 16 + [0.0] * 16, device=device).exp()
    torch.testing.assert_close(inputs["state"][0, 0], before[0, 0] * decay, rtol=1e-5, atol=1e-7)


def test_any_layout_of_window_and_taps(device: str) -> None:
    """Channels together, as vLLM keeps them, or columns together, as a checkpoint has them."""
    inputs = make_inputs(Case(), device)
    other = {name: tensor.clone() for name, tensor in inputs.items()}
    out = _call(inputs)
    window = other["conv_state"].transpose(1, 2).contiguous()
    taps = other["conv_weight"].T.contiguous().T[:, None]
    same = _call(other, conv_state=window, conv_weight=taps)
    assert torch.equal(out, same)
    assert torch.equal(window.transpose(1, 2), inputs["conv_state"])


def test_parts_of_a_packed_projection(device: str) -> None:
    """Rows of q | k | v | gate need not be copied apart."""
    inputs = make_inputs(Case(), device)
    packed = torch.cat((inputs["qkv"], inputs["output_gate"]), 1)
    other = {name: tensor.clone() for name, tensor in inputs.items()}
    out = _call(inputs)
    parts = {"qkv": packed[:, :192], "output_gate": packed[:, 192:].unflatten(1, (2, 32))}
    assert torch.equal(_call({**other, **parts}), out)


def test_configuration_follows_the_shape() -> None:
    cpu = torch.device("cpu")
    for dim in (16, 32, 64, 128):
        for programs in (1, 12, 132, 133, 768, 100_000):
            config = choose_config(programs, dim, cpu)
            assert dim % config.block_v == 0 and dim % config.chunk == 0
            assert config.stages <= dim // config.block_v + 1
        assert verify_config(12, dim, cpu).block_v == dim


def test_tables_hold_what_the_operators_take() -> None:
    """An entry written before a field was added or renamed would fail only on its GPU."""
    kinds = {
        "kda_decode": KDADecodeConfig,
        "kda_verify": KDADecodeConfig,
        "kda_recover": KDARecoverConfig,
        "kda_prefill": KDAPrefillConfig,
    }
    found = 0
    for path in tuned.folder().glob("*.json"):
        operators = json.loads(path.read_text(encoding="utf-8"))["operators"]
        for operator, kind in kinds.items():
            for entry in operators.get(operator, {}).values():
                for bucket in entry["buckets"]:
                    kind(**bucket["config"])
                    found += 1
    assert found


GOOD = make_inputs(Case(), "cpu")
GOOD["conv_state"] = GOOD["conv_state"].transpose(1, 2)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"qkv": torch.zeros(2)}, ValueError, r"qkv must be a tensor \[N, 3 \* H \* D\]"),
        ({"qkv": torch.zeros(2, 100)}, ValueError, r"qkv has shape \[2, 100\]"),
        ({"qkv": torch.zeros(192, 2).T}, ValueError, "qkv has stride"),
        ({"raw_gate": torch.zeros(2, 2, 31)}, ValueError, "raw_gate has shape"),
        ({"raw_gate": torch.zeros(2, 2, 64)[..., :32]}, ValueError, "raw_gate has stride 64"),
        ({"raw_beta": torch.zeros(2, 3)}, ValueError, "raw_beta has shape"),
        ({"output_gate": torch.zeros(2, 64).half()}, TypeError, "output_gate is torch.float16"),
        ({"conv_weight": torch.zeros(4, 192)}, ValueError, "conv_weight has shape"),
        ({"conv_weight": torch.zeros(192, 1)}, ValueError, "with 2 taps or more"),
        ({"A_log": torch.zeros(1)}, ValueError, "A_log must hold a value for each of 2 heads"),
        ({"dt_bias": torch.zeros(63)}, ValueError, "dt_bias has shape"),
        ({"norm_weight": torch.zeros(64)}, ValueError, "norm_weight has shape"),
        ({"conv_state": torch.zeros(6, 192, 2)}, ValueError, "keeps 2 inputs, but 4 taps need 3"),
        ({"conv_state": torch.zeros(6, 3, 192)}, ValueError, "conv_state has shape"),
        ({"conv_state": torch.zeros(6, 192, 3).half()}, TypeError, "conv_state is torch.float16"),
        ({"state": torch.zeros(5, 2, 32, 32).half()}, TypeError, "state is torch.float16"),
        ({"state": torch.zeros(5, 2, 32, 16)}, ValueError, "32 values and 16 keys"),
        ({"state": torch.zeros(5, 2, 48, 48)}, ValueError, "one of 16, 32, 64, 128"),
        ({"state": torch.zeros(5, 2, 32, 64)[..., :32]}, ValueError, r"the \[V, K\] of a head"),
        ({"state": torch.zeros(2, 32, 32)}, ValueError, r"state must be a tensor \[slots, H, V"),
        ({"state_slots": torch.tensor([1, 2])}, TypeError, "state_slots is torch.int64"),
        ({"state_slots": torch.tensor([1, 9]).int()}, ValueError, "names slot 9, but there are"),
        ({"state_slots": torch.tensor([1, 1]).int()}, ValueError, "names slot 1 more than once"),
        ({"state_slots": torch.tensor([1]).int()}, ValueError, "2 tokens for 1 requests"),
        ({"cu_seqlens": torch.tensor([0, 2]).int()}, ValueError, r"cu_seqlens has shape \[2\]"),
        ({"num_accepted": torch.tensor([1]).int()}, ValueError, "num_accepted has shape"),
        ({"cu_seqlens": torch.tensor([0, 1, 3]).int()}, ValueError, r"cu_seqlens is \[0, 1, 3\]"),
        ({"records": KDARecords.empty(2, 3, 2, 32)}, ValueError, "pass cu_seqlens"),
        (
            {"records": 3, "cu_seqlens": torch.tensor([0, 1, 2]).int()},
            TypeError,
            "records must be KDARecords, got int",
        ),
        (
            {"records": KDARecords.empty(2, 3, 2, 32), "cu_seqlens": torch.tensor([0, 1, 2]).int()},
            TypeError,
            "records.key is torch.bfloat16, expected torch.float32",
        ),
        (
            {
                "records": KDARecords.empty(2, 3, 2, 32, dtype=torch.float32),
                "cu_seqlens": torch.tensor([0, 1, 2]).int(),
                "state_slots": torch.tensor([[0, 1], [2, 3]]).int(),
            },
            ValueError,
            "records replace the slots",
        ),
        ({"out": torch.zeros(2, 2, 33)}, ValueError, "out has shape"),
        ({"out": torch.zeros(1, 2, 32).expand(2, 2, 32)}, ValueError, "out is an expanded view"),
    ],
)
def test_refusals_name_the_argument(
    changes: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        kda_decode(**{**GOOD, **changes})  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about the interpreter")
def test_interpreter_refuses_bfloat16() -> None:
    inputs = make_inputs(Case(dtype=BF16), "cpu")
    with pytest.raises(TypeError, match="computes bfloat16 wrongly without an error"):
        _call(inputs)


# -- on a GPU --------------------------------------------------------------------------------------

SLOTS = (7, 2, 0, 11, 5, 9, 3, -1, 8)
LENGTHS = (9, 1, 0, 4, 9, 3, 9, 9, 2)
REAL = Case(heads=12, dim=128, slots=SLOTS, dtype=BF16)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("gate", [1.0, 40.0])
@pytest.mark.parametrize(
    "config",
    [
        None,
        *(
            KDADecodeConfig(*c)
            for c in (
                (128, 32, 8, 1),
                (32, 64, 4, 5, True, True),
                (8, 32, 1, 3),
                (128, 32, 8, 1, True, True, 65536, True),
                (64, 64, 4, 2, True, True, 65536, True),
                (32, 64, 4, 3, True, True, 16384, True),
                (8, 64, 2, 8, True, True, 16384, True),
            )
        ),
    ],
)
def test_released_shape(config: KDADecodeConfig | None, gate: float, device: str) -> None:
    check(replace(REAL, gate=gate, seed=3), device, config=config)
    check(replace(REAL, heads=96, slots=tuple(range(40)), gate=gate, seed=4), device, config=config)


@pytest.mark.gpu
@needs_gpu
def test_released_shape_speculative(device: str) -> None:
    several = replace(REAL, tokens=LENGTHS, columns=11)
    check(replace(several, seed=5), device)
    check(replace(several, records=True, seed=6), device)
    check(replace(several, drafts=9, accepted=(1, 2, 3, 4, 5, 6, 7, 8, 9), seed=7), device)


@pytest.mark.gpu
@needs_gpu
def test_what_does_not_exist_is_not_touched(device: str) -> None:
    """A slot, a window or records that do not exist: NaN, and nothing changes."""
    for changes in (
        {"state_slots": torch.tensor([1, 99], dtype=torch.int32, device=device)},
        {"num_accepted": torch.tensor([1, 2], dtype=torch.int32, device=device)},
    ):
        inputs = {**make_inputs(Case(), device), **changes}
        before = {name: tensor.clone() for name, tensor in inputs.items()}
        out = _call(inputs)
        assert out[1].isnan().all() and out[0].isfinite().all()
        rest = [slot for slot in range(6) if slot != int(inputs["state_slots"][0])]
        assert torch.equal(inputs["state"][rest], before["state"][rest])
        assert torch.equal(inputs["conv_state"][rest], before["conv_state"][rest])
    assert kda.to_cache_layout(inputs["state"]).isfinite().all()
