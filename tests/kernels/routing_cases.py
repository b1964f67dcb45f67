"""Routing once more in plain float64 PyTorch, and the check built on it.

Shared by the tests of the kernel and by the tests of these tests (the mutants).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from redzone import RedZone

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16

#: Preferences closer than this may be ranked either way where they come from different logits.
RESOLUTION = 5e-7
#: Largest relative error of a weight: a dozen float32 operations.
RELATIVE = 2e-6


@dataclass(frozen=True)
class Case:
    """One call.

    ``logits`` is ``"normal"``, ``"few"`` (three values: nearly everything ties), ``"equal"`` or
    ``"close"`` (preferences closer than a key's resolution); ``bias`` scales the selection bias.
    """

    tokens: int
    experts: int
    top_k: int
    dtype: torch.dtype = F32
    logits: str = "normal"
    bias: float = 0.1
    renormalize: bool = True
    scale: float = 1.0
    seed: int = 0

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        text = f"T{self.tokens}-E{self.experts}-k{self.top_k}-{kind}-{self.logits}-b{self.bias:g}"
        return text + ("" if self.renormalize else "-raw") + f"-x{self.scale:g}"


CASES = [
    Case(2, 896, 16),
    Case(1, 896, 16, logits="few", bias=0.0),
    Case(3, 100, 6, scale=2.5),
    Case(3, 100, 6, F16, renormalize=False),
    # The bias decides, and one expert is switched off by it.
    Case(2, 64, 4, bias=3.0),
    # Ties: the lower id wins, among the chosen and at the edge of the choice.
    Case(2, 40, 5, logits="equal", bias=0.0),
    Case(3, 130, 8, logits="few", bias=0.0, scale=2.5),
    Case(3, 60, 5, F16, logits="few", bias=0.0),
    # Closer than the upper bits of a key can tell: only the exact search is right.
    Case(2, 50, 7, logits="close"),
    Case(1, 1, 1),
    Case(2, 5, 1, scale=0.5),
    Case(2, 16, 16),
    Case(2, 17, 16),
    Case(0, 20, 4),
]


def make_inputs(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits ``[T, E]`` and bias ``[E]`` on the CPU."""
    generator = torch.Generator().manual_seed(case.seed)
    shape = (case.tokens, case.experts)
    if case.logits == "few":
        logits = torch.randint(-1, 2, shape, generator=generator).float()
    elif case.logits == "equal":
        logits = torch.full(shape, 0.5)
    elif case.logits == "close":
        logits = torch.zeros(shape)
    else:
        logits = torch.randn(shape, generator=generator)
    bias = case.bias * torch.randn(case.experts, generator=generator)
    if case.logits == "close":
        # One unit in the last place of 0.5 apart, a quarter of what a key can tell apart.
        bias = torch.randperm(case.experts, generator=generator) * 2.0**-24
    return logits.to(case.dtype), bias


def reference(
    logits: torch.Tensor, bias: torch.Tensor, case: Case
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the choice and every expert's preference in float64; of equal ones the lower id."""
    preference = logits.double().sigmoid() + bias.double()
    ids = preference.argsort(dim=-1, descending=True, stable=True)[:, : case.top_k]
    return ids, preference


def weights_of(scores: torch.Tensor, ids: torch.Tensor, case: Case) -> torch.Tensor:
    """Weigh a choice of experts."""
    weights = scores.gather(1, ids)
    if case.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * case.scale


def check(case: Case, device: str, config: object = None, *, row_gap: int = 0) -> None:
    """Run the operator on guarded tensors; AssertionError if it differs from the reference."""
    from k3_kernels.routing import route

    logits, bias = (tensor.to(device) for tensor in make_inputs(case))
    zone = RedZone(device, row_gap)
    ids_out = RedZone(device)
    shape = (case.tokens, case.top_k)
    ids = ids_out.empty("expert_ids", shape, torch.int32)
    weights = ids_out.empty("weights", shape, F32)
    returned = route(
        zone.copy("logits", logits), zone.copy("bias", bias), case.top_k,
        renormalize=case.renormalize, scale=case.scale, expert_ids_out=ids, weights_out=weights,
        config=config,
    )  # fmt: skip
    zone.check()
    ids_out.check()
    assert returned.expert_ids is ids and returned.weights is weights
    assert_choice(case, logits, bias, ids, weights)


def assert_choice(
    case: Case,
    logits: torch.Tensor,
    bias: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    """Compare a choice with the reference; near ties of different logits may go either way."""
    if not case.tokens:
        return
    expected, preference = reference(logits, bias, case)
    chosen = ids.long()
    assert bool(((chosen >= 0) & (chosen < case.experts)).all()), f"ids outside: {chosen}"
    assert not bool((chosen.sort(-1).values.diff(dim=-1) == 0).any()), "an expert chosen twice"
    if case.logits != "normal":  # float32 is exact here, ties included
        assert torch.equal(chosen, expected), f"expected {expected}, got {chosen}"
    wrong = preference.gather(1, chosen) - preference.gather(1, expected)
    wrong = wrong.abs() > RESOLUTION
    assert not bool(wrong.any()), f"{int(wrong.sum())} choices are not the best: {chosen}"
    scores = logits.double().sigmoid()
    error = (weights.double() / weights_of(scores, chosen, case) - 1).abs()
    assert bool((error <= RELATIVE).all()), f"weights off by {float(error.max()):.3g}"
