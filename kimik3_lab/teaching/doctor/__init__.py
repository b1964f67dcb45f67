"""Is this machine ready for the lessons? One check a fact, each failure with the way to mend it.

Needs psutil and packaging; torch only if it is installed. ``k3lab doctor`` and lesson 00 show the
result. Every check is a function that looks at one thing and returns a :class:`Check`; it changes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

from kimik3_lab.teaching.doctor.check import INSTALL, Check
from kimik3_lab.teaching.doctor.files import check_model, check_notebooks, check_user_folder
from kimik3_lab.teaching.doctor.machine import (
    check_cpu,
    check_disk,
    check_gpu,
    check_memory,
    check_port,
)
from kimik3_lab.teaching.doctor.software import (
    check_labextensions,
    check_packages,
    check_python,
)

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "Check",
    "check_cpu",
    "check_disk",
    "check_gpu",
    "check_labextensions",
    "check_memory",
    "check_model",
    "check_notebooks",
    "check_packages",
    "check_port",
    "check_python",
    "check_user_folder",
    "run_checks",
    "table",
]


def run_checks() -> list[Check]:
    """Run every check; one that breaks is itself reported as failed.

    Examples
    --------
    >>> {check.status for check in run_checks()} <= {"OK", "WARN", "FAIL"}
    True
    """
    checks: tuple[tuple[str, Callable[[], Check | list[Check]]], ...] = (
        ("python", check_python),
        ("packages", check_packages),
        ("labextensions", check_labextensions),
        ("cpu", check_cpu),
        ("memory", check_memory),
        ("disk", check_disk),
        ("gpu", check_gpu),
        ("model", check_model),
        ("notebooks", check_notebooks),
        ("your files", check_user_folder),
        ("port", check_port),
    )
    found: list[Check] = []
    for name, run in checks:
        try:
            result = run()
        except Exception as error:
            detail = f"the check broke: {type(error).__name__}: {error}"
            result = Check(name, "FAIL", detail, INSTALL)
        found += result if isinstance(result, list) else [result]
    return found


def table(checks: Iterable[Check]) -> pd.DataFrame:
    """Show checks as a table in a notebook."""
    import pandas as pd

    pd.set_option("display.max_colwidth", 300)  # a mend that is cut off is of no use
    columns = ["name", "status", "detail", "mend"]
    return pd.DataFrame([asdict(check) for check in checks], columns=columns).set_index("name")
