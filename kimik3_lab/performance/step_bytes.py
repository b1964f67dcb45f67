"""What one decode step has to read, against the number of sequences that decode together.

Needs the standard library only. Lesson 01 draws it; lesson 11 builds the cost of a step on it.

Reading these bytes at a GPU's full bandwidth takes a time that no kernel can beat: the floor. It is
a floor only: launches, collectives and arithmetic come on top.
"""

from __future__ import annotations

from dataclasses import dataclass

from kimik3_lab.config import K3Config
from kimik3_lab.performance.placement import Layout, rank_weights
from kimik3_lab.performance.sequence_memory import sequence_memory

__all__ = ["StepBytes", "distinct_experts", "step_bytes"]


def distinct_experts(config: K3Config, batch: int) -> float:
    """Experts of a layer that a step of ``batch`` tokens is expected to read.

    Each token picks its experts evenly and apart from the others. Real routing is uneven, and
    neighbouring tokens share experts, so this is the most that a step reads on average.

    Raises
    ------
    ValueError
        If ``batch`` is negative.

    Examples
    --------
    >>> [round(distinct_experts(K3Config.released(), n), 1) for n in (1, 16, 256)]
    [16.0, 224.4, 887.1]
    """
    if batch < 0:
        raise ValueError(f"a step has 0 or more tokens, got {batch}")
    missed = 1 - config.num_experts_per_token / config.num_experts
    return config.num_experts * (1 - missed**batch)


@dataclass(frozen=True)
class StepBytes:
    """Bytes that one GPU moves in one decode step.

    Attributes
    ----------
    trunk
        Weights that every step reads, output head included.
    experts
        Weights of the routed experts that some token picked; on average, if GPUs hold whole ones.
    state
        KDA states, read and written back.
    rows
        MLA rows of all tokens so far.
    """

    batch: int
    context: int
    trunk: int
    experts: float
    state: float
    rows: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.trunk + self.experts + self.state + self.rows

    def floor_seconds(self, bandwidth: float) -> float:
        """Time to move it at ``bandwidth`` bytes a second.

        Raises
        ------
        ValueError
            If the bandwidth is not positive.
        """
        if bandwidth <= 0:
            raise ValueError(f"bandwidth is in bytes a second and positive, got {bandwidth}")
        return self.total / bandwidth


def step_bytes(
    config: K3Config, batch: int, context: int, layout: Layout | None = None
) -> StepBytes:
    """Count the bytes of a step in which ``batch`` sequences decode a token each.

    Parameters
    ----------
    batch
        Sequences in all, over every copy of the trunk.
    context
        Tokens that each of them has in the cache.
    layout
        How the model is split; ``None`` is one GPU with everything, which counts each byte once.

    Examples
    --------
    >>> step = step_bytes(K3Config.released(), 1, 8192)
    >>> round(step.trunk / 1e9, 1), round(step.experts / 1e9, 1), round(step.total / 1e9)
    (111.2, 25.8, 138)
    """
    layout = layout or Layout(1)
    weights, memory = rank_weights(config, layout), sequence_memory(config)
    share = distinct_experts(config, batch) / config.num_experts
    mine = batch / layout.data_parallel
    return StepBytes(
        batch=batch,
        context=context,
        trunk=weights.trunk,
        experts=weights.experts * share,
        state=2 * mine * memory.state_bytes / layout.tensor_parallel,
        rows=mine * context * memory.mla_bytes_per_token,
    )
