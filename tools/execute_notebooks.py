"""Run notebooks from top to bottom and store what they print, as they are committed.

    python tools/execute_notebooks.py notebooks/00_start_here.ipynb ...

Without names it runs every lesson and recipe. A notebook that fails is left as it was. Predictions
go to a temporary folder, so yours stay as they are; widget states and timings, which only make
noise in a diff, are not stored. A recipe's header gets the date of the run as "Last verified".
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

_WIDGET = "application/vnd.jupyter.widget-view+json"
NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"


def execute(path: Path, *, timeout: int = 600) -> None:
    """Run one notebook and replace its file when all cells have passed."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
        store_widget_state=False,
    ).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            # Progress bars and widgets are nothing without the state that is not stored.
            cell.outputs = [o for o in cell.outputs if _WIDGET not in o.get("data", {})]
    # Which Python patch release ran it is printed by the Setup cell; here it would only be noise.
    notebook.metadata.get("language_info", {}).pop("version", None)
    _date(notebook)
    part = path.with_suffix(".ipynb.part")
    part.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
    os.replace(part, path)


def _date(notebook: nbformat.NotebookNode) -> None:
    """Write today's date into the header of a recipe, which has just been seen to work."""
    today = datetime.date.today().isoformat()
    first = notebook.cells[0]
    first.source = re.sub(
        r"(\| \*\*Last verified\*\* \| )\d{4}-\d\d-\d\d", rf"\g<1>{today}", first.source
    )


def _all() -> list[Path]:
    found = (p for p in NOTEBOOKS.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
    return sorted(found)


def main() -> int:
    """Run the notebooks named on the command line; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: every lesson and recipe")
    failed = []
    with tempfile.TemporaryDirectory(prefix="k3lab-execute-") as home:
        os.environ["K3LAB_HOME"] = home
        for path in parser.parse_args().notebooks or _all():
            start = time.monotonic()
            try:
                execute(path)
            except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
                failed.append(path)
                print(f"FAILED  {path}\n{error}", file=sys.stderr)
            else:
                print(f"{time.monotonic() - start:6.1f} s  {path}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
