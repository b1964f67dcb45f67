"""One rank of eight on one GPU: Kimi K3's true widths, random weights, every rung of the ladder.

Needs torch and Triton; measuring needs a GPU with 100 GiB. Lesson 10 shows what it measured.

``python -m kimik3_lab.rank`` writes ``data/results/h200/ladder.json``. ``weights`` builds the slice
on the device, ``routing_skew`` gives its router the trained model's uneven load, ``acceptance``
decides how many drafts are kept, ``workload`` drives the scheduler and the executor, ``step_floor``
says what a step costs at the least, ``step_times`` measures it, ``ladder`` climbs after a
``rehearsal``, ``resume`` keeps what an earlier call measured, ``results`` writes. What is computed
is compared with the reference part by part: ``step_trace`` watches, ``layer_check`` compares.
"""

from __future__ import annotations
