"""The command that made a file, as it is written into that file.

Needs the standard library only.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import PurePath

__all__ = ["command_line"]


def command_line(words: Sequence[str] | None = None) -> str:
    """Write down a command of this package; folders are the machine's own and are left out.

    Examples
    --------
    >>> command_line(["train", "--out", "/home/me/runs/balanced", "--steps", "10"])
    'python -m tools.train_tiny_k3 train --out balanced --steps 10'
    """
    given = sys.argv[1:] if words is None else words
    shown = [PurePath(word).name if "/" in word else word for word in given]
    return shlex.join(["python", "-m", "tools.train_tiny_k3", *shown])
