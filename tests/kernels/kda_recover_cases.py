"""Recovery once more in float64: the recurrence itself over the accepted tokens, and the check.

Shared by the tests of the kernel, by the tests of these tests (the mutants) and by the benchmark.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
from k3_kernels.kda_records import KDARecords
from kda_decode_cases import assert_close
from redzone import RedZone

from kimik3_lab.reference import kda

L2_EPS = 1e-4
TAPS = 4
F32, F16 = torch.float32, torch.float16
RELATIVE = {F32: 2e-5, F16: 2e-5, torch.bfloat16: 2e-5}  # records are exact: what is left is sums


@dataclass(frozen=True)
class Case:
    """One call: slots, counts and boundaries of each request; see the operator."""

    slots: tuple[int, ...] = (3, 1)
    accepted: tuple[int, ...] = (2, 4)
    max_tokens: int = 4
    heads: int = 2
    dim: int = 32
    final: tuple[int, ...] | None = None
    boundary: tuple[int, ...] | None = None
    boundary_slots: tuple[int, ...] | None = None
    window: bool = True
    layers: int | None = None
    dtype: torch.dtype = F32
    gate: float = 1.0
    bounded: bool = True
    null_slot: int = -1
    seed: int = 0

    def __str__(self) -> str:
        def joined(numbers: tuple[int, ...]) -> str:
            return "_".join(map(str, numbers))

        parts = [f"H{self.heads}-D{self.dim}-s{joined(self.slots)}-a{joined(self.accepted)}"]
        parts += [f"f{joined(self.final)}"] if self.final is not None else []
        if self.boundary is not None and self.boundary_slots is not None:
            parts.append(f"b{joined(self.boundary)}-to{joined(self.boundary_slots)}")
        parts += [f"L{self.layers}"] if self.layers is not None else []
        parts.append(str(self.dtype).removeprefix("torch."))
        parts += [f"g{self.gate:g}"] * (self.gate != 1) + ["softplus"] * (not self.bounded)
        parts += [f"null{self.null_slot}"] * (self.null_slot >= 0)
        return "-".join(parts)


CASES = [
    Case(),
    Case(dtype=F16, gate=30.0),
    Case(slots=(), accepted=()),
    Case(slots=(0,), accepted=(9,), max_tokens=9, heads=1, dim=128),
    Case(slots=(2,), accepted=(1,), max_tokens=1, heads=1, dim=64, bounded=False),
    Case(slots=(3, -1, 0), accepted=(1, 3, 0)),
    Case(accepted=(18, 3), max_tokens=18),
    Case(final=(4, 1)),
    # The block ends among the accepted tokens, at the last one, behind them, nowhere.
    Case(slots=(0, 1, 2, 3), accepted=(3, 4, 2, 4), final=(4, 5, 2, 3), boundary=(2, 4, 3, 0),
         boundary_slots=(0, 6, 7, 8)),
    Case(layers=2, boundary=(1, 3), boundary_slots=(0, 2), dtype=F16),
    Case(window=False),
    Case(dim=16, boundary=(1, 0), boundary_slots=(4, -1)),
    # Boundaries that nobody keeps: their slot is padding, or they are none and have one slot.
    Case(dim=16, boundary=(1, 2), boundary_slots=(4, 0), null_slot=0),
    Case(dim=16, boundary=(0, 0), boundary_slots=(0, 0)),
]  # fmt: skip

#: Columns of the windows, and what the second of two requests may have that does not exist there:
#: the kernel leaves it alone. Of five slots, 5 is the first that is none.
LEFT_ALONE: list[tuple[int, dict[str, tuple[int, int]]]] = [
    (5, {"num_accepted": (2, 4)}),
    (9, {"num_accepted": (2, 5)}),
    (9, {"num_accepted": (2, 1), "state_slots": (3, 5), "final_slots": (3, 1)}),
    (9, {"num_accepted": (2, 1), "final_slots": (3, 5)}),
]


def make_inputs(case: Case, device: str) -> dict[str, torch.Tensor]:
    """Random records and states."""
    generator = torch.Generator().manual_seed(case.seed)
    front = () if case.layers is None else (case.layers,)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*front, *shape, generator=generator)

    rows = (len(case.slots), case.max_tokens, case.heads, case.dim)
    named = (*case.slots, *(case.final or ()), *(case.boundary_slots or ()))
    num_slots = max(named, default=0) + 2
    wide = case.heads * case.dim
    tensors = {
        "u": normal(*rows),
        "key": normal(*rows).to(case.dtype),
        "gate": (normal(*rows) * case.gate).to(case.dtype),
        "A_log": normal(case.heads + 2) * 0.5,
        "dt_bias": normal(wide) * 0.5,
        "state": normal(num_slots, case.heads, case.dim, case.dim),
        "conv_state": normal(num_slots, TAPS - 2 + case.max_tokens, 3 * wide).to(case.dtype),
    }
    numbers = {
        "state_slots": case.slots,
        "num_accepted": case.accepted,
        "final_slots": case.final,
        "boundary": case.boundary,
        "boundary_slots": case.boundary_slots,
    }
    for name, values in numbers.items():
        if values is not None:
            tensors[name] = torch.tensor(values, dtype=torch.int32)
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def reference(case: Case, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return states and windows as the call must leave them; states in float64."""
    inputs = {name: tensor.cpu() for name, tensor in given.items()}
    state, conv = inputs["state"].double(), inputs["conv_state"].clone()
    layers = [()] if case.layers is None else [(i,) for i in range(case.layers)]
    for layer in layers:
        g = kda.gate(
            inputs["gate"][layer].double(),
            inputs["A_log"][layer].double(),
            inputs["dt_bias"][layer].double(),
            -5.0 if case.bounded else None,
        )
        k = kda.l2norm(inputs["key"][layer].double(), L2_EPS)
        u = inputs["u"][layer].double()
        for b, (slot, count) in enumerate(zip(case.slots, case.accepted, strict=True)):
            if slot <= case.null_slot or count == 0:
                continue
            targets = {count: [slot if case.final is None else case.final[b]]}
            if case.boundary is not None and case.boundary_slots is not None:
                at = case.boundary[b]
                if 1 <= at <= count:
                    targets.setdefault(at, []).append(case.boundary_slots[b])
            S, window = state[layer][slot].clone(), conv[layer][slot].clone()
            for t in range(count):
                S = S * g[b, t].exp()[:, None] + u[b, t][..., None] * k[b, t][:, None]
                for target in targets.get(t + 1, ()):
                    if target <= case.null_slot:
                        continue
                    state[layer][target] = S
                    if case.window:
                        conv[layer][target, : TAPS - 1] = window[t : t + TAPS - 1]
    return state, conv


def check(case: Case, device: str, *, row_gap: int = 0, config: object = None) -> None:
    """Run the operator on guarded tensors; AssertionError if it differs from the reference."""
    from k3_kernels.kda_recover import kda_recover

    plain = make_inputs(case, device)
    expected, expected_conv = reference(case, plain)
    zone = RedZone(device)
    guarded = {name: zone.copy(name, tensor) for name, tensor in plain.items()}
    arguments = dict(guarded)
    records = KDARecords(*(arguments.pop(name) for name in ("u", "key", "gate")))
    arguments["conv_state"] = guarded["conv_state"].transpose(-1, -2)
    if not case.window:
        del arguments["conv_state"]
    kda_recover(
        **arguments, records=records, l2_eps=L2_EPS,
        lower_bound=-5.0 if case.bounded else None, null_slot=case.null_slot, config=config,
    )  # fmt: skip
    zone.check()
    for name, before in plain.items():
        if name not in ("state", "conv_state"):
            assert torch.equal(guarded[name], before), f"the kernel changed {name}"
    assert torch.equal(guarded["conv_state"].cpu(), expected_conv), "wrong window"
    assert_close("state", guarded["state"], expected, RELATIVE[case.dtype], dims=2)


@contextmanager
def nobody_looks() -> Iterator[None]:
    """Let the operators read no numbers in their checks, as on a GPU."""
    with mock.patch("k3_kernels.kda_slots.looks_at", lambda tensor: False):
        module = importlib.import_module("k3_kernels.kda_recover")
        with mock.patch.object(module, "looks_at", lambda tensor: False):
            yield


def check_left_alone(
    what: tuple[int, dict[str, tuple[int, int]]], device: str, *, config: object = None
) -> None:
    """Commit the first of two requests; AssertionError if the second one changed anything."""
    from k3_kernels.kda_recover import kda_recover

    columns, changes = what
    case = Case(dim=16, accepted=(2, 0))
    whole = make_inputs(case, device)
    whole["conv_state"] = whole["conv_state"].repeat(1, 2, 1)[:, :columns].contiguous()
    # A slot more than the operator is told of: there a mistake harms nobody.
    for name in ("state", "conv_state"):
        whole[name] = torch.cat((whole[name], whole[name][:1]))
    expected, expected_conv = reference(case, whole)
    given = {**whole, "state": whole["state"][:-1]}
    given["conv_state"] = whole["conv_state"][:-1].transpose(1, 2)
    for name, numbers in changes.items():
        given[name] = torch.tensor(numbers, dtype=torch.int32, device=device)
    records = KDARecords(*(given.pop(name) for name in ("u", "key", "gate")))
    with nobody_looks():
        kda_recover(**given, records=records, l2_eps=L2_EPS, config=config)
    assert torch.equal(whole["conv_state"].cpu(), expected_conv), "wrong window"
    assert_close("state", whole["state"], expected, RELATIVE[F32], dims=2)
