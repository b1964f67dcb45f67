"""``k3lab plan``: the cheapest machines that keep a promise under a load."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kimik3_lab.commands._errors import CommandError

if TYPE_CHECKING:
    from kimik3_lab.benchmark.traces import TraceRequest
    from kimik3_lab.performance.parallelism import Parallelism
    from kimik3_lab.simulation.plan_results import Attempt, Plan

__all__ = ["plan"]

#: Columns of a table that nobody wraps.
_FULL_WIDTH = 140
_Verify = StrEnum("_Verify", ["no", "round-robin", "least-loaded", "prefix-aware"])


def plan(
    workload: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A made-up trace, see 'k3lab trace --workload ?'."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A trace file instead; see 'k3lab trace'.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Or requests of one length: this many a second (Poisson)."),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="With --rate.")] = 8000,
    output_tokens: Annotated[int, typer.Option(min=1, help="With --rate.")] = 1000,
    rate_scale: Annotated[
        float, typer.Option(help="Let the requests of the trace arrive that many times as often.")
    ] = 1.0,
    session_rate: Annotated[
        float | None,
        typer.Option(help="For a trace without times (ShareGPT): sessions that begin in a second."),
    ] = None,
    duration: Annotated[float, typer.Option(help="Seconds of the load.")] = 600.0,
    ttft_ms: Annotated[
        float | None, typer.Option(help="Most time to first token, milliseconds.")
    ] = None,
    tpot_ms: Annotated[
        float | None, typer.Option(help="Most time per output token, milliseconds.")
    ] = None,
    e2e_s: Annotated[float | None, typer.Option(help="Most latency, seconds.")] = None,
    percentile: Annotated[
        int, typer.Option(min=1, max=99, help="Of the requests that each limit holds for.")
    ] = 95,
    goodput: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Share of the requests within all limits at once."),
    ] = None,
    hardware: Annotated[
        str, typer.Option(metavar="GPU,GPU,...", help="B300, GB300, B200 or H200.")
    ] = "B300",
    parallel: Annotated[
        str | None,
        typer.Option(
            metavar="L,L,...",
            help="Layouts of a replica, such as tp8,tp8+ep8,tp8+dp2+ep16,tp8+dcp8.",
            show_default="five of them on 8 and 16 GPUs",
        ),
    ] = None,
    preset: Annotated[
        str, typer.Option(metavar="NAME,NAME,...", help="'k3lab simulate --preset ?' has them.")
    ] = "main-2026-09-13,look-ahead-cap",
    speculative_tokens: Annotated[
        str | None,
        typer.Option("-k", metavar="K,K,...", help="Drafts for each step.", show_default="8"),
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GPU=PRICE", help="Of a GPU for an hour; may be given again. Default: all 1."
        ),
    ] = None,
    max_gpus: Annotated[int, typer.Option(min=1, help="Most GPUs in all.")] = 128,
    verify: Annotated[
        _Verify,
        typer.Option(
            metavar="ROUTER",
            help="Simulate the whole fleet at last, behind this router, and smaller ones while "
            "they keep it; or no.",
        ),
    ] = _Verify.no,
    scenarios: Annotated[
        bool, typer.Option(help="Simulate the answer again with what else public figures allow.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Of load and drafts.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find the cheapest machines that keep an SLO: GPU, layout, preset, K, replicas.

    One replica is simulated with its share of the load, dealt by session in turn,
    for as few configurations as it takes; the table says what was tried and why it
    failed. A router that balances may do with fewer replicas: --verify says.

    Try it:  k3lab plan --workload mooncake-conversation --ttft-ms 9000 --tpot-ms 60
    """
    from kimik3_lab.performance.scenarios import Scenario
    from kimik3_lab.simulation.plan_choices import DEFAULT_PARALLEL, candidates
    from kimik3_lab.simulation.planner import check_scenarios, make_plan, verify_plan
    from kimik3_lab.simulation.slo import Slo
    from kimik3_lab.simulation.switches import find_preset

    if ttft_ms is None and tpot_ms is None and e2e_s is None:
        raise CommandError("no promise to keep: give --ttft-ms, --tpot-ms or --e2e-s")
    try:
        slo = Slo(ttft_ms, tpot_ms, e2e_s, percentile, goodput)
        gpus = hardware.split(",")
        prices = _prices(price, gpus)
        choices, refused = candidates(
            gpus,
            DEFAULT_PARALLEL if parallel is None else [_layout(x) for x in parallel.split(",")],
            [find_preset(name) for name in preset.split(",")],
            None if speculative_tokens is None else _whole_numbers(speculative_tokens),
            prices=prices,
        )
        load = _load(
            workload, trace, rate, (prompt_tokens, output_tokens), session_rate, rate_scale,
            duration, seed,
        )  # fmt: skip
        with _Progress(quiet=as_json) as progress:
            found = make_plan(
                load, slo, choices, refused=refused, max_gpus=max_gpus, seed=seed,
                on_attempt=progress,
            )  # fmt: skip
            if scenarios:
                check_scenarios(found, load, Scenario.corners()[1:], seed=seed)
            if verify is not _Verify.no:
                verify_plan(
                    found, load, router=verify.value, seed=seed, progress=not as_json  # type: ignore[arg-type]
                )  # fmt: skip
    except (ValueError, KeyError) as error:
        raise CommandError(str(error.args[0] if error.args else error)) from error
    if as_json:
        body = {
            "load": {
                "name": workload or (str(trace) if trace else "fixed lengths"),
                "requests": len(load),
                "duration_s": duration,
                "rate_scale": rate_scale,
                "seed": seed,
            },
            **found.to_dict(),
        }
        typer.echo(json.dumps(body, indent=1))
    else:
        _print(found, prices)
        if found.best is not None and verify is _Verify.no and found.best.replicas > 1:
            typer.echo(
                "Sessions were dealt in turn, and nobody balanced. A router that does may do with "
                "fewer: --verify least-loaded"
            )
    if found.best is None:
        raise typer.Exit(3)


def _load(
    workload: str | None,
    trace: Path | None,
    rate: float | None,
    lengths: tuple[int, int],
    session_rate: float | None,
    rate_scale: float,
    duration: float,
    seed: int,
) -> list[TraceRequest]:
    from kimik3_lab.benchmark.synthetic_traces import synthetic_trace
    from kimik3_lab.benchmark.traces import cut_window, poisson_arrivals, read_trace, scale_rate
    from kimik3_lab.simulation.trace_requests import fixed_lengths

    if sum(given is not None for given in (workload, trace, rate)) != 1:
        raise CommandError("name the load: one of --workload, --trace and --rate")
    if workload is not None:
        return synthetic_trace(workload, duration, rate_scale=rate_scale, seed=seed)
    if trace is not None:
        requests: Iterable[TraceRequest] = read_trace(trace)
        if session_rate is not None:
            requests = poisson_arrivals(requests, session_rate, seed=seed)
        return list(cut_window(scale_rate(requests, rate_scale), 0.0, duration))
    wanted = float(rate or 0.0) * rate_scale
    return list(fixed_lengths(wanted, *lengths, duration, seed=seed))


def _layout(text: str) -> Parallelism:
    from kimik3_lab.performance.parallelism import Parallelism

    sizes: dict[str, int] = {}
    for part in text.strip().lower().split("+"):
        name = part.rstrip("0123456789")
        if name not in ("tp", "ep", "dp", "pp", "dcp") or name == part:
            raise ValueError(f"--parallel takes layouts such as tp8 or tp8+dp2+ep16, got {text!r}")
        sizes[name] = int(part[len(name) :])
    return Parallelism(**sizes)


def _prices(given: list[str] | None, gpus: list[str]) -> dict[str, float] | None:
    if not given:
        return None
    prices = {}
    for text in given:
        name, _, number = text.partition("=")
        try:
            prices[name] = float(number)
        except ValueError:
            raise CommandError(f"--price takes GPU=PRICE such as B300=6.5, got {text!r}") from None
    if missing := [gpu for gpu in gpus if gpu not in prices]:
        raise CommandError(f"--price is missing for {', '.join(missing)}: give one for each GPU")
    return prices


def _whole_numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise CommandError(f"-k takes whole numbers such as 0,4,8, got {text!r}") from None


class _Progress:
    """Tells on a terminal what was tried, a line each, and what is being tried."""

    def __init__(self, *, quiet: bool) -> None:
        from rich.console import Console

        self._console = Console(stderr=True)
        self._shown = not quiet and sys.stderr.isatty()
        self._tried = 0
        self._status: Any = None

    def __enter__(self) -> Callable[[Attempt], None]:
        if self._shown:
            self._status = self._console.status("simulating the first configuration")
            self._status.start()
        return self._hear

    def __exit__(self, *_error: object) -> None:
        if self._status is not None:
            self._status.stop()

    def _hear(self, attempt: Attempt) -> None:
        self._tried += 1
        if self._status is not None:
            told = "keeps it" if attempt.kept else attempt.reason
            line = f"{attempt.replicas} x {attempt.name}: {told}"
            self._console.print(line, highlight=False, markup=False, style="dim")
            self._status.update(f"{self._tried} looked at, going on")


def _print(found: Plan, prices: dict[str, float] | None) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(found.slo.text), title_justify="left", box=SIMPLE, pad_edge=False)
    table.add_column("configuration")
    names = [*found.slo.limits, *(["goodput"] if found.slo.goodput is not None else [])]
    for heading in ("replicas", "GPUs", *(["price"] if prices else []), *names):
        table.add_column(heading.replace("_", " "), justify="right", no_wrap=True)
    table.add_column("verdict")
    for attempt in found.attempts:
        if not attempt.replicas:
            continue
        cells = [
            escape(attempt.name),
            str(attempt.replicas),
            str(attempt.gpus),
            *([f"{attempt.price:,.6g}"] if prices else []),
            *(_figure(attempt.measured.get(name)) for name in names),
            "keeps it" if attempt.kept else escape(attempt.reason),
        ]
        table.add_row(*cells, style="bold" if attempt is found.best else None)
    console = Console()
    if not console.is_terminal:  # a pipe or a file has no width to fit
        console = Console(width=_FULL_WIDTH)
    console.print(table)
    for attempt in found.attempts:
        if not attempt.replicas:
            line = f"Cannot run: {attempt.name}. {attempt.reason}"
            console.print(line, soft_wrap=True, highlight=False, markup=False)
    for line in (found.text, *found.notes):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    for check in found.checks:
        told = "keeps it too" if check.kept else f"would not keep it: {check.reason}"
        line = f"Checked: {check.replicas} x {check.name}: {told}."
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    if not prices:
        console.print("Price: GPUs, each 1; give --price to weigh kinds.", style="dim")


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
