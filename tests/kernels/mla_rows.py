"""Rows of the compile test for attention over latent pages, 12 heads of K3's on a rank."""

from __future__ import annotations

from typing import Any

import aot
from k3_kernels.mla_decode import MLADecodeConfig, choose_config
from torch import device

__all__ = ["mla_rows"]

HEADS, RANK, WIDTH_PE = 12, 512, 64
CAPABILITIES = (90, 103)  # H200, B300

_POINTERS = {"q": "*bf16", "q_pe": "*bf16", "cache": "*bf16", "table": "*i32", "lengths": "*i32"}
_STRIDES = (
    "out out_head out_split lse lse_head lse_split q q_head q_pe q_pe_head cache_block table "
    "lengths lengths_token"
)


def _attention(
    name: str, config: MLADecodeConfig, page: int = 64, *, split: bool = True
) -> list[aot.Row]:
    constants: dict[str, Any] = {
        "HEADS": HEADS, "RANK": RANK, "WIDTH_PE": WIDTH_PE, "PAGE": page,
        "ROW_STRIDE": RANK + WIDTH_PE, "SPLIT": split, "CAUSAL": True, "HAS_LSE": split,
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "COLUMNS": RANK,
        "COLUMNS_PE": WIDTH_PE, "STAGES": config.stages, "AXIS": 0 if config.rows_left else 1,
        "PDL": config.pdl, "COMPUTE": "tl.bfloat16", "lse_split_stride": 1,
        "lengths_stride": 1, "lengths_token_stride": 0,
    }  # fmt: skip
    signature = {f"{name}_ptr": kind for name, kind in _POINTERS.items()}
    signature |= {"out_ptr": "*fp32" if split else "*bf16", "lse_ptr": "*fp32", "scale": "fp32"}
    signature |= {f"{name}_stride": "i32" for name in _STRIDES.split()}
    signature |= {"num_tokens": "i32", "num_splits": "i32"}
    return [
        aot.Row(
            name=f"mla_decode-{name}", module="k3_kernels.mla_decode_kernel",
            kernel="mla_decode_kernel", capability=capability,
            signature={k: v for k, v in signature.items() if k not in constants},
            constants=constants, num_warps=config.num_warps,
        )
        for capability in CAPABILITIES
    ]  # fmt: skip


def _merge() -> list[aot.Row]:
    signature = {"out_ptr": "*bf16", "lse_ptr": "*fp32", "parts_ptr": "*fp32"}
    signature |= {"part_lse_ptr": "*fp32", "num_splits": "i32"}
    signature |= {f"{name}_stride": "i32" for name in ("out", "out_head", "lse", "lse_head")}
    constants = {
        "HEADS": HEADS, "RANK": RANK, "ROWS": 128, "COLUMNS": 64, "HAS_LSE": False, "PDL": False,
    }  # fmt: skip
    return [
        aot.Row(
            name="mla_decode-merge", module="k3_kernels.mla_decode_kernel",
            kernel="mla_merge_kernel", capability=capability, signature=signature,
            constants=constants, num_warps=4, programs_per_sm=2,
        )
        for capability in CAPABILITIES
    ]  # fmt: skip


def mla_rows() -> list[aot.Row]:
    """Return decode and verification as the rule launches them, and as was best on an H200."""
    one, many = (choose_config(HEADS * tokens, 16, RANK, device("cpu")) for tokens in (1, 9))
    return [
        *_attention("T1", one),
        *_attention("T9", many),
        *_attention("T9-whole", many, split=False),
        *_attention("T9-page16", many, 16)[:1],
        *_attention("T9-measured", MLADecodeConfig(64, 64, 8, 2))[:1],
        *_merge(),
    ]
