"""How the nodes of a group find each other, and the environment that they need.

Needs pydantic. Lesson 13 uses it. The distributed engine is vLLM's own. Two ways of starting it:

``mp``
    a command on every node. One engine over several nodes takes ``--nnodes``, ``--node-rank`` and
    ``--master-addr``; data-parallel engines take ``--data-parallel-address`` and the first rank of
    the node. All but the head are ``--headless`` (vLLM ``entrypoints/cli/serve.py``,
    ``engine/arg_utils.py``).
``ray``
    one command; Ray knows the nodes (https://docs.vllm.ai/en/stable/serving/parallelism_scaling/).
"""

from __future__ import annotations

from kimik3_lab.deploy.choices import at_least, retention_by
from kimik3_lab.deploy.command import HEAD, SELF, Option, Variable
from kimik3_lab.deploy.layouts import Group
from kimik3_lab.deploy.machines import MACHINES, RECIPE
from kimik3_lab.deploy.spec import DeploymentSpec

__all__ = ["MASTER_PORT", "RPC_PORT", "SIDE_CHANNEL_PORT", "launch_options", "variables"]

MASTER_PORT, RPC_PORT, SIDE_CHANNEL_PORT = 29501, 13345, 5600
_SERVE = "vLLM entrypoints/cli/serve.py, engine/arg_utils.py"
_DP = "https://docs.vllm.ai/en/stable/serving/data_parallel_deployment/"
_NIXL = "https://docs.vllm.ai/en/stable/features/nixl_connector_usage.html"


def launch_options(spec: DeploymentSpec, group: Group, rank: int) -> list[Option]:
    """Options in which the nodes of a group differ, or that only several nodes need.

    Examples
    --------
    >>> from kimik3_lab.deploy.layouts import groups
    >>> spec = DeploymentSpec(hardware="b200", nodes=2)
    >>> [" ".join(o.words) for o in launch_options(spec, groups(spec)[0], 1)]
    ['--nnodes 2', '--node-rank 1', '--master-addr @head@', '--master-port 29501', '--headless']
    """
    if spec.launcher == "ray":
        return _ray(group)
    if group.data_parallel:
        return _data_parallel(spec, group, rank)
    if group.nodes == 1:
        return []
    options = [
        ("--nnodes", str(group.nodes), "nodes that form this one engine"),
        ("--node-rank", str(rank), "which of them this is"),
        ("--master-addr", HEAD, "where they meet: the head, rank 0"),
        ("--master-port", str(MASTER_PORT), "port of that meeting, vLLM's default"),
    ]
    return [
        *(Option(name=n, value=v, why=w, source=_SERVE) for n, v, w in options),
        *([_headless()] if rank else []),
    ]


def _headless() -> Option:
    why = "only workers here; requests go to the head"
    return Option(name="--headless", why=why, source=_SERVE)


def _data_parallel(spec: DeploymentSpec, group: Group, rank: int) -> list[Option]:
    local = group.parallelism.dp // group.nodes
    own_front = group.role == "decode" and group.nodes > 1
    if group.nodes == 1:
        return []
    options = [
        ("--data-parallel-size-local", str(local), "engines of this node"),
        ("--data-parallel-address", HEAD, "where engines report: an IP address of the head"),
        ("--data-parallel-rpc-port", str(RPC_PORT), "port for that"),
    ]
    if rank or own_front:
        options.append(("--data-parallel-start-rank", str(rank * local), "first engine here"))
    found = [Option(name=n, value=v, why=w, source=_DP) for n, v, w in options]
    if own_front:
        why = "every node answers for its own engines, and the router picks among nodes"
        found.append(Option(name="--data-parallel-hybrid-lb", why=why, source=RECIPE))
    elif rank:
        found.append(_headless())
    return found


def _ray(group: Group) -> list[Option]:
    why = "workers are Ray actors on the nodes of the cluster"
    source = "https://docs.vllm.ai/en/stable/serving/parallelism_scaling/"
    found = [Option(name="--distributed-executor-backend", value="ray", why=why, source=source)]
    if group.data_parallel:
        local = group.parallelism.dp // group.nodes
        options = [
            ("--data-parallel-backend", "ray", "engines too are placed by Ray"),
            ("--data-parallel-size-local", str(local), "engines of the head node"),
            ("--data-parallel-address", HEAD, "where engines report: an IP address of the head"),
        ]
        found += [Option(name=n, value=v, why=w, source=_DP) for n, v, w in options]
    return found


def variables(spec: DeploymentSpec, group: Group) -> list[Variable]:
    """Environment of every node of a group."""
    machine, found = MACHINES[spec.hardware], []

    def add(name: str, value: object, why: str, source: str) -> None:
        found.append(Variable(name=name, value=str(value), why=why, source=source))

    why = "loading 1.56 TB takes longer than the default of 600 seconds"
    add("VLLM_ENGINE_READY_TIMEOUT_S", 3600, why, RECIPE)
    common = spec.defaults == "common"
    why = "all-reduce kernel; the default went from 0 to 1 in 0.29.0, which alone changes a result"
    own = 1 if at_least(spec, "0.29.0") else 0
    if machine.blackwell:
        add("VLLM_ALLREDUCE_USE_FLASHINFER", 1 if common else own, why, RECIPE)
    if common:
        why = "the runner that DSpark forces anyway, so that runs without it compare"
        add("VLLM_USE_V2_MODEL_RUNNER", 1, why, RECIPE)
    if retention_by(spec, group) == "variable":
        why = "keeps states only where somebody can resume; an option from 0.29.0 on"
        add("VLLM_PREFIX_CACHE_RETENTION_INTERVAL", 0, why, "vLLM 0.27.1 envs.py")
    if not machine.blackwell:
        why = "memory is short: pieces are joined again instead of wasted"
        add("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", why, RECIPE)
    if group.nodes > 1 or group.role != "serve":
        why = "address of this node that the others reach"
        add("VLLM_HOST_IP", SELF, why, "vLLM envs.py")
    if group.nodes > 1 and machine.nvlink_across_nodes:
        for name in ("NCCL_MNNVL_ENABLE", "NCCL_NVLS_ENABLE"):
            add(name, 1, "NVLink reaches the GPUs of the other trays", RECIPE)
    if (group.nodes > 1 and machine.nvlink_across_nodes) or group.parallelism.pp > 1:
        add("NCCL_CUMEM_ENABLE", 1, "buffers that other nodes can map", RECIPE)
    if group.parallelism.pp > 1:
        why = "one long request can hold a stage longer than the default of 300 seconds"
        add("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", 1800, why, RECIPE)
    if group.role != "serve":
        why = "convolution windows laid out by channel, as both sides of a transfer need them"
        add("VLLM_SSM_CONV_STATE_LAYOUT", "DS", why, RECIPE)
        add("VLLM_NIXL_SIDE_CHANNEL_HOST", SELF, "where the other side asks for states", _NIXL)
        add("VLLM_NIXL_SIDE_CHANNEL_PORT", SIDE_CHANNEL_PORT, "port for that", _NIXL)
        add("UCX_TLS", "rc,cuda_copy", "states travel by RDMA, never by plain TCP", RECIPE)
    if group.role == "prefill":
        why = "saves memory where experts are whole: the shared ones are split too"
        add("VLLM_KIMI_K3_SHARD_SP_SHARED_EXPERT", 1, why, RECIPE)
    return found
