"""``k3lab reproduce``: a pack for whoever has the machine, and the table of what came out."""

from __future__ import annotations

import socket
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kimik3_lab.commands._errors import CommandError

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    help="Write a benchmark of two servers that others can run, and check what they send back.",
)
_Defaults = StrEnum("_Defaults", ["common", "release"])
_OUTPUT = Annotated[Path, typer.Option(metavar="DIR", help="Folder to make.")]
_SEED = Annotated[int | None, typer.Option(help="Draw these prompts.", show_default="fresh ones")]


@app.command()
def b300(
    output: _OUTPUT = Path("reproduce-b300"),
    baseline: Annotated[str, typer.Option(help="Earlier release of vLLM.")] = "0.27.1",
    improved: Annotated[str, typer.Option(help="Later release of vLLM.")] = "0.30.0",
    defaults: Annotated[
        _Defaults,
        typer.Option(
            help="common: every default that moved gets one value in both. release: each keeps "
            "its own, written down."
        ),
    ] = _Defaults.common,
    model: Annotated[
        str | None, typer.Option(help="Checkpoint.", show_default="moonshotai/Kimi-K3")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Folder with tokenizer.json, there, for exact prompt lengths."
        ),
    ] = None,
    seed: _SEED = None,
) -> None:
    """Write a ready pack for a node of eight B300.

    Both servers with eight, four and no draft tokens; at least 100 requests
    in each cell's window, each with prompts of its own; counters of accepted
    and of cached tokens before and after; the MoE backend from the log.

    There: ./run.sh, then k3lab reproduce report DIR.
    """
    from kimik3_lab.reproduce.b300 import b300_pack
    from kimik3_lab.reproduce.scripts import write_pack

    try:
        pack = b300_pack(
            baseline, improved, defaults=defaults.value, tokenizer=tokenizer, model=model, seed=seed
        )  # type: ignore[arg-type]
        folder = write_pack(pack, output)
    except (ValueError, OSError) as error:
        raise CommandError(str(error)) from error
    requests = sum(cell.num_requests for cell in pack.cells)
    typer.echo(
        f"wrote {folder}: {len(pack.arms)} servers, {len(pack.cells)} cells, {requests:,} requests"
    )
    for pin in pack.pins:
        typer.echo(f"pinned {pin.name} = {pin.pinned} (was {pin.before}, became {pin.after})")
    typer.echo(f"There: read {folder / 'README.md'}, then {folder / 'run.sh'}")


@app.command()
def cpu(
    output: _OUTPUT = Path("reproduce-cpu"),
    requests: Annotated[int, typer.Option(help="Requests of each cell.", min=8)] = 24,
    concurrency: Annotated[str, typer.Option(metavar="N,N,...", help="Streams.")] = "1,4",
    port: Annotated[int, typer.Option(help="Port of the servers; 0 takes a free one.")] = 0,
    venv: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Environment of vLLM.", show_default=".venv-vllm"),
    ] = None,
    seed: _SEED = None,
) -> None:
    """Run the same pack here, scaled down: the tiny K3 in vLLM on the CPU.

    Takes a minute or two on an idle machine. A folder whose run was cut off
    goes on where it was.
    """
    from kimik3_lab.reproduce.cpu import cpu_pack, run_pack
    from kimik3_lab.reproduce.pack import PACK_FILE, load_pack
    from kimik3_lab.reproduce.scripts import write_pack
    from kimik3_lab.vllm_cpu.serve import VllmCpuError, find_vllm

    try:
        streams = tuple(int(part) for part in concurrency.split(","))
    except ValueError:
        raise CommandError(
            f"--concurrency takes numbers such as 1,4, got {concurrency!r}"
        ) from None
    try:
        find_vllm(venv)
        if (output / PACK_FILE).is_file():
            pack = load_pack(output)
        else:
            pack = cpu_pack(requests=requests, concurrencies=streams, seed=seed)
            write_pack(pack, output)
        run_pack(pack, output, port=port or _free_port(), venv=venv)
    except (VllmCpuError, ValueError, OSError) as error:
        raise CommandError(str(error)) from error
    report(output)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a pack that was run.")],
) -> None:
    """Turn a pack's results into the table of lesson 12.

    Prints it, and writes report.md and report.json beside the results. Ends
    with status 1 if there is a cell that must not be quoted; it says which,
    and why.
    """
    from kimik3_lab.reproduce.pack import PackError
    from kimik3_lab.reproduce.report import markdown, read_report, save_report

    try:
        found = read_report(folder)
        paths = save_report(found, folder)
    except (PackError, OSError) as error:
        raise CommandError(str(error)) from error
    typer.echo(markdown(found))
    typer.echo(f"wrote {' and '.join(map(str, paths))}")
    if found.problems:
        raise CommandError(f"{len(found.problems)} things must be mended first: see above")
