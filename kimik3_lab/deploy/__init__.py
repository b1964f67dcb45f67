"""Kimi K3 on vLLM: which command lines, on which machines, and why.

Importing this package imports nothing. Lesson 13 and ``k3lab deploy`` use its modules:
:mod:`~kimik3_lab.deploy.spec` says what is wanted, :mod:`~kimik3_lab.deploy.plan` answers with
commands or with a refusal, :mod:`~kimik3_lab.deploy.manifests` writes the commands down for a
launcher, and :mod:`~kimik3_lab.deploy.flags` knows what each release accepts.
"""

from __future__ import annotations

__all__ = ["flags", "manifests", "plan", "spec"]
