"""How uneven the trained model loads its experts, and a random router that does the same.

Needs torch. The rank ladder's weights use it; lesson 02 looks at the trained loads themselves.

Random weights spread tokens evenly, a trained router does not, and uneven load means fewer distinct
experts in a step and so fewer bytes. What is carried over is the *sorted profile*: what share of
all choices the busiest expert gets, the second, and so on, measured over the layers of
``data/tiny-k3`` on text that it was not trained on, and stretched from 32 experts to 896.

With logits of a known spread the selection bias that gives an expert a wanted load has a closed
form. Token by token, expert e is among the best 16 if its score plus bias exceeds a threshold, and
with 896 experts that threshold hardly moves. Scores are ``sigmoid(s z)`` with normal z, so a share
p of all tokens lies above ``sigmoid(s * quantile(1 - p))``, and the bias is what brings that point
to the threshold.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from kimik3_lab.paths import data_dir
from kimik3_lab.reference.balancing import expert_load
from kimik3_lab.reference.mixer import Mixer
from kimik3_lab.reference.model import K3ForCausalLM
from kimik3_lab.reference.moe import route

__all__ = ["PROFILE_FILE", "load_profile", "measure_profile", "selection_bias", "stretch"]

PROFILE_FILE = "results/cpu/expert_load.json"


@torch.inference_mode()
def measure_profile(model: K3ForCausalLM, token_ids: Tensor, mixer: Mixer) -> list[float]:
    """Sort each MoE layer's loads, the busiest first, and average the layers' shares.

    Parameters
    ----------
    model
        The trained one.
    token_ids
        int64 ``[N]``.
    mixer
        Of the sequences in it.

    Returns
    -------
    list of float
        A share of all choices for each rank, together 1.
    """
    config = model.config
    shares: list[Tensor] = []
    hooks = []
    for layer_id in config.moe_layer_ids:
        gate = model.model.layers[layer_id].block_sparse_moe.gate

        def count(gate: torch.nn.Module, inputs: tuple[Tensor]) -> None:
            bias = gate.e_score_correction_bias
            routing = route(inputs[0], gate.weight, bias, config.num_experts_per_token)
            load = expert_load(routing.expert_ids, config.num_experts).double()
            shares.append((load / load.sum()).sort(descending=True).values)

        hooks.append(gate.register_forward_pre_hook(count))
    try:
        model(token_ids, mixer)
    finally:
        for hook in hooks:
            hook.remove()
    mean: list[float] = torch.stack(shares).mean(0).tolist()
    return mean


def load_profile(path: Path | None = None) -> list[float]:
    """Read the recorded profile of the trained tiny K3.

    Examples
    --------
    >>> profile = load_profile()
    >>> len(profile), round(sum(profile), 6)
    (32, 1.0)
    """
    body = json.loads((path or data_dir() / PROFILE_FILE).read_text(encoding="utf-8"))
    profile: list[float] = body["profile"]
    return profile


def stretch(profile: Sequence[float], num_experts: int) -> Tensor:
    """Bring a profile to another number of experts, straight lines between its points.

    Returns
    -------
    Tensor
        float64 ``[num_experts]``, the busiest first, together 1.

    Examples
    --------
    >>> stretch([0.75, 0.25], 4).tolist()
    [0.375, 0.3125, 0.1875, 0.125]
    """
    points = torch.tensor(profile, dtype=torch.float64)
    place = (torch.arange(num_experts, dtype=torch.float64) + 0.5) * len(points) / num_experts - 0.5
    place = place.clamp(0, len(points) - 1)
    low = place.floor().long().clamp(max=max(len(points) - 2, 0))
    weight = place - low
    high = (low + 1).clamp(max=len(points) - 1)
    share = points[low] * (1 - weight) + points[high] * weight
    return share / share.sum()


def selection_bias(share: Tensor, top_k: int, logit_std: float) -> Tensor:
    """Bias that gives each expert its share of the choices, if logits are normal and alike.

    Parameters
    ----------
    share
        ``[E]``, together 1.
    top_k
        Experts of a token.
    logit_std
        Standard deviation of the logits.

    Returns
    -------
    Tensor
        float32 ``[E]`` with mean 0.

    Raises
    ------
    ValueError
        If an expert would be chosen by more tokens than there are.
    """
    chosen = share.double() * top_k
    if float(chosen.max()) >= 1:
        raise ValueError(
            f"the busiest expert would get {float(chosen.max()):.2f} of all tokens with "
            f"top_k={top_k}: no bias gives it more than one"
        )
    quantile = torch.distributions.Normal(0.0, 1.0).icdf(1 - chosen.clamp(min=1e-6))
    score = torch.sigmoid(logit_std * quantile)
    return (score.mean() - score).float()
