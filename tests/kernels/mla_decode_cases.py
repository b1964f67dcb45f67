"""Attention over latent rows once more in plain float64 PyTorch, and the check built on it.

Shared by the tests of the kernel and by the tests of these tests (the mutants).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from redzone import RedZone

F32, F16 = torch.float32, torch.float16

#: Largest error of an element relative to its size and to the largest value of its row: rounding
#: the result, and adding up in float32; on the matrix units probabilities are rounded, too.
RELATIVE = {torch.float32: 1e-5, torch.float16: 1.05 * 2**-11, torch.bfloat16: 1.05 * 2**-8}
RELATIVE_TO_ROW = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class Case:
    """One call: ``lengths`` of the requests, ``tokens`` of each.

    ``per_token``: lengths are handed over for each token, and fall by more than one from token to
    token. ``sharp`` is about the size of the scores; at 300 e^score overflows unless the highest is
    subtracted. ``table_gap``: entries of the table that no request uses. ``apart``: the lengths are
    a column of a wider tensor.
    """

    lengths: tuple[int, ...]
    tokens: int = 1
    heads: int = 2
    rank: int = 32
    width_pe: int = 16
    page: int = 16
    dtype: torch.dtype = F32
    per_token: bool = False
    splits: int | None = None
    block_m: int = 16
    block_n: int = 16
    rows_left: bool = False
    sharp: float = 3.0
    table_gap: int = 1
    apart: bool = False
    seed: int = 0

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        parts = [
            f"L{'.'.join(map(str, self.lengths))}", f"T{self.tokens}", f"H{self.heads}",
            f"{self.rank}+{self.width_pe}", f"page{self.page}", f"split{self.splits}",
            f"{self.block_m}x{self.block_n}", kind,
        ]  # fmt: skip
        parts += ["per-token"] * self.per_token + ["sharp"] * (self.sharp > 100)
        parts += ["rows-left"] * self.rows_left + ["apart"] * self.apart
        return "-".join(parts)


# One page and many, a part of a page, a tile within a page and pages within a tile; contexts that
# are empty, of one row, and shorter than the tokens that look at them.
CASES = [
    *(Case((40, 5, 17), splits=splits) for splits in (1, 2, 3, None)),
    *(Case((40, 0, 1), dtype=dtype, splits=splits) for dtype in (F32, F16) for splits in (1, 3)),
    *(Case((37, 6), tokens=tokens, splits=2) for tokens in (2, 4, 9)),
    *(Case((35, 33), page=page, tokens=2, splits=2) for page in (1, 5, 8, 16, 48, 64)),
    *(Case((33,), page=64, block_n=32, splits=splits) for splits in (1, 2)),
    # Several programs a request; a program with several tokens, the last of which is cut.
    Case((70, 35), tokens=9, heads=3, splits=2),
    Case((20, 3), tokens=2, heads=12, splits=1),
    Case((20, 31), tokens=1, heads=20),
    Case((20, 31), tokens=2, heads=5, block_m=32),
    # Widths that fill no tile, and no columns of a second kind.
    *(Case((21,), heads=3, rank=rank, width_pe=pe) for rank, pe in ((1, 0), (20, 6), (48, 3))),
    Case((21, 9), heads=3, rank=64, width_pe=0, dtype=F16, splits=2),
    *(Case((21, 40, 0), tokens=3, per_token=True, splits=splits) for splits in (1, 3)),
    *(Case((3, 2), tokens=5, splits=splits) for splits in (1, 2)),
    *(Case((40, 70), sharp=300.0, splits=splits) for splits in (1, 3)),
    Case((0, 0)),
    Case(()),
    Case((4, 4), heads=0),
    Case((16, 32), table_gap=0, splits=2),
    Case((5, 20, 11), splits=2, apart=True),
]

#: Some with the sides of the products exchanged.
OTHER_WAY = [
    Case((40, 5, 17), splits=3, rows_left=True),
    Case((40, 0, 1), dtype=F16, splits=1, rows_left=True),
    Case((37, 6), tokens=9, splits=2, rows_left=True),
    *(Case((35, 33), page=page, splits=2, rows_left=True) for page in (5, 16, 64)),
    Case((21,), heads=3, rank=20, width_pe=6, rows_left=True),
    Case((21, 40, 0), tokens=3, per_token=True, rows_left=True),
    Case((40, 70), sharp=300.0, splits=3, rows_left=True),
]

#: Enough to refuse every mutant.
FEW_CASES = [
    Case((40, 5, 0), tokens=2, splits=3),
    Case((40, 70), sharp=300.0, splits=3),
    Case((35, 33), page=64, tokens=2, splits=2),
    Case((35, 33), page=5, tokens=9, heads=3, splits=1),
    Case((21, 40, 0), tokens=3, per_token=True, splits=1),
    Case((21, 9), heads=3, rank=20, width_pe=6, splits=2),
    Case((21, 9), heads=3, rank=20, width_pe=6, splits=1),
    Case((3, 2), tokens=5, splits=1),
    Case((40, 5, 0), tokens=2, splits=3, rows_left=True),
    Case((5, 20, 11), splits=1, apart=True),
]


@dataclass(frozen=True)
class Inputs:
    """Arguments of the operator, in its order."""

    q_latent: torch.Tensor
    q_pe: torch.Tensor | None
    cache: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor


def make_inputs(case: Case, device: str) -> Inputs:
    """Random queries and rows; NaN wherever no request has a row, and unused entries name those."""
    generator = torch.Generator().manual_seed(case.seed)
    batch, width = len(case.lengths), case.rank + case.width_pe
    needed = [-(-length // case.page) for length in case.lengths]
    blocks = sum(needed) + 2
    numbers = torch.randperm(blocks, generator=generator).int()
    width_of_table = max(needed, default=0) + case.table_gap
    table = torch.full((batch, width_of_table), int(numbers[-1]), dtype=torch.int32)
    cache = torch.full((blocks, case.page, width), torch.nan)
    taken = 0
    for row, (count, length) in enumerate(zip(needed, case.lengths, strict=True)):
        mine = numbers[taken : taken + count]
        table[row, :count] = mine
        taken += count
        for position in range(length):
            block = mine[position // case.page]
            cache[block, position % case.page] = torch.randn(width, generator=generator)
    shape = (batch * case.tokens, case.heads)
    q_latent = torch.randn(*shape, case.rank, generator=generator)
    q_pe = torch.randn(*shape, case.width_pe, generator=generator)
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    if case.per_token:
        back = torch.arange(case.tokens).flip(0) * 7
        lengths = (lengths[:, None] - back).clamp(min=0).int()
    return Inputs(
        q_latent.to(device, case.dtype),
        q_pe.to(device, case.dtype) if case.width_pe else None,
        cache.to(device, case.dtype),
        table.to(device),
        lengths.to(device),
    )


def scale_of(case: Case) -> float:
    """Scores of size ``sharp``."""
    return case.sharp / (case.rank + case.width_pe) ** 0.5


def reference(case: Case, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute every token alone in float64, from the rows that it sees."""
    count, heads, rank = inputs.q_latent.shape
    device = inputs.cache.device
    out = torch.zeros(count, heads, rank, dtype=torch.float64, device=device)
    lse = torch.full((count, heads), -torch.inf, dtype=torch.float64, device=device)
    q = inputs.q_latent.double()
    if inputs.q_pe is not None:
        q = torch.cat((q, inputs.q_pe.double()), -1)
    for request in range(len(case.lengths)):
        for token in range(case.tokens):
            if case.per_token:
                seen = int(inputs.lengths[request, token])
            else:
                seen = int(inputs.lengths[request]) - case.tokens + 1 + token
            if seen <= 0:
                continue
            blocks = inputs.block_table[request, : -(-seen // case.page)].long()
            rows = inputs.cache[blocks].flatten(0, 1)[:seen].double()
            row = request * case.tokens + token
            scores = q[row] @ rows.T * scale_of(case)
            out[row] = scores.softmax(-1) @ rows[:, :rank]
            lse[row] = scores.logsumexp(-1)
    return out, lse


@contextlib.contextmanager
def guarded_parts(zone: RedZone) -> Iterator[None]:
    """Guard what the operator allocates for itself, and fill it with NaN."""
    new_empty = torch.Tensor.new_empty

    def guarded(self: torch.Tensor, shape: object, **options: torch.dtype) -> torch.Tensor:
        if not isinstance(shape, tuple):  # the interpreter's own
            return new_empty(self, shape, **options)
        return zone.empty("parts", shape, options["dtype"], must_be_written=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", guarded)
        yield


def check(case: Case, device: str, *, row_gap: int = 0, config: object = None) -> None:
    """Run the operator on guarded tensors; AssertionError if it differs from the reference."""
    from k3_kernels import mla_decode
    from k3_kernels.mla_decode import MLADecodeConfig

    plain = make_inputs(case, device)
    expected, expected_lse = reference(case, plain)
    zone = RedZone(device, row_gap)
    guarded = Inputs(
        *(None if v is None else zone.copy(name, v) for name, v in vars(plain).items())
    )
    if case.apart:
        wide = torch.stack((plain.lengths, torch.ones_like(plain.lengths)), 1)
        guarded = replace(guarded, lengths=zone.copy("lengths", wide)[:, 0])
    shape = tuple(plain.q_latent.shape)
    out = zone.empty("out", shape, case.dtype)
    lse = zone.empty("lse", shape[:2], F32)
    config = config or MLADecodeConfig(
        case.block_m,
        case.block_n,
        4,
        2,
        case.rows_left,
        merge_columns=16 if case.splits == 3 else 32,
    )
    parts = RedZone(device)
    with guarded_parts(parts):
        returned = mla_decode(
            *vars(guarded).values(), scale=scale_of(case), out=out, lse=lse, splits=case.splits,
            config=config,
        )  # fmt: skip
    zone.check()
    parts.check()
    assert returned is out
    for name, before in vars(plain).items():
        if before is not None:
            after = getattr(guarded, name)
            assert torch.equal(after.nan_to_num(7), before.nan_to_num(7)), f"{name} has changed"
    assert_close(case, out, expected)
    nothing = expected_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, nothing), "wrong tokens see nothing"
    torch.testing.assert_close(
        lse[~nothing].double(), expected_lse[~nothing], rtol=2e-5, atol=2e-5 * case.sharp
    )


def assert_close(case: Case, out: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare element by element and say which row is worst."""
    if not expected.numel():
        return
    largest = expected.abs().amax(-1, keepdim=True)
    to_row = RELATIVE_TO_ROW[case.dtype if out.device.type == "cuda" else F32]
    if case.sharp > 100:
        to_row *= 10  # an error of a score is an error of its exponential
    excess = (out.double() - expected).abs()
    allowed = RELATIVE[case.dtype] * expected.abs() + to_row * largest + 1e-30
    wrong = ~(excess <= allowed)  # a NaN compares false with everything
    if bool(wrong.any()):
        worst = (excess / allowed).nan_to_num(nan=torch.inf).amax(-1)
        token, head = divmod(int(worst.argmax()), worst.shape[1])
        raise AssertionError(
            f"token {token}, head {head} is off by {float(worst.max()):.3g} times the tolerance; "
            f"{int(wrong.sum())} of {wrong.numel()} elements are wrong"
        )
