"""Kimi K3, all layers together: token ids in, logits out.

Needs torch. Lessons 01 and 05 run it; the engine of lesson 10 runs it with another mixer.

Module names are those of the released checkpoint, so ``state_dict()`` has its tensor names (in the
flat layout, without ``language_model.``, and with every expert unpacked).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from kimik3_lab.config import K3Config
from kimik3_lab.reference import meta
from kimik3_lab.reference.kda import KimiDeltaAttention
from kimik3_lab.reference.mixer import Mixer
from kimik3_lab.reference.mla import MultiHeadLatentAttention
from kimik3_lab.reference.moe import MLP, LatentMoE
from kimik3_lab.reference.norms import RMSNorm, compute_dtype
from kimik3_lab.reference.residuals import ResidualStream
from kimik3_lab.reference.state import SequenceMixer, SequenceState

__all__ = ["DecoderLayer", "K3ForCausalLM", "K3Model", "Mixer", "SequenceMixer", "SequenceState"]


class DecoderLayer(nn.Module):
    """An attention and a feed-forward, each reading its own mixture of the residual stream."""

    def __init__(
        self,
        config: K3Config,
        layer_id: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        to = {"dtype": dtype, "device": device}
        self.starts_block = layer_id % config.attn_res_block_size == 0
        self.input_layernorm = RMSNorm(hidden, eps, **to)
        self.post_attention_layernorm = RMSNorm(hidden, eps, **to)
        self.self_attention_res_norm = RMSNorm(hidden, eps, **to)
        self.self_attention_res_proj = nn.Linear(hidden, 1, bias=False, **to)
        self.mlp_res_norm = RMSNorm(hidden, eps, **to)
        self.mlp_res_proj = nn.Linear(hidden, 1, bias=False, **to)
        if config.is_kda_layer(layer_id):
            self.self_attn = KimiDeltaAttention(config, layer_id, **to)
        else:
            self.self_attn = MultiHeadLatentAttention(config, layer_id, **to)
        if config.is_moe_layer(layer_id):
            self.block_sparse_moe = LatentMoE(config, **to)
            self._ffn = "block_sparse_moe"
        else:
            self.mlp = MLP(config, config.intermediate_size, **to)
            self._ffn = "mlp"

    def forward(self, stream: ResidualStream, mixer: Mixer) -> None:
        """Read from ``stream`` twice and add to it twice."""
        x = stream.read(self.self_attention_res_proj.weight, self.self_attention_res_norm.weight)
        # Closing the block after the read: attention still sees it as the running sum, the
        # feed-forward sees it as a block, and the new sum starts from the attention output.
        if self.starts_block:
            stream.start_block()
        stream.add(self.self_attn(self.input_layernorm(x), mixer))
        x = stream.read(self.mlp_res_proj.weight, self.mlp_res_norm.weight)
        ffn = getattr(self, self._ffn)
        stream.add(ffn(self.post_attention_layernorm(x)))


class K3Model(nn.Module):
    """Embedding, layers, and the final mixture and norm."""

    def __init__(
        self,
        config: K3Config,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        to = {"dtype": dtype, "device": device}
        self.embed_tokens = meta.embedding(config.vocab_size, hidden, **to)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer_id, **to) for layer_id in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(hidden, eps, **to)
        self.output_attn_res_norm = RMSNorm(hidden, eps, **to)
        self.output_attn_res_proj = nn.Linear(hidden, 1, bias=False, **to)

    def forward(
        self, token_ids: Tensor, mixer: Mixer, taps: dict[int, Tensor | None] | None = None
    ) -> Tensor:
        """Map ``token_ids [N]`` to final hidden states ``[N, hidden]``."""
        stream = ResidualStream(self.embed_tokens(token_ids), self.norm.eps)
        for layer_id, layer in enumerate(self.layers):
            layer(stream, mixer)
            if taps is not None and layer_id in taps:
                taps[layer_id] = stream.prefix
        x = stream.read(self.output_attn_res_proj.weight, self.output_attn_res_norm.weight)
        return self.norm(x)


class K3ForCausalLM(nn.Module):
    """The whole text model.

    Fresh from the constructor its weights mean nothing: load a checkpoint with
    :func:`kimik3_lab.reference.checkpoint.load`, or fill a small one with
    :func:`kimik3_lab.reference.initialization.initialize`.

    Parameters
    ----------
    config
        Any member of the family that fits in memory.
    dtype
        Type of weights and activations. What is float32 on disk stays float32 or wider.
    device
        Where to put it.

    Examples
    --------
    >>> from kimik3_lab.reference.initialization import random_model
    >>> model = random_model(K3Config.micro(), seed=0)
    >>> mixer = SequenceMixer(model.new_state())
    >>> model(torch.tensor([0, 7, 9]), mixer).shape  # prefill of three tokens
    torch.Size([3, 64])
    >>> model(torch.tensor([4]), mixer).shape, mixer.state.num_tokens  # decode one more
    (torch.Size([1, 64]), 4)
    """

    def __init__(
        self,
        config: K3Config,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.model = K3Model(config, dtype=dtype, device=device)
        self.lm_head = nn.Linear(
            config.hidden_size, config.vocab_size, bias=False, dtype=dtype, device=device
        )

    @classmethod
    def uninitialized(
        cls,
        config: K3Config,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> K3ForCausalLM:
        """Make a model whose memory is allocated but not filled, for who fills all of it at once.

        Skips the default initialisation, which takes time and draws from torch's global generator.
        """
        model = cls(config, dtype=dtype, device="meta")
        meta.allocate(model, device)
        return model

    @property
    def dtype(self) -> torch.dtype:
        """Type of the matrices and of the activations."""
        return self.lm_head.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.lm_head.weight.device

    def new_state(self) -> SequenceState:
        """State of a sequence before its first token."""
        return SequenceState.empty(self.config, dtype=self.dtype, device=self.device)

    def forward(
        self,
        token_ids: Tensor,
        mixer: Mixer,
        *,
        logits_at: Tensor | None = None,
        taps: dict[int, Tensor | None] | None = None,
    ) -> Tensor:
        """Run one step.

        Parameters
        ----------
        token_ids
            int64 ``[N]``: the new tokens of the step, of one sequence or of many.
        mixer
            Knows which sequence each token belongs to, and holds their states.
        logits_at
            int64 ``[M]``: rows to compute logits for; ``None`` for all.
        taps
            For a drafter: each layer id that is a key gets the running sum ``[N, hidden]`` after
            that layer as its value. That is the live sum alone, not a mixture with the blocks.

        Returns
        -------
        Tensor
            ``[N, vocab]`` or ``[M, vocab]``, float32 or wider.

        Raises
        ------
        ValueError
            If ``token_ids`` is not a flat int64 tensor with at least one token.
        """
        if token_ids.ndim != 1 or token_ids.dtype != torch.int64 or not len(token_ids):
            raise ValueError(
                "token_ids must be a flat int64 tensor with at least one token, got "
                f"{token_ids.dtype} {tuple(token_ids.shape)}: concatenate sequences, do not pad"
            )
        hidden = self.model(token_ids, mixer, taps)
        if logits_at is not None:
            hidden = hidden[logits_at]
        wide = compute_dtype(hidden.dtype)
        return hidden.to(wide) @ self.lm_head.weight.to(wide).mT

    @torch.inference_mode()
    def generate(
        self,
        prompt_ids: Sequence[int] | Tensor,
        max_tokens: int = 16,
        *,
        stop_token_ids: Collection[int] | None = None,
    ) -> list[int]:
        """Continue a prompt greedily: one prefill step, then one step per token.

        Parameters
        ----------
        prompt_ids
            At least one token id.
        max_tokens
            Most tokens to generate.
        stop_token_ids
            Generation ends after any of these; ``None`` stands for the end-of-sequence token of
            the configuration, ``()`` for none.

        Returns
        -------
        list of int
            The new tokens, including the one that stopped it.

        Raises
        ------
        ValueError
            If a token id is no whole number or outside the vocabulary, the prompt is empty,
            ``max_tokens`` is not positive, or both together exceed the context length.
        """
        config = self.config
        if isinstance(prompt_ids, Tensor):
            prompt_ids = prompt_ids.flatten().tolist()
        try:
            prompt_ids = [operator.index(token) for token in prompt_ids]
            max_tokens = operator.index(max_tokens)
        except TypeError as error:
            raise ValueError(f"token ids and max_tokens must be whole numbers: {error}") from error
        bad = [token for token in prompt_ids if not 0 <= token < config.vocab_size]
        if bad or not prompt_ids:
            got = f"token id {bad[0]}" if bad else "an empty prompt"
            raise ValueError(f"expected token ids from 0 to {config.vocab_size - 1}, got {got}")
        room = config.max_position_embeddings - len(prompt_ids)
        if not 1 <= max_tokens <= room:
            raise ValueError(
                f"max_tokens must be from 1 to {room}: the context of {len(prompt_ids) + room} "
                f"tokens already holds a prompt of {len(prompt_ids)}; got {max_tokens}"
            )
        stops = {config.eos_token_id} if stop_token_ids is None else set(stop_token_ids)
        mixer = SequenceMixer(self.new_state())
        step = torch.tensor(prompt_ids, device=self.device)
        output: list[int] = []
        while True:
            last = torch.tensor([len(step) - 1], device=self.device)
            step = self(step, mixer, logits_at=last).argmax(-1)
            output.append(int(step))
            if output[-1] in stops or len(output) == max_tokens:
                return output
