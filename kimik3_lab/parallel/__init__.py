"""Kimi K3 over several ranks that really exchange tensors: tensor, expert and context parallel.

Needs torch; NCCL for GPUs, gloo for CPUs. Lesson 02 asks where experts should lie; lessons 11 and
13 price the exchanges that happen here.

Start in :mod:`kimik3_lab.parallel.groups` (ranks and what they exchange), go on to
:mod:`~kimik3_lab.parallel.moe` (a layer's experts over ranks), :mod:`~kimik3_lab.parallel.dcp` (an
MLA cache over ranks) and :mod:`~kimik3_lab.parallel.model` (all of it together).
"""

from __future__ import annotations
