"""Answer checks of lesson 07. Needs the standard library only.

The first judges by properties and by block sizes that users of the released model report. The
second fills pools at random and asks the lab's coordinator, which decides what vLLM decides.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from kimik3_lab.serving import CacheConfig, Request
from kimik3_lab.serving.kv_cache_manager import KVCacheManager

__all__ = ["check_1", "check_2"]

#: State and row bytes of K3 on one of eight ranks, and the block that vLLM chooses.
_PUBLISHED = ((814_080, 1152, 768), (814_080, 576, 1536))
_POOLS, _SIZE = 200, 16


def check_1(page: Callable[[int, int, int], tuple[int, int]]) -> None:
    """Check exercise 1: the smallest aligned block that holds a state, and its padding.

    Raises
    ------
    AssertionError
        Naming the case, and which property the answer lacks.
    """
    cases = [(state, row, 128) for state, row, _ in _PUBLISHED]
    cases += [(887_808, 1152, 128), (442_368, 1152, 128), (442_369, 1152, 128), (1, 576, 16)]
    cases += [(36_864, 576, 64), (36_865, 576, 64), (100_000, 288, 32), (2**53 + 1, 1, 1)]
    for state, row, alignment in cases:
        name = f"a state of {state:,} bytes, rows of {row}, alignment {alignment}"
        answer = page(state, row, alignment)
        assert isinstance(answer, tuple) and len(answer) == 2, (
            f"{name}: expected (block_size, padding), got {answer!r}"
        )
        size, padding = answer
        assert isinstance(size, int) and isinstance(padding, int), (
            f"{name}: expected two whole numbers, got {answer!r}"
        )
        assert size > 0 and size % alignment == 0, f"{name}: {size} is no multiple of {alignment}"
        assert size * row >= state, f"{name}: {size} rows take {size * row:,} bytes, too few"
        less = size - alignment
        assert less * row < state, f"{name}: {less} rows would do"
        assert padding == size * row - state, (
            f"{name}: {size} rows leave {size * row - state:,} bytes of padding, got {padding:,}"
        )
    for state, row, size in _PUBLISHED:
        assert page(state, row, 128)[0] == size, f"users report blocks of {size} tokens"
    print(f"exercise 1: right in {len(cases)} cases, and as reported for K3")


def check_2(
    longest_hit: Callable[[Sequence[bytes], set[bytes], Sequence[set[bytes]], int], int],
) -> None:
    """Check exercise 2 on random pools against the lab's own coordinator.

    Raises
    ------
    AssertionError
        Naming what was cached, what came back and what the coordinator finds.
    """
    lottery = random.Random(7)
    for _ in range(_POOLS):
        num_tokens = lottery.randint(1, 8 * _SIZE)
        num_groups = lottery.randint(1, 3)
        cache = CacheConfig(99, _SIZE, num_kda_groups=num_groups, enable_prefix_caching=True)
        manager = KVCacheManager(cache)
        request = Request("a", [lottery.randrange(1000) for _ in range(num_tokens)])
        hashes = list(manager.block_hasher.update(request))
        likely = (0.85, *[lottery.choice((0.5, 0.9))] * num_groups)
        groups = [{h for h in hashes if lottery.random() < share} for share in likely]
        for group_id, found in enumerate(groups):
            for column, name in enumerate(hashes):
                if name in found:
                    (block,) = manager.block_pool.get_new_blocks(1)
                    manager.block_pool.insert(name, group_id, block, (column + 1) * _SIZE)
        hit = manager.get_computed_blocks(request)
        assert hit is not None
        asked = list(hashes), set(groups[0]), [set(found) for found in groups[1:]], num_tokens
        answer = longest_hit(*asked)
        places = [[i for i, name in enumerate(hashes) if name in found] for found in groups]
        assert answer == hit.num_tokens, (
            f"{num_tokens} tokens in blocks of {_SIZE}; pages in columns {places[0]}, states in "
            f"columns {places[1:]}: expected a hit of {hit.num_tokens}, got {answer}"
        )
    print(f"exercise 2: right for {_POOLS} pools")
