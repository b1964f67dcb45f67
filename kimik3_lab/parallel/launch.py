"""Start ranks: processes that can exchange tensors, on GPUs or on the CPU.

Needs torch. ``torchrun`` starts ranks as well: a program under it takes ``Ranks.here()`` after
``torch.distributed.init_process_group``. This starts them from inside a program, and brings back
what they return.
"""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing as torch_multiprocessing
from torch.multiprocessing.spawn import ProcessException

from kimik3_lab.parallel.groups import Ranks

__all__ = ["RankFailedError", "run_ranks"]


class RankFailedError(RuntimeError):
    """A rank raised an error; the text has its number and traceback."""


def run_ranks(
    function: Callable[..., Any],
    size: int,
    *arguments: Any,
    backend: str = "gloo",
    timeout_s: float = 120.0,
) -> list[Any]:
    """Run ``function(ranks, *arguments)`` in ``size`` processes that can exchange tensors.

    Parameters
    ----------
    function
        Importable from a module by its name; ``ranks`` is this process's :class:`Ranks`.
    size
        Number of processes. With NCCL process r uses GPU r.
    arguments
        Anything that can be pickled.
    backend
        ``"gloo"`` or ``"nccl"``.
    timeout_s
        Longest that a rank waits for the others in one exchange.

    Returns
    -------
    list
        What each rank returned, in their order.

    Raises
    ------
    RankFailedError
        If a rank failed; with the traceback of the first that did. The others are ended.
    ValueError
        If there are fewer GPUs than ranks.

    Examples
    --------
    ``run_ranks(measure, 2, backend="nccl")`` runs ``measure(ranks)`` on two GPUs.
    """
    if size < 1:
        raise ValueError(f"at least one rank is needed, got {size}")
    if backend == "nccl" and torch.cuda.device_count() < size:
        raise ValueError(
            f"{size} ranks with NCCL need a GPU each, found {torch.cuda.device_count()}: take "
            "fewer ranks, or backend='gloo' for processes on the CPU"
        )
    # One server imports torch, the ranks are forked from it: a rank starts in a tenth of a second.
    # Forking from here would copy whatever threads and locks this process has.
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["kimik3_lab.parallel.preload"])
    with tempfile.TemporaryDirectory(prefix="k3lab-ranks-") as folder:
        try:
            torch_multiprocessing.start_processes(
                _run_rank,
                (function, size, arguments, backend, timeout_s, folder),
                nprocs=size,
                start_method="forkserver",
            )
        except ProcessException as error:
            # Others fail because one did: that one wrote first.
            told = sorted(Path(folder).glob("failed-*"), key=lambda path: path.stat().st_mtime_ns)
            if not told:
                raise
            text = told[0].read_text(encoding="utf-8")
            raise RankFailedError(f"rank {told[0].name.removeprefix('failed-')}: {text}") from error
        return [pickle.loads(_result(folder, rank).read_bytes()) for rank in range(size)]


def _run_rank(
    rank: int,
    function: Callable[..., Any],
    size: int,
    arguments: tuple[Any, ...],
    backend: str,
    timeout_s: float,
    folder: str,
) -> None:
    device = None
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # the ranks share the processor
    dist.init_process_group(
        backend,
        store=dist.FileStore(str(Path(folder) / "store"), size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device,
    )
    try:
        result = function(Ranks.here(), *arguments)
        _result(folder, rank).write_bytes(pickle.dumps(result))
        dist.barrier()  # nobody leaves while another still reads from it
    except Exception:
        text = traceback.format_exc()
        Path(folder, f"failed-{rank}").write_text(text, encoding="utf-8")
        raise
    finally:
        dist.destroy_process_group()


def _result(folder: str, rank: int) -> Path:
    return Path(folder) / f"result-{rank}.pickle"
