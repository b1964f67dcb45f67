"""Read golden fixtures: recorded inputs and outputs of code that nobody here wrote.

Where they come from, and how to record them again, is in ``tools/make_golden/README.md``. Reading
them needs torch and safetensors only.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

torch.set_num_threads(1)  # tensors this small only lose time by being shared out

GOLDEN = Path(__file__).resolve().parents[2] / "data" / "golden"


@dataclass(frozen=True)
class Golden:
    """One recorded call."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)

    def given(self, *names: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        """Inputs by name, in ``dtype``."""
        return [self.inputs[name].to(dtype) for name in names]


@functools.cache
def load(fixture: str) -> dict[str, Golden]:
    """All cases of ``data/golden/<fixture>.safetensors``."""
    with safe_open(GOLDEN / f"{fixture}.safetensors", framework="pt") as file:
        params = json.loads(file.metadata()["cases"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    cases = {name: Golden(params=values) for name, values in params.items()}
    for key, tensor in tensors.items():
        case, side, label = key.split("/")
        (cases[case].inputs if side == "in" else cases[case].outputs)[label] = tensor
    return cases


def names(fixture: str, prefix: str = "") -> list[str]:
    """Names of the cases of a fixture that start with ``prefix``, for ``parametrize``."""
    found = [name for name in load(fixture) if name.startswith(prefix)]
    assert found, f"{fixture} has no case that starts with {prefix!r}"
    return found


def error(actual: Tensor, recorded: Tensor) -> float:
    """Largest absolute difference over the largest recorded magnitude; NaN counts as infinite."""
    assert actual.shape == recorded.shape, (
        f"{tuple(actual.shape)}, recorded {tuple(recorded.shape)}"
    )
    scale = recorded.double().abs().max()
    assert scale > 0, "the recorded tensor is zero everywhere and can judge nothing"
    difference = (actual.double() - recorded.double()).abs().max() / scale
    return difference.nan_to_num(nan=torch.inf).item()
