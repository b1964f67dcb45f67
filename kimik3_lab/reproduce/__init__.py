"""A benchmark of two servers that somebody else can run and you can check: a folder, and its table.

Importing this package imports nothing. Lesson 13 and ``k3lab reproduce`` use its modules:
:mod:`~kimik3_lab.reproduce.pack` says what is run, :mod:`~kimik3_lab.reproduce.pins` which defaults
moved between two releases, :mod:`~kimik3_lab.reproduce.b300` and
:mod:`~kimik3_lab.reproduce.cpu` make packs, :mod:`~kimik3_lab.reproduce.scripts` writes the folder
and :mod:`~kimik3_lab.reproduce.report` reads what came out.
"""

from __future__ import annotations

__all__ = ["b300", "cpu", "pack", "pins", "report", "scripts"]
