"""The first cell of every lesson: what runs here, with which versions, and the reader's answers.

Needs what it reports on: torch, triton and numpy are imported if they are installed. Every lesson
begins with::

    from kimik3_lab.teaching import session as lab

    ctx = lab.start("00")

A recipe of the cookbook begins likewise, with ``lab.recipe("name_of_its_file")``.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import json
import os
import platform
import random
import sys
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any

from kimik3_lab.teaching.predictions import PredictionStore
from kimik3_lab.teaching.scoring import format_number

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["DEVICE_ENV", "Session", "recipe", "seed", "start"]

#: Set this to ``cpu`` or ``cuda`` to choose where lessons run; unset, a GPU is used if there is
#: one.
DEVICE_ENV = "K3LAB_DEVICE"
_SEED = 0


@dataclass
class Session:
    """One run of one lesson; :func:`start` makes it.

    Attributes
    ----------
    lesson, title
        Number of the lesson, such as ``"00"``, or name of the recipe, and its title.
    device
        ``"cpu"`` or ``"cuda"``: hand it to torch.
    live
        True if kernels can run here (on the GPU or in Triton's interpreter). If False, kernel cells
        show recorded results and say so.
    seed
        The seed that random, numpy and torch were given.
    """

    lesson: str
    title: str
    device: str
    live: bool
    seed: int
    store: PredictionStore = field(default_factory=PredictionStore, repr=False)

    def predict(self, name: str, value: Any, unit: str = "", question: str = "") -> None:
        """Write down a number before it is measured.

        ``...`` or None in place of a number keeps nothing and asks for one, so that a notebook with
        open questions still runs to its end.

        Raises
        ------
        ValueError
            If the value is not a finite number.
        """
        if value is None or value is ...:
            print(f"{name}: no prediction yet. Type your number here, then run this cell again.")
            return
        kept = self.store.predict(self.lesson, name, value, unit=unit, question=question)
        again = f" (attempt {kept.attempt}, after you saw the answer)" if kept.attempt > 1 else ""
        print(f"{name}: you predict {_with_unit(kept.value, unit)}{again}")

    def reveal(self, name: str, actual: Any, explanation: str = "") -> None:
        """Print the actual value beside the prediction, how far apart they are, and why.

        Raises
        ------
        ValueError
            If the actual value is not a finite number.
        """
        kept = self.store.reveal(self.lesson, name, actual)
        actual = float(actual)
        if kept is None or kept.score is None:
            print(
                f"{name}\n  actual     {format_number(actual)}\n  predicted  nothing was predicted"
            )
        else:
            print(
                f"{name}\n"
                f"  predicted  {_with_unit(kept.value, kept.unit)}\n"
                f"  actual     {_with_unit(actual, kept.unit)}\n"
                f"  apart      {_apart(kept.value, actual, kept.score.ratio)}\n"
                f"  verdict    {kept.score.verdict} ({kept.score.points} of 100 points)"
            )
        if explanation:
            print(f"  because    {explanation}")

    def scores(self) -> pd.DataFrame:
        """Table of this lesson's predictions; ``k3lab progress`` prints those of all lessons."""
        import pandas as pd

        rows = []
        for kept in self.store.all(self.lesson):
            result = kept.score
            rows.append(
                {
                    "prediction": kept.name,
                    "unit": kept.unit,
                    "predicted": format_number(kept.value),
                    "actual": "" if kept.actual is None else format_number(kept.actual),
                    "points": "" if result is None else result.points,
                    "verdict": "not revealed yet" if result is None else result.verdict,
                }
            )
        columns = ["prediction", "unit", "predicted", "actual", "points", "verdict"]
        return pd.DataFrame(rows, columns=columns).set_index("prediction")


def start(lesson: str, *, seed: int = _SEED) -> Session:
    """Begin a lesson: choose the device, set seeds and the plot style, print what runs here.

    Without a GPU it sets ``TRITON_INTERPRET=1``. Triton reads that when a kernel is defined, so the
    Setup cell calls this before it imports any kernel.

    Parameters
    ----------
    lesson
        Number of the lesson, two digits.
    seed
        For random, numpy and torch.

    Raises
    ------
    RuntimeError
        If ``K3LAB_DEVICE`` asks for a device that is not here, or kernels were imported too early.
    """
    return _begin(lesson, f"Lesson {lesson}", _title(f"{lesson}_*.ipynb", lesson), seed)


def recipe(name: str, *, seed: int = _SEED) -> Session:
    """Begin a recipe of the cookbook, as :func:`start` begins a lesson.

    Parameters
    ----------
    name
        Name of its file in ``notebooks/recipes``, without the ending.
    seed
        For random, numpy and torch.

    Raises
    ------
    RuntimeError
        As :func:`start`.
    """
    return _begin(name, "Recipe", _title(f"recipes/{name}.ipynb"), seed)


def _begin(name: str, kind: str, title: str, value: int) -> Session:
    device = _choose_device()
    has_triton = importlib.util.find_spec("triton") is not None
    if device == "cpu" and has_triton:
        _use_interpreter()
    seed(value)
    _use_one_thread()
    if importlib.util.find_spec("plotly") is not None:
        _import_nbformat()
        from kimik3_lab.teaching.plots import use_style

        use_style()
    session = Session(name, title, device, has_triton, value)
    print(_banner(session, kind))
    return session


def seed(value: int = _SEED) -> None:
    """Seed random, numpy and torch, as far as they are installed.

    Examples
    --------
    >>> seed(1); first = random.random()
    >>> seed(1); first == random.random()
    True
    """
    random.seed(value)
    if importlib.util.find_spec("numpy") is not None:
        import numpy as np

        np.random.seed(value % 2**32)
    if importlib.util.find_spec("torch") is not None:
        import torch

        torch.manual_seed(value)


def _choose_device() -> str:
    wanted = os.environ.get(DEVICE_ENV, "").strip().lower()
    if wanted not in ("", "cpu", "cuda"):
        raise RuntimeError(
            f"{DEVICE_ENV}: got {wanted!r}, expected 'cpu' or 'cuda', or leave it unset"
        )
    if wanted == "cpu" or importlib.util.find_spec("torch") is None:
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if wanted == "cuda":
        raise RuntimeError(
            f"{DEVICE_ENV}=cuda, but torch {torch.__version__} sees no CUDA device: unset "
            f"{DEVICE_ENV} to run on the CPU, or run 'k3lab doctor' to see what is missing"
        )
    return "cpu"


def _use_interpreter() -> None:
    # The operators' modules import Triton, and with it its decorators, only when they run.
    early = sorted(n for n in sys.modules if n.startswith("k3_kernels.") and n.endswith("_kernel"))
    if early and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            f"{early[0]} was imported before start(): its kernels wait for a GPU that is not here. "
            f"Restart the notebook's kernel and run the Setup cell first."
        )
    os.environ["TRITON_INTERPRET"] = "1"


def _use_one_thread() -> None:
    """Give PyTorch one CPU thread, unless the reader chose with ``OMP_NUM_THREADS``.

    A lesson's matrices are too small to share. Threads that wait for each other while a server or
    another notebook wants the processor make a step a hundred times slower.
    """
    if "OMP_NUM_THREADS" in os.environ or importlib.util.find_spec("torch") is None:
        return
    import torch

    torch.set_num_threads(1)


def _import_nbformat() -> None:
    """Import nbformat, with which plotly shows figures, in a fraction of its time.

    It imports jsonschema, which imports parsers of addresses in any script if they are installed;
    to build them takes one or two seconds. Nobody here checks such an address.
    """
    parsers = "rfc3987_syntax"
    if parsers in sys.modules or importlib.util.find_spec("nbformat") is None:
        return
    sys.modules[parsers] = None  # type: ignore[assignment]  # "not installed", for a moment
    try:
        importlib.import_module("nbformat")
    finally:
        del sys.modules[parsers]


def _banner(session: Session, kind: str) -> str:
    where = "CPU"
    kernels = "live, Triton kernels run in the interpreter"
    if session.device == "cuda":
        import torch

        where, kernels = torch.cuda.get_device_name(), "live, Triton kernels run on the GPU"
    if not session.live:
        kernels = "Triton not available: recorded results"
    versions = [f"python {platform.python_version()}"]
    for label, package in (("torch", "torch"), ("triton", "triton"), ("lab", "kimik3-lab")):
        versions.append(f"{label} {_version(package)}")
    return "\n".join(
        (
            f"{kind}: {session.title}".removesuffix(": "),
            "  versions  " + ", ".join(versions),
            f"  device    {where}",
            f"  mode      {kernels}",
            f"  date      {datetime.date.today().isoformat()}, seed {session.seed}",
        )
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _title(pattern: str, number: str = "") -> str:
    """Title from the notebook itself, so that it is written in one place only."""
    from kimik3_lab.paths import repository_dir

    for path in sorted((repository_dir() / "notebooks").glob(pattern)):
        try:
            first = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
        except (OSError, ValueError, LookupError, TypeError):
            continue
        return first.partition("\n")[0].lstrip("# ").removeprefix(number).lstrip(" —-").strip()
    return ""


def _with_unit(value: float, unit: str) -> str:
    return f"{format_number(value)} {unit}".rstrip()


def _apart(predicted: float, actual: float, ratio: float) -> str:
    if predicted == actual:
        return "nothing: exact"
    side = "high" if predicted > actual else "low"
    if actual == 0:
        return f"too {side}; the actual value is zero"
    percent = 100 * (predicted - actual) / abs(actual)
    factor = f"{ratio:.3g}x too {side}, " if ratio != float("inf") else f"too {side}, "
    return f"{factor}{percent:+,.0f} %"
