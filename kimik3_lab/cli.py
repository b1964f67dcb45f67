"""The ``k3lab`` command: one subcommand a task, each in a module of :mod:`kimik3_lab.commands`.

Needs typer. A command module imports what it runs only when it runs: ``k3lab --help`` is quick.
"""

from __future__ import annotations

import sys

try:
    import typer

    from kimik3_lab import __version__
    from kimik3_lab.commands import COMMANDS, GROUPS, CommandError
except KeyboardInterrupt:  # loading takes a moment, and main() cannot catch it yet
    print("k3lab: interrupted", file=sys.stderr)
    sys.exit(130)

__all__ = ["app", "main"]

app = typer.Typer(
    name="k3lab",
    help="Kimi K3 Serving Lab: check the machine, take the model apart, serve it, measure it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _function in COMMANDS.items():
    app.command(_name)(_function)
for _name, _group in GROUPS.items():
    app.add_typer(_group, name=_name)


@app.callback(invoke_without_command=True)
def _version(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        typer.echo(f"k3lab {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line; an expected failure prints one line and exits with status 1."""
    try:
        app()
    except CommandError as error:
        typer.secho(f"k3lab: {error}", fg="red", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        typer.secho("k3lab: interrupted", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
