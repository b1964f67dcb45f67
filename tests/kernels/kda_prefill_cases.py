"""KDA prefill once more as the float64 recurrence, sequence by sequence, and the check built on it.

Shared by the tests of the kernels, by the tests of these tests (the mutants) and by the benchmark.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kda_decode_cases import assert_close
from redzone import RedZone

from kimik3_lab.reference import kda

L2_EPS = 1e-4
F32, F16 = torch.float32, torch.float16
#: Relative to the largest value of a head. bfloat16 rounds the state and all factors in every
#: chunk: 6e-3 in a float64 emulation of just those roundings, and 4e-2 if all keys are alike.
RELATIVE = {F32: 5e-5, F16: 1e-3, torch.bfloat16: 1.5e-2}
ALIKE = 5.0


@dataclass(frozen=True)
class Case:
    """One call. ``lengths`` of the sequences; None in ``checkpoints`` is no checkpoints at all.

    ``alike`` makes all keys of a sequence nearly the same and decays slow: the hardest triangle.
    """

    lengths: tuple[int, ...] = (70,)
    slots: tuple[int, ...] = (1,)
    heads: int = 1
    dim: int = 32
    continued: tuple[bool, ...] | None = None
    checkpoints: tuple[int, ...] | None = None
    checkpoint_slots: tuple[int, ...] | None = None
    dtype: torch.dtype = F32
    gate: float = 1.0
    alike: bool = False
    null_slot: int = -1
    seed: int = 0

    def __str__(self) -> str:
        def joined(numbers: tuple[int, ...]) -> str:
            return "_".join(map(str, numbers))

        parts = [f"H{self.heads}-D{self.dim}-t{joined(self.lengths)}-s{joined(self.slots)}"]
        parts += [f"c{joined(self.checkpoints)}"] if self.checkpoints is not None else []
        parts += ["continued"] * (self.continued is not None) + ["alike"] * self.alike
        parts.append(str(self.dtype).removeprefix("torch."))
        parts += [f"g{self.gate:g}"] * (self.gate != 1)
        parts += [f"null{self.null_slot}"] * (self.null_slot >= 0)
        return "-".join(parts)


CASES = [
    Case(),
    Case(lengths=(1,)),
    Case(lengths=(16,), dtype=F16),
    Case(lengths=(64,), heads=2, continued=(True,)),
    Case(lengths=(65, 0, 15, 130), slots=(3, 0, 1, 2), continued=(True, True, False, True)),
    Case(lengths=(33, 20), slots=(2, -1), dtype=F16),
    Case(lengths=(100,), gate=30.0),
    Case(lengths=(90,), alike=True),
    Case(lengths=(80,), heads=1, dim=128),
    Case(lengths=(20,), heads=2, dim=64, dtype=F16),
    # In the middle of a chunk, at its end, at the end of the sequence, none, at the first token.
    Case(lengths=(150, 70, 20, 30, 66), slots=(0, 1, 2, 3, 4), checkpoints=(100, 64, 20, 0, 1),
         checkpoint_slots=(5, 6, 7, 8, 9), continued=(True, False, True, False, True)),
    # The heads of the smallest models.
    Case(lengths=(70, 30), heads=2, dim=16, slots=(1, 0), continued=(True, False)),
    # A checkpoint that nobody keeps: its slot is padding.
    Case(lengths=(20, 5), dim=16, slots=(2, 1), checkpoints=(16, 3), checkpoint_slots=(0, 3),
         null_slot=0),
]  # fmt: skip


def make_inputs(case: Case, device: str) -> dict[str, torch.Tensor]:
    """Random inputs."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    rows = (sum(case.lengths), case.heads, case.dim)
    num_slots = max((*case.slots, *(case.checkpoint_slots or ())), default=0) + 2
    q, k, v, gate = (normal(*rows) for _ in range(4))
    gate, beta = gate * case.gate, normal(*rows[:2])
    if case.alike:
        k, gate, beta = normal(1, *rows[1:]) + 0.01 * k, gate - 12.0, beta + 3.0
    tensors = {
        "q": q.to(case.dtype),
        "k": k.to(case.dtype),
        "v": v.to(case.dtype),
        "raw_gate": gate.to(case.dtype),
        "raw_beta": beta.to(case.dtype),
        "A_log": normal(case.heads + 2) * 0.5,
        "dt_bias": normal(case.heads * case.dim) * 0.5,
        "state": normal(num_slots, case.heads, case.dim, case.dim),
        "state_slots": torch.tensor(case.slots, dtype=torch.int32),
        "cu_seqlens": torch.tensor((0, *case.lengths), dtype=torch.int32).cumsum(0).int(),
    }
    if case.continued is not None:
        tensors["has_initial_state"] = torch.tensor(case.continued)
    if case.checkpoints is not None:
        tensors["checkpoint_at"] = torch.tensor(case.checkpoints, dtype=torch.int32)
        tensors["checkpoint_slots"] = torch.tensor(case.checkpoint_slots, dtype=torch.int32)
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def reference(case: Case, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs and states as the call must leave them, in float64."""
    inputs = {name: tensor.cpu() for name, tensor in given.items()}
    state = inputs["state"].double()
    q, k, v, raw = (inputs[name].double() for name in ("q", "k", "v", "raw_gate"))
    g = kda.gate(raw, inputs["A_log"].double(), inputs["dt_bias"].double())
    beta = torch.sigmoid(inputs["raw_beta"].double())
    q, k = kda.l2norm(q, L2_EPS) * case.dim**-0.5, kda.l2norm(k, L2_EPS)
    out = torch.zeros_like(v)
    end = 0
    for b, length in enumerate(case.lengths):
        start, end, slot = end, end + length, case.slots[b]
        if slot <= case.null_slot or length == 0:
            continue
        S = kda.from_cache_layout(state[slot])[None]
        if case.continued is None or not case.continued[b]:
            S = torch.zeros_like(S)
        cut = 0 if case.checkpoints is None else case.checkpoints[b]
        for first, last in ((start, start + cut), (start + cut, end)):
            if first < last:
                piece = [x[None, first:last] for x in (q, k, v, g, beta)]
                o, S = kda.recurrent(*piece, S)
                out[first:last] = o[0]
            kept = case.null_slot if case.checkpoint_slots is None else case.checkpoint_slots[b]
            if first == start and cut and kept > case.null_slot:
                state[kept] = kda.to_cache_layout(S[0])
        state[slot] = kda.to_cache_layout(S[0])
    return out, state


def check(case: Case, device: str, *, row_gap: int = 0, config: object = None) -> None:
    """Run the operator on guarded tensors; AssertionError if it differs from the reference."""
    from k3_kernels.kda_prefill import kda_prefill

    plain = make_inputs(case, device)
    expected, expected_state = reference(case, plain)
    zone = RedZone(device)
    gaps = RedZone(device, row_gap)
    guarded = dict(plain)
    for name in ("A_log", "dt_bias", "state", "state_slots", "cu_seqlens"):
        guarded[name] = zone.copy(name, plain[name])
    for name in ("q", "k", "v", "raw_gate"):
        # Rows apart, heads together: a row of the guarded tensor is all heads of a token.
        guarded[name] = gaps.copy(name, plain[name].flatten(1)).unflatten(1, plain[name].shape[1:])
    guarded["raw_beta"] = gaps.copy("raw_beta", plain["raw_beta"])
    out = gaps.empty("out", (sum(case.lengths), case.heads * case.dim), case.dtype)
    kda_prefill(
        **guarded, l2_eps=L2_EPS, out=out.unflatten(1, (case.heads, case.dim)), config=config,
        null_slot=case.null_slot,
    )  # fmt: skip
    zone.check()
    gaps.check()
    for name, before in plain.items():
        if name != "state":
            assert torch.equal(guarded[name], before), f"the kernel changed {name}"
    relative = RELATIVE[case.dtype] * (ALIKE if case.alike else 1.0)
    assert_close("state", guarded["state"], expected_state, relative, dims=2)
    out = out.unflatten(1, (case.heads, case.dim))
    assert_close("out", out.transpose(0, 1), expected.transpose(0, 1), relative, dims=2)
