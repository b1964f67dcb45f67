"""Checks that the KDA operators share: of states and windows, gate weights and numbers.

Needs PyTorch. :mod:`k3_kernels.kda_slots` checks who has which slot.
"""

from __future__ import annotations

import torch

from k3_kernels._compat import FLOATS, check_ndim, check_tensor, shape_of
from k3_kernels._numbers import check_number

__all__ = [
    "HEAD_DIMS",
    "check_conv_state",
    "check_conv_weight",
    "check_gate_weights",
    "check_state",
    "check_step_numbers",
]

#: Head dimensions that the kernels take; K3 has 128, the smallest are for models to learn on.
HEAD_DIMS = (16, 32, 64, 128)


def check_step_numbers(
    operator: str, *, lower_bound: float | None = None, scale: float | None = None, **eps: float
) -> None:
    """Check the numbers of a step: the gate's bound, the scale of the queries, what norms add."""
    if lower_bound is not None:
        check_number(operator, "lower_bound", lower_bound, below=0.0)
    if scale is not None:
        check_number(operator, "scale", scale)
    for name, value in eps.items():
        check_number(operator, name, value, at_least=0.0)


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
