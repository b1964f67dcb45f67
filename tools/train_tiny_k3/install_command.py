"""``install``: put a packaged target and its drafter into ``data/tiny-k3``, after a last check."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from kimik3_lab.paths import repository_dir
from kimik3_lab.reference import checkpoint, drafter_checkpoint
from tools.train_tiny_k3 import packaging

__all__ = ["add_arguments", "run"]

MOST_BYTES, MOST_FILE_BYTES = 32 * 2**20, 15 * 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--target", type=Path, required=True, help="folder of `package`")
    parser.add_argument("--drafter", type=Path, help="folder of `drafter`")
    parser.add_argument("--out", type=Path, default=repository_dir() / "data" / "tiny-k3")
    parser.add_argument("--evaluation", type=Path, help="JSON of `evaluate`, shipped beside")


def run(options: argparse.Namespace) -> None:
    """Copy, load, measure sizes, write PROVENANCE.json, and only then put in place."""
    scratch = Path(tempfile.mkdtemp(prefix=".installing-", dir=options.out.parent))
    try:
        staging = scratch / "model"
        shutil.copytree(options.target, staging)
        target = checkpoint.load(staging)
        if options.drafter is not None:
            shutil.copytree(options.drafter, staging / "drafter")
            drafter = drafter_checkpoint.load(staging / "drafter")
            if drafter.config.target_num_hidden_layers != target.config.num_hidden_layers:
                raise SystemExit(f"{options.drafter} was trained for another target")
        if options.evaluation is not None:
            shutil.copyfile(options.evaluation, staging / "evaluation.json")
        provenance = staging / "PROVENANCE.json"
        body = json.loads(provenance.read_text(encoding="utf-8"))
        body["licence"] = "Apache-2.0; trained on CPython's standard library, PSF-2.0"
        body["files"] = packaging.file_entries(staging)
        packaging.write_json(provenance, body)
        sizes = {p: p.stat().st_size for p in staging.rglob("*") if p.is_file()}
        if sum(sizes.values()) > MOST_BYTES or max(sizes.values()) > MOST_FILE_BYTES:
            raise SystemExit(
                f"{sum(sizes.values()):,} bytes, largest file {max(sizes.values()):,}: at most "
                f"{MOST_BYTES:,} and {MOST_FILE_BYTES:,} may be shipped"
            )
        packaging.install(staging, options.out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    sys.stdout.write(f"{options.out}: {len(sizes)} files, {sum(sizes.values()):,} bytes\n")
