"""Two copies of the weights: the float32 masters that learn, and the shipped ones that compute.

Needs torch. Before each step :meth:`Masters.refresh` rounds the masters to what is shipped, experts
to MXFP4 and the rest to bfloat16, and the step runs on the rounded weights. The gradient found
there goes to the masters as it is. That is quantization-aware training with a straight-through
estimator, with nothing simulated: the model that computes the loss *is* the packed model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kimik3_lab.reference import mxfp4
from kimik3_lab.reference.model import K3ForCausalLM
from kimik3_lab.tensors import MXFP4_GROUP, checkpoint_tensors
from tools.train_tiny_k3.experts import BatchedMoE

__all__ = ["Masters", "batched", "reference_weights", "round_mxfp4"]

BIAS = "e_score_correction_bias"
STACKED = ("block_sparse_moe.w13", "block_sparse_moe.w2")


def round_mxfp4(weight: Tensor) -> Tensor:
    """Round to the values that MXFP4 can express, ``[..., in]`` with ``in`` a multiple of 32.

    Examples
    --------
    >>> round_mxfp4(torch.tensor([[4.9] + [1.2] * 31]))[0, :2].tolist()
    [4.0, 1.0]
    """
    groups = weight.reshape(-1, MXFP4_GROUP)  # groups do not know each other: one call for all
    return mxfp4.dequantize(*mxfp4.quantize(groups), weight.dtype).view(weight.shape)


class Masters:
    """Float32 masters of a model's trained parameters.

    Parameters
    ----------
    model
        With batched experts. Its weights become the first masters, and are then rounded.
    quantize
        Whether experts are rounded to MXFP4; otherwise to bfloat16 like the rest.

    Attributes
    ----------
    weights
        Name to master, in the order of the model's parameters. The selection bias of the routers
        is not among them: balancing sets it.
    """

    def __init__(self, model: K3ForCausalLM, *, quantize: bool = True) -> None:
        self.quantize = quantize
        self._computing = {
            name: parameter
            for name, parameter in model.named_parameters()
            if not name.endswith(BIAS)
        }
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.endswith(BIAS))
        self.weights = {name: p.detach().float().clone() for name, p in self._computing.items()}
        float32 = _float32_on_disk(model)
        self._float32 = [name for name in self.weights if name in float32]
        self._experts = [name for name in self.weights if name.endswith(STACKED)]
        apart = {*self._float32, *self._experts}
        self._bfloat16 = [name for name in self.weights if name not in apart]
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the masters into the model."""
        masters, computing = self.weights, self._computing
        torch._foreach_copy_(
            [computing[name] for name in self._float32],
            [masters[name] for name in self._float32],
        )
        names = self._bfloat16 if self.quantize else self._bfloat16 + self._experts
        rounded = [masters[name].bfloat16() for name in names]
        torch._foreach_copy_([computing[name] for name in names], rounded)
        if self.quantize and self._experts:
            flat = round_mxfp4(torch.cat([masters[name].flatten() for name in self._experts]))
            pieces = flat.split([masters[name].numel() for name in self._experts])
            for name, piece in zip(self._experts, pieces, strict=True):
                computing[name].copy_(piece.view_as(computing[name]))

    def gradients(self) -> dict[str, Tensor]:
        """Take the model's gradients, as float32, and leave it without."""
        taken = {}
        for name, parameter in self._computing.items():
            if parameter.grad is not None:
                taken[name] = parameter.grad.float()
                parameter.grad = None
        return taken


def reference_weights(model: nn.Module) -> dict[str, Tensor]:
    """Weights of a model with batched experts, under the names of the reference model."""
    weights = {}
    for name, value in model.state_dict().items():
        prefix, _, last = name.rpartition(".")
        if not name.endswith(STACKED):
            weights[name] = value
            continue
        for expert, matrix in enumerate(value):
            parts = (("w2", matrix),)
            if last == "w13":
                gate, up = matrix.chunk(2)
                parts = (("w1", gate), ("w3", up))
            for part, rows in parts:
                weights[f"{prefix}.experts.{expert}.{part}.weight"] = rows
    return weights


def _float32_on_disk(model: K3ForCausalLM) -> set[str]:
    specs = checkpoint_tensors(model.config, prefix="")
    return {spec.name for spec in specs if spec.dtype == "F32"}


def batched(model: K3ForCausalLM) -> list[BatchedMoE]:
    """All MoE layers, first layer first."""
    return [module for module in model.modules() if isinstance(module, BatchedMoE)]
