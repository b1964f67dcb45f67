"""Model, drafter and switches put together to an executor.

Needs torch, once something is built. Used by ``k3lab serve`` (lessons 00 and 10).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimik3_lab.drafter_config import DSparkConfig
from kimik3_lab.serving.engine import Executor
from kimik3_lab.serving.server.options import ServeOptions, ServerStartError

if TYPE_CHECKING:
    from kimik3_lab.serving.executors.execution import ExecutionConfig
    from kimik3_lab.serving.server.engine_settings import EngineSettings

__all__ = ["build_executor", "longest_draft"]


def longest_draft(options: ServeOptions) -> int:
    """Tokens that the drafter makes at a time; 0 if there is none.

    Raises
    ------
    ValueError
        If a drafter was asked for and cannot be read.
    """
    folder = _drafter_folder(options)
    return 0 if folder is None else DSparkConfig.load(folder).block_size


def _drafter_folder(options: ServeOptions) -> Path | None:
    if options.drafter is not None:
        return Path(options.drafter)
    folder = Path(options.model) / "drafter"
    return folder if folder.is_dir() else None


def build_executor(options: ServeOptions, settings: EngineSettings) -> Executor:
    """Load the weights and make the executor.

    Raises
    ------
    ServerStartError
        If the weights or the device cannot be used or there is no memory.
    """
    import torch

    from kimik3_lab.reference import checkpoint, drafter_checkpoint
    from kimik3_lab.serving.executors.torch_executor import TorchExecutor

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    _check_device(options.device)
    folder, dtype = Path(options.model), getattr(torch, options.dtype)
    try:
        model = checkpoint.load(folder, dtype=dtype)
    except Exception as error:  # a damaged file fails in many ways, none of them a defect here
        raise ServerStartError(f"cannot load the weights in {folder}: {error}") from error
    num_drafts = settings.scheduler.num_speculative_tokens
    drafter = None
    if num_drafts and (drafter_folder := _drafter_folder(options)) is not None:
        try:
            drafter = drafter_checkpoint.load(drafter_folder, dtype=dtype)
        except Exception as error:
            raise ServerStartError(
                f"cannot load the drafter in {drafter_folder}: {error}"
            ) from error
    switches: dict[str, Any] = {
        "backend": options.backend,
        "device": options.device,
        "execution": _execution(options, settings),
    }
    if drafter is not None:
        switches |= {
            "drafter": drafter,
            "num_speculative_tokens": num_drafts,
            "draft_sample_method": options.draft_sample_method,
            "rejection_sample_method": options.rejection_sample_method,
        }
    try:
        executor: Executor = TorchExecutor(model, settings.cache, options.max_num_seqs, **switches)
    except (RuntimeError, MemoryError) as error:
        raise ServerStartError(
            f"no memory for a cache of {settings.cache.num_blocks} blocks and "
            f"{options.max_num_seqs} sequences; lower num_blocks or max_num_seqs ({error})"
        ) from error
    except ValueError as error:
        raise ServerStartError(f"cannot serve {folder} so: {error}") from error
    return executor


def _check_device(device: str | None) -> None:
    """Refuse a device that PyTorch does not know, or that this machine does not have."""
    import torch

    if device is None:
        return
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ServerStartError(
            f"--device {device!r} is no device of PyTorch: expected cpu, cuda or cuda:0"
        ) from error
    try:
        torch.zeros(1, device=place).item()  # some know only when they compute
    except Exception as error:  # AssertionError, RuntimeError and others, by device
        reason = str(error).partition("\n")[0]
        raise ServerStartError(
            f"--device {device!r} cannot be used here: {reason}. Leave it out to compute on the CPU"
        ) from error


def _execution(options: ServeOptions, settings: EngineSettings) -> ExecutionConfig:
    """Take the preset's ways to compute a step, and what was set besides."""
    from dataclasses import replace

    from kimik3_lab.serving.executors.execution import ExecutionConfig

    config = (
        ExecutionConfig()
        if settings.preset is None
        else ExecutionConfig.from_preset(settings.preset)
    )
    given = {
        name: getattr(options, name)
        for name in ("mixed_batch", "deferred_finalize", "cuda_graphs")
        if getattr(options, name) is not None
    }
    return replace(config, **given)
