"""What Kimi K3 costs: parameters, bytes, arithmetic, and what others measured of serving it.

Needs the standard library; :mod:`kimik3_lab.performance.published` also needs scipy, and only when
an interval is asked for. Lessons 01 and 12 use it.
"""

from __future__ import annotations

from kimik3_lab.performance.accounting import AnatomyReport, ComponentRow, SequenceMemory, anatomy

__all__ = ["AnatomyReport", "ComponentRow", "SequenceMemory", "anatomy"]
