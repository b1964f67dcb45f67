"""Serving: scheduler, cache bookkeeping and engine in plain Python, executors beside them.

Needs the standard library only; :mod:`kimik3_lab.serving.executors` needs torch and is not imported
here. Lessons 07 to 10 use it.
"""

from __future__ import annotations

from kimik3_lab.serving.async_scheduler import AsyncScheduler, make_scheduler
from kimik3_lab.serving.config import CacheConfig, SchedulerConfig
from kimik3_lab.serving.engine import Engine, EngineStats, Executor, GenerationResult
from kimik3_lab.serving.outputs import (
    CachedRequestData,
    EngineCoreOutput,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    SchedulerStats,
)
from kimik3_lab.serving.request import Request, RequestStatus, SamplingParams
from kimik3_lab.serving.scheduler import Scheduler

__all__ = [
    "AsyncScheduler",
    "CacheConfig",
    "CachedRequestData",
    "Engine",
    "EngineCoreOutput",
    "EngineStats",
    "Executor",
    "GenerationResult",
    "ModelRunnerOutput",
    "NewRequestData",
    "Request",
    "RequestStatus",
    "SamplingParams",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerOutput",
    "SchedulerStats",
    "make_scheduler",
]
