"""The knobs of the cache, checked when they are set.

Needs the standard library only. Lesson 07 turns them. Names are vLLM's where it has one, see
``vllm/config/cache.py`` and ``vllm/v1/kv_cache_interface.py``.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal

from kimik3_lab.serving.knobs import require_at_least, require_booleans, require_one_of

__all__ = ["CacheConfig", "PrefillCheckpoints", "SpeculativeStates"]

PrefillCheckpoints = Literal["split", "internal"]
SpeculativeStates = Literal["slots", "records"]


@dataclass(frozen=True)
class CacheConfig:
    """The memory for the cache, counted in blocks, and the rules by which blocks are shared.

    A *group* is a set of layers that have one block table together. MLA layers make the attention
    groups, KDA layers the state groups; all draw from one pool. K3 has one and three, see
    :func:`~kimik3_lab.serving.kv_cache_groups.group_layers`.

    Parameters
    ----------
    num_blocks : int
        Blocks in the pool. Block 0 is the null block, so ``num_blocks - 1`` can hold tokens.
    block_size : int
        Tokens of a block. A state block holds one state, whatever the number of tokens.
    num_kda_groups : int
        State groups. 0 leaves KDA states to the executor, which keeps them in slots.
    num_attention_groups : int
        Attention groups, usually 1.
    enable_prefix_caching : bool
        Share blocks between sequences that begin alike. With state groups this is vLLM's "align"
        mode: chunks of a prompt end where a state is to be kept. Off by default for hybrid models
        until #50991.
    prefix_match_unit : int, optional
        Tokens between two hashes, a divisor of ``block_size``; hits then end on multiples of it,
        inside a block too (``--prefix-match-unit``). Left out, hits end on whole blocks.
    retention_interval : int, optional
        Which states of a prompt keep their hash (``--prefix-cache-retention-interval``, #52216).
        None: all. 0: only those where a repetition of the prompt would resume, and those where
        another sequence was seen to leave it. N: also one every N tokens.
    prefill_checkpoints : {"split", "internal"}
        How a state inside a prompt is kept. ``"split"`` ends the chunk there, which costs a pass
        over the model. ``"internal"`` has the kernel export it on its way (#52789, #53196), which
        costs one more state block for each request.
    checkpoint_alignment : int
        An exported state lies a multiple of this behind the start of its chunk: the chunk length
        of the kernel, 16 for FlashKDA.
    enable_mamba_shared_prefix_checkpoint : bool
        Keep the state at a junction (#37898) inside a block too (#53945). Has an effect with a
        drafter that reads hidden states, and with ``prefix_match_unit``.
    speculative_states : {"slots", "records"}
        Where verification keeps what it may have to take back. ``"slots"``: a state for each draft
        token, K more blocks for each request and group. ``"records"``: the inputs of the
        recurrence, outside of the pool (RecoverSSM, #51855).
    dcp_world_size : int
        Ranks that share the rows of a sequence (decode context parallelism, #50484). An attention
        block then spans ``block_size * dcp_world_size`` tokens; states are not split (#53598).
    exact_prompt_boundaries : bool
        Where the last reusable state of a prompt lies. The last token is always computed, so a
        prompt that ends on a block boundary can be resumed one block before it. False is vLLM
        0.27.1, which kept a state that no repetition could use (#50235, #50409).
    free_state_gaps : bool
        Free every state that is behind (#55450). False is vLLM 0.27.1, which stops at the first
        gap.
    exact_state_count : bool
        Ask for the state blocks that are needed. False is vLLM 0.27.1, which asks for the most
        that could be, as #30877 wrote it; which change mended it is not known.
    keep_known_keys : bool
        Leave a partial block (#45939, #46384) alone that has its hash already. False is vLLM up to
        0.32, where a sibling had to wait a step for it.
    hash_written_states_only : bool
        Give no hash to the state that a chunk started from inside a block and then left behind for
        an exported checkpoint. False is vLLM from #52789 up to 0.33, where it gets the hash of its
        block's end, which it has not reached.
    defer_unwritten_copies : bool
        Let a request whose hit ends inside a block wait for a step if that block is written in this
        very step: its copy would be made before. False is vLLM up to 0.33, which waits for states
        only (#29387).
    uncached_reuse : {"lifo", "fifo"}
        Order in which blocks without a hash are taken again while prefix caching is off: the last
        one given back first (#51482), or last (#48017, vLLM 0.27.1).

    Raises
    ------
    ValueError
        If a knob cannot work; the message names it.

    Examples
    --------
    >>> CacheConfig(num_blocks=65).num_usable_tokens
    1024
    >>> CacheConfig(65, 768, num_kda_groups=3, enable_prefix_caching=True).mamba_cache_mode
    'align'
    """

    num_blocks: int
    block_size: int = 16
    _: KW_ONLY
    num_kda_groups: int = 0
    num_attention_groups: int = 1
    enable_prefix_caching: bool = False
    prefix_match_unit: int | None = None
    retention_interval: int | None = None
    prefill_checkpoints: PrefillCheckpoints = "split"
    checkpoint_alignment: int = 16
    enable_mamba_shared_prefix_checkpoint: bool = False
    speculative_states: SpeculativeStates = "slots"
    dcp_world_size: int = 1
    exact_prompt_boundaries: bool = True
    free_state_gaps: bool = True
    exact_state_count: bool = True
    keep_known_keys: bool = True
    hash_written_states_only: bool = True
    defer_unwritten_copies: bool = True
    uncached_reuse: Literal["lifo", "fifo"] = "lifo"

    def __post_init__(self) -> None:
        require_booleans(self)
        for least, name, why in (
            (2, "num_blocks", "block 0 is the null block and holds no tokens"),
            (1, "block_size", "it is the tokens that a block holds"),
            (0, "num_kda_groups", "it is a number of groups"),
            (1, "num_attention_groups", "every sequence has attention pages"),
            (1, "checkpoint_alignment", "it is the chunk length of the kernel"),
            (1, "dcp_world_size", "it is a number of ranks"),
        ):
            require_at_least(least, name, getattr(self, name), why)
        require_one_of("prefill_checkpoints", self.prefill_checkpoints, PrefillCheckpoints)
        require_one_of("speculative_states", self.speculative_states, SpeculativeStates)
        if self.uncached_reuse not in ("lifo", "fifo"):
            raise ValueError(f"uncached_reuse must be lifo or fifo, got {self.uncached_reuse!r}")
        self._check_prefix_match_unit()
        self._check_retention_interval()
        if self.prefill_checkpoints == "internal" and not self.exact_prompt_boundaries:
            raise ValueError(
                "prefill_checkpoints='internal' exports the state at an exact boundary: it needs "
                "exact_prompt_boundaries=True"
            )
        if self.prefill_checkpoints == "internal" and self.mamba_cache_mode != "align":
            raise ValueError(
                "prefill_checkpoints='internal' exports KDA states for later requests: it needs "
                f"num_kda_groups > 0 and enable_prefix_caching, got {self.num_kda_groups} and "
                f"{self.enable_prefix_caching}"
            )

    def _check_prefix_match_unit(self) -> None:
        unit = self.prefix_match_unit
        if unit is None:
            return
        require_at_least(1, "prefix_match_unit", unit, "it is the tokens between two hashes")
        if self.block_size % unit:
            raise ValueError(
                f"prefix_match_unit={unit} does not divide block_size={self.block_size}: a block "
                "must end where a hash does"
            )
        if unit != self.block_size and not self.num_kda_groups:
            raise ValueError(
                f"prefix_match_unit={unit} is finer than block_size={self.block_size}, which works "
                "for hybrid caches only: set num_kda_groups, or lower block_size instead"
            )

    def _check_retention_interval(self) -> None:
        interval = self.retention_interval
        if interval is None:
            return
        require_at_least(0, "retention_interval", interval, "0 keeps replay boundaries only")
        if interval % self.scheduler_block_size:
            raise ValueError(
                f"retention_interval={interval} is no multiple of {self.scheduler_block_size} "
                "(block_size times dcp_world_size): hits end on such multiples"
            )
        if interval and not self.num_kda_groups:
            raise ValueError(
                f"retention_interval={interval} thins out KDA states, and num_kda_groups is 0"
            )

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that can hold tokens: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_usable_tokens(self) -> int:
        """Tokens that fit when every block is an attention block and full."""
        return self.num_usable_blocks * self.block_size

    @property
    def num_groups(self) -> int:
        """Block tables of a request: attention groups first, then state groups."""
        return self.num_attention_groups + self.num_kda_groups

    @property
    def mamba_cache_mode(self) -> Literal["none", "align"]:
        """VLLM's name for how states are kept: one for each request, or on block boundaries."""
        return "align" if self.num_kda_groups and self.enable_prefix_caching else "none"

    @property
    def scheduler_block_size(self) -> int:
        """Tokens on whose multiples all groups have a block boundary."""
        return self.block_size * self.dcp_world_size

    @property
    def hash_block_size(self) -> int:
        """Tokens between two hashes."""
        return self.prefix_match_unit or (
            self.block_size if self.num_kda_groups else self.scheduler_block_size
        )

    @property
    def partial_hash_hits(self) -> bool:
        """Whether a hit may end inside a block (vLLM: ``partial_hash_hits_enabled``)."""
        if self.mamba_cache_mode != "align":
            return False
        return self.dcp_world_size > 1 or self.hash_block_size < self.block_size

    def keeps_junctions(self, *, reads_hidden_states: bool) -> bool:
        """Whether the state at a junction inside a block is kept, given the drafter."""
        wanted = self.enable_mamba_shared_prefix_checkpoint and self.partial_hash_hits
        return wanted and reads_hidden_states

    @property
    def hit_alignment(self) -> int:
        """Hits are multiples of this many tokens."""
        return self.hash_block_size if self.partial_hash_hits else self.scheduler_block_size
