"""From masters to a model folder, and the proof that the folder is the model that was trained.

Needs torch and safetensors.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimik3_lab.config import K3Config
from kimik3_lab.reference import checkpoint
from kimik3_lab.reference.model import K3ForCausalLM
from tools.train_tiny_k3.experts import batch_experts
from tools.train_tiny_k3.masters import batched, reference_weights, round_mxfp4

__all__ = [
    "SHARD_BYTES",
    "check_weights",
    "file_entries",
    "install",
    "model_of_state",
    "write_json",
]

#: Just below the 15 MiB that a file of the repository may have.
SHARD_BYTES = 12 * 2**20


def model_of_state(state: Mapping[str, Any]) -> K3ForCausalLM:
    """Make the reference model of a saved training, float32, with the masters as its weights."""
    config = K3Config.from_dict(state["config"])
    stacked = K3ForCausalLM.uninitialized(config)
    batch_experts(stacked)
    with torch.no_grad():
        for name, parameter in stacked.named_parameters():
            if name in state["weights"]:
                parameter.copy_(state["weights"][name])
        for layer, bias in zip(batched(stacked), state["bias"], strict=True):
            layer.gate.e_score_correction_bias.copy_(bias)
    model = K3ForCausalLM.uninitialized(config)
    model.load_state_dict(reference_weights(stacked))
    return model


def check_weights(masters: K3ForCausalLM, folder: Path) -> int:
    """Compare a packed folder with what training computed with, bit by bit.

    Returns
    -------
    int
        Tensors compared.

    Raises
    ------
    ValueError
        Naming a tensor that differs.
    """
    packed = dict(checkpoint.load(folder).named_parameters())
    quantized = masters.config.expert_dtype == "mxfp4"
    float32 = ("A_log", "dt_bias", "o_norm.weight", "conv1d.weight", "e_score_correction_bias")
    for name, value in masters.named_parameters():
        want: Tensor = value.detach()
        if quantized and ".experts." in name:
            want = round_mxfp4(want)
        elif not name.endswith(float32):
            want = want.bfloat16().float()
        if not torch.equal(packed[name], want):
            raise ValueError(
                f"{folder}: {name} is not the rounded master, off by "
                f"{float((packed[name] - want).abs().max()):.3g}"
            )
    return len(packed)


def file_entries(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file below ``folder`` but PROVENANCE.json."""
    entries = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / "PROVENANCE.json":
            data = path.read_bytes()
            entries[path.relative_to(folder).as_posix()] = {
                "bytes": len(data),
                "sha256": hashlib.sha256(data).hexdigest(),
            }
    return entries


def install(staging: Path, folder: Path) -> None:
    """Put the finished ``staging`` in the place of ``folder``, which is kept until that worked."""
    old = folder.with_name(f".{folder.name}.old")
    if old.exists():
        shutil.rmtree(old)
    if folder.exists():
        os.replace(folder, old)
    try:
        os.replace(staging, folder)
    except OSError:
        if old.exists():
            os.replace(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def write_json(path: Path, body: Any, *, indent: int | None = 2) -> None:
    """Write JSON with a line end."""
    path.write_text(json.dumps(body, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")
