"""A server whose tokens come at times that are known beforehand, to check a benchmark client with.

Needs FastAPI and uvicorn, like any server, and no model: only the tokenizer of one. Lesson 10 and
the tests let ``k3lab bench``, guidellm and ``vllm bench serve`` measure it: what they report can be
worked out with pen and paper. The endpoint is the real one; only the engine behind it is scripted.

    python -m kimik3_lab.serving.server.scripted --port 8000 --ttft 0.6,0.8,1.0 --tpot 0.02

The first token of a request comes ``ttft`` seconds after the request, each further one ``tpot``
after the one before, whatever else is running. Several values of ``ttft`` take turns.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kimik3_lab.paths import default_model_dir
from kimik3_lab.serving.outputs import EngineCoreOutput
from kimik3_lab.serving.request import Request, RequestStatus
from kimik3_lab.serving.server.background import RunningServer, start_in_background
from kimik3_lab.serving.server.generation_config import GenerationConfig
from kimik3_lab.serving.server.launch import ServedModel, run
from kimik3_lab.serving.server.options import ServeOptions, ServerStartError
from kimik3_lab.serving.server.tokenizer import Tokenizer, TokenizerError

__all__ = ["ScriptedEngine", "start_scripted"]

_MAX_MODEL_LEN = 16_384
#: Seconds that a step sleeps at most: so soon a new request is seen.
_NAP = 0.0005


class ScriptedEngine:
    """Generates one token over and over, at set times (:class:`.async_engine.SteppedEngine`).

    Parameters
    ----------
    ttft
        Seconds from the arrival of a request to its first token; several take turns.
    tpot
        Seconds between its tokens.
    token_id
        What it generates.

    Examples
    --------
    >>> engine = ScriptedEngine([0.0], 0.0, token_id=7)
    >>> engine.add_request(Request("a", [1, 2], max_tokens=3))
    >>> [token for _ in range(3) for out in engine.step() for token in out.new_token_ids]
    [7, 7, 7]
    >>> engine.has_unfinished_requests()
    False
    """

    def __init__(self, ttft: Sequence[float], tpot: float, token_id: int) -> None:
        if not ttft or min(*ttft, tpot) < 0:
            raise ValueError(f"ttft and tpot are times of at least 0 s, got {ttft} and {tpot}")
        self._ttft = itertools.cycle(ttft)
        self._tpot = tpot
        self._token_id = token_id
        self._requests: dict[str, Request] = {}
        self._numbers = itertools.count()  # of two requests with the same time the older is first
        self._due: list[tuple[float, int, float, Request]] = []

    def add_request(self, request: Request) -> None:
        """Begin a request; its clock has run since ``arrival_time``."""
        self._requests[request.request_id] = request
        first = request.arrival_time + next(self._ttft)
        heapq.heappush(self._due, (first, next(self._numbers), first, request))

    def abort(self, request_id: str) -> None:
        """Drop a request."""
        self._requests.pop(request_id, None)

    def has_unfinished_requests(self) -> bool:
        """Whether a token is still to come."""
        return bool(self._requests)

    def step(self) -> list[EngineCoreOutput]:
        """Wait a moment and return the tokens whose time has come."""
        now = time.monotonic()
        if self._due and self._due[0][0] > now:
            time.sleep(min(self._due[0][0] - now, _NAP))
            now = time.monotonic()
        outputs = []
        while self._due and self._due[0][0] <= now:
            _, number, first, request = heapq.heappop(self._due)
            if self._requests.get(request.request_id) is not request:
                continue  # aborted
            request.status = RequestStatus.RUNNING
            request.append_output_token_ids([self._token_id], sys.maxsize)
            outputs.append(EngineCoreOutput.from_request(request, [self._token_id]))
            if request.is_finished:
                del self._requests[request.request_id]
            else:  # from the first token on, so that being late does not add up
                due = first + request.num_output_tokens * self._tpot
                heapq.heappush(self._due, (due, number, first, request))
        return outputs


def start_scripted(
    ttft: Sequence[float], tpot: float, model: str | Path | None = None, **settings: Any
) -> RunningServer:
    """Start a scripted server in a process of its own and wait until it answers.

    Parameters
    ----------
    ttft, tpot
        See :class:`ScriptedEngine`.
    model
        Folder whose tokenizer is used; that of the tiny K3 by default.
    **settings
        As for :func:`~kimik3_lab.serving.server.background.start_in_background`.
    """
    command = [
        sys.executable, "-m", __spec__.name, "--ttft", ",".join(map(repr, ttft)), "--tpot",
        repr(tpot),
    ]  # fmt: skip
    return start_in_background(model, command=command, **settings)


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ttft", required=True, help="seconds to the first token: 0.5 or 0.4,0.6")
    parser.add_argument("--tpot", required=True, type=float, help="seconds between two tokens")
    parser.add_argument("--model", default=default_model_dir(), help="folder with the tokenizer")
    parser.add_argument("--host", default=ServeOptions.host)
    parser.add_argument("--port", type=int, default=ServeOptions.port)
    parser.add_argument("--log-level", default=ServeOptions.log_level)
    parser.add_argument("--ready-file", help=argparse.SUPPRESS)
    parser.add_argument("--stop-when-stdin-closes", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()

    def build(options: ServeOptions) -> ServedModel:
        tokenizer = Tokenizer.load(options.model)
        # A token with a text of its own: a client may not count one that adds nothing.
        (token_id, *_) = tokenizer.encode("a", add_special_tokens=False)
        engine = ScriptedEngine([float(t) for t in given.ttft.split(",")], given.tpot, token_id)
        return ServedModel(engine, tokenizer, GenerationConfig(), _MAX_MODEL_LEN)

    try:
        options = ServeOptions(
            model=given.model, host=given.host, port=given.port, log_level=given.log_level
        )
        run(
            options,
            build=build,
            ready_file=given.ready_file,
            stop_when_stdin_closes=given.stop_when_stdin_closes,
        )
    except (ServerStartError, TokenizerError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
