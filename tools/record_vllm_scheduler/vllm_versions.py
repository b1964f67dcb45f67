"""vLLM's scheduler classes, imported without a GPU, and everything that differs between releases.

Needs vLLM (0.27.1 to 0.33.0; a CPU build, or the sources of a GPU build). Used by the other modules
of this folder and by ``tests/vllm``; no other module asks for a version.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Read when vLLM is imported: a GPU wheel on a machine without a GPU has to be told what it is.
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import vllm
from vllm import platforms

if platforms.current_platform.is_unspecified():
    from vllm.platforms.cpu import CpuPlatform

    platforms.current_platform = CpuPlatform()

from vllm.config import SpeculativeConfig, VllmConfig
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

logging.getLogger("vllm").setLevel(logging.ERROR)

__all__ = [
    "VERSION",
    "AsyncScheduler",
    "Scheduler",
    "UnknownToThisVersion",
    "keep_known",
    "require_known",
    "resolve_kv_cache_block_sizes",
    "retention",
    "set_drafter",
]

#: The version as it stands in a recording, without a build tag such as ``+cpu``.
VERSION = vllm.__version__.partition("+")[0]

_DRAFT_METHODS = {"eagle3-parallel": ("eagle3", True), "dflash": ("dflash", True)}
_DRAFT_METHODS |= {"dspark": ("dspark", True), "eagle3": ("eagle3", False)}
_DRAFT_METHODS |= {"mtp": ("mtp", False), "draft_model": ("draft_model", False)}
_DRAFT_METHODS |= {"pard": ("draft_model", True)}
_RETENTION_VARIABLE = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"


class UnknownToThisVersion(ValueError):
    """A scenario asks for something that this release of vLLM does not have."""


def keep_known(function: Callable[..., Any], **arguments: Any) -> Any:
    """Call ``function`` with those ``arguments`` that it knows: for values that are its default."""
    names = inspect.signature(function).parameters
    return function(**{name: value for name, value in arguments.items() if name in names})


def require_known(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return ``arguments``; raise :class:`UnknownToThisVersion` if ``function`` lacks one."""
    unknown = sorted(set(arguments) - set(inspect.signature(function).parameters))
    if unknown:
        raise UnknownToThisVersion(f"vLLM {VERSION} has no {', '.join(unknown)}")
    return arguments


@contextmanager
def retention(config: dict[str, Any], kv_cache_config: Any) -> Iterator[None]:
    """Set ``retention_interval`` while a scheduler is built; left out, all states are kept.

    0.27.1 reads an environment variable. Later releases have a field of ``CacheConfig``, which the
    planner copies to ``KVCacheConfig``; the scheduler reads the copy, made by hand here.
    """
    interval = config.get("retention_interval")
    if hasattr(kv_cache_config, "prefix_cache_retention_interval"):
        kv_cache_config.prefix_cache_retention_interval = interval
        yield
        return
    if interval is not None:
        os.environ[_RETENTION_VARIABLE] = str(interval)
    try:
        yield
    finally:
        os.environ.pop(_RETENTION_VARIABLE, None)


def set_drafter(vllm_config: VllmConfig, method: str) -> None:
    """Turn an ngram drafter into another one, and let vLLM work out its budget again.

    No draft checkpoint is needed to schedule, so none is loaded.
    """
    drafter: SpeculativeConfig = vllm_config.speculative_config
    if method not in _DRAFT_METHODS:
        known = ", ".join(["ngram", *sorted(_DRAFT_METHODS)])
        raise ValueError(f"spec must be one of {known}, got {method!r}")
    drafter.method, drafter.parallel_drafting = _DRAFT_METHODS[method]
    drafter.draft_model_config = drafter.draft_model_config or vllm_config.model_config
    asked = vllm_config.scheduler_config.max_num_scheduled_tokens
    if asked == vllm_config.scheduler_config.max_num_batched_tokens:  # ngram's answer, not ours
        vllm_config.scheduler_config.max_num_scheduled_tokens = None
    vllm_config._set_max_num_scheduled_tokens()
