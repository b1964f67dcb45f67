"""Launch constants of KDA over prompts: what they are, measured ones, a rule for the rest.

Needs PyTorch. Used by :mod:`k3_kernels.kda_prefill`, which says what they are for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from k3_kernels import tuned

__all__ = ["CHUNK", "HALF", "KDAPrefillConfig", "choose_config"]

#: Tokens of a chunk, and rows of it that meet keys in their middle. That is 16 rows away at most:
#: float32 cannot divide by the decay of more.
CHUNK, HALF = 64, 32


@dataclass(frozen=True)
class KDAPrefillConfig:
    """Compile-time constants of the launches.

    Attributes
    ----------
    block_k, chunk_warps, chunk_registers
        Keys that a program which prepares a chunk takes at a time, its warps, and the most
        registers of a thread; 0 is no limit.
    block_v
        Values of a program that walks.
    scan_warps, scan_stages
        Its warps, and chunks in flight plus 1.
    segments
        Pieces of a sequence that are walked at the same time.
    chunk_stages
        Blocks of keys in flight plus 1 in a program that prepares a chunk.
    """

    block_k: int
    chunk_warps: int
    chunk_registers: int
    block_v: int
    scan_warps: int
    scan_stages: int
    segments: int = 1
    chunk_stages: int = 2


def choose_config(
    heads: int,
    tokens: int,
    head_dim: int,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> KDAPrefillConfig:
    """Choose the constants of a call.

    Parameters
    ----------
    heads
        Sequences times heads.
    tokens
        Of a sequence, in the mean.
    head_dim, device
        K = V, and where it will run: measured constants are looked up for it.
    dtype
        Of the tokens. Constants are measured for 16 bits.

    Examples
    --------
    >>> choose_config(12, 8192, 128, torch.device("cpu")).segments
    5
    """
    if device.type == "cuda" and dtype == torch.float32:
        # Chunks of twice the bytes fill a multiprocessor's memory, and no matrix instruction
        # multiplies float32 exactly: programs that are small enough to be compiled in seconds.
        return KDAPrefillConfig(32, 4, 0, min(16, head_dim), 4, 2)
    found = tuned.lookup("kda_prefill", f"D={head_dim}", heads, device)
    if found is not None:
        config = KDAPrefillConfig(**found)
    elif device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10:
        # Products lie in a memory of their own and come through registers: more warps to hold them.
        config = KDAPrefillConfig(32, 4, 0, min(64, head_dim), 8, 2, 5 if heads <= 32 else 1)
    elif heads <= 32:
        # Few heads leave most multiprocessors idle: cut values, and sequences too.
        config = KDAPrefillConfig(32, 4, 0, min(64, head_dim), 4, 3, 5)
    else:
        config = KDAPrefillConfig(32, 4, 0, head_dim, 8, 2, 1)
    if tokens < 4 * CHUNK * config.segments:
        # A survey of so few chunks costs more than it saves.
        config = replace(config, segments=1)
    return config
