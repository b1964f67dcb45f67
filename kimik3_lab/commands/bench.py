"""``k3lab bench``: measure an OpenAI-compatible server."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from kimik3_lab.commands._errors import CommandError

__all__ = ["bench"]

_DEFAULT_DURATION = 30.0
_Endpoint = StrEnum("_Endpoint", ["chat", "completions"])
_Arrival = StrEnum("_Arrival", ["poisson", "constant"])


def bench(
    base_url: Annotated[
        str, typer.Option(help="Address of the server, with or without /v1.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="Model name.", show_default="the first of /v1/models")
    ] = None,
    endpoint: Annotated[
        _Endpoint, typer.Option(metavar="KIND", help="chat or completions.")
    ] = _Endpoint.chat,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder with tokenizer.json: prompts get an exact number of tokens. Without it "
            "they get that many words.",
        ),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Closed loop: streams that each send again when answered.",
            show_default="1",
        ),
    ] = None,
    request_rate: Annotated[
        str | None,
        typer.Option(metavar="R,R,...", help="Open loop instead: arrivals a second."),
    ] = None,
    arrival: Annotated[
        _Arrival, typer.Option(metavar="KIND", help="Gaps of the open loop: poisson or constant.")
    ] = _Arrival.poisson,
    prompt_tokens: Annotated[
        int | None, typer.Option(help="Prompt length.", show_default="128")
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option(help="Answer length.", show_default="32")
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(
            help="The published 8000/1000 workload divided by this, instead of the two lengths "
            "above; 1 is the published one."
        ),
    ] = None,
    num_requests: Annotated[
        int | None, typer.Option(help="Requests in each cell; ends the cell.")
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            help="Seconds of each cell (published: 150).",
            show_default=f"{_DEFAULT_DURATION:g}, unless --num-requests is given",
        ),
    ] = None,
    warmup: Annotated[
        float, typer.Option(help="Fraction at the start of a cell that does not count.")
    ] = 0.1,
    cooldown: Annotated[
        float, typer.Option(help="Fraction at the end of a cell that does not count.")
    ] = 0.1,
    warmup_requests: Annotated[
        int, typer.Option(help="Requests before each cell, not measured.")
    ] = 0,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Repeats the prompts of an earlier run, which measures the server's prefix cache "
            "if it has one.",
            show_default="fresh prompts",
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 0.0,
    ignore_eos: Annotated[
        bool, typer.Option(help="Ask for the full answer length whatever the model says.")
    ] = True,
    extra_body: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="More request fields, such as '{\"top_p\": 0.95}'; null takes a field out.",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="OPENAI_API_KEY", show_envvar=True, help="Sent as a bearer token; never saved."
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds one request may take.")] = 600.0,
    max_errors: Annotated[int, typer.Option(help="Stop after this many failures in a cell.")] = 10,
    device: Annotated[
        str, typer.Option(help="What the server runs on, for the record.")
    ] = "not stated",
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the result as JSON.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite --output.")] = False,
) -> None:
    """Measure latency and throughput of an OpenAI-compatible server.

    One cell for each concurrency or request rate. Numbers come with 95 %
    intervals; "-" stands where too few requests cannot tell.

    Try it:  k3lab bench --concurrency 1,4 --duration 20 --output result.json
    """
    from kimik3_lab.benchmark import (
        BenchmarkConfig,
        EndpointError,
        ResultError,
        WorkloadError,
        print_table,
        run_benchmark,
        save_result,
    )
    from kimik3_lab.benchmark.report import check_writable

    if concurrency and request_rate:
        raise CommandError("give --concurrency or --request-rate, not both")
    if duration is None and num_requests is None:
        duration = _DEFAULT_DURATION
    try:
        if output is not None:
            check_writable(output, overwrite=force)
        config = BenchmarkConfig(
            base_url=base_url,
            workload=_workload(prompt_tokens, output_tokens, scale, tokenizer, seed),
            model=model,
            endpoint=endpoint.value,  # type: ignore[arg-type]
            concurrency=() if request_rate else _numbers("--concurrency", concurrency or "1", int),
            request_rate=_numbers("--request-rate", request_rate or "", float),
            arrival=arrival.value,  # type: ignore[arg-type]
            max_requests=num_requests,
            max_duration=duration,
            warmup=warmup,
            cooldown=cooldown,
            warmup_requests=warmup_requests,
            temperature=temperature,
            ignore_eos=ignore_eos,
            extra_body=_json_object(extra_body),
            api_key=api_key or None,
            timeout=timeout,
            max_errors=max_errors,
            device=device,
        )
        result = run_benchmark(config)
    except (EndpointError, ResultError, WorkloadError, ValueError) as error:
        raise CommandError(str(error)) from error
    print_table(result)
    typer.echo(f"seed {config.workload.seed}")
    measured = any(cell.summary.completed for cell in result.cells)
    if output is not None and measured:
        typer.echo(f"wrote {save_result(result, output, overwrite=force)}")
    if result.stopped_early:
        raise CommandError(
            f"stopped after {max_errors} failed requests; the first reason: "
            + next(iter(result.errors), "unknown")
        )
    if not measured and result.errors:
        raise CommandError(
            "no request completed, so nothing was measured; the most frequent reason: "
            + next(iter(result.errors))
        )
    if not measured:
        raise CommandError(
            "no request completed, so nothing was measured: give the cells more time, or ask for "
            "shorter answers"
        )


def _workload(
    prompt_tokens: int | None,
    output_tokens: int | None,
    scale: float | None,
    tokenizer: Path | None,
    seed: int | None,
) -> Any:
    from kimik3_lab.benchmark import Workload

    if scale is None:
        return Workload.synthetic(
            128 if prompt_tokens is None else prompt_tokens,
            32 if output_tokens is None else output_tokens,
            tokenizer,
            seed,
        )
    if prompt_tokens is not None or output_tokens is not None:
        raise CommandError("give --scale or the two lengths, not both")
    return Workload.published(scale, tokenizer, seed)


def _numbers(option: str, text: str, kind: type[int] | type[float]) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(",")) if text else ()
    except ValueError:
        example = "1,4,16" if kind is int else "0.5,2"
        raise CommandError(f"{option} takes numbers such as {example}, got {text!r}") from None


def _json_object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CommandError(f"--extra-body is not JSON ({error}), got {text!r}") from None
    if not isinstance(value, dict):
        raise CommandError(f"--extra-body must be a JSON object, got {text!r}")
    return value
