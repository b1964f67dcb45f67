"""Small numbers on their way to a GPU and back: copies that the processor does not wait for.

Needs torch. The executor sends the metadata of a step with it, and fetches sampled tokens.

A tensor made from a list lies in memory that the system may move, so a copy to the GPU first goes
through a buffer of the driver's while the processor waits. From *pinned* memory the GPU fetches it
by itself, behind whatever it still has to do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["OnItsWay", "send_columns", "to_device"]


def to_device(
    numbers: Sequence[int] | Sequence[float],
    device: torch.device | None = None,
    *,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """Send numbers to ``device``, or to the tensor ``out`` on it.

    Parameters
    ----------
    numbers
        As many as ``out`` holds.
    device
        Where to, if ``out`` is left out.
    out
        ``[len(numbers)]``.
    dtype
        int64 if left out.

    Returns
    -------
    Tensor
        ``[len(numbers)]``.

    Examples
    --------
    >>> to_device([3, 5], torch.device("cpu")).tolist()
    [3, 5]
    """
    target = device if out is None else out.device
    assert target is not None
    on_gpu = target.type == "cuda"
    # PyTorch keeps pinned memory until the copy out of it has happened.
    host = torch.tensor(numbers, dtype=dtype, pin_memory=on_gpu)
    if out is not None:
        return out.copy_(host, non_blocking=on_gpu)
    return host.to(target, non_blocking=on_gpu)


def send_columns(device: torch.device, *columns: Sequence[int]) -> list[Tensor]:
    """Send several lists of integers in one copy.

    Examples
    --------
    >>> [column.tolist() for column in send_columns(torch.device("cpu"), [3, 5], [], [7])]
    [[3, 5], [], [7]]
    """
    joined = to_device([number for column in columns for number in column], device)
    return list(torch.split(joined, [len(column) for column in columns]))


class OnItsWay:
    """Copies of tensors in the memory of the host, complete when :meth:`wait` returns.

    The device copies them when it has come so far; the host goes on meanwhile (vLLM:
    ``AsyncOutput`` in ``vllm/v1/worker/gpu/async_utils.py``).

    Parameters
    ----------
    tensors
        On one device. They may be overwritten afterwards.

    Examples
    --------
    >>> number = torch.tensor([3])
    >>> copies = OnItsWay(number)
    >>> number += 1
    >>> copies.wait()[0].tolist()
    [3]
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        self._copies = [
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu).copy_(
                tensor, non_blocking=on_gpu
            )
            for tensor in tensors
        ]
        if on_gpu:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> list[Tensor]:
        """Wait for the device to have come so far, and return the copies."""
        if self._event is not None:
            self._event.synchronize()
        return self._copies
