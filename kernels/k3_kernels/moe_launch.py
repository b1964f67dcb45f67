"""What the launches of the expert GEMMs share: weights as arguments, boxes, counters, types.

Needs PyTorch; Triton for boxes. Used by :mod:`k3_kernels.moe_gemm`, whose kernels lesson 04 climbs
to.
"""

from __future__ import annotations

from typing import Any

import torch

from k3_kernels.moe_weights import BF16Experts, ExpertWeights, MXFP4Experts

__all__ = [
    "box",
    "compute_type",
    "counters",
    "fits_box",
    "index_type",
    "register_limit",
    "weight_format",
    "weight_tensors",
]

_COUNTERS: dict[tuple[torch.device, int], torch.Tensor] = {}


def counters(device: torch.device, count: int) -> torch.Tensor:
    """Return zeros that a split leaves as zeros.

    Calls on one stream follow one another and may share them. What a CUDA graph records may run
    beside any stream, so it gets zeros of its own, which every replay writes anew.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    found = _COUNTERS.get((device, stream))
    if found is None or found.numel() < count:
        found = torch.zeros(max(count, 4096), dtype=torch.int32, device=device)
        _COUNTERS[device, stream] = found
    return found


def compute_type(kernels: Any, x: torch.Tensor) -> Any:
    """Return what the matrix units multiply: bfloat16 as it is, everything else as float32."""
    return kernels.tl.bfloat16 if x.dtype == torch.bfloat16 else kernels.tl.float32


def index_type(kernels: Any, rows: torch.Tensor) -> Any:
    """Return the type of an offset into ``rows``."""
    return kernels.tl.int32 if rows.shape[0] * rows.stride(0) < 2**31 else kernels.tl.int64


def weight_tensors(experts: ExpertWeights, which: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return words and scales of ``gate_up`` or ``down``; plain weights stand for both."""
    weights = getattr(experts, which)
    if isinstance(experts, MXFP4Experts):
        return weights.words, weights.scales
    return weights, weights


def weight_format(experts: ExpertWeights, which: str) -> dict[str, bool]:
    """Return what a kernel for many tokens is compiled for."""
    if isinstance(experts, BF16Experts):
        return {"MXFP4": False, "ROTATED": False, "WIDE": False}
    packed = getattr(experts, which)
    return {"MXFP4": True, "ROTATED": packed.layout == "rotated", "WIDE": packed.wide}


def register_limit(most: int) -> dict[str, int]:
    """Return the launch option of a bound on registers, none for 0."""
    return {"maxnreg": most} if most else {}


def fits_box(*tensors: torch.Tensor) -> bool:
    """Whether the copy engine can read the tensors: rows at multiples of 16 bytes."""
    return all(
        tensor.numel() > 0
        and tensor.is_contiguous()
        and tensor.data_ptr() % 16 == 0
        and tensor.shape[-1] * tensor.element_size() % 16 == 0
        for tensor in tensors
    )


def box(tensor: torch.Tensor, rows: int, columns: int) -> Any:
    """Return a descriptor by which the copy engine brings ``rows`` by ``columns`` at a time."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(tensor, [rows, columns])
