"""The subcommands of ``k3lab``. Each module holds one function with its options.

A command imports the part of the lab that it runs inside its function: ``k3lab --help`` must not
load torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kimik3_lab.commands._errors import CommandError
from kimik3_lab.commands.anatomy import anatomy
from kimik3_lab.commands.bench import bench
from kimik3_lab.commands.doctor import doctor
from kimik3_lab.commands.lab import lab
from kimik3_lab.commands.progress import progress
from kimik3_lab.commands.serve import serve

__all__ = ["COMMANDS", "CommandError"]

#: Subcommand name to function, in the order that ``--help`` shows.
COMMANDS: dict[str, Callable[..., Any]] = {
    "doctor": doctor,
    "lab": lab,
    "anatomy": anatomy,
    "serve": serve,
    "bench": bench,
    "progress": progress,
}
