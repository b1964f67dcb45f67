"""Which machine, which versions and which sources a result comes from.

Needs the standard library; PyTorch for :func:`provenance`.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["SESSION", "command", "provenance", "same_session", "source_hash"]

_KERNELS = Path(__file__).resolve().parents[1]
#: What two runs must share for their rows to stand in one table: the machine since it was started,
#: its GPU, the software, and our sources.
SESSION = ("boot_id", "gpu_uuid", "device", "driver", "torch", "triton", "cuda", "sources_sha256")


def provenance(peers: dict[str, str], *, seed: int) -> dict[str, Any]:
    """Describe this process and its GPU.

    Parameters
    ----------
    peers
        Version of every peer that was found.
    seed
        Of the random inputs.
    """
    import torch
    import triton

    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "device": gpu.name,
        "gpu_uuid": str(gpu.uuid),
        "multiprocessors": gpu.multi_processor_count,
        "l2_bytes": gpu.L2_cache_size,
        "driver": _driver(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "peers": dict(sorted(peers.items())),
        "git_commit": _commit(),
        "sources_sha256": source_hash(),
        "boot_id": _boot_id(),
        "seed": seed,
        "date_utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command(),
    }


def command() -> str:
    """Return this process's command with its options, without the folders of this machine.

    A path from the root keeps its name alone, also behind ``--option=``.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = spec.name.removesuffix(".__main__") if spec else ""
    start = ["python", "-m", module] if module else ["python", Path(sys.argv[0]).name]
    return shlex.join([*start, *(_without_folder(word) for word in sys.argv[1:])])


def _without_folder(word: str) -> str:
    option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return option + equals + (Path(value).name if Path(value).is_absolute() else value)


def same_session(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Return in which of :data:`SESSION` two results differ.

    Examples
    --------
    >>> here = dict.fromkeys(SESSION, "a")
    >>> same_session(here, here), same_session(here, {**here, "driver": "b"})
    ([], ['driver'])
    """
    return [key for key in SESSION if first.get(key) != second.get(key)]


def source_hash() -> str:
    """Return the SHA-256 over the package's sources and tuned constants, by name and content.

    It says which kernels ran where no Git checkout can say it.
    """
    digest = hashlib.sha256()
    folder = _KERNELS / "k3_kernels"
    for path in sorted(p for p in folder.rglob("*") if p.suffix in (".py", ".json")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return (_output(query) or "").split("\n")[0].strip() or None


def _commit() -> str | None:
    """Commit of the checkout, with ``-dirty`` if files differ; K3_KERNELS_COMMIT outside of one."""
    git = ["git", "-C", str(_KERNELS)]
    head = _output([*git, "rev-parse", "HEAD"])
    if head is None:
        return os.environ.get("K3_KERNELS_COMMIT")
    return head.strip() + ("-dirty" if _output([*git, "status", "--porcelain"]) else "")


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _boot_id() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None
