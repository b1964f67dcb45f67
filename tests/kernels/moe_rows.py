"""The expert kernels at K3's shapes, with the constants they run with, for ahead-of-time checks."""

from __future__ import annotations

from typing import Any

import aot
from k3_kernels.moe_config import MoEConfig

__all__ = ["moe_rows", "tile_rows"]

HIDDEN = 3584
#: Experts, width and choices of a token on a rank.
TP8, EP8 = (896, 384, 16), (112, 3072, 2)

FEW = MoEConfig(block_m=8)
FEW_RESIDENT = MoEConfig(block_m=8, down_row_blocks=4, down_resident=True)
SOME = MoEConfig(prefill=True, block_m=32)
MANY = MoEConfig(prefill=True, block_m=128, extra_m=32, listed=1, gate_block_n=128, gate_warps=8,
                 down_block_n=128, down_warps=8, down_row_blocks=14,
                 down_resident=True)  # fmt: skip
PLAIN = MoEConfig(prefill=True, block_m=16)
LISTED = MoEConfig(prefill=True, block_m=32, extra_m=16, fit=True, listed=1,
                   gate_registers=128, down_row_blocks=28, down_resident=True)  # fmt: skip
BOXED = MoEConfig(prefill=True, block_m=128, extra_m=32, block_k=64, fit=True, fit_extra=True,
                  listed=4, gate_boxed=True, down_boxed=True, down_block_n=128, down_warps=8,
                  down_registers=128)  # fmt: skip
BOXED_64 = MoEConfig(prefill=True, block_m=64, block_k=64, fit=True, listed=1, gate_boxed=True,
                     down_boxed=True, down_block_n=128, down_warps=8)  # fmt: skip
WALKED = MoEConfig(prefill=True, block_m=128, extra_m=32, block_k=64, fit=True, fit_extra=True,
                   listed=1, down_row_blocks=14)  # fmt: skip


def _pointers(names: str, kinds: dict[str, str]) -> dict[str, str]:
    return {f"{name}_ptr": kinds.get(name, "*bf16") for name in names.split()}


def _box(rows: int, columns: int) -> str:
    return f"tensordesc<bf16[{rows}, {columns}]>"


def _row(
    name: str, which: str, config: MoEConfig, shape: tuple[int, int, int], capability: int,
    *, mxfp4: bool = True, rotated: bool = True, programs_per_sm: int = 1, stack: int = 0,
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
        part = "gate" if gate else "down"
        module = f"moe_prefill_{part}_kernel"
        kernel = f"{'gate_up' if gate else 'down'}_prefill_kernel"
        signature = _pointers(f"{operands} ids block_experts", kinds)
        integers += ["num_pairs", "max_blocks"]
        constants |= {
            "MXFP4": mxfp4, "EXTRA_M": config.extra_m, "BLOCK_K": 128 if mxfp4 else config.block_k,
            "FIT": config.fit, "FIT_EXTRA": config.fit_extra, "LISTED": config.listed,
            "INDEX": "tl.int32", "BLOCK_N": config.gate_block_n if gate else config.down_block_n,
        }  # fmt: skip
        boxed = config.gate_boxed if gate else config.down_boxed
        constants["BOXED"] = boxed
        if boxed:
            signature["words_ptr"] = _box(constants["BLOCK_N"], config.block_k)
        if not gate and boxed:
            heights = (config.block_m, config.block_m // 2, config.granule)
            names = ("act_ptr", "half_act_ptr", "extra_act_ptr")
            signature |= {n: _box(m, config.block_k) for n, m in zip(names, heights, strict=True)}
        elif not gate:
            constants |= {"half_act_ptr": None, "extra_act_ptr": None}
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
    most = config.gate_registers if gate else config.down_registers
    return aot.Row(
        name=f"moe-{name}",
        module=f"k3_kernels.{module}",
        kernel=kernel,
        capability=capability,
        signature=signature | dict.fromkeys(integers, "i32"),
        constants=constants,
        num_warps=config.gate_warps if gate else config.down_warps,
        programs_per_sm=programs_per_sm,
        stack=stack,
        options={"num_stages": config.gate_stages if gate else config.down_stages}
        | ({"maxnreg": most} if most else {}),
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
        # Triton 3.6 spills two registers, 3.9 none.
        _row("many-gate", "gate", MANY, TP8, 90, stack=8),
        _row("many-down-resident", "down", MANY, TP8, 90),
        _row("plain-gate", "gate", PLAIN, TP8, 90, mxfp4=False, programs_per_sm=2),
        _row("plain-down", "down", PLAIN, EP8, 90, mxfp4=False, programs_per_sm=3),
        _row("listed-gate", "gate", LISTED, TP8, 90, programs_per_sm=4),
        _row("listed-down-resident", "down", LISTED, TP8, 90, programs_per_sm=2),
        _row("walked-down", "down", WALKED, TP8, 90, mxfp4=False, programs_per_sm=2),
        _row("boxed-64-gate", "gate", BOXED_64, EP8, 90, mxfp4=False, programs_per_sm=3),
        _row("boxed-64-down", "down", BOXED_64, EP8, 90, mxfp4=False, programs_per_sm=3),
        _row("boxed-gate", "gate", BOXED, EP8, 90, mxfp4=False, programs_per_sm=2),
        # Two programs a multiprocessor for some 80 spilled registers, none of them in the loop: an
        # H200 takes 893 us for skewed load, one program without spills 975; 895 and 904 for even.
        _row("boxed-down", "down", BOXED, EP8, 90, mxfp4=False, programs_per_sm=2, stack=400),
    ]
    rows += [_row("some-gate", "gate", SOME, TP8, capability, programs_per_sm=3)
             for capability in (90, 103)]  # fmt: skip
    return rows


def tile_rows() -> list[aot.Row]:
    """The list of tiles."""
    signature = _pointers("tiles block_experts", dict.fromkeys(("tiles", "block_experts"), "*i32"))
    return [
        aot.Row(
            name="moe-tiles",
            module="k3_kernels.moe_tiles_kernel",
            kernel="list_tiles_kernel",
            capability=90,
            signature=signature | dict.fromkeys(("max_blocks", "max_tiles"), "i32"),
            constants={"TILE": 5, "CHUNK": 1024},
            num_warps=8,
        )
    ]
