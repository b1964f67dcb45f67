"""What lies in this checkout also reaches the next one: no file that the lab reads is ignored."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KEPT = ("data", "notebooks", "kernels", "kimik3_lab", "tools", "tests")
MADE_BY_TOOLS = {"__pycache__", ".ipynb_checkpoints", "build"}


def ignored(root: Path) -> list[str]:
    """Files in the project's folders that git would leave behind, caches left out."""
    command = ["git", "ls-files", "--others", "--ignored", "--exclude-standard", "-z", *KEPT]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    names = [name for name in listed.stdout.split("\0") if name]
    return [name for name in names if not MADE_BY_TOOLS & set(Path(name).parts)]


@pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(), reason="not a git checkout"
)
def test_no_file_of_the_project_is_ignored() -> None:
    assert not ignored(ROOT), "these files exist only here: mend .gitignore, then add them"


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_an_ignored_file_is_seen(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text("*.log\n__pycache__/\n", encoding="utf-8")
    for name in ("data/k3.log", "data/__pycache__/a.pyc", "data/k3.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for folder in KEPT:  # git refuses to list a folder that is not there
        (tmp_path / folder).mkdir(exist_ok=True)
    assert ignored(tmp_path) == ["data/k3.log"]
