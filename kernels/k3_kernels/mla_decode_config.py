"""Launch constants of attention over latent rows: what they are, measured ones, rules for the rest.

Needs PyTorch. Used by :mod:`k3_kernels.mla_decode`, which says what they are for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from k3_kernels import tuned

__all__ = ["MAX_RANK", "MAX_SPLITS", "MLADecodeConfig", "choose_config", "num_splits"]

#: The accumulator of a wider latent would not fit the registers.
MAX_RANK = 512

#: Multiprocessors of an H200.
_PROCESSORS = 132

#: A merging program holds a column of every part.
MAX_SPLITS = 128


@dataclass(frozen=True)
class MLADecodeConfig:
    """Constants of a call; :mod:`k3_kernels.mla_decode` describes what they are for.

    Attributes
    ----------
    block_m, block_n
        (token, head) pairs of a program, and cached rows that it takes at a time.
    num_warps
        Of a program.
    stages
        Tiles of rows in shared memory: one is worked on, the others are on their way.
    rows_left
        Whether cached rows are the left operand of the products, which is the one that the large
        matrix instruction wants 64 rows of; otherwise queries are.
    programs
        Split the context until there are about so many programs.
    merge_columns
        Columns of a program of the second launch.
    pdl
        Launch each kernel while the one before still runs (compute capability 9.0 and later).
    """

    block_m: int
    block_n: int
    num_warps: int
    stages: int
    rows_left: bool = False
    programs: int = _PROCESSORS
    merge_columns: int = 64
    pdl: bool = False


def choose_config(
    num_rows: int, batch: int, rank: int, device: torch.device, itemsize: int = 2
) -> MLADecodeConfig:
    """Choose the constants of a call.

    Parameters
    ----------
    num_rows
        Queries times heads of one request.
    batch
        Requests.
    rank
        R.
    device
        Where it will run: measured constants are looked up for it.
    itemsize
        Bytes of a cached value.

    Examples
    --------
    >>> choose_config(12, 1, 512, torch.device("cpu")).block_m
    16
    >>> choose_config(9 * 12, 1, 512, torch.device("cpu")).block_m
    64
    """
    if itemsize == 4:  # four times slower whatever the constants, and twice the shared memory
        return MLADecodeConfig(16, 16, 4, 2)
    size = 16 if num_rows <= 16 else 64 if num_rows <= 64 else 128
    found = tuned.lookup("mla_decode", f"R={rank},rows={size}", batch, device)
    if found is not None:
        return MLADecodeConfig(**found)
    if num_rows <= 16:
        return MLADecodeConfig(16, 32, 4, 3, programs=2 * _PROCESSORS)
    # An H200 likes 64 rows at a time better; Triton 3.6 has no room for them on Blackwell.
    return MLADecodeConfig(64, 32, 8, 2)


def num_splits(programs: int, max_length: int, config: MLADecodeConfig) -> int:
    """Return into how many parts each context is cut.

    Parameters
    ----------
    programs
        That there are without splitting: requests times groups of ``block_m`` rows.
    max_length
        Longest context that the block table has room for.
    config
        Of the launch.

    Examples
    --------
    >>> config = MLADecodeConfig(16, 64, 8, 3)
    >>> num_splits(1, 8192, config), num_splits(16, 8192, config), num_splits(1, 100, config)
    (128, 8, 2)
    """
    tiles = -(-max_length // config.block_n)
    wanted = config.programs // max(1, programs)
    return max(1, min(wanted, tiles, MAX_SPLITS))
