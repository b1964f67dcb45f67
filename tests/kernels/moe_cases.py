"""The routed experts once more in plain float64 PyTorch, and the check built on it.

Shared by the tests of the kernels and by the tests of these tests (the mutants).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from redzone import RedZone

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
GRID = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
BETA, LINEAR_BETA = 3.0, 11.0  # not K3's 4 and 25, to see them swapped or built in

#: Largest error of an element relative to its row's size. Float32: tanh(z) as 2 sigmoid(2 z) - 1
#: has an absolute error of 1e-7, much for small z. Half types: the activations between the GEMMs
#: and every pair's output are rounded once.
TOLERANCE = {F32: 3e-4, F16: 2e-2, BF16: 0.1}
#: Largest ||out - reference|| / ||reference||.
NORM_TOLERANCE = {F32: 2e-5, F16: 1e-3, BF16: 6e-3}


@dataclass(frozen=True)
class Case:
    """One call; ``config`` are fields of :class:`k3_kernels.moe_config.MoEConfig`.

    ``experts`` are here, the first of them with the id ``first``; ids run over ``all_experts``.
    ``routing``: ``uniform``, ``skewed`` (half of the pairs to one expert) or ``one`` (every token
    to the same experts). ``scales``: lowest and highest scale byte. ``absent``: one id is -1.
    """

    tokens: int = 2
    top_k: int = 2
    experts: int = 4
    hidden: int = 136
    inner: int = 40
    kind: str = "mxfp4"
    layout: str = "rotated"
    first: int = 0
    all_experts: int = 0
    routing: str = "uniform"
    dtype: torch.dtype = F32
    scales: tuple[int, int] = (118, 122)
    absent: bool = False
    seed: int = 0
    config: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        default = Case()
        parts = [f"T{self.tokens}-k{self.top_k}-E{self.experts}-H{self.hidden}-I{self.inner}"]
        for name in ("kind", "layout", "first", "routing", "scales", "absent"):
            value = getattr(self, name)
            if value != getattr(default, name):
                parts.append(f"{name}={value}".replace(" ", ""))
        if self.dtype != F32:
            parts.append(str(self.dtype).removeprefix("torch."))
        parts += [f"{name}={int(value)}" for name, value in self.config.items()]
        return "-".join(parts)


@dataclass(frozen=True)
class Inputs:
    x: torch.Tensor
    expert_ids: torch.Tensor
    weights: torch.Tensor
    #: mxfp4: packed gate-up, its scale, packed down, its scale; bf16: gate-up, down.
    tensors: tuple[torch.Tensor, ...]


def make_inputs(case: Case, device: str) -> Inputs:
    """Draw a call: random bytes are valid MXFP4, scales of the released checkpoint's size."""
    generator = torch.Generator(device).manual_seed(case.seed)
    on = {"generator": generator, "device": device}

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, **on)

    rows = case.tokens
    x = torch.randn(rows, case.hidden, **on).to(case.dtype)
    total = case.all_experts or case.experts
    scores = torch.rand(rows, total, **on)
    if case.routing == "one":
        scores = scores[:1].expand(rows, -1) if rows else scores
    elif case.routing == "skewed":
        scores[: rows // 2 + 1, case.first] = 2.0
    ids = scores.topk(case.top_k, -1).indices.to(torch.int32).contiguous()
    if case.absent:
        ids[0, 0] = -1
    weights = torch.rand(rows, case.top_k, **on) + 0.1
    low, high = case.scales
    shapes = ((case.experts, 2 * case.inner, case.hidden), (case.experts, case.hidden, case.inner))
    tensors: list[torch.Tensor] = []
    for experts, out, inner in shapes:
        if case.kind == "mxfp4":
            tensors.append(integers(0, 256, experts, out, inner // 2))
            tensors.append(integers(low, high + 1, experts, out, -(-inner // 32)))
        else:
            empty = torch.empty(experts, out, inner, device=device, dtype=case.dtype)
            tensors.append(empty.normal_(std=0.05, generator=generator))
    return Inputs(x, ids, weights, tuple(tensors))


def dequantize(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """MXFP4 bytes as float64, from the format's definition."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    values = GRID.to(packed.device)[codes & 7] * (1 - 2 * (codes >> 3))
    factor = torch.exp2(scale.double() - 127).repeat_interleave(32, -1)
    return values * factor[..., : values.shape[-1]]


def reference(case: Case, inputs: Inputs) -> torch.Tensor:
    """Compute expert after expert in float64, from the quantized weights."""
    x, ids, weights = inputs.x.double(), inputs.expert_ids.long(), inputs.weights.double()
    out = torch.zeros_like(x)
    for expert in range(case.experts):
        tokens, choices = (ids == expert + case.first).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        if case.kind == "mxfp4":
            up_packed, up_scale, down_packed, down_scale = (t[expert] for t in inputs.tensors)
            gate_up, down = dequantize(up_packed, up_scale), dequantize(down_packed, down_scale)
        else:
            gate_up, down = (t[expert].double() for t in inputs.tensors)
        gate, up = (x[tokens] @ gate_up.T).chunk(2, -1)
        act = BETA * torch.tanh(gate / BETA) * torch.sigmoid(gate)
        act = act * LINEAR_BETA * torch.tanh(up / LINEAR_BETA)
        out.index_add_(0, tokens, weights[tokens, choices, None] * (act @ down.T))
    return out


def check(case: Case, device: str, *, row_gap: int = 24, one_call: bool = False) -> None:
    """Run the experts on guarded tensors; AssertionError if they differ from the reference.

    Step by step, so that what lies between the steps is guarded as well, or in one call.
    """
    from k3_kernels import BF16Experts, moe, moe_experts, pack_mxfp4
    from k3_kernels.finalize import finalize
    from k3_kernels.moe_config import MoEConfig, choose_config
    from k3_kernels.moe_gemm import down, gate_up

    inputs = make_inputs(case, device)
    expected = reference(case, inputs)
    gaps, dense = RedZone(device, row_gap), RedZone(device)

    def guard(name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Guard weights, but not gigabytes of them."""
        return dense.copy(name, tensor) if tensor.numel() < 2**26 else tensor

    experts: Any
    if case.kind == "mxfp4":
        experts = pack_mxfp4(*inputs.tensors, layout=case.layout)  # type: ignore[arg-type]
        packed = {
            name: replace(
                matrices,
                words=guard(f"{name} words", matrices.words),
                scales=guard(f"{name} scales", matrices.scales),
            )
            for name, matrices in vars(experts).items()
        }
        experts = replace(experts, **packed)
    else:
        experts = BF16Experts(*map(guard, ("gate_up", "down"), inputs.tensors))
    x = gaps.copy("x", inputs.x)
    ids = dense.copy("expert_ids", inputs.expert_ids)
    weights = dense.copy("weights", inputs.weights)
    out = gaps.empty("out", tuple(inputs.x.shape), case.dtype)
    config = MoEConfig(**case.config) if case.config else None
    betas = {"beta": BETA, "linear_beta": LINEAR_BETA}
    if one_call:
        returned = moe_experts(
            x, experts, ids, weights, first_expert=case.first, out=out, config=config, **betas
        )
        assert returned is out
    elif case.tokens:
        config = config or choose_config(experts, case.tokens, case.top_k)
        groups = moe.make_groups(experts, ids, config, case.first)

        def between(name: str, rows: int, columns: int, *, written: bool) -> torch.Tensor:
            return dense.empty(name, (rows, columns), case.dtype, must_be_written=written)

        local = (ids >= case.first) & (ids < case.first + case.experts)
        act = between("act", groups.num_rows, case.inner, written=False)
        gate_up(x, experts, groups, case.top_k, config, out=act, **betas)
        split = 1 if config.prefill else config.down_split
        rows = ids.numel() * split
        written = groups.direct or bool(local.all())
        pairs = between("pairs", rows, case.hidden, written=written)
        down(act, experts, groups, weights, config, out=pairs)
        ours = {} if groups.direct else {
            "expert_ids": ids, "first_expert": case.first, "num_experts": case.experts
        }  # fmt: skip
        finalize(pairs, None, case.top_k * split, out=out, **ours)
    for zone in (gaps, dense):
        zone.check()
    for name, now, before in (("x", x, inputs.x), ("expert_ids", ids, inputs.expert_ids)):
        assert torch.equal(now, before), f"the kernel changed {name}"
    assert_close(case, out, expected)


def assert_close(case: Case, out: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare element by element and as a whole; a token of no expert here must be zero."""
    if not out.numel():
        return
    error = (out.double() - expected).abs()
    size = expected.square().mean(-1, keepdim=True).sqrt()
    excess = error - TOLERANCE[case.dtype] * size
    if not bool((excess <= 0).all()):  # a NaN compares false with everything
        worst = (error / size.clamp_min(1e-30)).nan_to_num(nan=torch.inf).amax(-1)
        token = int(worst.argmax())
        raise AssertionError(
            f"token {token} is off by {float(worst[token]):.3g} of its row's size; "
            f"{int((~(excess <= 0)).sum())} of {error.numel()} elements are wrong"
        )
    relative = float((out.double() - expected).norm() / expected.norm().clamp_min(1e-30))
    assert relative <= NORM_TOLERANCE[case.dtype], f"relative error {relative:.3g}"
