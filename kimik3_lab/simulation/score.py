"""How far the simulated machine is from the six published points, beside its peer.

Needs numpy, the scheduler and the cost model. Lesson 11 prints it. Run it with
``python -m kimik3_lab.simulation.score``; ``--output`` writes the result with its provenance, which
is how ``data/results/simulated/six_points.json`` was made (with ``--leave-one-out``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kimik3_lab.json_file import write_json
from kimik3_lab.provenance import provenance
from kimik3_lab.serving.presets import V0_27_1
from kimik3_lab.simulation.aiconfigurator import best_settings, recorded_version
from kimik3_lab.simulation.budget_claim import budget_alone
from kimik3_lab.simulation.point_scores import (
    PRESETS,
    MakeSpec,
    mean_errors,
    over_seeds,
    score_points,
)
from kimik3_lab.simulation.refit import leave_one_out
from kimik3_lab.simulation.spec import SimulationSpec

__all__ = ["report"]


def report(seeds: Sequence[int], make_spec: MakeSpec = SimulationSpec) -> dict[str, Any]:
    """Everything that the command prints, as plain data."""
    by_seed = [score_points(seeds=(seed,), make_spec=make_spec) for seed in seeds]
    scores = over_seeds(by_seed)
    scenario = make_spec(V0_27_1).scenario
    return {
        "ttft_statistic": scenario.ttft_statistic,
        "scenario": asdict(scenario),
        "seeds": list(seeds),
        "points": [
            {
                **asdict(score),
                "latency_error": score.latency_error,
                "ttft_mean_error": score.ttft_error("mean"),
                "ttft_median_error": score.ttft_error("median"),
                "throughput_error": score.throughput_error,
            }
            for score in scores
        ],
        "mean_errors": mean_errors(scores),
        "mean_errors_by_version": {
            version: mean_errors([s for s in scores if s.version == version]) for version in PRESETS
        },
        "mean_errors_by_seed": [mean_errors(of_seed) for of_seed in by_seed],
        "budget_alone": [
            {**asdict(gain), "inside": gain.inside}
            for caching in (True, False)
            for gain in budget_alone(make_spec=make_spec, seeds=seeds, prefix_caching=caching)
        ],
    }


def _unseen() -> list[dict[str, Any]]:
    """Each concurrency, predicted by a fit to the others."""
    return [
        {
            "concurrency": left.concurrency,
            "latency_error": left.latency_error,
            "errors": {score.version: score.latency_error for score in left.scores},
            "values": dict(left.fit.values),
        }
        for left in leave_one_out()
    ]


def main() -> None:
    """Compare the simulated machine with the six published points."""
    import argparse

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seeds", type=int, default=8, help="runs of each point, for the spread")
    parser.add_argument(
        "--leave-one-out", action="store_true", help="refit without each concurrency; minutes"
    )
    parser.add_argument("--output", type=Path, help="write all of it as JSON")
    arguments = parser.parse_args()
    body = report(range(arguments.seeds))
    if arguments.leave_one_out:
        body["leave_one_out"] = _unseen()
    _print(body)
    if arguments.output is not None:
        write_json(arguments.output, {"provenance": provenance(device="simulated"), **body})


def _print(body: Mapping[str, Any]) -> None:
    print("version             c      latency s      mean TTFT ms    median TTFT ms    requests")
    for point in body["points"]:
        low, high = point["completed_range"]
        print(
            f"{point['version']:16} {point['concurrency']:4d}"
            f" {point['latency_s']:7.2f} {point['latency_error']:+6.1f}%"
            f" {point['ttft_mean_ms']:9.0f} {point['ttft_mean_error']:+7.1f}%"
            f" {point['ttft_median_ms']:9.0f} {point['ttft_median_error']:+7.1f}%"
            f" {point['completed_requests']:4d} {point['throughput_error']:+6.1f}%"
            f" (published {point['published_completed']}, seeds {low}-{high})"
        )
    print("mean absolute errors in percent:")
    names = ("latency", "ttft_mean", "ttft_median", "throughput")
    for version, errors in {"all": body["mean_errors"], **body["mean_errors_by_version"]}.items():
        print(f"  {version:16} " + ", ".join(f"{name} {errors[name]:.1f}" for name in names))
    spans = (
        f"{name} {min(e[name] for e in body['mean_errors_by_seed']):.1f}-"
        f"{max(e[name] for e in body['mean_errors_by_seed']):.1f}"
        for name in names
    )
    print(f"  {'single seeds':16} {', '.join(spans)}")
    print(f"aiconfigurator {recorded_version()} as recorded, its best settings:")
    for best in best_settings().values():
        print(
            f"  {best.version:16} {best.kind:10} latency {best.latency:.1f}, ttft {best.ttft:.1f}, "
            f"throughput {best.throughput:.1f} ({best.setting})"
        )
    print(f"the published TTFT is taken for the {body['ttft_statistic']}")
    for gain in body["budget_alone"]:
        low, high = gain["ttft_range"]
        print(
            f"PR 51725 alone at {gain['concurrency']}, prefix caching "
            f"{'on as claimed' if gain['prefix_caching'] else 'off'}: TTFT -{gain['ttft_gain']:.1f}"
            f" % (seeds {low:.0f}-{high:.0f}), mean -{gain['ttft_mean_gain']:.1f} %, throughput "
            f"{gain['throughput_gain']:+.1f} %; {'inside' if gain['inside'] else 'outside'} the "
            "claim of -55 to -65 %"
        )
    for left in body.get("leave_one_out", ()):
        print(
            f"fitted without {left['concurrency']}: latency off by {left['latency_error']:.1f} %",
            {version: f"{error:+.1f} %" for version, error in left["errors"].items()},
        )


if __name__ == "__main__":
    main()
