"""What somebody wants to deploy, in one checked value, and the refusal of what cannot work.

Needs pydantic. Lesson 13 and ``k3lab deploy`` build a :class:`DeploymentSpec`;
:func:`kimik3_lab.deploy.plan.plan` turns it into commands.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from kimik3_lab.deploy.flags import load_release

__all__ = [
    "DRAFTER",
    "HARDWARE",
    "MODEL",
    "STRATEGIES",
    "WORKLOADS",
    "DeploymentSpec",
    "Refusal",
    "RefusedError",
]

#: The checkpoint, and the drafter of the published comparison.
MODEL = "moonshotai/Kimi-K3"
DRAFTER = "RedHatAI/Kimi-K3-speculator.dspark"

Hardware = Literal["b300", "gb300", "b200", "h200"]
Strategy = Literal["tp", "tep", "dep", "tp-pp", "dcp", "pd"]
WorkloadName = Literal["published", "chat", "agents", "long-context", "batch"]
HARDWARE: tuple[str, ...] = get_args(Hardware)
STRATEGIES: tuple[str, ...] = get_args(Strategy)
WORKLOADS: tuple[str, ...] = get_args(WorkloadName)

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.:-]*[A-Za-z0-9])?")


class DeploymentSpec(BaseModel):
    """What to serve Kimi K3 on, and how.

    Attributes
    ----------
    vllm
        A recorded release; ``0.29`` is short for ``0.29.0``.
    hardware, nodes
        GPU, and how many nodes of it: 8 GPUs each, of a GB300 rack 4 (a tray).
    strategy
        ``tp`` splits every matrix over all GPUs; ``tep`` too, but leaves experts whole; ``dep``
        gives each GPU a copy of the trunk and requests of its own, experts are spread over all;
        ``tp-pp`` splits matrices inside a node and layers between nodes; ``dcp`` is ``tp`` with the
        MLA rows of a sequence shared out; ``pd`` gives prefill and decode nodes of their own.
    spec, num_speculative_tokens
        Drafter, and its tokens a step.
    workload
        Sets how many sequences run at once, the tokens of a step and prefix caching.
    defaults
        ``common``: what releases decide differently on their own is written down with one value for
        all, so that two releases compare fairly. ``release``: written down with each release's own.
    max_model_len
        Tokens of a sequence; None lets vLLM take what fits (``auto``).
    gpu_memory_utilization
        Share of the memory that vLLM may use; None takes the published one for the hardware.
    tensor_parallel_size, decode_context_parallel_size, prefill_nodes
        Override what the strategy would choose.
    kv_cache_dtype
        None takes the workload's.
    launcher
        ``mp``: a command on every node, joined by address. ``ray``: one command on a Ray cluster.
    hosts
        Addresses of the nodes, first the head of each group; examples if nothing is given.

    Examples
    --------
    >>> DeploymentSpec(vllm="0.33", hardware="b300").vllm
    '0.33.0'
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    vllm: str = "0.33.0"
    hardware: Hardware = "b300"
    nodes: int = Field(default=1, ge=1, le=128)
    strategy: Strategy = "tp"
    spec: Literal["none", "dspark"] = "none"
    num_speculative_tokens: int = Field(default=8, ge=1, le=32)
    workload: WorkloadName = "published"
    defaults: Literal["common", "release"] = "common"
    max_model_len: int | None = Field(default=None, ge=1, le=1_048_576)
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    tensor_parallel_size: int | None = Field(default=None, ge=1)
    decode_context_parallel_size: int | None = Field(default=None, ge=1)
    prefill_nodes: int | None = Field(default=None, ge=1)
    kv_cache_dtype: Literal["auto", "fp8"] | None = None
    model: str = Field(default=MODEL, min_length=1, pattern=r"^[^-\s]\S*$")
    drafter: str = Field(default=DRAFTER, min_length=1, pattern=r"^[^-\s]\S*$")
    launcher: Literal["mp", "ray"] = "mp"
    port: int = Field(default=30000, ge=1, le=65535)
    hosts: tuple[str, ...] = ()

    @field_validator("vllm")
    @classmethod
    def _recorded(cls, version: str) -> str:
        return load_release(version).version

    @model_validator(mode="after")
    def _fits_together(self) -> DeploymentSpec:
        if self.hosts and len(self.hosts) != self.nodes:
            raise ValueError(f"got {len(self.hosts)} hosts for {self.nodes} nodes; give one a node")
        for host in self.hosts:
            if not _HOST.fullmatch(host):
                raise ValueError(f"{host!r} is no host name or address")
        if len(set(self.hosts)) != len(self.hosts):
            raise ValueError(f"a host is named twice: {', '.join(self.hosts)}")
        if self.decode_context_parallel_size and self.strategy != "dcp":
            raise ValueError(
                "decode_context_parallel_size belongs to the strategy dcp, "
                f"got {self.strategy}: leave it out, or take dcp"
            )
        if self.prefill_nodes and self.strategy != "pd":
            raise ValueError(
                f"prefill_nodes belongs to the strategy pd, got {self.strategy}: leave it out, or "
                "take pd"
            )
        return self

    @property
    def drafted(self) -> int:
        """Draft tokens a step; 0 without a drafter."""
        return self.num_speculative_tokens if self.spec == "dspark" else 0

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the nodes; from the range kept for documentation (RFC 5737) if not given."""
        return self.hosts or tuple(f"192.0.2.{rank + 1}" for rank in range(self.nodes))

    def command_line(self) -> str:
        """Arguments of ``k3lab deploy`` that ask for this.

        >>> DeploymentSpec(hardware="h200", nodes=2, strategy="tep").command_line()
        '--vllm 0.33.0 --hardware h200 --nodes 2 --strategy tep'
        """
        words = [f"--vllm {self.vllm} --hardware {self.hardware} --nodes {self.nodes}"]
        words.append(f"--strategy {self.strategy}")
        for name in type(self).model_fields:
            value = getattr(self, name)
            if name in ("vllm", "hardware", "nodes", "strategy", "launcher"):
                continue
            if value != type(self).model_fields[name].default:
                shown = ",".join(value) if isinstance(value, tuple) else value
                words.append(f"--{name.replace('_', '-')} {shown}")
        return " ".join(words)


class Refusal(BaseModel):
    """Why something is not deployed, with the nearest thing that is.

    Attributes
    ----------
    reason
        What does not work, with its numbers.
    source
        Where that is known from.
    alternative
        A specification that :func:`~kimik3_lab.deploy.plan.plan` accepts; None if none was found.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    reason: str
    source: str
    alternative: DeploymentSpec | None = None

    def __str__(self) -> str:
        if self.alternative is None:
            return f"{self.reason}; nothing near it fits"
        return f"{self.reason}; the nearest that fits: {self.alternative.command_line()}"


class RefusedError(ValueError):
    """A specification that cannot work; :attr:`refusal` says why and what does."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal
