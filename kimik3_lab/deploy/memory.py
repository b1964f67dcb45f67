"""Does it fit: weights, drafter, a reserve and one sequence, on the fullest GPU of an engine.

Needs the standard library only. Lesson 13 uses it. Weights and sequence memory are counted by
:mod:`kimik3_lab.performance`; a pipeline's stages differ by a layer or two, which is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from kimik3_lab.config import K3Config
from kimik3_lab.deploy.layouts import Group
from kimik3_lab.deploy.machines import MACHINES
from kimik3_lab.deploy.spec import DeploymentSpec
from kimik3_lab.performance.accounting import VISION
from kimik3_lab.performance.capacity import KV_ITEMSIZE
from kimik3_lab.performance.parallelism import Parallelism
from kimik3_lab.performance.sequence_memory import sequence_memory

__all__ = ["DRAFTER_BYTES", "RESERVE_BYTES", "Memory", "memory"]

#: Activations, workspaces, captured graphs and communication buffers. An assumption, not a
#: measurement: the recipe names 1.6 GiB for one workspace of the MoE kernel alone.
RESERVE_BYTES = 8 * 10**9
#: A DSpark drafter's own 2.388 B parameters in BF16, counted whole on each GPU: an upper bound,
#: since most of it is split like the target (Inferact/Kimi-K3-DSpark).
DRAFTER_BYTES = 2 * 2_388 * 10**6


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one GPU.

    Attributes
    ----------
    usable
        What vLLM may take.
    weights, drafter, reserve
        Taken before the first request. The vision part counts whole.
    state, row
        One running sequence: its KDA states, with a further one for each draft token, and its MLA
        rows a token.
    """

    usable: int
    weights: int
    drafter: int
    reserve: int
    state: int
    row: float

    @property
    def room(self) -> int:
        """What is left for sequences."""
        return self.usable - self.weights - self.drafter - self.reserve

    def sequence(self, context: int) -> int:
        """One sequence of ``context`` tokens."""
        return self.state + round(context * self.row)

    def sequences(self, context: int) -> int:
        """Sequences of ``context`` tokens that fit beside each other, of one engine."""
        return max(0, self.room) // self.sequence(context)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that fits alone."""
        return max(0, int((self.room - self.state) // self.row))


@lru_cache
def _weights(sizes: Parallelism) -> int:
    return round(sum(sizes.weight_bytes(K3Config.released())))


def memory(spec: DeploymentSpec, group: Group, kv_cache_dtype: str) -> Memory:
    """Count what one GPU of ``group`` holds.

    Parameters
    ----------
    kv_cache_dtype
        ``auto`` (bfloat16) or ``fp8``.

    Examples
    --------
    >>> from kimik3_lab.deploy.layouts import groups
    >>> spec = DeploymentSpec(hardware="b300")
    >>> found = memory(spec, groups(spec)[0], "auto")
    >>> found.usable // 10**9, found.weights // 10**9, found.room // 10**9
    (259, 205, 45)
    """
    config, machine = K3Config.released(), MACHINES[spec.hardware]
    sizes = group.parallelism
    weights = _weights(sizes)
    kept = sequence_memory(config, cache_itemsize=KV_ITEMSIZE["bf16"])
    rows = sequence_memory(
        config, cache_itemsize=KV_ITEMSIZE["fp8" if kv_cache_dtype == "fp8" else "bf16"]
    ).mla_bytes_per_token
    states = 1 + spec.drafted
    share = spec.gpu_memory_utilization or machine.utilization
    return Memory(
        usable=round(machine.accelerator.memory_bytes * share),
        weights=weights + VISION.bytes,
        drafter=DRAFTER_BYTES if spec.drafted else 0,
        reserve=RESERVE_BYTES,
        state=kept.state_bytes * states // sizes.tp // sizes.pp,
        row=rows / sizes.dcp / sizes.pp,
    )
