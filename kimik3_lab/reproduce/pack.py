"""What a reproduction pack contains: servers, client runs, and what makes a result count.

Needs pydantic. Lesson 13 and ``k3lab reproduce`` use it. A pack is checked when it is made and
again when it is read back: a command that its release would refuse, a seed that comes twice or a
cell of too few requests is no pack.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kimik3_lab.deploy.flags import check_command

__all__ = ["MIN_REQUESTS", "PACK_FILE", "Arm", "Cell", "Pack", "PackError", "Pin", "load_pack"]

#: Requests that a cell must have in its window: lesson 12 says why.
MIN_REQUESTS = 100
PACK_FILE = "pack.json"
_FROZEN = ConfigDict(frozen=True, extra="forbid")
_NAME = r"^[a-z0-9][a-z0-9.-]*$"


class PackError(ValueError):
    """A pack or a result that cannot be used; the message names it and says why."""


class Pin(BaseModel):
    """A default that moved between the two releases, and the value that both get here."""

    model_config = _FROZEN

    name: str
    before: str
    after: str
    pinned: str


class Arm(BaseModel):
    """One server: its command and environment.

    Attributes
    ----------
    name
        Also that of its script and of its folder of results.
    server, version
        ``vllm`` with its release, or ``k3lab``, the lab's own engine.
    drafts
        Tokens of a draft; 0 without speculation.
    arguments
        Words after ``vllm serve`` or ``k3lab serve``.
    environment
        Variables to set.
    """

    model_config = _FROZEN

    name: str = Field(pattern=_NAME)
    server: Literal["vllm", "k3lab"] = "vllm"
    version: str
    drafts: int = Field(ge=0)
    arguments: tuple[str, ...] = Field(min_length=1)
    environment: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _accepted(self) -> Arm:
        if self.server == "vllm":
            problems = check_command(self.version, self.arguments, self.environment)
            if found := [str(problem) for problem in problems if problem.fatal]:
                raise ValueError(f"{self.name}: vLLM {self.version} refuses: {'; '.join(found)}")
        return self


class Cell(BaseModel):
    """One run of the client: a closed loop of requests of one length."""

    model_config = _FROZEN

    arm: str
    name: str = Field(pattern=_NAME)
    concurrency: int = Field(ge=1)
    prompt_tokens: int = Field(ge=1)
    output_tokens: int = Field(ge=2)
    num_requests: int = Field(ge=1)
    warmup_requests: int = Field(default=3, ge=0)
    seed: int = Field(ge=0)


class Pack(BaseModel):
    """Servers and client runs, in the order in which they run.

    Attributes
    ----------
    kind
        ``b300``, or ``cpu``: the same, scaled down.
    min_requests
        Requests that must end in a cell's window for it to count.
    pins
        Defaults that moved between the releases, with their value here.
    not_pinned
        Options with a default that only the newer release has: it cannot be set on the other.
    model, tokenizer
        Name that requests carry; folder with ``tokenizer.json`` for exact prompt lengths, if there
        is one.
    temperature
        None sends none, as the published client: the checkpoint's own value holds.
    """

    model_config = _FROZEN

    schema_name: Literal["kimik3-lab/reproduction-pack"] = "kimik3-lab/reproduction-pack"
    schema_version: Literal[1] = 1
    kind: Literal["b300", "cpu"]
    what: str
    device: str
    port: int = Field(default=30000, ge=1, le=65535)
    min_requests: int = Field(default=MIN_REQUESTS, ge=1)
    model: str | None = None
    tokenizer: str | None = None
    temperature: float | None = Field(default=None, ge=0)
    arms: tuple[Arm, ...] = Field(min_length=1)
    cells: tuple[Cell, ...] = Field(min_length=1)
    pins: tuple[Pin, ...] = ()
    not_pinned: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _fits_together(self) -> Pack:
        names = [arm.name for arm in self.arms]
        if len(set(names)) != len(names):
            raise ValueError(f"two servers have one name: {', '.join(names)}")
        places = [(cell.arm, cell.name) for cell in self.cells]
        if len(set(places)) != len(places):
            raise ValueError("two cells of one server have one name")
        for cell in self.cells:
            if cell.arm not in names:
                raise ValueError(f"cell {cell.name} belongs to no server: {cell.arm!r}")
            if cell.num_requests < max(self.min_requests, cell.concurrency):
                raise ValueError(
                    f"{cell.arm} {cell.name} has {cell.num_requests} requests; at least "
                    f"{self.min_requests} have to end in its window"
                )
        if self.kind == "b300" and self.min_requests < MIN_REQUESTS:
            raise ValueError(f"a cell needs {MIN_REQUESTS} requests, got {self.min_requests}")
        seeds = [cell.seed for cell in self.cells]
        if len(set(seeds)) != len(seeds):
            raise ValueError("a seed comes twice: its prompts would be found in the prefix cache")
        for arm in self.arms:
            if not self.cells_of(arm):
                raise ValueError(f"nothing is asked of server {arm.name}")
        return self

    def cells_of(self, arm: Arm) -> tuple[Cell, ...]:
        """Client runs against one server."""
        return tuple(cell for cell in self.cells if cell.arm == arm.name)

    def dump(self) -> str:
        """Return the JSON that :func:`load_pack` reads back."""
        return json.dumps(self.model_dump(mode="json"), indent=1) + "\n"


def load_pack(folder: Path) -> Pack:
    """Read the description in a pack's folder.

    Raises
    ------
    PackError
        If there is none, or it is damaged.
    """
    path = folder / PACK_FILE
    try:
        return Pack.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PackError(
            f"no {PACK_FILE} in {folder}: name the folder that `k3lab reproduce b300` wrote"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise PackError(f"{path} is damaged: {where}: {first['msg']}") from error
