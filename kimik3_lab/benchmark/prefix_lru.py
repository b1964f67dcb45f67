"""Which prefixes a cache of so many blocks still holds, by name.

Needs the standard library only. The hit curve of a trace is counted with it
(:mod:`kimik3_lab.benchmark.trace_statistics`), and a router remembers with it what it has sent to
whom (:mod:`kimik3_lab.simulation.router`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

__all__ = ["PrefixLru"]


class PrefixLru:
    """Names of blocks, of which the ones not used for longest are forgotten first.

    Names are chained: a block is of no use without those before it. So of one prompt the first
    block counts as used last, and the end of a prefix is forgotten before its beginning, as in
    vLLM.

    Parameters
    ----------
    capacity
        Most names that are kept, at least 0.

    Examples
    --------
    >>> cache = PrefixLru(3)
    >>> cache.add((1, 2, 3))
    >>> cache.add((1, 9))  # 3 is forgotten
    >>> cache.match((1, 2, 3)), cache.match((5, 1)), len(cache)
    (2, 0, 3)
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"capacity must be at least 0 blocks, got {capacity}")
        self.capacity = capacity
        self._names: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        """Names that are kept."""
        return len(self._names)

    def match(self, names: Iterable[int]) -> int:
        """Count the names from the first on that are kept."""
        known, found = self._names, 0
        for name in names:
            if name not in known:
                break
            found += 1
        return found

    def add(self, names: Sequence[int]) -> None:
        """Take the blocks of a prompt as just used."""
        known = self._names
        touch = known.move_to_end
        for name in reversed(names):
            if name in known:
                touch(name)
            else:
                known[name] = None
        for _ in range(len(known) - self.capacity):
            known.popitem(last=False)
