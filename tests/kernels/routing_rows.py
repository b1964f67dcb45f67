"""Rows of the compile test for routing, dispatch and finalize at K3's shapes."""

from __future__ import annotations

import aot
from k3_kernels.dispatch import DispatchConfig
from k3_kernels.finalize import FinalizeConfig
from k3_kernels.routing import RouteConfig

__all__ = ["dispatch_rows", "finalize_rows", "routing_rows"]

CAPABILITIES = (90, 103)  # H200, B300


def routing_rows() -> list[aot.Row]:
    """One warp a token for many of them, several for few; the peers' way to select, to compare."""
    signature = {
        "expert_ids_ptr": "*i32", "weights_ptr": "*fp32", "logits_ptr": "*fp32",
        "bias_ptr": "*fp32", "logits_stride": "i32", "scale": "fp32",
    }  # fmt: skip
    return [
        aot.Row(
            name=f"routing-{config.select}-w{config.num_warps}",
            module="k3_kernels.routing_kernel",
            kernel="route_kernel",
            capability=capability,
            signature=signature,
            constants={**config.constants(896, 16, True, 4), "COMPUTE": "tl.float32"},
            num_warps=config.num_warps,
            # Waiting for the exchanges of one row is filled with the work of others.
            programs_per_sm=16 // config.num_warps,
        )
        for config in (RouteConfig(1), RouteConfig(4), RouteConfig(8), RouteConfig(1, "argmax"))
        for capability in CAPABILITIES
    ]


def dispatch_rows() -> list[aot.Row]:
    """Sixteen tokens in one launch, 256 in two."""
    pointers = [
        "sorted",
        "block_experts",
        "padded",
        "counts",
        "ids",
        "map",
        "ranks",
        "slice_counts",
    ]
    integers = ["num_pairs", "max_padded", "max_blocks", "first_expert", "num_experts", "map_size"]
    everything = {f"{name}_ptr": "*i32" for name in pointers} | dict.fromkeys(integers, "i32")
    count_only = {"padded_ptr", "counts_ptr"}
    place_only = {"max_padded", "max_blocks"}
    common = {"HAS_MAP": False, "PDL": False}
    config = DispatchConfig(2, slice_pairs=256)
    kernels = {
        "dispatch_kernel": ({"ranks_ptr", "slice_counts_ptr"}, 4,
                            {"LOG_P": 8, "BLOCK_SIZE": 8, "COUNTS": False}),
        "count_kernel": (count_only, config.num_warps, {"LOG_P": 8}),
        "place_kernel": (place_only, config.place_warps,
                         {"LOG_P": 8, "LOG_E": 10, "ROWS": 16, "BLOCK_SIZE": 16, "COUNTS": False}),
    }  # fmt: skip
    return [
        aot.Row(
            name=f"dispatch-{kernel.removesuffix('_kernel')}",
            module="k3_kernels.dispatch_kernel",
            kernel=kernel,
            capability=capability,
            signature={name: kind for name, kind in everything.items() if name not in without},
            constants={**common, **constants},
            num_warps=num_warps,
        )
        for kernel, (without, num_warps, constants) in kernels.items()
        for capability in CAPABILITIES
    ]


def finalize_rows() -> list[aot.Row]:
    """With the norm a whole row, without it a piece."""
    signature = {
        "out_ptr": "*bf16", "pairs_ptr": "*bf16", "weights_ptr": "*fp32", "ids_ptr": "*i32",
        "map_ptr": "*i32", "norm_ptr": "*bf16", "out_stride": "i32", "pairs_stride": "i32",
        "first_expert": "i32", "num_experts": "i32", "map_size": "i32", "eps": "fp32",
    }  # fmt: skip
    rows = []
    for name, config, norm, local in (
        ("norm", FinalizeConfig(512, 8, 7), True, False),
        ("norm-local", FinalizeConfig(512, 8, 7), True, True),
        ("sum", FinalizeConfig(128, 1), False, False),
    ):
        constants = {
            "WIDTH": 3584, "TOP_K": 16, "HAS_WEIGHTS": True, "HAS_IDS": local, "HAS_MAP": False,
            "HAS_NORM": norm, "BLOCK_D": config.block_d, "PIECES": config.pieces, "PDL": False,
            "COMPUTE": "tl.float32",
        }  # fmt: skip
        rows += [
            aot.Row(
                name=f"finalize-{name}",
                module="k3_kernels.finalize_kernel",
                kernel="finalize_kernel",
                capability=capability,
                signature=signature,
                constants=constants,
                num_warps=config.num_warps,
                programs_per_sm=16 // config.num_warps,
            )
            for capability in CAPABILITIES
        ]
    return rows
