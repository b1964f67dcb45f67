"""One KDA step of a whole batch in one launch: convolution to gated norm, states in place.

Needs PyTorch; Triton when it runs. Lesson 06 uses it.

What a layer does to a token between its projections, per head::

    q, k, v = silu(conv(qkv))           four taps; the window of inputs moves on by one
    q, k    = q / |q| * scale, k / |k|
    g       = -5 sigmoid(exp(A_log) (raw_gate + dt_bias))      log-decay of each key channel
    beta    = sigmoid(raw_beta)
    S'      = S diag(exp(g));  u = beta (v - S' k);  S = S' + u k^T;  o = S q
    out     = rms_norm(o; norm_weight) * sigmoid(output_gate)

``S [V, K]`` and the window lie in slots of a cache and are updated there. In plain PyTorch it is
``kimik3_lab.reference.kda``; the test compares with that.

How the kernel spends its time
------------------------------
A head reads and writes 64 kB of state and 4 kB of everything else, so the floor is the state over
the bandwidth: 94.6 us for 256 requests with 12 heads on an H200 at 4.3 TB/s. The arithmetic is six
operations an element, nothing. What costs is waiting:

*The norm wants the whole head.* A grid over slices of V, which suits the recurrence alone, would
leave the norm to a second launch. So one program takes a head. With many heads it walks over
slices, and copies into shared memory run ahead (``stages``); with few it holds all of the state in
registers, because a single pass is then what counts.

*Two trips to memory, not three.* The slot number is a dependent load: it is asked for first, then
everything that does not need it, then window and state together. Order in the source is not order
in the machine code, though: ptxas saves registers and moves loads of the state behind the
convolution, which waits for the window, and that is a third trip. With ``pin`` window and state are
asked for before a branch, which no load passes. An H200 then needs 3.9 us for one request, not 4.2.

*One trip before the wait.* A launch that starts early (``pdl``) may not read what the launch before
could still write, but it may ask the second-level cache for it (``prefetch``): state and window
travel while that launch drains. With both, one request takes 3.7 us and 32 take 14.9, which were
19.4; from 128 on the memory is busy all along, and nothing is gained.

*One tile for q, k, v and the gate.* Handled as four vectors of 128, a program of 256 threads would
compute each of their elements twice or, because Triton recomputes small loads rather than exchange
them, 64 times. As one tile ``[128, 2, 2]`` every thread has two elements of its own.

*Sums over keys.* See :mod:`k3_kernels.kda_step_kernel` for the shape of the state tile: it takes
50 shuffles where the obvious one takes 190 (CHUNK 32 against 128, 8 warps).

Several tokens a request (speculative verify) keep the state in registers between tokens. Until the
sampler has spoken nobody knows which state will be needed, so either every token leaves its state
in a slot of its own, or the state stays as it was and each token leaves a record of 1 kB a head
(:class:`k3_kernels.KDARecords`, :func:`k3_kernels.kda_recover`).
"""

from __future__ import annotations

import torch

from k3_kernels._compat import check_ndim, check_runs_here, check_tensor, load_kernels, on_device
from k3_kernels.kda_cache import (
    HEAD_DIMS,
    check_conv_state,
    check_conv_weight,
    check_gate_weights,
    check_state,
    check_step_numbers,
)
from k3_kernels.kda_decode_config import KDADecodeConfig, choose_config, verify_config
from k3_kernels.kda_records import KDARecords
from k3_kernels.kda_slots import check_null_slot, check_slots, check_starts

__all__ = ["HEAD_DIMS", "KDADecodeConfig", "choose_config", "kda_decode", "verify_config"]


def kda_decode(
    qkv: torch.Tensor,
    raw_gate: torch.Tensor,
    raw_beta: torch.Tensor,
    output_gate: torch.Tensor,
    conv_weight: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    state_slots: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    num_accepted: torch.Tensor | None = None,
    records: KDARecords | None = None,
    lower_bound: float | None = -5.0,
    scale: float | None = None,
    norm_eps: float = 1e-5,
    l2_eps: float = 1e-6,
    null_slot: int = -1,
    out: torch.Tensor | None = None,
    config: KDADecodeConfig | None = None,
) -> torch.Tensor:
    """Advance every request of a batch by its tokens, in place, and return what goes to ``o_proj``.

    N tokens of B requests, H heads of dimension D = 16, 32, 64 or 128, C = 3 H D channels.

    Parameters
    ----------
    qkv
        ``[N, C]``: the projections q | k | v before the convolution; float32, float16 or bfloat16.
        Rows may be any distance apart, as in a slice of a packed projection.
    raw_gate
        ``[N, H, D]`` or ``[N, H * D]``: output of ``f_b_proj(f_a_proj(x))``, same type.
    raw_beta
        ``[N, H]``: output of ``b_proj``, before its sigmoid, same type.
    output_gate
        ``[N, H, D]`` or ``[N, H * D]``: output of ``g_proj``, same type.
    conv_weight
        ``[C, W]`` or ``[C, 1, W]``, any float type and strides; the last tap multiplies the current
        token. Fastest if the taps lie apart and the channels together: ``w.T.contiguous().T``.
    A_log, dt_bias, norm_weight
        ``[>= H]``, ``[H * D]`` or ``[H, D]``, ``[D]``; any float type.
    conv_state
        ``[slots, C, L]`` in the type of ``qkv``, any strides: inputs of the convolution, oldest
        first, in columns 0 .. W - 2. L is at least W - 1, and W - 2 + tokens for speculative steps.
        Fastest if channels lie together: ``torch.zeros(slots, L, C).transpose(1, 2)``.
    state
        ``[slots, H, V, K]`` float32, the ``[V, K]`` of a head contiguous.
    state_slots
        ``[B]`` or ``[B, S]`` int32. Request b lives in slot ``state_slots[b, 0]``, its window too.
        No slot may occur twice. A slot of ``null_slot`` or less is padding: its ``out`` rows are 0
        and nothing else happens.
    cu_seqlens
        ``[B + 1]`` int32: tokens of request b are rows ``cu_seqlens[b]`` to
        ``cu_seqlens[b + 1] - 1``, none being allowed. None: one token each, N = B. With several:

        * S = 1 and no records: state and window after the last token are kept.
        * S > 1: the state after token t goes to slot ``state_slots[b, t]``.
        * ``records``: the state stays as it was, and row b of the records is filled.

        In the last two cases the window is kept wide: with n tokens accepted it is columns n - 1 to
        n + W - 3. Hand n over as ``num_accepted`` in the next call or let ``kda_recover`` move it.
    num_accepted
        ``[B]`` int32: tokens accepted in the request's last speculative step, at least 1. The
        window starts at column n - 1, and with S > 1 the state is the one in slot
        ``state_slots[b, n - 1]``. None: 1.
    records
        Filled by a speculative step. They excuse the caller from S > 1.
    lower_bound
        K3's gate, below 0; None selects the softplus form of Kimi Linear.
    scale
        Of the queries; None is ``D ** -0.5``.
    norm_eps, l2_eps
        Of the output norm and of the norms of q and k.
    null_slot
        See ``state_slots``; -1 or more. An engine whose block 0 is the null block says 0.
    out
        ``[N, H, D]`` for the result, allocated if None.
    config
        Constants of the launch; None asks :func:`choose_config`. For benchmarks.

    Returns
    -------
    Tensor
        ``[N, H, D]`` in the type of ``qkv``. Rows that belong to no request, before the first of
        ``cu_seqlens`` and behind its last, are not written.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; the message names it. Slots are looked at on the CPU only. On a
        GPU a request whose slot does not exist, or whose tokens do not fit its slots, records or
        window, gets NaN and changes nothing.
    ImportError, RuntimeError
        If Triton is missing or cannot run here.

    Examples
    --------
    Two requests in slots 2 and 0, on a GPU or under ``TRITON_INTERPRET=1``:

    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> H, D = 1, 32
    >>> qkv, gate = torch.randn(2, 3 * H * D, device=device), torch.randn(2, H, D, device=device)
    >>> taps, ones = torch.ones(3 * H * D, 4, device=device), torch.ones(H * D, device=device)
    >>> conv = torch.zeros(3, 3, 3 * H * D, device=device).transpose(1, 2)
    >>> state = torch.zeros(3, H, D, D, device=device)
    >>> slots = torch.tensor([2, 0], dtype=torch.int32, device=device)
    >>> kda_decode(qkv, gate, gate[..., 0], gate, taps, ones[:1], ones, ones, conv, state,
    ...            slots).shape
    torch.Size([2, 1, 32])
    >>> state.flatten(1).any(1).tolist(), torch.equal(conv[2, :, 2], qkv[0])
    ([True, False, True], True)
    """
    check_null_slot("kda_decode", null_slot)
    check_step_numbers(
        "kda_decode", lower_bound=lower_bound, scale=scale, norm_eps=norm_eps, l2_eps=l2_eps
    )
    check_ndim("kda_decode", "qkv", qkv, "[N, 3 * H * D]")
    num_heads, head_dim, num_slots = check_state("kda_decode", state, like=qkv)
    num_tokens, width = qkv.shape[0], num_heads * head_dim
    check_tensor("kda_decode", "qkv", qkv, (num_tokens, 3 * width), like=qkv)
    raw_gate = _rows("raw_gate", raw_gate, num_tokens, num_heads, head_dim, qkv)
    output_gate = _rows("output_gate", output_gate, num_tokens, num_heads, head_dim, qkv)
    check_tensor("kda_decode", "raw_beta", raw_beta, (num_tokens, num_heads), like=qkv)
    taps = check_conv_weight("kda_decode", conv_weight, 3 * width, like=qkv)
    columns = check_conv_state(
        "kda_decode", conv_state, (num_slots, 3 * width), taps.shape[1], like=qkv
    )
    dt_bias = check_gate_weights("kda_decode", A_log, dt_bias, num_heads, head_dim, like=qkv)
    check_tensor("kda_decode", "norm_weight", norm_weight, (head_dim,), like=qkv, same_dtype=False)

    slots = check_slots("kda_decode", "state_slots", state_slots, num_slots, null_slot, like=qkv)
    batch, draft_slots = slots.shape
    if num_accepted is not None:
        check_slots("kda_decode", "num_accepted", num_accepted, None, null_slot, like=qkv,
                    rows=batch)  # fmt: skip
    if cu_seqlens is None:
        if num_tokens != batch:
            raise ValueError(
                f"k3_kernels.kda_decode: {num_tokens} tokens for {batch} requests: without "
                "cu_seqlens every request has exactly one"
            )
        if records is not None:
            raise ValueError(
                "k3_kernels.kda_decode: records are written by a step of several tokens a request; "
                "pass cu_seqlens"
            )
    else:
        check_starts("kda_decode", cu_seqlens, num_tokens, batch, like=qkv)
    if records is not None:
        if not isinstance(records, KDARecords):
            raise TypeError(
                f"k3_kernels.kda_decode: records must be KDARecords, got {type(records).__name__}"
            )
        if draft_slots > 1:
            raise ValueError(
                "k3_kernels.kda_decode: records replace the slots of draft positions: pass "
                "state_slots[:, 0] or no records"
            )
        records.check("kda_decode", (batch, None, num_heads, head_dim), like=qkv, output=True)
        check_tensor("kda_decode", "records.key", records.key, tuple(records.key.shape), like=qkv)
    shape = (num_tokens, num_heads, head_dim)
    if out is None:
        out = torch.empty(shape, dtype=qkv.dtype, device=qkv.device)
    check_tensor("kda_decode", "out", out, shape, like=qkv, output=True)
    if out.numel() and out.stride(1) != head_dim:
        raise ValueError("k3_kernels.kda_decode: the heads of out are not next to each other")
    if num_tokens == 0 or batch == 0 or num_heads == 0:
        return out

    kernels = load_kernels("kda_decode", "kda_decode" if cu_seqlens is None else "kda_verify")
    kernel = kernels.kda_decode_kernel if cu_seqlens is None else kernels.kda_verify_kernel
    check_runs_here("kda_decode", kernel, qkv, taps, A_log, dt_bias, norm_weight)
    tensors = (out, qkv, raw_gate, raw_beta, output_gate, taps, A_log, dt_bias, norm_weight,
               conv_state, state, slots)  # fmt: skip
    strides = (
        out.stride(0), qkv.stride(0), raw_gate.stride(0), raw_beta.stride(0),
        output_gate.stride(0), taps.stride(0), taps.stride(1), conv_state.stride(0),
        conv_state.stride(1), conv_state.stride(2), state.stride(0), state.stride(1),
        slots.stride(0), slots.stride(1),
    )  # fmt: skip
    accepted = slots if num_accepted is None else num_accepted
    numbers = (
        null_slot, 0.0 if lower_bound is None else lower_bound,
        head_dim**-0.5 if scale is None else scale, norm_eps, l2_eps,
    )  # fmt: skip
    constants = {
        "D": head_dim,
        "WIDTH": taps.shape[1],
        "BOUNDED": lower_bound is not None,
        "HAS_ACCEPTED": num_accepted is not None,
        "DRAFT_SLOTS": draft_slots > 1,
        "COMPUTE": kernels.tl.float32,
    }
    grid = (num_heads, batch)
    with on_device(qkv):
        if cu_seqlens is None:
            chosen = config or choose_config(batch * num_heads, head_dim, qkv.device)
            kernel[grid](
                *tensors, accepted, *strides, num_slots, draft_slots, columns, *numbers,
                **constants, BLOCK_V=chosen.block_v, CHUNK=chosen.chunk, STAGES=chosen.stages,
                EARLY=chosen.early or chosen.block_v == head_dim, PDL=chosen.pdl,
                PREFETCH=min(chosen.prefetch, 4 * head_dim**2), PIN=chosen.pin,
                num_warps=chosen.num_warps, **_options(chosen),
            )  # fmt: skip
            return out
        chosen = config or verify_config(batch * num_heads, head_dim, qkv.device)
        # A kernel argument must be a tensor: without records it is given one it does not touch.
        kept = (state, qkv, qkv) if records is None else (records.u, records.key, records.gate)
        kernel[grid](
            *tensors, accepted, cu_seqlens, *kept, *strides,
            *(kept[i].stride(j) for i in range(3) for j in range(2)),
            num_slots, draft_slots, columns,
            draft_slots if records is None else records.max_tokens, *numbers,
            **constants, RECORD=records is not None, CHUNK=chosen.chunk, PDL=chosen.pdl,
            num_warps=chosen.num_warps, **_options(chosen),
        )  # fmt: skip
    return out


def _options(config: KDADecodeConfig) -> dict[str, bool]:
    return {"launch_pdl": True} if config.pdl else {}


def _rows(
    name: str, tensor: torch.Tensor, tokens: int, heads: int, dim: int, like: torch.Tensor
) -> torch.Tensor:
    """Return ``[N, H, D]`` or ``[N, H * D]`` as ``[N, H * D]`` without a copy."""
    if isinstance(tensor, torch.Tensor) and tensor.ndim == 3:
        check_tensor("kda_decode", name, tensor, (tokens, heads, dim), like=like)
        if tensor.numel() and heads > 1 and tensor.stride(1) != dim:
            raise ValueError(
                f"k3_kernels.kda_decode: {name} has stride {tensor.stride(1)} between heads, "
                f"expected {dim}: call .contiguous() first"
            )
        tensor = tensor.as_strided((tokens, heads * dim), (tensor.stride(0), 1))
    check_tensor("kda_decode", name, tensor, (tokens, heads * dim), like=like)
    return tensor
