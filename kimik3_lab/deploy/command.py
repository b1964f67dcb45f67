"""An option of ``vllm serve`` with its reason, and the commands that options add up to.

Needs pydantic. :mod:`kimik3_lab.deploy.options` chooses, this module holds: what a node runs, with
which environment, checked against the release on creation.
"""

from __future__ import annotations

from functools import lru_cache

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kimik3_lab.deploy.flags import check_command, load_release, releases
from kimik3_lab.deploy.spec import DeploymentSpec

__all__ = ["HEAD", "SELF", "Deployment", "GroupPlan", "Node", "Option", "Variable", "first_release"]

#: Stand for the address of a group's first node, and for a node's own.
HEAD, SELF = "@head@", "@self@"
_FROZEN = ConfigDict(frozen=True, extra="forbid")


class Option(BaseModel):
    """One option, why it is there, and who says so. ``value`` is None for a switch."""

    model_config = _FROZEN

    name: str = Field(pattern=r"^--[a-z0-9-]+$")
    value: str | None = None
    why: str = Field(min_length=1)
    source: str = Field(min_length=1)

    @property
    def words(self) -> tuple[str, ...]:
        """As it stands on the command line."""
        return (self.name,) if self.value is None else (self.name, self.value)

    @property
    def since(self) -> str:
        """First recorded release that knows it."""
        return first_release(self.name)


class Variable(BaseModel):
    """One variable of the environment."""

    model_config = _FROZEN

    name: str = Field(pattern=r"^[A-Z][A-Z0-9_]*$")
    value: str
    why: str = Field(min_length=1)
    source: str = Field(min_length=1)


@lru_cache
def first_release(option: str) -> str:
    """Say which recorded release was the first to know an option.

    Examples
    --------
    >>> first_release("--kda-decode-backend"), first_release("--max-num-seqs")
    ('0.30.0', '0.27.1 or before')
    """
    known = releases()
    first = next((version for version in known if option in load_release(version)), None)
    if first is None:
        raise ValueError(f"{option} is an option of no recorded release ({', '.join(known)})")
    return f"{first} or before" if first == known[0] else first


class Node(BaseModel):
    """What one node runs.

    Attributes
    ----------
    role, rank
        Of its group: ``serve``, ``prefill`` or ``decode``; 0 is the head.
    host, head
        Addresses of this node and of the head of its group.
    """

    model_config = _FROZEN

    role: str
    rank: int = Field(ge=0)
    host: str
    head: str
    model: str
    options: tuple[Option, ...]
    variables: tuple[Variable, ...] = ()

    def _filled(self, text: str, head: str, own: str) -> str:
        return text.replace(HEAD, head).replace(SELF, own)

    def arguments(self, head: str | None = None, own: str | None = None) -> list[str]:
        """Return what follows ``vllm serve``, with other addresses if wanted."""
        words = [self.model, *(word for option in self.options for word in option.words)]
        return [self._filled(w, head or self.head, own or self.host) for w in words]

    @property
    def argv(self) -> list[str]:
        """The command as a list of words."""
        return ["vllm", "serve", *self.arguments()]

    def environment(self, head: str | None = None, own: str | None = None) -> dict[str, str]:
        """Return the variables to set."""
        return {
            v.name: self._filled(v.value, head or self.head, own or self.host)
            for v in self.variables
        }

    @property
    def stop_s(self) -> int | None:
        """Seconds from being told to stop until it may be killed; None if it drops its answers.

        30 more than ``--shutdown-timeout``, for what comes after the last answer.
        """
        found = (o.value for o in self.options if o.name == "--shutdown-timeout")
        drain = next(found, None)
        return None if drain is None else int(drain) + 30

    @property
    def answers(self) -> bool:
        """Whether it serves HTTP."""
        return all(option.name != "--headless" for option in self.options)


class GroupPlan(BaseModel):
    """Nodes that form one engine (or, with data parallelism, several behind one address)."""

    model_config = _FROZEN

    role: str
    layout: str
    gpus_per_node: int = Field(ge=1)
    nodes: tuple[Node, ...] = Field(min_length=1)
    #: Bytes on a GPU: see :class:`kimik3_lab.deploy.memory.Memory`.
    memory: dict[str, int]
    #: Sequences of the workload's length that fit at once, of all engines of the group.
    sequences: int = Field(ge=1)
    context: int = Field(ge=1)


class Deployment(BaseModel):
    """Commands for every node. Creating one checks each command against its release.

    Attributes
    ----------
    router
        Command that stands before prefill and decode; None if there is nothing to route.
    notes
        What to know before starting it.
    """

    model_config = _FROZEN

    spec: DeploymentSpec
    groups: tuple[GroupPlan, ...] = Field(min_length=1)
    router: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes in order."""
        return tuple(node for group in self.groups for node in group.nodes)

    @model_validator(mode="after")
    def _accepted(self) -> Deployment:
        if len(self.nodes) != self.spec.nodes:
            raise ValueError(f"{len(self.nodes)} commands for {self.spec.nodes} nodes")
        for node in self.nodes:
            names = [option.name for option in node.options]
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"{node.role} {node.rank}: given twice: {', '.join(twice)}")
            found = check_command(self.spec.vllm, node.arguments(), node.environment())
            if found:
                raise ValueError(
                    f"vLLM {self.spec.vllm} would not take the command of {node.role} "
                    f"{node.rank}: {'; '.join(map(str, found))}"
                )
        return self
