"""KDA over whole prompts: chunks of 64 tokens prepared in parallel, then a walk over each sequence.

Needs PyTorch; Triton when it runs. Lesson 06 uses it.

Within a chunk that begins with state ``S [V, K]``, let ``G_i`` be the sum of the log-decays up to
row i. What row i writes depends on what the rows before it wrote, a unit lower triangular system::

    A_ij = beta_i (k_i e^(G_i - G_j)) . k_j          j < i
    R    = (I + A)^-1 diag(beta) (V - (K e^G) S^T)
    O    = (Q e^G) S^T + tril((q_i e^(G_i - G_j)) . k_j) R
    S'   = S diag(e^(G_C)) + R^T (K e^(G_C - G))

Only S passes from chunk to chunk. So the first kernel works out, for all chunks at once, everything
in which S does not occur: ``K e^G``, ``Q e^G``, ``K e^(G_C - G)``, the solved triangle and the
scores. The second walks along each sequence and only multiplies matrices.

In plain PyTorch it is ``kimik3_lab.reference.kda.chunked``; the test compares with the recurrence.

How the kernels spend their time
--------------------------------
Numbers are of one H200, 12 heads, one sequence of 8192 tokens, whose bytes alone take 30 us.

*The walk is a chain.* 128 steps, each of which waits for the one before: S times K e^G, the
triangle, the update. With few heads nearly all of the chip looks on, so values, which do not mix,
are cut (64 for each program, because 64 rows are the least that ``wgmma`` takes), and sequences
too: a survey finds out how each segment maps states and where it ends from nothing, a short pass
leads from start to start, and all segments are walked at once. Everything is transposed: S is the
left factor of all products with it and stays in registers as the tensor cores left it,
``[values, keys]``, which is the layout of the cache too. Five segments: survey 57, starts 14, walk
68 us; a third of survey and walk waited for the copy engine with one chunk in flight.

*Preparation is instructions*, not bytes: 52 000 of a warp for a chunk and head took 335 us, 22 000
take 155. Products with matrices of 0, 1 and -1 add up decays; each half of the rows meets all keys
in its own middle, which takes two products instead of one for every 16 rows; and keys stay as long
as they are: the triangle, the walk's errors and its outputs make up for that, a vector each.

*Decays divide only within 16 rows*, where they are at least e^-80 and float32 can hold the inverse.
So ``lower_bound`` must not be below -5, K3's.

*A checkpoint is a cut.* A sequence whose state is wanted after p tokens is cut there, and the walk
writes the state out in passing: one pass, at the price of a chunk that is not full.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch

from k3_kernels._compat import (
    check_ndim,
    check_runs_here,
    check_tensor,
    load_kernels,
    next_power_of_2,
    on_device,
)
from k3_kernels.kda_cache import check_gate_weights, check_state, check_step_numbers
from k3_kernels.kda_prefill_config import CHUNK, HALF, KDAPrefillConfig, choose_config
from k3_kernels.kda_slots import check_sequences

__all__ = ["CHUNK", "HALF", "KDAPrefillConfig", "choose_config", "kda_prefill"]


#: Names of the launches, in their order; without segments there are only the first and the last.
LAUNCHES = ("prepare", "survey", "starts", "walk")


def kda_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw_gate: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    state_slots: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    checkpoint_at: torch.Tensor | None = None,
    checkpoint_slots: torch.Tensor | None = None,
    lower_bound: float = -5.0,
    scale: float | None = None,
    l2_eps: float = 1e-6,
    null_slot: int = -1,
    out: torch.Tensor | None = None,
    config: KDAPrefillConfig | None = None,
    only: str | None = None,
) -> torch.Tensor:
    """Run the delta rule over the tokens of B sequences and leave their states in their slots.

    Parameters
    ----------
    q, k, v
        ``[N, H, D]``, D = 16, 32, 64 or 128, after convolution and SiLU, not normalised; float32,
        float16 or bfloat16. Rows may be any distance apart, the heads of a row not.
    raw_gate, raw_beta
        ``[N, H, D]`` and ``[N, H]``, before bias, sigmoid and so on, same type.
    A_log, dt_bias
        ``[>= H]`` and ``[H * D]`` or ``[H, D]``, any float type.
    state
        ``[slots, H, V, K]`` float32, the ``[V, K]`` of a head contiguous.
    state_slots
        ``[B]`` int32. A slot of ``null_slot`` or less is padding: its ``out`` rows are 0 and its
        state stays. On a GPU a slot that does not exist gives NaN rows.
    cu_seqlens
        ``[B + 1]`` int32: tokens of sequence b are rows ``cu_seqlens[b]`` to
        ``cu_seqlens[b + 1] - 1``. None: all N tokens are one sequence.
    has_initial_state
        ``[B]`` bool or int32: whether the state starts from what is in the slot. None: from zero.
    checkpoint_at, checkpoint_slots
        ``[B]`` int32 each: where ``checkpoint_at[b]`` is between 1 and the sequence's length, the
        state after so many of these tokens goes to slot ``checkpoint_slots[b]`` as well. Not to
        ``state_slots[b]``, which takes the end, nor to a slot of another sequence.
    lower_bound
        K3's gate, between -5 and 0.
    scale, l2_eps, null_slot, out
        As for ``kda_decode``; ``out`` is ``[N, H, D]``, before the gated norm.
    config
        Constants of the launches; None asks :func:`choose_config`. For benchmarks.
    only
        ``"prepare"``, ``"survey"``, ``"starts"`` or ``"walk"``: one launch alone, to time it.

    Returns
    -------
    Tensor
        ``[N, H, D]`` in the type of ``q``. Rows that belong to no sequence are not written.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; the message names it.
    ImportError, RuntimeError
        If Triton is missing or cannot run here.

    Examples
    --------
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> x, beta = torch.randn(5, 1, 32, device=device), torch.zeros(5, 1, device=device)
    >>> state = torch.zeros(2, 1, 32, 32, device=device)
    >>> slot = torch.tensor([1], dtype=torch.int32, device=device)
    >>> out = kda_prefill(x, x, x, x, beta, beta[0], beta.new_zeros(32), state, slot)
    >>> out.shape, state.flatten(1).any(1).tolist()
    (torch.Size([5, 1, 32]), [False, True])
    """
    check_ndim("kda_prefill", "q", q, "[N, H, D]")
    num_heads, head_dim, num_slots = check_state("kda_prefill", state, like=q)
    num_tokens = q.shape[0]
    shape = (num_tokens, num_heads, head_dim)
    if out is None:
        out = torch.empty(shape, dtype=q.dtype, device=q.device)
    for name, tensor in (("q", q), ("k", k), ("v", v), ("raw_gate", raw_gate), ("out", out)):
        check_tensor("kda_prefill", name, tensor, shape, like=q, output=name == "out")
        if tensor.numel() and num_heads > 1 and tensor.stride(1) != head_dim:
            raise ValueError(
                f"k3_kernels.kda_prefill: {name} has stride {tensor.stride(1)} between heads, "
                f"expected {head_dim}: call .contiguous() first"
            )
    check_tensor("kda_prefill", "raw_beta", raw_beta, shape[:2], like=q)
    dt_bias = check_gate_weights("kda_prefill", A_log, dt_bias, num_heads, head_dim, like=q)
    if not isinstance(lower_bound, (int, float)) or not -5.0 <= lower_bound < 0.0:
        raise ValueError(
            f"k3_kernels.kda_prefill: lower_bound is {lower_bound!r}, expected -5 to 0: 16 rows of "
            "a stronger decay leave the range of float32. kda_decode has no such limit"
        )
    check_step_numbers("kda_prefill", scale=scale, l2_eps=l2_eps)
    if only not in (None, *LAUNCHES):
        raise ValueError(
            f"k3_kernels.kda_prefill: only is {only!r}, expected None or one of "
            f"{', '.join(LAUNCHES)}"
        )
    batch, has_initial_state = check_sequences(
        "kda_prefill", state_slots, num_slots, null_slot, cu_seqlens=cu_seqlens,
        has_initial_state=has_initial_state, checkpoint_at=checkpoint_at,
        checkpoint_slots=checkpoint_slots, like=q,
    )  # fmt: skip
    if num_tokens == 0 or batch == 0 or num_heads == 0:
        return out

    chunks_kernels = load_kernels("kda_prefill", "kda_chunks")
    kernels = load_kernels("kda_prefill", "kda_scan")
    tl = kernels.tl
    check_runs_here("kda_prefill", kernels.kda_scan_kernel, q, A_log, dt_bias)
    # Products of 16-bit tokens have factors up to e^80, which float16 cannot hold; the interpreter
    # cannot compute with bfloat16.
    wide = q.dtype == torch.float32 or q.device.type == "cpu"
    operand = torch.float32 if wide else torch.bfloat16
    if config is None:
        heads, tokens = batch * num_heads, num_tokens // batch
        config = choose_config(heads, tokens, head_dim, q.device, q.dtype)
    block_v = min(config.block_v, head_dim)
    # Every sequence may end, and be cut, within a chunk.
    chunks = num_tokens // CHUNK + batch * (1 if checkpoint_at is None else 2)

    def scratch(*size: int, dtype: torch.dtype = operand) -> torch.Tensor:
        return torch.empty(chunks, num_heads, *size, dtype=dtype, device=q.device)

    factors = scratch(3, CHUNK, head_dim)
    solve, scores = (scratch(CHUNK, CHUNK) for _ in range(2))
    decay = scratch(head_dim, dtype=torch.float32)
    inverse = scratch(2, CHUNK, dtype=torch.float32)
    # A kernel argument must be a tensor: what the constants switch off is given another one.
    lengths = state_slots if cu_seqlens is None else cu_seqlens
    cuts = state_slots if checkpoint_at is None else checkpoint_at
    constants = {
        "VARLEN": cu_seqlens is not None,
        "CHECKPOINTS": checkpoint_at is not None,
        "BLOCK_B": next_power_of_2(batch),
        "D": head_dim,
        "CHUNK": CHUNK,
        "COMPUTE": tl.float32,
    }

    limit = {"maxnreg": config.chunk_registers} if config.chunk_registers else {}
    # What nobody asks for of a chunk's products would leave float32, of which NumPy complains.
    factor = tl.float64 if q.device.type == "cpu" else tl.float32 if wide else tl.bfloat16

    def prepare() -> None:
        chunks_kernels.kda_chunks_kernel[(num_heads, chunks)](
            q, k, raw_gate, raw_beta, A_log, dt_bias, lengths, cuts,
            _sums(q.device, torch.float32 if wide else torch.float16), factors, solve, scores,
            decay, inverse, q.stride(0), k.stride(0), raw_gate.stride(0), raw_beta.stride(0),
            num_tokens, batch, lower_bound, head_dim**-0.5 if scale is None else scale, l2_eps,
            **constants, HALF=HALF, BLOCK_K=min(config.block_k, head_dim), OPERAND=factor,
            TRIANGLE=tl.float32 if wide else tl.float16, STAGES=config.chunk_stages,
            num_warps=config.chunk_warps, num_stages=1, **limit,
        )  # fmt: skip

    def blocks(tensor: torch.Tensor, rows: int = CHUNK, columns: int = 0) -> Any:
        # The copy engine brings a block of rows without an address for each.
        flat = tensor if columns else tensor.view(-1, tensor.shape[-1])
        return kernels.TensorDescriptor.from_tensor(flat, [rows, columns or flat.shape[-1]])

    values = v.as_strided((num_tokens, num_heads * head_dim), (v.stride(0), 1))
    if v.data_ptr() % 16 or v.stride(0) * v.element_size() % 16:
        values = values.contiguous()  # rows that the copy engine cannot address

    # A checkpoint leaves through shared memory that a third chunk would take.
    scan_stages = min(config.scan_stages, 3 if checkpoint_at is None else 2)
    segments = config.segments
    if segments > 1:
        map_shape = (batch, segments, num_heads, head_dim, head_dim)
        starts = torch.empty(map_shape, dtype=torch.float32, device=q.device)
        maps = torch.empty(2, *map_shape, dtype=operand, device=q.device)
    else:
        starts, maps = decay, factors[None].expand(2, *factors.shape)  # not touched

    def walk(survey: bool) -> None:
        parts = head_dim // block_v
        grid = (num_heads, parts * 2, batch * (segments - 1)) if survey else (
            num_heads, parts, batch * segments
        )  # fmt: skip
        kernels.kda_scan_kernel[grid](
            out, blocks(values, columns=block_v), *map(blocks, (factors, solve, scores)), decay,
            inverse, state, starts,
            maps, lengths,
            state_slots, state_slots if has_initial_state is None else has_initial_state, cuts,
            state_slots if checkpoint_slots is None else checkpoint_slots, out.stride(0),
            state.stride(0), state.stride(1), num_tokens, batch, num_slots, null_slot,
            **constants, CONTINUED=has_initial_state is not None, SEGMENTS=segments, SURVEY=survey,
            BLOCK_V=block_v, STAGES=scan_stages, num_warps=config.scan_warps,
        )  # fmt: skip

    def lead() -> None:
        kernels.kda_starts_kernel[(num_heads, head_dim // block_v, batch)](
            starts, blocks(maps[0], rows=head_dim), blocks(maps[1], rows=head_dim),
            SEGMENTS=segments, D=head_dim, BLOCK_V=block_v, STAGES=min(2, config.scan_stages),
            COMPUTE=tl.float32,
            num_warps=config.scan_warps,
        )  # fmt: skip

    launches = {"prepare": prepare}
    if segments > 1:
        launches["survey"] = partial(walk, True)
    if segments > 2:
        launches["starts"] = lead
    launches["walk"] = partial(walk, False)
    with on_device(q):
        for name, launch in launches.items():
            if only is None or only == name:
                launch()
    return out


@cache
def _sums(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Matrices of 0, 1 and -1 that add up the decays of a chunk's rows.

    Up to a row, behind it, from the middle of its half to it, and from it to the middle of each
    half.
    """
    i, j = torch.arange(CHUNK)[:, None], torch.arange(CHUNK)[None, :]
    upto = (j <= i).int()
    middle = i // HALF * HALF + HALF // 2
    # Keys of the second half are of no use to rows of the first.
    to_first = torch.where(i < HALF, (j < HALF // 2).int() - upto, 0)
    to_second = (j < HALF + HALF // 2).int() - upto
    sums = (upto, 1 - upto, upto - (j < middle).int(), to_first, to_second)
    return torch.stack(sums).to(device, dtype)
