"""Get single source files out of a published wheel, with pip, without installing the wheel.

Needs the standard library and pip. Used by the scripts in this folder only.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Wheel", "fetch"]


@dataclass(frozen=True)
class Wheel:
    """A downloaded wheel.

    Attributes
    ----------
    package, version
        What was asked of pip.
    path
        The wheel file.
    """

    package: str
    version: str
    path: Path

    @property
    def sha256(self) -> str:
        """SHA-256 of the whole wheel, in hexadecimal."""
        digest = hashlib.sha256()
        with self.path.open("rb") as wheel:
            while chunk := wheel.read(1 << 20):
                digest.update(chunk)
        return digest.hexdigest()

    def extract(self, member: str) -> Path:
        """Unpack ``member`` (a file, or a folder ending in ``/``); return where it is."""
        root = self.path.parent / f"{self.package}-{self.version}"
        with zipfile.ZipFile(self.path) as archive:
            wanted = [
                n
                for n in archive.namelist()
                if n == member or (member.endswith("/") and n.startswith(member))
            ]
            if not wanted:
                raise FileNotFoundError(
                    f"{self.path.name} holds no {member!r}; "
                    f"the scripts expect {self.package}=={self.version}"
                )
            for name in wanted:
                archive.extract(name, root)
        return root / member


def fetch(package: str, version: str, cache: Path) -> Wheel:
    """Fetch ``package==version`` with ``pip download --no-deps``, unless ``cache`` has it.

    Raises
    ------
    RuntimeError
        If pip fails or leaves no single wheel behind; pip's own message is above it.
    """
    folder = cache / package
    stem = package.replace("-", "_")
    found = sorted(folder.glob(f"{stem}-{version}-*.whl"))
    if not found:
        folder.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary",
            ":all:",
        ]
        result = subprocess.run(
            [*command, "--dest", str(folder), f"{package}=={version}"], check=False
        )
        found = sorted(folder.glob(f"{stem}-{version}-*.whl"))
        if result.returncode or len(found) != 1:
            raise RuntimeError(
                f"pip download {package}=={version} ended with {result.returncode} and left "
                f"{len(found)} wheels in {folder}; expected exactly one. Is this Linux x86-64 with "
                "access to PyPI?"
            )
    return Wheel(package, version, found[0])
