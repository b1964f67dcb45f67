"""The five demonstrations of the recorder, whose recordings name them but do not describe them.

Needs the standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["DEMOS"]

_PLAIN: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 512,
    "block_size": 16,
    "num_blocks": 4096,
}
_COUNT = ["range", 10, 400]
_LONG = [_COUNT, ["range", 10, 300]]


def _request(name: str, *pieces: list[Any], max_tokens: int) -> dict[str, Any]:
    return {"id": name, "prompt": list(pieces), "max_tokens": max_tokens}


def _like(number: int, length: int, max_tokens: int) -> list[dict[str, Any]]:
    """Make requests of the same length and content."""
    return [_request(f"r{i}", ["range", 10, length], max_tokens=max_tokens) for i in range(number)]


#: Name of a demonstration -> what was set up and what arrived.
DEMOS: Mapping[str, Mapping[str, Any]] = {
    "chunked prefill + decode, budget 512, 4 seqs": {
        "config": _PLAIN,
        "arrivals": {
            "0": [
                _request(f"r{i}", ["range", 10, length], max_tokens=4)
                for i, length in enumerate((700, 30, 300, 5, 8))
            ]
        },
    },
    "preemption: 23 usable blocks of 16": {
        "config": {**_PLAIN, "num_blocks": 24},
        "arrivals": {"0": _like(3, 110, max_tokens=24)},
    },
    "prefix cache hit, attention only": {
        "config": {**_PLAIN, "prefix_caching": True},
        "arrivals": {
            "0": [_request("a", _COUNT, max_tokens=2)],
            "3": [_request("b", ["range", 10, 300], ["const", 5, 20], max_tokens=2)],
        },
    },
    "MLA + KDA groups, align mode, block 128": {
        "config": {**_PLAIN, "block_size": 128, "kda": True, "prefix_caching": True},
        "arrivals": {
            "0": [_request("a", *_LONG, max_tokens=2)],
            "4": [_request("b", _COUNT, ["const", 5, 20], max_tokens=2)],
            "8": [_request("c", *_LONG, max_tokens=2)],
        },
    },
    "spec decode K=4, 2 accepted, budget 64": {
        "config": {**_PLAIN, "max_num_batched_tokens": 64, "spec": "ngram", "k": 4},
        "accept": 2,
        "arrivals": {"0": _like(3, 40, max_tokens=12)},
    },
}
