"""Random numbers that belong to a place in a text, not to a moment in a program.

Needs torch. Lesson 10 shows that a seed repeats in any company; lesson 09 drafts with it.

A generator that is advanced draw by draw remembers how often it was asked. Then a token depends on
everything that made the engine ask: a step that was thrown away, a preemption, a draft. Here a
request's stream has no memory. Its numbers are a function of the seed, of the position of a token
in the text, and of what they are for. vLLM's second model runner does the same: its Gumbel kernel
is given a seed and a position (``vllm/v1/worker/gpu/sample/gumbel.py``).
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from kimik3_lab.serving.sampling_params import SamplingParams

__all__ = ["Purpose", "RandomStream"]

#: ``token`` draws the token at a position from the target's distribution. ``draft`` and ``verify``
#: are for the draft that begins at a position: to draw it, and to decide what is kept of it.
Purpose: TypeAlias = Literal["token", "draft", "verify"]


class RandomStream:
    """The random numbers of one request.

    Parameters
    ----------
    seed : int
        In [0, 2**63). Neighbouring seeds have unrelated numbers.

    Examples
    --------
    >>> stream = RandomStream(7)
    >>> torch.equal(stream.exponentials(12, 4), RandomStream(7).exponentials(12, 4))
    True
    >>> torch.equal(stream.exponentials(12, 4), stream.exponentials(13, 4))
    False
    """

    __slots__ = ("seed",)

    def __init__(self, seed: int) -> None:
        self.seed = seed

    @classmethod
    def for_request(cls, params: SamplingParams) -> RandomStream | None:
        """Make the stream of a request; None if it is greedy and needs none.

        A request without a seed gets one from the operating system. It keeps it as long as it
        lives, so a preempted request goes on in the same stream, but no other run repeats it.
        """
        if params.greedy:
            return None
        return cls(secrets.randbits(63) if params.seed is None else params.seed)

    def generator(self, position: int, purpose: Purpose) -> torch.Generator:
        """Return a fresh generator on the CPU for what happens at ``position``."""
        # Hashed, because seeds of torch's CPU generator that differ above bit 31 are the same.
        key = f"{self.seed}/{position}/{purpose}".encode()
        digest = hashlib.blake2b(key, digest_size=4).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little"))

    def exponentials(self, position: int, count: int) -> Tensor:
        """Return the ``count`` standard exponential numbers that choose the token at ``position``.

        float64, on the CPU. The token with the largest ``p / number`` is distributed as ``p``.
        """
        return exponentials(self.generator(position, "token"), count)

    def __repr__(self) -> str:
        return f"RandomStream({self.seed})"


def exponentials(generator: torch.Generator, count: int) -> Tensor:
    """Draw ``count`` standard exponential numbers, float64, none of them 0."""
    return torch.empty(count, dtype=torch.float64).exponential_(generator=generator)
