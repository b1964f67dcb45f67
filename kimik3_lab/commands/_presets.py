"""The rungs of the ladder as a list to read, for ``--preset '?'`` of ``serve`` and ``simulate``."""

from __future__ import annotations

import typer

__all__ = ["print_presets"]


def print_presets() -> None:
    """Print each rung's name, as ``--preset`` takes it, and what it changes."""
    from kimik3_lab.serving.presets import LADDER
    from kimik3_lab.simulation.switches import preset_id

    for rung in LADDER:
        beyond = " (beyond the published command)" if rung.beyond_published else ""
        typer.echo(f"{preset_id(rung):26} {rung.change}{beyond}")
