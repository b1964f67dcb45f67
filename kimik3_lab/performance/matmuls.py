"""The dense matrix products of a forward pass, on one rank: bytes of weights, operations, launches.

Needs the standard library only. Lesson 11 prices them. They are grouped from the same census of
tensors that :mod:`kimik3_lab.performance.placement` adds up, so that no byte is lost: a test holds
the sum against ``rank_weights(...).trunk``.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from kimik3_lab.config import K3Config
from kimik3_lab.performance.census import census
from kimik3_lab.performance.placement import SPLIT_COMPONENTS, SPLIT_TENSORS

__all__ = ["MatrixProduct", "matrix_products"]

#: Component and tensor to the product that computes it. Those that share an input are one product,
#: as vLLM fuses them.
_PRODUCTS = {
    ("kda", "q_proj.weight"): "kda qkvg",
    ("kda", "k_proj.weight"): "kda qkvg",
    ("kda", "v_proj.weight"): "kda qkvg",
    ("kda", "g_proj.weight"): "kda qkvg",
    ("kda", "f_a_proj.weight"): "kda decay and beta",
    ("kda", "b_proj.weight"): "kda decay and beta",
    ("kda", "f_b_proj.weight"): "kda decay up",
    ("kda", "o_proj.weight"): "kda o",
    ("mla", "q_a_proj.weight"): "mla down",
    ("mla", "kv_a_proj_with_mqa.weight"): "mla down",
    ("mla", "q_b_proj.weight"): "mla q up",
    ("mla", "kv_b_proj.weight"): "mla kv up",
    ("mla", "g_proj.weight"): "mla gate",
    ("mla", "o_proj.weight"): "mla o",
    ("dense_mlp", "gate_proj.weight"): "dense gate_up",
    ("dense_mlp", "up_proj.weight"): "dense gate_up",
    ("dense_mlp", "down_proj.weight"): "dense down",
    ("router", "gate.weight"): "router",
    ("latent_moe", "routed_expert_down_proj.weight"): "latent down",
    ("latent_moe", "routed_expert_up_proj.weight"): "latent up",
    ("shared_experts", "gate_proj.weight"): "shared gate_up",
    ("shared_experts", "up_proj.weight"): "shared gate_up",
    ("shared_experts", "down_proj.weight"): "shared down",
    ("lm_head", "lm_head.weight"): "lm_head",
}


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """One kind of product, over all layers that have it.

    Attributes
    ----------
    part
        Component that it is booked under.
    calls
        Times that a forward pass runs it.
    weight_bytes
        Weights that one call reads on this rank.
    flops_per_row
        Operations of one call for each row.
    """

    name: str
    part: str
    calls: int
    weight_bytes: float
    flops_per_row: float


def matrix_products(config: K3Config, tp: int) -> tuple[MatrixProduct, ...]:
    """List the products of a forward pass, routed experts and embedding left out.

    Vectors (norms, residual queries, convolution taps) ride with the first product of their
    component; those of components without any are listed as products of no call and no operation.

    Examples
    --------
    >>> products = {p.name: p for p in matrix_products(K3Config.released(), 8)}
    >>> products["kda qkvg"].calls, round(products["kda qkvg"].weight_bytes / 1e6, 1)
    (69, 88.2)
    """
    size: defaultdict[tuple[str, str], float] = defaultdict(float)
    flops: defaultdict[tuple[str, str], float] = defaultdict(float)
    calls: dict[tuple[str, str], int] = {}
    vectors: defaultdict[str, float] = defaultdict(float)
    for spec, count in census(config):
        component = spec.component
        if component in ("embedding", "routed_experts"):
            continue
        split = component in SPLIT_COMPONENTS or spec.name in SPLIT_TENSORS.get(component, ())
        ranks = tp if split else 1
        total = float(count * spec.bytes)
        if spec.name == "self_attn.A_log":  # the zeros behind the last head are not loaded
            total = total / spec.shape[0] * config.linear_attn_config.num_heads
        product = _PRODUCTS.get((component, spec.name))
        if product is None:
            vectors[component] += total / ranks
            continue
        size[component, product] += total / ranks
        flops[component, product] += 2.0 * count * spec.parameters / ranks
        calls[component, product] = count
    found = []
    for (part, name), count in calls.items():
        read = size[part, name] + vectors.pop(part, 0.0)
        each = flops[part, name] / count
        found.append(MatrixProduct(name, part, count, read / count, each))
    found += [MatrixProduct(part, part, 0, rest, 0.0) for part, rest in vectors.items()]
    return tuple(found)
