"""What lies between the large kernels of a decode step: products, gates, norms, rotations."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="running kernels needs Triton")

from k3_kernels import (
    few_rows_linear,
    gated_norm,
    rotate_pairs,
    row_norm,
    sigmoid_mul,
    silu_and_mul,
    situ_and_mul,
)
from k3_kernels.few_rows import CONFIGS, MAX_ROWS, FewRowsConfig

from kimik3_lab.reference import kda, moe
from kimik3_lab.reference.norms import rms_norm
from kimik3_lab.reference.rope import rotate

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
GUARD = 1234.5


def normal(seed: int, *shape: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(*shape, generator=generator)).to(device)


class Guarded:
    """A piece of wider rows, whose surroundings nobody may write."""

    def __init__(self, rows: int, width: int, device: str) -> None:
        self.whole = torch.full((rows + 2, width + 7), GUARD, device=device)
        self.inside = self.whole[1:-1, 3:-4]

    def check(self) -> None:
        self.inside.fill_(GUARD)
        assert (self.whole == GUARD).all()


@pytest.mark.parametrize("width", [1, 90, 128, 1030])
@pytest.mark.parametrize("kind", ["situ", "silu", "sigmoid"])
def test_gates_equal_their_equations(kind: str, width: int, device: str) -> None:
    x = normal(width, 3, width + 5, device=device)[:, :width]
    y = normal(width + 1, 3, width + 2, device=device)[:, 2:]
    out = Guarded(3, width, device)
    if kind == "situ":
        got = situ_and_mul(x, y, beta=3.0, linear_beta=20.0, out=out.inside)
        expected = moe.situ(x, y, 3.0, 20.0)
    elif kind == "silu":
        got, expected = silu_and_mul(x, y, out=out.inside), torch.nn.functional.silu(x) * y
    else:
        got, expected = sigmoid_mul(x, y, out=out.inside), x * torch.sigmoid(y)
    torch.testing.assert_close(got, expected, **CLOSE)
    assert got.data_ptr() == out.inside.data_ptr()
    out.check()


def test_situ_stays_finite_at_its_bounds(device: str) -> None:
    big = torch.tensor([[80.0, -80.0, 0.0, -80.0]], device=device)
    up = torch.tensor([[1000.0, 1000.0, 1000.0, -1000.0]], device=device)
    torch.testing.assert_close(situ_and_mul(big, up), moe.situ(big, up))


@pytest.mark.parametrize(("width", "tail"), [(16, 0), (60, 30), (33, 64), (512, 64)])
def test_a_row_is_normed_and_its_tail_copied(width: int, tail: int, device: str) -> None:
    x = normal(1, 5, width + tail + 9, device=device)[:, 4 : 4 + width + tail]
    weight, out = normal(2, width, device=device), Guarded(5, width + tail, device)
    got = row_norm(x, weight, eps=1e-3, out=out.inside)
    expected = torch.cat((rms_norm(x[:, :width], weight, 1e-3), x[:, width:]), 1)
    torch.testing.assert_close(got, expected, **CLOSE)
    out.check()


@pytest.mark.parametrize(("heads", "width"), [(1, 16), (3, 64), (3, 128), (5, 40)])
def test_heads_are_normed_then_gated(heads: int, width: int, device: str) -> None:
    size = heads * width
    x, gate = (
        normal(gap, 7, size + gap, device=device)[:, gap:].unflatten(1, (heads, width))
        for gap in (3, 5)
    )
    weight, out = normal(4, width, device=device), Guarded(7, size, device)
    got = gated_norm(x, gate, weight, out=out.inside.unflatten(1, (heads, width)))
    torch.testing.assert_close(got, kda.gated_norm(x, gate, weight), **CLOSE)
    out.check()


def test_pairs_are_rotated_in_place(device: str) -> None:
    x = normal(5, 4, 3, 20, device=device)
    positions = torch.tensor([0, 7, 100, 5000], device=device)
    frequencies = torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64, device=device)
    angle = positions.unsqueeze(-1) * frequencies
    before, piece = x.clone(), x[..., 8:14]
    expected = rotate(piece, positions, frequencies)
    assert rotate_pairs(piece, angle.cos().float(), angle.sin().float()) is piece
    torch.testing.assert_close(piece, expected, **CLOSE)
    assert torch.equal(x[..., :8], before[..., :8]) and torch.equal(x[..., 14:], before[..., 14:])


@pytest.mark.parametrize("config", [None, *CONFIGS, FewRowsConfig(16, 32, 1, 2)], ids=str)
@pytest.mark.parametrize(
    ("rows", "depth", "columns"), [(1, 40, 50), (9, 300, 70), (17, 64, 16), (4, 192, 96)]
)
def test_few_rows_are_multiplied(
    rows: int, depth: int, columns: int, config: FewRowsConfig | None, device: str
) -> None:
    x = normal(6, rows, depth + 8, device=device)[:, 8:]
    weight, out = normal(7, columns, depth, device=device), Guarded(rows, columns, device)
    got = few_rows_linear(x, weight, config=config, out=out.inside)
    torch.testing.assert_close(got, x @ weight.mT, rtol=1e-4, atol=1e-3)
    out.check()


def test_no_heads_have_no_norm(device: str) -> None:
    none, weight = torch.zeros(2, 0, 5, device=device), torch.ones(5, device=device)
    assert gated_norm(none, none, weight).shape == (2, 0, 5)
    with pytest.raises(ValueError, match=r"weight has shape \[4\], expected \[5\]"):
        gated_norm(none, none, weight[:4])


def test_heads_apart_in_any_order_are_rotated(device: str) -> None:
    """Tokens of a head together, and heads of a token: neither shares memory."""
    x = normal(8, 3, 2, 4, device=device)
    angle = normal(9, 3, 2, device=device)
    expected = rotate_pairs(x.clone(), angle.cos(), angle.sin())
    other = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(rotate_pairs(other, angle.cos(), angle.sin()), expected)
    one_head = normal(8, 3, 4, device=device).as_strided((3, 1, 4), (4, 2, 1))
    rotate_pairs(one_head, angle.cos(), angle.sin())


def test_what_does_not_fit_is_refused(device: str) -> None:
    x = torch.zeros(3, 8, device=device)
    with pytest.raises(ValueError, match="T up to 64"):
        few_rows_linear(torch.zeros(MAX_ROWS + 1, 8, device=device), x)
    with pytest.raises(ValueError, match="has shape"):
        few_rows_linear(x, torch.zeros(4, 9, device=device))
    with pytest.raises(ValueError, match=r"gate must be a tensor \[T, D\], got \[8\]"):
        situ_and_mul(x[0], x)
    with pytest.raises(TypeError, match=r"up is .*: convert with"):
        situ_and_mul(x, x.half())
    with pytest.raises(ValueError, match="has shape"):
        sigmoid_mul(x, x[:2])
    for width in (0, 9):
        with pytest.raises(ValueError, match=rf"D from 1 to 8, got \[{width}\]"):
            row_norm(x, torch.ones(width, device=device))
    apart = torch.zeros(3, 2, 6, device=device)[..., :4]
    with pytest.raises(ValueError, match="between heads"):
        gated_norm(x.view(3, 2, 4), apart, torch.ones(4, device=device))
    with pytest.raises(ValueError, match="even P"):
        rotate_pairs(torch.zeros(1, 1, 3, device=device), x[:1, :1], x[:1, :1])
    whole, angles = torch.zeros(20, device=device), torch.zeros(2, 2, device=device)
    with pytest.raises(TypeError, match=r"cos is torch\.float16, expected torch\.float32"):
        rotate_pairs(whole[:16].view(2, 2, 4), angles.half(), angles)
    for strides in ((8, 2, 1), (2, 8, 1), (5, 4, 1)):
        with pytest.raises(ValueError, match="heads share memory"):
            rotate_pairs(whole.as_strided((2, 2, 4), strides), angles, angles)
