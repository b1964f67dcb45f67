"""Where a Kimi K3's parameters, bytes and sequence memory are, counted tensor by tensor.

Needs the standard library only. Lesson 01 derives these numbers by hand and then checks itself
against this module; ``k3lab anatomy`` prints them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any

from kimik3_lab.config import K3Config
from kimik3_lab.tensors import TensorSpec, checkpoint_tensors

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
class SequenceMemory:
    """What one sequence keeps between steps, in bytes, all layers together, not sharded.

    The KDA layers keep a state whose size does not depend on the context: a recurrent matrix a head
    and the last few inputs of the short convolution. The MLA layers keep a row a token.

    Examples
    --------
    >>> memory = sequence_memory(K3Config.released())
    >>> memory.state_bytes, memory.mla_bytes_per_token
    (449372160, 27648)
    >>> memory.state_in_tokens, memory.all_mla_break_even
    (16254, 5654)
    """

    kda_recurrent_bytes: int
    kda_conv_bytes: int
    mla_bytes_per_token: int
    #: The same rows if every layer were MLA: the model that K3 is compared with.
    all_mla_bytes_per_token: int

    @property
    def state_bytes(self) -> int:
        """Size of the KDA state, at any context length."""
        return self.kda_recurrent_bytes + self.kda_conv_bytes

    @property
    def state_in_tokens(self) -> int | None:
        """First context at which the model's own MLA rows weigh as much as its KDA state."""
        return _first_context(self.state_bytes, self.mla_bytes_per_token)

    @property
    def all_mla_break_even(self) -> int | None:
        """First context at which the hybrid needs no more than a model of MLA layers only."""
        saved = self.all_mla_bytes_per_token - self.mla_bytes_per_token
        return _first_context(self.state_bytes, saved)

    def bytes_at(self, tokens: int) -> int:
        """Memory of a sequence of ``tokens`` tokens.

        Raises
        ------
        ValueError
            If ``tokens`` is negative.
        """
        return self.state_bytes + self._checked(tokens) * self.mla_bytes_per_token

    def all_mla_bytes_at(self, tokens: int) -> int:
        """Memory of the same sequence if every layer were MLA."""
        return self._checked(tokens) * self.all_mla_bytes_per_token

    @staticmethod
    def _checked(tokens: int) -> int:
        if tokens < 0:
            raise ValueError(f"a context has 0 or more tokens, got {tokens}")
        return tokens


def _first_context(state: int, per_token: int) -> int | None:
    """First token count whose rows reach ``state`` bytes; None if a token adds no byte."""
    if state == 0:
        return 0
    return -(-state // per_token) if per_token else None


@dataclass(frozen=True)
class AnatomyReport:
    """The parts of a Kimi K3, their totals, and what a sequence costs."""

    components: tuple[ComponentRow, ...]
    sequence_memory: SequenceMemory

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
    # Half a million tensors share a few dozen shapes: count first, multiply afterwards.
    kinds = Counter(
        (spec.component, spec.shape, spec.dtype, spec.packing)
        for spec in checkpoint_tensors(config)
    )
    tensors: Counter[str] = Counter()
    parameters: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for (component, shape, dtype, packing), count in kinds.items():
        spec = TensorSpec("", shape, dtype, component, packing=packing)
        tensors[component] += count
        parameters[component] += count * spec.parameters
        size[component] += count * spec.bytes
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
    return AnatomyReport(tuple(rows), sequence_memory(config))


def _active(config: K3Config, component: str, parameters: int) -> int:
    """Apply :data:`ACTIVE_RULE` to one part of the text model."""
    if component == "embedding":
        return 0
    if component == "routed_experts":
        # Experts are all of one size, so the division leaves no rest.
        return parameters // config.num_experts * config.num_experts_per_token
    return parameters


def sequence_memory(
    config: K3Config, *, recurrent_itemsize: int = 4, cache_itemsize: int = 2
) -> SequenceMemory:
    """Work out what one sequence keeps between steps.

    Parameters
    ----------
    config
        Any member of the family.
    recurrent_itemsize
        Bytes of an element of the recurrent state. vLLM keeps it in float32.
    cache_itemsize
        Bytes of an element of the convolution window and of the MLA rows: 2 for bfloat16.

    Examples
    --------
    >>> sequence_memory(K3Config.released()).kda_recurrent_bytes
    434110464
    """
    kda = config.linear_attn_config
    layers = len(kda.kda_layers)
    recurrent = layers * kda.num_heads * kda.head_dim * kda.head_dim * recurrent_itemsize
    # q, k and v each keep the inputs that the next token's convolution still needs.
    window = kda.short_conv_kernel_size - 1
    conv = layers * 3 * kda.projection_size * window * cache_itemsize
    row = config.mla_cache_dim * cache_itemsize
    return SequenceMemory(
        kda_recurrent_bytes=recurrent,
        kda_conv_bytes=conv,
        mla_bytes_per_token=len(config.mla_layer_ids) * row,
        all_mla_bytes_per_token=config.num_hidden_layers * row,
    )


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
