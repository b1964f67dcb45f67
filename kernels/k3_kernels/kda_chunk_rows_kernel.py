"""Which tokens a chunk of a prompt holds: pieces of the kernels of :func:`k3_kernels.kda_prefill`.

Needs Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["chunks_before", "pick", "rows_of_chunk"]


@triton.jit
def chunks_before(
    cu_seqlens_ptr,
    checkpoint_ptr,
    num_sequences,
    num_tokens,
    VARLEN: tl.constexpr,
    CHECKPOINTS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Count the chunks of each sequence; return what they follow from too, all ``[BLOCK_B]``.

    A sequence is cut at its checkpoint, so that the state there is one between two chunks. Every
    program works this out again from the lengths: cheaper than a launch, and than asking the GPU.
    """
    sequence = tl.arange(0, BLOCK_B)
    present = sequence < num_sequences
    if VARLEN:
        begin = tl.load(cu_seqlens_ptr + sequence, mask=present, other=0)
        length = tl.load(cu_seqlens_ptr + sequence + 1, mask=present, other=0) - begin
    else:
        begin = tl.zeros([BLOCK_B], tl.int32)
        length = tl.where(present, num_tokens, 0)
    cut = tl.zeros([BLOCK_B], tl.int32)
    if CHECKPOINTS:
        cut = tl.load(checkpoint_ptr + sequence, mask=present, other=0)
        cut = tl.where((cut > 0) & (cut <= length), cut, 0)
    before_cut = (cut + CHUNK - 1) // CHUNK
    count = before_cut + (length - cut + CHUNK - 1) // CHUNK
    return sequence, begin, length, cut, before_cut, count


@triton.jit
def pick(values, sequence, wanted):
    """Return the value of one sequence."""
    return tl.sum(tl.where(sequence == wanted, values, 0), 0)


@triton.jit
def rows_of_chunk(index, begin, length, cut, before_cut, CHUNK: tl.constexpr):
    """Return the first token of chunk ``index`` of a sequence and how many tokens it has."""
    behind = index >= before_cut
    start = tl.where(behind, cut + (index - before_cut) * CHUNK, index * CHUNK)
    end = tl.where(behind, length, cut)
    return begin + start, tl.minimum(end - start, CHUNK)
