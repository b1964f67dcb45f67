"""From what is wanted to commands for every node, or to a refusal that names what would work.

Needs pydantic. Lesson 13 and ``k3lab deploy`` call :func:`plan`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict

from pydantic import ValidationError

from kimik3_lab.deploy.choices import at_least, cache_type
from kimik3_lab.deploy.command import Deployment, GroupPlan, Node
from kimik3_lab.deploy.flags import releases
from kimik3_lab.deploy.launch import launch_options, variables
from kimik3_lab.deploy.layouts import Group, groups, pd_splits
from kimik3_lab.deploy.machines import MACHINES
from kimik3_lab.deploy.memory import memory
from kimik3_lab.deploy.options import group_options
from kimik3_lab.deploy.rules import broken_rule
from kimik3_lab.deploy.spec import STRATEGIES, DeploymentSpec, Refusal, RefusedError
from kimik3_lab.deploy.workloads import PROFILES
from kimik3_lab.performance.placement import LayoutError

__all__ = ["ROUTER_PACKAGE", "ROUTER_PORT", "plan", "refusal"]

#: The router answers here, since prefill and decode nodes have ports of their own.
ROUTER_PORT = 8000
#: Its package; the options below were read by the parser of this version.
ROUTER_PACKAGE = "vllm-router==0.1.17"

_PLACEMENT = "kimik3_lab.performance.placement"


def plan(spec: DeploymentSpec) -> Deployment:
    """Work out what every node runs.

    Raises
    ------
    RefusedError
        If it cannot work; its ``refusal`` says why and names the nearest that does.

    Examples
    --------
    >>> found = plan(DeploymentSpec(hardware="b200", nodes=2))
    >>> found.groups[0].layout, len(found.nodes), found.nodes[1].answers
    ('TP16', 2, False)
    >>> plan(DeploymentSpec(hardware="h200"))
    Traceback (most recent call last):
    kimik3_lab.deploy.spec.RefusedError: TP8 (serve) takes 214.0 GB (206.0 GB of weights, 8 GB kept free), of 136.8 GB usable of one H200; the nearest that fits: --vllm 0.33.0 --hardware h200 --nodes 2 --strategy tep
    """  # noqa: E501 - the message is one line
    outcome = _resolve(spec)
    if isinstance(outcome, Refusal):
        raise RefusedError(outcome.model_copy(update={"alternative": _nearest(spec)}))
    chosen, found = outcome
    return Deployment(
        spec=chosen,
        groups=tuple(_group_plan(chosen, group) for group in found),
        router=_router(chosen, found),
        notes=tuple(_notes(chosen, found)),
    )


def refusal(spec: DeploymentSpec) -> Refusal | None:
    """Say why a specification cannot work, without looking for another; None if it does."""
    outcome = _resolve(spec)
    return outcome if isinstance(outcome, Refusal) else None


def _resolve(spec: DeploymentSpec) -> Refusal | tuple[DeploymentSpec, tuple[Group, ...]]:
    """Find the groups; a ``pd`` deployment tries splits of its nodes, and prefers copied trunks."""
    if spec.strategy != "pd":
        return _resolve_one(spec)
    tried = [
        _resolve_one(spec.model_copy(update={"prefill_nodes": nodes}), copies=copies)
        for nodes in pd_splits(spec)
        for copies in (True, False)
    ]
    fitting = [outcome for outcome in tried if not isinstance(outcome, Refusal)]
    if fitting:
        return max(fitting, key=lambda outcome: outcome[1][1].data_parallel)
    refusals = [outcome for outcome in tried if isinstance(outcome, Refusal)]
    # What can be divided and does not fit says more than what cannot be divided.
    divisible = [refused for refused in refusals if refused.source != _PLACEMENT]
    return (divisible or refusals)[-1] if refusals else _resolve_one(spec)


def _resolve_one(
    spec: DeploymentSpec, *, copies: bool = True
) -> Refusal | tuple[DeploymentSpec, tuple[Group, ...]]:
    try:
        found = groups(spec, copies=copies)
    except LayoutError as error:
        # Which sizes are near in GPUs is no help: `_nearest` looks among whole nodes.
        return Refusal(reason=error.reason, source=_PLACEMENT)
    for group in found:
        broken = broken_rule(spec, group)
        if broken is not None:
            return Refusal(reason=broken[0], source=broken[1])
    return spec, found


def _group_plan(spec: DeploymentSpec, group: Group) -> GroupPlan:
    found = memory(spec, group, cache_type(spec))
    shared = group_options(spec, group, found)
    hosts = spec.addresses[group.first : group.first + group.nodes]
    context = spec.max_model_len or PROFILES[spec.workload].context
    return GroupPlan(
        role=group.role,
        layout=group.parallelism.name,
        gpus_per_node=MACHINES[spec.hardware].gpus,
        nodes=tuple(
            Node(
                role=group.role,
                rank=rank,
                host=host,
                head=hosts[0],
                model=spec.model,
                options=(*shared, *launch_options(spec, group, rank)),
                variables=tuple(variables(spec, group)),
            )
            for rank, host in enumerate(hosts)
        ),
        memory={k: round(v) for k, v in asdict(found).items()} | {"room": found.room},
        sequences=found.sequences(context) * group.parallelism.dp,
        context=context,
    )


def _router(spec: DeploymentSpec, found: tuple[Group, ...]) -> tuple[str, ...] | None:
    """Start the router of the vLLM project, which knows the two stages of a request."""
    if spec.strategy != "pd":
        return None
    words = ["vllm-router", "--policy", "round_robin", "--vllm-pd-disaggregation"]
    for group in found:
        fronts = group.nodes if group.data_parallel and spec.launcher == "mp" else 1
        for host in spec.addresses[group.first : group.first + fronts]:
            words += [f"--{group.role}", f"http://{host}:{spec.port}"]
    words += ["--host", "0.0.0.0", "--port", str(ROUTER_PORT), "--kv-connector", "nixl"]
    # Each address is one worker, whatever is behind it; and by default the router gives up on
    # workers after 600 seconds, before they have read their weights.
    words += ["--intra-node-data-parallel-size", "1", "--worker-startup-timeout-secs", "3600"]
    return tuple(words)


def _notes(spec: DeploymentSpec, found: tuple[Group, ...]) -> Iterator[str]:
    sizes = found[0].parallelism
    if any(group.nodes > 1 for group in found) and not spec.hosts:
        yield "the addresses are examples: give your own with --hosts"
    if spec.launcher == "mp" and any(group.nodes > 1 for group in found):
        yield "start every node within a few minutes; the head waits for the others"
    if not sizes.whole_experts and sizes.tp > 12:
        yield (
            f"TP{sizes.tp} pads each expert's slice from {3072 // sizes.tp} to 256 columns: "
            f"{256 * sizes.tp / 3072:.2f} times the expert memory and reads of tep"
        )
    if sizes.tp not in (1, 2, 4, 8):
        yield (
            f"{96 // sizes.tp} heads a GPU have no native KDA decode kernel (12, 24, 48 and 96 "
            "have): vLLM falls back to Triton"
        )
    if spec.strategy == "pd":
        yield "vllm#52627, corrupted answers of K3 with prefill and decode apart, was open"
        yield f"the router is a package of its own: pip install {ROUTER_PACKAGE}"
    if spec.strategy == "dcp" and PROFILES[spec.workload].prefix_caching:
        yield "with DCP, prefix hits may be as coarse as a block times its size (vllm#53598)"
    if PROFILES[spec.workload].prefix_caching and spec.strategy != "pd":
        yield from _match_unit(spec)
    if any(group.nodes > 1 for group in found) and MACHINES[spec.hardware].nvlink_across_nodes:
        yield "the trays must be of one NVLink rack; on Kubernetes, in one ComputeDomain"
    if spec.launcher == "ray":
        yield "ray is a package of its own, on every node; its symmetric-run came in late 2025"
    if spec.drafted and PROFILES[spec.workload].prefix_caching and not at_least(spec, "0.30.0"):
        yield "every state is kept: before 0.30.0, thinned-out ones are never found with a drafter"
    if spec.hardware == "h200":
        yield "an H200 multiplies the experts in bfloat16 (Marlin): no 4-bit units"
    if spec.defaults == "release":
        yield "values are the release's own: two releases compared like this differ in them too"


def _match_unit(spec: DeploymentSpec) -> Iterator[str]:
    """Why an option of the recipe is left out: it finds more, and that is not all that it does."""
    yield (
        "--prefix-match-unit 128 (recipes#861) is left out: more is found, but prompts that go on "
        "inside a block are cut into up to three passes: simulated chats get their first tokens "
        "later (cookbook: prefix caching)"
    )
    if at_least(spec, "0.32.0"):
        yield (
            "besides, with it 0.32.0 and 0.33.0 can resume from a state that has not read as far "
            "as its name says: wrong answers, no error (lesson 07)"
        )


def _nearest(spec: DeploymentSpec) -> DeploymentSpec | None:
    """Find the accepted specification that differs least from ``spec``."""
    for _, changes in sorted(_changes(spec), key=lambda pair: pair[0]):
        try:
            candidate = DeploymentSpec(**(spec.model_dump() | changes))
        except ValidationError:
            continue
        if refusal(candidate) is None:
            return candidate
    return None


def _changes(spec: DeploymentSpec) -> Iterator[tuple[float, dict[str, object]]]:
    """Ways to change ``spec``, each with its distance: the sum of what its parts cost."""
    later = releases()[releases().index(spec.vllm) + 1 :]
    nodes = sorted({1, 2, 4, 6, 8, 12, 16, spec.nodes - 1, spec.nodes, spec.nodes + 1} - {0})
    choices = itertools.product(
        ((0.0, spec.vllm), *((1.5 + i / 2, version) for i, version in enumerate(later))),
        ((0.0, spec.strategy), *((2.0, s) for s in STRATEGIES if s not in (spec.strategy, "pd"))),
        [(_node_cost(spec.nodes, n), n) for n in nodes],
        ((0.0, spec.spec), *(((3.5, "none"),) if spec.drafted else ())),
        ((0.0, spec.max_model_len), *(((2.0, None),) if spec.max_model_len else ())),
        (
            (0.0, spec.workload),
            *(((4.0, "chat"),) if PROFILES[spec.workload].context > 16_384 else ()),
        ),
    )
    names = ("vllm", "strategy", "nodes", "spec", "max_model_len", "workload")
    same = _sizes(spec)
    other = [
        (cost, sizes | {"decode_context_parallel_size": None, "prefill_nodes": None})
        for cost, sizes in same
    ]
    for parts in choices:
        cost = sum(part[0] for part in parts)
        changes: dict[str, object] = dict(zip(names, (part[1] for part in parts), strict=True))
        if changes["nodes"] != spec.nodes:
            changes["hosts"] = ()
        for extra, sizes in same if changes["strategy"] == spec.strategy else other:
            yield cost + extra, changes | sizes


def _node_cost(wanted: int, offered: int) -> float:
    """More nodes cost their ratio; fewer a bit more, since they hold less."""
    ratio = math.log2(offered / wanted)
    return abs(ratio) * (2.0 if ratio < 0 else 1.0)


def _sizes(spec: DeploymentSpec) -> list[tuple[float, dict[str, object]]]:
    """Sizes that were asked for, then the strategy's own, then a node's."""
    kept: dict[str, object] = {
        "tensor_parallel_size": spec.tensor_parallel_size,
        "decode_context_parallel_size": spec.decode_context_parallel_size,
        "prefill_nodes": spec.prefill_nodes,
        "kv_cache_dtype": spec.kv_cache_dtype,
    }
    free: dict[str, object] = dict.fromkeys(kept)
    found = [(0.0, dict(kept))]
    if any(kept.values()):
        found.append((0.5, free))
    found.append((0.75, free | {"tensor_parallel_size": MACHINES[spec.hardware].gpus}))
    asked = spec.decode_context_parallel_size
    if asked is not None:
        for dcp in (1 << power for power in range(1, 8)):
            changed = kept | {"decode_context_parallel_size": dcp}
            found.append((abs(math.log2(dcp / asked)) / 2, changed))
    return found
