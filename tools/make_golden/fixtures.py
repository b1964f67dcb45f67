"""Record a fixture, or check a recorded one: the frame that every script in this folder fills in.

A script gives an :class:`Oracle`: how to make inputs, and how to run somebody else's code on them.
``main`` then either writes ``data/golden/<name>.safetensors`` and its entry in ``PROVENANCE.json``,
or (``--check``) takes the *stored* inputs, runs the oracle again and compares. Checking needs no
equal random numbers, only equal arithmetic.

In the file, tensor ``x`` of case ``c`` is called ``c/in/x`` or ``c/out/x``; plain numbers of the
cases (scales, chunk sizes) are JSON under the metadata key ``cases``.

Needs torch and safetensors. Used by the scripts in this folder only.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import json
import platform
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

__all__ = ["Case", "Oracle", "Source", "main", "read_cases"]

GOLDEN = Path(__file__).resolve().parents[2] / "data" / "golden"


@dataclass(frozen=True)
class Case:
    """Inputs of one call: tensors, and plain values that JSON can hold."""

    inputs: dict[str, Tensor]
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """One file of somebody else's code, and which of its functions ran."""

    file: str
    functions: list[str]
    sha256: str
    how: str


@dataclass(frozen=True)
class Oracle:
    """Somebody else's code, ready to run on our inputs.

    Attributes
    ----------
    name
        Name of the fixture file, without suffix.
    package, version, licence
        What the code comes from.
    sources
        The files that ran.
    make_cases
        From a seeded generator to named cases.
    run
        From one case (its name, the case) to output tensors.
    seed
        Seed of the generator.
    wheel_sha256
        SHA-256 of the wheel, if the script fetched one.
    tolerance
        Largest difference that ``--check`` allows, relative to the largest stored magnitude.
    """

    name: str
    package: str
    version: str
    licence: str
    sources: list[Source]
    make_cases: Callable[[torch.Generator], dict[str, Case]]
    run: Callable[[str, Case], dict[str, Tensor]]
    seed: int
    wheel_sha256: str | None = None
    tolerance: float = 2e-6


def read_cases(path: Path) -> dict[str, tuple[Case, dict[str, Tensor]]]:
    """Read a fixture back: case name to (case, recorded outputs)."""
    with safe_open(path, framework="pt") as stored:
        params = json.loads(stored.metadata()["cases"])
        tensors = {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118
    cases = {name: (Case({}, values), {}) for name, values in params.items()}
    for key, tensor in tensors.items():
        name, side, label = key.split("/")
        case, outputs = cases[name]
        (case.inputs if side == "in" else outputs)[label] = tensor
    return cases


def main(build: Callable[[Path], Oracle], description: str) -> None:
    """Command line of a script: record by default, ``--check`` to regenerate and compare."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--check", action="store_true", help="run the oracle on the stored inputs and compare"
    )
    default = Path(tempfile.gettempdir()) / "kimik3-golden"
    parser.add_argument(
        "--cache", type=Path, default=default, help="where wheels are kept (default: %(default)s)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    oracle = build(options.cache)
    with torch.no_grad():
        sys.exit(_check(oracle) if options.check else _record(oracle))


def _record(oracle: Oracle) -> int:
    cases = oracle.make_cases(torch.Generator().manual_seed(oracle.seed))
    tensors: dict[str, Tensor] = {}
    for name, case in cases.items():
        given = {
            key: value.clone() for key, value in case.inputs.items()
        }  # an oracle may write in place
        outputs = oracle.run(name, Case(given, case.params))
        for key, value in outputs.items():
            if value.is_floating_point() and not torch.isfinite(value).all():
                raise FloatingPointError(
                    f"{oracle.name}: output {key!r} of case {name!r} is not finite"
                )
        tensors |= {f"{name}/in/{key}": value.contiguous() for key, value in case.inputs.items()}
        tensors |= {
            f"{name}/out/{key}": value.contiguous().clone() for key, value in outputs.items()
        }
    GOLDEN.mkdir(parents=True, exist_ok=True)
    path = GOLDEN / f"{oracle.name}.safetensors"
    draft = path.with_suffix(".part")
    params = json.dumps({name: case.params for name, case in cases.items()}, sort_keys=True)
    save_file(tensors, draft, metadata={"cases": params})
    draft.chmod(0o644)  # safetensors makes files that only their owner may read
    draft.replace(path)
    _write_provenance(oracle, path, len(cases), len(tensors))
    print(f"{path}: {len(cases)} cases, {len(tensors)} tensors, {path.stat().st_size:,} bytes")
    return 0


def _check(oracle: Oracle) -> int:
    worst, equal, total = 0.0, 0, 0
    for name, (case, stored) in read_cases(GOLDEN / f"{oracle.name}.safetensors").items():
        again = oracle.run(name, case)
        if again.keys() != stored.keys():
            print(f"{oracle.name}/{name}: outputs {sorted(again)} now, {sorted(stored)} stored")
            return 1
        for key, before in stored.items():
            now = again[key]
            total += 1
            if now.dtype == before.dtype and torch.equal(now.nan_to_num(), before.nan_to_num()):
                equal += 1
                continue
            scale = before.double().abs().max().clamp_min(torch.finfo(torch.float32).tiny)
            error = ((now.double() - before.double()).abs().max() / scale).item()
            worst = max(worst, error if error == error else float("inf"))
            print(f"{oracle.name}/{name}/{key}: relative difference {error:.2e}")
    verdict = "ok" if worst <= oracle.tolerance else f"differs by more than {oracle.tolerance:.0e}"
    print(
        f"{oracle.name}: {equal} of {total} outputs bit-equal, "
        f"largest relative difference {worst:.2e}: {verdict}"
    )
    return 0 if worst <= oracle.tolerance else 1


def _write_provenance(oracle: Oracle, path: Path, cases: int, tensors: int) -> None:
    file = GOLDEN / "PROVENANCE.json"
    record = json.loads(file.read_text()) if file.exists() else {"schema": 1, "fixtures": {}}
    record["fixtures"][path.name] = {
        "package": oracle.package,
        "version": oracle.version,
        "licence": oracle.licence,
        "wheel_sha256": oracle.wheel_sha256,
        "sources": [dataclasses.asdict(source) for source in oracle.sources],
        "script": f"tools/make_golden/{Path(sys.argv[0]).name}",
        "seed": oracle.seed,
        "date_utc": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "packages": {name: metadata.version(name) for name in ("torch", "triton", "safetensors")},
        "cases": cases,
        "tensors": tensors,
        "bytes": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    record["fixtures"] = dict(sorted(record["fixtures"].items()))
    draft = file.with_suffix(".part")
    draft.write_text(json.dumps(record, indent=2) + "\n")
    draft.replace(file)
