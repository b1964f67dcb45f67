"""Launch constants that were measured on a device: look one up, store a new one.

Needs PyTorch to name the device, nothing else. Used by every operator of this package and by the
tuners in ``benchmarks``; lesson 04 reads the tables.

The best block shapes and warp counts of a kernel differ from GPU to GPU, and no formula finds them:
they are measured once and kept in ``tuned/<device>.json``. An operator asks :func:`lookup`; None
means that nobody measured this device or shape, and the operator falls back on its own rule.

Format: one file per device, named like ``torch.cuda.get_device_name()`` in lower case with ``_``
for everything that is neither a letter nor a digit::

    {"schema_version": 1, "device": "NVIDIA H200",
     "operators": {"<operator>": {"<shape>": {
         "provenance": {...},
         "buckets": [{"up_to": 16, "config": {...}}, {"up_to": null, "config": {...}}]}}}}

``<shape>`` is a string that the operator makes of what is fixed by the model, such as
``"E=896,k=16"``; ``up_to`` bounds what varies from call to call, the number of tokens. null has no
bound. A bucket may say more, which no call reads: the size it was ``measured_at``, its time, and
its own ``provenance`` if an earlier run than the entry's measured it.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["SCHEMA_VERSION", "device_file", "folder", "lookup", "pick", "store", "stored"]

SCHEMA_VERSION = 1


def folder() -> Path:
    """Return the folder of the tables; ``K3_KERNELS_TUNED`` replaces the package's own."""
    replaced = os.environ.get("K3_KERNELS_TUNED")
    return Path(replaced) if replaced else Path(__file__).parent / "tuned"


def device_file(device_name: str) -> str:
    """Return the name of a device's file.

    Examples
    --------
    >>> device_file("NVIDIA B300 SXM6 AC")
    'nvidia_b300_sxm6_ac.json'
    """
    return re.sub(r"[^a-z0-9]+", "_", device_name.lower()).strip("_") + ".json"


def pick(buckets: Sequence[Mapping[str, Any]], size: int) -> dict[str, Any] | None:
    """Return the configuration of the first bucket that holds ``size``, None if there is none.

    Examples
    --------
    >>> buckets = [{"up_to": 16, "config": {"warps": 1}}, {"up_to": None, "config": {"warps": 4}}]
    >>> pick(buckets, 16), pick(buckets, 17)
    ({'warps': 1}, {'warps': 4})
    """
    for bucket in buckets:
        if bucket["up_to"] is None or size <= bucket["up_to"]:
            return dict(bucket["config"])
    return None


def lookup(operator: str, shape: str, size: int, device: torch.device) -> dict[str, Any] | None:
    """Return the measured constants for a call, or None if there are none.

    Parameters
    ----------
    operator
        Name of the operator, or of one of its kernels (``"kda_verify"``).
    shape
        What the model fixes, as the operator writes it.
    size
        What varies from call to call: tokens, unless the operator says otherwise.
    device
        Where the call will run. Anything but a CUDA device has no table.

    Raises
    ------
    ValueError
        If the device has a file and it cannot be read: a damaged table must not silently cost
        speed.
    """
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    shapes = _operators(_device_name(index), os.environ.get("K3_KERNELS_TUNED")).get(operator)
    entry = shapes.get(shape) if shapes else None
    return pick(entry["buckets"], size) if entry else None


@functools.cache
def _device_name(index: int) -> str:
    return torch.cuda.get_device_name(index)


@functools.cache
def _operators(device_name: str, replaced: str | None) -> dict[str, Any]:
    """Read a device's file once; ``replaced`` is part of the key because it moves the folder."""
    path = folder() / device_file(device_name)
    return dict(_read(path)["operators"]) if path.exists() else {}


def _read(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        version = table["schema_version"]
        if version != SCHEMA_VERSION or not isinstance(table["operators"], dict):
            raise ValueError(f"schema_version {version}, expected {SCHEMA_VERSION}")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a table of launch constants ({error}). Restore it, or delete it to run "
            "with the constants chosen by rule."
        ) from error
    return dict(table)


def stored(device_name: str, operator: str, shape: str) -> dict[str, Any] | None:
    """Return a whole entry of a device's file: provenance and buckets, or None if there is none.

    Raises
    ------
    ValueError
        If the file is damaged.
    """
    path = folder() / device_file(device_name)
    entry = _read(path)["operators"].get(operator, {}).get(shape) if path.exists() else None
    return dict(entry) if entry else None


def store(
    device_name: str,
    operator: str,
    shape: str,
    buckets: Sequence[Mapping[str, Any]],
    provenance: Mapping[str, Any],
) -> Path:
    """Write the constants of one operator and shape; every other entry of the file stays.

    Parameters
    ----------
    device_name
        As ``torch.cuda.get_device_name()`` gives it.
    operator, shape
        See :func:`lookup`.
    buckets
        ``{"up_to": int or None, "config": {...}}``, ``up_to`` ascending, None last.
    provenance
        How it was measured: versions, date, command.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ValueError
        If the buckets are not in ascending order, or the existing file is damaged.
    """
    bounds = [bucket["up_to"] for bucket in buckets]
    ordered = [float("inf") if bound is None else bound for bound in bounds]
    if not ordered or sorted(set(ordered)) != ordered:
        raise ValueError(f"up_to must ascend, with None last, got {bounds} for {operator} {shape}")
    path = folder() / device_file(device_name)
    table: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "device": device_name}
    table["operators"] = {}
    if path.exists():
        table = _read(path)
    entry = {"provenance": dict(provenance), "buckets": [dict(bucket) for bucket in buckets]}
    table["operators"].setdefault(operator, {})[shape] = entry
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)
    _operators.cache_clear()
    return path
