"""The short convolution before KDA over whole prompts, with its windows in slots of a cache.

Needs PyTorch; Triton when it runs. Lesson 06 uses it. :func:`k3_kernels.kda_decode` convolves its
tokens itself.

Four taps over time for each of the 3 H D channels of q | k | v, then SiLU. What the first tokens of
a call look back on is in the sequence's slot, and what the next call will look back on is left
there; at a checkpoint it goes to a second slot as well. In plain PyTorch it is
``kimik3_lab.reference.kda.short_conv``; the test compares with that.

It moves each input once and each output once and is a fiftieth of the prefill's arithmetic, so the
tiles are plain: 16 tokens of 256 channels. The windows have a launch of their own, because programs
of one launch may run in any order and some of them read what has to be overwritten.
"""

from __future__ import annotations

import torch

from k3_kernels._compat import (
    GRID_LIMIT,
    check_ndim,
    check_runs_here,
    check_tensor,
    load_kernels,
    next_power_of_2,
    on_device,
)
from k3_kernels.kda_cache import check_conv_state, check_conv_weight
from k3_kernels.kda_slots import check_sequences

__all__ = ["kda_conv"]

_BLOCK_T, _BLOCK_C = 16, 256


def kda_conv(
    qkv: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_state: torch.Tensor,
    state_slots: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    checkpoint_at: torch.Tensor | None = None,
    checkpoint_slots: torch.Tensor | None = None,
    null_slot: int = -1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve the tokens of B sequences causally, apply SiLU, move the windows on.

    Parameters
    ----------
    qkv
        ``[N, C]``: the projections q | k | v; rows may be any distance apart.
    conv_weight, conv_state
        ``[C, W]`` and ``[slots, C, L]`` as for ``kda_decode``; columns 0 .. W - 2 of a window are
        read and written.
    state_slots, cu_seqlens, has_initial_state, checkpoint_at, checkpoint_slots, null_slot
        As for ``kda_prefill``, whose slots these are.
    out
        ``[N, C]`` for the result, allocated if None. Not ``qkv``: programs look back.

    Returns
    -------
    Tensor
        ``[N, C]`` in the type of ``qkv``.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; the message names it.
    ImportError, RuntimeError
        If Triton is missing or cannot run here.

    Examples
    --------
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> x, taps = torch.ones(2, 3, device=device), torch.ones(3, 4, device=device)
    >>> window = torch.zeros(1, 3, 3, device=device)
    >>> slot = torch.tensor([0], dtype=torch.int32, device=device)
    >>> y = kda_conv(x, taps, window, slot)
    >>> torch.allclose(y[1], torch.nn.functional.silu(2 * x[1])), window[0, 0].tolist()
    (True, [0.0, 1.0, 1.0])
    """
    check_ndim("kda_conv", "qkv", qkv, "[N, C]")
    num_tokens, channels = qkv.shape
    check_tensor("kda_conv", "qkv", qkv, (num_tokens, channels), like=qkv)
    taps = check_conv_weight("kda_conv", conv_weight, channels, like=qkv)
    has_slots = isinstance(conv_state, torch.Tensor) and conv_state.ndim > 0
    num_slots = conv_state.shape[0] if has_slots else 0
    check_conv_state("kda_conv", conv_state, (num_slots, channels), taps.shape[1], like=qkv)
    batch, has_initial_state = check_sequences(
        "kda_conv", state_slots, num_slots, null_slot, cu_seqlens=cu_seqlens,
        has_initial_state=has_initial_state, checkpoint_at=checkpoint_at,
        checkpoint_slots=checkpoint_slots, like=qkv,
    )  # fmt: skip
    if out is None:
        out = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    check_tensor("kda_conv", "out", out, (num_tokens, channels), like=qkv, output=True)
    if num_tokens == 0 or batch == 0 or channels == 0:
        return out

    kernels = load_kernels("kda_conv")
    check_runs_here("kda_conv", kernels.kda_conv_kernel, qkv, taps)
    # A kernel argument must be a tensor: what the constants switch off is given another one.
    lengths = state_slots if cu_seqlens is None else cu_seqlens
    continued = state_slots if has_initial_state is None else has_initial_state
    constants = {
        "VARLEN": cu_seqlens is not None,
        "CONTINUED": has_initial_state is not None,
        "WIDTH": taps.shape[1],
        "BLOCK_C": _BLOCK_C,
    }
    pieces = -(-channels // _BLOCK_C)
    block_t = _BLOCK_T
    while num_tokens > block_t * GRID_LIMIT:  # a million tokens, K3's whole context
        block_t *= 2
    strides = conv_state.stride()
    with on_device(qkv):
        kernels.kda_conv_kernel[(pieces, -(-num_tokens // block_t))](
            out, qkv, taps, conv_state, lengths, state_slots, continued, out.stride(0),
            qkv.stride(0), taps.stride(0), taps.stride(1), *strides, num_tokens, batch, num_slots,
            null_slot, channels, **constants, BLOCK_B=next_power_of_2(batch),
            BLOCK_T=block_t, COMPUTE=kernels.tl.float32, num_warps=4,
        )  # fmt: skip
        kernels.kda_window_kernel[(pieces, batch)](
            qkv, conv_state, lengths, state_slots, continued,
            state_slots if checkpoint_at is None else checkpoint_at,
            state_slots if checkpoint_slots is None else checkpoint_slots, qkv.stride(0), *strides,
            num_tokens, num_slots, null_slot, channels, **constants,
            CHECKPOINTS=checkpoint_at is not None, BLOCK_W=next_power_of_2(taps.shape[1] - 1),
            num_warps=4,
        )  # fmt: skip
    return out
