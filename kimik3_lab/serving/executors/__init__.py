"""What can compute a step: each module here has an executor for the engine, or a part of one.

Needs torch, module by module; importing this package alone imports nothing. Lessons 07 and 10.
"""

from __future__ import annotations

__all__ = ["paged_cache", "paged_mixer", "sampler", "torch_executor"]
