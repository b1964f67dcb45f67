"""A batch of equally long sequences through a K3: hidden states, logits and taps.

Needs torch. Training of the target, training of the drafter and scoring all call it.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kimik3_lab.reference import checkpoint
from kimik3_lab.reference.model import K3ForCausalLM
from kimik3_lab.reference.norms import compute_dtype
from tools.train_tiny_k3.experts import batch_experts
from tools.train_tiny_k3.mixing import TrainingMixer

__all__ = ["BatchOutput", "forward_batch", "load_target", "token_logits"]


class BatchOutput(NamedTuple):
    """``hidden [B, T, H]`` after the final norm, and the running sum after each tapped layer."""

    hidden: Tensor
    taps: dict[int, Tensor]


def load_target(
    folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> K3ForCausalLM:
    """Load a model folder for :func:`forward_batch`; wants no gradient."""
    model = checkpoint.load(folder, dtype=dtype, device=device)
    batch_experts(model)
    return model.eval().requires_grad_(False)


def forward_batch(
    model: K3ForCausalLM, token_ids: Tensor, tap_layers: Collection[int] = ()
) -> BatchOutput:
    """Run ``token_ids [B, T]`` from the empty state.

    Examples
    --------
    >>> from kimik3_lab.config import K3Config
    >>> from kimik3_lab.reference.initialization import random_model
    >>> model = random_model(K3Config.micro(), seed=0)
    >>> out = forward_batch(model, torch.zeros(2, 5, dtype=torch.int64), tap_layers=[1])
    >>> out.hidden.shape, out.taps[1].shape
    (torch.Size([2, 5, 64]), torch.Size([2, 5, 64]))
    """
    shape = tuple(token_ids.shape)
    taps: dict[int, Tensor | None] = dict.fromkeys(tap_layers)
    hidden = model.model(token_ids.flatten(), TrainingMixer(*shape), taps or None)
    found = {layer_id: tap.unflatten(0, shape) for layer_id, tap in taps.items() if tap is not None}
    return BatchOutput(hidden.unflatten(0, shape), found)


def token_logits(model: K3ForCausalLM, hidden: Tensor) -> Tensor:
    """Logits ``[..., vocab]`` of hidden states ``[..., H]``, float32 or wider."""
    wide = compute_dtype(hidden.dtype)
    return hidden.to(wide) @ model.lm_head.weight.to(wide).mT
