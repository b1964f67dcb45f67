"""Answer checks of lesson 06. Needs torch.

Each takes the reader's function, tries it on small inputs with known answers, and names the case
and what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["check_1", "check_2", "check_3"]


def check_1(traffic: Callable[[str, int, int, int, int], int]) -> None:
    """Check exercise 1: the bytes that verifying drafts moves for one request in one layer.

    Raises
    ------
    AssertionError
        Naming the case, what came back and what was expected.
    """
    cases = (
        ("snapshots", 8, 4, 12, 128), ("records", 8, 4, 12, 128), ("snapshots", 7, 1, 12, 128),
        ("records", 7, 1, 12, 128), ("records", 7, 8, 96, 128), ("snapshots", 0, 1, 3, 64),
        ("records", 0, 1, 3, 64), ("records", 3, 0, 2, 64),
    )  # fmt: skip
    for case in cases:
        way, drafts, accepted, heads, dim = case
        name = f"{way}, {drafts} drafts, {accepted} accepted, {heads} heads of {dim}"
        want = _moved(*case)
        got = traffic(*case)
        assert got == want, f"{name}: expected {want:,} bytes, got {got!r}"
    print(f"exercise 1: right on {len(cases)} cases")


def _moved(way: str, drafts: int, accepted: int, heads: int, dim: int) -> int:
    state, record, tokens = 4 * dim * dim, (4 + 2 + 2) * dim, 1 + drafts
    if way == "snapshots":
        return heads * state * (1 + tokens)
    commit = 2 * state + accepted * record if accepted else 0
    return heads * (state + tokens * record + commit)


def check_2(
    slices: Callable[[Sequence[str], Sequence[int]], dict[str, tuple[int, int]] | None],
) -> None:
    """Check exercise 2: views for the classes of a mixed batch, or None if rows must be copied.

    Raises
    ------
    AssertionError
        Naming the batch and the class.
    """
    cases: tuple[tuple[Sequence[str], Sequence[int]], ...] = (
        (["verify", "verify", "prefill"], [9, 9, 200]),
        (["prefill", "verify"], [64, 8]),
        (["verify", "prefill", "verify"], [2, 30, 2]),
        (["verify", "decode", "decode", "prefill", "prefill"], [3, 1, 1, 17, 5]),
        (["decode", "verify", "decode"], [1, 4, 1]),
        # An empty request has no rows that could stand between others.
        (["verify", "prefill", "verify"], [2, 0, 2]),
        (["decode", "verify", "decode", "prefill"], [1, 0, 1, 6]),
        (["prefill", "verify"], [0, 3]),
        (["verify", "prefill", "prefill"], [4, 8, 0]),
        (["decode"], [1]),
        (["decode", "prefill", "decode", "prefill"], [1, 2, 0, 3]),
        (["decode", "prefill", "decode", "prefill"], [0, 2, 1, 3]),
        ([], []),
        (["prefill"], [0]),
    )
    for kinds, lengths in cases:
        name = ", ".join(f"{kind} {n}" for kind, n in zip(kinds, lengths, strict=True)) or "nobody"
        rows = [kind for kind, n in zip(kinds, lengths, strict=True) for _ in range(n)]
        given = list(kinds), list(lengths)
        got = slices(*given)
        assert given == (list(kinds), list(lengths)), f"{name}: the batch was changed"
        want = {kind: [i for i, row in enumerate(rows) if row == kind] for kind in rows}
        apart = [kind for kind, at in want.items() if at[-1] - at[0] + 1 != len(at)]
        if apart:
            assert got is None, f"{name}: rows of {apart[0]!r} do not lie together, got {got!r}"
            continue
        assert isinstance(got, dict), f"{name}: views are enough, expected a dict, got {got!r}"
        assert set(got) == set(want), (
            f"{name}: expected the classes that have rows, {sorted(want)}, got {sorted(got)}"
        )
        for kind, at in want.items():
            first, last = got[kind]
            assert (first, last) == (at[0], at[-1] + 1), (
                f"{name}: rows of {kind!r} are {at[0]} to {at[-1] + 1}, got {first} to {last}"
            )
    print(f"exercise 2: right on {len(cases)} batches")


def check_3(starts: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """Check exercise 3: the state that each segment of a sequence starts from.

    Raises
    ------
    AssertionError
        Naming the number of segments and the segment that starts wrongly.
    """
    generator = torch.Generator().manual_seed(6)
    counts = (1, 2, 3, 5)
    for count in counts:
        keys, values, tokens = 5, 3, 4

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        state = normal(keys, values)
        k = torch.nn.functional.normalize(normal(count, tokens, keys), dim=-1)
        v, decay = normal(count, tokens, values), torch.sigmoid(normal(count, tokens, keys))
        beta = torch.sigmoid(normal(count, tokens))
        maps = torch.stack(
            [_walk(torch.eye(keys).double(), k[s], 0 * k[s], decay[s], beta[s]) for s in
             range(count)]
        )  # fmt: skip
        ends = torch.stack([_walk(0 * state, k[s], v[s], decay[s], beta[s]) for s in range(count)])
        want = [state]
        for s in range(count - 1):
            want.append(_walk(want[-1], k[s], v[s], decay[s], beta[s]))
        kept = [x.clone() for x in (state, maps, ends)]
        got = starts(state, maps, ends)
        for name, x, copy in zip(("state", "maps", "ends"), (state, maps, ends), kept, strict=True):
            assert torch.equal(x, copy), f"{count} segments: {name} was changed in place"
        shape = [count, keys, values]
        assert isinstance(got, Tensor) and list(got.shape) == shape, (
            f"{count} segments: expected a tensor {shape}, got "
            f"{list(got.shape) if isinstance(got, Tensor) else got!r}"
        )
        for s in range(count):
            assert torch.allclose(got[s], want[s], rtol=1e-9, atol=1e-9), (
                f"{count} segments: segment {s} does not start where segment {s - 1} ends"
                if s
                else f"{count} segments: segment 0 does not start from the given state"
            )
    print(f"exercise 3: right for {', '.join(map(str, counts))} segments")


def _walk(state: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Take a state ``[K, n]`` through tokens with values ``v [T, n]``."""
    for t in range(len(k)):
        state = decay[t][:, None] * state
        state = state + torch.outer(k[t], beta[t] * (v[t] - state.mT @ k[t]))
    return state
