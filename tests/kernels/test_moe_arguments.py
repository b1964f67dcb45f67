"""What the expert call refuses, and which constants it chooses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="running kernels needs Triton")

from k3_kernels import BF16Experts, moe_experts, pack_mxfp4
from k3_kernels.moe_config import MoEConfig, choose_config, shape_key


def packed(experts: int = 2, hidden: int = 64, inner: int = 32) -> Any:
    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(experts, *shape, dtype=torch.uint8)

    return pack_mxfp4(
        zeros(2 * inner, hidden // 2), zeros(2 * inner, hidden // 32),
        zeros(hidden, inner // 2), zeros(hidden, inner // 32),
    )  # fmt: skip


PLAIN = BF16Experts(torch.zeros(2, 64, 64), torch.zeros(2, 64, 32))
GOOD: dict[str, Any] = {
    "x": torch.zeros(3, 64),
    "experts": packed(),
    "expert_ids": torch.zeros(3, 2, dtype=torch.int32),
    "weights": torch.zeros(3, 2),
}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"experts": "w"}, TypeError, "experts must be MXFP4Experts .* got str"),
        ({"expert_ids": torch.zeros(3).int()}, ValueError, r"expert_ids must be a tensor \[T, k\]"),
        ({"expert_ids": torch.zeros(3, 2)}, TypeError, "expert_ids is torch.float32"),
        ({"expert_ids": torch.zeros(3, 0).int()}, ValueError, "no expert for a token"),
        ({"expert_ids": torch.zeros(2, 3).int().T}, ValueError, "expert_ids must be contiguous"),
        ({"weights": torch.zeros(2, 3).T}, ValueError, "weights (has stride|must be contiguous)"),
        ({"weights": torch.zeros(3, 3)}, ValueError, r"weights has shape \[3, 3\]"),
        ({"weights": torch.zeros(3, 2).half()}, TypeError, "weights is torch.float16"),
        ({"x": torch.zeros(3, 63)}, ValueError, r"x has shape \[3, 63\], expected \[3, 64\]"),
        ({"x": torch.zeros(64, 3).T}, ValueError, "x has stride 3 in its last dimension"),
        ({"x": torch.zeros(3, 64).double()}, TypeError, "x is torch.float64"),
        ({"x": torch.zeros(3, 64).half(), "experts": PLAIN}, TypeError, "are torch.float32"),
        ({"expert_ids": torch.zeros(3, 2).int().to("meta")}, ValueError, "expert_ids is on meta"),
        ({"norm_weight": torch.ones(63)}, ValueError, r"moe_experts: norm_weight has shape \[63\]"),
        ({"first_expert": -1}, ValueError, "first_expert must be at least 0, got -1"),
        ({"first_expert": 1.0}, TypeError, "first_expert must be an int, got float"),
        ({"out": torch.zeros(3, 63)}, ValueError, "out has shape"),
        ({"out": torch.zeros(1, 64).expand(3, 64)}, ValueError, "out is an expanded view"),
    ],
)  # fmt: skip
def test_refusals_name_the_argument(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        moe_experts(**{**GOOD, **changes})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"block_m": 24}, "block_m must be a power of two, got 24"),
        ({"extra_m": 24}, "extra_m must be a power of two"),
        ({"block_m": 16, "extra_m": 32}, "extra_m=32 must go into block_m=16"),
        ({"down_resident": True, "down_split": 2}, "down_resident and down_split exclude"),
        ({"down_resident": True, "down_boxed": True}, "down_resident and down_boxed exclude"),
    ],
)
def test_constants_that_cannot_be(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoEConfig(**values)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about the interpreter")
def test_interpreter_refuses_bfloat16() -> None:
    with pytest.raises(TypeError, match="computes bfloat16 wrongly without an error"):
        moe_experts(**{**GOOD, "x": GOOD["x"].bfloat16()})


def test_no_tokens() -> None:
    empty = {name: GOOD[name][:0] for name in ("x", "expert_ids", "weights")}
    assert moe_experts(**{**GOOD, **empty}).shape == (0, 64)


def test_constants_follow_the_load() -> None:
    experts = packed()
    few, many = choose_config(experts, 1, 2), choose_config(experts, 1000, 2)
    assert few.direct and not few.prefill
    assert many.prefill and many.extra_m
    for tokens in (1, 7, 16, 64, 300, 5000):
        for weights in (experts, PLAIN):
            config = choose_config(weights, tokens, 2)
            assert not (config.down_resident and config.down_split > 1)
            assert config.granule & (config.granule - 1) == 0


@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 6, 9, 28])
def test_every_part_of_a_split_has_columns(blocks: int) -> None:
    columns = 128 * blocks - 32
    gate = choose_config(packed(hidden=columns), 1, 1).gate_split
    down = choose_config(packed(inner=columns), 1, 1).down_split
    for parts in (gate, down):
        assert -(-blocks // parts) * (parts - 1) < blocks
    assert gate == {1: 1, 28: 4}.get(blocks, 2)


def test_table_entries_come_back() -> None:
    config = MoEConfig(direct=True, gate_split=4)
    assert config.to_dict() == {"direct": True, "gate_split": 4}
    assert MoEConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ValueError, match="no field \\['warp'\\]"):
        MoEConfig.from_dict({"warp": 4})
    assert shape_key(packed()) == "mxfp4,E=2,I=32,H=64"
