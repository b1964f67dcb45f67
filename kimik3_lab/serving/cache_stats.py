"""How much the prefix cache found.

Needs the standard library only. Lesson 07 plots it. The name is vLLM's, see
``vllm/v1/metrics/stats.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PrefixCacheStats"]


@dataclass(slots=True)
class PrefixCacheStats:
    """Counts since the start. Requests that come back after a preemption are counted apart.

    Attributes
    ----------
    requests, queries, hits : int
        Admitted requests, their tokens, and those of them that were found.
    preempted_requests, preempted_queries, preempted_hits : int
        The same of requests that were admitted again.

    Examples
    --------
    >>> stats = PrefixCacheStats()
    >>> stats.record(num_tokens=100, num_hits=64, preempted=False)
    >>> stats.hit_rate
    0.64
    """

    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0

    def record(self, *, num_tokens: int, num_hits: int, preempted: bool) -> None:
        """Count the lookup of a request that was admitted."""
        if preempted:
            self.preempted_requests += 1
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hits
        else:
            self.requests += 1
            self.queries += num_tokens
            self.hits += num_hits

    @property
    def hit_rate(self) -> float:
        """Share of the tokens of first admissions that were found, 0 before the first one."""
        return self.hits / self.queries if self.queries else 0.0
