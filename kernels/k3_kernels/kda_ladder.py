"""A KDA decode step as a ladder: from separate launches to one, one idea a rung.

Needs PyTorch; Triton from the second rung on. Lesson 06 climbs it, and ``benchmarks.kda_ladder``
times it. The ladder of prompts is :mod:`k3_kernels.kda_ladder_prefill`.

Every rung computes the same: convolution, gates, the delta rule and the gated norm for one token of
each request, with windows and states in slots of a cache. What changes is a single idea:

==============  ====================================================================================
``separate``    PyTorch: states are copied out of their slots, four passes, and copied back
``fused_rule``  the delta rule is one kernel: a state is read once and written once, beside the
                copies out of the slots and back
``in_place``    the kernel is told the slots: no copies
``one_launch``  convolution, gates, rule and norm in one launch (:func:`k3_kernels.kda_decode`), a
                head to a program
``tuned``       constants for the number of heads and requests (the same as it is)
==============  ====================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from k3_kernels._compat import check_runs_here, load_kernels, on_device
from k3_kernels.kda_decode import choose_config, kda_decode

__all__ = [
    "DECODE_RUNGS",
    "LadderLayer",
    "LadderStep",
    "RuleConfig",
    "climb_decode",
    "delta_rule",
    "state_passes",
]

_L2_EPS = 1e-6


@dataclass(frozen=True)
class LadderLayer:
    """The small weights of a KDA layer.

    Attributes
    ----------
    conv_weight
        ``[3 H D, W]``: taps of q | k | v, the last one for the current token.
    A_log, dt_bias, norm_weight
        ``[>= H]``, ``[H * D]`` and ``[D]``.
    lower_bound, norm_eps
        Of the gate and of the gated norm.
    """

    conv_weight: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    norm_weight: torch.Tensor
    lower_bound: float = -5.0
    norm_eps: float = 1e-5


@dataclass(frozen=True)
class LadderStep:
    """Projections of one token of each of B requests.

    Attributes
    ----------
    qkv
        ``[B, 3 H D]``: q | k | v before the convolution.
    raw_gate, output_gate
        ``[B, H, D]``.
    raw_beta
        ``[B, H]``.
    """

    qkv: torch.Tensor
    raw_gate: torch.Tensor
    raw_beta: torch.Tensor
    output_gate: torch.Tensor


@dataclass(frozen=True)
class RuleConfig:
    """Constants of :func:`delta_rule`: values of a program, its warps, tokens in flight plus 1."""

    block_v: int = 32
    num_warps: int = 4
    stages: int = 1


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw_gate: torch.Tensor,
    raw_beta: torch.Tensor,
    layer: LadderLayer,
    state: torch.Tensor,
    slots: torch.Tensor,
    config: RuleConfig | None = None,
) -> torch.Tensor:
    """Run the delta rule token by token: gates, norms of q and k, and the state in its slot.

    Parameters
    ----------
    q, k, v, raw_gate
        ``[N, H, D]`` of one type, N tokens in equal parts of B sequences, after the convolution.
    raw_beta
        ``[N, H]``.
    layer
        Weights of the gate.
    state
        ``[slots, H, V, K]`` float32, contiguous; read and written.
    slots
        ``[B]`` int32, none twice. Every slot must exist: nothing is checked here.
    config
        Constants of the launch.

    Returns
    -------
    Tensor
        ``[N, H, D]``, before the gated norm.

    Examples
    --------
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> ones = torch.ones(2, 1, 16, device=device)
    >>> layer = LadderLayer(*[torch.zeros(16, device=device)] * 4)
    >>> state = torch.zeros(3, 1, 16, 16, device=device)
    >>> slots = torch.tensor([2, 0], dtype=torch.int32, device=device)
    >>> delta_rule(ones, ones, ones, ones, ones[..., 0], layer, state, slots).shape
    torch.Size([2, 1, 16])
    >>> state.flatten(1).any(1).tolist()
    [True, False, True]
    """
    tokens, heads, head_dim = q.shape
    config = config or RuleConfig()
    kernels = load_kernels("kda_ladder")
    check_runs_here("kda_ladder", kernels.rule_kernel, q, layer.A_log, layer.dt_bias)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    block_v = min(config.block_v, head_dim)
    with on_device(q):
        kernels.rule_kernel[(head_dim // block_v, heads, len(slots))](
            out, q, k, v, raw_gate, raw_beta, layer.A_log, layer.dt_bias, state, slots,
            *(x.stride(0) for x in (out, q, k, v, raw_gate, raw_beta, state)),
            tokens // len(slots), layer.lower_bound, head_dim**-0.5, _L2_EPS,
            D=head_dim, BLOCK_V=block_v, STAGES=config.stages, COMPUTE=kernels.tl.float32,
            num_warps=config.num_warps,
        )  # fmt: skip
    return out


@dataclass(frozen=True)
class _Call:
    step: LadderStep
    layer: LadderLayer
    conv_state: torch.Tensor
    state: torch.Tensor
    slots: torch.Tensor

    def convolve(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v ``[B, H, D]``, and leave the moved windows in their slots."""
        taps, at = self.layer.conv_weight, self.slots.long()
        kept = taps.shape[1] - 1
        inputs = torch.cat((self.conv_state[at][..., :kept], self.step.qkv[..., None]), -1)
        self.conv_state[:, :, :kept].index_copy_(0, at, inputs[..., 1:])
        y = torch.nn.functional.silu((inputs.float() * taps.float()).sum(-1)).to(inputs.dtype)
        q, k, v = y.view(len(y), 3, *self.step.raw_gate.shape[1:]).unbind(1)
        return q, k, v

    def norm(self, o: torch.Tensor) -> torch.Tensor:
        layer, opening = self.layer, self.step.output_gate
        o = torch.nn.functional.rms_norm(
            o.float(), o.shape[-1:], layer.norm_weight.float(), layer.norm_eps
        )
        return (o * torch.sigmoid(opening.float())).to(opening.dtype)


def _separate(call: _Call) -> torch.Tensor:
    step, layer, at = call.step, call.layer, call.slots.long()
    heads, head_dim = step.raw_gate.shape[1:]
    q, k, v = (x.float() for x in call.convolve())
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPS) for x in (q, k))
    rate = layer.A_log[:heads].float().exp()[:, None]
    bias = layer.dt_bias.float().view(heads, head_dim)
    decay = (layer.lower_bound * torch.sigmoid(rate * (step.raw_gate.float() + bias))).exp()
    beta = torch.sigmoid(step.raw_beta.float())[..., None]
    state = call.state[at]  # a copy
    state = state * decay[:, :, None, :]
    u = beta * (v - (state @ k[..., None])[..., 0])
    state = state + u[..., None] * k[:, :, None, :]
    o = (state @ q[..., None])[..., 0] * head_dim**-0.5
    call.state.index_copy_(0, at, state)
    return call.norm(o)


def _with_rule(call: _Call, *, in_place: bool) -> torch.Tensor:
    step = call.step
    inputs = (*call.convolve(), step.raw_gate, step.raw_beta, call.layer)
    if in_place:
        return call.norm(delta_rule(*inputs, call.state, call.slots))
    at = call.slots.long()
    gathered = call.state[at]
    rows = torch.arange(len(at), dtype=torch.int32, device=at.device)
    o = delta_rule(*inputs, gathered, rows)
    call.state.index_copy_(0, at, gathered)
    return call.norm(o)


def _one_launch(call: _Call, *, tuned: bool) -> torch.Tensor:
    step, layer, head_dim = call.step, call.layer, call.state.shape[-1]
    # The rule for a few heads on an unknown device: a whole head in registers, nothing measured.
    config = None if tuned else choose_config(1, head_dim, torch.device("cpu"))
    return kda_decode(
        step.qkv, step.raw_gate, step.raw_beta, step.output_gate, layer.conv_weight, layer.A_log,
        layer.dt_bias, layer.norm_weight, call.conv_state, call.state, call.slots,
        lower_bound=layer.lower_bound, norm_eps=layer.norm_eps, l2_eps=_L2_EPS, config=config,
    )  # fmt: skip


_RUNGS: dict[str, Callable[[_Call], torch.Tensor]] = {
    "separate": _separate,
    "fused_rule": lambda call: _with_rule(call, in_place=False),
    "in_place": lambda call: _with_rule(call, in_place=True),
    "one_launch": lambda call: _one_launch(call, tuned=False),
    "tuned": lambda call: _one_launch(call, tuned=True),
}
#: Names of the rungs, from the ground up.
DECODE_RUNGS: tuple[str, ...] = tuple(_RUNGS)

#: How often a rung moves all states of a step: copies out and back are two passes each, PyTorch's
#: decay two, look-up one, outer product one, sum three, read one. The last three only need two.
_PASSES = {"separate": 12, "fused_rule": 6}


def state_passes(rung: str) -> int:
    """Return how often a rung reads or writes the states of a step; two is the least.

    Examples
    --------
    >>> [state_passes(rung) for rung in DECODE_RUNGS]
    [12, 6, 2, 2, 2]
    """
    return _PASSES.get(rung, 2)


def climb_decode(
    rung: str,
    step: LadderStep,
    layer: LadderLayer,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Advance every request by one token as it is done on one rung; states and windows move on.

    Parameters
    ----------
    rung
        One of :data:`DECODE_RUNGS`.
    step
        Projections; bfloat16 on a GPU, float32 in the interpreter.
    layer
        Weights.
    conv_state, state
        ``[slots, 3 H D, L]`` in the type of the projections, and ``[slots, H, V, K]`` float32, as
        for :func:`k3_kernels.kda_decode`.
    slots
        ``[B]`` int32, none twice.

    Returns
    -------
    Tensor
        ``[B, H, D]`` for ``o_proj``.

    Raises
    ------
    ValueError
        If there is no such rung.

    Examples
    --------
    >>> ones = torch.ones(1, 1, 16)
    >>> step = LadderStep(torch.ones(1, 48), ones, ones[..., 0], ones)
    >>> layer = LadderLayer(torch.ones(48, 4), *[torch.ones(16)] * 3)
    >>> cache = torch.zeros(2, 48, 3), torch.zeros(2, 1, 16, 16)
    >>> out = climb_decode("separate", step, layer, *cache, torch.tensor([1], dtype=torch.int32))
    >>> out.shape, cache[1].flatten(1).any(1).tolist()
    (torch.Size([1, 1, 16]), [False, True])
    """
    if rung not in _RUNGS:
        raise ValueError(
            f"climb_decode: there is no rung {rung!r}, expected one of {', '.join(DECODE_RUNGS)}"
        )
    return _RUNGS[rung](_Call(step, layer, conv_state, state, slots))
