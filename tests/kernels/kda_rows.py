"""Rows of the compile test for the KDA kernels at K3's shapes."""

from __future__ import annotations

from typing import Any

import aot
from k3_kernels.kda_decode import KDADecodeConfig, verify_config
from k3_kernels.kda_prefill import CHUNK, HALF, KDAPrefillConfig
from k3_kernels.kda_recover import KDARecoverConfig

__all__ = ["kda_rows"]

HEAD_DIM, TAPS, TOKENS = 128, 4, 9
CAPABILITIES = (90, 103)  # H200, B300

_INTEGERS = ("slots", "accepted", "cu_seqlens", "final_slots", "boundary", "boundary_slots",
             "continued", "checkpoint", "checkpoint_slots")  # fmt: skip
_FLOATS = ("taps", "A_log", "dt_bias", "norm", "state", "record_u", "u", "decay", "starts",
           "lengths")  # fmt: skip


def _signature(pointers: str, strides: str, numbers: str) -> dict[str, str]:
    kinds = dict.fromkeys(_INTEGERS, "*i32") | dict.fromkeys(_FLOATS, "*fp32")
    kinds["sums"] = "*fp16"
    signature = {f"{name}_ptr": kinds.get(name, "*bf16") for name in pointers.split()}
    signature |= {f"{name}_stride": "i32" for name in strides.split()}
    real = ("lower_bound", "scale", "norm_eps", "l2_eps")
    return signature | {name: "fp32" if name in real else "i32" for name in numbers.split()}


def _rows(
    name: str, module: str, kernel: str, signature: dict[str, str], constants: dict[str, Any],
    num_warps: int, *, programs_per_sm: int = 1, capabilities: tuple[int, ...] = CAPABILITIES,
    stack: int = 0, **options: Any,
) -> list[aot.Row]:  # fmt: skip
    return [
        aot.Row(
            name=name, module=f"k3_kernels.{module}", kernel=kernel, capability=capability,
            signature={k: v for k, v in signature.items() if k not in constants},
            constants={"COMPUTE": "tl.float32", **constants}, num_warps=num_warps,
            programs_per_sm=programs_per_sm, stack=stack, options=options,
        )
        for capability in capabilities
    ]  # fmt: skip


#: Strides that are 1 wherever the fast layouts are used; Triton then compiles them as constants.
_ONE = {"taps_channel_stride": 1, "conv_channel_stride": 1, "slots_draft_stride": 1}
_DECODE_POINTERS = "out qkv gate beta output_gate taps A_log dt_bias norm conv state slots accepted"
_DECODE_STRIDES = (
    "out qkv gate beta output_gate taps_channel taps_tap conv conv_channel conv_column state "
    "state_head slots slots_draft"
)
_DECODE_NUMBERS = (
    "num_slots num_draft_slots num_columns null_slot lower_bound scale norm_eps l2_eps"
)


def _decode(config: KDADecodeConfig, programs_per_sm: int, **where: Any) -> list[aot.Row]:
    constants = {
        "D": HEAD_DIM, **_ONE, "slots_stride": 1,
        "WIDTH": TAPS, "BOUNDED": True, "HAS_ACCEPTED": False,
        "DRAFT_SLOTS": False, "EARLY": config.early or config.block_v == HEAD_DIM,
        "PDL": config.pdl, "BLOCK_V": config.block_v, "CHUNK": config.chunk,
        "STAGES": config.stages, "PREFETCH": config.prefetch, "PIN": config.pin,
    }  # fmt: skip
    return _rows(
        f"kda_decode-v{config.block_v}-w{config.num_warps}" + ("-pin" if config.pin else ""),
        "kda_decode_kernel", "kda_decode_kernel",
        _signature(_DECODE_POINTERS, _DECODE_STRIDES, _DECODE_NUMBERS),
        constants, config.num_warps, programs_per_sm=programs_per_sm,
        stack=8 if config.pin and config.num_warps == 4 and config.block_v == 64 else 0, **where,
    )  # fmt: skip


def _verify(config: KDADecodeConfig, *, record: bool, drafts: bool) -> list[aot.Row]:
    records = "record_u record_key record_gate"
    strides = " ".join(f"{name} {name}_token" for name in records.split())
    constants = {
        "D": HEAD_DIM, **_ONE, "WIDTH": TAPS,
        "BOUNDED": True, "HAS_ACCEPTED": drafts, "DRAFT_SLOTS": drafts,
        "RECORD": record, "PDL": config.pdl, "CHUNK": config.chunk,
    }  # fmt: skip
    kind = "records" if record else "slots" if drafts else "kept"
    return _rows(
        f"kda_verify-{kind}", "kda_verify_kernel", "kda_verify_kernel",
        _signature(
            f"{_DECODE_POINTERS} cu_seqlens {records}", f"{_DECODE_STRIDES} {strides}",
            f"max_tokens {_DECODE_NUMBERS}",
        ),
        constants, config.num_warps,
    )  # fmt: skip


def _recover(
    config: KDARecoverConfig, programs_per_sm: int, *, boundary: bool, **where: Any
) -> list[aot.Row]:
    strides = "state_layer state state_head A_log_layer dt_bias_layer"
    strides += "".join(f" {name}_layer {name} {name}_token" for name in ("u", "key", "gate"))
    constants = {
        "D": HEAD_DIM, "conv_channel_stride": 1,
        "TOKENS": TOKENS, "BOUNDED": True, "HAS_BOUNDARY": boundary,
        "MOVE_WINDOW": True, "WIDTH": TAPS, "PDL": config.pdl, "BLOCK_V": config.block_v,
        "SLICE": config.slice_v, "ROWS": config.num_warps, "AHEAD": config.ahead,
        "PREFETCH": config.prefetch, "PIN": config.pin, "LATE_U": config.late_u,
    }  # fmt: skip
    return _rows(
        f"kda_recover-v{config.block_v}" + ("-boundary" if boundary else "")
        + ("-prefetch" if config.prefetch else "") + ("-pin" if config.pin else ""),
        "kda_recover_kernel", "kda_recover_kernel",
        _signature(
            "state u key gate A_log dt_bias conv slots accepted final_slots boundary "
            "boundary_slots",
            f"{strides} conv_layer conv conv_channel conv_column",
            "num_requests num_slots num_columns null_slot lower_bound l2_eps",
        ),
        constants, config.num_warps, programs_per_sm=programs_per_sm, **where,
    )  # fmt: skip


def _prefill(
    config: KDAPrefillConfig, programs_per_sm: int, *, checkpoints: bool = False
) -> list[aot.Row]:
    shared = {"D": HEAD_DIM, "VARLEN": True, "BLOCK_B": 8, "CHUNK": CHUNK}
    shared["CHECKPOINTS"] = checkpoints
    counts = "num_tokens num_sequences"
    rows = _rows(
        f"kda_prefill-prepare-k{config.block_k}", "kda_chunks_kernel", "kda_chunks_kernel",
        _signature(
            "q k gate beta A_log dt_bias cu_seqlens checkpoint sums factors solve scores decay "
            "lengths",
            "q k gate beta", f"{counts} lower_bound scale l2_eps",
        ),
        {
            **shared, "BLOCK_K": config.block_k, "HALF": HALF, "OPERAND": "tl.bfloat16",
            "TRIANGLE": "tl.float16", "STAGES": config.chunk_stages,
        },
        config.chunk_warps, programs_per_sm=programs_per_sm, num_stages=1,
    )  # fmt: skip
    signature = _signature(
        "out decay lengths state starts maps cu_seqlens slots continued checkpoint "
        "checkpoint_slots",
        "out state state_head", f"{counts} num_slots null_slot",
    )  # fmt: skip
    signature["continued_ptr"] = "*i8"
    signature["factors"] = f"tensordesc<bf16[{CHUNK}, {HEAD_DIM}]>"
    signature |= dict.fromkeys(("solve", "scores"), f"tensordesc<bf16[{CHUNK}, {CHUNK}]>")
    signature["v"] = f"tensordesc<bf16[{CHUNK}, {config.block_v}]>"
    for survey in (False, True) if config.segments > 1 else (False,):
        constants = {
            **shared, "CONTINUED": True, "SEGMENTS": config.segments, "SURVEY": survey,
            "BLOCK_V": config.block_v, "STAGES": config.scan_stages,
        }  # fmt: skip
        rows += _rows(
            f"kda_prefill-{'survey' if survey else 'walk'}-{config.segments}"
            + ("-checkpoints" if checkpoints else ""),
            "kda_scan_kernel", "kda_scan_kernel", signature, constants, config.scan_warps,
        )  # fmt: skip
    if config.segments > 2:
        rows += _rows(
            "kda_prefill-starts", "kda_scan_kernel", "kda_starts_kernel",
            {"starts_ptr": "*fp32"}
            | dict.fromkeys(("map_high", "map_low"), f"tensordesc<bf16[{HEAD_DIM}, {HEAD_DIM}]>"),
            {"D": HEAD_DIM, "SEGMENTS": config.segments, "BLOCK_V": config.block_v,
             "STAGES": min(2, config.scan_stages)},
            config.scan_warps,
        )  # fmt: skip
    return rows


def _prefill_rows() -> list[aot.Row]:
    """Every launch as the release chooses it for Hopper, and with Blackwell's warps."""
    rows = [
        *_prefill(KDAPrefillConfig(32, 4, 0, 64, 4, 3, 5), 2),
        *_prefill(KDAPrefillConfig(32, 4, 0, 64, 4, 2, 1), 1, checkpoints=True)[2:],
        *_prefill(KDAPrefillConfig(32, 4, 0, 128, 8, 2, 1), 1)[2:],
    ]
    blackwell = [
        *_prefill(KDAPrefillConfig(32, 4, 0, 64, 8, 2, 5), 2),
        *_prefill(KDAPrefillConfig(32, 4, 0, 64, 8, 2, 1), 1, checkpoints=True)[2:],
    ]
    return [row for row in rows if row.capability == 90] + [
        row for row in blackwell if row.capability == 103
    ]


def _conv() -> list[aot.Row]:
    constants = {
        "taps_channel_stride": 1, "conv_channel_stride": 1, "VARLEN": True, "CONTINUED": True,
        "WIDTH": TAPS, "BLOCK_B": 8, "BLOCK_T": 16, "BLOCK_C": 128,
    }  # fmt: skip
    signature = _signature(
        "out x taps conv cu_seqlens slots continued",
        "out x taps_channel taps_tap conv conv_channel conv_column",
        "num_tokens num_sequences num_slots null_slot num_channels",
    ) | {"continued_ptr": "*i8"}
    return _rows("kda_conv", "kda_conv_kernel", "kda_conv_kernel", signature, constants, 4)


#: What the measurements on an H200 chose, for it alone, and programs a multiprocessor has to hold.
HOPPER_DECODE = (
    (KDADecodeConfig(128, 32, 8, 1, True, True, 65536, True), 1),
    (KDADecodeConfig(64, 64, 8, 2, True, True), 1),
    (KDADecodeConfig(64, 64, 4, 2, True, True, 65536, True), 2),  # Triton 3.9 spills 8 bytes
    (KDADecodeConfig(32, 64, 4, 3, True, True, 16384, True), 3),
    (KDADecodeConfig(8, 64, 2, 8, True, True, 16384, True), 6),
    (KDADecodeConfig(8, 64, 2, 6, True, True), 6),
)
HOPPER_RECOVER = (
    (KDARecoverConfig(16, 8, 2, True, 2, prefetch=True), 1),
    (KDARecoverConfig(16, 8, 2, True, 1, prefetch=True, pin=True), 4),
    (KDARecoverConfig(32, 8, 2, True, 2, prefetch=True, pin=True, late_u=True), 4),
    (KDARecoverConfig(128, 8, 2, True, 1, pin=True), 4),
)


def kda_rows() -> list[aot.Row]:
    """Few requests and many, every kind of speculative step, recovery, and the parts of prefill."""
    verify = verify_config_of_release()
    return [
        *_decode(KDADecodeConfig(128, 32, 8, 1, True, True), 1),
        *_decode(KDADecodeConfig(32, 64, 4, 4, False, True), 4),
        *(
            row
            for config, programs in HOPPER_DECODE
            for row in _decode(config, programs, capabilities=(90,))
        ),
        *_verify(verify, record=True, drafts=False),
        *_verify(verify, record=False, drafts=True),
        *_verify(verify, record=False, drafts=False),
        *_recover(KDARecoverConfig(16, 16, 2, True), 5, boundary=False),
        *(
            row
            for config, programs in HOPPER_RECOVER
            for row in _recover(config, programs, boundary=False, capabilities=(90,))
        ),
        *_recover(KDARecoverConfig(16, 16, 2, True), 3, boundary=True),
        *_prefill_rows(),
        *_conv(),
    ]


def verify_config_of_release() -> KDADecodeConfig:
    """Return the constants that a speculative step has without a table."""
    import torch

    return verify_config(12, HEAD_DIM, torch.device("cpu"))
