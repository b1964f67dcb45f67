"""Where in a prompt a KDA state is kept, and where a chunk must end for it.

Needs the standard library only. Lesson 07 compares splitting a prompt with exporting a state from
the middle of a chunk. Names are vLLM's, see ``get_mamba_prefill_checkpoint_position`` and
``is_mamba_prefill_checkpoint_valid`` in ``vllm/v1/kv_cache_interface.py`` and
``Scheduler._mamba_block_aligned_split``.

The rule behind all of it: a state that can be found under a block's hash is the state after
exactly the tokens of this block. A kernel leaves a state behind where its chunk ends, and since
#52789 also at one place inside of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kimik3_lab.serving.cache_config import CacheConfig
from kimik3_lab.serving.request import Request

__all__ = [
    "BlockAlignedSplit",
    "cdiv",
    "get_mamba_prefill_checkpoint_position",
    "is_mamba_prefill_checkpoint_valid",
    "replay_boundaries",
    "round_down",
]


def cdiv(a: int, b: int) -> int:
    """Divide and round up.

    >>> cdiv(17, 16)
    2
    """
    return -(-a // b)


def round_down(a: int, b: int) -> int:
    """Round down to a multiple.

    >>> round_down(47, 16)
    32
    """
    return a - a % b


def get_mamba_prefill_checkpoint_position(
    num_tokens: int, unit: int, drop_eagle_block: bool = False
) -> int:
    """Last place in ``num_tokens`` tokens where a repetition could resume.

    The last token is always computed, for its logits. An EAGLE drafter has the last unit of a hit
    computed anew, so there the place lies one unit before the end.

    >>> get_mamba_prefill_checkpoint_position(8000, 768)
    7680
    >>> get_mamba_prefill_checkpoint_position(7680, 768)
    6912
    >>> get_mamba_prefill_checkpoint_position(8000, 768, drop_eagle_block=True)
    6912
    """
    if drop_eagle_block:
        return max(round_down(num_tokens, unit) - unit, 0)
    return max(round_down(num_tokens - 1, unit), 0)


def is_mamba_prefill_checkpoint_valid(
    query_start: int, query_end: int, position: int, unit: int, block_size: int, alignment: int
) -> bool:
    """Whether a kernel can export the state at ``position`` from the chunk it computes.

    Parameters
    ----------
    query_start, query_end : int
        The chunk.
    position : int
        Tokens that the state has read.
    unit : int
        Tokens between two hashes: the chunk must start on one, so that the state's hash is known.
    block_size : int
        Tokens of a block. The block of the exported state stands before the one of the running
        state and behind the one that the chunk starts from.
    alignment : int
        Tokens between the places where the kernel could export.

    >>> is_mamba_prefill_checkpoint_valid(0, 8000, 7680, 768, 768, 16)
    True
    >>> is_mamba_prefill_checkpoint_valid(100, 8000, 7680, 768, 768, 16)  # 100 is no boundary
    False
    """
    return (
        query_start % unit == 0
        and query_start + unit <= position < query_end
        and (position - query_start) % alignment == 0
        and cdiv(query_end, block_size) - 2 > (query_start - 1) // block_size
    )


def replay_boundaries(
    num_prompt_tokens: int, block_size: int, drops_eagle_block: bool
) -> tuple[int, ...]:
    """Places where a request with the same prompt, or one that goes on behind it, can resume.

    >>> replay_boundaries(100, 16, drops_eagle_block=False)
    (99,)
    >>> replay_boundaries(96, 16, drops_eagle_block=True)
    (64, 80)
    """
    if not drops_eagle_block:
        return (num_prompt_tokens - 1,)
    repetition = round_down(num_prompt_tokens - 1, block_size) - block_size
    continuation = round_down(num_prompt_tokens, block_size) - block_size
    return tuple(sorted({max(repetition, 0), max(continuation, 0)}))


@dataclass(frozen=True, slots=True)
class BlockAlignedSplit:
    """Ends the chunks of a prompt where states are to be kept.

    Parameters
    ----------
    config : CacheConfig
        In "align" mode.
    max_chunk_tokens : int
        Most tokens that a chunk can have: the budget of a step, or the threshold for long prompts.
    drops_eagle_block : bool
        Whether the drafter has the last block of a hit computed anew.
    keeps_junctions : bool
        Whether the state at a junction inside a block is kept.

    Examples
    --------
    With a block of 768 tokens a prompt of 8,000 takes two passes, or one that exports a state:

    >>> request = Request("a", [5] * 8000)
    >>> split = CacheConfig(99, 768, num_kda_groups=3, enable_prefix_caching=True)
    >>> BlockAlignedSplit(split, 8192).num_new_tokens(request, 0, 8000)
    7680
    >>> internal = CacheConfig(99, 768, num_kda_groups=3, enable_prefix_caching=True,
    ...                        prefill_checkpoints="internal")
    >>> BlockAlignedSplit(internal, 8192).num_new_tokens(request, 0, 8000)
    8000
    """

    config: CacheConfig
    max_chunk_tokens: int
    drops_eagle_block: bool = False
    keeps_junctions: bool = False

    def num_new_tokens(self, request: Request, start: int, num_new_tokens: int) -> int:
        """Clip a chunk that begins at token ``start``; 0 if it must wait for a larger budget."""
        prefill_end = request.prefill_end
        if start >= prefill_end:
            return num_new_tokens
        end = start + num_new_tokens
        if self._exports_its_checkpoint(start, end, prefill_end):
            stop = self._first_stop(request, start, end, exports=True)
            if stop == end or not self.config.hash_written_states_only:
                return stop - start
            # A junction cuts the chunk, so it exports nothing.
        return max(self._first_stop(request, start, end, exports=False) - start, 0)

    def _first_stop(self, request: Request, start: int, end: int, *, exports: bool) -> int:
        """First place after ``start`` where the chunk must end, at most ``end``."""
        size, prefill_end = self.config.block_size, request.prefill_end
        stops = []
        if end < prefill_end:
            # A chunk inside the prompt ends on a block boundary. If the budget can never hold a
            # block, it may end anywhere, and the next one goes on to the boundary.
            aligned_end = round_down(end, size)
            if aligned_end > start or size <= self.max_chunk_tokens:
                end = aligned_end
        if not exports:
            last_cache_position = self._last_position(request.num_tokens, size)
            stops.append(last_cache_position)
            if start % size:
                stops.append(round_down(start, size) + size)
            if self.config.partial_hash_hits:
                tail = self._last_position(request.num_prompt_tokens, self.config.hash_block_size)
                if last_cache_position < tail < request.num_prompt_tokens:
                    stops.append(tail)
        if start < request.shared_prefix_boundary < end:
            stops.append(self._junction(request, start))
        return min((stop for stop in stops if start < stop < end), default=end)

    def _last_position(self, num_tokens: int, unit: int) -> int:
        """Last place whose state is worth a stop."""
        if self.config.exact_prompt_boundaries:
            return get_mamba_prefill_checkpoint_position(num_tokens, unit, self.drops_eagle_block)
        position = round_down(num_tokens, unit)
        if self.drops_eagle_block and unit == self.config.block_size:
            position -= unit
        return max(position, 0)

    def _exports_its_checkpoint(self, start: int, end: int, prefill_end: int) -> bool:
        config = self.config
        if config.prefill_checkpoints == "split" or end < prefill_end:
            return False
        unit = config.hash_block_size
        position = get_mamba_prefill_checkpoint_position(prefill_end, unit, self.drops_eagle_block)
        return is_mamba_prefill_checkpoint_valid(
            start, end, position, unit, config.block_size, config.checkpoint_alignment
        )

    def _junction(self, request: Request, start: int) -> int:
        """Stop for the place where another sequence left this one."""
        junction = request.shared_prefix_boundary
        if self.keeps_junctions and junction <= request.num_prompt_tokens:
            return junction
        return start + round_down(junction - start, self.config.block_size)
