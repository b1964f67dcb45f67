"""A reader's predictions: kept in one file across lessons, and scored against what was measured.

Needs filelock and platformdirs. Every lesson uses it through :mod:`kimik3_lab.teaching.session`;
``k3lab progress`` prints what it keeps.

Notebooks that run at the same time share the file: every change reads, alters and replaces it under
a lock. A file that cannot be read is set aside under another name, never overwritten, and a disk
that cannot be written costs a warning: a lesson goes on with what this process remembers.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kimik3_lab.teaching.scoring import Score, score

__all__ = [
    "HOME_ENV",
    "Prediction",
    "PredictionStore",
    "PredictionsWarning",
    "home_dir",
]

#: Set this to keep the reader's own files in another folder.
HOME_ENV = "K3LAB_HOME"
_VERSION = 1
_LOCK_SECONDS = 5.0


class PredictionsWarning(UserWarning):
    """Predictions could not be read or saved; the lesson goes on without."""


def home_dir() -> Path:
    """Folder of the reader's own files: ``$K3LAB_HOME``, else the system's place for user data."""
    if folder := os.environ.get(HOME_ENV):
        return Path(folder).expanduser()
    from platformdirs import user_data_dir

    return Path(user_data_dir("k3lab", appauthor=False))


@dataclass(frozen=True)
class Prediction:
    """One prediction of one lesson; ``actual`` is None until the lesson reveals it.

    ``attempt`` counts up when the number is changed after the answer was seen.
    """

    lesson: str
    name: str
    value: float
    unit: str = ""
    question: str = ""
    predicted_at: str = ""
    actual: float | None = None
    revealed_at: str | None = None
    attempt: int = 1

    @property
    def score(self) -> Score | None:
        """Score against the actual value, or None while there is none."""
        return None if self.actual is None else score(self.value, self.actual)


class PredictionStore:
    """The predictions file of one reader.

    Parameters
    ----------
    path
        The JSON file; by default ``predictions.json`` in :func:`home_dir`.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = PredictionStore(Path(folder) / "predictions.json")
    ...     _ = store.predict("00", "tokens_per_second", 50)
    ...     store.reveal("00", "tokens_per_second", 100).score.points
    70
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or home_dir() / "predictions.json"
        # What this process knows; used in place of the file when the file cannot be used.
        self._memory: dict[tuple[str, str], Prediction] = {}

    def predict(
        self, lesson: str, name: str, value: float, *, unit: str = "", question: str = ""
    ) -> Prediction:
        """Keep a prediction. A new number after the reveal opens a new attempt.

        Raises
        ------
        ValueError
            If the value is not a finite number.
        """
        value = _finite(name, value)

        def change(old: Prediction | None) -> Prediction:
            new = Prediction(lesson, name, value, unit, question, _now())
            if old is None:
                return new
            if old.value == value:  # a cell that ran again: the first date and the reveal stay
                return replace(old, unit=unit, question=question)
            seen = old.actual is not None
            return replace(new, attempt=old.attempt + 1 if seen else old.attempt)

        return self._update(lesson, name, change)

    def reveal(self, lesson: str, name: str, actual: float) -> Prediction | None:
        """Keep the actual value beside its prediction; None if nothing was predicted.

        Raises
        ------
        ValueError
            If the actual value is not a finite number.
        """
        actual = _finite(name, actual)
        if self.get(lesson, name) is None:
            return None

        def change(old: Prediction | None) -> Prediction:
            # The file may have been reset since the look above; this process still remembers.
            known = old or self._memory[lesson, name]
            return replace(known, actual=actual, revealed_at=_now())

        return self._update(lesson, name, change)

    def get(self, lesson: str, name: str) -> Prediction | None:
        """Look up one prediction."""
        return self._entries().get((lesson, name))

    def all(self, lesson: str | None = None) -> list[Prediction]:
        """List predictions by lesson, in the order that they were made."""
        found = [p for p in self._entries().values() if lesson in (None, p.lesson)]
        return sorted(found, key=lambda p: p.lesson)

    def reset(self) -> Path | None:
        """Start afresh: move the file aside and return its new place, None if there was none.

        Raises
        ------
        OSError
            If the file cannot be moved.
        """
        self._memory.clear()
        if not self.path.exists():
            return None
        with self._lock():
            return self._set_aside("reset")

    def _entries(self) -> dict[tuple[str, str], Prediction]:
        # Replacing a file is atomic, so reading needs no lock.
        try:
            found = _parse(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found = {}
        return {**found, **self._memory} if self._memory else found

    def _update(
        self, lesson: str, name: str, change: Callable[[Prediction | None], Prediction]
    ) -> Prediction:
        """Change one entry of the file under its lock, or of memory if that is impossible."""
        key = (lesson, name)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._lock():
                entries = {**self._read_or_set_aside(), **self._memory}
                entries[key] = change(entries.get(key))
                _write(self.path, entries)
            self._memory.clear()  # all of it is in the file now
            return entries[key]
        except (OSError, NotImplementedError) as error:  # no lock in time, or none on this disk
            warnings.warn(
                f"predictions are kept for this session only, {self.path} cannot be written: "
                f"{error}. Set {HOME_ENV} to a folder that you can write to.",
                PredictionsWarning,
                stacklevel=4,
            )
        known = self._entries()
        self._memory[key] = change(known.get(key))
        return self._memory[key]

    def _lock(self) -> Any:
        from filelock import FileLock

        return FileLock(self.path.with_suffix(".lock"), timeout=_LOCK_SECONDS)

    def _read_or_set_aside(self) -> dict[tuple[str, str], Prediction]:
        try:
            return _parse(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            place = self._set_aside("broken")
            warnings.warn(
                f"the predictions file cannot be read ({error}); it is kept as {place} and a new "
                f"one begins",
                PredictionsWarning,
                stacklevel=5,
            )
            return {}

    def _set_aside(self, why: str) -> Path:
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        place = self.path.with_name(f"{self.path.stem}.{why}-{stamp}{self.path.suffix}")
        os.replace(self.path, place)
        return place


def _finite(name: str, value: float) -> float:
    if isinstance(value, str) or not math.isfinite(float(value)):
        raise ValueError(f"{name}: got {value!r}, expected a finite number such as 12 or 3.5e9")
    return float(value)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _parse(text: str) -> dict[tuple[str, str], Prediction]:
    """Read the file's text; ValueError if it is anything but a predictions file."""
    data = json.loads(text)
    if not isinstance(data, dict) or data.get("version") != _VERSION:
        raise ValueError(f"expected a JSON object with version {_VERSION}")
    try:
        entries = [Prediction(**entry) for entry in data["predictions"]]
        for entry in entries:
            if not isinstance(entry.lesson, str) or not isinstance(entry.name, str):
                raise TypeError(
                    f"lesson and name must be text, got {entry.lesson!r}, {entry.name!r}"
                )
            _finite(entry.name, entry.value)
            _finite(entry.name, 0.0 if entry.actual is None else entry.actual)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a list of predictions: {error}") from error
    return {(entry.lesson, entry.name): entry for entry in entries}


def _write(path: Path, entries: dict[tuple[str, str], Prediction]) -> None:
    """Write to a temporary name beside the file, then rename: a reader never sees half a file."""
    data = {"version": _VERSION, "predictions": [asdict(entry) for entry in entries.values()]}
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=2, ensure_ascii=False)
            file.write("\n")
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
