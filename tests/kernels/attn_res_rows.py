"""Rows of the compile test for AttnRes at K3's hidden size."""

from __future__ import annotations

from typing import Any

import aot
from k3_kernels.attn_res import AttnResConfig, choose_config

__all__ = ["attn_res_rows"]

HIDDEN = 7168  # Kimi K3's hidden size
CAPABILITIES = (90, 103)  # H200, B300

#: What the measurements on an H200 chose, for it alone: name, constants, programs it has to fit.
MEASURED = (
    ("registers", AttnResConfig(1024, 8, 0, False, 2, True, prefetch=True), 1),
    ("registers-3", AttnResConfig(1024, 8, 0, False, 3, True), 1),
    ("pipeline", AttnResConfig(1024, 4, 4, False, 1, True), 2),
    ("pipeline-2", AttnResConfig(1024, 4, 4, False, 2, True, prefetch=True), 1),
    ("pipeline-short", AttnResConfig(1024, 4, 3, False, 2, True), 2),
)
#: Its two launches, and those where both are in slices.
SCORES = AttnResConfig(1024, 8, 1, True, 1, True, 1024, 4, True)
SLICES = AttnResConfig(0, 4, 1, True, 1, True, 1024, 4, True, 1024)


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
            stack=16 if name == "registers-3" else 0,  # with Triton 3.9, not with 3.6
        )
        for name, config, n_blocks, programs in kinds
        for capability in (CAPABILITIES[:1] if name in measured else CAPABILITIES)
    ]
    return rows + _two_launches()


def _two_launches() -> list[aot.Row]:
    plain = AttnResConfig(1024, 8, 1, True, slice_h=512)
    return [
        *_scores_and_mix("", plain, CAPABILITIES),
        *_scores_and_mix("-prefetch", SCORES, CAPABILITIES[:1]),
        *_gram_and_slice(SLICES),
    ]


def _first(config: AttnResConfig) -> tuple[dict[str, str], dict[str, Any]]:
    """Return signature and constants of a first launch."""
    signature = _signature(
        "prefix_out blocks prefix delta query key_norm",
        "prefix_out blocks blocks_token prefix delta",
    )
    return signature, {
        "HAS_DELTA": True, "STORE_PREFIX": True, "SLICE": config.slice_h,
        "PREFETCH": config.prefetch,
    }  # fmt: skip


def _second() -> dict[str, str]:
    """Return the signature of a second launch."""
    signature = _signature("out blocks prefix norm", "out blocks blocks_token prefix")
    return signature | {"key_eps": "fp32", "norm_eps": "fp32"}


def _launches(
    module: str, given: str, config: AttnResConfig, capabilities: tuple[int, ...],
    kernels: dict[str, tuple[str, dict[str, str], dict[str, Any], int]],
) -> list[aot.Row]:  # fmt: skip
    common = {"N_BLOCKS": 8, "HIDDEN": HIDDEN, "ROWS": 16, "PDL": config.pdl}
    return [
        aot.Row(
            name=f"attn_res-{name}",
            module=f"k3_kernels.{module}",
            kernel=kernel,
            capability=capability,
            signature=signature | {given: "*fp32"},
            constants={**common, "COMPUTE": "tl.float32", **constants},
            num_warps=num_warps,
        )
        for name, (kernel, signature, constants, num_warps) in kernels.items()
        for capability in capabilities
    ]


def _scores_and_mix(
    suffix: str, config: AttnResConfig, capabilities: tuple[int, ...]
) -> list[aot.Row]:
    last = {"SLICES": HIDDEN // config.slice_h, "BLOCK_H": config.block_h}
    return _launches("attn_res_split_kernel", "partial_ptr", config, capabilities, {
        f"scores{suffix}": ("attn_res_scores_kernel", *_first(config), config.slice_warps),
        f"mix{suffix}": ("attn_res_mix_kernel", _second(), last, config.num_warps),
    })  # fmt: skip


def _gram_and_slice(config: AttnResConfig) -> list[aot.Row]:
    signature, first = _first(config)
    first |= {"PARTS": config.slice_warps, "STEPS": 1}
    last = {"SLICES": HIDDEN // config.slice_h, "SLICE": config.mix_h, "EARLY": config.preload}
    return _launches("attn_res_gram_kernel", "gram_ptr", config, CAPABILITIES[:1], {
        "gram": ("attn_res_gram_kernel", signature, first, config.slice_warps),
        "slice": ("attn_res_slice_kernel", _second(), last, config.num_warps),
    })  # fmt: skip
