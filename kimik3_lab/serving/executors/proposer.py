"""Drafts for all requests of a step, in one forward pass of a DSpark drafter.

Needs torch. Lesson 09 schedules its drafts, the engine of lesson 10 runs it. In vLLM this is
``DSparkSpeculator`` (``vllm/v1/worker/gpu/spec_decode/dspark/speculator.py``).

What the drafter remembers of a text is a cached row per token and draft layer, made from the
target's hidden states. As in vLLM these layers belong to the group of the MLA layers: the rows lie
in pages under the block ids that the scheduler hands out for those. So the proposer holds nothing
that belongs to a request, and needs no word about one that ends:

* Memory is bounded by the pool, whatever the requests do.
* A *prefix hit* skips tokens whose hidden states are never computed again. Their rows are in the
  blocks that were found, because whoever filled a block wrote them. A row depends on nothing but
  the tokens up to its own, which is what a block's hash stands for.
* A *preempted* request computes its tokens anew, and their rows with them.
* A *rejected* draft leaves rows behind. They lie past the context, where nothing reads, and the
  next tokens overwrite them.

Drafts decide how much is accepted, never what is said: see
:mod:`kimik3_lab.serving.executors.rejection_sampler`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor

from kimik3_lab.reference.drafter import DSparkDrafter
from kimik3_lab.reference.drafter_layers import DraftLayer
from kimik3_lab.reference.model import K3ForCausalLM
from kimik3_lab.reference.norms import compute_dtype
from kimik3_lab.serving.config import CacheConfig
from kimik3_lab.serving.executors.draft_attention import attend_blocks, group_contexts
from kimik3_lab.serving.executors.draft_sampler import choose_blocks, sample_blocks
from kimik3_lab.serving.executors.drafts import Draft, DraftRequest
from kimik3_lab.serving.executors.pinned import to_device

__all__ = ["DraftSampleMethod", "Proposer"]

DraftSampleMethod: TypeAlias = Literal["greedy", "probabilistic"]


class Proposer:
    """Drafts for many requests.

    Parameters
    ----------
    drafter : DSparkDrafter
        On the target's device. Its type is that of the cached rows.
    target : K3ForCausalLM
        Owns embedding and output head.
    num_speculative_tokens : int
        Length of a draft. It need not be the ``block_size`` that the drafter was trained with.
    cache_config : CacheConfig
        The scheduler's.
    draft_sample_method : {"greedy", "probabilistic"}
        The most probable token of each place; or, for requests with a temperature, a draw from
        the drafter's distribution at that temperature (vLLM's setting of the same name).
    shared_noise : bool
        Draw with the numbers that the target will draw with at the same position. For
        verification by ``coupled`` only: the rules ``standard`` and ``block`` are right only if
        the draft was drawn independently.
    truncate_drafts : bool
        Apply top-p, top-k and min-p to the drafter's distribution too. vLLM applies the
        temperature alone; a token outside the target's set is always rejected, so truncation
        raises acceptance (vLLM PR #56724, open).

    Attributes
    ----------
    num_forwards : int
        Passes of the drafter so far.

    Raises
    ------
    ValueError
        If drafter and target do not belong together, or a setting is unknown.

    Examples
    --------
    >>> from kimik3_lab.config import K3Config
    >>> from kimik3_lab.drafter_config import DSparkConfig
    >>> from kimik3_lab.reference.initialization import random_model
    >>> from kimik3_lab.reference.state import SequenceMixer
    >>> from kimik3_lab.serving.request import SamplingParams
    >>> target = random_model(K3Config.micro(), seed=0)
    >>> drafter = DSparkDrafter(DSparkConfig.for_target(target.config)).eval()
    >>> proposer = Proposer(drafter, target, 3, CacheConfig(num_blocks=4, block_size=16))
    >>> taps = proposer.new_taps()
    >>> _ = target(torch.tensor([0, 5, 9]), SequenceMixer(target.new_state()), taps=taps)
    >>> proposer.write(taps, torch.arange(3), 2 * 16 + torch.arange(3))  # into block 2
    >>> request = DraftRequest("r", 7, 3, [2], SamplingParams())
    >>> len(proposer.propose([request])["r"].token_ids), proposer.num_forwards
    (3, 1)
    """

    def __init__(
        self,
        drafter: DSparkDrafter,
        target: K3ForCausalLM,
        num_speculative_tokens: int,
        cache_config: CacheConfig,
        *,
        draft_sample_method: DraftSampleMethod = "greedy",
        shared_noise: bool = False,
        truncate_drafts: bool = False,
    ) -> None:
        config, k = drafter.config, num_speculative_tokens
        if k < 1:
            raise ValueError(f"num_speculative_tokens must be at least 1, got {k}")
        if draft_sample_method not in get_args(DraftSampleMethod):
            raise ValueError(
                f"draft_sample_method must be one of {get_args(DraftSampleMethod)}, got "
                f"{draft_sample_method!r}"
            )
        for ours, theirs in (
            ("vocab_size", "vocab_size"),
            ("target_hidden_size", "hidden_size"),
            ("target_num_hidden_layers", "num_hidden_layers"),
        ):
            made_for, got = getattr(config, ours), getattr(target.config, theirs)
            if made_for != got:
                raise ValueError(
                    f"the drafter was made for a target with {theirs}={made_for}, this one has "
                    f"{got}: load the drafter that belongs to it"
                )
        self.drafter, self.target = drafter, target
        self.num_speculative_tokens = num_speculative_tokens
        self.draft_sample_method = draft_sample_method
        self.shared_noise, self.truncate_drafts = shared_noise, truncate_drafts
        self.num_forwards = 0
        self._layers = cast(list[DraftLayer], list(drafter.layers))
        # A block of the MLA layers holds this many tokens, all ranks of a DCP group together.
        self._block_size = cache_config.scheduler_block_size
        width = config.kv_lora_rank + config.qk_rope_head_dim
        like = drafter.context_proj.weight
        #: ``[draft layer, block, block_size, kv_lora + rope]``; block 0 stays zero.
        self.latent = like.new_zeros(
            config.num_hidden_layers, cache_config.num_blocks, self._block_size, width
        )

    # -- context -----------------------------------------------------------------------------

    def new_taps(self) -> dict[int, Tensor | None]:
        """Make the dictionary for the target's forward, see :meth:`DSparkDrafter.new_taps`."""
        return self.drafter.new_taps()

    @torch.inference_mode()
    def write(self, taps: Mapping[int, Tensor | None], positions: Tensor, cells: Tensor) -> None:
        """Cache the rows of a step, after each forward of the target.

        Parameters
        ----------
        taps
            What the forward left in :meth:`new_taps`: ``[N, hidden]`` for each tapped layer.
        positions
            int64 ``[N]``: where each token stands in its sequence.
        cells
            int64 ``[N]``: block id times block size plus the place in the block (vLLM's slot
            mapping). Cell 0 to ``block_size - 1`` are the null block: such rows, which stand for
            no token, are not written.

        Raises
        ------
        ValueError
            If a tap is missing, or the three disagree on N.
        """
        tapped = [taps.get(i) for i in self.drafter.config.target_layer_ids]
        if any(tap is None or len(tap) != len(positions) for tap in tapped) or len(cells) != len(
            positions
        ):
            shapes = [None if tap is None else len(tap) for tap in tapped]
            raise ValueError(
                f"taps of {shapes} rows, {len(positions)} positions and {len(cells)} cells do not "
                "fit: pass new_taps() to the target's forward, and all of its rows here"
            )
        real = cells >= self._block_size
        if not real.all():
            positions, cells = positions[real], cells[real]
            tapped = [tap[real] for tap in tapped if tap is not None]
        drafter = self.drafter
        joined = torch.cat([tap for tap in tapped if tap is not None], -1)
        context = drafter.context_norm(
            drafter.context_proj(joined.to(drafter.context_proj.weight.dtype))
        )
        for layer, pages in zip(self._layers, self.latent, strict=True):
            pages.flatten(0, 1).index_copy_(0, cells, layer.self_attn.latent(context, positions))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, ``(source, target)``, one after the other.

        They are those of the MLA layers among ``SchedulerOutput.kv_cache_block_copies``.
        """
        for source, target in pairs:
            self.latent[:, target] = self.latent[:, source]

    @property
    def nbytes(self) -> int:
        """Bytes of the cached rows, the same all the time."""
        return self.latent.nbytes

    # -- drafts ------------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> dict[str, Draft]:
        """Draft ``num_speculative_tokens`` tokens for each request in one forward pass.

        Raises
        ------
        ValueError
            If a request has no context, or fewer blocks than its context fills.
        """
        if not requests:
            return {}
        for request in requests:
            room = len(request.block_ids) * self._block_size
            if not 0 < request.num_context <= room:
                raise ValueError(
                    f"request {request.req_id} has a context of {request.num_context} tokens and "
                    f"blocks for {room}: a draft follows a prompt, and reads all of its rows"
                )
        # Contexts of like length are padded together.
        order = sorted(range(len(requests)), key=lambda i: requests[i].num_context)
        ordered = [requests[i] for i in order]
        anchors = to_device([request.anchor for request in ordered], self.latent.device)
        lengths = to_device([request.num_context for request in ordered], self.latent.device)
        hidden = self._forward(ordered, anchors, lengths)
        drafts = sample_blocks(
            self.drafter,
            hidden,
            self._logits(hidden),
            ordered,
            probabilistic=self.draft_sample_method == "probabilistic",
            shared_noise=self.shared_noise,
            truncate=self.truncate_drafts,
        )
        return {requests[i].req_id: draft for i, draft in sorted(zip(order, drafts, strict=True))}

    @torch.inference_mode()
    def propose_async(
        self, requests: Sequence[DraftRequest], anchors: Tensor, num_context: Tensor
    ) -> Tensor:
        """Draft greedily for requests of which the device knows more than the host.

        Parameters
        ----------
        requests
            R requests; their anchors are not looked at, their contexts at least the true ones.
        anchors, num_context : Tensor
            int64 ``[R]``: the true ones.

        Returns
        -------
        Tensor
            int64 ``[R, K]``, on the device; -1 where nothing is drafted.
        """
        order = sorted(range(len(requests)), key=lambda i: requests[i].num_context)
        index = to_device(order, self.latent.device)
        anchors, lengths = anchors[index], num_context[index]
        hidden = self._forward([requests[i] for i in order], anchors, lengths, exact=False)
        tokens = choose_blocks(self.drafter, self._logits(hidden), anchors)
        return torch.empty_like(tokens).index_copy_(0, index, tokens)

    def _logits(self, hidden: Tensor) -> Tensor:
        wide = compute_dtype(hidden.dtype)
        logits: Tensor = hidden.to(wide) @ self.target.lm_head.weight.to(wide).mT
        return logits

    def _forward(
        self,
        requests: Sequence[DraftRequest],
        anchors: Tensor,
        num_context: Tensor,
        *,
        exact: bool = True,
    ) -> Tensor:
        """Map blocks ``[anchor, mask, mask, ...]`` to final hidden states ``[R, K, hidden]``."""
        self.num_forwards += 1
        drafter, count = self.drafter, self.num_speculative_tokens
        device = self.latent.device
        ids = torch.full((len(requests), count), drafter.config.mask_token_id, device=device)
        ids[:, 0] = anchors
        lengths = [request.num_context for request in requests]
        offsets = torch.arange(count, device=device)
        positions = (num_context.unsqueeze(-1) + offsets).flatten()
        groups = group_contexts(
            [request.block_ids for request in requests], lengths, self._block_size, device
        )
        if not exact:
            groups = [group.cut(num_context) for group in groups]
        x = self.target.model.embed_tokens(ids.flatten()).to(self.latent.dtype)
        for layer, pages in zip(self._layers, self.latent, strict=True):
            normed = layer.input_layernorm(x)
            x = x + attend_blocks(layer, normed, positions, pages, groups, block_length=count)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        hidden: Tensor = drafter.final_norm(x)
        return hidden.view(len(requests), count, -1)
