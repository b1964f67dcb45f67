"""What a search for the cheapest configuration came to: what was tried, and the answer.

Needs the standard library. Made by :mod:`kimik3_lab.simulation.planner`, printed by ``k3lab plan``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from kimik3_lab.simulation.plan_choices import Candidate
from kimik3_lab.simulation.slo import Slo

__all__ = ["Attempt", "Plan"]


@dataclass(frozen=True)
class Attempt:
    """One configuration that was looked at.

    Attributes
    ----------
    name
        Of the replica.
    replicas, gpus
        How many, and GPUs in all; 0 for what cannot run.
    price
        Of all of it for an hour.
    kept
        Whether it keeps the promise.
    simulated
        Whether a replica was simulated, or the cost model was enough to say no.
    measured
        Figures of the promise, if simulated.
    excess
        The worst figure over its limit; None if not simulated.
    reason
        Why it was not taken; empty if it keeps the promise.
    requests
        Requests that were simulated.
    """

    name: str
    replicas: int
    gpus: int
    price: float
    kept: bool
    simulated: bool
    measured: dict[str, float | None] = field(default_factory=dict)
    excess: float | None = None
    reason: str = ""
    requests: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain content for JSON; what is infinite there is None."""
        excess = self.excess
        finite = excess is not None and math.isfinite(excess)
        return {
            "configuration": self.name,
            "replicas": self.replicas,
            "gpus": self.gpus,
            "price": self.price,
            "kept": self.kept,
            "simulated": self.simulated,
            "requests": self.requests,
            "measured": self.measured,
            "excess": excess if finite else None,
            "reason": self.reason,
        }


@dataclass
class Plan:
    """Outcome of a search.

    Attributes
    ----------
    slo
        The promise.
    best
        The cheapest attempt that keeps it, None if none does.
    candidate
        The replica of :attr:`best`.
    nearest
        If nothing fits: the simulated attempt that missed by least.
    attempts
        All that was looked at, in order.
    checks
        The best again: under other scenarios, and as a whole fleet.
    notes
        What a reader must know.
    """

    slo: Slo
    best: Attempt | None = None
    candidate: Candidate | None = None
    nearest: Attempt | None = None
    attempts: list[Attempt] = field(default_factory=list)
    checks: list[Attempt] = field(default_factory=list)
    notes: tuple[str, ...] = ()

    @property
    def simulations(self) -> int:
        """Replicas that were simulated."""
        return sum(attempt.simulated for attempt in self.attempts)

    @property
    def text(self) -> str:
        """The answer in one sentence or two."""
        if self.best is not None:
            return (
                f"{self.best.replicas} x {self.best.name} ({self.best.gpus} GPUs, price "
                f"{self.best.price:,.6g}) is the cheapest that keeps {self.slo.text}."
            )
        told = f"Nothing fits: no configuration keeps {self.slo.text}."
        if self.nearest is not None:
            told += (
                f" Nearest: {self.nearest.replicas} x {self.nearest.name}, {self.nearest.reason}."
            )
        elif self.attempts:
            told += f" {self.attempts[-1].name}: {self.attempts[-1].reason}."
        return told

    def to_dict(self) -> dict[str, Any]:
        """Plain content for JSON."""
        return {
            "slo": self.slo.to_dict(),
            "answer": self.text,
            "best": self.best and self.best.to_dict(),
            "nearest": self.nearest and self.nearest.to_dict(),
            "notes": list(self.notes),
            "simulations": self.simulations,
            "attempts": [attempt.to_dict() for attempt in self.attempts],
            "checks": [attempt.to_dict() for attempt in self.checks],
        }
