"""The KDA step once more, request by request with the float64 reference, and the check built on it.

Shared by the tests of the kernel, by the tests of these tests (the mutants) and by the benchmark.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from k3_kernels.kda_records import KDARecords
from redzone import RedZone

from kimik3_lab.reference import kda

NORM_EPS = 1e-3
L2_EPS = 1e-4  # unlike the defaults and each other, to see them swapped or forgotten
TAPS = 4

F32, F16 = torch.float32, torch.float16
#: Largest error relative to the largest value of a head: float32 sums, or a rounding of the output.
RELATIVE = {F32: 2e-5, F16: 2e-3, torch.bfloat16: 1.2e-2}
STATE_RELATIVE = {F32: 2e-5, F16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class Case:
    """One call.

    ``tokens`` of each request, None for the plain step of one token. ``slots`` of each request;
    negative ones are padding. ``drafts`` is S of ``state_slots [B, S]``, 0 for the one-dimensional
    form; ``lost`` (request, draft) of them are padding. ``gate`` is the size of the raw gate: at 30
    every decay is either e^-5 or 1.
    """

    heads: int = 2
    dim: int = 32
    slots: tuple[int, ...] = (3, 1)
    tokens: tuple[int, ...] | None = None
    drafts: int = 0
    records: bool = False
    accepted: tuple[int, ...] | None = None
    columns: int = 3
    dtype: torch.dtype = F32
    gate: float = 1.0
    bounded: bool = True
    null_slot: int = -1
    lost: tuple[tuple[int, int], ...] = ()
    seed: int = 0

    def __str__(self) -> str:
        parts = [f"H{self.heads}-D{self.dim}", "s" + "_".join(map(str, self.slots))]
        if self.tokens is not None:
            parts.append("t" + "_".join(map(str, self.tokens)))
        parts += [f"S{self.drafts}"] * (self.drafts > 0) + ["rec"] * self.records
        if self.accepted is not None:
            parts.append("a" + "_".join(map(str, self.accepted)))
        parts.append(str(self.dtype).removeprefix("torch."))
        parts += [f"g{self.gate:g}"] * (self.gate != 1) + ["softplus"] * (not self.bounded)
        parts += [f"null{self.null_slot}"] * (self.null_slot >= 0)
        return "-".join(parts)

    @property
    def num_tokens(self) -> int:
        return len(self.slots) if self.tokens is None else sum(self.tokens)

    @property
    def wide(self) -> bool:
        return self.records or self.drafts > 1


CASES = [
    Case(),
    Case(dtype=F16),
    Case(slots=()),
    Case(heads=1, dim=128, slots=(0,)),
    Case(heads=1, dim=64, slots=(2,), dtype=F16),
    Case(slots=(3, -1, 0)),
    Case(gate=30.0),
    Case(gate=3.0, bounded=False),
    Case(columns=5, accepted=(3, 1)),
    Case(columns=5, accepted=(2, 3), drafts=3),
    # Several tokens: kept, one slot each, or recorded.
    Case(tokens=(3, 1)),
    Case(tokens=(0, 2, 5), slots=(1, 3, 0), dtype=F16),
    Case(tokens=(2, 2, 1), slots=(2, -1, 0)),
    Case(tokens=(3, 2), drafts=4, columns=6),
    Case(tokens=(4, 1), drafts=4, columns=6, accepted=(2, 4), gate=30.0),
    Case(tokens=(3, 1), records=True, columns=6),
    Case(tokens=(0, 4), records=True, columns=6, accepted=(2, 3), dtype=F16),
    Case(heads=1, dim=128, slots=(1,), tokens=(2,), records=True, columns=5),
    Case(heads=1, dim=64, slots=(1,), tokens=(2,), drafts=2, columns=5, bounded=False),
    # The heads of the smallest models.
    Case(dim=16),
    Case(dim=16, tokens=(3, 2), records=True, columns=5),
    Case(dim=16, tokens=(3, 2), drafts=3, columns=5),
    Case(dim=16, tokens=(3, 2), drafts=3, columns=5, null_slot=0, lost=((0, 1), (1, 1))),
]


def make_inputs(case: Case, device: str) -> dict[str, torch.Tensor]:
    """Random inputs; the state is of the size that keys of length 1 make of them."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    n, wide = case.num_tokens, case.heads * case.dim
    num_slots = max(4, *case.slots, len(case.slots) * max(1, case.drafts)) + 2
    per_request = max(1, case.drafts)
    slots = torch.full((len(case.slots), per_request), -1, dtype=torch.int32)
    free = [s for s in range(case.null_slot + 1, num_slots) if s not in case.slots]
    for b, slot in enumerate(case.slots):
        slots[b, 0] = slot
        for s in range(1, per_request):
            slots[b, s] = free.pop(0) if slot >= 0 else -1
    for b, draft in case.lost:
        slots[b, draft] = case.null_slot
    tensors = {
        "qkv": normal(n, 3 * wide).to(case.dtype),
        "raw_gate": (normal(n, wide) * case.gate).to(case.dtype),
        "raw_beta": normal(n, case.heads).to(case.dtype),
        "output_gate": normal(n, wide).to(case.dtype),
        "conv_weight": normal(3 * wide, TAPS) * 0.5,
        "A_log": normal(case.heads + 2) * 0.5,
        "dt_bias": normal(wide) * 0.5,
        "norm_weight": 1 + 0.3 * normal(case.dim),
        "conv_state": normal(num_slots, case.columns, 3 * wide).to(case.dtype),
        "state": normal(num_slots, case.heads, case.dim, case.dim) * 0.3,
        "state_slots": slots if case.drafts else slots[:, 0].contiguous(),
    }
    if case.tokens is not None:
        lengths = torch.tensor((0, *case.tokens), dtype=torch.int32)
        tensors["cu_seqlens"] = lengths.cumsum(0, dtype=torch.int32)
    if case.accepted is not None:
        tensors["num_accepted"] = torch.tensor(case.accepted, dtype=torch.int32)
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def reference(case: Case, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Compute what the call must leave behind, in float64 with the roundings of the layer.

    ``conv_state`` comes back as ``[slots, columns, C]``. Rows of records beyond a request's tokens
    are NaN: they may hold anything.
    """
    inputs = {name: tensor.cpu() for name, tensor in given.items()}
    heads, dim = case.heads, case.dim
    lower_bound = -5.0 if case.bounded else None
    state, conv = inputs["state"].double(), inputs["conv_state"].clone()
    slots = inputs["state_slots"].reshape(len(case.slots), max(1, case.drafts))
    out = torch.zeros(case.num_tokens, heads, dim, dtype=torch.float64)
    lengths = case.tokens if case.tokens is not None else (1,) * len(case.slots)
    room = (len(lengths), max(lengths, default=0), heads, dim)
    records = {name: torch.full(room, torch.nan, dtype=torch.float64) for name in "ukg"}
    end = 0
    for b, length in enumerate(lengths):
        rows = slice(end, end + length)
        end += length
        slot, first = int(slots[b, 0]), 0
        if slot < 0 or length == 0:
            continue
        if case.accepted is not None:
            first = case.accepted[b] - 1
        start = int(slots[b, first]) if case.drafts > 1 else slot
        history = conv[slot, first : first + TAPS - 1].double()
        u = inputs["qkv"][rows]
        y, _ = kda.short_conv(u.double(), inputs["conv_weight"].double(), history.T)
        q, k, v = y.to(case.dtype).double().unflatten(-1, (3, heads, dim)).unbind(-3)
        raw = inputs["raw_gate"][rows].unflatten(-1, (heads, dim))
        parameters = (inputs["A_log"].double(), inputs["dt_bias"].double())
        g = kda.gate(raw.double(), *parameters, lower_bound)
        beta = torch.sigmoid(inputs["raw_beta"][rows].double())
        records["k"][b, :length], records["g"][b, :length] = k, raw
        q, k = kda.l2norm(q, L2_EPS) * dim**-0.5, kda.l2norm(k, L2_EPS)
        S = kda.from_cache_layout(state[start])[None]
        for t in range(length):
            decayed = g[t].exp()[..., None] * S[0]
            error = v[t] - torch.einsum("hkv,hk->hv", decayed, k[t])
            records["u"][b, t] = beta[t][:, None] * error
            step = [x[None, t : t + 1] for x in (q, k, v, g, beta)]
            o, S = kda.recurrent(*step, S)
            gate = inputs["output_gate"][rows][t].double()
            weight = inputs["norm_weight"].double()
            out[rows][t] = kda.gated_norm(o[0, 0], gate, weight, NORM_EPS)
            if case.drafts > 1 and not case.records and int(slots[b, t]) > case.null_slot:
                state[int(slots[b, t])] = kda.to_cache_layout(S[0])
        if case.drafts <= 1 and not case.records:
            state[slot] = kda.to_cache_layout(S[0])
        window = torch.cat((history.to(case.dtype), u))
        kept = window[1:] if case.wide else window[-(TAPS - 1) :]
        conv[slot, : len(kept)] = kept
    return {"out": out, "state": state, "conv_state": conv, **records}


def check(case: Case, device: str, *, row_gap: int = 0, config: object = None) -> None:
    """Run the operator on guarded tensors; AssertionError if it differs from the reference."""
    from k3_kernels.kda_decode import kda_decode

    plain = make_inputs(case, device)
    expected = reference(case, plain)
    zone = RedZone(device)
    gaps = RedZone(device, row_gap)
    # The [V, K] of a head, channels of a window and lists of numbers have no gaps inside.
    dense = ("state", "conv_state", "state_slots", "cu_seqlens", "num_accepted", "A_log")
    guarded = {
        name: (zone if name in dense else gaps).copy(name, tensor) for name, tensor in plain.items()
    }
    arguments = dict(guarded)
    arguments["conv_state"] = guarded["conv_state"].transpose(1, 2)
    out = zone.empty("out", (case.num_tokens, case.heads, case.dim), case.dtype)
    records = None
    if case.records:
        assert case.tokens is not None
        shape = (len(case.tokens), max(case.tokens) + 1, case.heads, case.dim)
        parts = [
            zone.empty(name, shape, dtype, must_be_written=False)
            for name, dtype in (("u", F32), ("key", case.dtype), ("gate", case.dtype))
        ]
        records = KDARecords(*parts)
    returned = kda_decode(
        **arguments, norm_eps=NORM_EPS, l2_eps=L2_EPS, records=records, out=out,
        lower_bound=-5.0 if case.bounded else None, null_slot=case.null_slot, config=config,
    )  # fmt: skip
    zone.check()
    gaps.check()
    assert returned is out
    for name, before in plain.items():
        if name not in ("state", "conv_state"):
            assert torch.equal(guarded[name], before), f"the kernel changed {name}"
    assert torch.equal(guarded["conv_state"].cpu(), expected["conv_state"]), "wrong window"
    assert_close("out", out, expected["out"], RELATIVE[case.dtype])
    assert_close("state", guarded["state"], expected["state"], STATE_RELATIVE[case.dtype], dims=2)
    untouched = sorted(
        set(range(len(plain["state"]))) - set(plain["state_slots"].flatten().tolist())
    )
    assert torch.equal(guarded["state"][untouched], plain["state"][untouched]), (
        "the kernel changed the state of somebody else"
    )
    if records is not None:
        assert case.tokens is not None
        assert torch.equal(guarded["state"], plain["state"]), "a recording step changed the state"
        for b, length in enumerate(case.tokens):
            if case.slots[b] >= 0 and length:
                for name, tensor in (("u", records.u), ("k", records.key), ("g", records.gate)):
                    assert_close(f"records.{name}", tensor[b, :length], expected[name][b, :length],
                          RELATIVE[case.dtype])  # fmt: skip


def check_left_alone(columns: int, device: str) -> None:
    """Verify three tokens of which the window has room for two; AssertionError if it does."""
    from k3_kernels.kda_decode import kda_decode

    case = Case(dim=16, tokens=(columns - TAPS + 2, columns - TAPS + 3), columns=columns)
    plain = make_inputs(case, device)
    given = {name: tensor.clone() for name, tensor in plain.items()}
    arguments = {**given, "conv_state": given["conv_state"].transpose(1, 2)}
    records = KDARecords.empty(2, case.num_tokens, 2, 16, dtype=F32, device=device)
    for tensor in (records.u, records.key, records.gate):
        tensor.fill_(1234.5)
    out = kda_decode(**arguments, records=records)
    first = case.num_tokens // 2
    assert bool(out[:first].isfinite().all()), "the request that fits has no result"
    assert bool(out[first:].isnan().all()), "a request that does not fit has a result"
    slot = case.slots[1]
    assert torch.equal(given["conv_state"][slot], plain["conv_state"][slot]), "its window changed"
    assert bool((records.u[1] == 1234.5).all()), "it has records"
    assert torch.equal(given["state"], plain["state"]), "a recording step changed the state"


def assert_close(
    name: str, result: torch.Tensor, expected: torch.Tensor, relative: float, *, dims: int = 1
) -> None:
    """Compare with the largest element over the last ``dims`` dimensions; name the worst one."""
    if not result.numel():
        return
    result = result.double().cpu()
    scale = expected.abs().amax(tuple(range(-dims, 0)), keepdim=True)
    excess = (result - expected).abs() / (relative * scale + 1e-30)
    if not bool((excess <= 1).all()):
        worst = excess.nan_to_num(nan=torch.inf)
        at = torch.unravel_index(worst.argmax(), worst.shape)
        raise AssertionError(
            f"{name} is off by {float(worst.max()):.3g} times the tolerance at "
            f"{[int(i) for i in at]}; {int((~(excess <= 1)).sum())} of {excess.numel()} are wrong"
        )
