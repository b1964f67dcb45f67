"""Dispatch once more, pair by pair in plain Python, and the check built on it.

Shared by the tests of the kernels and by the tests of these tests (the mutants).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from redzone import RedZone


@dataclass(frozen=True)
class Case:
    """One call: ids run over ``all_experts``, of which the rank holds ``experts``.

    ``routing``: ``"uniform"`` (different experts for a token), ``"one"`` (every pair to the last
    expert), ``"few"`` (three experts of all) or ``"stray"`` (some ids that no expert has).
    ``where``: the local experts start at ``"zero"``, at an id in the ``"middle"``, or are given by
    a ``"map"``.
    """

    tokens: int
    top_k: int
    experts: int
    block: int
    routing: str = "uniform"
    where: str = "zero"
    all_experts: int = 0
    dtype: torch.dtype = torch.int32
    seed: int = 0

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        text = f"T{self.tokens}-k{self.top_k}-E{self.experts}-B{self.block}-{self.routing}-{kind}"
        return text + ("" if self.where == "zero" else f"-{self.where}")

    @property
    def first_expert(self) -> int:
        """The lowest local id of a range."""
        return (self.all_experts - self.experts) // 2 if self.where == "middle" else 0


CASES = [
    Case(3, 2, 3, 2),
    Case(5, 4, 9, 4, dtype=torch.int64),
    Case(1, 16, 896, 8),
    Case(2, 16, 896, 16, dtype=torch.int64),
    Case(1, 1, 1, 1),
    Case(7, 3, 5, 1),
    # One expert gets everything: a full block, one pair more, one pair less.
    *(Case(tokens, 1, 4, 8, routing="one") for tokens in (8, 9, 7)),
    Case(20, 2, 40, 4, routing="few"),
    Case(6, 4, 12, 4, routing="stray"),
    Case(6, 4, 12, 4, routing="stray", dtype=torch.int64),
    # Expert parallel; in the last two nothing falls on this rank.
    Case(9, 4, 5, 2, where="middle", all_experts=17),
    Case(9, 4, 5, 2, where="map", all_experts=17),
    Case(6, 4, 5, 2, routing="stray", where="map", all_experts=17, dtype=torch.int64),
    Case(4, 2, 3, 2, routing="one", where="middle", all_experts=9),
    Case(4, 2, 3, 2, routing="one", where="map", all_experts=9),
    Case(0, 4, 8, 4),
]


def make_inputs(case: Case) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return ids ``[T, k]`` and the map of experts, on the CPU."""
    generator = torch.Generator().manual_seed(case.seed)
    everywhere = case.all_experts or case.experts
    shape = (case.tokens, case.top_k)
    scores = torch.rand(case.tokens, max(everywhere, case.top_k), generator=generator)
    ids = scores.argsort(-1)[:, : case.top_k] % everywhere
    if case.routing == "one":
        ids = torch.full(shape, everywhere - 1)
    elif case.routing == "few":
        ids = torch.randint(0, 3, shape, generator=generator) * (everywhere // 3)
    elif case.routing == "stray":
        low, high = (-(2**31), 2**31 - 1) if case.dtype == torch.int32 else (-(2**40), 2**40)
        ids[0, :3] = torch.tensor([-1, everywhere, high])
        ids[2, 1:] = low
        if case.dtype == torch.int64:
            ids[3, 0] = 2**32  # its lower half is the id of an expert
    expert_map = None
    if case.where == "map":
        expert_map = torch.full((everywhere,), -1, dtype=torch.int32)
        here = torch.randperm(everywhere - 1, generator=generator)[: case.experts]
        expert_map[here] = torch.arange(case.experts, dtype=torch.int32)
    return ids.to(case.dtype), expert_map


def reference(
    case: Case, ids: torch.Tensor, expert_map: torch.Tensor | None
) -> tuple[list[int], list[int], list[int]]:
    """Return sorted pairs with their padding, the expert of each block, and the counts."""
    runs: list[list[int]] = [[] for _ in range(case.experts)]
    table = None if expert_map is None else expert_map.tolist()
    for pair, expert in enumerate(ids.flatten().tolist()):
        local = expert - case.first_expert
        if table is not None:
            local = table[expert] if 0 <= expert < len(table) else -1
        if 0 <= local < case.experts:
            runs[local].append(pair)
    ordered: list[int] = []
    blocks: list[int] = []
    for expert, run in enumerate(runs):
        used = -(-len(run) // case.block)
        ordered += run + [ids.numel()] * (used * case.block - len(run))
        blocks += [expert] * used
    return ordered, blocks, [len(run) for run in runs]


def check(case: Case, device: str, config: object, *, counts: bool = True) -> None:
    """Run the operator with guarded buffers; AssertionError if it differs from the reference."""
    import sys

    from k3_kernels.dispatch import dispatch

    ids, expert_map = make_inputs(case)
    zone = RedZone(device)
    guarded_ids = zone.copy("expert_ids", ids.to(device))
    guarded_map = None if expert_map is None else zone.copy("expert_map", expert_map.to(device))
    operator = sys.modules["k3_kernels.dispatch"]
    allocate = operator._integers
    made = 0

    def guarded_integers(length: int, where: torch.device) -> torch.Tensor:
        nonlocal made
        made += 1
        # What the two launches hand over is not read where no pair is: it may keep the pattern.
        if length == 0:
            return allocate(length, where)
        return zone.empty(f"buffer {made}", (length,), torch.int32, must_be_written=made <= 4)

    operator._integers = guarded_integers
    try:
        done = dispatch(
            guarded_ids, case.experts, case.block, first_expert=case.first_expert,
            expert_map=guarded_map, counts=counts, config=config,
        )  # fmt: skip
    finally:
        operator._integers = allocate
    zone.check()
    ordered, blocks, expected_counts = reference(case, ids, expert_map)
    longest = len(done.sorted_token_ids)
    assert longest % case.block == 0
    assert int(done.num_tokens_post_padded) == len(ordered), "wrong number of used elements"
    padding = [ids.numel()] * (longest - len(ordered))
    assert_equal("pairs", done.sorted_token_ids, ordered + padding)
    unused = [-1] * (longest // case.block - len(blocks))
    assert_equal("experts of blocks", done.block_expert_ids, blocks + unused)
    if counts:
        assert done.expert_counts is not None
        assert_equal("counts", done.expert_counts, expected_counts)
    else:
        assert done.expert_counts is None


def assert_equal(name: str, got: torch.Tensor, expected: list[int]) -> None:
    """Compare and show the surroundings of the first difference only: lists can be long."""
    wanted = torch.tensor(expected, dtype=torch.int32, device=got.device)
    wrong = (got != wanted).nonzero().flatten()
    if wrong.numel():
        first = int(wrong[0])
        near = slice(max(0, first - 3), first + 4)
        raise AssertionError(
            f"{name}: {wrong.numel()} of {len(expected)} differ, around {first} got "
            f"{got[near].tolist()}, expected {wanted[near].tolist()}"
        )
