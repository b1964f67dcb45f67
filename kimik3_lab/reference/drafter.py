"""DSpark: a small model that drafts a block of tokens in one parallel pass.

Needs torch. Lesson 09 schedules its drafts; the engine of lesson 10 runs it.

The drafter never reads the text. It reads what the target thought of it: the target's residual
stream after a few layers (the *taps*), concatenated and projected, becomes the context that every
draft layer attends to. One pass over ``[last token, mask, mask, ...]`` then gives a guess for each
position at once, and a rank-r Markov head ties each guess to the token before it, one at a time.

Source: vLLM 0.33.0 ``vllm/models/kimi_k3/nvidia/dspark_mla.py`` and
``vllm/v1/worker/gpu/spec_decode/dspark/speculator.py``; released weights: Inferact/Kimi-K3-DSpark.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kimik3_lab.drafter_config import DSparkConfig
from kimik3_lab.reference.drafter_layers import ConfidenceHead, DraftLayer, MarkovHead
from kimik3_lab.reference.norms import RMSNorm, compute_dtype

__all__ = ["DSparkDrafter", "Draft", "DraftState"]


@dataclass
class DraftState:
    """Context of one sequence: a cached row per verified token and draft layer.

    Attributes
    ----------
    latent
        A tensor ``[num_tokens, kv_lora + rope]`` per draft layer.

    Examples
    --------
    >>> state = DraftState([torch.zeros(5, 48), torch.zeros(5, 48)])
    >>> state.truncate(3)  # verification turned two tokens down
    >>> state.num_tokens
    3
    """

    latent: list[Tensor] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Verified tokens that the drafter has taken in."""
        return len(self.latent[0]) if self.latent else 0

    def truncate(self, num_tokens: int) -> None:
        """Forget every token from position ``num_tokens`` on."""
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"cannot keep {num_tokens} of {self.num_tokens} tokens")
        self.latent = [rows[:num_tokens] for rows in self.latent]


class Draft(NamedTuple):
    """A drafted block.

    Attributes
    ----------
    token_ids
        int64 ``[N]``: guesses for the N tokens after the anchor.
    probs
        ``[N, V]``: the distribution that each was drawn from, float32 or wider; verification by
        sampling needs it.
    confidence
        ``[N]``: chance that the token is accepted, if the drafter has that head, else ``None``.
    """

    token_ids: Tensor
    probs: Tensor
    confidence: Tensor | None


class DSparkDrafter(nn.Module):
    """The drafter. Embedding and output head are the target's own and are passed in.

    Parameters
    ----------
    config
        Shape.

    Examples
    --------
    >>> from kimik3_lab.config import K3Config
    >>> from kimik3_lab.reference.initialization import random_model
    >>> from kimik3_lab.reference.state import SequenceMixer
    >>> target = random_model(K3Config.micro(), seed=0)
    >>> drafter = DSparkDrafter(DSparkConfig.for_target(target.config)).eval()
    >>> state, taps = drafter.new_state(), drafter.new_taps()
    >>> logits = target(torch.tensor([0, 5, 9]), SequenceMixer(target.new_state()), taps=taps)
    >>> drafter.write_context(taps, state)
    >>> draft = drafter.draft(int(logits[-1].argmax()), state, target)
    >>> draft.token_ids.shape, draft.probs.shape
    (torch.Size([7]), torch.Size([7, 64]))
    """

    def __init__(
        self,
        config: DSparkConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        to = {"dtype": dtype, "device": device}
        hidden, eps = config.hidden_size, config.rms_norm_eps
        taps = len(config.target_layer_ids) * config.target_hidden_size
        self.context_proj = nn.Linear(taps, hidden, bias=False, **to)
        self.context_norm = RMSNorm(hidden, eps, **to)
        self.layers = nn.ModuleList(
            DraftLayer(config, **to) for _ in range(config.num_hidden_layers)
        )
        self.final_norm = RMSNorm(hidden, eps, **to)
        self.markov_head = MarkovHead(config, **to)
        self.confidence_head = ConfidenceHead(config, **to) if config.confidence_head else None

    def new_state(self) -> DraftState:
        """Context of a sequence of which nothing is verified yet."""
        width = self.config.kv_lora_rank + self.config.qk_rope_head_dim
        like = self.context_proj.weight
        return DraftState([like.new_empty(0, width) for _ in self.layers])

    def new_taps(self) -> dict[int, Tensor | None]:
        """Make the dictionary for the target's forward, which fills in each tapped layer."""
        return dict.fromkeys(self.config.target_layer_ids)

    def write_context(
        self, taps: Mapping[int, Tensor | None], state: DraftState, rows: int | None = None
    ) -> None:
        """Take in verified tokens: project the target's taps into every draft layer's cache.

        Parameters
        ----------
        taps
            Tapped layer to ``[T, target_hidden]``: the running residual sum after that layer (the
            stream itself, not the attention-residual mixture), for the T tokens after those that
            ``state`` holds.
        state
            Advanced by the new tokens.
        rows
            Take in only the first ``rows`` tokens: those that verification accepted.

        Raises
        ------
        ValueError
            If a tapped layer is missing, or has fewer rows than asked for: a drafter fed the wrong
            taps drafts badly and says nothing.
        """
        wanted = self.config.target_layer_ids
        missing = [i for i in wanted if taps.get(i) is None]
        if missing:
            raise ValueError(
                f"no tap of layer {missing[0]}: pass new_taps() to the target's forward; "
                f"this drafter reads layers {list(wanted)}"
            )
        tapped: list[Tensor] = [taps[i] for i in wanted]  # type: ignore[misc]
        fewest = min(map(len, tapped))
        take = fewest if rows is None else rows
        if not 0 <= take <= fewest or fewest != max(map(len, tapped)):
            raise ValueError(
                f"cannot take {take} rows of taps with {[len(tap) for tap in tapped]} rows: all "
                "come from one forward of the target, and at most its rows can be taken"
            )
        joined = torch.cat([tap[:take] for tap in tapped], -1)
        context = self.context_norm(self.context_proj(joined.to(self.context_proj.weight.dtype)))
        start = state.num_tokens
        positions = torch.arange(start, start + len(context), device=context.device)
        state.latent = [
            # The context is normed once for all layers: no input_layernorm on this path.
            torch.cat((rows_so_far, layer.self_attn.latent(context, positions)))
            for layer, rows_so_far in zip(self.layers, state.latent, strict=True)
        ]

    def draft(
        self,
        anchor: int,
        state: DraftState,
        target: nn.Module,
        *,
        num_tokens: int | None = None,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> Draft:
        """Guess the tokens after ``anchor``, which is the last sampled and not yet verified token.

        Parameters
        ----------
        anchor
            Token id at position ``state.num_tokens``.
        state
            Context; the block's own rows are not kept in it.
        target
            The :class:`~kimik3_lab.reference.model.K3ForCausalLM` that owns embedding and head.
        num_tokens
            Length of the block, ``config.block_size`` by default.
        temperature
            0 drafts greedily.
        generator
            For ``temperature > 0``.
        """
        count = self.config.block_size if num_tokens is None else num_tokens
        if count < 1:
            raise ValueError(f"num_tokens must be at least 1, got {count}")
        if temperature < 0:
            raise ValueError(f"temperature must be 0 (greedy) or above, got {temperature}")
        weight = self.context_proj.weight
        ids = torch.full((count,), self.config.mask_token_id, device=weight.device)
        ids[0] = anchor
        start = state.num_tokens
        positions = torch.arange(start, start + count, device=weight.device)
        hidden = target.model.embed_tokens(ids).to(weight.dtype)
        for layer, context in zip(self.layers, state.latent, strict=True):
            hidden = layer(hidden, positions, context)
        hidden = self.final_norm(hidden)
        wide = compute_dtype(hidden.dtype)
        base = hidden.to(wide) @ target.lm_head.weight.to(wide).mT
        return self._sample_in_order(anchor, hidden, base, temperature, generator)

    def _sample_in_order(
        self,
        anchor: int,
        hidden: Tensor,
        base: Tensor,
        temperature: float,
        generator: torch.Generator | None,
    ) -> Draft:
        """Run the Markov loop: a row is corrected by the token that was drawn just before it."""
        tokens, probs, confidence = [], [], []
        previous = torch.tensor(anchor, device=base.device)
        for row, logits in zip(hidden, base, strict=True):
            embedding = self.markov_head.markov_w1(previous)
            logits = logits + self.markov_head.bias(embedding).to(logits.dtype)
            if temperature > 0:
                distribution = (logits / temperature).softmax(-1)
                previous = torch.multinomial(distribution, 1, generator=generator).squeeze(0)
            else:
                previous = logits.argmax(-1)
                distribution = F.one_hot(previous, len(logits)).to(logits.dtype)
            if self.confidence_head is not None:
                confidence.append(self.confidence_head(row, embedding))
            tokens.append(previous)
            probs.append(distribution)
        return Draft(
            torch.stack(tokens),
            torch.stack(probs),
            torch.stack(confidence) if confidence else None,
        )
