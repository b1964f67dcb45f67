"""Checks that the KDA operators share: of states, windows and slot numbers, and of gate weights.

Needs PyTorch.
"""

from __future__ import annotations

import torch

from k3_kernels._compat import FLOATS, check_ndim, check_tensor, shape_of

__all__ = [
    "HEAD_DIMS",
    "check_conv_state",
    "check_conv_weight",
    "check_gate_weights",
    "check_sequences",
    "check_slots",
    "check_starts",
    "check_state",
]

#: Head dimensions that the kernels take; K3 has 128, the smallest are for models to learn on.
HEAD_DIMS = (16, 32, 64, 128)


def check_state(
    operator: str, state: torch.Tensor, *, like: torch.Tensor, layers: bool = False
) -> tuple[int, int, int]:
    """Check ``[slots, H, V, K]`` (``[layers, slots, H, V, K]``); return H, K and slots."""
    where = f"k3_kernels.{operator}: state"
    layout = "[layers, slots, H, V, K]" if layers else "[slots, H, V, K]"
    check_ndim(operator, "state", state, layout)
    slots, heads, values, keys = state.shape[-4:]
    if values != keys or keys not in HEAD_DIMS:
        raise ValueError(
            f"{where} has heads of {values} values and {keys} keys, expected both the same and one "
            f"of {', '.join(map(str, HEAD_DIMS))}"
        )
    if state.dtype != torch.float32:
        raise TypeError(f"{where} is {state.dtype}, expected torch.float32")
    if state.device != like.device:
        raise ValueError(f"{where} is on {state.device}, expected {like.device}")
    if state.numel() and (state.stride(-1) != 1 or state.stride(-2) != keys):
        raise ValueError(
            f"{where} has strides {tuple(state.stride())}, expected (.., {keys}, 1): the [V, K] of "
            "a head must be contiguous"
        )
    if state.numel() and any(
        s == 0 and n > 1 for s, n in zip(state.stride(), state.shape, strict=True)
    ):
        raise ValueError(f"{where} is an expanded view whose slots share memory: pass a buffer")
    return heads, keys, slots


def check_gate_weights(
    operator: str,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    heads: int,
    head_dim: int,
    *,
    like: torch.Tensor,
    layers: tuple[int, ...] = (),
) -> torch.Tensor:
    """Check ``A_log [*layers, >= H]`` and ``dt_bias``; return that as ``[*layers, H * D]``."""
    if not isinstance(A_log, torch.Tensor) or not A_log.ndim or A_log.shape[-1] < heads:
        raise ValueError(
            f"k3_kernels.{operator}: A_log must hold a value for each of {heads} heads, "
            f"got {shape_of(A_log)}"
        )
    shape = (*layers, A_log.shape[-1])
    check_tensor(operator, "A_log", A_log, shape, like=like, same_dtype=False)
    split = len(layers) + 2  # dimensions with heads and channels apart
    if isinstance(dt_bias, torch.Tensor) and dt_bias.ndim == split and dt_bias.is_contiguous():
        dt_bias = dt_bias.flatten(-2)
    shape = (*layers, heads * head_dim)
    check_tensor(operator, "dt_bias", dt_bias, shape, like=like, same_dtype=False)
    return dt_bias


def check_conv_weight(
    operator: str, weight: torch.Tensor, channels: int, *, like: torch.Tensor
) -> torch.Tensor:
    """Check ``[C, W]`` or ``[C, 1, W]`` of any strides; return it as ``[C, W]``."""
    where = f"k3_kernels.{operator}: conv_weight"
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"{where} must be a torch.Tensor, got {type(weight).__name__}")
    if weight.ndim == 3 and weight.shape[1] == 1:
        weight = weight[:, 0]
    if weight.ndim != 2 or weight.shape[0] != channels or weight.shape[1] < 2:
        raise ValueError(
            f"{where} has shape {list(weight.shape)}, expected [{channels}, taps] with 2 taps or "
            "more, one row for each channel of q | k | v"
        )
    if weight.dtype not in FLOATS:
        raise TypeError(f"{where} is {weight.dtype}, expected float32, float16 or bfloat16")
    if weight.device != like.device:
        raise ValueError(f"{where} is on {weight.device}, expected {like.device}")
    return weight


def check_conv_state(
    operator: str,
    conv_state: torch.Tensor,
    shape: tuple[int, int],
    taps: int,
    *,
    like: torch.Tensor,
    dtype: torch.dtype | None = None,
) -> int:
    """Check ``[slots, C, L]`` of any strides; return L."""
    where = f"k3_kernels.{operator}: conv_state"
    if not isinstance(conv_state, torch.Tensor):
        raise TypeError(f"{where} must be a torch.Tensor, got {type(conv_state).__name__}")
    if conv_state.ndim != 3 or tuple(conv_state.shape[:2]) != shape:
        raise ValueError(
            f"{where} has shape {list(conv_state.shape)}, expected "
            f"[{shape[0]}, {shape[1]}, columns] (slots, channels, inputs kept)"
        )
    if conv_state.shape[2] < taps - 1:
        raise ValueError(
            f"{where} keeps {conv_state.shape[2]} inputs, but {taps} taps need {taps - 1}"
        )
    dtype = like.dtype if dtype is None else dtype
    if conv_state.dtype != dtype:
        raise TypeError(f"{where} is {conv_state.dtype}, expected {dtype}")
    if conv_state.device != like.device:
        raise ValueError(f"{where} is on {conv_state.device}, expected {like.device}")
    if conv_state.numel() and 0 in conv_state.stride():
        raise ValueError(f"{where} is an expanded view whose slots share memory: pass a buffer")
    return int(conv_state.shape[2])


def check_slots(
    operator: str,
    name: str,
    numbers: torch.Tensor,
    num_slots: int | None,
    null_slot: int,
    *,
    like: torch.Tensor,
    rows: int | None = None,
) -> torch.Tensor:
    """Check int32 numbers of requests and return them as ``[B, S]``.

    With ``num_slots`` they are slots: on the CPU, where looking at them does not stop a GPU, each
    must exist and occur once.
    """
    where = f"k3_kernels.{operator}: {name}"
    if not isinstance(numbers, torch.Tensor):
        raise TypeError(f"{where} must be a torch.Tensor, got {type(numbers).__name__}")
    if numbers.dtype != torch.int32:
        raise TypeError(f"{where} is {numbers.dtype}, expected torch.int32: convert with .int()")
    if numbers.device != like.device:
        raise ValueError(f"{where} is on {numbers.device}, expected {like.device}")
    if rows is not None and tuple(numbers.shape) != (rows,):
        raise ValueError(f"{where} has shape {list(numbers.shape)}, expected [{rows}]")
    if numbers.ndim == 1:
        if numbers.numel() > 1 and num_slots is None and numbers.stride(0) != 1:
            raise ValueError(f"{where} has stride {numbers.stride(0)}, expected 1")
        numbers = numbers[:, None]
    if numbers.ndim != 2 or numbers.shape[1] < 1:
        raise ValueError(f"{where} has shape {list(numbers.shape)}, expected [B] or [B, S]")
    if num_slots is not None and numbers.device.type == "cpu":
        used = numbers[numbers > null_slot]
        if used.numel() and int(used.max()) >= num_slots:
            raise ValueError(
                f"{where} names slot {int(used.max())}, but there are only {num_slots}"
            )
        if used.unique().numel() != used.numel():
            counts = used.unique(return_counts=True)
            twice = int(counts[0][counts[1] > 1][0])
            raise ValueError(
                f"{where} names slot {twice} more than once: requests cannot share a state"
            )
    return numbers


def check_starts(
    operator: str, cu_seqlens: torch.Tensor, num_tokens: int, batch: int, *, like: torch.Tensor
) -> None:
    """Check int32 ``[B + 1]`` that says where the tokens of B sequences begin.

    On the CPU, where looking at them does not stop a GPU, they must ascend and stay within N: a
    kernel follows them wherever they lead.
    """
    check_slots(operator, "cu_seqlens", cu_seqlens, None, -1, like=like, rows=batch + 1)
    if cu_seqlens.device.type == "cpu":
        starts = cu_seqlens.tolist()
        if starts[0] < 0 or starts[-1] > num_tokens or starts != sorted(starts):
            raise ValueError(
                f"k3_kernels.{operator}: cu_seqlens is {starts}, expected numbers that ascend "
                f"from 0 or more to at most {num_tokens}, the tokens there are"
            )


def check_sequences(
    operator: str,
    state_slots: torch.Tensor,
    num_slots: int,
    null_slot: int,
    *,
    cu_seqlens: torch.Tensor | None,
    has_initial_state: torch.Tensor | None,
    checkpoint_at: torch.Tensor | None,
    checkpoint_slots: torch.Tensor | None,
    like: torch.Tensor,
) -> tuple[int, torch.Tensor | None]:
    """Check what says where sequences are, start and leave states; ``like`` has a row per token.

    Returns their number and ``has_initial_state`` as a kernel can read it.
    """
    where = f"k3_kernels.{operator}:"

    def numbers(name: str, given: torch.Tensor, rows: int, slots: int | None = None) -> None:
        check_slots(operator, name, given, None, null_slot, like=like, rows=rows)
        if slots is not None:
            check_slots(operator, name, given, slots, null_slot, like=like)

    slots = check_slots(operator, "state_slots", state_slots, num_slots, null_slot, like=like)
    batch = slots.shape[0]
    numbers("state_slots", state_slots, batch)
    if (checkpoint_at is None) != (checkpoint_slots is None):
        raise ValueError(f"{where} checkpoint_at and checkpoint_slots go together")
    if checkpoint_at is not None and checkpoint_slots is not None:
        numbers("checkpoint_at", checkpoint_at, batch)
        numbers("checkpoint_slots", checkpoint_slots, batch, num_slots)
    if cu_seqlens is not None:
        check_starts(operator, cu_seqlens, like.shape[0], batch, like=like)
    elif batch != 1:
        raise ValueError(f"{where} {batch} sequences need cu_seqlens to tell them apart")
    if has_initial_state is not None:
        if not isinstance(has_initial_state, torch.Tensor):
            raise TypeError(
                f"{where} has_initial_state must be a torch.Tensor, "
                f"got {type(has_initial_state).__name__}"
            )
        if has_initial_state.dtype == torch.bool:
            has_initial_state = has_initial_state.view(torch.int8)
        if has_initial_state.is_floating_point() or has_initial_state.is_complex():
            raise TypeError(
                f"{where} has_initial_state is {has_initial_state.dtype}, expected bool or int32"
            )
        if tuple(has_initial_state.shape) != (batch,) or has_initial_state.device != like.device:
            raise ValueError(
                f"{where} has_initial_state has shape {list(has_initial_state.shape)} on "
                f"{has_initial_state.device}, expected [{batch}] on {like.device}"
            )
        if batch > 1 and has_initial_state.stride(0) != 1:
            raise ValueError(
                f"{where} has_initial_state has stride {has_initial_state.stride(0)}, expected 1: "
                "call .contiguous() first"
            )
    return batch, has_initial_state
