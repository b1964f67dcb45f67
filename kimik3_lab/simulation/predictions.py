"""Predictions for cells that the model has not seen, with intervals, made before any is scored.

Needs numpy, the scheduler and the cost model. Lesson 11 reads the file. Made by
``python -m kimik3_lab.simulation.predictions --output data/results/predictions.json``; versions,
commit and command go into ``predictions.provenance.json`` beside it.

A value is what the client would see: first tokens and gaps between tokens come from simulated runs,
so that prompts of other requests lengthen the gaps. Its interval comes from the constants and
scenarios (:mod:`kimik3_lab.performance.sensitivity`), applied to the steps that a cell is made of.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kimik3_lab.json_file import write_json
from kimik3_lab.performance.measurements import load_measurements
from kimik3_lab.performance.parallelism import Parallelism
from kimik3_lab.performance.scenarios import Scenario
from kimik3_lab.performance.sensitivity import Spread, spread
from kimik3_lab.performance.step_cost import EXECUTION_SWITCHES
from kimik3_lab.performance.step_work import StepWork, decode_work, prefill_work
from kimik3_lab.provenance import provenance
from kimik3_lab.serving.presets import MAIN_2026_09_13, Preset
from kimik3_lab.simulation.acceptance import chance_of_mean, survival_curve
from kimik3_lab.simulation.closed_loop import simulate_closed_loop
from kimik3_lab.simulation.spec import SimulationSpec

__all__ = ["Cell", "best_num_drafts", "predict_all"]

#: Accepted tokens a step on random prompts, which repeat themselves: the note of the B300 rows of
#: https://github.com/sgl-project/sglang/pull/37878, at K = 7.
RANDOM_PROMPTS_ACCEPTANCE = 6.4
#: Switches that the first image for K3 had already: kernels for few rows and prompts in place.
FIRST_IMAGE = frozenset({"kda_prefill_in_place", "skinny_gemm", "other_step_changes"})
#: What vLLM's mixed steps take longer is only seen with drafts, and in one engine.
UNMIXED = {"mixed_batch_token": 0.0}
#: Seconds of a draft that is not sampled by top-p, as the published runs of 2026-09-13 were: steps
#: with drafts took 13 to 15 ms with the first image on GB300.
GREEDY_DRAFT_S = 0.05e-3
#: Requests that ran at a time on two nodes of 8 H200, however many were sent: output tokens a
#: second times seconds between tokens, of the row at 64.
H200_SEATS = 24


@dataclass(frozen=True)
class Cell:
    """What is predicted: a machine, a load, and which scenario it is predicted under."""

    hardware: str
    parallel: Parallelism
    engine: str
    isl: int
    osl: int
    num_drafts: int = 0
    acceptance: float | None = None
    execution: frozenset[str] = EXECUTION_SWITCHES
    scenario: Scenario = field(default_factory=Scenario.default)
    cache_itemsize: int = 2
    seats: int | None = None
    constants: Mapping[str, float] = field(default_factory=dict)

    def chosen_scenario(self) -> Scenario:
        """Return the scenario with this cell's acceptance and cache."""
        chosen = replace(self.scenario, cache_itemsize=self.cache_itemsize, cold_start_s=0.0)
        if self.acceptance is None:
            return chosen
        return replace(
            chosen,
            acceptance_length=self.acceptance,
            acceptance_num_drafts=self.num_drafts,
            acceptance_spread=0.0,
        )

    def corners(self) -> tuple[Scenario, ...]:
        """Return the choices that matter outside the published points, one changed at a time."""
        base = self.chosen_scenario()
        return (
            replace(base, name="even routing", routing_skew=0.0),
            replace(base, name="skewed routing", routing_skew=1.0),
            replace(base, name="vLLM's own all-reduce", all_reduce="custom"),
        )

    def specification(self) -> SimulationSpec:
        """Return what the simulator takes."""
        settings: dict[str, Any] = {"num_speculative_tokens": self.num_drafts}
        if not self.num_drafts:
            settings["speculative_method"] = None
        if self.seats is not None:
            settings["max_num_seqs"] = self.seats
        if self.hardware == "H200":  # the default for GPUs of less than 160 GiB
            settings["max_num_batched_tokens"] = 8192
        preset: Preset = replace(MAIN_2026_09_13, execution=self.execution)
        return SimulationSpec(
            preset,
            hardware=self.hardware,
            parallel=self.parallel,
            scenario=self.chosen_scenario(),
            constants=self.constants,
            scheduler=settings,
            kv_dtype="fp8" if self.cache_itemsize == 1 else "bf16",
            utilization=0.9 if self.hardware != "H200" else 1.0,
            num_blocks=None if self.hardware != "H200" else 4000,
        )

    def spread(self, steps: Sequence[tuple[float, StepWork]]) -> Spread:
        """Return the interval of a sum of steps on this cell's machine."""
        return spread(
            steps,
            self.hardware,
            self.parallel,
            execution=self.execution,
            scenario=self.chosen_scenario(),
            corners=self.corners(),
            constants=self.constants,
        )

    def decode(self, seqs: int) -> StepWork:
        """Return a step in the middle of the answers."""
        context = self.isl + self.osl // 2
        return decode_work(seqs, context=context, num_speculative_tokens=self.num_drafts)

    def row(
        self, name: str, concurrency: int, metric: str, unit: str, **values: Any
    ) -> dict[str, Any]:
        """Make one entry of the file."""
        return {
            "id": name,
            "hardware": self.hardware,
            "parallelism": self.parallel.name,
            "engine": self.engine,
            "spec": f"DSpark K={self.num_drafts}" if self.num_drafts else "none",
            "isl": self.isl,
            "osl": self.osl,
            "concurrency": concurrency,
            "acceptance": self.acceptance,
            "metric": metric,
            "unit": unit,
            **values,
        }


def _interval(value: float, found: Spread) -> dict[str, float]:
    return {
        "low": round(value * found.low_ratio, 3),
        "value": round(value, 3),
        "high": round(value * found.high_ratio, 3),
    }


def _tpot(cell: Cell, name: str, concurrency: int, seconds: float) -> dict[str, Any]:
    """Median time between tokens in a closed loop, in milliseconds."""
    result = simulate_closed_loop(
        cell.specification(),
        concurrency,
        seconds,
        prompt_tokens=cell.isl,
        output_tokens=cell.osl,
        keep_records=False,
    )
    value = result.latency("tpot_ms", "median")
    if value is None:
        raise RuntimeError(f"{name}: no request ended in {seconds} simulated seconds")
    running = min(concurrency, cell.seats or concurrency)
    steps = cell.osl / (cell.acceptance or 1.0)
    # Between its first and last token a request sees the prompts of all others go by once.
    found = cell.spread([(steps, cell.decode(running)), (running - 1.0, prefill_work(cell.isl))])
    alone = cell.spread([(steps, cell.decode(running))])
    row = cell.row(name, concurrency, "TPOT, median", "ms", **_interval(value, found))
    # A client that sends all requests at once and no more after them sees fewer prompts go by.
    row["low"] = round(min(row["low"], 1e3 * alone.value_s / cell.osl), 3)
    row["decode_step_ms"] = round(1e3 * alone.value_s / steps, 3)
    return row


def _ttft(cell: Cell, name: str, concurrency: int) -> dict[str, Any]:
    """Median time to first token of requests that arrive together, in milliseconds."""
    result = simulate_closed_loop(
        cell.specification(),
        concurrency,
        600.0,
        prompt_tokens=cell.isl,
        output_tokens=cell.osl,
        warmup=0.0,
        cooldown=0.0,
        max_requests=concurrency,
        keep_records=False,
    )
    value = result.latency("ttft_ms", "median")
    if value is None:
        raise RuntimeError(f"{name}: no request ended")
    found = cell.spread([(1.0, prefill_work(cell.isl))])
    return cell.row(name, concurrency, "TTFT, median", "ms", **_interval(value, found))


def best_num_drafts(
    cell: Cell, concurrency: int, acceptance: Mapping[int, float], *, within: float = 0.0
) -> list[int]:
    """Find the numbers of drafts with the least time per token of one request, the best first.

    Prompts of other requests cost the same whatever it is, so that decode steps decide.

    Parameters
    ----------
    acceptance
        Tokens that a step yields, by number of drafts; with none it is 1.
    within
        Also take those that need up to this share more.
    """
    costs = {}
    for drafts, length in {0: 1.0, **acceptance}.items():
        other = replace(cell, num_drafts=drafts)
        model = other.specification().make_costs()
        costs[drafts] = model.step_cost(other.decode(concurrency)).total_s / length
    least = min(costs.values())
    found = [drafts for drafts, cost in costs.items() if cost <= least * (1.0 + within)]
    return sorted(found, key=costs.__getitem__)


def _best(cell: Cell, name: str, concurrency: int) -> dict[str, Any]:
    measured = {row.id: row.value for row in load_measurements()}
    sets = []
    for kind in ("standard", "block"):
        sets.append({k: measured[f"golden-acceptance-k{k}-{kind}"] or 1.0 for k in range(1, 9)})
    base = Scenario.default()
    chance = chance_of_mean(base.acceptance_length, base.acceptance_num_drafts)
    sets.append({k: 1.0 + sum(survival_curve(chance, k)) for k in range(1, 9)})
    value = best_num_drafts(cell, concurrency, sets[0])[0]
    # What is 3 % slower cannot be told from the best.
    others = [
        drafts
        for scenario in (cell.scenario, *cell.corners())
        for acceptance in sets
        for drafts in best_num_drafts(
            replace(cell, scenario=scenario), concurrency, acceptance, within=0.03
        )
    ]
    return cell.row(
        name,
        concurrency,
        "number of drafts with the least time per token",
        "drafts",
        low=min(value, *others),
        value=value,
        high=max(value, *others),
    )


def predict_all() -> Iterator[dict[str, Any]]:
    """Yield every entry, in the order of the file."""
    eight = Parallelism(8)
    other = "kernels as in SGLang 0.5.18 or vLLM 2026-09"
    plain = Cell("B300", eight, other, 8192, 1024, constants=UNMIXED)
    drafted = replace(plain, num_drafts=7, acceptance=RANDOM_PROMPTS_ACCEPTANCE)
    for c in (16, 32, 64):
        yield _tpot(plain, f"b300-nospec-tpot-c{c}", c, 600.0)
    for c in (1, 16, 32, 64):
        yield _tpot(drafted, f"b300-dspark7-tpot-c{c}", c, 300.0)
    vllm = replace(plain, engine="vLLM main 2026-09-13")
    for isl in (129, 513, 2049, 8193, 16_385):
        yield _ttft(replace(vllm, isl=isl, osl=2), f"b300-ttft-isl{isl}", 1)
    for c in (16, 64):
        yield _ttft(replace(vllm, osl=1024), f"b300-ttft-c{c}", c)
    first = Cell(
        "GB300",
        eight,
        "vLLM, first image for K3 (2026-07-27)",
        8192,
        1024,
        execution=FIRST_IMAGE,
        cache_itemsize=1,
        constants={**UNMIXED, "markov_draft": GREEDY_DRAFT_S},
    )
    for acceptance in (2.61, 4.73):
        cell = replace(first, num_drafts=7, acceptance=acceptance)
        found = cell.spread([(1.0, cell.decode(1))])
        yield cell.row(
            "gb300-dspark7-c1",
            1,
            "decode rate per user",
            "tok/s",
            low=round(acceptance / found.high_s, 1),
            value=round(acceptance / found.value_s, 1),
            high=round(acceptance / found.low_s, 1),
            decode_step_ms=round(1e3 * found.value_s, 3),
            tpot_ms=round(1e3 * found.value_s / acceptance, 3),
        )
    found = first.spread([(1.0, first.decode(1))])
    step = _interval(1e3 * found.value_s, found)
    yield first.row("gb300-step-c1", 1, "decode step", "ms", **step)
    h200 = Cell(
        "H200",
        Parallelism(16),
        "vLLM, first image for K3, Marlin",
        1000,
        1000,
        execution=frozenset({"other_step_changes"}),
        scenario=replace(Scenario.default(), moe_backend="marlin"),
        seats=H200_SEATS,
    )
    for c in (1, 16, 64):
        yield _tpot(h200, f"h200-tp16-tpot-c{c}", c, 600.0)
    for c in (1, 4, 16, 64):
        yield _best(replace(vllm, osl=1000, isl=8000), f"best-k-c{c}", c)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or print the predictions."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--output", type=Path, help="file to write; printed if left out")
    chosen = parser.parse_args(arguments)
    rows = []
    for row in predict_all():
        rows.append(row)
        print(
            f"{row['id']:28} {row['value']:10.6g} {row['unit']:6} "
            f"[{row['low']:.6g}, {row['high']:.6g}]",
            flush=True,
        )
    if chosen.output is not None:
        write_json(chosen.output, rows)
        beside = chosen.output.with_suffix(".provenance.json")
        write_json(beside, {"provenance": provenance(device="simulated")})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
