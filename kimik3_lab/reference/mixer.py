"""The seam between what a layer computes per token and what looks back in time.

Needs torch. Lesson 05 meets it with one sequence, lesson 10 with many.

Everything in K3 is per token, except three operations that look back: the short convolution and the
recurrence of a KDA layer, and the attention of an MLA layer. A layer calls them on a
:class:`Mixer` and does not know where state lives: one sequence in plain tensors
(:class:`~kimik3_lab.reference.state.SequenceMixer`), or slots and pages shared by many.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kimik3_lab.config import K3Config

__all__ = ["Mixer"]


class Mixer(Protocol):
    """The operations that mix over time. A step has N tokens, of one sequence or of many.

    A layer calls :meth:`conv` and then :meth:`kda`, or :meth:`mla`, once per step.
    """

    def conv(self, layer_id: int, u: Tensor, weight: Tensor) -> Tensor:
        """Causal convolution and SiLU of ``u [N, 3P]`` (q | k | v) with ``weight [3P, kernel]``."""

    def kda(
        self, layer_id: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
    ) -> Tensor:
        """Delta rule: ``q, k, g [N, H, K]``, ``v [N, H, V]``, ``beta [N, H]`` to ``[N, H, V]``."""

    def mla(
        self, layer_id: int, q: Tensor, latent: Tensor, kv_b: Tensor, config: K3Config
    ) -> Tensor:
        """Cache ``latent [N, kv_lora + rope]``; attend with ``q [N, H, qk]`` to ``[N, H, v]``."""
