"""``k3lab serve``: put a model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from kimik3_lab.commands._errors import CommandError
from kimik3_lab.serving.server.options import (
    BATCHING,
    DTYPES,
    LOG_LEVELS,
    ServeOptions,
    ServerStartError,
)

__all__ = ["serve"]


_Batching = StrEnum("_Batching", [(name, name) for name in BATCHING])
_Dtype = StrEnum("_Dtype", [(name, name) for name in DTYPES])
_LogLevel = StrEnum("_LogLevel", [(name, name) for name in LOG_LEVELS])


def _option(text: str, **settings: Any) -> Any:
    return typer.Option(help=text, **settings)


def serve(
    model: Annotated[
        Path | None, _option("Folder of the model.", show_default="data/tiny-k3")
    ] = None,
    host: Annotated[str, _option("Address to listen on.")] = ServeOptions.host,
    port: Annotated[
        int, _option("Port to listen on; 0 takes any.", min=0, max=65535)
    ] = ServeOptions.port,
    served_model_name: Annotated[
        str | None, _option("Name that requests use.", show_default="name of the folder")
    ] = None,
    batching: Annotated[
        _Batching, _option("Let requests join at any step, or only between whole batches.")
    ] = _Batching.continuous,
    max_num_seqs: Annotated[
        int, _option("Sequences that run at once.", min=1)
    ] = ServeOptions.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int, _option("Tokens that a step computes.", min=1)
    ] = ServeOptions.max_num_batched_tokens,
    max_model_len: Annotated[
        int | None,
        _option("Tokens of prompt and answer.", min=1, show_default="the model's, at most 2048"),
    ] = None,
    num_blocks: Annotated[
        int | None,
        _option("Blocks of the cache.", min=1, show_default="enough for every sequence"),
    ] = None,
    block_size: Annotated[int, _option("Tokens in a block.", min=1)] = ServeOptions.block_size,
    dtype: Annotated[_Dtype, _option("Number format of the model.")] = _Dtype.float32,
    threads: Annotated[
        int | None, _option("CPU threads of the model.", min=1, show_default="PyTorch's choice")
    ] = None,
    log_level: Annotated[_LogLevel, _option("Least severe messages shown.")] = _LogLevel.info,
    shutdown_timeout: Annotated[
        float, _option("Seconds that running requests get to finish when stopped.", min=0)
    ] = ServeOptions.shutdown_timeout,
    ready_file: Annotated[Path | None, typer.Option(hidden=True)] = None,
    stop_when_stdin_closes: Annotated[
        bool, typer.Option("--stop-when-stdin-closes", hidden=True)
    ] = False,
) -> None:
    """Serve a model over OpenAI's HTTP API until Ctrl-C."""
    from kimik3_lab.paths import default_model_dir

    try:
        options = ServeOptions(
            model=model if model is not None else default_model_dir(),
            host=host,
            port=port,
            served_model_name=served_model_name,
            batching=batching.value,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=dtype.value,
            threads=threads,
            log_level=log_level.value,
            shutdown_timeout=shutdown_timeout,
        )
        from kimik3_lab.serving.server.launch import run

        run(options, ready_file=ready_file, stop_when_stdin_closes=stop_when_stdin_closes)
    except (ServerStartError, ValueError, FileNotFoundError) as error:
        raise CommandError(str(error)) from error
