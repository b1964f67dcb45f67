"""Lengths of the kernels' machine code, kept by version of Triton.

``python tests/kernels/baseline.py`` compiles every row of ``test_compile_targets`` and writes what
it finds for the version of Triton at hand; the entries of other versions stay.
"""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["HOW_TO", "load", "version"]

FILE = Path(__file__).with_name("instruction_baseline.json")
HOW_TO = "run 'python tests/kernels/baseline.py' and look at the difference"


def version() -> str:
    """Return the version of Triton up to its minor number, such as ``"3.9"``."""
    import triton

    return ".".join(triton.__version__.split(".")[:2])


def load() -> dict[str, int] | None:
    """Return the recorded length of every row, None if this version of Triton has no entry."""
    counts: dict[str, int] | None = json.loads(FILE.read_text(encoding="utf-8")).get(version())
    return counts


def main() -> None:
    """Compile every row and write the file."""
    import aot
    import k3_kernels
    import test_compile_targets

    rows = test_compile_targets.ROWS
    package_dir = Path(k3_kernels.__file__).parents[1]
    reports = aot.compile_rows(rows, package_dir=package_dir, timeout=3600)
    known = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    known[version()] = {
        str(row): report.instructions
        for row, report in zip(rows, reports, strict=True)
        if report.opcodes
    }
    unfinished = FILE.with_name(FILE.name + ".part")
    unfinished.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    unfinished.replace(FILE)
    print(f"wrote {len(known[version()])} rows for Triton {version()} to {FILE}")


if __name__ == "__main__":
    main()
