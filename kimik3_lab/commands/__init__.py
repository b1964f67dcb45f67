"""The subcommands of ``k3lab``. Each module holds one function with its options, or a group.

A command imports the part of the lab that it runs inside its function: ``k3lab --help`` must not
load torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from kimik3_lab.commands._errors import CommandError
from kimik3_lab.commands.anatomy import anatomy
from kimik3_lab.commands.bench import bench
from kimik3_lab.commands.compare import compare
from kimik3_lab.commands.deploy import deploy
from kimik3_lab.commands.doctor import doctor
from kimik3_lab.commands.lab import lab
from kimik3_lab.commands.plan import plan
from kimik3_lab.commands.progress import progress
from kimik3_lab.commands.reproduce import app as reproduce
from kimik3_lab.commands.serve import serve
from kimik3_lab.commands.simulate import simulate
from kimik3_lab.commands.trace import trace
from kimik3_lab.commands.vllm_cpu import app as vllm_cpu

__all__ = ["COMMANDS", "GROUPS", "CommandError"]

#: Subcommand name to function, in the order that ``--help`` shows.
COMMANDS: dict[str, Callable[..., Any]] = {
    "doctor": doctor,
    "lab": lab,
    "anatomy": anatomy,
    "serve": serve,
    "bench": bench,
    "compare": compare,
    "simulate": simulate,
    "plan": plan,
    "trace": trace,
    "deploy": deploy,
    "progress": progress,
}
#: Groups of subcommands.
GROUPS: dict[str, typer.Typer] = {"vllm-cpu": vllm_cpu, "reproduce": reproduce}
