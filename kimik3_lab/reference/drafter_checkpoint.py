"""A drafter's folder to a :class:`DSparkDrafter` and back, as strictly as the model's own.

Needs torch and safetensors. Lesson 09 saves and loads a small drafter; the released one
(Inferact/Kimi-K3-DSpark) has the same names.

A drafter hides a loading mistake better than any model: with a weight left out it still drafts,
the target still corrects it, the text is right, and only the acceptance falls to nothing. So every
name, shape and type is compared before a weight is read.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import save_file

from kimik3_lab.drafter_config import DSparkConfig
from kimik3_lab.reference import meta
from kimik3_lab.reference.checkpoint import (
    INDEX_FILE,
    CheckpointError,
    StoredTensor,
    open_tensors,
)
from kimik3_lab.reference.drafter import DSparkDrafter

__all__ = ["TARGET_COPIES", "CheckpointError", "drafter_tensors", "load", "save"]

#: The target's own tensors, of which a drafter's folder may hold a copy: the release has the
#: embedding. They are passed over, as the drafter is handed the target itself.
TARGET_COPIES = ("embed_tokens.weight", "lm_head.weight")
#: The release stores everything in bfloat16; this head is computed, and may be stored, in float32.
_CONFIDENCE = "confidence_head."


def drafter_tensors(config: DSparkConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of each of the drafter's own tensors, in checkpoint order.

    Examples
    --------
    >>> from math import prod
    >>> shapes = drafter_tensors(DSparkConfig())
    >>> len(shapes), sum(map(prod, shapes.values()))
    (67, 2387907841)
    """
    drafter = DSparkDrafter(config, device="meta")
    return {name: tuple(value.shape) for name, value in drafter.state_dict().items()}


def load(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> DSparkDrafter:
    """Load a drafter's folder.

    Parameters
    ----------
    path
        Folder with ``config.json`` and either ``model.safetensors`` or shards with
        ``model.safetensors.index.json``. Copies of the target's embedding and output head are
        passed over.
    dtype
        Of weights and activations in memory; the confidence head is float32 or wider.
    device
        Where to put it.

    Returns
    -------
    DSparkDrafter
        In evaluation mode; its parameters want no gradient.

    Raises
    ------
    ConfigError
        If ``config.json`` is missing, wrong, or of a drafter of another form.
    CheckpointError
        If a file cannot be read, or tensors are missing, extra, or of another shape or type; all
        of them are named.

    Examples
    --------
    >>> import tempfile
    >>> from kimik3_lab.config import K3Config
    >>> drafter = DSparkDrafter(DSparkConfig.for_target(K3Config.micro()), dtype=torch.bfloat16)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(drafter, folder)
    ...     again = load(folder, dtype=torch.bfloat16)
    >>> torch.equal(again.context_proj.weight, drafter.context_proj.weight)
    True
    """
    folder = Path(path)
    config = DSparkConfig.load(folder)
    with ExitStack() as files, torch.no_grad():
        stored = open_tensors(folder, files)
        _check(stored, config)
        drafter = DSparkDrafter(config, dtype=dtype, device="meta")
        meta.allocate(drafter, device)
        for name, parameter in drafter.named_parameters():
            parameter.copy_(stored[name].read())
    return drafter.eval().requires_grad_(False)


def save(drafter: DSparkDrafter, path: str | Path) -> None:
    """Write ``config.json`` and ``model.safetensors`` into a folder, all or nothing.

    Parameters
    ----------
    drafter
        Its own 67 tensors (65 without a confidence head) are stored, in bfloat16 as released.
    path
        Folder; made if need be. Files other than weights and configuration stay as they are.

    Examples
    --------
    >>> from kimik3_lab.config import K3Config
    >>> from kimik3_lab.drafter_config import DSparkConfig
    >>> drafter = DSparkDrafter(DSparkConfig.for_target(K3Config.micro()))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(drafter, folder)
    ...     load(folder).config == drafter.config
    True
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in drafter.state_dict().items()
    }
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as scratch:
        staging = Path(scratch)
        save_file(tensors, staging / "model.safetensors", metadata={"format": "pt"})
        drafter.config.save(staging)
        # safetensors makes files that only their owner can read.
        shutil.copymode(staging / "config.json", staging / "model.safetensors")
        for name in ("model.safetensors", "config.json"):
            os.replace(staging / name, folder / name)
    # Shards of an earlier checkpoint here, whose index would win over the new file.
    for old in (*folder.glob("model-*-of-*.safetensors"), folder / INDEX_FILE):
        old.unlink(missing_ok=True)


def _check(stored: dict[str, StoredTensor], config: DSparkConfig) -> None:
    """Compare all tensors of a folder with what its configuration calls for, naming every fault."""
    expected = drafter_tensors(config)
    copies = dict.fromkeys(TARGET_COPIES, (config.vocab_size, config.target_hidden_size))
    faults = [f"{name} is missing" for name in expected if name not in stored]
    for name, tensor in stored.items():
        if name not in expected | copies:
            faults.append(f"{name} is not part of this drafter")
            continue
        shape = (expected | copies)[name]
        if tensor.shape != shape:
            faults.append(f"{name} has shape {tensor.shape}, expected {shape}")
        types = ("BF16", "F32") if name.startswith(_CONFIDENCE) else ("BF16",)
        if name in expected and tensor.dtype not in types:
            faults.append(f"{name} is {tensor.dtype}, expected {' or '.join(types)}")
    if not faults:
        return
    if not config.confidence_head and any(name.startswith(_CONFIDENCE) for name in stored):
        faults.append("config.json says enable_confidence_head false, but the head is there")
    what = "this is not the drafter that its config.json describes"
    raise CheckpointError("\n  ".join([f"{what}:", *faults]))
