"""Released tensor names to a model and back, strictly: nothing missing, extra or of another type.

Needs torch and safetensors. Lesson 01 loads ``data/tiny-k3``; lesson 13 opens the real thing.

Silence is the usual failure here. An engine that skips a name it does not know, or leaves a weight
uninitialised, answers fluently and wrongly. So every tensor is compared with
:func:`kimik3_lab.tensors.checkpoint_tensors` first, and the error names it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kimik3_lab.config import K3Config
from kimik3_lab.reference import mxfp4
from kimik3_lab.reference.model import K3ForCausalLM
from kimik3_lab.tensors import RELEASED_PREFIX, TensorSpec, checkpoint_tensors

__all__ = [
    "INDEX_FILE",
    "CheckpointError",
    "StoredTensor",
    "load",
    "open_tensors",
    "save",
]

_SINGLE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
#: Parts of the released checkpoint that are not the text model.
_VISION = ("vision_tower.", "mm_projector.")
_TORCH = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}
_PACKED, _SCALE = "_packed", "_scale"


class CheckpointError(ValueError):
    """A checkpoint that is not the one its ``config.json`` describes; the message names why."""


# -- load ------------------------------------------------------------------------------------------


def load(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> K3ForCausalLM:
    """Load a model folder.

    Parameters
    ----------
    path
        Folder with ``config.json`` and either ``model.safetensors`` or shards with
        ``model.safetensors.index.json``. Names may be flat or nested under ``language_model.``
        as released; there, vision tensors are passed over. Convolution taps may be ``[C, 1, 4]``
        or ``[C, 4]``.
    dtype
        Of weights and activations in memory. MXFP4 experts are unpacked to it.
    device
        Where to put the model.

    Returns
    -------
    K3ForCausalLM
        In evaluation mode; its parameters want no gradient.

    Raises
    ------
    ConfigError
        If ``config.json`` is missing or wrong.
    CheckpointError
        If a file cannot be read, or a tensor is missing, extra, or of another shape or type.

    Examples
    --------
    >>> from kimik3_lab.paths import default_model_dir
    >>> model = load(default_model_dir())
    >>> model.config.num_hidden_layers, model.dtype
    (13, torch.float32)
    """
    folder = Path(path)
    config = K3Config.load(folder)
    with ExitStack() as files, torch.no_grad():
        tensors = open_tensors(folder, files)
        prefix = RELEASED_PREFIX if any(n.startswith(RELEASED_PREFIX) for n in tensors) else ""
        expected = {spec.name: spec for spec in checkpoint_tensors(config, prefix=prefix)}
        _check_names(tensors, expected, config)
        for name, spec in expected.items():
            _check_tensor(name, tensors[name], spec)

        model = K3ForCausalLM.uninitialized(config, dtype=dtype, device=device)
        parameters = dict(model.named_parameters())
        for name, spec in expected.items():
            if spec.packing == "mxfp4_scale":
                continue  # read together with the bytes that it scales
            value = tensors[name].read()
            if spec.packing == "mxfp4_packed":
                name = name.removesuffix(_PACKED)
                value = mxfp4.dequantize(value, tensors[name + _SCALE].read(), dtype)
            parameter = parameters.pop(name.removeprefix(prefix))
            parameter.copy_(value.reshape(parameter.shape))
    if parameters:
        raise AssertionError(f"checkpoint_tensors does not list {sorted(parameters)}")
    return model.eval().requires_grad_(False)


class StoredTensor:
    """A tensor in an open file: shape and type now, data when asked for."""

    def __init__(self, file: Any, name: str) -> None:
        view = file.get_slice(name)
        self.shape, self.dtype = tuple(view.get_shape()), view.get_dtype()
        self.read: Callable[[], Tensor] = lambda: file.get_tensor(name)


def open_tensors(folder: Path, files: ExitStack) -> dict[str, StoredTensor]:
    """Open all safetensors files of a folder, which ``files`` closes.

    Raises
    ------
    CheckpointError
        If there are none, one cannot be read, or the index and the files disagree.

    Examples
    --------
    >>> from kimik3_lab.paths import default_model_dir
    >>> with ExitStack() as files:
    ...     open_tensors(default_model_dir(), files)["lm_head.weight"].shape
    (2048, 192)
    """
    index = folder / INDEX_FILE
    if index.is_file():
        weight_map = _read_index(index)
        shards = sorted(set(weight_map.values()))
    elif (folder / _SINGLE).is_file():
        weight_map, shards = None, [_SINGLE]
    else:
        raise CheckpointError(
            f"{folder} has neither {_SINGLE} nor {INDEX_FILE}: no weights to load"
        )

    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        try:
            file = files.enter_context(safe_open(folder / shard, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {folder / shard}: {error}") from error
        for name in file.keys():  # noqa: SIM118 - a safetensors file is not a dict
            if weight_map is not None and weight_map.get(name) != shard:
                raise CheckpointError(
                    f"tensor {name} lies in {shard}, but {INDEX_FILE} says "
                    f"{weight_map.get(name, 'nothing about it')}"
                )
            tensors[name] = StoredTensor(file, name)
    for name, shard in (weight_map or {}).items():
        if name not in tensors:
            raise CheckpointError(
                f"tensor {name} is missing from {shard}, where {INDEX_FILE} puts it"
            )
    return tensors


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        pairs = list(weight_map.items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from error
    for name, shard in pairs:
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{index} puts {name} in {shard!r}, which is not a file name")
    return dict(pairs)


def _check_names(
    tensors: dict[str, StoredTensor], expected: dict[str, TensorSpec], config: K3Config
) -> None:
    missing = [name for name in expected if name not in tensors]
    extra = [name for name in tensors if name not in expected and not name.startswith(_VISION)]
    hint = ""
    if any(name.endswith(_PACKED) for name in extra):
        hint = "; the experts are packed, so config.json needs expert_dtype mxfp4"
    elif config.expert_dtype == "mxfp4" and any(".experts." in name for name in extra):
        hint = "; the experts are not packed, so config.json needs expert_dtype bf16"
    for what, names in (("missing", missing), ("not part of this model", extra)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(f"tensor {names[0]}{more} is {what}{hint}")


def _check_tensor(name: str, stored: StoredTensor, spec: TensorSpec) -> None:
    shapes = [spec.shape]
    if name.endswith("conv1d.weight"):
        shapes.append((spec.shape[0], spec.shape[2]))
    if stored.shape not in shapes:
        expected = " or ".join(map(str, shapes))
        raise CheckpointError(f"tensor {name} has shape {stored.shape}, expected {expected}")
    if stored.dtype != spec.dtype:
        raise CheckpointError(f"tensor {name} is {stored.dtype}, expected {spec.dtype}")


# -- save ------------------------------------------------------------------------------------------


def save(
    model: K3ForCausalLM,
    path: str | Path,
    *,
    prefix: str = "",
    max_shard_bytes: int | None = None,
) -> None:
    """Write ``config.json`` and the weights into a folder, all or nothing.

    Everything is written next to its place first and moved there when it is complete, so an
    interrupted save leaves the folder's old checkpoint as it was, and files other than weights and
    configuration stay untouched.

    Parameters
    ----------
    model
        Weights are converted to the type that :mod:`kimik3_lab.tensors` lists; experts are
        packed if ``model.config.expert_dtype`` is ``"mxfp4"``.
    path
        Folder; made if need be.
    prefix
        ``""`` for flat names, ``"language_model."`` for released names.
    max_shard_bytes
        Start a new file beyond this size; ``None`` for a single file.

    Examples
    --------
    >>> from kimik3_lab.reference.initialization import random_model
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(random_model(K3Config.micro()), folder, max_shard_bytes=200_000)
    ...     sorted(path.name for path in Path(folder).glob("*.safetensors"))
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as scratch:
        staging = Path(scratch)
        written = _write_shards(model, staging, prefix, max_shard_bytes)
        model.config.save(staging)
        for name in written:  # safetensors makes files that only their owner can read
            shutil.copymode(staging / "config.json", staging / name)
        # Weights first, then what points at them: index and configuration.
        for name in (*written, "config.json"):
            os.replace(staging / name, folder / name)
    for old in (*folder.glob("model-*-of-*.safetensors"), folder / _SINGLE, folder / INDEX_FILE):
        if old.name not in written:
            old.unlink(missing_ok=True)


def _write_shards(
    model: K3ForCausalLM, folder: Path, prefix: str, max_shard_bytes: int | None
) -> list[str]:
    """Write all weight files into ``folder`` and return their names, the index last."""
    specs = list(checkpoint_tensors(model.config, prefix=prefix))
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if max_shard_bytes is not None and shards[-1] and size + spec.bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.bytes

    stored = _on_disk(model, prefix)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        if max_shard_bytes is None:
            name = _SINGLE
        tensors = {spec.name: next(stored) for spec in shard}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    names = list(dict.fromkeys(weight_map.values()))
    if max_shard_bytes is not None:
        body = {
            "metadata": {"total_size": sum(spec.bytes for spec in specs)},
            "weight_map": weight_map,
        }
        (folder / INDEX_FILE).write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
        names.append(INDEX_FILE)
    return names


def _on_disk(model: K3ForCausalLM, prefix: str) -> Iterator[Tensor]:
    """Yield tensors in checkpoint order, in their type on disk."""
    state = model.state_dict()
    scale: Tensor | None = None
    for spec in checkpoint_tensors(model.config, prefix=prefix):
        if spec.packing == "mxfp4_scale":
            assert scale is not None, "a scale follows the bytes that it scales"
            yield scale
            continue
        value = state[spec.name.removeprefix(prefix).removesuffix(_PACKED)].cpu()
        if spec.packing == "mxfp4_packed":
            value, scale = mxfp4.quantize(value)
        yield value.to(_TORCH[spec.dtype]).contiguous()
