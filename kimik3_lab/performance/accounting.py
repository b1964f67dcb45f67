"""Where a Kimi K3's parameters and bytes are, counted tensor by tensor, in one report.

Needs the standard library only. Lesson 01 derives these numbers by hand and then checks itself
against this module; ``k3lab anatomy`` prints them. The report also carries what its neighbours
work out: the arithmetic of a token, the memory of a sequence, the weights of a GPU.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any

from kimik3_lab.config import K3Config
from kimik3_lab.performance.census import census
from kimik3_lab.performance.flops import TokenFlops, flops_per_token
from kimik3_lab.performance.placement import possible_layouts, rank_weights
from kimik3_lab.performance.sequence_memory import SequenceMemory, sequence_memory

__all__ = [
    "ACTIVE_RULE",
    "CHECKPOINT_URL",
    "VISION",
    "AnatomyReport",
    "ComponentRow",
    "SequenceMemory",
    "anatomy",
    "sequence_memory",
    "short_count",
]

#: What counts as active, in words; :func:`_active` is the same in code.
ACTIVE_RULE = (
    "a text token uses every parameter of the text model, with two exceptions: of the routed "
    "experts it uses num_experts_per_token out of num_experts, and its row of the embedding table "
    "is a look-up that counts as nothing; the output head counts, the vision part does not"
)

#: Where the published totals that the report is checked against come from.
CHECKPOINT_URL = "https://huggingface.co/moonshotai/Kimi-K3"

#: Order and wording of the rows. The order is the way of a token through the model.
_LABELS = {
    "embedding": "token embedding table",
    "kda": "KDA attention",
    "mla": "MLA attention",
    "norms": "layer norms",
    "attn_res": "attention residuals",
    "dense_mlp": "dense MLP",
    "router": "routers and selection bias",
    "latent_moe": "latent down, norm and up",
    "shared_experts": "shared experts",
    "routed_experts": "routed experts",
    "final": "final norm and residual mix",
    "lm_head": "output head",
    "vision": "vision tower and projector",
}


@dataclass(frozen=True)
class ComponentRow:
    """One part of the checkpoint.

    ``parameters`` counts weights, ``bytes`` what they take on disk (scales included), and
    ``active_parameters`` those that one text token uses. ``evidence`` is ``"Derived"`` for parts
    enumerated from the configuration and ``"Published"`` for totals taken from the checkpoint.
    """

    component: str
    label: str
    tensors: int
    parameters: int
    bytes: int
    active_parameters: int
    evidence: str


#: The release can also read images. That part is taken as published, not derived: the file headers
#: list 165 tensors of ``vision_tower`` with 401,214,464 parameters and 3 of ``mm_projector`` with
#: 46,144,512, all BF16.
VISION = ComponentRow(
    component="vision",
    label=_LABELS["vision"],
    tensors=165 + 3,
    parameters=401_214_464 + 46_144_512,
    bytes=2 * (401_214_464 + 46_144_512),
    active_parameters=0,
    evidence="Published",
)


@dataclass(frozen=True)
class AnatomyReport:
    """The parts of a Kimi K3, their totals, and what a token and a sequence cost."""

    config: K3Config
    components: tuple[ComponentRow, ...]

    @property
    def total_parameters(self) -> int:
        """Weights of all parts."""
        return sum(row.parameters for row in self.components)

    @property
    def tensors(self) -> int:
        """Tensors in the checkpoint."""
        return sum(row.tensors for row in self.components)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of all tensors; the files are larger by their headers."""
        return sum(row.bytes for row in self.components)

    @property
    def active_parameters_per_token(self) -> int:
        """Weights that one text token uses: see :data:`ACTIVE_RULE`."""
        return sum(row.active_parameters for row in self.components)

    @property
    def flops_per_token(self) -> TokenFlops:
        """Arithmetic of one token."""
        return flops_per_token(self.config)

    @property
    def sequence_memory(self) -> SequenceMemory:
        """What one sequence keeps between steps."""
        return sequence_memory(self.config)

    def row(self, component: str) -> ComponentRow:
        """Return one part by name.

        Raises
        ------
        KeyError
            If this model has no such part; the message lists those it has.
        """
        for row in self.components:
            if row.component == component:
                return row
        have = ", ".join(row.component for row in self.components)
        raise KeyError(f"no component {component!r}; this model has {have}")

    def to_dict(self) -> dict[str, Any]:
        """Plain content for JSON."""
        memory = self.sequence_memory
        return {
            "total_parameters": self.total_parameters,
            "tensors": self.tensors,
            "checkpoint_bytes": self.checkpoint_bytes,
            "active_parameters_per_token": self.active_parameters_per_token,
            "active_rule": ACTIVE_RULE,
            "components": [dataclasses.asdict(row) for row in self.components],
            "sequence_memory": {
                **dataclasses.asdict(memory),
                "state_bytes": memory.state_bytes,
                "state_in_tokens": memory.state_in_tokens,
                "all_mla_break_even": memory.all_mla_break_even,
            },
            "flops_per_token": self.flops_per_token.to_dict(),
            "placement": [
                rank_weights(self.config, layout).to_dict()
                for layout in possible_layouts(self.config)
            ],
        }


def anatomy(config: K3Config) -> AnatomyReport:
    """Count every tensor of ``config``'s checkpoint, grouped by part.

    The vision part is added for the released configuration only, as published; every other number
    is a sum over :func:`kimik3_lab.tensors.checkpoint_tensors`. Takes about a second for the
    release, which has half a million tensors.

    Examples
    --------
    >>> report = anatomy(K3Config.micro())
    >>> report.total_parameters, report.active_parameters_per_token
    (160556, 138028)
    >>> report.row("routed_experts").tensors
    36
    """
    tensors: Counter[str] = Counter()
    parameters: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for spec, count in census(config):
        tensors[spec.component] += count
        parameters[spec.component] += count * spec.parameters
        size[spec.component] += count * spec.bytes
    rows = [
        ComponentRow(
            component=name,
            label=label,
            tensors=tensors[name],
            parameters=parameters[name],
            bytes=size[name],
            active_parameters=_active(config, name, parameters[name]),
            evidence="Derived",
        )
        for name, label in _LABELS.items()
        if tensors[name]
    ]
    if config == K3Config.released():
        rows.append(VISION)
    return AnatomyReport(config, tuple(rows))


def _active(config: K3Config, component: str, parameters: int) -> int:
    """Apply :data:`ACTIVE_RULE` to one part of the text model."""
    if component == "embedding":
        return 0
    if component == "routed_experts":
        # Experts are all of one size, so the division leaves no rest.
        return parameters // config.num_experts * config.num_experts_per_token
    return parameters


def short_count(value: float) -> str:
    """Write a large count as it is spoken of: three digits and a unit.

    Examples
    --------
    >>> short_count(2_722_740_830_208), short_count(48_620_371_968), short_count(21_504)
    ('2.72 T', '48.6 B', '21.5 K')
    """
    for factor, unit in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " K")):
        if value >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"
