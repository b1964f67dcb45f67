"""The parts of Kubernetes objects that a deployment uses, typed; unknown keys are errors.

Needs pydantic. Field names are Kubernetes' own in snake case; YAML gets them in camel case. Facts:
https://kubernetes.io/docs/reference/kubernetes-api/ and
https://lws.sigs.k8s.io/docs/reference/leaderworkerset.v1/.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

__all__ = [
    "Claim",
    "ConfigMap",
    "Container",
    "KubernetesDeployment",
    "LeaderWorkerSet",
    "Object",
    "PodTemplate",
    "Service",
]

Name = Annotated[str, Field(pattern=r"^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$")]
Quantity = Annotated[str, Field(pattern=r"^\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")]


class Part(BaseModel):
    """Anything inside an object."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True
    )


class Metadata(Part):
    """Name and labels."""

    name: Name
    labels: dict[str, str] = {}


class TemplateMetadata(Part):
    """Labels of pods, which get their names from whoever makes them."""

    labels: dict[str, str]


class HttpGet(Part):
    """A probe's request."""

    path: str = Field(pattern=r"^/")
    port: int


class Probe(Part):
    """When a container counts as started, ready or alive."""

    http_get: HttpGet
    period_seconds: int = Field(default=10, ge=1)
    failure_threshold: int = Field(default=3, ge=1)
    timeout_seconds: int = Field(default=5, ge=1)


class FieldRef(Part):
    """A field of the pod itself."""

    field_path: Literal["status.podIP"]


class ValueFrom(Part):
    """Where a variable's value comes from."""

    field_ref: FieldRef


class Env(Part):
    """A variable: a value, or where to take it from."""

    name: str = Field(pattern=r"^[A-Z][A-Z0-9_]*$")
    value: str | None = None
    value_from: ValueFrom | None = None

    @model_validator(mode="after")
    def _one(self) -> Env:
        if (self.value is None) == (self.value_from is None):
            raise ValueError(f"{self.name} needs a value or a source, and not both")
        return self


class Port(Part):
    """A port of a container."""

    name: Name
    container_port: int = Field(ge=1, le=65535)


class Resources(Part):
    """What a container may take. GPUs cannot be asked for and limited to different numbers."""

    requests: dict[str, Quantity]
    limits: dict[str, Quantity]

    @model_validator(mode="after")
    def _gpus(self) -> Resources:
        gpu = "nvidia.com/gpu"
        if self.requests.get(gpu) != self.limits.get(gpu):
            raise ValueError(
                f"requests and limits of {gpu} must agree: {self.requests.get(gpu)} and "
                f"{self.limits.get(gpu)}"
            )
        return self


class Mount(Part):
    """Where a volume appears."""

    name: Name
    mount_path: str = Field(pattern=r"^/")
    read_only: bool | None = None


class Capabilities(Part):
    """Rights of a process."""

    add: tuple[Literal["IPC_LOCK"], ...]


class Security(Part):
    """Rights of a container."""

    capabilities: Capabilities


class Container(Part):
    """One container."""

    name: Name
    image: str = Field(pattern=r"^[\w./-]+:[\w.-]+$")
    command: tuple[str, ...] = Field(min_length=1)
    env: tuple[Env, ...] = ()
    ports: tuple[Port, ...] = ()
    resources: Resources | None = None
    security_context: Security | None = None
    startup_probe: Probe | None = None
    readiness_probe: Probe | None = None
    liveness_probe: Probe | None = None
    volume_mounts: tuple[Mount, ...] = ()

    @model_validator(mode="after")
    def _probed(self) -> Container:
        ports = {port.container_port for port in self.ports}
        for name in ("startup_probe", "readiness_probe", "liveness_probe"):
            probe = getattr(self, name)
            if probe is not None and probe.http_get.port not in ports:
                raise ValueError(
                    f"{name} asks port {probe.http_get.port}, the container has {sorted(ports)}"
                )
        return self


class EmptyDir(Part):
    """A folder that lives as long as the pod; in memory, it is ``/dev/shm``."""

    medium: Literal["Memory"]
    size_limit: Quantity


class ClaimSource(Part):
    """A volume of a claim."""

    claim_name: Name


class ConfigSource(Part):
    """A volume of a ConfigMap."""

    name: Name


class Volume(Part):
    """A volume: exactly one source."""

    name: Name
    empty_dir: EmptyDir | None = None
    persistent_volume_claim: ClaimSource | None = None
    config_map: ConfigSource | None = None

    @model_validator(mode="after")
    def _one(self) -> Volume:
        sources = (self.empty_dir, self.persistent_volume_claim, self.config_map)
        if sum(source is not None for source in sources) != 1:
            raise ValueError(f"the volume {self.name} needs exactly one source")
        return self


class PodSpec(Part):
    """One pod."""

    containers: tuple[Container, ...] = Field(min_length=1)
    volumes: tuple[Volume, ...] = ()
    termination_grace_period_seconds: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _mounted(self) -> PodSpec:
        known = {volume.name for volume in self.volumes}
        for container in self.containers:
            for mount in container.volume_mounts:
                if mount.name not in known:
                    raise ValueError(f"{container.name} mounts {mount.name}, which no volume is")
        return self


class PodTemplate(Part):
    """Pods to make."""

    metadata: TemplateMetadata
    spec: PodSpec


class Object(Part):
    """Anything with a name of its own."""

    metadata: Metadata


class ConfigMap(Object):
    """Files."""

    api_version: Literal["v1"] = "v1"
    kind: Literal["ConfigMap"] = "ConfigMap"
    data: dict[str, str] = Field(min_length=1)


class Request(Part):
    """How much a claim asks for."""

    requests: dict[Literal["storage"], Quantity]


class ClaimSpec(Part):
    """Storage that several nodes read."""

    access_modes: tuple[Literal["ReadWriteMany", "ReadOnlyMany"], ...] = Field(min_length=1)
    resources: Request


class Claim(Object):
    """A PersistentVolumeClaim."""

    api_version: Literal["v1"] = "v1"
    kind: Literal["PersistentVolumeClaim"] = "PersistentVolumeClaim"
    spec: ClaimSpec


class ServicePort(Part):
    """A port of a service."""

    name: Name
    port: int = Field(ge=1, le=65535)
    target_port: int = Field(ge=1, le=65535)


class ServiceSpec(Part):
    """Which pods answer."""

    selector: dict[str, str] = Field(min_length=1)
    ports: tuple[ServicePort, ...] = Field(min_length=1)


class Service(Object):
    """An address in front of pods."""

    api_version: Literal["v1"] = "v1"
    kind: Literal["Service"] = "Service"
    spec: ServiceSpec


class LeaderWorkerTemplate(Part):
    """A group of pods that live and die together."""

    size: int = Field(ge=1)
    restart_policy: Literal["RecreateGroupOnPodRestart"] = "RecreateGroupOnPodRestart"
    leader_template: PodTemplate
    worker_template: PodTemplate


class LeaderWorkerSetSpec(Part):
    """Groups of pods."""

    replicas: int = Field(default=1, ge=1)
    leader_worker_template: LeaderWorkerTemplate


class LeaderWorkerSet(Object):
    """One engine over several nodes."""

    api_version: Literal["leaderworkerset.x-k8s.io/v1"] = "leaderworkerset.x-k8s.io/v1"
    kind: Literal["LeaderWorkerSet"] = "LeaderWorkerSet"
    spec: LeaderWorkerSetSpec


class Selector(Part):
    """Labels of pods."""

    match_labels: dict[str, str]


class KubernetesDeploymentSpec(Part):
    """Pods that are all alike."""

    replicas: int = Field(default=1, ge=1)
    selector: Selector
    template: PodTemplate

    @model_validator(mode="after")
    def _selected(self) -> KubernetesDeploymentSpec:
        if not self.selector.match_labels.items() <= self.template.metadata.labels.items():
            raise ValueError("the selector does not match the pods of the template")
        return self


class KubernetesDeployment(Object):
    """The router."""

    api_version: Literal["apps/v1"] = "apps/v1"
    kind: Literal["Deployment"] = "Deployment"
    spec: KubernetesDeploymentSpec
