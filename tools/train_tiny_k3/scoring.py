"""Bits per byte of a model on documents.

Needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kimik3_lab.config import K3Config
from kimik3_lab.reference.model import K3ForCausalLM
from tools.train_tiny_k3.forward import forward_batch, token_logits

__all__ = ["Rows", "bits_per_byte", "document_rows"]

_IGNORE = -100


class Rows(NamedTuple):
    """Windows of documents: ``inputs`` and ``targets``, int64 ``[R, T]``; -100 is not scored."""

    inputs: Tensor
    targets: Tensor
    num_bytes: int


def document_rows(
    encoded: Sequence[Sequence[int]], num_bytes: int, config: K3Config, length: int
) -> Rows:
    """Cut documents into windows of ``length`` tokens, each after a bos, none seeing the last.

    Every token of a document is scored once, and its eos too: without it a text has no end.

    Examples
    --------
    >>> rows = document_rows([[5, 6, 7]], 9, K3Config.micro(), length=3)
    >>> rows.inputs.tolist(), rows.targets.tolist()
    ([[0, 5, 6], [0, 2, 2]], [[5, 6, 7], [1, -100, -100]])
    """
    inputs, targets = [], []
    for ids in encoded:
        whole = [*ids, config.eos_token_id]
        for start in range(0, len(whole), length):
            part = whole[start : start + length]
            pad = length - len(part)
            inputs.append([config.bos_token_id, *part[:-1], *[config.pad_token_id] * pad])
            targets.append([*part, *[_IGNORE] * pad])
    return Rows(torch.tensor(inputs), torch.tensor(targets), num_bytes)


@torch.no_grad()
def bits_per_byte(model: K3ForCausalLM, rows: Rows, batch_size: int = 16) -> float:
    """Score all rows; a model in training mode comes back in training mode."""
    was_training = model.training
    model.eval()
    device = model.lm_head.weight.device
    nats = torch.zeros((), dtype=torch.float64, device=device)
    for start in range(0, len(rows.inputs), batch_size):
        inputs = rows.inputs[start : start + batch_size].to(device)
        targets = rows.targets[start : start + batch_size].to(device)
        logits = token_logits(model, forward_batch(model, inputs).hidden)
        nats += F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=_IGNORE, reduction="sum"
        ).double()
    model.train(was_training)
    return float(nats) / math.log(2) / rows.num_bytes
