"""The expert kernels at K3's shapes, with the constants they run with, for ahead-of-time checks."""

from __future__ import annotations

from typing import Any

import aot
from k3_kernels.moe_config import MoEConfig

__all__ = ["moe_rows"]

HIDDEN = 3584
#: Experts, width and choices of a token on a rank.
TP8, EP8 = (896, 384, 16), (112, 3072, 2)

FEW = MoEConfig(block_m=8)
FEW_RESIDENT = MoEConfig(block_m=8, down_row_blocks=4, down_resident=True)
SOME = MoEConfig(prefill=True, block_m=32)
MANY = MoEConfig(prefill=True, block_m=128, extra_m=32, gate_stages=2, down_block_n=128,
                 down_warps=8, down_stages=2, down_row_blocks=14, down_resident=True)  # fmt: skip
PLAIN = MoEConfig(prefill=True, block_m=16)


def _pointers(names: str, kinds: dict[str, str]) -> dict[str, str]:
    return {f"{name}_ptr": kinds.get(name, "*bf16") for name in names.split()}


def _row(
    name: str, which: str, config: MoEConfig, shape: tuple[int, int, int], capability: int,
    *, mxfp4: bool = True, rotated: bool = True, programs_per_sm: int = 1,
) -> aot.Row:  # fmt: skip
    experts, inner, top_k = shape
    gate = which == "gate"
    constants: dict[str, Any] = {
        "H": HIDDEN, "I": inner, "ROTATED": rotated, "WIDE": False, "BLOCK_M": config.block_m,
        "COMPUTE": "tl.bfloat16",
    }  # fmt: skip
    if gate:
        constants |= {"TOP_K": top_k, "BETA": 4.0, "LINEAR_BETA": 25.0, "FUSED": True}
    else:
        constants |= {"ROW_BLOCKS": config.down_row_blocks, "RESIDENT": config.down_resident}
    kinds = {"partial": "*fp32", "weights": "*fp32"} | dict.fromkeys(
        ("ids", "block_experts", "counter"), "*i32"
    )
    if mxfp4:
        kinds |= {"words": "*i32", "scales": "*i32"}
    operands = "out x words scales" if gate else "out act words scales weights"
    integers = ["x_stride"] if gate else []
    if config.prefill:
        module, kernel = "moe_prefill_kernel", f"{'gate_up' if gate else 'down'}_prefill_kernel"
        signature = _pointers(f"{operands} ids block_experts", kinds)
        integers += ["num_pairs", "max_blocks"]
        constants |= {
            "MXFP4": mxfp4, "EXTRA_M": config.extra_m, "BLOCK_K": 128, "FIT": False,
            "INDEX": "tl.int32",
            "BLOCK_N": config.gate_block_n if gate else config.down_block_n,
        }  # fmt: skip
    else:
        module, kernel = "moe_gemm_kernel", "gate_up_kernel" if gate else "down_kernel"
        more = " partial counter" if gate else ""
        signature = _pointers(f"{operands} ids block_experts{more}", kinds)
        integers += ["num_pairs", "first_expert"]
        constants |= {
            "NUM_EXPERTS": experts, "MAX_PAIRS": 0,
            "SPLIT_K": config.gate_split if gate else config.down_split,
            "UNROLL": config.gate_unroll if gate else config.down_unroll,
        }  # fmt: skip
    return aot.Row(
        name=f"moe-{name}",
        module=f"k3_kernels.{module}",
        kernel=kernel,
        capability=capability,
        signature=signature | dict.fromkeys(integers, "i32"),
        constants=constants,
        num_warps=config.gate_warps if gate else config.down_warps,
        programs_per_sm=programs_per_sm,
        options={"num_stages": config.gate_stages if gate else config.down_stages},
    )


def moe_rows() -> list[aot.Row]:
    """Every kernel on Hopper, and one of each kind on Blackwell."""
    rows = [
        _row("few-gate", "gate", FEW, TP8, capability, programs_per_sm=3)
        for capability in (90, 103)
    ]
    rows += [_row("few-down", "down", FEW, EP8, capability, programs_per_sm=4)
             for capability in (90, 103)]  # fmt: skip
    rows += [
        _row("few-gate-nibbles", "gate", FEW, TP8, 90, rotated=False, programs_per_sm=3),
        _row("few-down-resident", "down", FEW_RESIDENT, TP8, 90, programs_per_sm=4),
        _row("some-down", "down", SOME, EP8, 90, programs_per_sm=3),
        _row("many-gate", "gate", MANY, TP8, 90, programs_per_sm=2),
        _row("many-down-resident", "down", MANY, TP8, 90),
        _row("plain-gate", "gate", PLAIN, TP8, 90, mxfp4=False, programs_per_sm=2),
        _row("plain-down", "down", PLAIN, EP8, 90, mxfp4=False, programs_per_sm=3),
    ]
    rows += [_row("some-gate", "gate", SOME, TP8, capability, programs_per_sm=3)
             for capability in (90, 103)]  # fmt: skip
    return rows
