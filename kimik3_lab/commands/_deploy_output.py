"""What ``k3lab deploy`` shows of a plan: commands, reasons, or plain content for JSON.

Needs rich.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kimik3_lab.deploy.command import Deployment, Node

__all__ = ["body", "print_commands", "print_reasons"]

#: Width of the table of reasons where nothing has a width.
_WIDE = 160


def body(found: Deployment, releases: tuple[str, ...]) -> dict[str, Any]:
    """Plain content for JSON."""
    return {
        "spec": found.spec.model_dump(mode="json"),
        "recorded_releases": list(releases),
        "notes": list(found.notes),
        "router": None if found.router is None else list(found.router),
        "groups": [
            {
                "role": group.role,
                "layout": group.layout,
                "gpus_per_node": group.gpus_per_node,
                "memory": group.memory,
                "context": group.context,
                "sequences": group.sequences,
                "nodes": [
                    {
                        "rank": node.rank,
                        "host": node.host,
                        "argv": node.argv,
                        "environment": node.environment(),
                        "options": [
                            {**option.model_dump(), "since": option.since}
                            for option in node.options
                        ],
                        "variables": [variable.model_dump() for variable in node.variables],
                    }
                    for node in group.nodes
                ],
            }
            for group in found.groups
        ],
    }


def print_commands(found: Deployment) -> None:
    """Print everything as lines of shell: what is not a command is a comment."""
    from rich.console import Console

    console = Console()
    for line in _lines(found):
        style = "dim" if line.startswith("#") else None
        # Soft-wrapped: a terminal breaks long lines, and copying them does not.
        console.print(line, style=style, soft_wrap=True, markup=False, highlight=False)


def _lines(found: Deployment) -> Iterator[str]:
    spec = found.spec
    yield f"# Kimi K3 on vLLM {spec.vllm}, {spec.nodes} x {spec.hardware}, {spec.strategy}"
    for note in found.notes:
        yield f"# Note: {note}."
    for group in found.groups:
        memory = group.memory
        yield (
            f"# {group.role}: {group.layout}. One GPU: {memory['weights'] / 1e9:.1f} GB weights, "
            f"{memory['room'] / 1e9:.1f} GB room, {group.sequences} sequences of "
            f"{group.context:,} tokens."
        )
        for node in group.nodes:
            yield ""
            yield f"# {group.role}, rank {node.rank} of {len(group.nodes)}, on {node.host}"
            for name, value in node.environment().items():
                yield f"export {name}={shlex.quote(value)}"
            yield from _command(node)
    if found.router is not None:
        yield ""
        yield "# router"
        yield shlex.join(found.router)


def _command(node: Node) -> Iterator[str]:
    yield f"vllm serve {shlex.quote(node.model)} \\"
    lines = [shlex.join(option.words) for option in node.options]
    filled = node.arguments()
    position = 1
    for number, option in enumerate(node.options):
        size = len(option.words)
        lines[number] = shlex.join(filled[position : position + size])
        position += size
    yield from (f"  {line} \\" for line in lines[:-1])
    yield f"  {lines[-1]}"


def print_reasons(found: Deployment) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:  # a pipe or a file has no width to fit
        console = Console(width=_WIDE)
    for group in found.groups:
        table = Table(title=f"\nWhy: {group.role}, {group.layout}", title_justify="left")
        for header in ("option or variable", "since", "why", "source"):
            table.add_column(header, overflow="fold")
        seen: set[str] = set()
        for node in group.nodes:
            for option in node.options:
                if option.name not in seen:
                    seen.add(option.name)
                    table.add_row(option.name, option.since, option.why, option.source)
        for variable in group.nodes[0].variables:
            name = f"{variable.name}={variable.value}"
            table.add_row(name, "", variable.why, variable.source)
        console.print(table)
