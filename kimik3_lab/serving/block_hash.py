"""Names for cached blocks: a chain of hashes, one for each full block of tokens.

Needs the standard library only. Lesson 07 builds the chain by hand. Names are vLLM's, see
``vllm/v1/core/kv_cache_utils.py``.

The hash of a block covers the hash of the block before it, so one hash stands for a whole prefix:
two sequences have the same hash at a place only if all tokens up to there are the same. Attention
pages and KDA states share the chain. The page of a block holds the rows *of* its tokens, the state
is what is left *after* them, and both are the same for everybody who has read this prefix.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kimik3_lab.serving.knobs import require_at_least
from kimik3_lab.serving.request import Request

__all__ = ["NONE_HASH", "BlockHasher", "hash_block_tokens"]

#: The parent of a first block.
NONE_HASH = hashlib.sha256(b"kimik3_lab: nothing comes before the first block").digest()


def hash_block_tokens(
    parent_block_hash: bytes, token_ids: Sequence[int], extra_keys: Sequence[object] = ()
) -> bytes:
    """Hash a block together with all that comes before it.

    Parameters
    ----------
    parent_block_hash : bytes
        Hash of the block before, :data:`NONE_HASH` for the first one.
    token_ids : sequence of int
        The tokens of the block, below 2**63.
    extra_keys : sequence
        What else must be equal for two blocks to be shared: a salt, an adapter, an image.

    Returns
    -------
    bytes
        32 bytes (SHA-256).

    Examples
    --------
    >>> first = hash_block_tokens(NONE_HASH, [5, 6])
    >>> hash_block_tokens(first, [5, 6]) == first  # the same tokens at another place
    False
    """
    digest = hashlib.sha256(parent_block_hash)
    digest.update(array("q", token_ids).tobytes())
    if extra_keys:
        digest.update(repr(tuple(extra_keys)).encode())
    return digest.digest()


@dataclass(frozen=True, slots=True)
class BlockHasher:
    """Extends the hash chain of requests (vLLM: ``get_request_block_hasher``).

    Parameters
    ----------
    hash_block_size : int
        Tokens between two hashes.
    num_lookahead_tokens : int
        Tokens *behind* a block that its hash covers too. An EAGLE drafter writes the row of a
        token when it has seen the next one, so its page depends on one token more than it holds.
    """

    hash_block_size: int
    num_lookahead_tokens: int = 0

    def __post_init__(self) -> None:
        require_at_least(1, "hash_block_size", self.hash_block_size, "a block holds tokens")
        require_at_least(0, "num_lookahead_tokens", self.num_lookahead_tokens, "0 looks at none")

    def update(self, request: Request) -> list[bytes]:
        """Hash the blocks of ``request`` that have become full; return all its hashes."""
        size, ahead = self.hash_block_size, self.num_lookahead_tokens
        hashes = request.block_hashes
        num_hashes = (request.num_tokens - ahead) // size
        while len(hashes) < num_hashes:
            start = len(hashes) * size
            parent = hashes[-1] if hashes else NONE_HASH
            tokens = request.token_ids(start, start + size)
            extra: list[object] = [request.cache_salt] if request.cache_salt and not hashes else []
            if ahead:
                extra += request.token_ids(start + size, start + size + ahead)
            hashes.append(hash_block_tokens(parent, tokens, extra))
        return hashes
