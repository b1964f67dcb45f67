"""How the weights of a Kimi K3 are spread over GPUs.

Needs the standard library only. Lesson 01 derives the figures; what fits beside the weights is in
:mod:`kimik3_lab.performance.capacity`.

Which tensors are split and which every GPU keeps whole is vLLM's choice, read from the layers of
``vllm/models/kimi_k3/nvidia/{kda,mla,model}.py`` (0.33.0): heads, feed-forward widths and the
vocabulary are split; everything that leads into a low-rank or latent space is whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kimik3_lab.config import K3Config
from kimik3_lab.performance.census import census

__all__ = [
    "MIN_EXPERT_WIDTH",
    "SPLIT_COMPONENTS",
    "SPLIT_TENSORS",
    "Layout",
    "LayoutError",
    "RankWeights",
    "possible_layouts",
    "rank_weights",
]

#: vLLM pads the experts so that a GPU's slice of their inner width is at least this
#: (``min_moe_intermediate_per_partition`` in its ``KimiMoE``); whole experts need no padding.
MIN_EXPERT_WIDTH = 256

#: Components that are split over the tensor-parallel ranks whole, and those of which only some
#: tensors are. What is named in neither, every rank keeps.
SPLIT_COMPONENTS = {"embedding", "lm_head", "dense_mlp", "shared_experts"}
SPLIT_TENSORS = {
    "kda": {
        *(f"{x}_proj.weight" for x in ("q", "k", "v", "g", "o", "b", "f_b")),
        *(f"{x}_conv1d.weight" for x in "qkv"),
        "self_attn.A_log",
        "self_attn.dt_bias",
    },
    "mla": {f"{x}_proj.weight" for x in ("q_b", "kv_b", "g", "o")},
}


class LayoutError(ValueError):
    """A layout that this model cannot be split into; the message names the nearest one.

    Attributes
    ----------
    reason
        The message without the nearest one, for those who look for that themselves.
    """

    def __init__(self, reason: str, nearest: str = "") -> None:
        super().__init__(f"{reason}; {nearest}" if nearest else reason)
        self.reason = reason


@dataclass(frozen=True)
class Layout:
    """How many GPUs work as one, and what each of them holds.

    Attributes
    ----------
    tensor_parallel
        GPUs that split every matrix, ``--tensor-parallel-size``.
    data_parallel
        Copies of everything but the routed experts, ``--data-parallel-size``.
    expert_parallel
        Whether a GPU holds whole experts instead of a slice of each, ``--enable-expert-parallel``.

    Examples
    --------
    >>> Layout(8).name, Layout(8, expert_parallel=True).name, Layout(1, 8, True).name
    ('TP8', 'TP8 + EP8', 'DP8 + EP8')
    """

    tensor_parallel: int = 8
    data_parallel: int = 1
    expert_parallel: bool = False

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1 or self.data_parallel < 1:
            raise LayoutError(
                f"sizes are 1 or more, got tensor {self.tensor_parallel}, data {self.data_parallel}"
            )
        if self.data_parallel > 1 and (self.tensor_parallel > 1 or not self.expert_parallel):
            raise LayoutError(
                "copies of the trunk are counted with whole experts and without tensor "
                f"parallelism only: use Layout(1, {self.data_parallel}, expert_parallel=True)"
            )

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.tensor_parallel * self.data_parallel

    @property
    def name(self) -> str:
        """As the lessons write it."""
        parts = [f"DP{self.data_parallel}"] if self.data_parallel > 1 else []
        if self.tensor_parallel > 1 or not parts:
            parts.append(f"TP{self.tensor_parallel}")
        if self.expert_parallel:
            parts.append(f"EP{self.gpus}")
        return " + ".join(parts)


@dataclass(frozen=True)
class RankWeights:
    """Bytes of weights on one GPU.

    Attributes
    ----------
    split, replicated
        Component to bytes: of tensors that the ranks share out, and of those that each keeps whole.
    padding
        Bytes of zeros in :attr:`split` that vLLM adds to the routed experts.
    """

    layout: Layout
    split: Mapping[str, int]
    replicated: Mapping[str, int]
    padding: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.split.values()) + sum(self.replicated.values())

    @property
    def experts(self) -> int:
        """Routed experts, with their padding."""
        return self.split["routed_experts"]

    @property
    def trunk(self) -> int:
        """What every step reads: all but the routed experts and the embedding table."""
        return self.total - self.experts - self.split["embedding"]

    def to_dict(self) -> dict[str, Any]:
        """Plain content for JSON."""
        return {
            "layout": self.layout.name,
            "gpus": self.layout.gpus,
            "bytes_per_gpu": self.total,
            "experts": self.experts,
            "trunk": self.trunk,
            "embedding": self.split["embedding"],
            "replicated": sum(self.replicated.values()),
            "padding": self.padding,
        }


def rank_weights(config: K3Config, layout: Layout) -> RankWeights:
    """Weights that one GPU of ``layout`` keeps of ``config``'s text model, as vLLM splits it.

    The vision part is left out. So are copies that vLLM makes while loading, which come to less
    than a thousandth.

    Raises
    ------
    LayoutError
        If heads, widths, vocabulary or experts cannot be divided like that.

    Examples
    --------
    >>> weights = rank_weights(K3Config.released(), Layout(8))
    >>> round(weights.total / 1e9, 1), round(weights.experts / 1e9, 1)
    (205.1, 180.8)
    """
    _check(config, layout)
    ranks = layout.tensor_parallel
    split: Counter[str] = Counter(embedding=0, routed_experts=0)
    replicated: Counter[str] = Counter()
    for spec, count in census(config):
        size = count * spec.bytes
        component = spec.component
        if component == "routed_experts":
            split[component] += size // layout.gpus
        elif component in SPLIT_COMPONENTS or spec.name in SPLIT_TENSORS.get(component, ()):
            if spec.name == "self_attn.A_log":  # the zeros behind the last head are not loaded
                size = size // spec.shape[0] * config.linear_attn_config.num_heads
            split[component] += size // ranks
        else:
            replicated[component] += size
    padding = 0
    width = config.moe_intermediate_size // ranks
    if ranks > 1 and not layout.expert_parallel and width < MIN_EXPERT_WIDTH:
        whole = split["routed_experts"] * MIN_EXPERT_WIDTH * ranks // config.moe_intermediate_size
        padding = whole - split["routed_experts"]
        split["routed_experts"] = whole
    return RankWeights(layout, dict(split), dict(replicated), padding)


def possible_layouts(config: K3Config, max_gpus: int = 32) -> Iterator[Layout]:
    """Yield the layouts over 1, 2, 4 ... GPUs that ``config`` can be split into.

    Examples
    --------
    >>> [layout.name for layout in possible_layouts(K3Config.tiny())]
    ['TP1', 'DP2 + EP2', 'DP4 + EP4', 'DP8 + EP8', 'DP16 + EP16', 'DP32 + EP32']
    """
    size = 1
    while size <= max_gpus:
        for layout in (Layout(size), Layout(size, 1, True), Layout(1, size, True)):
            if size == 1 and layout.expert_parallel:
                continue
            try:
                _check(config, layout)
            except LayoutError:
                continue
            yield layout
        size *= 2


def _check(config: K3Config, layout: Layout) -> None:
    ranks = layout.tensor_parallel
    parts = {
        "KDA heads": config.linear_attn_config.num_heads,
        "MLA heads": config.num_attention_heads,
        "rows of the vocabulary": config.vocab_size,
        "columns of the dense feed-forward": config.intermediate_size,
        "columns of the shared experts": config.shared_intermediate_size,
    }
    if not layout.expert_parallel:
        parts["columns of an expert"] = config.moe_intermediate_size

    def bad(size: int) -> str | None:
        return next((f"{n} {what}" for what, n in parts.items() if n % size), None)

    if (found := bad(ranks)) is not None:
        nearest = max(size for size in range(1, ranks) if bad(size) is None)
        raise LayoutError(
            f"TP{ranks} does not divide {found}", f"the nearest that does is TP{nearest}"
        )
    if layout.expert_parallel and config.num_experts % layout.gpus:
        nearest = max(size for size in range(1, layout.gpus) if config.num_experts % size == 0)
        raise LayoutError(
            f"{layout.gpus} GPUs do not divide {config.num_experts} experts",
            f"the nearest number that does is {nearest}",
        )
