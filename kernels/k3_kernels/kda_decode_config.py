"""Launch constants of a KDA step: what they are, measured ones, a rule for the rest.

Needs PyTorch. Used by :mod:`k3_kernels.kda_decode`, which says what they are for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from k3_kernels import tuned

__all__ = ["KDADecodeConfig", "choose_config", "verify_config"]


@dataclass(frozen=True)
class KDADecodeConfig:
    """Compile-time constants of one launch.

    Attributes
    ----------
    block_v
        Values of the state that are in registers at a time; the whole head or a part of it.
    chunk
        Keys of a row that neighbouring lanes share.
    num_warps
        Warps of a program.
    stages
        Slices of the state that are in flight, plus 1.
    early
        Ask for one slice more before anything else; always if it is the whole head.
    pdl
        Start while the launch before is still ending (programmatic dependent launch, sm_90 and
        later): weights are read, everything else waits.
    prefetch
        Bytes of the head's state that are on their way to the second-level cache, with the window,
        while the launch before is still ending; 0 or, with ``pdl``, up to 4 D^2.
    pin
        Keep the compiler from moving the early slice's loads behind what waits for the window.
    """

    block_v: int
    chunk: int
    num_warps: int
    stages: int
    early: bool = False
    pdl: bool = False
    prefetch: int = 0
    pin: bool = False


def choose_config(programs: int, head_dim: int, device: torch.device) -> KDADecodeConfig:
    """Choose the constants of a step of one token a request.

    Parameters
    ----------
    programs
        Requests times heads.
    head_dim
        K = V.
    device
        Where it will run: measured constants are looked up for it.

    Examples
    --------
    >>> config = choose_config(12, 128, torch.device("cpu"))
    >>> config.block_v, config.num_warps, config.early
    (128, 16, True)
    """
    found = tuned.lookup("kda_decode", f"D={head_dim}", programs, device)
    if found is not None:
        return KDADecodeConfig(**found)
    if programs <= 132:
        # A multiprocessor for each head: one pass, all loads at once.
        return KDADecodeConfig(head_dim, min(32, head_dim), max(1, head_dim // 8), 1, True)
    block_v = min(32, head_dim)
    return KDADecodeConfig(block_v, min(64, head_dim), 4, min(5, head_dim // block_v + 1))


def verify_config(programs: int, head_dim: int, device: torch.device) -> KDADecodeConfig:
    """Choose the constants of a step of several tokens a request, as :func:`choose_config` does."""
    found = tuned.lookup("kda_verify", f"D={head_dim}", programs, device)
    if found is not None:
        return KDADecodeConfig(**found)
    return KDADecodeConfig(head_dim, min(32, head_dim), max(1, head_dim // 16), 1, True)
