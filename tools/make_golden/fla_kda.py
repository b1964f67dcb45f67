"""Record FLA's naive Kimi Delta Attention: recurrence, chunked form and both gates.

``fla/ops/kda/naive.py`` is plain PyTorch and is imported as it is. ``gate.py`` also holds GPU
kernels, so only its two reference functions are compiled (see :func:`lift.lift`).

    python tools/make_golden/fla_kda.py [--check] [--cache DIR]
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from fixtures import Case, Oracle, Source, main
from lift import lift, load, sha256
from torch import Generator, Tensor
from wheels import fetch

NAIVE, GATE = "fla/ops/kda/naive.py", "fla/ops/kda/gate.py"
RECURRENCE = ["naive_recurrent_kda", "naive_chunk_kda"]
GATES = ["naive_kda_lowerbound_gate", "naive_kda_gate"]


def _unit(x: Tensor) -> Tensor:
    """L2-normalise the last dimension, as K3 does to q and k before the recurrence."""
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def _sequence(
    rng: Generator,
    tokens: int,
    *,
    batch: int = 1,
    heads: int = 2,
    key: int = 16,
    value: int = 16,
    decay: tuple[float, float] = (-2.5, -0.05),
    correlation: float = 0.0,
    state: bool = False,
    chunk: int | None = None,
) -> Case:
    """Random inputs; ``correlation`` mixes one common direction into all keys of a head."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng)

    k = normal(batch, tokens, heads, key)
    k = (1 - correlation) * k + correlation * normal(batch, 1, heads, key)
    low, high = decay
    inputs = {
        "q": _unit(normal(batch, tokens, heads, key)),
        "k": _unit(k),
        "v": normal(batch, tokens, heads, value),
        "g": low + (high - low) * torch.rand((batch, tokens, heads, key), generator=rng),
        "beta": torch.rand((batch, tokens, heads), generator=rng),
    }
    if state:
        inputs["state"] = normal(batch, heads, key, value)
    return Case(inputs, {"chunk_size": chunk})


def _gate(rng: Generator, tokens: int, heads: int, key: int, spread: float) -> Case:
    inputs = {
        "raw": spread * torch.randn((tokens, heads, key), generator=rng),
        "A_log": (1 + 15 * torch.rand(heads, generator=rng)).log(),
        "dt_bias": torch.randn(heads * key, generator=rng),
    }
    return Case(inputs, {"lower_bound": -5.0})


def make_cases(rng: Generator) -> dict[str, Case]:
    return {
        "one_token": _sequence(rng, 1),
        "short": _sequence(rng, 7, batch=2),
        "ragged": _sequence(rng, 37, value=24),
        "whole_chunks": _sequence(rng, 64, value=24, chunk=16, state=True),
        "initial_state": _sequence(rng, 19, state=True),
        "saturated_gate": _sequence(rng, 64, decay=(-4.9999, -4.9), chunk=32, state=True),
        "open_gate": _sequence(rng, 64, decay=(-1e-3, -1e-6), chunk=64),
        "mixed_gate": _sequence(rng, 45, decay=(-5.0, -1e-4), state=True),
        "correlated_keys": _sequence(rng, 64, decay=(-0.02, -1e-4), correlation=0.85, chunk=64),
        "released_width": _sequence(rng, 66, heads=1, key=128, value=128),
        "gate_middle": _gate(rng, 9, 3, 16, 1.0),
        "gate_wide": _gate(rng, 9, 3, 16, 6.0),
    }


def build(cache: Path) -> Oracle:
    wheel = fetch("fla-core", "0.6.0", cache)
    naive_file, gate_file = wheel.extract(NAIVE), wheel.extract(GATE)
    naive = load(naive_file)
    gates = lift(gate_file, GATES, {"torch": torch, "F": F})

    def run(name: str, case: Case) -> dict[str, Tensor]:
        given = case.inputs
        if "raw" in given:
            arguments = (given["raw"], given["A_log"], given["dt_bias"])
            return {
                "bounded": gates.naive_kda_lowerbound_gate(*arguments, case.params["lower_bound"]),
                "softplus": gates.naive_kda_gate(*arguments),
            }
        sequence = [given[key] for key in ("q", "k", "v", "g", "beta")]
        common = {"initial_state": given.get("state"), "output_final_state": True}
        o, state = naive.naive_recurrent_kda(*sequence, **common)
        outputs = {"o": o, "state": state}
        if size := case.params["chunk_size"]:
            o, state = naive.naive_chunk_kda(*sequence, **common, chunk_size=size)
            outputs |= {"o_chunk": o, "state_chunk": state}
        return outputs

    sources = [
        Source(NAIVE, RECURRENCE, sha256(naive_file), "the file, imported as published"),
        Source(GATE, GATES, sha256(gate_file), "these functions only, compiled from the file"),
    ]
    return Oracle(
        name="fla_kda",
        package="fla-core",
        version="0.6.0",
        licence="MIT, (c) 2023-2026 Songlin Yang, Yu Zhang, Zhiyuan Li",
        sources=sources,
        make_cases=make_cases,
        run=run,
        seed=20_001,
        wheel_sha256=wheel.sha256,
    )


if __name__ == "__main__":
    main(build, "Record or check the fixture of FLA's naive KDA.")
