"""Checks of the software: Python, the packages, what JupyterLab needs to draw figures.

Needs psutil, packaging and jupyter_core.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from kimik3_lab.teaching.doctor.check import INSTALL, Check

__all__ = ["check_labextensions", "check_packages", "check_python"]

_MIN_PYTHON = (3, 11)
#: Packages that get a line of their own; the others share one.
_SHOWN = ("torch", "triton", "jupyterlab", "plotly", "ipywidgets", "fastapi")
_LABEXTENSIONS = {
    "plotly": "jupyterlab-plotly",
    "ipywidgets": "@jupyter-widgets/jupyterlab-manager",
}


def check_python(version: tuple[int, ...] | None = None) -> Check:
    """Compare the version of Python with the oldest that the lab runs on.

    Examples
    --------
    >>> check_python((3, 9, 1)).status
    'FAIL'
    """
    version = tuple(sys.version_info[:3]) if version is None else version
    found = f"{'.'.join(map(str, version))} on {platform.system()} {platform.machine()}"
    if version[:2] >= _MIN_PYTHON:
        return Check("python", "OK", found)
    wanted = ".".join(map(str, _MIN_PYTHON))
    mend = f"install Python {wanted} or newer, then run 'make clean install'"
    return Check("python", "FAIL", f"{found}; the lab needs {wanted} or newer", mend)


def check_packages(requirements: Iterable[str] | None = None) -> list[Check]:
    """Compare what is installed with every package that the project names.

    Parameters
    ----------
    requirements
        Lines such as ``"torch>=2.11"``; by default those of the installed project.
    """
    from packaging.requirements import Requirement

    if requirements is None:
        try:
            requirements = metadata.requires("kimik3-lab") or []
        except metadata.PackageNotFoundError:
            return [Check("packages", "FAIL", "kimik3-lab itself is not installed", INSTALL)]
    found, quiet = [], []
    for wanted in map(Requirement, requirements):
        if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
            if wanted.name == "triton":
                detail = "not available for this system: kernel lessons show recorded results"
                mend = "run on Linux to write and run kernels yourself"
                found.append(Check("triton", "WARN", detail, mend))
            continue
        try:
            version = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            detail = f"not installed; the lab needs {wanted.name}{wanted.specifier}"
            found.append(Check(wanted.name, "FAIL", detail, INSTALL))
            continue
        if not wanted.specifier.contains(version, prereleases=True):
            detail = f"{version}; the lab needs {wanted.specifier}"
            found.append(Check(wanted.name, "FAIL", detail, INSTALL))
        elif wanted.name in _SHOWN:
            found.append(Check(wanted.name, "OK", version))
        else:
            quiet.append(f"{wanted.name} {version}")
    if quiet:
        found.append(Check("other packages", "OK", f"{len(quiet)} as needed: {', '.join(quiet)}"))
    return found


def check_labextensions(folders: Iterable[Path] | None = None) -> Check:
    """Look for the browser part of plotly and of widgets.

    It must lie in the environment that runs the JupyterLab *server*, which need not be the one that
    runs the notebook's code. Without it figures stay blank.
    """
    folders = list(_labextension_folders() if folders is None else folders)
    missing = [
        package
        for package, extension in _LABEXTENSIONS.items()
        if not any((folder / extension / "package.json").is_file() for folder in folders)
    ]
    if not missing:
        return Check("jupyterlab extensions", "OK", f"{' and '.join(_LABEXTENSIONS)} will be drawn")
    mend = "start JupyterLab with 'k3lab lab', or install them beside your JupyterLab"
    detail = f"JupyterLab's environment lacks {' and '.join(missing)}: figures stay blank"
    return Check("jupyterlab extensions", "FAIL", detail, mend)


def _labextension_folders() -> list[Path]:
    from jupyter_core.paths import jupyter_path

    shared = [Path(folder) for folder in jupyter_path("labextensions")]
    own = Path(sys.prefix) / "share" / "jupyter" / "labextensions"
    server = _server_prefix()
    if server is None or server == Path(sys.prefix):
        return [own, *shared]
    other = [folder for folder in shared if folder != own]
    return [server / "share" / "jupyter" / "labextensions", *other]


def _server_prefix() -> Path | None:
    """Environment of the JupyterLab server that started this process, if one did."""
    import psutil

    try:
        command = psutil.Process(int(os.environ["JPY_PARENT_PID"])).cmdline()
    except (KeyError, ValueError, psutil.Error):
        return None
    if not any("jupyter" in part for part in command[:3]):
        return None
    # Either "ENV/bin/python -m jupyterlab" or "python ENV/bin/jupyter-lab".
    programs = [Path(part) for part in command[:2] if Path(part).is_absolute()]
    prefixes = [program.parent.parent for program in programs]
    return next((folder for folder in prefixes if (folder / "share/jupyter").is_dir()), None)
