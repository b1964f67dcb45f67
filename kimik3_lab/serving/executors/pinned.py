"""Small integers on their way to a GPU: one copy that the processor does not wait for.

Needs torch. The executor sends the metadata of a step with it.

A tensor made from a list lies in memory that the system may move, so a copy to the GPU first goes
through a buffer of the driver's while the processor waits. From *pinned* memory the GPU fetches it
by itself, behind whatever it still has to do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["to_device"]


def to_device(
    numbers: Sequence[int], device: torch.device | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Send integers to ``device``, or to the tensor ``out`` on it.

    Parameters
    ----------
    numbers
        As many as ``out`` holds.
    device
        Where to, if ``out`` is left out.
    out
        int64 ``[len(numbers)]``.

    Returns
    -------
    Tensor
        int64 ``[len(numbers)]``.

    Examples
    --------
    >>> to_device([3, 5], torch.device("cpu")).tolist()
    [3, 5]
    """
    target = device if out is None else out.device
    assert target is not None
    on_gpu = target.type == "cuda"
    # PyTorch keeps pinned memory until the copy out of it has happened.
    host = torch.tensor(numbers, dtype=torch.int64, pin_memory=on_gpu)
    if out is not None:
        return out.copy_(host, non_blocking=on_gpu)
    return host.to(target, non_blocking=on_gpu)
