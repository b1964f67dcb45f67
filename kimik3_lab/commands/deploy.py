"""``k3lab deploy``: the vLLM commands that serve Kimi K3 on given machines, with reasons.

Needs typer and rich. Lesson 13 uses it. What is asked for and cannot work ends with status 3 and
the nearest that does.
"""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kimik3_lab.commands._deploy_output import body, print_commands, print_reasons
from kimik3_lab.commands._errors import CommandError

if TYPE_CHECKING:
    from kimik3_lab.deploy.spec import RefusedError

__all__ = ["REFUSED", "deploy"]

#: Status of a deployment that cannot work; 1 is any other failure, 2 a wrong option.
REFUSED = 3


class _Hardware(StrEnum):
    b300 = "b300"
    gb300 = "gb300"
    b200 = "b200"
    h200 = "h200"


class _Strategy(StrEnum):
    tp = "tp"
    tep = "tep"
    dep = "dep"
    tp_pp = "tp-pp"
    dcp = "dcp"
    pd = "pd"


class _Spec(StrEnum):
    none = "none"
    dspark = "dspark"


class _Workload(StrEnum):
    published = "published"
    chat = "chat"
    agents = "agents"
    long_context = "long-context"
    batch = "batch"


class _Defaults(StrEnum):
    common = "common"
    release = "release"


class _CacheType(StrEnum):
    auto = "auto"
    fp8 = "fp8"


class _Manifest(StrEnum):
    shell = "shell"
    ray = "ray"
    slurm = "slurm"
    kubernetes = "kubernetes"
    compose = "compose"


def _option(text: str, panel: str | None = None, **settings: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=panel, **settings)


_SIZES, _MODEL, _OUTPUT = "Sizes", "Model and nodes", "Output"


def deploy(
    vllm: Annotated[
        str, _option("Release, 0.27.1 to 0.33.0; 0.29 is short for 0.29.0.")
    ] = "0.33.0",
    hardware: Annotated[
        _Hardware, _option("GPU: nodes of 8, of gb300 trays of 4.")
    ] = _Hardware.b300,
    nodes: Annotated[int, _option("Nodes.", min=1, max=128)] = 1,
    strategy: Annotated[
        _Strategy,
        _option(
            "tp: split matrices. tep: and keep experts whole. dep: copies of the trunk. tp-pp: "
            "layers between nodes. dcp: share out a sequence's MLA rows. pd: prefill and decode "
            "apart."
        ),
    ] = _Strategy.tp,
    spec: Annotated[_Spec, _option("Drafter.")] = _Spec.none,
    workload: Annotated[
        _Workload, _option("What the server should be good at.")
    ] = _Workload.published,
    defaults: Annotated[
        _Defaults,
        _option(
            "Where releases differ on their own: write one value for all, or the release's own."
        ),
    ] = _Defaults.common,
    num_speculative_tokens: Annotated[
        int, _option("Tokens of a draft.", _SIZES, min=1, max=32)
    ] = 8,
    max_model_len: Annotated[
        int | None,
        _option("Tokens of prompt and answer.", _SIZES, min=1, show_default="what fits"),
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        _option("Share of the memory for vLLM.", _SIZES, show_default="the published one"),
    ] = None,
    kv_cache_dtype: Annotated[
        _CacheType | None,
        _option("Type of the MLA rows.", _SIZES, show_default="the workload's"),
    ] = None,
    tensor_parallel_size: Annotated[
        int | None,
        _option("GPUs that split a matrix.", _SIZES, min=1, show_default="the strategy's"),
    ] = None,
    decode_context_parallel_size: Annotated[
        int | None,
        _option("GPUs that share a sequence.", _SIZES, min=1, show_default="all, with dcp"),
    ] = None,
    prefill_nodes: Annotated[
        int | None, _option("Nodes for prefill.", _SIZES, min=1, show_default="as few as fit")
    ] = None,
    model: Annotated[
        str | None, _option("Checkpoint.", _MODEL, show_default="moonshotai/Kimi-K3")
    ] = None,
    drafter: Annotated[
        str | None,
        _option("Its drafter.", _MODEL, show_default="RedHatAI/Kimi-K3-speculator.dspark"),
    ] = None,
    hosts: Annotated[
        str | None,
        _option("Addresses of the nodes, with commas.", _MODEL, show_default="examples"),
    ] = None,
    port: Annotated[int, _option("Port of the endpoint.", _MODEL, min=1, max=65535)] = 30000,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Say of every option why it is there.", rich_help_panel=_OUTPUT
        ),
    ] = False,
    manifest: Annotated[
        _Manifest | None, _option("Write files that start it, instead of commands.", _OUTPUT)
    ] = None,
    output: Annotated[Path | None, _option("Folder for the files.", _OUTPUT)] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write over files.", rich_help_panel=_OUTPUT)
    ] = False,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print JSON.", rich_help_panel=_OUTPUT)
    ] = False,
) -> None:
    """Print the vLLM commands that serve Kimi K3, from one node to many.

    Every command is checked against the options of its release. What does
    not fit is refused (status 3) with the nearest that does.

    For example:

    k3lab deploy --vllm 0.27.1 --hardware b300 --spec dspark --explain

    k3lab deploy --hardware h200 --nodes 2 --strategy tep --workload chat

    k3lab deploy --nodes 3 --strategy pd --manifest kubernetes --output k3
    """
    from kimik3_lab.deploy.flags import releases
    from kimik3_lab.deploy.manifests.write import ManifestError, write_files
    from kimik3_lab.deploy.manifests.write import manifest as make
    from kimik3_lab.deploy.plan import plan
    from kimik3_lab.deploy.spec import DeploymentSpec, RefusedError

    given = {
        name: value.value if isinstance(value, StrEnum) else value
        for name, value in locals().items()
        if name in DeploymentSpec.model_fields and value is not None
    }
    if hosts is not None:
        given["hosts"] = tuple(host.strip() for host in hosts.split(","))
    if (manifest is None) != (output is None):
        raise CommandError("--manifest KIND and --output DIR go together: give both or none")
    try:
        wanted = DeploymentSpec.model_validate(given)
    except ValueError as error:
        raise CommandError(_sentences(error)) from error
    try:
        found = plan(wanted)
        if manifest is not None and output is not None:
            files = make(found, manifest.value)
            for path in write_files(files, output, force=force):
                typer.echo(str(path))
            return
    except RefusedError as error:
        _refuse(error, json_output)
    except ManifestError as error:
        raise CommandError(str(error)) from error
    if json_output:
        typer.echo(json.dumps(body(found, releases()), indent=2))
        return
    print_commands(found)
    if explain:
        print_reasons(found)


def _sentences(error: ValueError) -> str:
    """Say what pydantic found, without its own preamble."""
    errors = getattr(error, "errors", None)
    if errors is None:
        return str(error)
    lines = []
    for found in errors():
        where = ".".join(str(part).replace("_", "-") for part in found["loc"])
        text = found["msg"].removeprefix("Value error, ")
        lines.append(f"--{where}: {text}" if where else text)
    return "; ".join(lines)


def _refuse(error: RefusedError, json_output: bool) -> None:
    refusal = error.refusal
    if json_output:
        body = {"refused": refusal.reason, "source": refusal.source, "alternative": None}
        if refusal.alternative is not None:
            body["alternative"] = f"k3lab deploy {refusal.alternative.command_line()}"
        typer.echo(json.dumps(body, indent=2))
    else:
        typer.secho(f"k3lab: {refusal.reason}", fg="red", err=True)
        typer.echo(f"Known from: {refusal.source}", err=True)
        if refusal.alternative is None:
            typer.echo("Nothing near it fits.", err=True)
        else:
            line = f"k3lab deploy {refusal.alternative.command_line()}"
            typer.echo(f"The nearest that fits:\n  {line}", err=True)
    raise typer.Exit(REFUSED)
