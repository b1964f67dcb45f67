"""``k3lab serve``: put a model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from kimik3_lab.commands._errors import CommandError
from kimik3_lab.commands._presets import print_presets
from kimik3_lab.serving.server.options import (
    API_KEY_VARIABLE,
    CHOICES,
    ServeOptions,
    ServerStartError,
)

__all__ = ["serve"]

#: One enumeration for each option with a choice, under its name.
_Choice = SimpleNamespace(
    **{name: StrEnum(f"_{name}", [(v, v) for v in values]) for name, values in CHOICES.items()}
)
_DEFAULTS = ServeOptions(model="")
_ENDPOINT, _SCHEDULER, _CACHE = "Endpoint", "Scheduler", "Cache"
_SPECULATION, _EXECUTION = "Speculation", "Execution"
_PRESETS = "the preset's, or "


def _option(text: str, panel: str | None = None, **settings: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=panel, **settings)


def serve(
    model: Annotated[
        Path | None, _option("Folder of the model.", show_default="data/tiny-k3")
    ] = None,
    preset: Annotated[
        str | None,
        _option(
            "Take what is not set here from a rung of the ladder, such as v0.27.1, "
            "main-2026-09-13 or prefix-caching; '?' lists them."
        ),
    ] = None,
    host: Annotated[str, _option("Address to listen on.", _ENDPOINT)] = _DEFAULTS.host,
    port: Annotated[
        int, _option("Port to listen on; 0 takes any.", _ENDPOINT, min=0, max=65535)
    ] = _DEFAULTS.port,
    served_model_name: Annotated[
        str | None,
        _option("Name that requests use.", _ENDPOINT, show_default="name of the folder"),
    ] = None,
    api_key: Annotated[
        str | None,
        _option(
            "Ask for this key under /v1; other users of this machine can read it on the command "
            "line, so better set the variable.",
            _ENDPOINT,
            envvar=API_KEY_VARIABLE,
            show_envvar=True,
        ),
    ] = None,
    max_num_queued_reqs: Annotated[
        int,
        _option(
            "Requests waiting and running, above which more are answered 429; 0 for no limit.",
            _ENDPOINT,
            min=0,
        ),
    ] = _DEFAULTS.max_num_queued_reqs or 0,
    max_request_bytes: Annotated[
        int, _option("Longest body of a request; a longer one is answered 413.", _ENDPOINT, min=1)
    ] = _DEFAULTS.max_request_bytes,
    shutdown_timeout: Annotated[
        float,
        _option("Seconds that running requests get to finish when stopped.", _ENDPOINT, min=0),
    ] = _DEFAULTS.shutdown_timeout,
    log_level: Annotated[
        _Choice.log_level, _option("Least severe messages shown.", _ENDPOINT)
    ] = _DEFAULTS.log_level,
    batching: Annotated[
        _Choice.batching,
        _option("Let requests join at any step, or only between whole batches.", _SCHEDULER),
    ] = _DEFAULTS.batching,
    policy: Annotated[
        _Choice.policy | None,
        _option("First come first served, or by priority.", _SCHEDULER, show_default="fcfs"),
    ] = None,
    max_num_seqs: Annotated[
        int, _option("Sequences that run at once.", _SCHEDULER, min=1)
    ] = _DEFAULTS.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int | None,
        _option(
            "Tokens that a step computes: longer prompts are cut into chunks.",
            _SCHEDULER,
            min=1,
            show_default=f"{_PRESETS}{ServeOptions.DEFAULT_MAX_NUM_BATCHED_TOKENS}",
        ),
    ] = None,
    long_prefill_token_threshold: Annotated[
        int | None,
        _option(
            "Tokens that one prompt may take of a step; 0 for all.",
            _SCHEDULER,
            min=0,
            show_default=f"{_PRESETS}0",
        ),
    ] = None,
    token_budget: Annotated[
        _Choice.token_budget | None,
        _option(
            "How room for drafts is set aside.",
            _SCHEDULER,
            show_default=f"{_PRESETS}lookahead_cap",
        ),
    ] = None,
    async_scheduling: Annotated[
        bool | None,
        typer.Option(
            "--async-scheduling/--no-async-scheduling",
            help="Plan a step and hand it to the device before the last one has answered.",
            rich_help_panel=_SCHEDULER,
            show_default=f"{_PRESETS}off",
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        _option(
            "Tokens of prompt and answer.",
            _CACHE,
            min=1,
            show_default="the model's, at most 2048 and what the blocks hold",
        ),
    ] = None,
    num_blocks: Annotated[
        int | None,
        _option("Blocks of the cache.", _CACHE, min=1, show_default="enough for every sequence"),
    ] = None,
    block_size: Annotated[int, _option("Tokens in a block.", _CACHE, min=1)] = _DEFAULTS.block_size,
    enable_prefix_caching: Annotated[
        bool | None,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Share the blocks of sequences that begin alike.",
            rich_help_panel=_CACHE,
            show_default=f"{_PRESETS}off",
        ),
    ] = None,
    prefix_match_unit: Annotated[
        int | None,
        _option(
            "Tokens between two hashes.", _CACHE, min=1, show_default=f"{_PRESETS}the block size"
        ),
    ] = None,
    prefill_checkpoints: Annotated[
        _Choice.prefill_checkpoints | None,
        _option(
            "Keep a state inside a prompt by ending the chunk there, or on the way.",
            _CACHE,
            show_default=f"{_PRESETS}split",
        ),
    ] = None,
    prefix_cache_retention_interval: Annotated[
        int | None,
        _option(
            "Keep only states that somebody can resume at, and one every so many tokens.",
            _CACHE,
            min=0,
            show_default=f"{_PRESETS}all states",
        ),
    ] = None,
    speculative_states: Annotated[
        _Choice.speculative_states | None,
        _option(
            "Take rejected drafts back by a state for each, or by records.",
            _CACHE,
            show_default=f"{_PRESETS}slots",
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        int | None,
        _option(
            "Tokens of a draft; 0 for no speculation.",
            _SPECULATION,
            min=0,
            show_default=f"{_PRESETS}0",
        ),
    ] = None,
    drafter: Annotated[
        Path | None,
        _option("Folder of the drafter.", _SPECULATION, show_default="drafter in the model's"),
    ] = None,
    draft_sample_method: Annotated[
        _Choice.draft_sample_method, _option("How the drafter chooses.", _SPECULATION)
    ] = _DEFAULTS.draft_sample_method,
    rejection_sample_method: Annotated[
        _Choice.rejection_sample_method,
        _option(
            "What is kept of a draft. If drafts are drawn, a seed gives the same text under any "
            "load only with coupled.",
            _SPECULATION,
        ),
    ] = _DEFAULTS.rejection_sample_method,
    backend: Annotated[
        _Choice.backend, _option("Whose operations compute the model.", _EXECUTION)
    ] = _DEFAULTS.backend,
    mixed_batch: Annotated[
        _Choice.mixed_batch | None,
        _option(
            "Copy the rows of prefill and decode apart, or slice them.",
            _EXECUTION,
            show_default=f"{_PRESETS}zero_copy",
        ),
    ] = None,
    deferred_finalize: Annotated[
        bool | None,
        typer.Option(
            "--deferred-finalize/--no-deferred-finalize",
            help="Sum over the experts in the operator that follows.",
            rich_help_panel=_EXECUTION,
            show_default=f"{_PRESETS}off",
        ),
    ] = None,
    cuda_graphs: Annotated[
        bool,
        typer.Option(
            "--cuda-graphs/--no-cuda-graphs",
            help="Replay steps that only decode from a recorded graph; needs a GPU.",
            rich_help_panel=_EXECUTION,
        ),
    ] = _DEFAULTS.cuda_graphs,
    dtype: Annotated[
        _Choice.dtype, _option("Number format of the model.", _EXECUTION)
    ] = _DEFAULTS.dtype,
    device: Annotated[
        str | None, _option("Where the model computes.", _EXECUTION, show_default="cpu")
    ] = None,
    threads: Annotated[
        int | None,
        _option("CPU threads of the model.", _EXECUTION, min=1, show_default="PyTorch's choice"),
    ] = None,
    ready_file: Annotated[Path | None, typer.Option(hidden=True)] = None,
    stop_when_stdin_closes: Annotated[
        bool, typer.Option("--stop-when-stdin-closes", hidden=True)
    ] = False,
) -> None:
    """Serve a model over OpenAI's HTTP API until Ctrl-C.

    Options of the scheduler, the cache, speculation and execution are the
    switches of the lessons: each changes what a step costs, and no token.
    Two do change tokens: the number format, and drafts that are drawn
    (--draft-sample-method probabilistic) without the rule "coupled".
    """
    if preset == "?":
        print_presets()
        return
    from kimik3_lab.paths import default_model_dir

    given = {
        name: value.value if isinstance(value, StrEnum) else value
        for name, value in locals().items()
        if name in ServeOptions.__dataclass_fields__
    }
    given["model"] = model if model is not None else default_model_dir()
    given["max_num_queued_reqs"] = max_num_queued_reqs or None
    given["api_key"] = api_key or None  # a variable that is set to nothing
    try:
        options = ServeOptions(**given)
        if preset is not None:
            from kimik3_lab.serving.server.engine_settings import find_preset

            find_preset(preset)  # a wrong name is told before anything is loaded
        from kimik3_lab.serving.server.launch import run

        run(options, ready_file=ready_file, stop_when_stdin_closes=stop_when_stdin_closes)
    except (ServerStartError, ValueError, FileNotFoundError) as error:
        raise CommandError(str(error)) from error
