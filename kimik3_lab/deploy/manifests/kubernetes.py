"""Kubernetes: a LeaderWorkerSet for each group, its Service, the weights' claim, the scripts.

Needs pydantic and pyyaml. The cluster needs the LeaderWorkerSet controller and NVIDIA's device
plugin. Facts: https://docs.vllm.ai/en/stable/deployment/frameworks/lws/. The controller gives every
pod ``LWS_LEADER_ADDRESS`` and ``LWS_WORKER_INDEX``, which the scripts read.
"""

from __future__ import annotations

from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from kimik3_lab.deploy.command import Deployment, GroupPlan, Node
from kimik3_lab.deploy.manifests import kubernetes_models as k8s
from kimik3_lab.deploy.manifests.compose import image
from kimik3_lab.deploy.manifests.script import NodeScript, node_script
from kimik3_lab.deploy.plan import ROUTER_PACKAGE, ROUTER_PORT

__all__ = ["Bundle", "bundle"]

Kind = Annotated[
    k8s.ConfigMap | k8s.Claim | k8s.Service | k8s.LeaderWorkerSet | k8s.KubernetesDeployment,
    Field(discriminator="kind"),
]
_KINDS: TypeAdapter[Any] = TypeAdapter(Kind)
#: 1.56 TB of weights are 1,454 GiB; the rest is for the drafter and what is written while loading.
_STORAGE, _SHARED = "1700Gi", "64Gi"
_WEIGHTS = "k3-weights"
_ANSWERS = "k3-answers"


class Bundle(BaseModel):
    """All objects of a deployment; what they name in each other must exist."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    objects: tuple[Kind, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _linked(self) -> Bundle:
        templates = list(_templates(self.objects))
        for item in self.objects:
            if isinstance(item, k8s.Service):
                _check_service(item, templates)
            if isinstance(item, k8s.LeaderWorkerSet):
                _check_size(item, self.objects)
        have = {(item.kind, item.metadata.name) for item in self.objects}
        if len(have) != len(self.objects):
            raise ValueError("two objects of one kind have the same name")
        for template in templates:
            for volume in template.spec.volumes:
                for kind, source in (
                    ("PersistentVolumeClaim", volume.persistent_volume_claim),
                    ("ConfigMap", volume.config_map),
                ):
                    name = getattr(source, "claim_name", None) or getattr(source, "name", None)
                    if source is not None and (kind, name) not in have:
                        raise ValueError(f"the volume {volume.name} needs the {kind} {name}")
        return self

    def render(self) -> str:
        """All objects as one YAML stream."""
        bodies = [
            _pruned(item.model_dump(mode="json", by_alias=True, exclude_none=True))
            for item in self.objects
        ]
        front = ("apiVersion", "kind", "metadata")
        ordered = [
            {k: body[k] for k in front} | {k: v for k, v in body.items() if k not in front}
            for body in bodies
        ]
        return yaml.dump_all(ordered, Dumper=_Dumper, sort_keys=False, width=120)

    @classmethod
    def parse(cls, text: str) -> Bundle:
        """Read a stream back; unknown kinds and keys are errors."""
        objects = tuple(_KINDS.validate_python(body) for body in yaml.safe_load_all(text))
        return cls(objects=objects)


def _pruned(value: Any) -> Any:
    """Leave out empty lists and mappings: they are the defaults."""
    if isinstance(value, dict):
        return {key: _pruned(entry) for key, entry in value.items() if entry not in ({}, [])}
    return [_pruned(entry) for entry in value] if isinstance(value, list) else value


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block, so that scripts stay readable."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def _templates(objects: tuple[Any, ...]) -> list[k8s.PodTemplate]:
    found = []
    for item in objects:
        if isinstance(item, k8s.LeaderWorkerSet):
            group = item.spec.leader_worker_template
            found += [group.leader_template, group.worker_template]
        elif isinstance(item, k8s.KubernetesDeployment):
            found.append(item.spec.template)
    return found


def _check_service(service: k8s.Service, templates: list[k8s.PodTemplate]) -> None:
    matching = [
        template
        for template in templates
        if service.spec.selector.items() <= template.metadata.labels.items()
    ]
    name = service.metadata.name
    if not matching:
        raise ValueError(f"the service {name} selects no pod: {service.spec.selector}")
    for template in matching:
        open_ports = {p.container_port for c in template.spec.containers for p in c.ports}
        for port in service.spec.ports:
            if port.target_port not in open_ports:
                raise ValueError(f"the service {name} leads to port {port.target_port}, not open")


def _check_size(group: k8s.LeaderWorkerSet, objects: tuple[Any, ...]) -> None:
    """Hold the number of pods against the commands of the script."""
    name = group.metadata.name
    for item in objects:
        if isinstance(item, k8s.ConfigMap) and item.metadata.name == f"{name}-script":
            commands = NodeScript.parse(item.data["serve.sh"]).commands
            size = group.spec.leader_worker_template.size
            if size != len(commands):
                raise ValueError(f"{name} has {size} pods, its script {len(commands)} commands")
            return
    raise ValueError(f"{name} has no script: the ConfigMap {name}-script is missing")


def bundle(deployment: Deployment) -> Bundle:
    """Objects of a deployment.

    Examples
    --------
    >>> from kimik3_lab.deploy.plan import plan
    >>> from kimik3_lab.deploy.spec import DeploymentSpec
    >>> found = bundle(plan(DeploymentSpec(hardware="b200", nodes=2)))
    >>> [item.kind for item in found.objects]
    ['PersistentVolumeClaim', 'ConfigMap', 'LeaderWorkerSet', 'Service']
    """
    storage = k8s.ClaimSpec(
        access_modes=("ReadWriteMany",),
        resources=k8s.Request(requests={"storage": _STORAGE}),
    )
    objects: list[Any] = [k8s.Claim(metadata=k8s.Metadata(name=_WEIGHTS), spec=storage)]
    for group in deployment.groups:
        objects += _group(deployment, group)
    if deployment.router is not None:
        objects += _router(deployment)
    return Bundle(objects=tuple(objects))


def _group(deployment: Deployment, group: GroupPlan) -> list[Any]:
    name, port = f"k3-{group.role}", deployment.spec.port
    script = node_script(deployment, group).render()
    leader = _template(deployment, group, group.nodes[0])
    return [
        k8s.ConfigMap(metadata=k8s.Metadata(name=f"{name}-script"), data={"serve.sh": script}),
        k8s.LeaderWorkerSet(
            metadata=k8s.Metadata(name=name),
            spec=k8s.LeaderWorkerSetSpec(
                leader_worker_template=k8s.LeaderWorkerTemplate(
                    size=len(group.nodes),
                    leader_template=leader,
                    worker_template=_template(deployment, group, group.nodes[-1]),
                )
            ),
        ),
        _service(name, port, {"app": name, _ANSWERS: "yes"}),
    ]


def _service(name: str, port: int, selector: dict[str, str]) -> k8s.Service:
    ports = (k8s.ServicePort(name="http", port=port, target_port=port),)
    return k8s.Service(
        metadata=k8s.Metadata(name=name), spec=k8s.ServiceSpec(selector=selector, ports=ports)
    )


def _template(deployment: Deployment, group: GroupPlan, node: Node) -> k8s.PodTemplate:
    name, port = f"k3-{group.role}", deployment.spec.port
    own = k8s.ValueFrom(field_ref=k8s.FieldRef(field_path="status.podIP"))
    get = k8s.HttpGet(path="/health", port=port)
    probes: dict[str, k8s.Probe] = {}
    if node.answers:
        probes = {
            # An hour: 1.56 TB are read before the first answer.
            "startup_probe": k8s.Probe(http_get=get, failure_threshold=360),
            "readiness_probe": k8s.Probe(http_get=get),
            "liveness_probe": k8s.Probe(http_get=get, failure_threshold=6),
        }
    gpus = {"nvidia.com/gpu": str(group.gpus_per_node)}
    container = k8s.Container(
        name="vllm",
        image=image(deployment.spec.vllm),
        command=("bash", "/k3/serve.sh"),
        env=(
            k8s.Env(name="K3_SELF", value_from=own),
            k8s.Env(name="HF_HOME", value="/weights"),
        ),
        ports=(k8s.Port(name="http", container_port=port),) if node.answers else (),
        resources=k8s.Resources(requests=gpus, limits=gpus),
        # RDMA needs memory that stays where it is.
        security_context=k8s.Security(capabilities=k8s.Capabilities(add=("IPC_LOCK",))),
        volume_mounts=(
            k8s.Mount(name="weights", mount_path="/weights"),
            k8s.Mount(name="shm", mount_path="/dev/shm"),
            k8s.Mount(name="script", mount_path="/k3", read_only=True),
        ),
        **probes,
    )
    return k8s.PodTemplate(
        metadata=k8s.TemplateMetadata(
            labels={"app": name, _ANSWERS: "yes" if node.answers else "no"}
        ),
        spec=k8s.PodSpec(
            containers=(container,),
            termination_grace_period_seconds=node.stop_s,
            volumes=(
                k8s.Volume(
                    name="weights",
                    persistent_volume_claim=k8s.ClaimSource(claim_name=_WEIGHTS),
                ),
                k8s.Volume(name="shm", empty_dir=k8s.EmptyDir(medium="Memory", size_limit=_SHARED)),
                k8s.Volume(name="script", config_map=k8s.ConfigSource(name=f"{name}-script")),
            ),
        ),
    )


def _router(deployment: Deployment) -> list[Any]:
    """Make the router, which finds the groups by the names of their services."""
    words = list(deployment.router or ())
    roles = {node.host: node.role for node in deployment.nodes}
    command: list[str] = []
    for flag, word in zip([None, *words], words, strict=False):
        for host, role in roles.items():
            word = word.replace(f"http://{host}:", f"http://k3-{role}:")
        if flag in ("--prefill", "--decode") and word in command:
            command.pop()  # the service stands for all nodes of a group
            continue
        command.append(word)
    labels = {"app": "k3-router"}
    get = k8s.HttpGet(path="/health", port=ROUTER_PORT)
    container = k8s.Container(
        name="router",
        image="python:3.12-slim",
        # The words of the command follow as they are: "$@" is bash's own.
        command=("bash", "-c", f'pip install {ROUTER_PACKAGE} && exec "$@"', "router", *command),
        ports=(k8s.Port(name="http", container_port=ROUTER_PORT),),
        readiness_probe=k8s.Probe(http_get=get),
    )
    template = k8s.PodTemplate(
        metadata=k8s.TemplateMetadata(labels=labels), spec=k8s.PodSpec(containers=(container,))
    )
    return [
        k8s.KubernetesDeployment(
            metadata=k8s.Metadata(name="k3-router"),
            spec=k8s.KubernetesDeploymentSpec(
                selector=k8s.Selector(match_labels=labels), template=template
            ),
        ),
        _service("k3-router", ROUTER_PORT, labels),
    ]
