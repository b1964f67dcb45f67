"""AttnRes: the sum over depth that K3 uses instead of a plain residual stream, in one kernel.

Needs PyTorch; Triton when it runs. Lessons 01 and 04 use it.

A K3 sublayer does not read the sum of all earlier sublayers. It reads a softmax-weighted mix of up
to eight stored *blocks* (the embedding, then one sum of 24 sublayers each) and the running *prefix*
(the sublayers since the last block). For one token, with prefix ``p``, sublayer output ``d``,
blocks ``b_1 .. b_n``, pseudo-query ``q``, key-norm weight ``g`` and output-norm weight ``w``::

    p'      = p + d                                     rounded to the storage type
    s_i     = b_1, .., b_n, p'
    logit_i = sum(g * q * s_i) / sqrt(mean(s_i^2) + key_eps)
    a       = softmax(logit)                            no temperature
    mix     = sum_i a_i s_i                             sources as they are, not normalised
    out     = w * mix / sqrt(mean(mix^2) + norm_eps)    the RMSNorm of the sublayer that follows

All arithmetic is float32. The mix enters the last norm unrounded, as in vLLM's kernel; the Hugging
Face model rounds it to bfloat16 first, so the two differ by about one unit in the last place.

How the kernel spends its time
------------------------------
Per token it must read ``n + 2`` rows and write two: 172 kB at n = 8, H = 7168 in bfloat16. The
floor at T tokens is therefore T x 172 kB over the bandwidth, 0.04 us for one token and 328 us for
8192 on an H200 at 4.3 TB/s, and the two ends need different things.

*Every source is read once.* The mix needs all logits first, so the choice is between reading the
sources twice (the second time from cache) and keeping what was read. Nine rows of 7168 are 129 kB:
they would fit the 256 kB of registers of a multiprocessor only as bfloat16, with nothing else
running there. Online softmax needs neither: each source is folded into one running sum and dropped.

*Arithmetic is not free.* A token has 64 512 source elements and each costs a handful of
instructions. Counted in the machine code (sm_90, n = 8), four warps need 4 700 clocks a token if
every scheduler issues in every clock; a multiprocessor's share of 4.3 TB/s delivers a token in
9 200 clocks at 1.75 GHz. Hence rows in pieces of 1024, seven of them, where a single tile would be
masked up to 8192; sums taken lane by lane before they are reduced across lanes; and few warps,
because every warp repeats the reductions. On one tile of 8192 with eight warps it is 6 800.

*Few tokens (no more than one per multiprocessor): latency.* One token keeps one multiprocessor busy
while 131 idle, and what it waits for is arithmetic, 6 000 clocks on eight warps, and one reduction
a source. Three remedies, of which the measurement chooses:

- two launches (``slice_h``). The first takes the sums of all logits, with a program for each slice
  of a token; the second has asked for the blocks while the first ran (``pdl``), waits for the sums,
  and only has to mix. An H200 needs 4.6 us for one token and 5.5 for 16, against 7.9 and 8.0 of
  one program a token that takes block after block.
- two launches, both in slices (``mix_h``). The last norm wants the mean square of the whole mix,
  ``sum_ij a_i a_j (s_i . s_j)``: the first launch takes all products of two sources on tensor
  cores, and nothing is left that a slice of the second would have to ask another for. 3.75 us for
  one token, 4.5 for 16; with 64, 448 programs in either launch, it is 9.2.
- all blocks in registers at once, as bfloat16, and several of them taken into the mix together
  (``stages`` 0 and ``group``): one reduction a group. 5.6 us for one token, 6.7 for 64, where two
  launches do not fit side by side any more and take 8.2.

Copies into shared memory that run ahead (``stages`` above 1) help less: two rows in flight 7.9 us,
eight 10.1. Reading the blocks a second time from the cache, so that all sums can be taken in one
reduction, was expected to be best and takes 6.1.

*Many tokens: bandwidth.* A program waits at its start and end whatever it does, so at least two
share a multiprocessor (at most 255 registers a thread with 4 warps, and 114 kB of shared memory
each), each with two rows in flight. At 4.3 TB/s a multiprocessor needs about 33 bytes a
nanosecond, so a latency of 1 us asks for 33 kB in flight; this gives 57 kB. More was no faster.

*Launched early* (``pdl``): the kernel is scheduled while the one before it still runs and waits for
its end before it reads anything, which hides most of a launch, 0.6 to 0.8 us. What it will read may
travel into the second-level cache before that (``prefetch``). That changes the order: at 32 tokens
one launch in registers, 5.65 us, passes two, 6.2 and 5.9 with ``prefetch``; at 64 a pipeline on
four warps, 6.7, passes eight warps that hold all blocks, 7.0 and 6.9.

The constants come from these counts, from the compiler's register report and from sweeps on an
H200, ``python -m benchmarks.tune_attn_res``; without a table for the device, from
:func:`choose_config`.
"""

from __future__ import annotations

from functools import partial

import torch

from k3_kernels import tuned
from k3_kernels._compat import (
    check_ndim,
    check_runs_here,
    check_tensor,
    load_kernels,
    next_power_of_2,
    on_device,
)
from k3_kernels._numbers import check_number
from k3_kernels.attn_res_config import MAX_HIDDEN_SIZE, AttnResConfig, choose_config

__all__ = ["MAX_HIDDEN_SIZE", "AttnResConfig", "attn_res", "choose_config"]


def attn_res(
    blocks: torch.Tensor | None,
    prefix: torch.Tensor,
    delta: torch.Tensor | None,
    query: torch.Tensor,
    key_norm_weight: torch.Tensor,
    norm_weight: torch.Tensor,
    *,
    key_eps: float = 1e-5,
    norm_eps: float = 1e-5,
    out: torch.Tensor | None = None,
    prefix_out: torch.Tensor | None = None,
    config: AttnResConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a sublayer's output to the prefix, mix the sources over depth and normalise the mix.

    Rows must be contiguous (stride 1 in the last dimension); every other stride is free.

    Parameters
    ----------
    blocks
        Stored blocks ``[n, T, H]``, float32, float16 or bfloat16; None or n = 0 when there are none
        yet. An engine keeps one bank ``[n_max, max_tokens, H]`` per step and passes
        ``bank[:n, :T]``: storing a block is then one contiguous write, and handing the bank to the
        next pipeline stage one contiguous read. A token-major bank ``[T, n_max, H]`` works as
        ``bank[:, :n].transpose(0, 1)``.
    prefix
        Running prefix ``[T, H]``, same dtype.
    delta
        Output of the last sublayer ``[T, H]``, same dtype; None if there is nothing to add, as
        after the attention of a layer that stored a block: its output *is* the new prefix.
    query
        Learned pseudo-query ``[H]`` or ``[1, H]`` (checkpoint ``*_res_proj.weight``). It and the
        other two weights may have any of the three float types.
    key_norm_weight
        Weight of the key norm ``[H]`` (checkpoint ``*_res_norm.weight``).
    norm_weight
        Weight ``[H]`` of the RMSNorm that follows.
    key_eps, norm_eps
        Added to the mean square in the key norm and in the following norm.
    out, prefix_out
        Buffers ``[T, H]`` for the results, allocated if None. ``prefix_out`` may be ``prefix``
        itself, or the bank's next free row ``bank[n, :T]``, which stores a block at no cost.
        Apart from that, outputs must not overlap inputs.
    config
        Constants of the call; None takes measured ones, or :func:`choose_config`'s.

    Returns
    -------
    out, new_prefix
        Both ``[T, H]`` in the dtype of ``prefix``. Without ``delta`` and ``prefix_out`` the new
        prefix is ``prefix`` itself, not a copy.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; the message names it. The interpreter refuses bfloat16.
    ImportError
        If Triton is missing.
    RuntimeError
        If the tensors are on the CPU and ``TRITON_INTERPRET=1`` was not set in time.

    Examples
    --------
    With no stored block the mix is the prefix, so the result is its RMSNorm. This runs on a GPU, or
    anywhere under ``TRITON_INTERPRET=1``:

    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> ones = torch.ones(4, device=device)
    >>> prefix, delta = torch.ones(2, 4, device=device), 2 * torch.ones(2, 4, device=device)
    >>> out, prefix = attn_res(None, prefix, delta, ones, ones, ones, norm_eps=0.0)
    >>> out[0].tolist(), prefix[0].tolist()
    ([1.0, 1.0, 1.0, 1.0], [3.0, 3.0, 3.0, 3.0])
    """
    for name, eps in (("key_eps", key_eps), ("norm_eps", norm_eps)):
        check_number("attn_res", name, eps, at_least=0.0)
    check_ndim("attn_res", "prefix", prefix, "[T, H]")
    num_tokens, hidden_size = prefix.shape
    if not 1 <= hidden_size <= MAX_HIDDEN_SIZE:
        raise ValueError(
            f"k3_kernels.attn_res: hidden size {hidden_size} is outside 1..{MAX_HIDDEN_SIZE}"
        )
    if blocks is not None:
        check_ndim("attn_res", "blocks", blocks, "[n, T, H] (block, token, hidden)")
    n_blocks = 0 if blocks is None else blocks.shape[0]
    if isinstance(query, torch.Tensor) and query.ndim == 2 and query.shape[0] == 1:
        query = query[0]  # the checkpoint keeps it as a [1, H] projection

    check = partial(check_tensor, "attn_res", like=prefix)
    row, rows = (hidden_size,), (num_tokens, hidden_size)
    check("prefix", prefix, rows)
    if blocks is not None:
        check("blocks", blocks, (n_blocks, *rows))
    if delta is not None:
        check("delta", delta, rows)
    check("query", query, row, same_dtype=False)
    check("key_norm_weight", key_norm_weight, row, same_dtype=False)
    check("norm_weight", norm_weight, row, same_dtype=False)
    if out is None:
        out = torch.empty(rows, dtype=prefix.dtype, device=prefix.device)
    check("out", out, rows, output=True)
    store_prefix = delta is not None or prefix_out is not None
    if prefix_out is None:
        prefix_out = torch.empty_like(out) if store_prefix else prefix
    else:
        check("prefix_out", prefix_out, rows, output=True)
    if num_tokens == 0:
        return out, prefix_out

    if config is None:
        config = _config(num_tokens, n_blocks, hidden_size, prefix)
    way = "attn_res_gram" if config.mix_h else "attn_res_split" if config.slice_h else "attn_res"
    kernels = load_kernels(way)
    first = {
        "attn_res": "attn_res_kernel",
        "attn_res_split": "attn_res_scores_kernel",
        "attn_res_gram": "attn_res_gram_kernel",
    }[way]
    first = getattr(kernels, first)
    check_runs_here("attn_res", first, prefix, query, key_norm_weight, norm_weight)
    # A kernel argument must be a tensor: what the constants switch off is given the prefix instead.
    bank = prefix[None] if blocks is None or n_blocks == 0 else blocks
    addend = prefix if delta is None else delta
    bank_strides = (bank.stride(0), bank.stride(1))
    shape = config.constants(n_blocks, hidden_size, delta is not None, store_prefix)
    with on_device(prefix):
        if not config.slice_h:
            first[(num_tokens,)](
                out, prefix_out, bank, prefix, addend, query, key_norm_weight, norm_weight,
                out.stride(0), prefix_out.stride(0), *bank_strides, prefix.stride(0),
                addend.stride(0), key_eps, norm_eps,
                **shape, COMPUTE=kernels.tl.float32, **config.options(config.num_warps),
            )  # fmt: skip
            return out, prefix_out
        slices = -(-hidden_size // config.slice_h)
        if config.mix_h:
            padded = max(16, next_power_of_2(n_blocks + 4))
            grams = prefix.new_empty((num_tokens, slices, padded, padded), dtype=torch.float32)
            kernels.attn_res_gram_kernel[(num_tokens, slices)](
                grams, prefix_out, bank, prefix, addend, query, key_norm_weight,
                prefix_out.stride(0), *bank_strides, prefix.stride(0), addend.stride(0),
                N_BLOCKS=n_blocks, HIDDEN=hidden_size, HAS_DELTA=delta is not None,
                STORE_PREFIX=store_prefix, ROWS=padded, SLICE=config.slice_h,
                PARTS=config.slice_warps,
                STEPS=max(1, config.slice_h // (256 * config.slice_warps)), PDL=config.pdl,
                PREFETCH=config.prefetch, COMPUTE=kernels.tl.float32,
                **config.options(config.slice_warps),
            )  # fmt: skip
            kernels.attn_res_slice_kernel[(num_tokens, -(-hidden_size // config.mix_h))](
                out, grams, bank, prefix_out, norm_weight, out.stride(0), *bank_strides,
                prefix_out.stride(0), key_eps, norm_eps,
                N_BLOCKS=n_blocks, HIDDEN=hidden_size, ROWS=padded, SLICES=slices,
                SLICE=config.mix_h, PDL=config.pdl, EARLY=config.preload,
                COMPUTE=kernels.tl.float32, **config.options(config.num_warps),
            )  # fmt: skip
            return out, prefix_out
        padded = next_power_of_2(n_blocks + 1)
        sums = prefix.new_empty((num_tokens, slices, padded, 2), dtype=torch.float32)
        first[(num_tokens, slices)](
            sums, prefix_out, bank, prefix, addend, query, key_norm_weight,
            prefix_out.stride(0), *bank_strides, prefix.stride(0), addend.stride(0),
            N_BLOCKS=n_blocks, HIDDEN=hidden_size, HAS_DELTA=delta is not None,
            STORE_PREFIX=store_prefix, ROWS=padded, SLICE=config.slice_h, PDL=config.pdl,
            PREFETCH=config.prefetch, COMPUTE=kernels.tl.float32,
            **config.options(config.slice_warps),
        )  # fmt: skip
        kernels.attn_res_mix_kernel[(num_tokens,)](
            out, sums, bank, prefix_out, norm_weight, out.stride(0), *bank_strides,
            prefix_out.stride(0), key_eps, norm_eps,
            N_BLOCKS=n_blocks, HIDDEN=hidden_size, ROWS=padded, SLICES=slices,
            BLOCK_H=config.block_h, PDL=config.pdl, COMPUTE=kernels.tl.float32,
            **config.options(config.num_warps),
        )  # fmt: skip
    return out, prefix_out


def _config(
    num_tokens: int, n_blocks: int, hidden_size: int, prefix: torch.Tensor
) -> AttnResConfig:
    itemsize = prefix.element_size()
    measured = None
    if itemsize == 2:  # measured in bfloat16; float32 rows need twice the registers
        measured = tuned.lookup("attn_res", f"H={hidden_size}", num_tokens, prefix.device)
    if measured:
        return AttnResConfig(**measured)
    return choose_config(num_tokens, n_blocks, hidden_size, itemsize)
