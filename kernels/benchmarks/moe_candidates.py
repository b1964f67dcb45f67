"""What the expert kernels could be launched with: the candidates of ``benchmarks.tune_moe``.

Needs PyTorch, through :mod:`k3_kernels`.

A program holds ``block_m + extra_m`` tokens of one expert. A tile for the mean load wastes little
where the load is even, and less than the next power of two: 48 rows hold 36 tokens, 97 times in a
hundred.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from k3_kernels.moe_config import MoEConfig

__all__ = ["CASES", "HIDDEN", "SHAPES", "Case", "families"]

#: Width of the latent tokens that experts read.
HIDDEN = 3584
#: Experts of a rank, width, choices of a token that fall on them: tensor and expert parallel by 8.
SHAPES = {"tp8": (896, 384, 16), "ep8": (112, 3072, 2)}
CASES = tuple(
    (kind, shape, tokens)
    for kind, counts in (
        ("mxfp4", (1, 4, 16, 64, 256, 1024, 2048, 8192)),
        ("bf16", (1, 4, 16, 64, 256, 1024, 2048, 8192)),
    )
    for shape in SHAPES
    for tokens in counts
)
Case = tuple[str, str, int]

#: Gate-up of plain weights: rows a program, warps, stages, most registers.
_PLAIN_GATES = [(64, 4, 3, 0), (64, 4, 4, 0)]


def families(kind: str, shape: str, tokens: int) -> list[list[MoEConfig]]:
    """List what is worth trying; within a family only the fields of one GEMM differ at a time.

    A family's first entry is its base. Entries that change ``gate_`` fields are compared by the
    time of gate-up alone, those that change ``down_`` fields by the time of down alone.
    """
    _, inner, top_k = SHAPES[shape]
    load = tokens * top_k / SHAPES[shape][0]
    short = inner <= 512
    if kind == "bf16":
        return list(_plain(load, short))
    if load > 12:
        return list(_many(load, short))
    return list(_few(tokens * top_k, short))


def _few(pairs: int, short: bool) -> Iterator[list[MoEConfig]]:
    if pairs <= 16:
        gates = [(2, 2, 3), (4, 1, 3), (4, 1, 2), (3, 2, 3), (7, 1, 3), (5, 1, 3)]
    elif pairs <= 64:
        gates = [(1, 2, 3), (2, 2, 3), (1, 1, 3), (2, 1, 3), (4, 1, 3)]
    else:
        gates = [(1, 2, 3), (1, 2, 2), (1, 1, 3), (1, 1, 4), (1, 1, 5)]
    if short:
        rows = (1, 2) if pairs <= 16 else (2, 4, 7) if pairs <= 64 else (4, 7, 14)
        downs = [(1, True, r, s) for r in rows for s in (2, 3)]
    elif pairs <= 64:
        downs = [(split, False, u, s) for split in (1, 2, 4) for u, s in ((2, 3), (1, 4), (1, 3))]
    else:
        downs = [(1, False, u, s) for u, s in ((2, 3), (2, 2), (1, 4), (1, 3))]
    for direct in (True, False) if 64 < pairs <= 256 else (pairs <= 64,):
        base = MoEConfig(direct=direct, down_resident=short)
        family = [
            replace(base, gate_split=split, gate_unroll=unroll, gate_stages=stages)
            for split, unroll, stages in gates
        ]
        for split, resident, third, stages in downs:
            changed = {"down_row_blocks": third} if resident else {"down_unroll": third}
            family.append(replace(family[0], down_split=split, down_stages=stages, **changed))
        yield family


def _many(load: float, short: bool) -> Iterator[list[MoEConfig]]:
    if load <= 24:
        blocks = [(32, 0), (32, 16)]
        gates = [(64, 4, 3, 0), (64, 4, 3, 128)]
    elif load <= 48:
        blocks = [(64, 0), (32, 16)]
        gates = [(64, 4, 3, 0), (64, 4, 3, 128), (64, 4, 3, 168), (128, 8, 3, 128)]
    else:
        blocks = [(128, 32)]
        gates = [(64, 4, 2, 0), (128, 8, 3, 0)]
    if short and load > 48:
        downs = [(128, 8, 14, 3, 0), (128, 8, 28, 3, 0)]
    elif short:
        downs = [(64, 4, 14, 3, 0), (64, 4, 28, 3, 0), (64, 4, 14, 2, 128)]
    else:
        downs = [(128, 8, 1, 3, 0), (128, 8, 2, 3, 0), (128, 8, 1, 3, 80), (64, 4, 1, 4, 0)]
    for block, extra in blocks:
        base = MoEConfig(prefill=True, block_m=block, extra_m=extra, down_resident=short)
        # Triton 3.9 has no room for the tallest tile of a narrow down with ``fit``.
        yield from _family(replace(base, listed=1 if extra == 32 else 0), gates, downs)
        yield from _family(replace(base, fit=True, listed=1), gates, downs)


def _plain(load: float, short: bool) -> Iterator[list[MoEConfig]]:
    if load <= 12:
        base = MoEConfig(prefill=True, block_m=16)
        rows = (1, 4) if short else (1,)
        downs = [(128, 8, r, 3, 0) for r in rows] + [(64, 4, r, 3, 0) for r in rows]
        for columns in (128, 64):
            yield from _family(replace(base, block_k=columns), _PLAIN_GATES, downs)
        return
    block, extra = (128, 32) if load > 48 else (64, 0) if load > 24 else (32, 0)
    base = MoEConfig(prefill=True, block_m=block, extra_m=extra, block_k=64)
    if short:
        downs = [(64, 4, 4, 3, 0), (64, 4, 14, 3, 0), (128, 8, 4, 3, 0), (128, 8, 4, 4, 0)]
    else:
        downs = [(128, 8, 1, 3, 0), (128, 8, 1, 4, 0)]
    if not extra:
        yield from _family(base, _PLAIN_GATES, downs)
    for places in (1,) if short or not extra else (1, 4):
        more = replace(base, fit=True, fit_extra=extra > 0, listed=places)
        family = next(_family(more, _PLAIN_GATES, downs))
        family += next(_family(replace(more, gate_boxed=True), _PLAIN_GATES, []))
        if not short:
            boxes = [(128, 8, 1, 3, 0), (128, 8, 1, 3, 128)]
            family += next(_family(replace(more, down_boxed=True), _PLAIN_GATES[:1], boxes))
        yield family


def _family(
    base: MoEConfig,
    gates: list[tuple[int, int, int, int]],
    downs: list[tuple[int, int, int, int, int]],
) -> Iterator[list[MoEConfig]]:
    family = [
        replace(base, gate_block_n=n, gate_warps=warps, gate_stages=stages, gate_registers=most)
        for n, warps, stages, most in gates
    ]
    for n, warps, rows, stages, most in downs:
        family.append(
            replace(
                family[0], down_block_n=n, down_warps=warps, down_row_blocks=rows,
                down_stages=stages, down_registers=most,
            )
        )  # fmt: skip
    yield family
