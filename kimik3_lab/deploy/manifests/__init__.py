"""A deployment written down for what starts it: shell, Ray, Slurm, Kubernetes, Compose.

Importing this package imports nothing. Lesson 13 and ``k3lab deploy --manifest`` use
:mod:`kimik3_lab.deploy.manifests.write`. Every kind is a typed model; its text is parsed back into
the model before it is handed out.
"""

from __future__ import annotations

__all__ = ["write"]
