"""Every implementation that the benchmark knows, and which of them this machine has.

Needs PyTorch once adapters are loaded.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from benchmarks.adapter import Absent, Adapter
from benchmarks.cases import OPERATORS

__all__ = ["OURS", "PEERS", "Found", "adapters", "look_for"]

OURS = "ours"
_MODULES = (
    "ours.operators", "ours.moe", "peers.humming", "peers.marlin", "peers.triton_kernels",
    "peers.vllm_triton_moe", "peers.vllm_attn_res", "peers.vllm_router", "peers.vllm_native_kda",
    "peers.vllm_triton_kda", "peers.fla", "peers.torch_peers",
)  # fmt: skip
#: The peers of each operator, by their key in the results.
PEERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("moe_mxfp4_tp8", "moe_mxfp4_ep8"), ("humming", "marlin", "triton_kernels")),
    **dict.fromkeys(
        ("moe_bf16_tp8", "moe_bf16_ep8"), ("vllm_triton", "vllm_triton_tuned", "torch_grouped_mm")
    ),
    "attnres8": ("vllm_triton", "torch"),
    "router": ("vllm_grouped_topk", "vllm_topk_sigmoid", "torch"),
    "kda_decode": ("vllm_native", "vllm_triton_chain"),
    "kda_prefill": ("flash_kda", "vllm_triton", "fla"),
    "kda_recover": (),
    "mla_decode": ("torch",),
}


@dataclass(frozen=True)
class Found:
    """Whether an implementation is here: its version, or why not."""

    adapter: Adapter
    version: str | None
    reason: str | None = None


def adapters() -> list[Adapter]:
    """Return every adapter, ours first."""
    found: list[Adapter] = []
    for module in _MODULES:
        found.extend(importlib.import_module(f"benchmarks.{module}").ADAPTERS)
    return found


def look_for(names: tuple[str, ...] = (), without: tuple[str, ...] = ()) -> dict[str, list[Found]]:
    """Look for the implementations of each operator.

    Parameters
    ----------
    names
        Keep these peers, and ours; all if empty.
    without
        Leave these out, peers or ours.
    """
    result: dict[str, list[Found]] = {operator: [] for operator in OPERATORS}
    for adapter in adapters():
        if (names and adapter.name not in (OURS, *names)) or adapter.name in without:
            continue
        try:
            found = Found(adapter, adapter.find())
        except Absent as reason:
            found = Found(adapter, None, str(reason))
        for operator in adapter.operators:
            result[operator].append(found)
    return result
