"""What a check of :mod:`kimik3_lab.teaching.doctor` returns.

Needs the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["GIB", "INSTALL", "Check"]

Status = Literal["OK", "WARN", "FAIL"]

GIB = 2**30
#: The mend of whatever an installation lacks.
INSTALL = "run 'make install' in the lab's folder"


@dataclass(frozen=True)
class Check:
    """What one check found.

    Attributes
    ----------
    name
        What was looked at.
    status
        ``"OK"``; ``"WARN"``: the lessons run, with the restriction that ``detail`` tells; or
        ``"FAIL"``: they do not.
    detail
        What was found.
    mend
        What to do about it; empty when all is well.
    """

    name: str
    status: Status
    detail: str
    mend: str = ""
