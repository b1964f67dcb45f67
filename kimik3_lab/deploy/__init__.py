"""Kimi K3 on vLLM: which command lines, on which machines, and why.

Importing this package imports nothing. Lesson 13 and ``k3lab deploy`` use its modules.
"""

from __future__ import annotations

__all__ = ["flags"]
