"""From a strategy to groups of nodes, each one vLLM engine with its parallel sizes.

Needs the standard library only. Lesson 13 compares the strategies with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kimik3_lab.config import K3Config
from kimik3_lab.deploy.machines import MACHINES
from kimik3_lab.deploy.spec import DeploymentSpec
from kimik3_lab.performance.parallelism import Parallelism
from kimik3_lab.performance.placement import Layout, LayoutError, rank_weights

__all__ = ["Group", "check_layout", "groups", "pd_splits"]


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes that form one engine.

    Attributes
    ----------
    role
        ``serve``, or ``prefill`` and ``decode``.
    first, nodes
        Which of the deployment's nodes.
    """

    role: str
    first: int
    nodes: int
    parallelism: Parallelism

    @property
    def data_parallel(self) -> bool:
        """Whether it consists of several engines with requests of their own."""
        return self.parallelism.dp > 1


def groups(spec: DeploymentSpec, *, copies: bool = True) -> tuple[Group, ...]:
    """Engines of a deployment; a ``pd`` deployment needs ``prefill_nodes``.

    ``copies`` lets 16 and more GPUs that only decode have a copy of the trunk each, as in the
    recipe; without it they split it.

    Raises
    ------
    LayoutError
        If the sizes do not go together or the model cannot be divided like that.

    Examples
    --------
    >>> spec = DeploymentSpec(hardware="b200", nodes=2, strategy="tp-pp")
    >>> [group.parallelism.name for group in groups(spec)]
    ['TP8 PP2']
    """
    if spec.strategy != "pd":
        return (_checked(Group("serve", 0, spec.nodes, _parallelism(spec))),)
    prefill = spec.prefill_nodes
    if spec.nodes < 2:
        raise LayoutError(
            f"prefill and decode need nodes of their own: two at least, got {spec.nodes}"
        )
    if prefill is None or prefill >= spec.nodes:
        raise LayoutError(
            f"prefill and decode need nodes of their own: got {prefill} of {spec.nodes} for prefill"
        )
    sizes = _sizes(spec)
    tp = spec.tensor_parallel_size or prefill * sizes
    if tp != prefill * sizes:
        raise LayoutError(
            f"prefill takes all {prefill * sizes} GPUs of its nodes, got a tensor size of {tp}"
        )
    decode = (spec.nodes - prefill) * sizes
    return (
        _checked(Group("prefill", 0, prefill, Parallelism(tp=tp, ep=tp))),
        _checked(Group("decode", prefill, spec.nodes - prefill, _decode(spec, decode, copies))),
    )


def pd_splits(spec: DeploymentSpec) -> tuple[int, ...]:
    """Numbers of prefill nodes to try, fewest first."""
    return (spec.prefill_nodes,) if spec.prefill_nodes else tuple(range(1, spec.nodes))


def _sizes(spec: DeploymentSpec) -> int:
    return MACHINES[spec.hardware].gpus


def _decode(spec: DeploymentSpec, gpus: int, copies: bool) -> Parallelism:
    """Take copies of the trunk from 16 GPUs on; fewer do not hold them."""
    if copies and gpus >= 16 and MACHINES[spec.hardware].blackwell:
        return Parallelism(tp=1, dp=gpus, ep=gpus)
    return Parallelism(tp=gpus, ep=gpus)


def _parallelism(spec: DeploymentSpec) -> Parallelism:
    per_node, gpus = _sizes(spec), _sizes(spec) * spec.nodes
    tp = spec.tensor_parallel_size
    if spec.strategy == "dep":
        tp = tp or 1
        if tp > per_node or per_node % tp:
            raise LayoutError(
                f"a copy of the trunk stays inside a node: TP{tp} does not divide its {per_node} "
                "GPUs"
            )
        if tp == gpus:
            raise LayoutError(f"TP{tp} on {gpus} GPUs is one copy: that is tep")
        return Parallelism(tp=tp, dp=gpus // tp, ep=gpus)
    if spec.strategy == "tp-pp":
        tp = tp or per_node
        if gpus % tp or gpus == tp:
            raise LayoutError(
                f"TP{tp} on {gpus} GPUs leaves no second stage: a pipeline needs at least two"
            )
        return Parallelism(tp=tp, pp=gpus // tp)
    if tp not in (None, gpus):
        raise LayoutError(
            f"{spec.strategy} takes all {gpus} GPUs, got a tensor size of {tp}: use fewer nodes, "
            "or dep for several copies"
        )
    if spec.strategy == "dcp":
        return Parallelism(tp=gpus, dcp=spec.decode_context_parallel_size or gpus)
    return Parallelism(tp=gpus, ep=gpus if spec.strategy == "tep" else 1)


def _checked(group: Group) -> Group:
    check_layout(K3Config.released(), group.parallelism)
    return group


def check_layout(config: K3Config, parallelism: Parallelism) -> None:
    """Whether heads, widths, experts and layers of a model can be divided like that.

    Raises
    ------
    LayoutError
        If not; the message names the number that stands in the way.

    Examples
    --------
    >>> check_layout(K3Config.released(), Parallelism(tp=1, dp=24, ep=24))
    Traceback (most recent call last):
    kimik3_lab.performance.placement.LayoutError: 24 GPUs do not divide 896 experts evenly
    """
    rank_weights(config, Layout(parallelism.tp, 1, parallelism.whole_experts))
    if parallelism.whole_experts and config.num_experts % parallelism.ep:
        raise LayoutError(
            f"{parallelism.ep} GPUs do not divide {config.num_experts} experts evenly"
        )
    if parallelism.pp > config.num_hidden_layers:
        raise LayoutError(
            f"{parallelism.pp} stages for {config.num_hidden_layers} layers leave some empty"
        )
