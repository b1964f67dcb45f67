"""KDA over a prompt as a ladder: from one token at a time to segments walked at once.

Needs PyTorch; Triton when it runs. Lesson 06 climbs it, and ``benchmarks.kda_ladder`` times it.

Every rung runs the delta rule over one sequence and leaves the state in its slot:

================  ==================================================================================
``tokens``        the decode ladder's kernel, in a loop over all tokens
``chunks``        64 tokens at a time as matrix products; what does not need the state is prepared
                  for all chunks in parallel; one program walks along a head
``split_values``  values never mix, so each of two programs keeps half of a head's state
``segments``      the sequence is cut: a survey finds out how each piece maps a state, then all
                  pieces are walked at once
``as_shipped``    :func:`k3_kernels.kda_prefill` as it is
================  ==================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from k3_kernels._compat import check_runs_here, load_kernels, on_device
from k3_kernels.kda_ladder import LadderLayer, RuleConfig, delta_rule
from k3_kernels.kda_prefill import kda_prefill

__all__ = ["CHUNK", "PREFILL_RUNGS", "LadderPrompt", "WalkConfig", "chunked_rule", "climb_prefill"]

#: Tokens of a chunk, and rows of it whose decays may be divided by each other in float32.
CHUNK, _SUB = 64, 16
_L2_EPS = 1e-6


@dataclass(frozen=True)
class LadderPrompt:
    """One sequence of T tokens after the convolution: ``[T, H, D]``, and ``raw_beta [T, H]``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    raw_gate: torch.Tensor
    raw_beta: torch.Tensor


@dataclass(frozen=True)
class WalkConfig:
    """Constants of the launches.

    Attributes
    ----------
    block_v, num_warps, stages
        Of the walk: values and warps of a program, chunks in flight plus 1.
    segments
        Pieces of the sequence that are walked at once.
    block_k, prepare_warps
        Of the preparation: keys in registers at a time, and warps.
    """

    block_v: int = 128
    num_warps: int = 8
    stages: int = 2
    segments: int = 1
    block_k: int = 16
    prepare_warps: int = 4


def chunked_rule(
    prompt: LadderPrompt,
    layer: LadderLayer,
    state: torch.Tensor,
    slot: int,
    config: WalkConfig | None = None,
    *,
    only: str | None = None,
) -> torch.Tensor:
    """Run the delta rule in chunks of 64 tokens from the state in ``slot``, and leave it there.

    Parameters
    ----------
    prompt, layer
        The sequence, of at least one token, and the weights of its gate.
    state
        ``[slots, H, V, K]`` float32, contiguous.
    slot
        Of the sequence.
    config
        Constants; segments that would be empty are left out.
    only
        ``"prepare"``, ``"survey"``, ``"starts"`` or ``"walk"``: one part alone, to time it.

    Returns
    -------
    Tensor
        ``[T, H, D]``, before the gated norm.

    Examples
    --------
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> x = torch.ones(3, 1, 16, device=device)
    >>> layer = LadderLayer(*[torch.zeros(16, device=device)] * 4)
    >>> state = torch.zeros(2, 1, 16, 16, device=device)
    >>> chunked_rule(LadderPrompt(x, x, x, x, x[..., 0]), layer, state, 1).shape
    torch.Size([3, 1, 16])
    >>> state.flatten(1).any(1).tolist()
    [False, True]
    """
    config = config or WalkConfig()
    q, k, v = prompt.q, prompt.k, prompt.v
    tokens, heads, head_dim = q.shape
    kernels = load_kernels("kda_ladder_prefill")
    tl = kernels.tl
    check_runs_here("kda_ladder_prefill", kernels.walk_kernel, q, layer.A_log, layer.dt_bias)
    # The interpreter has no bfloat16, and float16 would not hold e^80.
    wide = q.dtype == torch.float32 or q.device.type == "cpu"
    kind = torch.float32 if wide else torch.bfloat16
    chunks = -(-tokens // CHUNK)
    per_segment = -(-chunks // config.segments)
    segments = -(-chunks // per_segment)
    block_v = min(config.block_v, head_dim)

    def empty(*shape: int, dtype: torch.dtype = kind) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=q.device)

    kg, qg, kd = (empty(chunks, heads, CHUNK, head_dim) for _ in range(3))
    solve, scores = (empty(chunks, heads, CHUNK, CHUNK) for _ in range(2))
    decay = empty(chunks, heads, head_dim, dtype=torch.float32)
    out = empty(*q.shape, dtype=q.dtype)
    own = state[slot : slot + 1]
    starts = ends = maps = own
    if segments > 1:
        starts, ends, maps = torch.empty(3, segments, *own.shape[1:], device=q.device)

    def prepare() -> None:
        kernels.prepare_kernel[(heads, chunks)](
            q, k, prompt.raw_gate, prompt.raw_beta, layer.A_log, layer.dt_bias, kg, qg, kd, solve,
            scores, decay, *(x.stride(0) for x in (q, k, prompt.raw_gate, prompt.raw_beta)),
            tokens, layer.lower_bound, head_dim**-0.5, _L2_EPS, D=head_dim, CHUNK=CHUNK,
            LEVELS=CHUNK.bit_length() - 1, SUB=_SUB,
            BLOCK_K=min(config.block_k, head_dim), TRIANGLE=tl.float32 if wide else tl.float16,
            COMPUTE=tl.float32, num_warps=config.prepare_warps, num_stages=1,
        )  # fmt: skip

    def walk(survey: bool) -> None:
        if survey:
            starts.zero_()
            starts[0] = own[0]
        parts = head_dim // block_v
        grid = (2 * parts, heads, segments - 1) if survey else (parts, heads, segments)
        kernels.walk_kernel[grid](
            out, v, kg, qg, kd, solve, scores, decay, starts, ends if survey else own, maps,
            out.stride(0), v.stride(0), tokens, chunks, per_segment, D=head_dim, CHUNK=CHUNK,
            BLOCK_V=block_v, SURVEY=survey, STAGES=config.stages, COMPUTE=tl.float32,
            num_warps=config.num_warps,
        )  # fmt: skip

    def lead() -> None:
        starts[1] = ends[0]
        for segment in range(1, segments - 1):
            torch.baddbmm(ends[segment], starts[segment], maps[segment], out=starts[segment + 1])

    parts: dict[str, Callable[[], None]] = {"prepare": prepare}
    if segments > 1:
        parts |= {"survey": partial(walk, True), "starts": lead}
    parts["walk"] = partial(walk, False)
    with on_device(q):
        for name, part in parts.items():
            if only is None or only == name:
                part()
    return out


def _shipped(
    prompt: LadderPrompt, layer: LadderLayer, state: torch.Tensor, slot: int
) -> torch.Tensor:
    slots = torch.full((1,), slot, dtype=torch.int32, device=state.device)
    return kda_prefill(
        prompt.q, prompt.k, prompt.v, prompt.raw_gate, prompt.raw_beta, layer.A_log, layer.dt_bias,
        state, slots, has_initial_state=torch.ones_like(slots), lower_bound=layer.lower_bound,
        l2_eps=_L2_EPS,
    )  # fmt: skip


def _tokens(
    prompt: LadderPrompt, layer: LadderLayer, state: torch.Tensor, slot: int
) -> torch.Tensor:
    slots = torch.full((1,), slot, dtype=torch.int32, device=state.device)
    tensors = (prompt.q, prompt.k, prompt.v, prompt.raw_gate, prompt.raw_beta)
    # Narrow programs for a GPU; in the interpreter every program costs as much as the next.
    config = RuleConfig(8, 1, 3) if state.is_cuda else RuleConfig(state.shape[-1])
    return delta_rule(*tensors, layer, state, slots, config)


#: Constants of the rungs that walk along chunks.
WALKS = {
    "chunks": WalkConfig(block_v=128, num_warps=8),
    "split_values": WalkConfig(block_v=64, num_warps=4),
    "segments": WalkConfig(block_v=64, num_warps=4, segments=4),
}
_RUNGS: dict[str, Callable[[LadderPrompt, LadderLayer, torch.Tensor, int], torch.Tensor]] = {
    "tokens": _tokens,
    **{name: partial(chunked_rule, config=config) for name, config in WALKS.items()},
    "as_shipped": _shipped,
}
#: Names of the rungs, from the ground up.
PREFILL_RUNGS: tuple[str, ...] = tuple(_RUNGS)


def climb_prefill(
    rung: str, prompt: LadderPrompt, layer: LadderLayer, state: torch.Tensor, slot: int
) -> torch.Tensor:
    """Run one rung over a prompt, from the state in ``slot``, which moves on.

    Parameters
    ----------
    rung
        One of :data:`PREFILL_RUNGS`.
    prompt
        The sequence; bfloat16 on a GPU, float32 in the interpreter.
    layer, state, slot
        As for :func:`chunked_rule`.

    Returns
    -------
    Tensor
        ``[T, H, D]``, before the gated norm.

    Raises
    ------
    ValueError
        If there is no such rung.

    Examples
    --------
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> x = torch.ones(3, 1, 16, device=device)
    >>> layer = LadderLayer(*[torch.zeros(16, device=device)] * 4)
    >>> states = torch.zeros(2, 1, 1, 16, 16, device=device)
    >>> prompt = LadderPrompt(x, x, x, x, x[..., 0])
    >>> one = climb_prefill("tokens", prompt, layer, states[0], 0)
    >>> torch.allclose(one, climb_prefill("chunks", prompt, layer, states[1], 0), atol=1e-5)
    True
    """
    if rung not in _RUNGS:
        raise ValueError(
            f"climb_prefill: there is no rung {rung!r}, expected one of {', '.join(PREFILL_RUNGS)}"
        )
    return _RUNGS[rung](prompt, layer, state, slot)
