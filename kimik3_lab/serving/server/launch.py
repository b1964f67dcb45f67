"""From a model folder to a running server.

Needs torch (through the executor), FastAPI and uvicorn. Used by ``k3lab serve`` (lessons 00, 10).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from sse_starlette.sse import AppStatus

from kimik3_lab.config import ConfigError, K3Config
from kimik3_lab.serving.async_scheduler import make_scheduler
from kimik3_lab.serving.engine import Engine
from kimik3_lab.serving.server.app import build_app
from kimik3_lab.serving.server.async_engine import AsyncEngine
from kimik3_lab.serving.server.build_executor import build_executor, longest_draft
from kimik3_lab.serving.server.engine_interface import SteppedEngine
from kimik3_lab.serving.server.engine_settings import EngineSettings
from kimik3_lab.serving.server.generation_config import GenerationConfig
from kimik3_lab.serving.server.options import API_KEY_VARIABLE, ServeOptions, ServerStartError
from kimik3_lab.serving.server.tokenizer import Tokenizer, TokenizerError

__all__ = ["ServedModel", "build_engine", "run"]

logger = logging.getLogger(__name__)

#: Seconds that open connections get once their requests have ended.
_CLOSE_TIMEOUT = 5
#: Seconds that the engine's step in flight gets to end, once nobody waits for its requests.
_STEP_TIMEOUT = 10.0


@dataclass(frozen=True)
class ServedModel:
    """A model ready to serve: its engine and what the endpoint must know of it."""

    engine: SteppedEngine
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
        num_kda_layers = len(config.linear_attn_config.kda_layers)
        settings = EngineSettings.from_options(
            options,
            max_model_len=context,
            num_layers={"mla": config.num_hidden_layers - num_kda_layers, "kda": num_kda_layers},
            most_draft_tokens=longest_draft(options),
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
    executor = build_executor(options, settings)
    try:
        engine = Engine(make_scheduler(settings.scheduler, settings.cache), executor)
    except ValueError as error:
        raise ServerStartError(f"cannot serve {folder}: {error}") from error
    return ServedModel(engine, tokenizer, generation_config, settings.scheduler.max_model_len)


def run(
    options: ServeOptions,
    *,
    build: Callable[[ServeOptions], ServedModel] = build_engine,
    ready_file: str | Path | None = None,
    stop_when_stdin_closes: bool = False,
) -> None:
    """Load the model, listen, and serve until a signal to stop.

    Parameters
    ----------
    build
        Makes what is served.
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
        print(f"Loading {options.model_name} from {options.model} ...", flush=True)
        served = build(options)
        client = AsyncEngine(served.engine, max_num_queued_reqs=options.max_num_queued_reqs)
        app = build_app(
            client,
            served.tokenizer,
            options.model_name,
            served.max_model_len,
            defaults=served.generation_config,
            model_root=str(options.model),
            api_key=options.api_key,
            max_request_bytes=options.max_request_bytes,
        )
        if options.api_key is None and not _is_loopback(listener):
            logger.warning(
                "%s is heard by other machines, and whoever reaches it may use it: set an API key "
                "in %s, or listen on 127.0.0.1",
                options.host,
                API_KEY_VARIABLE,
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
        # Two servers can reserve an address, and the second to be ready finds it in use.
        with _address_errors(options.host, options.port):
            listener.listen()
        server = _Server(config, client, options.shutdown_timeout, announce)
        if stop_when_stdin_closes:
            threading.Thread(target=server.stop_when_stdin_closes, daemon=True).start()
        with server.ends_well_by_sigterm(), contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listener])
        if client.is_running:
            logger.error("the engine does not come back from its step: leaving without it")
            logging.shutdown()
            # An interpreter that ends while a thread is inside the model aborts the process.
            os._exit(1)


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
        """End all requests, then close the connections; a second Ctrl-C does not wait for them.

        That they ended must have reached the streams before uvicorn looks at ``force_exit``, which
        makes it cut them off; and the engine's thread must be gone before the interpreter is.
        """
        drained = asyncio.create_task(self._client.drain(self._shutdown_timeout))
        while not (await asyncio.wait([drained], timeout=0.1))[0]:
            if self.force_exit:
                aborted = asyncio.create_task(self._client.drain(0.0))
                await asyncio.wait([aborted], timeout=_STEP_TIMEOUT)
                aborted.cancel()
                drained.cancel()
                break
        self.force_exit = False
        await super().shutdown(sockets=sockets)
        if self.force_exit:  # uvicorn has left this out then
            await self.lifespan.shutdown()

    @contextlib.contextmanager
    def ends_well_by_sigterm(self) -> Iterator[None]:
        """Let SIGTERM end the process with status 0.

        When all is closed, uvicorn raises the signals again that it was ended by. That of Ctrl-C
        becomes a KeyboardInterrupt; SIGTERM would kill the process there and then.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = signal.signal(signal.SIGTERM, self.handle_exit)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)

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
    with contextlib.ExitStack() as on_error, _address_errors(host, port):
        on_error.callback(listener.close)
        if os.name == "posix":  # take over an address that a server has just left
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        on_error.pop_all()
    return listener


@contextlib.contextmanager
def _address_errors(host: str, port: int) -> Iterator[None]:
    """Say what an address that cannot be had means for whoever starts a server."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            advice = "This machine has no such address: leave --host out to be heard on this "
            advice += "machine only, or take 0.0.0.0 to be heard by others"
        elif error.errno == errno.EACCES:
            advice = "Ports below 1024 are the system's: choose another with --port"
        else:
            advice = "Stop what uses it, or choose another with --port (0 takes any free one)"
        raise ServerStartError(
            f"cannot listen on {host} port {port}: {error.strerror}. {advice}"
        ) from error


def _is_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def _url(host: str, port: int) -> str:
    # An address that stands for "all of this machine" cannot be connected to everywhere.
    name = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def _write_ready_file(file: Path, base_url: str) -> None:
    unfinished = file.with_name(file.name + ".tmp")
    unfinished.write_text(json.dumps({"base_url": base_url, "pid": os.getpid()}), encoding="utf-8")
    unfinished.replace(file)


def _greeting(model_name: str, base_url: str) -> str:
    body = json.dumps({"model": model_name, "prompt": "def fibonacci(n):", "max_tokens": 32})
    return (
        f"Serving {model_name} at {base_url} (Ctrl-C stops it). Try:\n\n"
        f"  curl {base_url}/v1/completions -H 'Content-Type: application/json' \\\n"
        f"    -d '{body}'\n"
    )
