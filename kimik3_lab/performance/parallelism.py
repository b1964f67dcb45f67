"""How a Kimi K3 is spread over GPUs when it serves: tensor, expert, data, pipeline, context.

Needs the standard library only. The cost model takes it; lesson 11 and the planner vary it. What
each GPU then holds is counted by :mod:`kimik3_lab.performance.placement`.
"""

from __future__ import annotations

from dataclasses import dataclass

from kimik3_lab.config import K3Config
from kimik3_lab.performance.placement import Layout, LayoutError, rank_weights

__all__ = ["Parallelism"]


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Sizes of the groups of GPUs that work together. Names are those of vLLM's options.

    Attributes
    ----------
    tp
        GPUs that split every matrix.
    ep
        GPUs that the routed experts are spread over whole; 1 means that each of ``tp`` has a slice
        of every expert. vLLM knows 1 and ``tp * dp`` only.
    dp
        Copies of the trunk, each with requests of its own.
    pp
        Groups of layers, one behind the other.
    dcp
        GPUs among which the MLA rows of a sequence are split; divides ``tp``.
    num_gpus
        All of them: ``tp * dp * pp``, which is what 0 stands for.

    Raises
    ------
    LayoutError
        If the sizes do not go together.

    Examples
    --------
    >>> Parallelism(tp=8).name, Parallelism(tp=8, dp=2, ep=16, dcp=8).name
    ('TP8', 'TP8 DP2 EP16 DCP8')
    >>> Parallelism(tp=8, pp=2).num_gpus
    16
    """

    tp: int = 8
    ep: int = 1
    dp: int = 1
    pp: int = 1
    dcp: int = 1
    num_gpus: int = 0

    def __post_init__(self) -> None:
        for name in ("tp", "ep", "dp", "pp", "dcp"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise LayoutError(f"{name} must be an integer of at least 1, got {value!r}")
        gpus = self.tp * self.dp * self.pp
        if self.num_gpus not in (0, gpus):
            raise LayoutError(
                f"num_gpus={self.num_gpus} must be tp * dp * pp = {gpus}; leave it out to have it "
                "counted"
            )
        object.__setattr__(self, "num_gpus", gpus)
        if self.ep not in (1, self.tp * self.dp):
            raise LayoutError(
                f"ep={self.ep} must be 1 (slices of experts) or tp * dp = {self.tp * self.dp}"
            )
        if self.dp > 1 and self.ep == 1:
            raise LayoutError(
                f"dp={self.dp} shares the routed experts among all copies: set "
                f"ep={self.tp * self.dp}"
            )
        if self.tp % self.dcp:
            raise LayoutError(f"dcp={self.dcp} must divide tp={self.tp}")

    @property
    def name(self) -> str:
        """As the lessons write it."""
        parts = [f"TP{self.tp}"]
        for label, size in (("DP", self.dp), ("PP", self.pp), ("EP", self.ep), ("DCP", self.dcp)):
            if size > 1:
                parts.append(f"{label}{size}")
        return " ".join(parts)

    @property
    def whole_experts(self) -> bool:
        """Whether a GPU holds whole experts instead of a slice of each."""
        return self.ep > 1

    def weight_bytes(self, config: K3Config) -> tuple[float, float]:
        """Bytes on one GPU: of the trunk with embedding and head, and of the routed experts.

        A pipeline splits both evenly, though layers are not quite alike.

        Raises
        ------
        LayoutError
            If the model cannot be divided like that.

        Examples
        --------
        >>> trunk, experts = Parallelism(tp=8).weight_bytes(K3Config.released())
        >>> round(trunk / 1e9, 1), round(experts / 1e9, 1)
        (24.2, 180.8)
        """
        weights = rank_weights(config, Layout(self.tp, 1, self.whole_experts))
        trunk = weights.total - weights.experts
        return trunk / self.pp, weights.experts / self.dp / self.pp
