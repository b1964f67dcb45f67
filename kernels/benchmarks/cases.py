"""What is measured: operators, their cases at K3's shapes on one rank, and the goal of each case.

Needs the standard library only. Lessons 04 and 06 read it beside the results.

A goal is a ratio, the best peer's time over ours: 1.25 asks for four fifths of the peer's time.
Two kinds deviate. Where a goal names peers, only they count (``against``); what the others reached
stands in the row's ``ratios``. Where no peer has the operator, the goal is a fraction of the floor.
``kda_recover``'s goal and floor are those of committing the states: the convolution's window, which
a server moves as well, is in neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from benchmarks import floors

__all__ = [
    "CASES",
    "OPERATORS",
    "RANKS",
    "Case",
    "Goal",
    "MoeRank",
    "cases",
    "expected_floor_us",
    "find_case",
]


@dataclass(frozen=True)
class Goal:
    """What a case should reach.

    ``against`` limits the peers of a ratio; a fraction of the floor is also met ``or_below_us``,
    where the launch and not the memory sets the time.
    """

    value: float
    kind: Literal["ratio", "fraction_of_floor"] = "ratio"
    against: tuple[str, ...] = ()
    or_below_us: float | None = None


@dataclass(frozen=True)
class MoeRank:
    """An expert layer as one of eight ranks sees it: experts, their width, choices a token."""

    experts: int
    intermediate: int
    top_k: int


#: Tensor parallel cuts every expert; expert parallel gives a rank 112 whole ones and, of a token's
#: 16 choices, two in the mean. The model of it here is exactly two, and no traffic between ranks.
RANKS = {"tp8": MoeRank(896, 384, 16), "ep8": MoeRank(112, 3072, 2)}


@dataclass(frozen=True)
class Case:
    """One measured shape; ``sizes`` are the numbers that its name abbreviates."""

    operator: str
    name: str
    sizes: dict[str, int]
    goal: Goal | None = None
    load: Literal["uniform", "skewed"] = "uniform"
    lengths: tuple[int, ...] = field(default=())


def _moe() -> Iterator[Case]:
    four_bit = {1: 1.35, 4: 1.3, 16: 1.25, 256: 1.15, 1024: 1.0, 2048: 1.0, 8192: 1.0}
    sixteen_bit = {16: 0.97, 64: 0.97, 256: 0.97, 8192: 1.1}
    for rank, at_64 in (("tp8", 1.2), ("ep8", 1.25)):
        goals = {"mxfp4": {**four_bit, 64: at_64}, "bf16": sixteen_bit}
        for weights, wanted in goals.items():
            for load in ("uniform", "skewed"):
                for tokens in (1, 4, 16, 64, 256, 1024, 2048, 8192):
                    goal = Goal(wanted[tokens]) if tokens in wanted else None
                    if load == "skewed" and (goal is None or tokens not in (16, 64, 256, 8192)):
                        continue
                    name = f"T={tokens}" + (",skewed" if load == "skewed" else "")
                    yield Case(f"moe_{weights}_{rank}", name, {"tokens": tokens}, goal, load)


def _by_tokens(operator: str, goals: dict[int, float]) -> Iterator[Case]:
    for tokens, goal in goals.items():
        yield Case(operator, f"T={tokens}", {"tokens": tokens}, Goal(goal))


def _kda() -> Iterator[Case]:
    for heads, alone, many in ((12, 1.5, 1.1), (96, 1.2, 1.05)):
        for batch in (1, 16, 64, 256):
            yield Case(
                "kda_decode", f"H={heads},B={batch}", {"heads": heads, "batch": batch},
                Goal(alone if batch == 1 else many),
            )  # fmt: skip
    triton = ("vllm_triton", "fla")
    for heads, count, length, goal in (
        (12, 1, 8192, Goal(1.5, against=("flash_kda",))),
        (12, 1, 2048, Goal(1.3, against=("flash_kda",))),
        (96, 1, 8192, Goal(1.6, against=triton)),
        (12, 8, 1024, Goal(1.6, against=triton)),
        (96, 8, 1024, Goal(1.6, against=triton)),
    ):
        yield Case(
            "kda_prefill", f"H={heads},{count}x{length}", {"heads": heads}, goal,
            lengths=(length,) * count,
        )  # fmt: skip
    for batch in (1, 16, 64):
        yield Case(
            "kda_recover", f"K=8,B={batch}", {"heads": 12, "batch": batch, "accepted": 8},
            Goal(0.7, "fraction_of_floor", or_below_us=6.0),
        )  # fmt: skip


def _mla() -> Iterator[Case]:
    for batch, length in ((1, 8192), (16, 8192), (1, 65536)):
        for tokens in (1, 9):
            sizes = {"heads": 12, "batch": batch, "tokens": tokens, "length": length}
            yield Case("mla_decode", f"B={batch},T={tokens},L={length}", sizes)


#: Every case, operator by operator.
CASES: tuple[Case, ...] = (
    *_moe(),
    *_by_tokens("attnres8", {1: 1.6, 16: 1.6, 64: 1.5, 256: 1.25, 1024: 1.25, 8192: 1.25}),
    *_by_tokens("router", {1: 1.5, 16: 1.5, 64: 1.5, 256: 1.5, 8192: 2.5}),
    *_kda(),
    *_mla(),
)
OPERATORS: tuple[str, ...] = tuple(dict.fromkeys(case.operator for case in CASES))


def cases(operators: tuple[str, ...] = (), names: tuple[str, ...] = ()) -> list[Case]:
    """Choose cases by operator and by name; an empty choice is all.

    Raises
    ------
    ValueError
        If an operator or a name does not exist; the message lists those that do.

    Examples
    --------
    >>> [case.name for case in cases(("kda_recover",))]
    ['K=8,B=1', 'K=8,B=16', 'K=8,B=64']
    """
    unknown = [operator for operator in operators if operator not in OPERATORS]
    if unknown:
        raise ValueError(f"no operator {', '.join(unknown)}; there are {', '.join(OPERATORS)}")
    within = [case for case in CASES if not operators or case.operator in operators]
    existing = dict.fromkeys(case.name for case in within)
    unknown = [name for name in names if name not in existing]
    if unknown:
        raise ValueError(f"no case {' '.join(unknown)}; there are {' '.join(existing)}")
    return [case for case in within if not names or case.name in names]


def find_case(operator: str, name: str) -> Case | None:
    """Return one case, or None if there is none of that name."""
    return next((c for c in CASES if c.operator == operator and c.name == name), None)


def expected_floor_us(case: Case) -> float:
    """Return a case's floor in microseconds; of an expert layer, the one of even routing.

    A measured row has the floor of the experts that were really drawn. A skewed load hits fewer
    than the even one, whose expected number is taken here.

    Examples
    --------
    >>> case = find_case("moe_mxfp4_tp8", "T=64")
    >>> round(expected_floor_us(case))
    313
    """
    sizes = case.sizes
    if case.operator.startswith("moe_"):
        _, weights, name = case.operator.split("_")
        rank, tokens = RANKS[name], sizes["tokens"]
        distinct = floors.expected_distinct_experts(tokens, rank.top_k, rank.experts)
        weight_bytes = 2.0 if weights == "bf16" else 17 / 32
        return floors.floor_us(
            floors.moe_bytes(tokens, distinct, rank.intermediate, weight_bytes),
            floors.moe_flops(tokens * rank.top_k, rank.intermediate),
        )
    if case.operator == "attnres8":
        return floors.floor_us(floors.attn_res_bytes(sizes["tokens"]))
    if case.operator == "router":
        return floors.floor_us(floors.router_bytes(sizes["tokens"]))
    if case.operator == "kda_decode":
        return floors.floor_us(floors.kda_decode_bytes(sizes["heads"], sizes["batch"]))
    if case.operator == "kda_recover":
        return floors.floor_us(floors.kda_recover_bytes(**sizes))
    if case.operator == "mla_decode":
        return floors.floor_us(floors.mla_decode_bytes(**sizes), floors.mla_decode_flops(**sizes))
    tokens = sum(case.lengths)
    return floors.floor_us(
        floors.kda_prefill_bytes(sizes["heads"], tokens, len(case.lengths)),
        floors.kda_prefill_flops(sizes["heads"], tokens),
    )
