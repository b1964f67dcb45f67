"""The weighted sum and its norm once more in float64, and the check built on them.

Shared by the tests of the kernel and by the tests of these tests (the mutants).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from redzone import RedZone

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
EPS = 1e-3

#: Largest error of one element, relative to its size: one rounding to the output type.
RELATIVE = {F32: 1e-5, F16: 1.05 * 2**-11, BF16: 1.05 * 2**-8}
RELATIVE_TO_ROW = 1e-5


@dataclass(frozen=True)
class Case:
    """One call. ``local``: None, or how the rank's experts are given: ``"range"`` or ``"map"``.

    ``cancels``: the first two choices are large and cancel, before the rest of a sum can be lost.
    """

    tokens: int
    top_k: int
    width: int
    dtype: torch.dtype = F32
    norm: bool = False
    weighted: bool = True
    local: str | None = None
    out_dtype: torch.dtype | None = None
    scale: float = 1.0
    cancels: bool = False
    seed: int = 0

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        text = f"T{self.tokens}-k{self.top_k}-D{self.width}-{kind}"
        for name, shown in (("norm", self.norm), ("ready", not self.weighted),
                            ("cancels", self.cancels)):  # fmt: skip
            text += f"-{name}" if shown else ""
        text += f"-{self.local}" if self.local else ""
        return text + (f"-to-{self.out_dtype}" if self.out_dtype else "") + f"-x{self.scale:g}"


CASES = [
    *(Case(3, 4, 100, dtype, norm) for dtype in (F32, F16) for norm in (False, True)),
    *(Case(2, 2, width, norm=norm) for width in (1, 16, 17, 127, 129) for norm in (False, True)),
    *(Case(1, 16, 3584, dtype, norm) for dtype in (F32, F16) for norm in (False, True)),
    Case(5, 1, 40, norm=True),
    Case(4, 3, 40, weighted=False),
    Case(4, 3, 40, F16, norm=True, weighted=False),
    Case(3, 3, 40, F16, out_dtype=F32),
    Case(3, 3, 40, F32, norm=True, out_dtype=F16),
    *(Case(6, 4, 50, norm=norm, local=kind) for norm in (False, True) for kind in ("range", "map")),
    Case(6, 4, 50, weighted=False, local="range"),
    Case(2, 3, 40, norm=True, scale=1e-3),
    *(Case(2, 4, 40, weighted=weighted, cancels=True) for weighted in (False, True)),
    *(Case(0, 4, 50, norm=norm) for norm in (False, True)),
]


def check(case: Case, device: str, config: object = None, *, row_gap: int = 0) -> None:
    """Run the operator on guarded tensors; AssertionError if it differs from the reference."""
    from k3_kernels.finalize import finalize

    generator = torch.Generator().manual_seed(case.seed)
    shape = (case.tokens, case.top_k)
    # Few bits each, so that float32 sums them exactly: then the sum's rounding has one outcome.
    rows = (torch.randn(*shape, case.width, generator=generator) * 64).round() / 64 * case.scale
    if case.cancels:  # only in the order of the choices is the rest of a sum kept
        rows[:, 0] = 2.0**30
        rows[:, 1] = -rows[:, 0]
    pairs = rows.to(device, case.dtype).view(-1, case.width)
    weights = (torch.rand(shape, generator=generator) * 32).round().to(device) / 32
    if case.cancels:
        weights[:, :2] = 1.0
    norm = (1 + 0.3 * torch.randn(case.width, generator=generator)).to(device)
    ids = torch.randint(0, 9, shape, generator=generator).to(device)
    # Around the map lie numbers of experts that are here: what is read beside it shows.
    around = [0, -1, 0, 1, -1, 2, -1, -1, 3, -1, 1]
    table = torch.tensor(around, dtype=torch.int32, device=device)[1:-1]
    if case.local and case.tokens:
        ids[0, 0], ids[-1, -1] = -1, len(table)  # of no expert

    here = torch.ones(shape, dtype=torch.bool, device=device)
    arguments: dict[str, object] = {}
    if case.local == "range":
        here = (ids >= 2) & (ids < 6)
        arguments = {"expert_ids": ids, "first_expert": 2, "num_experts": 4}
    elif case.local == "map":
        known = (ids >= 0) & (ids < len(table))
        here = known & (table[ids.where(known, 0)] >= 0)
        arguments = {"expert_ids": ids.int(), "expert_map": table, "num_experts": 4}
    if case.local:
        pairs[~here.flatten()] = torch.nan  # never written by any expert

    out_dtype = case.out_dtype or case.dtype
    total = pairs.double().nan_to_num(nan=0.0).view(*shape, case.width)
    if case.weighted:
        total = total * weights.double()[..., None]
    expected = total.sum(1)
    if case.norm:
        kept = expected.to(out_dtype).double()
        root = torch.sqrt(kept.square().mean(-1, keepdim=True) + EPS)
        expected = norm.double() * kept / root

    zone = RedZone(device, row_gap)
    out = zone.empty("out", (case.tokens, case.width), out_dtype)
    if case.norm:
        arguments["norm_weight"] = norm
    returned = finalize(
        zone.copy("pairs", pairs), weights if case.weighted else None, case.top_k,
        eps=EPS, out=out, config=config, **arguments,
    )  # fmt: skip
    zone.check()
    assert returned is out
    if not case.tokens:
        return
    row_size = expected.square().mean(-1, keepdim=True).sqrt()
    allowed = RELATIVE[out_dtype] * expected.abs() + RELATIVE_TO_ROW * row_size
    error = (out.double() - expected).abs()
    # A NaN compares false with everything, so ask for what must be true.
    wrong = ~(error <= allowed)
    if bool(wrong.any()):
        worst = (error / allowed).nan_to_num(nan=torch.inf).amax(-1)
        token = int(worst.argmax())
        raise AssertionError(
            f"token {token} is off by {float(worst[token]):.3g} times the tolerance; "
            f"{int(wrong.sum())} of {wrong.numel()} elements are wrong"
        )
