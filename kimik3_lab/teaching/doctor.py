"""Is this machine ready for the lessons? One check a fact, each failure with the way to mend it.

Needs psutil and packaging; torch only if it is installed. ``k3lab doctor`` and lesson 00 show the
result. Every check is a function that looks at one thing and returns a :class:`Check`; it changes
nothing.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kimik3_lab.config import K3Config
from kimik3_lab.paths import default_model_dir, repository_dir
from kimik3_lab.tensors import checkpoint_tensors

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

Status = Literal["OK", "WARN", "FAIL"]

_MIN_PYTHON = (3, 11)
_GIB = 2**30
_INSTALL = "run 'make install' in the lab's folder"
#: Packages that get a line of their own; the others share one.
_SHOWN = ("torch", "triton", "jupyterlab", "plotly", "ipywidgets", "fastapi")
_LABEXTENSIONS = {
    "plotly": "jupyterlab-plotly",
    "ipywidgets": "@jupyter-widgets/jupyterlab-manager",
}


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
            result = Check(name, "FAIL", detail, _INSTALL)
        found += result if isinstance(result, list) else [result]
    return found


def table(checks: Iterable[Check]) -> pd.DataFrame:
    """Show checks as a table in a notebook."""
    import pandas as pd

    pd.set_option("display.max_colwidth", 300)  # a mend that is cut off is of no use
    columns = ["name", "status", "detail", "mend"]
    return pd.DataFrame([asdict(check) for check in checks], columns=columns).set_index("name")


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
            return [Check("packages", "FAIL", "kimik3-lab itself is not installed", _INSTALL)]
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
            found.append(Check(wanted.name, "FAIL", detail, _INSTALL))
            continue
        if not wanted.specifier.contains(version, prereleases=True):
            detail = f"{version}; the lab needs {wanted.specifier}"
            found.append(Check(wanted.name, "FAIL", detail, _INSTALL))
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


def check_cpu(cores: int | None = None) -> Check:
    """Count the cores: with one, server and client wait for each other."""
    if cores is None:
        affinity = getattr(os, "sched_getaffinity", None)
        cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    if cores > 1:
        return Check("cpu", "OK", f"{cores} cores")
    mend = "expect other figures than ours; close what else is running"
    return Check("cpu", "WARN", "1 core: server and benchmark client share it", mend)


def check_memory(total: int | None = None) -> Check:
    """Judge the memory (bytes): a notebook and a server beside it must fit."""
    if total is None:
        import psutil

        total = min(psutil.virtual_memory().total, _container_limit())
    found = f"{total / _GIB:.1f} GiB"
    mend = "run one notebook at a time and shut down the kernels of the others"
    if total < 2 * _GIB:
        return Check("memory", "FAIL", f"{found}; the lessons need 2 GiB", "use a larger machine")
    if total < 4 * _GIB:
        return Check("memory", "WARN", f"{found}; 4 GiB let two notebooks run at a time", mend)
    return Check("memory", "OK", found)


def _container_limit() -> int:
    try:
        return int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))
    except (OSError, ValueError):  # no limit reads "max"
        return sys.maxsize


def check_disk(free: int | None = None) -> Check:
    """Judge the room (bytes) for executed notebooks and results."""
    free = shutil.disk_usage(repository_dir()).free if free is None else free
    found = f"{free / _GIB:.1f} GiB free"
    if free < _GIB // 8:
        return Check("disk", "FAIL", f"{found}; notebooks cannot be saved", "free some space")
    if free < _GIB:
        return Check("disk", "WARN", f"{found}; 1 GiB is comfortable", "free some space")
    return Check("disk", "OK", found)


def check_gpu() -> Check:
    """Name the CUDA device; none is needed."""
    import torch

    if not torch.cuda.is_available():
        detail = "no CUDA device: lessons run on CPU, kernels in the interpreter"
        return Check("gpu", "OK", detail)
    found = f"{torch.cuda.get_device_name()}, {torch.cuda.mem_get_info()[1] / _GIB:.0f} GiB"
    # Triton builds its launcher with the system's C compiler when a kernel first runs.
    if os.environ.get("CC") or any(map(shutil.which, ("cc", "gcc", "clang"))):
        return Check("gpu", "OK", found)
    mend = "install gcc, or set K3LAB_DEVICE=cpu"
    return Check("gpu", "WARN", f"{found}, but no C compiler: Triton kernels need one", mend)


def check_model(folder: Path | None = None) -> Check:
    """Compare the headers of the tiny K3's weights with the tensors that its config asks for."""
    from safetensors import SafetensorError, safe_open

    mend = "get the file again: 'git checkout -- data/tiny-k3'"
    try:
        folder = default_model_dir() if folder is None else folder
        index = folder / "model.safetensors.index.json"
        shards = ["model.safetensors"]
        if index.is_file():
            shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        for name in ("config.json", *shards, "tokenizer.json"):
            if not (folder / name).is_file():
                return Check("tiny K3", "FAIL", f"no {name} in {_shown(folder)}", mend)
        config = K3Config.load(folder)
        found = {}
        for shard in shards:
            with safe_open(folder / shard, framework="np") as file:
                # Slices know their type and shape; no weight is read.
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                found |= {n: (s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        return Check("tiny K3", "FAIL", str(error), mend)
    wanted = {t.name: (t.dtype, t.shape) for t in checkpoint_tensors(config, prefix="")}
    if found != wanted:
        wrong = sorted(k for k in wanted.keys() | found.keys() if wanted.get(k) != found.get(k))
        detail = f"{len(wrong)} tensors are not as config.json says, first {wrong[0]}"
        return Check("tiny K3", "FAIL", detail, mend)
    return Check("tiny K3", "OK", f"{len(found)} tensors in {_shown(folder)}")


def check_notebooks(folder: Path | None = None) -> Check:
    """Look for the lessons."""
    folder = repository_dir() / "notebooks" if folder is None else folder
    lessons = sorted(path.name for path in folder.glob("[0-9][0-9]_*.ipynb"))
    if "00_start_here.ipynb" in lessons:
        return Check("notebooks", "OK", f"{len(lessons)} in {_shown(folder)}")
    mend = "install from a checkout: git clone, then 'make install' in its folder"
    return Check("notebooks", "FAIL", f"no 00_start_here.ipynb in {_shown(folder)}", mend)


def check_user_folder(folder: Path | None = None) -> Check:
    """Find out whether predictions can be kept between sessions."""
    from kimik3_lab.teaching.predictions import HOME_ENV, home_dir

    folder = home_dir() if folder is None else folder
    nearest = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return Check("your files", "OK", "predictions can be saved ('k3lab progress' says where)")
    detail = f"{folder} cannot be written: predictions last one session"
    return Check("your files", "WARN", detail, f"set {HOME_ENV} to a folder of yours")


def check_port(port: int = 8000) -> Check:
    """Try the port that ``k3lab serve`` takes by default."""
    with socket.socket() as probe:
        # As a server does: a port that a closed connection still lingers on counts as free.
        if os.name == "posix":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            mend = f"stop that program, or use 'k3lab serve --port {port + 1}'"
            return Check("port", "WARN", f"{port} is taken by another program", mend)
    return Check("port", "OK", f"{port} is free for 'k3lab serve'")


def _shown(folder: Path) -> str:
    """Name a folder without the path of the checkout: the lessons' stored output is public."""
    folder = folder.absolute()
    base = repository_dir()
    return str(folder.relative_to(base)) if folder.is_relative_to(base) else str(folder)
