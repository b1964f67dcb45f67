"""What a recording of vLLM's scheduler must hold, checked before it is replayed.

Needs the standard library only. The replay (lessons 07 to 09) compares what a row has, so a row
without a decision would match anything: it is refused here, as is whatever cannot be replayed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["check_budget_row", "check_scenario", "check_trace"]

_REQUEST_FIELDS = ("id", "prompt", "max_tokens")
_BUDGET_FIELDS = ("prefill", "decode_tokens", "total", "max_num_scheduled_tokens")


def check_scenario(spec: Any) -> None:
    """Refuse a scenario that lacks something or has it in another form.

    Raises
    ------
    ValueError
        With what is wrong, to be put behind the name of the scenario.

    Examples
    --------
    >>> check_scenario({"config": {}, "arrivals": {"0": [{"id": "a"}]}, "trace": []})
    Traceback (most recent call last):
    ValueError: request 0 of step 0 has no prompt, max_tokens
    """
    if not isinstance(spec, dict):
        raise ValueError(f"is a {type(spec).__name__}, expected an object with config and arrivals")
    missing = [name for name in ("arrivals", "config") if name not in spec]
    if missing:
        raise ValueError(f"has no {', '.join(missing)}")
    if "trace" not in spec and "error" not in spec:
        raise ValueError("has no trace")
    _mapping(spec["config"], "config")
    for step, requests in _by_step(spec, "arrivals"):
        for index, request in enumerate(requests):
            _check_request(request, f"request {index} of step {step}")
    for name in ("aborts", "aborts_in_flight"):
        for _ in _by_step(spec, name):
            pass
    accepts = _sequence(spec.get("accepts") or [spec.get("accept", 0)], "accepts")
    if not all(type(count) is int and count >= 0 for count in accepts):
        raise ValueError(f"accepts {accepts}: expected numbers of draft tokens, 0 or more")


def check_trace(trace: Any, *, arrivals: bool) -> None:
    """Refuse a trace without rows, unless nothing arrives, and rows that record no decision."""
    rows = _sequence(trace, "trace")
    if arrivals and not rows:
        raise ValueError("has an empty trace: there is nothing to compare with")
    for index, row in enumerate(rows):
        if not isinstance(row, dict) or not isinstance(row.get("scheduled"), dict):
            raise ValueError(f"row {index} of the trace has no 'scheduled', the tokens by request")


def check_budget_row(row: Any) -> None:
    """Refuse a row of the budget table that says nothing, or not of what."""
    running = _mapping(row, "a row of the budget table").get("running", 1)
    if type(running) is not int or running < 1:
        raise ValueError(f"a row of the budget table is for {running!r} running requests")
    if not any(name in row for name in _BUDGET_FIELDS):
        raise ValueError(f"a row of the budget table has none of {', '.join(_BUDGET_FIELDS)}")


def _check_request(request: Any, where: str) -> None:
    missing = [name for name in _REQUEST_FIELDS if name not in _mapping(request, where)]
    if missing:
        raise ValueError(f"{where} has no {', '.join(missing)}")
    for piece in _sequence(request["prompt"], f"the prompt of {where}"):
        numbers = piece[1:] if isinstance(piece, list) else ()
        if len(numbers) != 2 or not all(type(number) is int for number in numbers):
            raise ValueError(f"{where}: a piece of a prompt is [kind, token, count], got {piece!r}")


def _by_step(spec: Mapping[str, Any], name: str) -> Iterator[tuple[str, Sequence[Any]]]:
    for step, items in _mapping(spec.get(name, {}), name).items():
        if not step.isdecimal():
            raise ValueError(f"{name} are by step, got {step!r}")
        yield step, _sequence(items, f"{name} of step {step}")


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is a {type(value).__name__}, expected an object")
    return value


def _sequence(value: Any, what: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{what} is a {type(value).__name__}, expected a list")
    return value
