"""Rotary position embedding with YaRN, for the drafter only: the target model rotates nothing.

Needs torch. Lesson 09 uses it inside the drafter.

Channels are rotated in neighbouring pairs (0, 1), (2, 3), ... by an angle that grows with the
position, each pair at a speed of its own. YaRN stretches a short trained context: slow pairs turn
``factor`` times slower, fast pairs stay, a ramp lies between (arXiv 2309.00071).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["rotate", "yarn_attention_factor", "yarn_frequencies"]


def yarn_frequencies(
    width: int,
    theta: float,
    factor: float,
    original_context: int,
    *,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> Tensor:
    """Angle per position of each channel pair, ``[width // 2]`` float64, radians.

    Parameters
    ----------
    width
        Rotated channels, even.
    theta
        Base of the geometric series of speeds.
    factor
        How many times longer the served context is than the trained one; 1 is plain RoPE.
    original_context
        Trained context in tokens.
    beta_fast, beta_slow
        Full turns within the trained context above which a pair stays as it is, and below which
        it is slowed by the whole factor.

    Raises
    ------
    ValueError
        If ``width`` is odd, ``factor`` is below 1, or the trained context is so short or so long
        for these speeds that there is no ramp.

    Examples
    --------
    >>> yarn_frequencies(4, 100.0, 1.0, 4096)
    tensor([1.0000, 0.1000], dtype=torch.float64)
    """
    if width % 2:
        raise ValueError(f"rotated channels come in pairs: width must be even, got {width}")
    if factor < 1:
        raise ValueError(f"YaRN stretches the context: factor must be at least 1, got {factor}")
    speed = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    if factor == 1:
        return speed

    def pair_with(turns: float) -> float:
        """Index, not rounded, of the pair that makes ``turns`` turns in the trained context."""
        return width * math.log(original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_with(beta_fast)), 0)
    high = min(math.ceil(pair_with(beta_slow)), width - 1)
    if low > high:
        raise ValueError(
            f"no pair turns between {beta_slow} and {beta_fast} times in a trained context of "
            f"{original_context} tokens at theta={theta}: check original_context"
        )
    ramp = (torch.arange(width // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)
    slowed = ramp.clamp(0, 1)
    return speed * (1 - slowed) + speed / factor * slowed


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """Return the factor by which YaRN sharpens attention; scores are scaled by its square.

    Examples
    --------
    >>> round(yarn_attention_factor(32.0) ** 2, 3)
    1.813
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Rotate channel pairs by ``position * frequency``.

    Parameters
    ----------
    x
        ``[N, ..., width]``.
    positions
        int64 ``[N]``.
    frequencies
        ``[width // 2]``.

    Returns
    -------
    Tensor
        As ``x``, in its type. Angles are taken in float64: in float32, as vLLM
        0.33.0 keeps them, a pair is off by 0.05 radians at position 1,000,000.

    Raises
    ------
    ValueError
        If positions or frequencies do not belong to ``x``.

    Examples
    --------
    >>> quarter = torch.tensor([math.pi / 2], dtype=torch.float64)
    >>> rotate(torch.tensor([[1.0, 0.0]]), torch.tensor([1]), quarter).round()
    tensor([[0., 1.]])
    """
    if positions.shape != x.shape[:1] or 2 * len(frequencies) != x.shape[-1]:
        raise ValueError(
            f"x {list(x.shape)} needs {len(x)} positions and {x.shape[-1] / 2:g} frequencies, got "
            f"{list(positions.shape)} and {list(frequencies.shape)}"
        )
    angle = positions.to(torch.float64).unsqueeze(-1) * frequencies.to(positions.device)
    angle = angle.reshape(angle.shape[0], *[1] * (x.dim() - 2), angle.shape[-1])
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = angle.cos().to(wide), angle.sin().to(wide)
    even, odd = x[..., 0::2].to(wide), x[..., 1::2].to(wide)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)
    return turned.flatten(-2).to(x.dtype)
