"""What one sequence keeps between steps, and the mixer that reads and writes it.

Needs torch. Lesson 05 hands a sequence over from prefill to decode; lesson 07 puts the same state
into a shared cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from kimik3_lab.config import K3Config
from kimik3_lab.reference import kda, mla
from kimik3_lab.reference.norms import compute_dtype

__all__ = ["SequenceMixer", "SequenceState"]


@dataclass
class SequenceState:
    """State of one sequence: constant for KDA, a row per token for MLA.

    Attributes
    ----------
    recurrent
        KDA layer to ``[H, K, V]``, float32 or wider.
    conv
        KDA layer to ``[3P, kernel - 1]``: the last inputs of the convolution, oldest first.
    latent
        MLA layer to ``[num_tokens, kv_lora + rope]``.
    num_tokens
        Tokens that all layers have taken in.

    Examples
    --------
    >>> state = SequenceState.empty(K3Config.released(), dtype=torch.bfloat16, device="meta")
    >>> round(state.nbytes / 1e6, 1)  # MB before the first token, all of it KDA
    449.4
    """

    recurrent: dict[int, Tensor]
    conv: dict[int, Tensor]
    latent: dict[int, Tensor]
    num_layers: int
    num_tokens: int = field(default=0)

    @classmethod
    def empty(
        cls,
        config: K3Config,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> SequenceState:
        """State before the first token, for a model whose activations are of type ``dtype``."""
        linear = config.linear_attn_config
        heads, width, window = linear.num_heads, linear.head_dim, linear.short_conv_kernel_size - 1
        wide = compute_dtype(dtype)

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            recurrent={i: zeros(heads, width, width, dtype=wide) for i in config.kda_layer_ids},
            conv={i: zeros(3 * linear.projection_size, window) for i in config.kda_layer_ids},
            latent={i: zeros(0, config.mla_cache_dim) for i in config.mla_layer_ids},
            num_layers=config.num_hidden_layers,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        groups = (self.recurrent, self.conv, self.latent)
        return sum(tensor.nbytes for group in groups for tensor in group.values())

    def clone(self) -> SequenceState:
        """Copy that shares no memory with this one: a snapshot to return to."""
        copies = (
            {layer_id: tensor.clone() for layer_id, tensor in group.items()}
            for group in (self.recurrent, self.conv, self.latent)
        )
        return SequenceState(*copies, num_layers=self.num_layers, num_tokens=self.num_tokens)


class SequenceMixer:
    """The mixer of a single sequence: each step continues where the last one stopped.

    Parameters
    ----------
    state
        Read and advanced by each step.
    chunk_size
        Of the chunked KDA form.
    form
        ``"auto"`` runs steps of several tokens in the forms meant for prefill (chunked KDA,
        expanded MLA) and single tokens in those meant for decoding (recurrent, absorbed).
        ``"prefill"`` and ``"decode"`` force one of the two; they differ in rounding only.

    Examples
    --------
    >>> state = SequenceState.empty(K3Config.micro())
    >>> mixer = SequenceMixer(state)
    >>> y = mixer.conv(0, torch.ones(5, 96), torch.ones(96, 4))
    >>> y.shape, state.conv[0].shape
    (torch.Size([5, 96]), torch.Size([96, 3]))
    """

    def __init__(
        self,
        state: SequenceState,
        *,
        chunk_size: int = 64,
        form: Literal["auto", "prefill", "decode"] = "auto",
    ) -> None:
        if form not in ("auto", "prefill", "decode"):
            raise ValueError(f"form must be 'auto', 'prefill' or 'decode', got {form!r}")
        self.state = state
        self.chunk_size = chunk_size
        self.form = form

    def conv(self, layer_id: int, u: Tensor, weight: Tensor) -> Tensor:
        """See :meth:`kimik3_lab.reference.mixer.Mixer.conv`."""
        y, self.state.conv[layer_id] = kda.short_conv(u, weight, self.state.conv[layer_id])
        return y

    def kda(
        self, layer_id: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
    ) -> Tensor:
        """See :meth:`kimik3_lab.reference.mixer.Mixer.kda`."""
        inputs = [x.unsqueeze(0) for x in (q, k, v, g, beta)]  # a batch of one sequence
        before = self.state.recurrent[layer_id].unsqueeze(0)
        if self._decoding(len(q)):
            o, after = kda.recurrent(*inputs, before)
        else:
            o, after, _ = kda.chunked(*inputs, before, self.chunk_size)
        self.state.recurrent[layer_id] = after.squeeze(0)
        self._advance(layer_id, len(q))
        return o.squeeze(0)

    def mla(
        self, layer_id: int, q: Tensor, latent: Tensor, kv_b: Tensor, config: K3Config
    ) -> Tensor:
        """See :meth:`kimik3_lab.reference.mixer.Mixer.mla`."""
        rows = torch.cat((self.state.latent[layer_id], latent))
        self.state.latent[layer_id] = rows
        self._advance(layer_id, len(q))
        return (mla.absorbed if self._decoding(len(q)) else mla.expanded)(q, rows, kv_b)

    def _decoding(self, count: int) -> bool:
        return self.form == "decode" or (self.form == "auto" and count == 1)

    def _advance(self, layer_id: int, count: int) -> None:
        # The tokens of a step count as taken in once the last layer has mixed them.
        if layer_id == self.state.num_layers - 1:
            self.state.num_tokens += count
