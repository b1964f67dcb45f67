"""Launch constants of AttnRes: what they are, and a rule for a device that has not been measured.

Needs PyTorch. Used by :mod:`k3_kernels.attn_res`, which says what they are for.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3_kernels._compat import next_power_of_2

__all__ = ["MAX_HIDDEN_SIZE", "AttnResConfig", "choose_config"]

#: Beyond this a row no longer fits the registers of one program.
MAX_HIDDEN_SIZE = 16384

#: Up to this many tokens each has a multiprocessor to itself (an H200 has 132, a B300 148).
_LATENCY_TOKENS = 132

#: Shared memory that one program may use on sm_90 and later, less room for the reductions.
_SHARED_BYTES = 232_448 - 4_096


@dataclass(frozen=True)
class AttnResConfig:
    """Constants of a call; :mod:`k3_kernels.attn_res` describes what they are for.

    Attributes
    ----------
    block_h, num_warps
        Elements of a piece of a row, and warps of the program that owns a token.
    stages
        ``stages - 1`` groups of blocks are on their way while one is worked on; 0 asks for all
        blocks at the start and keeps them in registers.
    preload
        Whether prefix, delta and norm weight are asked for at the start too.
    group
        Blocks that are taken into the mix together.
    pdl
        Launch while the kernel before still runs (compute capability 9.0 and later).
    slice_h, slice_warps
        Two launches; columns and warps of a program of the first. 0 columns: one launch.
    mix_h
        Columns of a program of the second launch, whose first then takes all products of sources;
        ``preload`` says that the launch after it may start at once, ``block_h`` nothing. 0: a
        program of the second launch owns a token.
    prefetch
        Whether blocks and prefix are on their way to the second-level cache, and the probe is
        made, while the kernel before still runs; with ``pdl``.
    """

    block_h: int
    num_warps: int
    stages: int
    preload: bool
    group: int = 1
    pdl: bool = False
    slice_h: int = 0
    slice_warps: int = 4
    prefetch: bool = False
    mix_h: int = 0

    def constants(
        self, n_blocks: int, hidden_size: int, has_delta: bool, store_prefix: bool
    ) -> dict[str, int | bool]:
        """Return the kernel's compile-time arguments, all but the compute type."""
        return {
            "N_BLOCKS": n_blocks,
            "HIDDEN": hidden_size,
            "HAS_DELTA": has_delta,
            "STORE_PREFIX": store_prefix,
            "BLOCK_H": self.block_h,
            "GROUP": self.group,
            "LOG_GROUP": (self.group - 1).bit_length(),
            "STAGES": self.stages,
            "PRELOAD": self.preload,
            "PDL": self.pdl,
            "PREFETCH": self.prefetch,
        }

    def options(self, num_warps: int) -> dict[str, int | bool]:
        """Return the options of a launch."""
        options: dict[str, int | bool] = {"num_warps": num_warps}
        if self.pdl:
            options["launch_pdl"] = True
        return options


def choose_config(
    num_tokens: int, n_blocks: int, hidden_size: int, itemsize: int = 2
) -> AttnResConfig:
    """Choose constants by rule, for a device or shape that has not been measured.

    Parameters
    ----------
    num_tokens, n_blocks, hidden_size
        T, n and H.
    itemsize
        Bytes of one element of the blocks.

    Examples
    --------
    >>> choose_config(1, 8, 7168)
    AttnResConfig(block_h=1024, num_warps=8, stages=3, preload=True, group=1, pdl=False, \
slice_h=0, slice_warps=4, prefetch=False, mix_h=0)
    >>> choose_config(8192, 8, 7168).num_warps
    4
    """
    latency = num_tokens <= _LATENCY_TOKENS
    block_h = min(1024, max(16, next_power_of_2(hidden_size)))
    # Elements of a row that one lane holds, several times: a lone program can afford more lanes.
    lane_elements = 32 if latency else 64
    num_warps = min(16, next_power_of_2(-(-hidden_size // (32 * lane_elements))))
    row_bytes = -(-hidden_size // block_h) * block_h * itemsize
    budget = _SHARED_BYTES if latency else _SHARED_BYTES // 2
    # Two rows in flight hide the memory's latency. On an H200 a deeper pipeline lost 20 % at
    # T <= 64 (8.4 against 10.1 us at T = 1) and gained nothing at T = 8192 (356 us either way).
    in_flight = min(n_blocks, 2, budget // row_bytes)
    # A preloaded prefix, delta and norm weight want registers that longer rows do not leave.
    preload = latency and hidden_size <= 8192
    return AttnResConfig(block_h, num_warps, in_flight + 1, preload)
