"""Rows of the compile test for what lies between the large kernels of a decode step."""

from __future__ import annotations

import aot
from k3_kernels.few_rows import CONFIGS

__all__ = ["decode_rows"]

CAPABILITIES = (90, 103)  # H200, B300


def decode_rows() -> list[aot.Row]:
    """Products with 9 and 36 rows, gates, norms of rows, and the drafter's rotation."""
    return [row for capability in CAPABILITIES for row in _rows(capability)]


def _rows(capability: int) -> list[aot.Row]:
    strides = dict.fromkeys(("out_stride", "x_stride"), "i32")
    pointers = {"out_ptr": "*bf16", "x_ptr": "*bf16"}
    product = {**pointers, "weight_ptr": "*bf16", "T": "i32", "N": "i32", "K": "i32", **strides,
               "weight_stride": "i32"}  # fmt: skip
    rows = [
        aot.Row(
            name=f"few_rows-t{block_t}-n{config.block_n}-k{config.block_k}",
            module="k3_kernels.few_rows_kernel",
            kernel="few_rows_kernel",
            capability=capability,
            signature=product,
            constants={
                "BLOCK_T": block_t,
                "BLOCK_N": config.block_n,
                "BLOCK_K": config.block_k,
                "STAGES": config.stages,
                "COMPUTE": "tl.bfloat16",
            },
            num_warps=config.num_warps,
        )
        for config in CONFIGS
        # On sm_103 the widest one spills two registers with 64 rows: measuring turns it down.
        for block_t in ((16, 64) if config.block_n < 64 else (16,))
    ]
    rows += [
        aot.Row(
            name=f"gating-{kind}",
            module="k3_kernels.gating_kernel",
            kernel="gating_kernel",
            capability=capability,
            signature={**pointers, "y_ptr": "*bf16", **strides, "y_stride": "i32",
                       "beta": "fp32", "linear_beta": "fp32"},
            constants={"WIDTH": 768, "KIND": kind, "BLOCK": 1024, "COMPUTE": "tl.float32"},
            num_warps=4,
        )
        for kind in ("situ", "silu", "sigmoid")
    ]  # fmt: skip
    norm = {**pointers, "weight_ptr": "*bf16", "gate_ptr": "*bf16", **strides,
            "gate_stride": "i32", "rows": "i32", "eps": "fp32"}  # fmt: skip
    rows += [
        aot.Row(
            name=f"row_norms-{name}",
            module="k3_kernels.row_norms_kernel",
            kernel="row_norms_kernel",
            capability=capability,
            signature=norm,
            constants={**constants, "COMPUTE": "tl.float32"},
            num_warps=4,
        )
        for name, constants in (
            ("latent", {"WIDTH": 512, "HEADS": 1, "TAIL": 64, "HAS_GATE": False, "ROWS": 1,
                        "BLOCK": 512}),
            ("gated", {"WIDTH": 128, "HEADS": 12, "TAIL": 0, "HAS_GATE": True, "ROWS": 8,
                       "BLOCK": 128}),
        )
    ]  # fmt: skip
    rows.append(
        aot.Row(
            name="rotary",
            module="k3_kernels.rotary_kernel",
            kernel="rotate_kernel",
            capability=capability,
            signature={
                "x_ptr": "*bf16",
                "cos_ptr": "*fp32",
                "sin_ptr": "*fp32",
                "x_stride": "i32",
                "head_stride": "i32",
            },
            constants={
                "HEADS": 8,
                "PAIRS": 32,
                "BLOCK_H": 8,
                "BLOCK_P": 32,
                "COMPUTE": "tl.float32",
            },
            num_warps=1,
        )
    )
    return rows
