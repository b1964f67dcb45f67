"""The two configurations under one name, see the modules that define them."""

from __future__ import annotations

from kimik3_lab.serving.cache_config import CacheConfig
from kimik3_lab.serving.scheduler_config import Batching, SchedulerConfig

__all__ = ["Batching", "CacheConfig", "SchedulerConfig"]
