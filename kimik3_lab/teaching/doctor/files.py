"""Checks of the files: the tiny K3, the lessons, the folder of predictions.

Needs safetensors.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from kimik3_lab.config import K3Config
from kimik3_lab.paths import default_model_dir, repository_dir
from kimik3_lab.teaching.doctor.check import Check
from kimik3_lab.tensors import checkpoint_tensors

__all__ = ["check_model", "check_notebooks", "check_user_folder"]


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


def _shown(folder: Path) -> str:
    """Name a folder without the path of the checkout: the lessons' stored output is public."""
    folder = folder.absolute()
    base = repository_dir()
    return str(folder.relative_to(base)) if folder.is_relative_to(base) else str(folder)
