"""Public bugs of MXFP4 packing, each as the wrong code that a test must refuse.

The reports: a scale written with its offset of 2 subtracted twice
(https://github.com/vllm-project/vllm/pull/35979, #35562), and a row whose last, short group had no
scale (https://github.com/vllm-project/vllm-ascend/pull/12201).
"""

from __future__ import annotations

import torch

from kimik3_lab.reference import mxfp4


def gain(w: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor) -> float:
    """Size of the unpacked weights in units of the packed ones."""
    back = mxfp4.dequantize(packed, scale)
    return float((back * w).sum() / w.square().sum())


def test_weights_keep_their_size_unless_the_offset_is_subtracted_twice() -> None:
    w = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    packed, scale = mxfp4.quantize(w)
    assert abs(gain(w, packed, scale) - 1) < 0.05
    assert abs(gain(w, packed, scale - 2) - 0.25) < 0.02
    # 6 is the largest magnitude of a group with scale 1: exponent byte 127, not 125.
    _, one = mxfp4.quantize(torch.full((1, 32), 6.0))
    assert one.tolist() == [[127]]


def test_a_row_of_2152_weights_has_68_scales_and_keeps_its_tail() -> None:
    w = torch.randn(3, 2152, generator=torch.Generator().manual_seed(1))
    packed, scale = mxfp4.quantize(w)
    assert scale.shape == (3, 68)
    back = mxfp4.dequantize(packed, scale)
    assert back.shape == w.shape
    tail = w[:, -8:]
    assert float((back[:, -8:] - tail).norm() / tail.norm()) < 0.25
