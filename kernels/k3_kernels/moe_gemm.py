"""The two grouped GEMMs of the routed experts: gate-up with SiTU, and down with the pair's weight.

Needs PyTorch; Triton when they run. :mod:`k3_kernels.moe` puts them together; lesson 04 climbs the
ladder that leads to them.

Two regimes. An expert call reads the weights of every expert that any token chose. On a rank of
eight with 896 experts of width 384 that is 35 MB for one token, 1.34 GB for 64, 2 GB from 1000 on
(MXFP4); the products cost 43 us at T = 256 and 1370 us at T = 8192 at 790 TFLOP/s, the bytes 454
and 484 us at 4.3 TB/s. So up to about 2800 tokens memory is the floor, and beyond, arithmetic.

Few tokens an expert (:mod:`k3_kernels.moe_gemm_kernel`)
--------------------------------------------------------
*The instructions are the budget.* To stream MXFP4 at 4.3 TB/s a multiprocessor unpacks 35 weights a
clock, and it issues 128 lane instructions: 3.6 a weight for everything. The gate-up loop of 64 + 64
rows and 256 columns has 652 instructions for 256 weights a lane, 2.55 a weight (Triton 3.6, sm_90;
3.2 with ``"nibbles"``), because

- weights are the left operand of the matrix instruction, 64 rows for four warps, and 8 tokens are
  its columns: the smallest shape there is, and words go from shared memory straight into the
  registers of that operand;
- a plane of a word is a pair of bfloat16 numbers after one rotation and one mask;
- the scale of a group multiplies the *accumulator*: 4 multiply-adds a lane for 32 x 64 weights;
- scale bytes are stored as exponent fields: one mask, one shift.

*Scales are asked for one step early, by hand.* Triton's pipeline runs copies ahead for the operands
of a dot. A scale meets the result, so its load stayed where it is used and every step waited for
memory; with the loads a step ahead the compiler also needs 80 instead of 120 registers, and five
programs share a multiprocessor instead of four.

*Launches.* With one token, 96 programs cannot fill 132 multiprocessors: ``gate_split`` gives each
four parts of the columns; the part that finishes last, told by a counter in memory, adds up. Down
with 384 columns is three steps, too short to hide their start: a program keeps its activations and
walks over ``down_row_blocks`` blocks of rows.

Many tokens an expert (:mod:`k3_kernels.moe_prefill_gate_kernel`, ``..._down_kernel``)
--------------------------------------------------------------------------------------
*Unpack once, multiply 32 to 160 columns.* Scaling accumulators would cost as much as the products
(one multiply-add for 32), so here scales multiply the weights, two at a time, exactly. 128 columns
become one operand in registers and eight ``wgmma`` follow one another without a wait; the next
operand is unpacked while they run. 3.6 instructions a weight, for 16 weights a clock at 128 tokens.

*Tiles fit the load.* 8192 tokens x 16 choices are 146 pairs an expert: two tiles of 128 would be
43 % padding, three of 64 unpack three times. A program takes 128 + 32 with two products from one
unpacked operand, 91 % full. This took gate-up from 2078 to 1640 us and down from 1219 to 973 us.
For the 37 tokens an expert has at T = 2048 it is 32 + 16 instead of 64, and ``fit`` reads no copies
where a tile is not full; together with the list below a whole call takes 1029 and 1128 instead of
1083 and 1223 us with even and skewed load, expert parallel. Plain weights cost nothing to unpack,
so half a tile and the extra one, 96, are a size of their own there (``fit_extra``).

*No program for nothing, and weights read once* (:mod:`k3_kernels.moe_tiles`). Of five programs with
tiles of 128 + 32 four used to end at once; and tile after tile of one expert each read its 44 MB of
bfloat16 weights anew. From the list, T = 8192, expert parallel, even and skewed load: 3085 -> 2845
and 3284 -> 3026 us in bfloat16, 2474 -> 2356 and 2742 -> 2581 us in MXFP4.

*The copy engine brings plain weights* (``gate_boxed``, ``down_boxed``): no addresses, no copy
instructions, and registers left for a second program of down on a multiprocessor, although it then
spills some 80 of them before and behind its loop. Against the call before boxes and list 3158 ->
2632 and 3396 -> 2843 us, at four places of the list at a time; at one 2687 and 2853 us. Activations
of gate-up are gathered row by row, which it cannot do on Hopper.

On a tensor-parallel rank down has six steps, and boxes gain nothing. There a program walks over
``down_row_blocks`` blocks of rows, and 14 instead of 4 take 1287 instead of 1341 us: the whole call
3605 -> 3322 and 3947 -> 3625 us.

Bfloat16 weights run through the same kernels without the unpacking; there vLLM's Triton kernel
already reaches 95 % of the bandwidth for T = 16 to 256, and so do these.

What limits the rest, side by side with the peers (``data/results/h200/kernels.json``): at 64 and
256 tokens 85 to 89 % of the bandwidth; at one token 22 us for 8 us of bytes, of which gate-up is
12, down 7, and the rest launches. At T = 8192 about half of 790 TFLOP/s: a multiprocessor reads
each token once for every 64 or 128 rows of weights, 5 TB/s from the L2 cache in all. Triton 3.9
allocates otherwise than 3.6, with which all this was measured: without a bound of 128 registers
only two gate-up programs with 32 + 16 tokens share a multiprocessor, and with ``fit`` the tallest
tile of down on a tensor-parallel rank finds no room at all.

What was tried and lost, on an H200, gate-up at T = 64 (223 us) unless said otherwise: four stages
(255 us), unrolling four times (268 us); 16 tokens a program (404 against 334 us at T = 256);
activations in one copy a step, cut in registers (fewer instructions, 2.48 a weight, but no faster,
and down of width 3072 142 -> 181 us); tiles of 32 + 16 at T = 2048 without ``fit`` and the list
(766 against 654 us), of 64 + 16 with them (746 against 633 us); of 32 + 8 at T = 1024 (1206 against
472 us). For down on a tensor-parallel rank at T = 8192 in bfloat16 (1287 us): boxes (1303 us),
activations kept in registers (1544 us), or kept and boxes (1716 us).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from k3_kernels._compat import check_runs_here, load_kernels, next_power_of_2, on_device
from k3_kernels.moe_config import MoEConfig
from k3_kernels.moe_launch import (
    box,
    compute_type,
    counters,
    fits_box,
    index_type,
    register_limit,
    weight_format,
    weight_tensors,
)
from k3_kernels.moe_weights import ExpertWeights, MXFP4Experts

__all__ = ["Groups", "down", "gate_up"]


@dataclass(frozen=True)
class Groups:
    """Which rows go to which expert: the pairs themselves, or what dispatch made of them.

    Attributes
    ----------
    ids
        Direct: expert of every pair, int ``[P]``. Else pair of every slot.
    block_experts
        Expert of every block, or the list of tiles; not used if direct.
    num_pairs, num_blocks, num_rows
        P; programs along the rows; rows of the activations in between.
    direct
        No dispatch was made: ids are those of the router, and programs find their pairs.
    first_expert
        Id of the first expert that is here; only used if direct.
    """

    ids: torch.Tensor
    block_experts: torch.Tensor
    num_pairs: int
    num_blocks: int
    num_rows: int
    direct: bool
    first_expert: int = 0


def gate_up(
    x: torch.Tensor,
    experts: ExpertWeights,
    groups: Groups,
    top_k: int,
    config: MoEConfig,
    *,
    beta: float = 4.0,
    linear_beta: float = 25.0,
    fused: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``SiTU(x @ gate.T, x @ up.T)`` for every row of the groups.

    Parameters
    ----------
    x
        ``[T, H]``.
    experts, groups, top_k, config
        Weights, who goes where, choices of a token, launch constants.
    beta, linear_beta
        Of SiTU.
    fused
        False leaves SiTU out, for the lesson's ladder: ``out`` is ``[groups.num_rows, 2 I]`` then.
    out
        ``[groups.num_rows, I]``; allocated if None. Rows of no expert here are not written.

    Returns
    -------
    Tensor
        ``[groups.num_rows, I]`` in the type of ``x``.
    """
    hidden, inner = experts.hidden_size, experts.intermediate_size
    if out is None:
        out = x.new_empty((groups.num_rows, inner if fused else 2 * inner))
    mxfp4 = isinstance(experts, MXFP4Experts)
    if config.prefill or not mxfp4:
        kernels = load_kernels("moe_prefill_gate")
        kernel = kernels.gate_up_prefill_kernel
        check_runs_here("moe_experts", kernel, x)
        boxed = config.gate_boxed and not mxfp4 and fits_box(experts.gate_up)
        operands = weight_tensors(experts, "gate_up")
        if boxed:
            rows = experts.gate_up.flatten(0, 1)
            operands = (box(rows, config.gate_block_n, config.block_k), operands[1])
        grid = groups.num_blocks * -(-inner // config.gate_block_n)
        with on_device(x):
            kernel[(grid,)](
                out, x, *operands, groups.ids, groups.block_experts,
                x.stride(0), groups.num_pairs, groups.num_blocks, H=hidden, I=inner, TOP_K=top_k,
                BETA=beta, LINEAR_BETA=linear_beta, FUSED=fused,
                **weight_format(experts, "gate_up"), BLOCK_M=config.block_m, EXTRA_M=config.extra_m,
                BLOCK_N=config.gate_block_n, BLOCK_K=128 if mxfp4 else config.block_k,
                FIT=config.fit, FIT_EXTRA=config.fit_extra, BOXED=boxed, LISTED=config.listed,
                INDEX=index_type(kernels, x), COMPUTE=compute_type(kernels, x),
                num_warps=config.gate_warps, num_stages=config.gate_stages,
                **register_limit(config.gate_registers),
            )  # fmt: skip
        return out
    kernels = load_kernels("moe_gemm")
    kernel = kernels.gate_up_kernel
    check_runs_here("moe_experts", kernel, x)
    programs = groups.num_blocks * -(-inner // 64)
    split = config.gate_split
    partial = counter = groups.ids  # stand-ins: not read without a split
    if split > 1:
        size = (programs * split, 2 * config.block_m * 64)
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        counter = counters(x.device, programs)
    with on_device(x):
        kernel[(programs * split,)](
            out, x, *weight_tensors(experts, "gate_up"), groups.ids, groups.block_experts, partial,
            counter, x.stride(0), groups.num_pairs, groups.first_expert, H=hidden, I=inner,
            TOP_K=top_k, NUM_EXPERTS=experts.num_experts, BETA=beta, LINEAR_BETA=linear_beta,
            FUSED=fused, ROTATED=experts.gate_up.layout == "rotated", WIDE=experts.gate_up.wide,
            MAX_PAIRS=_max_pairs(groups), BLOCK_M=config.block_m, SPLIT_K=split,
            UNROLL=config.gate_unroll, COMPUTE=compute_type(kernels, x),
            num_warps=config.gate_warps, num_stages=config.gate_stages,
            **register_limit(config.gate_registers),
        )  # fmt: skip
    return out


def down(
    act: torch.Tensor,
    experts: ExpertWeights,
    groups: Groups,
    weights: torch.Tensor,
    config: MoEConfig,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``weight * (act @ down.T)`` for every pair.

    Parameters
    ----------
    act
        ``[groups.num_rows, I]`` from :func:`gate_up`.
    experts, groups, config
        As there.
    weights
        float32 ``[P]``.
    out
        ``[P * config.down_split, H]``; allocated if None.

    Returns
    -------
    Tensor
        ``[P * down_split, H]``: the summands of pair p in rows ``p * down_split ..``. Pairs of no
        expert here: zeros if the groups are direct, not written otherwise.
    """
    hidden, inner = experts.hidden_size, experts.intermediate_size
    mxfp4 = isinstance(experts, MXFP4Experts)
    split = 1 if config.prefill or not mxfp4 else config.down_split
    if out is None:
        out = act.new_empty((groups.num_pairs * split, hidden))
    if config.prefill or not mxfp4:
        kernels = load_kernels("moe_prefill_down")
        kernel = kernels.down_prefill_kernel
        check_runs_here("moe_experts", kernel, act)
        row_blocks = -(-hidden // config.down_block_n)
        chunks = -(-row_blocks // config.down_row_blocks)
        boxed = config.down_boxed and not mxfp4 and fits_box(experts.down, act)
        operands = (act, *weight_tensors(experts, "down"))
        half_act = extra_act = None
        if boxed:
            block, columns = config.block_m, config.block_k
            rows = box(experts.down.flatten(0, 1), config.down_block_n, columns)
            operands = (box(act, block, columns), rows, operands[2])
            half_act = box(act, max(1, block // 2), columns)
            extra_act = box(act, config.granule, columns)
        with on_device(act):
            kernel[(groups.num_blocks * chunks,)](
                out, *operands, weights, groups.ids, groups.block_experts, half_act, extra_act,
                groups.num_pairs, groups.num_blocks, H=hidden, I=inner,
                **weight_format(experts, "down"), BLOCK_M=config.block_m, EXTRA_M=config.extra_m,
                BLOCK_N=config.down_block_n, BLOCK_K=128 if mxfp4 else config.block_k,
                ROW_BLOCKS=config.down_row_blocks, RESIDENT=config.down_resident,
                FIT=config.fit, FIT_EXTRA=config.fit_extra, BOXED=boxed, LISTED=config.listed,
                INDEX=index_type(kernels, act), COMPUTE=compute_type(kernels, act),
                num_warps=config.down_warps, num_stages=config.down_stages,
                **register_limit(config.down_registers),
            )  # fmt: skip
        return out
    kernels = load_kernels("moe_gemm")
    kernel = kernels.down_kernel
    check_runs_here("moe_experts", kernel, act)
    row_blocks = -(-hidden // 64)
    chunks = -(-row_blocks // config.down_row_blocks)
    with on_device(act):
        kernel[(groups.num_blocks * chunks * split,)](
            out, act, *weight_tensors(experts, "down"), weights, groups.ids, groups.block_experts,
            groups.num_pairs, groups.first_expert, H=hidden, I=inner,
            NUM_EXPERTS=experts.num_experts, ROTATED=experts.down.layout == "rotated",
            WIDE=experts.down.wide, MAX_PAIRS=_max_pairs(groups), BLOCK_M=config.block_m,
            SPLIT_K=split, UNROLL=config.down_unroll,
            ROW_BLOCKS=config.down_row_blocks, RESIDENT=config.down_resident,
            COMPUTE=compute_type(kernels, act), num_warps=config.down_warps,
            num_stages=config.down_stages, **register_limit(config.down_registers),
        )  # fmt: skip
    return out


def _max_pairs(groups: Groups) -> int:
    return max(16, next_power_of_2(groups.num_pairs)) if groups.direct else 0
