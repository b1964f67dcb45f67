"""The mixer of many sequences: one call serves all requests of a step.

Needs torch. Lesson 10 runs it; lesson 07 shows the cache behind it.

A step has two classes of rows. Requests with one token come first: all of them go through one
recurrent step and one attention over padded rows, so a step of sixteen costs little more than a
step of one. Then come longer segments, one after the other in the forms made for prefill. vLLM
orders its batch the same way, see ``split_decodes_and_prefills`` in
``vllm/v1/attention/backends/utils.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimik3_lab.config import K3Config
from kimik3_lab.reference import kda, mla
from kimik3_lab.reference.norms import compute_dtype
from kimik3_lab.serving.executors.paged_cache import PagedCache, StepMetadata

__all__ = ["PagedMixer", "absorbed_decode"]


class PagedMixer:
    """A :class:`~kimik3_lab.reference.mixer.Mixer` over a :class:`PagedCache`.

    Set :attr:`step` before each forward pass.

    Parameters
    ----------
    config : K3Config
        Shape of the model.
    cache : PagedCache
        Read and advanced by each step.
    """

    step: StepMetadata

    def __init__(self, config: K3Config, cache: PagedCache) -> None:
        self.cache = cache
        self._kda_index = {layer_id: i for i, layer_id in enumerate(config.kda_layer_ids)}
        self._mla_index = {layer_id: i for i, layer_id in enumerate(config.mla_layer_ids)}

    def conv(self, layer_id: int, u: Tensor, weight: Tensor) -> Tensor:
        """See :meth:`kimik3_lab.reference.mixer.Mixer.conv`."""
        step, windows = self.step, self.cache.conv[self._kda_index[layer_id]]
        parts = []
        if step.num_decodes:
            y, after = kda.short_conv(
                u[: step.num_decodes].unsqueeze(1), weight, windows[step.decode_slots]
            )
            windows.index_copy_(0, step.decode_slots, after)
            parts.append(y.squeeze(1))
        for segment, context in zip(step.prefills, step.prefill_contexts, strict=True):
            y, windows[segment.slot] = kda.short_conv(
                u[context.rows], weight, windows[segment.slot]
            )
            parts.append(y)
        return _join(parts)

    def kda(
        self, layer_id: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
    ) -> Tensor:
        """See :meth:`kimik3_lab.reference.mixer.Mixer.kda`."""
        step, states = self.step, self.cache.recurrent[self._kda_index[layer_id]]
        parts = []
        if step.num_decodes:
            # A batch of requests with one token each.
            qd, kd, vd, gd, bd = (x[: step.num_decodes].unsqueeze(1) for x in (q, k, v, g, beta))
            before = kda.from_cache_layout(states[step.decode_slots])
            o, after = kda.recurrent(qd, kd, vd, gd, bd, before)
            states.index_copy_(0, step.decode_slots, kda.to_cache_layout(after))
            parts.append(o.squeeze(1))
        for segment, context in zip(step.prefills, step.prefill_contexts, strict=True):
            # A batch of one request.
            qp, kp, vp, gp, bp = (x[context.rows].unsqueeze(0) for x in (q, k, v, g, beta))
            before = kda.from_cache_layout(states[segment.slot]).unsqueeze(0)
            o, after, _ = kda.chunked(qp, kp, vp, gp, bp, before)
            states[segment.slot] = kda.to_cache_layout(after.squeeze(0))
            parts.append(o.squeeze(0))
        return _join(parts)

    def mla(
        self, layer_id: int, q: Tensor, latent: Tensor, kv_b: Tensor, config: K3Config
    ) -> Tensor:
        """See :meth:`kimik3_lab.reference.mixer.Mixer.mla`."""
        step, pages = self.step, self.cache.latent[self._mla_index[layer_id]]
        cached = pages.flatten(0, 1)
        cached.index_copy_(0, step.cell_mapping, latent)
        parts = []
        for context in step.decode_contexts:
            # index_select: twice as fast on a CPU as cached[cells].
            rows = cached.index_select(0, context.cells.flatten()).view(*context.cells.shape, -1)
            parts.append(absorbed_decode(q[context.rows], rows, kv_b, context.padding))
        for context in step.prefill_contexts:
            queries, rows = q[context.rows], cached[context.cells]
            form = (
                mla.absorbed if _absorbing_pays(len(queries), len(rows), config) else mla.expanded
            )
            parts.append(form(queries, rows, kv_b))
        return _join(parts)


def absorbed_decode(q: Tensor, rows: Tensor, kv_b: Tensor, padding: Tensor | None = None) -> Tensor:
    """:func:`kimik3_lab.reference.mla.absorbed` for many sequences with one query each.

    Parameters
    ----------
    q : Tensor
        ``[n, H, nope + rope]``: the newest token of each sequence.
    rows : Tensor
        ``[n, L, kv_lora + rope]``: cached rows, padded to the longest sequence with finite values.
    kv_b : Tensor
        ``[H * (nope + v), kv_lora]``.
    padding : Tensor, optional
        bool ``[n, L]``, true where a row is padding.

    Returns
    -------
    Tensor
        ``[n, H, v]`` in the type of ``rows``.

    Examples
    --------
    >>> q, rows, kv_b = torch.randn(3, 2, 6), torch.randn(3, 4, 5), torch.randn(2 * 7, 3)
    >>> alone = torch.cat([mla.absorbed(q[i : i + 1], rows[i], kv_b) for i in range(3)])
    >>> torch.allclose(absorbed_decode(q, rows, kv_b), alone, atol=1e-5)
    True
    """
    dtype, rank = compute_dtype(rows.dtype), kv_b.shape[1]
    _, heads, width = q.shape
    nope = width - (rows.shape[-1] - rank)
    key_up, value_up = kv_b.to(dtype).view(heads, -1, rank).tensor_split((nope,), 1)
    q, wide = q.to(dtype), rows.to(dtype)
    query = torch.cat((torch.einsum("nhd,hdr->nhr", q[..., :nope], key_up), q[..., nope:]), -1)
    scores = query @ wide.mT * width**-0.5
    if padding is not None:
        scores = scores.masked_fill(padding.unsqueeze(1), -torch.inf)
    attended = scores.softmax(-1) @ wide[..., :rank]
    return torch.einsum("nhr,hvr->nhv", attended, value_up).to(rows.dtype)


def _absorbing_pays(num_queries: int, num_rows: int, config: K3Config) -> bool:
    """Whether the absorbed form takes fewer multiplications: short chunks over a long context.

    Expanding rebuilds keys and values of all rows; absorbing converts only the queries, but then
    each score is a product over 576 values instead of 192, and each output over 512 instead of 128.
    """
    rebuilt = config.kv_lora_rank * (config.qk_nope_head_dim + config.v_head_dim)
    narrow = config.qk_head_dim + config.v_head_dim
    wide = config.mla_cache_dim + config.kv_lora_rank
    pairs = num_queries * num_rows
    return num_queries * rebuilt + pairs * wide < num_rows * rebuilt + pairs * narrow


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
