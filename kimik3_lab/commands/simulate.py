"""``k3lab simulate``: serve Kimi K3 on a node that is not there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kimik3_lab.commands._errors import CommandError
from kimik3_lab.commands._presets import print_presets

if TYPE_CHECKING:
    from kimik3_lab.benchmark.traces import TraceRequest
    from kimik3_lab.simulation import SimulationSpec

__all__ = ["simulate"]

_PUBLISHED = "v0.27.1,main-2026-09-13"
_Interval = StrEnum("_Interval", ["estimated", "simulated", "none"])
_Router = StrEnum("_Router", ["round-robin", "least-loaded", "prefix-aware"])


def simulate(
    preset: Annotated[
        str,
        typer.Option(
            metavar="NAME,...", help="Rungs of the ladder, v0.27.1 and up; '?' lists them."
        ),
    ] = _PUBLISHED,
    concurrency: Annotated[
        str, typer.Option(metavar="N,N,...", help="Closed loop: streams that start together.")
    ] = "1,4,16",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Prompt length.")] = 8000,
    output_tokens: Annotated[int, typer.Option(min=1, help="Answer length.")] = 1000,
    duration: Annotated[
        float | None,
        typer.Option(
            help="Simulated seconds.",
            show_default="150; 3600 with --workload; with --trace until all have ended",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Open loop instead: requests of a trace, at its times; see 'k3lab trace'.",
        ),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Or of a made-up trace, see 'k3lab trace'; '?' lists."),
    ] = None,
    rate_scale: Annotated[
        float, typer.Option(help="Requests of the trace arrive that many times as often.")
    ] = 1.0,
    replicas: Annotated[
        int, typer.Option(min=1, help="Machines that share the requests of the trace.")
    ] = 1,
    router: Annotated[
        _Router, typer.Option(metavar="NAME", help=f"Who shares them out: {', '.join(_Router)}.")
    ] = _Router["round-robin"],
    hardware: Annotated[
        str, typer.Option(metavar="GPU", help="B300, GB300, B200 or H200.")
    ] = "B300",
    tp: Annotated[int, typer.Option(help="GPUs that split every matrix.")] = 8,
    ep: Annotated[int, typer.Option(help="GPUs with whole experts: 1 (none) or tp * dp.")] = 1,
    dp: Annotated[int, typer.Option(help="Copies of all but the routed experts.")] = 1,
    pp: Annotated[int, typer.Option(help="Stages of a pipeline.")] = 1,
    dcp: Annotated[int, typer.Option(help="GPUs that share the rows of a sequence.")] = 1,
    switch: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A switch of scheduler, cache or execution, such as token_budget=adaptive; may be "
            "given again. '?' lists them.",
        ),
    ] = None,
    assume: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="What public figures leave open, such as acceptance_length=2.61; '?' lists.",
        ),
    ] = None,
    cold: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Concurrency whose cell finds a server that has just been started; 0: none.",
        ),
    ] = 1,
    seed: Annotated[int, typer.Option(help="Of the drafts that are accepted.")] = 0,
    interval: Annotated[
        _Interval,
        typer.Option(
            metavar="HOW",
            help="Span of each figure over the choices that public figures leave open: estimated "
            "from the same steps, simulated (some eight times as long), or none.",
        ),
    ] = _Interval.estimated,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show where the time of a step goes.")
    ] = False,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of a table.")
    ] = False,
) -> None:
    """Simulate Kimi K3 on 8 B300 or other GPUs: real scheduler, priced steps.

    The default is the published comparison: 8,000 tokens in, 1,000 out, 150 s,
    TP8, a drafter of K = 8. Intervals span what public figures leave open.

    Try it:  k3lab simulate --preset v0.27.1 --concurrency 4 --explain
    """
    if _listed(preset, switch, assume):
        return
    from kimik3_lab.commands import _simulate_runs as runs
    from kimik3_lab.commands import _simulate_tables as tables

    sizes = {"tp": tp, "ep": ep, "dp": dp, "pp": pp, "dcp": dcp}
    try:
        specs = _specs(preset, hardware, sizes, switch, assume)
        if trace is None and workload is None:
            if rate_scale != 1.0 or replicas != 1:
                raise CommandError(
                    "--rate-scale and --replicas need --trace or --workload: a closed loop has no "
                    "rate, and one machine"
                )
            body: dict[str, Any] = {
                "duration_s": 150.0 if duration is None else duration,
                "prompt_tokens": prompt_tokens,
                "output_tokens": output_tokens,
                "seed": seed,
            }
            rows = runs.closed_loops(
                specs, _numbers(concurrency), body,
                cold=cold, interval=interval.value, quiet=json_output,
            )  # fmt: skip
        else:
            body = {"load": str(trace or workload), "rate_scale": rate_scale, "seed": seed}
            rows = runs.open_loops(
                specs,
                _load(trace, workload, rate_scale, duration, seed),
                replicas=replicas,
                router=router.value,  # type: ignore[arg-type]
                duration=duration if workload is None else None,
                seed=seed,
                quiet=json_output,
            )
    except (ValueError, KeyError, OSError, RuntimeError) as error:
        # str() of a KeyError is in quotes, of an OSError it names the file.
        text = error.args[0] if isinstance(error, KeyError) else str(error)
        raise CommandError(text) from error
    if json_output:
        if not explain:
            for row in rows:
                del row["explain"]
        statistic = specs[0].scenario.ttft_statistic
        head = {"ttft_statistic": statistic, "hardware": hardware, "parallel": _name(specs)}
        typer.echo(json.dumps({**head, **body, "rows": rows}, indent=2, allow_nan=False))
        return
    tables.print_rows(rows, specs[0].scenario.ttft_statistic)
    if explain:
        for row in rows:
            tables.print_explanation(row)


def _listed(preset: str, switch: list[str] | None, assume: list[str] | None) -> bool:
    """Print what an option takes if it was asked for with '?'."""
    from dataclasses import fields

    if preset == "?":
        print_presets()
        return True
    if "?" in (switch or ()):
        from kimik3_lab.simulation.switches import switch_names

        typer.echo("\n".join(switch_names()))
        return True
    if "?" in (assume or ()):
        from kimik3_lab.performance.scenarios import Scenario

        default = Scenario.default()
        for field in fields(Scenario):
            typer.echo(f"{field.name:24} {getattr(default, field.name)}")
        return True
    return False


def _specs(
    presets: str,
    hardware: str,
    sizes: dict[str, int],
    switches: list[str] | None,
    assumptions: list[str] | None,
) -> list[SimulationSpec]:
    from kimik3_lab.performance.parallelism import Parallelism
    from kimik3_lab.performance.scenarios import Scenario
    from kimik3_lab.simulation import SimulationSpec
    from kimik3_lab.simulation.switches import find_preset, set_scenario, set_switches

    scenario = set_scenario(Scenario.default(), _pairs("--assume", assumptions))
    parallel = Parallelism(**sizes)
    specs = []
    for name in presets.split(","):
        spec = SimulationSpec(find_preset(name), hardware, parallel, scenario)
        spec = set_switches(spec, _pairs("--set", switches))
        spec.make_engine()  # refuses what cannot work, before anything runs
        specs.append(spec)
    return specs


def _load(
    trace: Path | None, workload: str | None, rate_scale: float, duration: float | None, seed: int
) -> Callable[[], Iterable[TraceRequest]]:
    from kimik3_lab.benchmark.synthetic_traces import SYNTHETIC_TRACES, synthetic_trace
    from kimik3_lab.benchmark.traces import read_trace, scale_rate

    if trace is not None and workload is not None:
        raise CommandError("give --trace or --workload, not both")
    if trace is not None:
        file = read_trace(trace)
        return lambda: scale_rate(file, rate_scale)
    if workload == "?":
        raise CommandError(f"--workload takes one of: {', '.join(SYNTHETIC_TRACES)}")
    made = synthetic_trace(
        str(workload), 3600.0 if duration is None else duration, rate_scale=rate_scale, seed=seed
    )
    return lambda: made


def _name(specs: list[SimulationSpec]) -> str:
    return specs[0].parallel.name


def _pairs(option: str, texts: list[str] | None) -> dict[str, str]:
    pairs = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise CommandError(f"{option} takes NAME=VALUE, got {text!r}")
        pairs[name.strip().replace("-", "_")] = value.strip()
    return pairs


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise CommandError(f"--concurrency takes numbers such as 1,4,16, got {text!r}") from None
