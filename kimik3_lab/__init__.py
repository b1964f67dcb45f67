"""Kimi K3 Serving Lab: rebuild the serving of a frontier model, step by step.

Importing the package is cheap: it pulls in neither torch nor a plotting library. Import the part
that you need, for example ``from kimik3_lab.reference import kda``.
"""

from __future__ import annotations

from kimik3_lab.config import ConfigError, K3Config

__all__ = ["ConfigError", "K3Config", "__version__"]

__version__ = "0.1.0"
