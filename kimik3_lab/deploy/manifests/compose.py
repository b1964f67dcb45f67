"""Docker Compose: one file for each node, since Compose starts containers of one host.

Needs pydantic and pyyaml. Facts: https://docs.docker.com/reference/compose-file/ and
https://docs.docker.com/compose/how-tos/gpu-support/. Containers share the network and the shared
memory of the host: engines of several nodes meet at its addresses.
"""

from __future__ import annotations

from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from kimik3_lab.deploy.command import Deployment, GroupPlan, Node

__all__ = ["ComposeFile", "compose_files", "image"]

_STRICT = ConfigDict(frozen=True, extra="forbid")


def image(version: str) -> str:
    """Image of a release, as the vLLM project names them."""
    return f"vllm/vllm-openai:v{version}"


class Device(BaseModel):
    """GPUs that a container gets."""

    model_config = _STRICT
    driver: Literal["nvidia"] = "nvidia"
    count: int = Field(ge=1)
    capabilities: tuple[Literal["gpu"], ...] = ("gpu",)


class Reservations(BaseModel):
    """Part of Compose's ``deploy``."""

    model_config = _STRICT
    devices: tuple[Device, ...] = Field(min_length=1)


class Resources(BaseModel):
    """Part of Compose's ``deploy``."""

    model_config = _STRICT
    reservations: Reservations


class Deploy(BaseModel):
    """Compose's ``deploy``."""

    model_config = _STRICT
    resources: Resources


class Healthcheck(BaseModel):
    """When a container counts as healthy; ``start_period`` is the time to load the weights."""

    model_config = _STRICT
    test: tuple[str, ...] = Field(min_length=2)
    interval: str = "10s"
    timeout: str = "5s"
    retries: int = 3
    start_period: str = "3600s"


class ComposeService(BaseModel):
    """One container."""

    model_config = _STRICT
    image: str = Field(pattern=r"^[\w./-]+:[\w.-]+$")
    entrypoint: tuple[str, ...]
    command: tuple[str, ...]
    environment: dict[str, str]
    network_mode: Literal["host"] = "host"
    ipc: Literal["host"] = "host"
    ulimits: dict[str, int] = {"memlock": -1, "stack": 67108864}
    volumes: tuple[str, ...] = ("huggingface:/root/.cache/huggingface",)
    restart: Literal["unless-stopped", "no"] = "unless-stopped"
    deploy: Deploy
    healthcheck: Healthcheck | None = None
    #: Until it is killed; Compose waits 10 seconds by default.
    stop_grace_period: str | None = Field(default=None, pattern=r"^\d+s$")

    @model_validator(mode="after")
    def _plain(self) -> ComposeService:
        for text in (*self.command, *self.environment.values()):
            if "$" in text:
                raise ValueError(f"Compose would fill in {text!r}: write $$ for $")
        if self.entrypoint != ("vllm", "serve"):
            raise ValueError(f"expected the entry point vllm serve, got {self.entrypoint}")
        if ("--headless" in self.command) == (self.healthcheck is not None):
            raise ValueError("a node has a health check if and only if it answers HTTP")
        return self


class ComposeFile(BaseModel):
    """One host's file."""

    model_config = _STRICT
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    services: dict[str, ComposeService] = Field(min_length=1)
    volumes: dict[str, None]

    @model_validator(mode="after")
    def _volumes(self) -> ComposeFile:
        for name, service in self.services.items():
            for volume in service.volumes:
                if not volume.startswith("/") and volume.split(":")[0] not in self.volumes:
                    raise ValueError(f"{name}: the volume {volume} is not declared")
        return self

    def render(self) -> str:
        """Text of the file."""
        body = self.model_dump(mode="json", exclude_none=True) | {"volumes": self.volumes}
        return yaml.safe_dump(body, sort_keys=False, width=120)

    @classmethod
    def parse(cls, text: str) -> ComposeFile:
        """Read a file back; unknown keys are errors."""
        return cls.model_validate(yaml.safe_load(text))


def _service(deployment: Deployment, group: GroupPlan, node: Node) -> ComposeService:
    url = f"http://127.0.0.1:{deployment.spec.port}/health"
    devices = (Device(count=group.gpus_per_node),)
    return ComposeService(
        image=image(deployment.spec.vllm),
        entrypoint=("vllm", "serve"),
        command=tuple(node.arguments()),
        environment=node.environment(),
        deploy=Deploy(resources=Resources(reservations=Reservations(devices=devices))),
        healthcheck=Healthcheck(test=("CMD", "curl", "-sf", url)) if node.answers else None,
        stop_grace_period=None if node.stop_s is None else f"{node.stop_s}s",
    )


def compose_files(deployment: Deployment) -> dict[str, ComposeFile]:
    """File name to file, one a node.

    Examples
    --------
    >>> from kimik3_lab.deploy.plan import plan
    >>> from kimik3_lab.deploy.spec import DeploymentSpec
    >>> list(compose_files(plan(DeploymentSpec(hardware="b200", nodes=2))))
    ['compose.serve-0.yaml', 'compose.serve-1.yaml']
    """
    files = {}
    for group in deployment.groups:
        for node in group.nodes:
            name = f"{group.role}-{node.rank}"
            files[f"compose.{name}.yaml"] = ComposeFile(
                name=f"k3-{name}",
                services={"vllm": _service(deployment, group, node)},
                volumes={"huggingface": None},
            )
    return files
