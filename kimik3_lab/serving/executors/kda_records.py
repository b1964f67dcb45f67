"""The delta rule over a few drafted tokens, so that any number of them can be made final later.

Needs torch. Lesson 10 counts what both ways write; lesson 06 has the kernels
(:func:`k3_kernels.kda_decode` and :func:`k3_kernels.kda_recover`).

Verification computes ``1 + K`` tokens before anybody knows how many will be accepted. It can keep
the state after each of them, or the state before the first and what leads on from it: for each
token the value that it wrote, its key and its decay. vLLM calls the second way RecoverSSM (#51855);
a record takes ``3 * 128`` values for each head, a state ``128 * 128``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kimik3_lab.reference.kda_chunked import initial_state

__all__ = ["KdaRecords", "commit", "verify"]


@dataclass(frozen=True, slots=True)
class KdaRecords:
    """Inputs of the recurrence over T tokens of n requests in one layer.

    Attributes
    ----------
    written : Tensor
        ``[n, T, H, V]``: ``beta (v - S'^T k)``. It holds all that depends on the state.
    key, decay : Tensor
        ``[n, T, H, K]``: normalised keys, and log-decays.
    """

    written: Tensor
    key: Tensor
    decay: Tensor

    def of(self, requests: Tensor | slice) -> KdaRecords:
        """Take the records of some of the requests."""
        return KdaRecords(self.written[requests], self.key[requests], self.decay[requests])


def verify(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, KdaRecords]:
    """Run :func:`kimik3_lab.reference.kda.recurrent` and keep what it passes through.

    Returns
    -------
    o, states, records
        ``[n, T, H, V]`` in the type of ``v``; the state after each token, ``[n, T, H, K, V]``; and
        the records from which :func:`commit` makes any of these states again.

    Examples
    --------
    >>> from kimik3_lab.reference.kda import l2norm, recurrent
    >>> q, k = l2norm(torch.randn(2, 1, 5, 2, 8))
    >>> v, g, beta = torch.randn(1, 5, 2, 4), -torch.rand(1, 5, 2, 8), torch.rand(1, 5, 2)
    >>> before = torch.randn(1, 2, 8, 4)
    >>> o, states, records = verify(q, k, v, g, beta, before)
    >>> torch.allclose(states[:, -1], recurrent(q, k, v, g, beta, before)[1], atol=1e-5)
    True
    >>> torch.allclose(commit(before, records, torch.tensor([3])), states[:, 2], atol=1e-5)
    True
    """
    state = initial_state(k, v, state)
    o = torch.empty_like(v)
    q, k, v, g, beta = (x.to(state.dtype) for x in (q, k, v, g, beta))
    states, written = [], []
    for t in range(q.shape[1]):
        decayed = g[:, t].exp().unsqueeze(-1) * state
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", decayed, k[:, t])
        written.append(beta[:, t].unsqueeze(-1) * error)
        state = decayed + k[:, t].unsqueeze(-1) * written[-1].unsqueeze(-2)
        o[:, t] = torch.einsum("bhkv,bhk->bhv", state, q[:, t])
        states.append(state)
    return o, torch.stack(states, 1), KdaRecords(torch.stack(written, 1), k, g)


def commit(state: Tensor, records: KdaRecords, count: Tensor) -> Tensor:
    """State after the first ``count [n]`` recorded tokens, from the state before them.

    ``S_n = S_0 prod exp(g_t) + sum_t (k_t prod_(s > t) exp(g_s)) u_t^T``: as ``u`` is known,
    nothing is looked up in the state again, and the tokens need no order.

    Parameters
    ----------
    state : Tensor
        ``[n, H, K, V]``.
    records : KdaRecords
        Of these requests.
    count : Tensor
        int64 ``[n]``; 0 leaves a state as it is.

    Returns
    -------
    Tensor
        ``[n, H, K, V]``.
    """
    tokens = torch.arange(records.key.shape[1], device=state.device)
    rejected = (tokens >= count.unsqueeze(-1))[..., None, None]
    # A token that does not decay and writes nothing was never there.
    written = records.written.masked_fill(rejected, 0)
    until = records.decay.masked_fill(rejected, 0).cumsum(1)
    total = until[:, -1]
    keys = records.key * (total.unsqueeze(1) - until).exp()
    added = torch.einsum("nthk,nthv->nhkv", keys, written)
    return total.exp().unsqueeze(-1) * state + added
