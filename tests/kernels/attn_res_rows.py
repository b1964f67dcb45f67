"""Rows of the compile test for AttnRes at K3's hidden size."""

from __future__ import annotations

import aot
from k3_kernels.attn_res import AttnResConfig, choose_config

__all__ = ["attn_res_rows"]

HIDDEN = 7168  # Kimi K3's hidden size
CAPABILITIES = (90, 103)  # H200, B300

#: What the measurements on an H200 chose, for it alone: name, constants, programs it has to fit.
MEASURED = (
    ("registers", AttnResConfig(1024, 8, 0, False, 2), 1),
    ("pipeline", AttnResConfig(1024, 4, 4, False), 2),
)


def _signature(pointers: str, strides: str) -> dict[str, str]:
    found = {f"{name}_ptr": "*bf16" for name in pointers.split()}
    return found | {f"{name}_stride": "i32" for name in strides.split()}


def attn_res_rows() -> list[aot.Row]:
    """Return the rule's two regimes with a full bank and at the first layers, and the measured."""
    signature = _signature(
        "out prefix_out blocks prefix delta query key_norm norm",
        "out prefix_out blocks blocks_token prefix delta",
    )
    signature |= {"key_eps": "fp32", "norm_eps": "fp32"}
    kinds = [
        (f"T{tokens}-n{n_blocks}", choose_config(tokens, n_blocks, HIDDEN), n_blocks, programs)
        for tokens, programs in ((1, 1), (8192, 2))
        for n_blocks in (8, 1)
    ]
    kinds += [(name, config, 8, programs) for name, config, programs in MEASURED]
    measured = {name for name, _, _ in MEASURED}
    rows = [
        aot.Row(
            name=f"attn_res-{name}",
            module="k3_kernels.attn_res_kernel",
            kernel="attn_res_kernel",
            capability=capability,
            signature=signature,
            constants={
                **config.constants(n_blocks, HIDDEN, n_blocks == 8, store_prefix=n_blocks == 8),
                "COMPUTE": "tl.float32",
            },
            num_warps=config.num_warps,
            programs_per_sm=programs,
        )
        for name, config, n_blocks, programs in kinds
        for capability in (CAPABILITIES[:1] if name in measured else CAPABILITIES)
    ]
    return rows + _two_launches()


def _two_launches() -> list[aot.Row]:
    config = AttnResConfig(1024, 8, 1, True, slice_h=512)
    common = {"N_BLOCKS": 8, "HIDDEN": HIDDEN, "ROWS": 16, "PDL": False, "COMPUTE": "tl.float32"}
    kernels = (
        (
            "scores",
            _signature(
                "prefix_out blocks prefix delta query key_norm",
                "prefix_out blocks blocks_token prefix delta",
            ),
            {"HAS_DELTA": True, "STORE_PREFIX": True, "SLICE": config.slice_h},
            config.slice_warps,
        ),
        (
            "mix",
            _signature("out blocks prefix norm", "out blocks blocks_token prefix")
            | {"key_eps": "fp32", "norm_eps": "fp32"},
            {"SLICES": HIDDEN // config.slice_h, "BLOCK_H": config.block_h},
            config.num_warps,
        ),
    )
    return [
        aot.Row(
            name=f"attn_res-{name}",
            module="k3_kernels.attn_res_split_kernel",
            kernel=f"attn_res_{name}_kernel",
            capability=capability,
            signature=signature | {"partial_ptr": "*fp32"},
            constants={**common, **constants},
            num_warps=num_warps,
        )
        for name, signature, constants, num_warps in kernels
        for capability in CAPABILITIES
    ]
