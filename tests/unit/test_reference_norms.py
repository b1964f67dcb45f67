"""RMSNorm and the type that sums are taken in."""

from __future__ import annotations

import pytest
import torch

from kimik3_lab.reference.norms import RMSNorm, compute_dtype, rms_norm


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_compute_dtype_is_float32_or_wider(dtype: torch.dtype, wide: torch.dtype) -> None:
    assert compute_dtype(dtype) is wide
    assert rms_norm(torch.ones(2, dtype=dtype), torch.ones(2)).dtype is dtype


def test_rms_norm_takes_the_mean_square_with_eps_inside_the_root() -> None:
    x = torch.tensor([[3.0, -1.0]], dtype=torch.float64) * 1e-3
    weight = torch.tensor([2.0, 0.5], dtype=torch.float64)
    root = ((9e-6 + 1e-6) / 2 + 1e-5) ** 0.5
    expected = torch.tensor([[2.0 * 3e-3 / root, -0.5 * 1e-3 / root]], dtype=torch.float64)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected, rtol=1e-14, atol=0)


def test_rms_norm_of_bfloat16_is_rounded_once() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 300).bfloat16(), torch.randn(300).bfloat16()
    exact = rms_norm(x.double(), weight.double())
    assert torch.equal(rms_norm(x, weight), exact.float().bfloat16())


def test_module_uses_its_eps() -> None:
    norm = RMSNorm(1, eps=3.0)
    assert norm(torch.tensor([1.0])).item() == 0.5
