"""What a KDA layer hands to the kernels: its small vectors, and the projections of a step's rows.

Needs torch. Part of :mod:`~kimik3_lab.serving.executors.triton_mixer`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kimik3_lab.reference.kda import KimiDeltaAttention

__all__ = ["KdaInputs", "KdaWeights"]


@dataclass(frozen=True)
class KdaWeights:
    """What the kernels read besides projections: the small vectors of one KDA layer.

    Attributes
    ----------
    taps : Tensor
        ``[3P, kernel]``: the convolutions of q | k | v, laid out with channels together.
    A_log, dt_bias, norm : Tensor
        ``[>= H]``, ``[H * D]`` and ``[D]``.
    lower_bound, norm_eps : float
    """

    taps: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    lower_bound: float
    norm_eps: float

    @classmethod
    def of(cls, layer: KimiDeltaAttention) -> KdaWeights:
        """Take them from a layer of the reference; its gate must be bounded, as K3's is."""
        if layer.lower_bound is None:
            raise ValueError("the prefill kernel wants K3's bounded gate: set gate_lower_bound")
        convs = (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d)
        taps = torch.cat([conv.weight.detach() for conv in convs]).squeeze(1)
        return cls(
            taps.T.contiguous().T,
            layer.A_log.detach(),
            layer.dt_bias.detach(),
            layer.o_norm.weight.detach(),
            layer.lower_bound,
            layer.o_norm.eps,
        )


@dataclass(frozen=True)
class KdaInputs:
    """The projections of N tokens in one KDA layer.

    Attributes
    ----------
    qkv : Tensor
        ``[N, 3P]``: q | k | v.
    gate, output_gate : Tensor
        ``[N, H, D]``: of the decay, before bias and sigmoid; and of the output.
    beta : Tensor
        ``[N, H]``, before its sigmoid.
    """

    qkv: Tensor
    gate: Tensor
    beta: Tensor
    output_gate: Tensor

    def rows(self, index: slice | Tensor) -> KdaInputs:
        """Take some rows: views for a slice, copies for an index."""
        return KdaInputs(
            self.qkv[index], self.gate[index], self.beta[index], self.output_gate[index]
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the four tensors."""
        return sum(x.nbytes for x in (self.qkv, self.gate, self.beta, self.output_gate))
