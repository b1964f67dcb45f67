"""What ranks need, imported once by the server that they are forked from.

Needs torch; :func:`kimik3_lab.parallel.launch.run_ranks` names it. PyTorch imports a good part of
itself only when a model is made for the first time, so one is made here: two seconds that no rank
has to spend. One thread, because a process that is forked has no other.
"""

from __future__ import annotations

import torch

torch.set_num_threads(1)

from kimik3_lab.config import K3Config  # noqa: E402
from kimik3_lab.parallel.model import ParallelK3  # noqa: E402
from kimik3_lab.reference.initialization import random_model  # noqa: E402

__all__: list[str] = []

ParallelK3(random_model(K3Config.micro(), seed=0))
