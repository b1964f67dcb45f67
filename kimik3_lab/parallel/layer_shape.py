"""What of a layer each rank holds, where the ranks divide it evenly.

Needs torch, and no Triton: the command asks it before any rank starts.
:mod:`kimik3_lab.parallel.gpu_layer` runs a layer of this shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kimik3_lab.config import K3Config
from kimik3_lab.parallel.groups import Ranks

__all__ = ["LayerShape", "Parallel"]

#: Slices of every expert, or whole experts.
Parallel = Literal["tp", "ep"]


@dataclass(frozen=True)
class LayerShape:
    """What of a layer one rank holds.

    Attributes
    ----------
    experts, first_expert, expert_width
        Routed experts here, the first of them, and their inner width here.
    shared_width, kda_heads
        Of the shared experts' inner width, and of the heads.
    """

    config: K3Config
    parallel: Parallel
    experts: int
    first_expert: int
    expert_width: int
    shared_width: int
    kda_heads: int

    @classmethod
    def of(cls, config: K3Config, parallel: Parallel, ranks: Ranks) -> LayerShape:
        """Share a layer out.

        Raises
        ------
        ValueError
            If the ranks do not divide it: uneven ranks would be measured as if they were even.

        Examples
        --------
        >>> shape = LayerShape.of(K3Config.released(), "ep", Ranks(1, 2))
        >>> shape.experts, shape.first_expert, shape.expert_width, shape.shared_width
        (448, 448, 3072, 3072)
        """
        parts = {
            "experts": config.num_experts,
            "columns of an expert": config.moe_intermediate_size,
            "columns of the shared experts": config.shared_intermediate_size,
            "KDA heads": config.linear_attn_config.num_heads,
        }
        for name, number in parts.items():
            if number % ranks.size:
                raise ValueError(
                    f"{ranks.size} ranks do not divide {number} {name}: measure with a number that "
                    "does"
                )
        whole = parallel == "ep"
        return cls(
            config,
            parallel,
            experts=len(ranks.share(config.num_experts)) if whole else config.num_experts,
            first_expert=ranks.share(config.num_experts).start if whole else 0,
            expert_width=config.moe_intermediate_size // (1 if whole else ranks.size),
            shared_width=config.shared_intermediate_size // ranks.size,
            kda_heads=config.linear_attn_config.num_heads // ranks.size,
        )
