"""Serving on a machine that is not there: the real scheduler, priced steps, a virtual clock.

Needs numpy at most. Lessons 11 and 12 and ``k3lab simulate`` use it.

``spec`` says what is simulated, ``executor`` takes the place of the model, ``closed_loop`` and
``arrivals`` send requests, ``results`` holds what came out.
"""

from __future__ import annotations

from kimik3_lab.simulation.arrivals import simulate_arrivals
from kimik3_lab.simulation.closed_loop import simulate_closed_loop
from kimik3_lab.simulation.drive import SimulationError
from kimik3_lab.simulation.executor import SimulatedExecutor
from kimik3_lab.simulation.requests import SimulationRequest
from kimik3_lab.simulation.results import SimulationResult
from kimik3_lab.simulation.spec import SimulationSpec

__all__ = [
    "SimulatedExecutor",
    "SimulationError",
    "SimulationRequest",
    "SimulationResult",
    "SimulationSpec",
    "simulate_arrivals",
    "simulate_closed_loop",
]
