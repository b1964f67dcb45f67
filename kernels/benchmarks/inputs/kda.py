"""The KDA recurrence step by step in float64, which the decode and prefill inputs compare with.

Needs PyTorch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.floors import HEAD_DIM

__all__ = ["GATE_LOWER_BOUND", "NORM_EPS", "decay", "normalized", "recurrence"]

#: The least logarithm of a decay in K3, and the epsilon of the norm behind the recurrence.
GATE_LOWER_BOUND, NORM_EPS = -5.0, 1e-5


def normalized(x: Tensor) -> Tensor:
    """Return rows of length one, as K3's query and key are."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def decay(raw: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Return the decay of a raw gate ``[..., H, K]``: between exp(-5) and 1."""
    shifted = raw.double() + dt_bias.double().view(-1, HEAD_DIM)
    return torch.exp(GATE_LOWER_BOUND * torch.sigmoid(A_log.double().exp()[:, None] * shifted))


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, decays: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the delta rule token by token.

    Parameters
    ----------
    q, k, v, decays
        ``[N, T, H, 128]``; q and k as projected, before their normalisation.
    beta
        ``[N, T, H]``, the logit.
    state
        ``[N, H, V, K]``.

    Returns
    -------
    o, state
        float64 ``[N, T, H, V]`` and ``[N, H, V, K]``.
    """
    q = normalized(q.double()) * HEAD_DIM**-0.5
    k, v = normalized(k.double()), v.double()
    write = beta.double().sigmoid()[..., None]
    state = state.double()
    out = torch.empty_like(v)
    for t in range(q.shape[1]):
        state = state * decays[:, t, :, None, :].double()
        update = (v[:, t] - (state @ k[:, t, ..., None]).squeeze(-1)) * write[:, t]
        state.addcmul_(update[..., None], k[:, t, :, None, :])
        out[:, t] = (state @ q[:, t, ..., None]).squeeze(-1)
    return out, state
