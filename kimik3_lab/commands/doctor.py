"""``k3lab doctor``: is this machine ready for the lessons, and if not, what to do."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["doctor"]

_COLORS = {"OK": "green", "WARN": "yellow", "FAIL": "red"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this machine for the lessons; exit with status 1 if they cannot run."""
    from kimik3_lab.teaching.doctor import run_checks

    checks = run_checks()
    failed = sum(check.status == "FAIL" for check in checks)
    if as_json:
        import json
        from dataclasses import asdict

        body = {"ready": not failed, "checks": [asdict(check) for check in checks]}
        typer.echo(json.dumps(body, indent=2))
        raise typer.Exit(1 if failed else 0)
    width = max(len(check.name) for check in checks)
    for check in checks:
        # Plain lines, not a table: they can be copied into a bug report whole.
        status = typer.style(f"{check.status:4}", fg=_COLORS[check.status])
        typer.echo(f"{status}  {check.name:{width}}  {check.detail}")
        if check.mend:
            typer.echo(f"      {'':{width}}  -> {check.mend}")
    warned = sum(check.status == "WARN" for check in checks)
    if failed:
        typer.echo(f"Not ready: {failed} of {len(checks)} checks failed.")
        raise typer.Exit(1)
    with_warnings = f" with {warned} warning{'s' * (warned > 1)}" if warned else ""
    typer.echo(f"Ready{with_warnings}. Start with: {_this_command()} lab")


def _this_command() -> str:
    """``k3lab`` as the reader's shell finds it: its path, unless the environment is activated."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "k3lab" and shutil.which("k3lab") is None else "k3lab"
