"""AttnRes once more in plain float64 PyTorch, from the equations, and the check built on it.

Shared by the tests of the kernel and by the tests of these tests (the mutants).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from redzone import RedZone

KEY_EPS = 3e-5
NORM_EPS = 1e-3  # unequal to the other one, to see them swapped

#: Largest error of one element, relative to its size and to the size of its row: one rounding to
#: the output type, and float32 arithmetic over a few thousand summands.
RELATIVE = {torch.float32: 1e-5, torch.float16: 1.05 * 2**-11, torch.bfloat16: 1.05 * 2**-8}
RELATIVE_TO_ROW = 1e-5


@dataclass(frozen=True)
class Case:
    """One call.

    ``scale`` is the size of the activations; at 1e-3 the eps terms matter. ``sharp`` is about the
    size of the logits; at 60 exp overflows unless the largest is subtracted.
    """

    n_blocks: int
    num_tokens: int
    hidden: int
    dtype: torch.dtype = torch.float32
    has_delta: bool = True
    scale: float = 1.0
    sharp: float = 1.5
    seed: int = 0

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        text = f"n{self.n_blocks}-T{self.num_tokens}-H{self.hidden}-{kind}"
        return text + ("" if self.has_delta else "-nodelta") + f"-x{self.scale:g}"


@dataclass(frozen=True)
class Inputs:
    """Arguments of the operator, in its order."""

    blocks: torch.Tensor
    prefix: torch.Tensor
    delta: torch.Tensor | None
    query: torch.Tensor
    key_norm_weight: torch.Tensor
    norm_weight: torch.Tensor


F32, F16 = torch.float32, torch.float16

# Every source count, hidden sizes around powers of two (the mask), and K3's own.
CASES = [
    *(Case(n, 2, 100, dtype) for n in (3, 8, 0, 1, 2, 4, 5, 6, 7) for dtype in (F32, F16)),
    *(Case(3, 2, hidden) for hidden in (1, 2, 15, 16, 17, 127, 128, 129)),
    # Several pieces, the last one full or ragged.
    *(Case(3, 1, hidden) for hidden in (1023, 1025, 2048)),
    *(Case(8, 1, 7168, dtype) for dtype in (F32, F16)),
    *(Case(n, 3, 128, F16, has_delta=False) for n in (0, 1, 8)),
    Case(11, 2, 64),
    Case(0, 0, 100),
    Case(8, 0, 100),
    # Small and large activations: eps decides, and squares leave the range of float16.
    *(Case(5, 2, 100, dtype, scale=1e-3) for dtype in (F32, F16)),
    Case(5, 2, 100, F16, scale=1e3),
]


#: Fewer, for each of the ways to launch that the constants can choose.
FEW_CASES = [
    *(Case(n, 2, 100, dtype) for n in (8, 0, 1, 3) for dtype in (F32, F16)),
    *(Case(3, 2, hidden) for hidden in (1, 15, 17, 63, 64, 65, 129)),
    *(Case(n, 3, 128, F16, has_delta=False) for n in (0, 5)),
    Case(11, 2, 64),
    Case(8, 0, 100),
    Case(5, 2, 100, F32, scale=1e-3),
    Case(5, 2, 100, F16, scale=1e3),
]


def make_inputs(case: Case, device: str) -> Inputs:
    """Random sources of unequal size, and a query that makes the softmax far from uniform."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    rows = (case.num_tokens, case.hidden)
    sizes = case.scale * torch.linspace(0.5, 2.0, max(1, case.n_blocks))[: case.n_blocks]
    tensors = (
        normal(case.n_blocks, *rows) * sizes[:, None, None],
        normal(*rows) * case.scale,
        normal(*rows) * case.scale,
        # Logits of the same size whatever H is.
        normal(case.hidden) * case.sharp / case.hidden**0.5,
        1 + 0.3 * normal(case.hidden),
        1 + 0.3 * normal(case.hidden),
    )
    blocks, prefix, delta, *weights = (tensor.to(device, case.dtype) for tensor in tensors)
    return Inputs(blocks, prefix, delta if case.has_delta else None, *weights)


def reference(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the equations in float64, with the prefix rounded to its type as K3 stores it."""
    prefix = inputs.prefix
    if inputs.delta is not None:
        prefix = (prefix.float() + inputs.delta.float()).to(prefix.dtype)
    sources = [*inputs.blocks.double(), prefix.double()]
    probe = inputs.key_norm_weight.double() * inputs.query.double()
    logits = [(s @ probe) / torch.sqrt(s.square().mean(-1) + KEY_EPS) for s in sources]
    weights = torch.softmax(torch.stack(logits), dim=0)
    mix = sum(w[:, None] * s for w, s in zip(weights, sources, strict=True))
    root = torch.sqrt(mix.square().mean(-1, keepdim=True) + NORM_EPS)
    return inputs.norm_weight.double() * mix / root, prefix


def check(case: Case, device: str, *, row_gap: int = 0, config: object = None) -> None:
    """Run the operator on guarded tensors; AssertionError if it differs from the reference."""
    from k3_kernels import attn_res

    plain = make_inputs(case, device)
    expected, expected_prefix = reference(plain)
    zone = RedZone(device, row_gap)
    guarded = Inputs(
        *(None if v is None else zone.copy(name, v) for name, v in vars(plain).items())
    )
    shape = (case.num_tokens, case.hidden)
    out = zone.empty("out", shape, case.dtype)
    prefix_out = zone.empty("prefix_out", shape, case.dtype)
    returned, new_prefix = attn_res(
        *vars(guarded).values(), key_eps=KEY_EPS, norm_eps=NORM_EPS, out=out, prefix_out=prefix_out,
        config=config,
    )  # fmt: skip
    zone.check()
    assert returned is out and new_prefix is prefix_out
    for name, before in vars(plain).items():
        if before is not None:
            assert torch.equal(getattr(guarded, name), before), f"the kernel changed {name}"
    assert torch.equal(prefix_out, expected_prefix), "wrong new prefix"
    assert_close(case, out, expected)


def assert_close(case: Case, out: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare element by element and say which token is worst."""
    if not case.num_tokens:
        return
    row_size = expected.square().mean(-1, keepdim=True).sqrt()
    allowed = RELATIVE[case.dtype] * expected.abs() + RELATIVE_TO_ROW * row_size
    excess = (out.double() - expected).abs() / allowed
    # A NaN compares false with everything, so ask for what must be true.
    if not bool((excess <= 1).all()):
        worst = excess.nan_to_num(nan=torch.inf).amax(-1)
        token = int(worst.argmax())
        raise AssertionError(
            f"token {token} is off by {float(worst[token]):.3g} times the tolerance; "
            f"{int((~(excess <= 1)).sum())} of {excess.numel()} elements are wrong"
        )
