"""``corpus``: write the manifest, copy the held-out files, and pack the text for another machine.

Needs the standard library only; run it with the Python whose library is the text.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import sysconfig
import tarfile
from pathlib import Path

from tools.train_tiny_k3 import corpus

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--library",
        type=Path,
        default=Path(sysconfig.get_paths()["stdlib"]),
        help="Lib folder of CPython (default: that of this Python)",
    )
    parser.add_argument("--manifest", type=Path, default=corpus.MANIFEST)
    parser.add_argument("--held-out", type=Path, default=corpus.HELD_OUT_FOLDER)
    parser.add_argument("--tar", type=Path, help="also pack all files here (.tar.xz)")


def run(options: argparse.Namespace) -> None:
    """Write everything; files that are there already are replaced."""
    own = Path(sysconfig.get_paths()["stdlib"])
    if options.library == own and platform.python_version() != corpus.PYTHON_VERSION:
        raise SystemExit(
            f"this is Python {platform.python_version()}, the text is the library of "
            f"{corpus.PYTHON_VERSION}: name its Lib folder with --library"
        )
    manifest = corpus.describe(options.library)
    options.manifest.parent.mkdir(parents=True, exist_ok=True)
    part = options.manifest.with_suffix(".part")
    part.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    os.replace(part, options.manifest)

    if options.held_out.exists():
        shutil.rmtree(options.held_out)
    for entry in manifest["files"]:
        if entry["split"] == "held_out":
            target = options.held_out / entry["path"]
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(options.library / entry["path"], target)
    shutil.copyfile(options.library / "LICENSE.txt", options.held_out / "LICENSE.txt")
    corpus.held_out_documents(options.held_out, options.manifest)

    if options.tar is not None:
        options.tar.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(options.tar, "w:xz") as archive:
            for entry in manifest["files"]:
                archive.add(options.library / entry["path"], entry["path"])
    held_out = manifest["held_out_bytes"]
    share = held_out / (held_out + manifest["train_bytes"])
    sys.stdout.write(
        f"{manifest['files_in_all']} files, {manifest['train_bytes']:,} bytes to train on, "
        f"{held_out:,} held out ({share:.1%})\n"
    )
