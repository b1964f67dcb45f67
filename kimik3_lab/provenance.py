"""Where a number came from: versions, machine, date, commit and command of a measurement.

Needs the standard library only. Every JSON result that the lab writes carries this block.
"""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from typing import Any

from kimik3_lab.paths import repository_dir

__all__ = ["provenance"]

_PACKAGES = (
    "torch", "triton", "numpy", "scipy", "tokenizers", "fastapi", "uvicorn", "aiohttp", "vllm",
    "guidellm",
)  # fmt: skip


#: An option with one of these in its name has a value that must not be written down.
_SECRET = ("key", "token-file", "password", "secret")


def provenance(*, device: str = "cpu", command: str | None = None) -> dict[str, Any]:
    """Describe this process for a result file.

    Parameters
    ----------
    device
        What the measured work ran on, for example ``"cpu"`` or the name of a GPU.
    command
        The command that repeats the measurement; by default the command line of this process.

    Examples
    --------
    >>> sorted(provenance())[:4]
    ['command', 'cpu', 'cpu_count', 'date_utc']
    """
    from kimik3_lab import __version__

    if command is None:
        name = os.path.basename(sys.argv[0]) or "python"
        command = shlex.join([name, *_without_secrets(sys.argv[1:])])
    return {
        "lab_version": __version__,
        "git_commit": _git_commit(),
        "date_utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "device": device,
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: v for name in _PACKAGES if (v := _version(name))},
    }


def _without_secrets(words: list[str]) -> list[str]:
    """Blank out the values of options that carry a key: a result file is made to be shared."""
    shown, hide_next = [], False
    for word in words:
        option, equals, _ = word.partition("=")
        secret = option.startswith("--") and any(part in option for part in _SECRET)
        shown.append("***" if hide_next else f"{option}=***" if secret and equals else word)
        hide_next = secret and not equals and not hide_next
    return shown


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _git_commit() -> str | None:
    """Commit of the checkout, with ``-dirty`` when files differ; None outside a checkout."""
    git = ["git", "-C", str(repository_dir())]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5
        )
        if head.returncode:
            return None
        status = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True, text=True, timeout=5,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return head.stdout.strip() + ("-dirty" if status.stdout.strip() else "")
