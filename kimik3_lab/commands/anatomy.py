"""``k3lab anatomy``: what a Kimi K3 consists of, part by part, and what it costs to run.

Needs typer and rich. Lesson 01 derives what it prints.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kimik3_lab.commands._errors import CommandError

if TYPE_CHECKING:
    from kimik3_lab.performance.accounting import AnatomyReport
    from kimik3_lab.performance.placement import RankWeights

__all__ = ["anatomy"]

#: Columns that every digit needs; a narrower terminal gets rounded numbers.
_FULL_WIDTH = 116


class _Member(StrEnum):
    released = "released"
    tiny = "tiny"
    micro = "micro"


def anatomy(
    json_output: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of a table.")
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option("--model", help="Folder of a model: read the shape from its config.json."),
    ] = None,
    config: Annotated[
        _Member | None,
        typer.Option("--config", help="A member of the family; released if nothing is given."),
    ] = None,
) -> None:
    """Count parameters, bytes, arithmetic and memory of a Kimi K3, part by part."""
    from kimik3_lab.config import ConfigError, K3Config
    from kimik3_lab.performance.accounting import anatomy as account

    if model is not None and config is not None:
        raise CommandError(f"give --model or --config, not both (got {model} and {config.value})")
    if model is None:
        member = config or _Member.released
        name, shape = member.value, getattr(K3Config, member.value)()
    else:
        try:
            name, shape = str(model), K3Config.load(model)
        except (ConfigError, OSError) as error:
            raise CommandError(str(error)) from error
    report = account(shape)
    if json_output:
        import json

        typer.echo(json.dumps({"model": name, **report.to_dict()}, indent=2))
    else:
        _print_table(name, report)


def _print_table(name: str, report: AnatomyReport) -> None:
    from rich.console import Console
    from rich.table import Table

    from kimik3_lab.performance.accounting import ACTIVE_RULE, short_count

    console = Console()
    if not console.is_terminal:  # a pipe or a file has no width to fit
        console = Console(width=_FULL_WIDTH)
    number = "{:,}".format if console.width >= _FULL_WIDTH else short_count
    table = Table(title=f"Kimi K3, {name}", title_justify="left", show_footer=True)
    table.add_column("component", "total")
    columns = (
        ("tensors", report.tensors),
        ("parameters", report.total_parameters),
        ("bytes", report.checkpoint_bytes),
        ("active / token", report.active_parameters_per_token),
    )
    for header, total in columns:
        table.add_column(header, number(total), justify="right", no_wrap=True)
    table.add_column("evidence")
    for row in report.components:
        numbers = (row.tensors, row.parameters, row.bytes, row.active_parameters)
        table.add_row(row.label, *map(number, numbers), row.evidence)
    memory = report.sequence_memory
    console.print(table)
    console.print(
        f"A sequence keeps {memory.state_bytes:,} bytes of KDA state "
        f"({memory.kda_recurrent_bytes:,} recurrent, {memory.kda_conv_bytes:,} convolution) "
        f"and {memory.mla_bytes_per_token:,} bytes a token in its MLA layers."
    )
    if memory.all_mla_break_even is not None:
        console.print(
            f"From {memory.all_mla_break_even:,} tokens on, "
            "a model with MLA in every layer would keep more."
        )
    flops = report.flops_per_token
    console.print(
        f"A token takes {flops.fixed:,} operations, {flops.matmul_total:,} of them in matrices, "
        f"and {flops.mla_per_cached_token:,} for each token in the cache."
    )
    weights = ", ".join(f"{w.layout.name} {w.total:,}" for w in _common(report))
    console.print(f"Bytes of weights on one GPU: {weights}.")
    console.print(f"Active: {ACTIVE_RULE}.", style="dim")


def _common(report: AnatomyReport) -> list[RankWeights]:
    """Layouts of the two largest sizes up to two nodes, without copies of the trunk."""
    from kimik3_lab.performance.placement import possible_layouts, rank_weights

    layouts = [x for x in possible_layouts(report.config, 16) if x.data_parallel == 1]
    sizes = sorted({layout.gpus for layout in layouts})[-2:]
    return [rank_weights(report.config, x) for x in layouts if x.gpus in sizes]
