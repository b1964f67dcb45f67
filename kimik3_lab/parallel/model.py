"""A whole Kimi K3 over ranks, built from the reference's weights: each rank copies what it keeps.

Needs torch. What is split and what every rank keeps whole is vLLM's choice, as
:mod:`kimik3_lab.performance.placement` counts it: heads, feed-forward widths and the vocabulary are
split; what leads into a low-rank or latent space, the norms and the attention residuals are whole.

A layer is the reference's own :class:`~kimik3_lab.reference.model.DecoderLayer` with smaller parts
in it. Each part ends in a sum over ranks, so between parts every rank has the same numbers, and the
residual stream with its mixtures runs on every rank as if it were alone.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from kimik3_lab.parallel.dcp import RankMixer
from kimik3_lab.parallel.groups import Ranks
from kimik3_lab.parallel.split_layer import ExpertLayout, split_layer, with_heads
from kimik3_lab.reference.mixer import Mixer
from kimik3_lab.reference.model import K3ForCausalLM
from kimik3_lab.reference.norms import compute_dtype
from kimik3_lab.reference.residuals import ResidualStream
from kimik3_lab.reference.state import SequenceState

__all__ = ["ParallelK3"]


class ParallelK3:
    """One rank of a K3; all ranks call it together with the same tokens and get the same logits.

    Parameters
    ----------
    model
        The whole model. This rank copies its parts; those kept whole are shared with it.
    ranks
        The ranks that hold it.
    experts
        How the routed experts are spread.
    slots
        By MoE layer, the experts of each rank, if they are whole; None for those in order.
    context_parallel
        Split the cached MLA rows over the ranks, too.

    Raises
    ------
    ValueError
        If ``experts`` is unknown or ``slots`` do not fit.

    Examples
    --------
    One rank is the reference:

    >>> from kimik3_lab.config import K3Config
    >>> from kimik3_lab.reference.initialization import random_model
    >>> model = random_model(K3Config.micro(), seed=0)
    >>> ParallelK3(model).generate([0, 7, 9], 4) == model.generate([0, 7, 9], 4)
    True
    """

    def __init__(
        self,
        model: K3ForCausalLM,
        ranks: Ranks | None = None,
        *,
        experts: ExpertLayout = "sliced",
        slots: dict[int, Sequence[Sequence[int]]] | None = None,
        context_parallel: bool = False,
    ) -> None:
        if experts not in ("sliced", "whole", "all_to_all"):
            raise ValueError(f"experts must be 'sliced', 'whole' or 'all_to_all', got {experts!r}")
        if slots and experts == "sliced":
            raise ValueError("slots say where whole experts lie: set experts='whole'")
        if odd := sorted(set(slots or ()) - set(model.config.moe_layer_ids)):
            raise ValueError(f"slots name layer {odd[0]}, which has no routed experts to place")
        self.ranks = ranks = ranks or Ranks()
        self.config = config = model.config
        self.context_parallel = context_parallel
        body, slots = model.model, slots or {}
        self.layers = [
            split_layer(layer, config, ranks, experts, slots.get(layer_id))
            for layer_id, layer in enumerate(body.layers)
        ]
        self._body, self.device, self.dtype = body, model.device, model.dtype
        self._vocabulary = ranks.share(config.vocab_size)
        span = slice(self._vocabulary.start, self._vocabulary.stop)
        self._embedding = body.embed_tokens.weight[span].detach().clone()
        self._head = model.lm_head.weight[span].detach().clone()

    def new_state(self) -> SequenceState:
        """State of a sequence on this rank: its heads' KDA states, and MLA rows."""
        heads = len(self.ranks.share(self.config.linear_attn_config.num_heads))
        local = with_heads(self.config, kda=heads)
        return SequenceState.empty(local, dtype=self.dtype, device=self.device)

    def new_mixer(self) -> RankMixer:
        """Mixer of a new sequence on this rank."""
        return RankMixer(
            self.new_state(),
            self.ranks,
            num_heads=self.config.num_attention_heads,
            context_parallel=self.context_parallel,
        )

    @torch.inference_mode()
    def __call__(
        self, token_ids: Tensor, mixer: Mixer, *, logits_at: Tensor | None = None
    ) -> Tensor:
        """Run one step; arguments and result are those of :meth:`K3ForCausalLM.forward`.

        Raises
        ------
        ValueError
            If ``token_ids`` is no flat int64 tensor with at least one token, or one of them is
            not in the vocabulary: no rank has its row, and zeros would be taken for it.
        """
        self._check(token_ids)
        body = self._body
        stream = ResidualStream(self._embed(token_ids), body.norm.eps)
        for layer in self.layers:
            layer(stream, mixer)
        x = stream.read(body.output_attn_res_proj.weight, body.output_attn_res_norm.weight)
        hidden = body.norm(x)
        if logits_at is not None:
            hidden = hidden[logits_at]
        wide = compute_dtype(hidden.dtype)
        local = hidden.to(wide) @ self._head.to(wide).mT
        return self.ranks.all_gather(local, self.ranks.sizes(self.config.vocab_size), dim=1)

    def generate(
        self,
        prompt_ids: Sequence[int] | Tensor,
        max_tokens: int = 16,
        *,
        stop_token_ids: Collection[int] | None = None,
    ) -> list[int]:
        """Continue a prompt greedily; arguments, result and errors of the reference's ``generate``.

        See :meth:`K3ForCausalLM.generate`. Nothing is exchanged before the arguments are checked.
        """
        prompt, max_tokens = self._checked(prompt_ids, max_tokens)
        stops = {self.config.eos_token_id} if stop_token_ids is None else set(stop_token_ids)
        mixer = self.new_mixer()
        step = torch.tensor(prompt, device=self.device)
        output: list[int] = []
        while len(output) < max_tokens:
            last = torch.tensor([len(step) - 1], device=self.device)
            step = self(step, mixer, logits_at=last).argmax(-1)
            output.append(int(step))
            if output[-1] in stops:
                break
        return output

    def _checked(
        self, prompt_ids: Sequence[int] | Tensor, max_tokens: int
    ) -> tuple[list[int], int]:
        """Refuse what the reference refuses: the context is as long for many ranks as for one."""
        ids = prompt_ids.flatten().tolist() if isinstance(prompt_ids, Tensor) else prompt_ids
        try:
            prompt = [operator.index(token) for token in ids]
            max_tokens = operator.index(max_tokens)
        except TypeError as error:
            raise ValueError(f"token ids and max_tokens must be whole numbers: {error}") from error
        if not prompt:
            raise ValueError("the prompt is empty: expected at least one token id")
        for token in prompt:
            self._check_vocabulary(token)
        context = self.config.max_position_embeddings
        room = context - len(prompt)
        if room < 1:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens leaves no room in a context of {context}: give "
                f"at most {context - 1}"
            )
        if not 1 <= max_tokens <= room:
            raise ValueError(
                f"max_tokens must be from 1 to {room}: the context of {context} tokens already "
                f"holds a prompt of {len(prompt)}; got {max_tokens}"
            )
        return prompt, max_tokens

    def _check(self, token_ids: Tensor) -> None:
        if not isinstance(token_ids, Tensor):
            raise ValueError(
                "token_ids must be a flat int64 tensor with at least one token, got a "
                f"{type(token_ids).__name__}: make one with torch.tensor"
            )
        if token_ids.ndim != 1 or token_ids.dtype != torch.int64 or not len(token_ids):
            raise ValueError(
                "token_ids must be a flat int64 tensor with at least one token, got "
                f"{token_ids.dtype} {tuple(token_ids.shape)}: concatenate sequences, do not pad"
            )
        for end in token_ids.aminmax():
            self._check_vocabulary(int(end))

    def _check_vocabulary(self, token: int) -> None:
        if not 0 <= token < self.config.vocab_size:
            raise ValueError(
                f"token ids must be from 0 to {self.config.vocab_size - 1}, got {token}"
            )

    def _embed(self, token_ids: Tensor) -> Tensor:
        """Look up the rows that are here, zeros for the others; one rank has each."""
        here = self._vocabulary
        local = token_ids - here.start
        known = (local >= 0) & (local < len(here))
        found = self._embedding[local.clamp(0, len(here) - 1)] * known.unsqueeze(-1)
        return self.ranks.all_reduce(found)
