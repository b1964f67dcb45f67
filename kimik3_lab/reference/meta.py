"""Models that are shaped first and filled afterwards, without what PyTorch would load for it.

A checkpoint is read into a model that was made on the meta device, which holds shapes and no
numbers. PyTorch serves two steps of that with Python code of its compiler: filling an embedding,
and ``to_empty``. To load the compiler takes a few seconds of every server's and lesson's start.
Needs torch; used by the model and the drafter.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["allocate", "embedding"]


def embedding(
    rows: int, columns: int, *, dtype: torch.dtype, device: torch.device | str | None
) -> nn.Embedding:
    """Make an embedding; on the meta device, one without the random numbers that nobody sees.

    Parameters
    ----------
    rows, columns
        Size of the table ``[rows, columns]``.
    dtype, device
        Of the table.

    Examples
    --------
    >>> embedding(8, 4, dtype=torch.float16, device="meta").weight.shape
    torch.Size([8, 4])
    """
    if str(device) != "meta":
        return nn.Embedding(rows, columns, dtype=dtype, device=device)
    table = torch.empty(rows, columns, dtype=dtype, device=device)
    return nn.Embedding.from_pretrained(table, freeze=False)


def allocate(model: nn.Module, device: torch.device | str | None) -> None:
    """Give every weight and buffer of a model memory on ``device``, with anything in it.

    Parameters
    ----------
    model
        One on the meta device, whose modules share no weight.
    device
        Where to; None is torch's default device.

    Examples
    --------
    >>> layer = torch.nn.Linear(4, 2, device="meta")
    >>> allocate(layer, "cpu")
    >>> layer.weight.device, layer.weight.shape
    (device(type='cpu'), torch.Size([2, 4]))
    """
    device = torch.get_default_device() if device is None else device
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            made = torch.empty(weight.shape, dtype=weight.dtype, device=device)
            setattr(module, name, nn.Parameter(made, requires_grad=weight.requires_grad))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))
