"""From a model folder to a running server.

Needs torch (through the executor), FastAPI and uvicorn. Used by ``k3lab serve`` (lessons 00, 10).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import uvicorn
from sse_starlette.sse import AppStatus

from kimik3_lab.config import ConfigError, K3Config
from kimik3_lab.serving.config import Batching, CacheConfig, SchedulerConfig
from kimik3_lab.serving.engine import Engine, Executor
from kimik3_lab.serving.scheduler import Scheduler
from kimik3_lab.serving.server.app import build_app
from kimik3_lab.serving.server.async_engine import AsyncEngine
from kimik3_lab.serving.server.generation_config import GenerationConfig
from kimik3_lab.serving.server.options import ServeOptions, ServerStartError
from kimik3_lab.serving.server.tokenizer import Tokenizer, TokenizerError

__all__ = ["ServedModel", "build_engine", "run"]

#: Seconds that open connections get once their requests have ended.
_CLOSE_TIMEOUT = 5


@dataclass(frozen=True)
class ServedModel:
    """A model ready to serve: its engine and what the endpoint must know of it."""

    engine: Engine
    tokenizer: Tokenizer
    generation_config: GenerationConfig
    max_model_len: int


def build_engine(options: ServeOptions) -> ServedModel:
    """Read a model folder and put scheduler, executor and engine together.

    Raises
    ------
    ServerStartError
        If the folder, its configuration, tokenizer or weights cannot be used, or the settings do
        not fit the model.
    """
    folder = Path(options.model)
    try:
        config = K3Config.load(folder)
        tokenizer = Tokenizer.load(folder)
        generation_config = GenerationConfig.load(folder, eos_token_id=config.eos_token_id)
        context = options.context_length(config.max_position_embeddings)
        scheduler_config = SchedulerConfig(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=context,
            batching=cast(Batching, options.batching),
        )
        cache_config = CacheConfig(
            num_blocks=options.cache_blocks(context), block_size=options.block_size
        )
    except (ConfigError, TokenizerError) as error:
        raise ServerStartError(str(error)) from error
    except (ValueError, OSError) as error:
        raise ServerStartError(f"cannot serve {folder}: {error}") from error
    if tokenizer.vocab_size > config.vocab_size:
        raise ServerStartError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, but the model only "
            f"vocab_size={config.vocab_size}: they do not belong together"
        )
    executor = _build_executor(folder, options, cache_config)
    engine = Engine(Scheduler(scheduler_config, cache_config), executor)
    return ServedModel(engine, tokenizer, generation_config, context)


def _build_executor(folder: Path, options: ServeOptions, cache_config: CacheConfig) -> Executor:
    import torch

    from kimik3_lab.reference import checkpoint
    from kimik3_lab.serving.executors.torch_executor import TorchExecutor

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        model = checkpoint.load(folder, dtype=getattr(torch, options.dtype))
    except Exception as error:  # a damaged file fails in many ways, none of them a defect here
        raise ServerStartError(f"cannot load the weights in {folder}: {error}") from error
    try:
        executor: Executor = TorchExecutor(model, cache_config, options.max_num_seqs)
    except (RuntimeError, MemoryError) as error:
        raise ServerStartError(
            f"no memory for a cache of {cache_config.num_blocks} blocks and "
            f"{options.max_num_seqs} sequences; lower num_blocks or max_num_seqs ({error})"
        ) from error
    return executor


def run(
    options: ServeOptions,
    *,
    ready_file: str | Path | None = None,
    stop_when_stdin_closes: bool = False,
) -> None:
    """Load the model, listen, and serve until a signal to stop.

    Parameters
    ----------
    ready_file
        Written once requests are served: a JSON object with ``base_url`` and ``pid``.
    stop_when_stdin_closes
        Stop at the end of the standard input: a program that starts a server and holds the other
        end of this pipe takes the server with it, however it ends.

    Raises
    ------
    ServerStartError
        If the server cannot start; no port is open then.
    """
    logging.basicConfig(level=options.log_level.upper(), format="%(levelname)s: %(message)s")
    listener = _bind(options.host, options.port)
    with contextlib.closing(listener):
        served = build_engine(options)
        client = AsyncEngine(served.engine)
        app = build_app(
            client,
            served.tokenizer,
            options.model_name,
            served.max_model_len,
            defaults=served.generation_config,
            model_root=str(options.model),
        )
        # Running streams end through the engine (see _Server.shutdown), not by being cut off.
        AppStatus.enable_automatic_graceful_drain = False
        base_url = _url(options.host, listener.getsockname()[1])

        def announce() -> None:
            if ready_file is not None:
                _write_ready_file(Path(ready_file), base_url)
            print(_greeting(options.model_name, base_url), flush=True)

        config = uvicorn.Config(
            app,
            log_level=options.log_level,
            timeout_graceful_shutdown=_CLOSE_TIMEOUT,
        )
        server = _Server(config, client, options.shutdown_timeout, announce)
        if stop_when_stdin_closes:
            threading.Thread(target=server.stop_when_stdin_closes, daemon=True).start()
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C, after everything has been closed
            server.run(sockets=[listener])


class _Server(uvicorn.Server):
    """uvicorn, with the engine's requests ended before connections are closed."""

    def __init__(
        self,
        config: uvicorn.Config,
        client: AsyncEngine,
        shutdown_timeout: float,
        on_ready: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._client = client
        self._shutdown_timeout = shutdown_timeout
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._client.drain(self._shutdown_timeout)
        await super().shutdown(sockets=sockets)

    def stop_when_stdin_closes(self) -> None:
        # Not sys.stdin: a thread that waits inside its lock breaks the interpreter's shutdown.
        with contextlib.suppress(OSError):
            while os.read(0, 1024):
                pass
        self.should_exit = True


def _bind(host: str, port: int) -> socket.socket:
    """Reserve the address without listening: nobody can connect before the model is there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ServerStartError(f"cannot listen on host {host!r}: {error.strerror}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # take over an address that a server has just left
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ServerStartError(
            f"cannot listen on {host} port {port}: {error.strerror}. Stop what uses it, or choose "
            "another with --port (0 takes any free one)"
        ) from error
    return listener


def _url(host: str, port: int) -> str:
    # An address that stands for "all of this machine" cannot be connected to everywhere.
    name = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def _write_ready_file(file: Path, base_url: str) -> None:
    unfinished = file.with_name(file.name + ".tmp")
    unfinished.write_text(json.dumps({"base_url": base_url, "pid": os.getpid()}), encoding="utf-8")
    unfinished.replace(file)


def _greeting(model_name: str, base_url: str) -> str:
    body = json.dumps({"model": model_name, "prompt": "Once upon a time", "max_tokens": 32})
    return (
        f"Serving {model_name} at {base_url} (Ctrl-C stops it). Try:\n\n"
        f"  curl {base_url}/v1/completions -H 'Content-Type: application/json' \\\n"
        f"    -d '{body}'\n"
    )
