"""Numbers that an operator is handed: what is none, or out of bounds, is refused by its name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import test_finalize
import test_kda_decode
import test_kda_prefill
import test_kda_recover
import test_mla_decode
import test_moe_arguments
import test_routing
import torch

pytest.importorskip("triton", reason="running kernels needs Triton")

from k3_kernels import (
    attn_res,
    dispatch,
    finalize,
    gated_norm,
    kda_conv,
    kda_decode,
    kda_prefill,
    kda_recover,
    mla_decode,
    moe_experts,
    pack_mxfp4,
    route,
    row_norm,
    situ_and_mul,
)
from k3_kernels._numbers import check_experts_here, check_int, check_number

ONES, ROW = torch.ones(2, 8), torch.ones(8)
LOCAL = {"expert_ids": test_finalize.IDS, "num_experts": 4}
EVERYONE_ELSE = torch.tensor([[-(2**31), 3]], dtype=torch.int32)
#: Every operator with arguments that it takes.
GOOD: dict[Callable[..., Any], dict[str, Any]] = {
    attn_res: {
        "blocks": None, "prefix": ONES, "delta": None, "query": ROW, "key_norm_weight": ROW,
        "norm_weight": ROW,
    },
    dispatch: {"expert_ids": EVERYONE_ELSE, "num_experts": 4, "block_size": 2},
    finalize: {**test_finalize.GOOD, "norm_weight": ROW},
    gated_norm: {"x": ONES[:, None], "gate": ONES[:, None], "weight": ROW},
    kda_conv: {
        "qkv": torch.zeros(3, 6), "conv_weight": torch.zeros(6, 4),
        "conv_state": torch.zeros(2, 6, 3), "state_slots": torch.tensor([0], dtype=torch.int32),
    },
    kda_decode: test_kda_decode.GOOD,
    kda_prefill: test_kda_prefill.GOOD,
    kda_recover: test_kda_recover._good(),
    mla_decode: test_mla_decode.GOOD,
    moe_experts: test_moe_arguments.GOOD,
    route: test_routing.GOOD,
    row_norm: {"x": ONES, "weight": ROW},
    situ_and_mul: {"gate": ONES, "up": ONES},
}  # fmt: skip
KDA = (kda_conv, kda_decode, kda_prefill, kda_recover)

NO_NUMBERS = [
    *((op, "null_slot", value) for op in KDA for value in (None, 2.5, "0", True)),
    (attn_res, "key_eps", "x"),
    (attn_res, "norm_eps", None),
    (dispatch, "first_expert", 0.5),
    (finalize, "eps", "x"),
    (gated_norm, "eps", "x"),
    *((op, name, "x") for op in (kda_decode, kda_recover) for name in ("lower_bound", "l2_eps")),
    *((op, "scale", "x") for op in (kda_decode, kda_prefill, mla_decode, route)),
    (kda_decode, "norm_eps", None),
    (kda_prefill, "l2_eps", None),
    (kda_recover, "l2_eps", None),
    (kda_recover, "conv_width", "4"),
    (mla_decode, "scale", None),
    (mla_decode, "splits", 2.0),
    *((moe_experts, name, "x") for name in ("beta", "linear_beta", "eps")),
    (moe_experts, "beta", None),
    (row_norm, "eps", None),
    (situ_and_mul, "linear_beta", None),
]
OUT_OF_BOUNDS = [
    *((op, "null_slot", -5, "at least -1") for op in KDA),
    (attn_res, "key_eps", -1.0, "at least 0"),
    (finalize, "eps", -1e9, "at least 0"),
    (kda_decode, "lower_bound", 5, "below 0"),
    (kda_decode, "lower_bound", 0.0, "below 0"),
    (kda_decode, "scale", float("nan"), "finite"),
    (kda_decode, "l2_eps", float("inf"), "finite"),
    (kda_recover, "lower_bound", 5.0, "below 0"),
    (kda_recover, "conv_width", 0, "at least 2"),
    (kda_recover, "conv_width", 1, "at least 2"),
    (mla_decode, "splits", 129, "at most 128"),
    (moe_experts, "beta", 0, "above 0"),
    (moe_experts, "linear_beta", -1.0, "above 0"),
    (situ_and_mul, "beta", 0.0, "above 0"),
]


def _id(value: object) -> str:
    return getattr(value, "__name__", repr(value))


@pytest.mark.parametrize(("operator", "name", "value"), NO_NUMBERS, ids=_id)
def test_no_number(operator: Callable[..., Any], name: str, value: object) -> None:
    kind = re.escape(f"{type(value).__name__} {value!r}")
    with pytest.raises(TypeError, match=rf": {name} must be (an int|a number), got {kind}"):
        operator(**{**GOOD[operator], name: value})


@pytest.mark.parametrize(("operator", "name", "value", "bound"), OUT_OF_BOUNDS, ids=_id)
def test_out_of_bounds(operator: Callable[..., Any], name: str, value: float, bound: str) -> None:
    with pytest.raises(ValueError, match=f": {name} must be {bound}"):
        operator(**{**GOOD[operator], name: value})


def test_bound_of_a_prompt_is_no_string() -> None:
    with pytest.raises(ValueError, match="lower_bound is 'x', expected -5 to 0"):
        kda_prefill(**{**GOOD[kda_prefill], "lower_bound": "x"})


@pytest.mark.parametrize("operator", GOOD, ids=_id)
def test_the_rest_is_taken(operator: Callable[..., Any]) -> None:
    """What is refused above is refused for the number alone."""
    if torch.cuda.is_available():
        pytest.skip("the arguments are on the CPU")
    arguments = {name: _copy(value) for name, value in GOOD[operator].items()}
    result = operator(**arguments)
    tensors = result if isinstance(result, tuple) else (result,)
    if operator is kda_recover:  # it returns nothing and writes its states
        tensors = (arguments["state"],)
    assert all(t.isfinite().all() for t in tensors if isinstance(t, torch.Tensor))
    assert any(isinstance(t, torch.Tensor) for t in tensors)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_experts": "3"}, TypeError, "num_experts must be an int, got str '3'"),
        ({"first_expert": "a"}, TypeError, "first_expert must be an int, got str 'a'"),
        ({"first_expert": 0.5}, TypeError, "first_expert must be an int, got float 0.5"),
        ({"num_experts": 0}, ValueError, "num_experts must be at least 1, got 0"),
        ({"first_expert": 2**31 - 3}, ValueError, "first_expert . num_experts is 2147483649"),
    ],
)
def test_experts_of_a_rank(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        finalize(**{**GOOD[finalize], **LOCAL, **changes})


def test_ids_at_the_ends_of_int32(device: str) -> None:
    """The difference of two of them wraps: no rank may name experts where that would matter."""
    ids, last = EVERYONE_ELSE.to(device), 2**31 - 4
    done = dispatch(ids, 4, 2, first_expert=last)
    assert done.num_tokens_post_padded.item() == 0
    for operator in (dispatch, moe_experts):
        with pytest.raises(ValueError, match="expected at most 2147483648: expert ids are int32"):
            operator(**{**GOOD[operator], "first_expert": 2**31 - 1})
    pairs, here = torch.ones(2, 8, device=device), {"first_expert": last, "num_experts": 4}
    assert not finalize(pairs, None, 2, expert_ids=ids, **here).any()


def test_no_expert_at_all() -> None:
    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(0, *shape, dtype=torch.uint8)

    empty = pack_mxfp4(zeros(64, 32), zeros(64, 2), zeros(64, 16), zeros(64, 1))
    with pytest.raises(ValueError, match="moe_experts: experts holds no expert, expected at least"):
        moe_experts(**{**GOOD[moe_experts], "experts": empty})


def test_bounds_themselves() -> None:
    check_int("x", "n", 3, at_least=3, at_most=3)
    check_number("x", "n", 0, at_least=0.0)
    check_number("x", "n", -1e-30, below=0.0)
    check_number("x", "n", 1e-30, above=0.0)
    check_experts_here("x", 2**31 - 1, 1)
    for fails in ({"at_least": 1.0}, {"above": 0.0}, {"below": 0.0}):
        with pytest.raises(ValueError, match="x: n must be"):
            check_number("x", "n", 0.0, **fails)
