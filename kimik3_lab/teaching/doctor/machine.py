"""Checks of the machine: cores, memory, disk, GPU, and the port of the server.

Needs psutil; torch for the GPU.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from pathlib import Path

from kimik3_lab.paths import repository_dir
from kimik3_lab.teaching.doctor.check import GIB, Check

__all__ = ["check_cpu", "check_disk", "check_gpu", "check_memory", "check_port"]


def check_cpu(cores: int | None = None) -> Check:
    """Count the cores: with one, server and client wait for each other."""
    if cores is None:
        affinity = getattr(os, "sched_getaffinity", None)
        cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    if cores > 1:
        return Check("cpu", "OK", f"{cores} cores")
    mend = "expect other figures than ours; close what else is running"
    return Check("cpu", "WARN", "1 core: server and benchmark client share it", mend)


def check_memory(total: int | None = None) -> Check:
    """Judge the memory (bytes): a notebook and a server beside it must fit."""
    if total is None:
        import psutil

        total = min(psutil.virtual_memory().total, _container_limit())
    found = f"{total / GIB:.1f} GiB"
    mend = "run one notebook at a time and shut down the kernels of the others"
    if total < 2 * GIB:
        return Check("memory", "FAIL", f"{found}; the lessons need 2 GiB", "use a larger machine")
    if total < 4 * GIB:
        return Check("memory", "WARN", f"{found}; 4 GiB let two notebooks run at a time", mend)
    return Check("memory", "OK", found)


def _container_limit() -> int:
    try:
        return int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))
    except (OSError, ValueError):  # no limit reads "max"
        return sys.maxsize


def check_disk(free: int | None = None) -> Check:
    """Judge the room (bytes) for executed notebooks and results."""
    free = shutil.disk_usage(repository_dir()).free if free is None else free
    found = f"{free / GIB:.1f} GiB free"
    if free < GIB // 8:
        return Check("disk", "FAIL", f"{found}; notebooks cannot be saved", "free some space")
    if free < GIB:
        return Check("disk", "WARN", f"{found}; 1 GiB is comfortable", "free some space")
    return Check("disk", "OK", found)


def check_gpu() -> Check:
    """Name the CUDA device; none is needed."""
    import torch

    if not torch.cuda.is_available():
        detail = "no CUDA device: lessons run on CPU, kernels in the interpreter"
        return Check("gpu", "OK", detail)
    found = f"{torch.cuda.get_device_name()}, {torch.cuda.mem_get_info()[1] / GIB:.0f} GiB"
    # Triton builds its launcher with the system's C compiler when a kernel first runs.
    if os.environ.get("CC") or any(map(shutil.which, ("cc", "gcc", "clang"))):
        return Check("gpu", "OK", found)
    mend = "install gcc, or set K3LAB_DEVICE=cpu"
    return Check("gpu", "WARN", f"{found}, but no C compiler: Triton kernels need one", mend)


def check_port(port: int = 8000) -> Check:
    """Try the port that ``k3lab serve`` takes by default."""
    with socket.socket() as probe:
        # As a server does: a port that a closed connection still lingers on counts as free.
        if os.name == "posix":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            mend = f"stop that program, or use 'k3lab serve --port {port + 1}'"
            return Check("port", "WARN", f"{port} is taken by another program", mend)
    return Check("port", "OK", f"{port} is free for 'k3lab serve'")
