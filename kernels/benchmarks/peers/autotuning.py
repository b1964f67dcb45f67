"""Let a Triton peer's autotuner choose anew for each case.

Needs Triton. The chunked KDA kernels of vLLM and fla remember their choice by the number of heads
and not by the number of tokens. Tuned on 512 tokens they took 10 to 20 % longer at 8192 than tuned
there, so the benchmark forgets every choice before a case.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator

__all__ = ["chosen_for_this_case"]


@contextlib.contextmanager
def chosen_for_this_case() -> Iterator[None]:
    """Forget all choices, and let the next ones be made with shorter measurements."""
    import triton.testing
    from triton.runtime.autotuner import Autotuner

    for tuner in gc.get_objects():
        if issubclass(type(tuner), Autotuner):  # isinstance would wake lazy modules
            tuner.cache.clear()
    whole = triton.testing.do_bench

    @functools.wraps(whole)
    def shorter(function, **options):
        return whole(function, **{**options, "warmup": 3, "rep": 12})

    triton.testing.do_bench = shorter
    try:
        yield
    finally:
        triton.testing.do_bench = whole
