"""How often each kind of tensor occurs in a checkpoint.

Needs the standard library only. The other accounting modules sum over it: the release lists half a
million tensors, but they are a few dozen kinds, repeated over layers and experts. Lesson 01 makes
the same tallies by hand.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from kimik3_lab.config import K3Config
from kimik3_lab.tensors import TensorSpec, checkpoint_tensors

__all__ = ["census"]


@lru_cache(maxsize=8)
def census(config: K3Config) -> tuple[tuple[TensorSpec, int], ...]:
    """Every kind of tensor of ``config``'s checkpoint, with its number of occurrences.

    A kind has no layer, and a ``name`` of two parts: ``"q_proj.weight"``, ``"w1.weight_packed"``.
    Together with the component that is unambiguous. One expert of a layer stands for all of them.

    Examples
    --------
    >>> kinds = census(K3Config.micro())
    >>> len(kinds), sum(count for _, count in kinds)
    (47, 136)
    """
    kinds: Counter[TensorSpec] = Counter()
    for spec in checkpoint_tensors(config, prefix="", num_experts=1):
        parts = spec.name.split(".")
        alike = config.num_experts if spec.component == "routed_experts" else 1
        kinds[spec._replace(name=".".join(parts[-2:]), layer_id=None)] += alike
    return tuple(kinds.items())
