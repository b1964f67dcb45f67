"""Commit the accepted tokens of a speculative KDA step from its records.

Needs PyTorch; Triton when it runs. Lesson 06 uses it.

:func:`k3_kernels.kda_decode` with records leaves the state before the drafts in its slot. When n of
the tokens are accepted, the state is::

    S_n = S_0 diag(exp(g_1 + .. + g_n)) + sum_t u_t (k_t exp(g_(t+1) + .. + g_n))^T

``u_t = beta_t (v_t - S'_(t-1) k_t)`` already holds everything that depended on the state, so
nothing is looked up again over the state. A serving engine with a prefix cache also wants the state
at a block boundary that lies among the accepted tokens; the same pass writes it. The window of the
convolution, which the verify step kept wide, is moved along.

The plain PyTorch twin is ``kimik3_lab.reference.kda.recurrent`` over the first n tokens; the test
compares with that. vLLM calls the technique RecoverSSM
(https://github.com/vllm-project/vllm/pull/51855).

How the kernel spends its time
------------------------------
The floor is the state, read once and written once: 128 kB a head against 1 kB of records a token.
No output couples the values of a head, so V is cut into pieces of two warps each: many small
programs hide each other's waiting. The tokens' vectors are worked out again by every warp, in the
layout that the state has: no warp asks another for anything. They multiply as they are, no tensor
cores: the outer products of nine tokens are ten operations an element, and a matrix instruction
would have to be fed through shared memory from layouts that loads and stores do not have. That way
an H200 took 16.0 us for 16 requests, 39 % of the floor; this way 10.

All that was to happen while the state is on its way. But ptxas saves registers and moves loads of
records and state down to where their values are needed: one trip after another. With ``pin`` a
barrier and a branch stand in between, which no load passes: 9.6 us. With state and records on their
way to the second-level cache while the launch before drains (``prefetch``) it is 9.2. Records then
come fast enough to wait for their slice (``late_u``), which leaves registers for one slice of the
state more: 8.8, of which 6.2 are the bytes.

Several layers go into one launch, because a step commits all 69.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from k3_kernels import tuned
from k3_kernels._compat import (
    GRID_LIMIT,
    check_ndim,
    check_runs_here,
    load_kernels,
    on_device,
)
from k3_kernels._numbers import check_int
from k3_kernels.kda_cache import (
    check_conv_state,
    check_gate_weights,
    check_state,
    check_step_numbers,
)
from k3_kernels.kda_records import KDARecords
from k3_kernels.kda_slots import check_null_slot, check_owners, check_slots, looks_at

__all__ = ["KDARecoverConfig", "choose_config", "kda_recover"]


@dataclass(frozen=True)
class KDARecoverConfig:
    """Compile-time constants of one launch.

    Attributes
    ----------
    block_v, slice_v, num_warps
        Values of a program, how many of them it takes at a time (at least one a warp), and its
        warps.
    pdl
        As in :class:`k3_kernels.kda_decode.KDADecodeConfig`.
    ahead
        How many slices it asks for before they are needed.
    prefetch
        Whether state and records are on their way to the second-level cache while the launch
        before is still ending; with ``pdl``.
    pin
        Keep the compiler from moving loads down to where their values are needed.
    late_u
        Whether u of a slice is read when the slice has its turn, out of the first-level cache.
    """

    block_v: int
    slice_v: int
    num_warps: int
    pdl: bool = False
    ahead: int = 1
    prefetch: bool = False
    pin: bool = False
    late_u: bool = False


def choose_config(programs: int, head_dim: int, device: torch.device) -> KDARecoverConfig:
    """Choose the constants for ``programs`` = layers times requests times heads.

    Examples
    --------
    >>> choose_config(12, 128, torch.device("cpu"))
    KDARecoverConfig(block_v=16, slice_v=8, num_warps=1, pdl=False, ahead=1, \
prefetch=False, pin=False, late_u=False)
    """
    found = tuned.lookup("kda_recover", f"D={head_dim}", programs, device)
    if found is not None:
        return KDARecoverConfig(**found)
    return KDARecoverConfig(min(16 if programs <= 132 else 32, head_dim), 8, 1)


def kda_recover(
    state: torch.Tensor,
    records: KDARecords,
    state_slots: torch.Tensor,
    num_accepted: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    final_slots: torch.Tensor | None = None,
    boundary: torch.Tensor | None = None,
    boundary_slots: torch.Tensor | None = None,
    conv_state: torch.Tensor | None = None,
    conv_width: int = 4,
    lower_bound: float | None = -5.0,
    l2_eps: float = 1e-6,
    null_slot: int = -1,
    config: KDARecoverConfig | None = None,
) -> None:
    """Advance states by the accepted tokens of a step whose records were kept.

    Parameters
    ----------
    state
        ``[slots, H, V, K]`` float32, or ``[layers, slots, H, V, K]``; then everything but slot
        numbers has a dimension of layers in front.
    records
        Of the step, row b for request b.
    state_slots
        ``[B]`` int32: where the state before the drafts is. Padding as in ``kda_decode``.
    num_accepted
        ``[B]`` int32: tokens to commit, the one before the drafts included. A request with 0 is
        left alone, as one whose slot is padding.
    A_log, dt_bias
        ``[>= H]`` and ``[H * D]`` or ``[H, D]``, as for ``kda_decode``.
    final_slots
        ``[B]`` int32: where the committed state goes; None: into ``state_slots``.
    boundary, boundary_slots
        ``[B]`` int32 each: where ``1 <= boundary[b] <= num_accepted[b]``, the state after the first
        ``boundary[b]`` tokens goes to slot ``boundary_slots[b]`` too. That may be the slot that the
        step started from if ``final_slots`` names another, but not the one that takes the end: it
        can hold one state. No slot of one request may be one of another's, in any of the lists.
    conv_state
        ``[slots, C, L]`` as the step left it, or ``[layers, slots, C, L]``: its windows move to
        columns 0 .. ``conv_width - 2`` of the same slots as the states. ``L`` must be at least
        ``conv_width - 2`` and the tokens to commit.
    conv_width
        Taps of the convolution, 2 or more.
    lower_bound, l2_eps, null_slot
        As in the step.
    config
        Constants of the launch; None asks :func:`choose_config`. For benchmarks.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; the message names it. Slots and counts are looked at on the
        CPU only; on a GPU a request with a slot or count that does not exist, or with more tokens
        than its window holds, is left alone.
    ImportError, RuntimeError
        If Triton is missing or cannot run here.

    Examples
    --------
    One token that wrote u into an empty memory, on a GPU or under ``TRITON_INTERPRET=1``:

    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> records = KDARecords.empty(1, 2, 1, 32, dtype=torch.float32, device=device)
    >>> for tensor in (records.u, records.key, records.gate):
    ...     _ = tensor.fill_(1.0)
    >>> state = torch.zeros(1, 1, 32, 32, device=device)
    >>> slot, one = torch.tensor([[0], [1]], dtype=torch.int32, device=device)
    >>> kda_recover(state, records, slot, one, torch.zeros(1, device=device),
    ...             torch.zeros(32, device=device), l2_eps=0.0)
    >>> round(float(state[0, 0, 0, 0] * 32**0.5), 3)
    1.0
    """
    if not isinstance(records, KDARecords):
        raise TypeError(
            f"k3_kernels.kda_recover: records must be KDARecords, got {type(records).__name__}"
        )
    check_null_slot("kda_recover", null_slot)
    check_step_numbers("kda_recover", lower_bound=lower_bound, l2_eps=l2_eps)
    check_int("kda_recover", "conv_width", conv_width, at_least=2)
    layered = isinstance(state, torch.Tensor) and state.ndim == 5
    like = state if isinstance(state, torch.Tensor) else records.u
    num_heads, head_dim, num_slots = check_state("kda_recover", state, like=like, layers=layered)
    front = tuple(state.shape[:1]) if layered else ()
    slots = check_slots("kda_recover", "state_slots", state_slots, num_slots, null_slot, like=state)
    batch = slots.shape[0]
    check_slots("kda_recover", "state_slots", state_slots, None, null_slot, like=state, rows=batch)
    records.check(
        "kda_recover", (*front, batch, None, num_heads, head_dim), like=state, output=False
    )
    check_slots("kda_recover", "num_accepted", num_accepted, None, null_slot, like=state,
                rows=batch)  # fmt: skip
    if looks_at(state) and batch and int(num_accepted.max()) > records.max_tokens:
        raise ValueError(
            f"k3_kernels.kda_recover: num_accepted is up to {int(num_accepted.max())}, but there "
            f"are records of {records.max_tokens} tokens"
        )
    if final_slots is not None:
        check_slots("kda_recover", "final_slots", final_slots, None, null_slot, like=state,
                    rows=batch)  # fmt: skip
        check_slots("kda_recover", "final_slots", final_slots, num_slots, null_slot, like=state,
                    distinct=False)  # fmt: skip
    if (boundary is None) != (boundary_slots is None):
        raise ValueError("k3_kernels.kda_recover: boundary and boundary_slots go together")
    if boundary is not None and boundary_slots is not None:
        for name, numbers, limit in (
            ("boundary", boundary, None),
            ("boundary_slots", boundary_slots, num_slots),
        ):
            check_slots("kda_recover", name, numbers, None, null_slot, like=state, rows=batch)
            check_slots("kda_recover", name, numbers, limit, null_slot, like=state, distinct=False)
    if final_slots is not None or boundary is not None:
        between = None
        if boundary is not None and boundary_slots is not None:
            between = ("boundary_slots", boundary_slots, boundary)
        check_owners(
            "kda_recover", null_slot, state_slots, num_accepted, ends=final_slots, between=between
        )
    dt_bias = check_gate_weights(
        "kda_recover", A_log, dt_bias, num_heads, head_dim, like=state, layers=front
    )
    columns = conv_width - 1
    if conv_state is not None:
        of_a_layer: torch.Tensor | None = conv_state
        if layered:
            check_ndim("kda_recover", "conv_state", conv_state, "[layers, slots, C, L]")
            if conv_state.shape[0] != front[0]:
                raise ValueError(
                    f"k3_kernels.kda_recover: conv_state has {conv_state.shape[0]} layers, "
                    f"expected {front[0]}"
                )
            of_a_layer = conv_state[0] if front[0] else None
        if of_a_layer is not None:
            columns = check_conv_state(
                "kda_recover", of_a_layer, (num_slots, 3 * num_heads * head_dim), conv_width,
                like=state, dtype=records.key.dtype,
            )  # fmt: skip
    if state.numel() == 0 or batch == 0:
        return
    if conv_state is not None and looks_at(state):
        most = int(num_accepted.where(state_slots > null_slot, 0).max())
        if most + conv_width - 2 > columns:
            raise ValueError(
                f"k3_kernels.kda_recover: conv_state keeps {columns} inputs, but after {most} "
                f"accepted tokens {conv_width} taps need {most + conv_width - 2}: it is not the "
                "window that the step kept wide"
            )

    kernels = load_kernels("kda_recover")
    kernel = kernels.kda_recover_kernel
    check_runs_here("kda_recover", kernel, state, records.key, A_log, dt_bias)
    layers = front[0] if layered else 1
    if config is None:
        config = choose_config(layers * batch * num_heads, head_dim, state.device)
        if boundary is not None:
            # Two states at once: only narrow slices leave room for them in registers.
            config = KDARecoverConfig(16, 16, 2, config.pdl)
    most = max(1, GRID_LIMIT // batch)  # all 69 layers up to 949 requests
    if layers > most:
        for part in (slice(first, first + most) for first in range(0, layers, most)):
            kda_recover(
                state[part],
                KDARecords(records.u[part], records.key[part], records.gate[part]),
                state_slots, num_accepted, A_log[part], dt_bias[part], final_slots=final_slots,
                boundary=boundary, boundary_slots=boundary_slots,
                conv_state=None if conv_state is None else conv_state[part],
                conv_width=conv_width, lower_bound=lower_bound, l2_eps=l2_eps,
                null_slot=null_slot, config=config,
            )  # fmt: skip
        return
    # A kernel argument must be a tensor: what the constants switch off is given another one.
    window = records.key if conv_state is None else conv_state
    skip = 1 if layered else 0
    window_strides = window.stride()[-3:]
    grid = (head_dim // min(config.block_v, head_dim), num_heads, layers * batch)
    with on_device(state):
        kernel[grid](
            state, records.u, records.key, records.gate, A_log, dt_bias, window,
            state_slots, num_accepted, state_slots if final_slots is None else final_slots,
            num_accepted if boundary is None else boundary,
            state_slots if boundary_slots is None else boundary_slots,
            state.stride(0) if layered else 0, state.stride(skip), state.stride(skip + 1),
            *(
                stride
                for tensor in (records.u, records.key, records.gate)
                for stride in (
                    tensor.stride(0) if layered else 0, tensor.stride(skip), tensor.stride(skip + 1)
                )
            ),
            A_log.stride(0) if layered else 0, dt_bias.stride(0) if layered else 0,
            window.stride(0) if layered else 0, *window_strides,
            batch, num_slots, columns, null_slot,
            0.0 if lower_bound is None else lower_bound, l2_eps,
            D=head_dim, TOKENS=records.max_tokens,
            BOUNDED=lower_bound is not None, HAS_BOUNDARY=boundary is not None,
            MOVE_WINDOW=conv_state is not None, WIDTH=conv_width,
            BLOCK_V=min(config.block_v, head_dim), SLICE=config.slice_v,
            ROWS=config.num_warps, AHEAD=config.ahead, COMPUTE=kernels.tl.float32,
            PDL=config.pdl, PREFETCH=config.prefetch, PIN=config.pin, LATE_U=config.late_u,
            num_warps=config.num_warps, **({"launch_pdl": True} if config.pdl else {}),
        )  # fmt: skip
