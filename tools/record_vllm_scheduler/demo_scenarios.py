"""Scenarios to read by eye: five rules of the scheduler, and bugs that releases of vLLM have.

Needs the standard library only.
"""

from __future__ import annotations

from typing import Any

__all__ = ["demos", "known_bugs"]

_PLAIN = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 512,
    "block_size": 16,
    "num_blocks": 4096,
    "prefix_caching": False,
    "kda": False,
    "spec": None,
    "k": 0,
    "long_prefill_token_threshold": 0,
}


def _request(name: str, pieces: list[list[Any]], max_tokens: int) -> dict[str, Any]:
    return {"id": name, "prompt": pieces, "max_tokens": max_tokens}


def demos() -> list[dict[str, Any]]:
    """Return the demos, each with its ``name``."""
    counting = ["range", 10, 400]
    long = [counting, ["range", 10, 300]]
    chunks = [_request(f"r{i}", [["range", 10, n]], 4) for i, n in enumerate((700, 30, 300, 5, 8))]
    return [
        {
            "name": "chunked prefill + decode, budget 512, 4 seqs",
            "config": _PLAIN,
            "accept": 0,
            "arrivals": {"0": chunks},
        },
        {
            "name": "preemption: 23 usable blocks of 16",
            "config": _PLAIN | {"num_blocks": 24},
            "accept": 0,
            "arrivals": {"0": [_request(f"r{i}", [["range", 10, 110]], 24) for i in range(3)]},
        },
        {
            "name": "prefix cache hit, attention only",
            "config": _PLAIN | {"prefix_caching": True},
            "accept": 0,
            "arrivals": {
                "0": [_request("a", [counting], 2)],
                "3": [_request("b", [["range", 10, 300], ["const", 5, 20]], 2)],
            },
        },
        {
            "name": "MLA + KDA groups, align mode, block 128",
            "config": _PLAIN | {"prefix_caching": True, "kda": True, "block_size": 128},
            "accept": 0,
            "arrivals": {
                "0": [_request("a", long, 2)],
                "4": [_request("b", [counting, ["const", 5, 20]], 2)],
                "8": [_request("c", long, 2)],
            },
        },
        {
            "name": "spec decode K=4, 2 accepted, budget 64",
            "config": _PLAIN | {"max_num_batched_tokens": 64, "spec": "ngram", "k": 4},
            "accept": 2,
            "arrivals": {"0": [_request(f"r{i}", [["range", 10, 40]], 12) for i in range(3)]},
        },
    ]


def known_bugs(*, with_checkpoints: bool) -> list[dict[str, Any]]:
    """Return scenarios in which a hit exposes what was never computed.

    Parameters
    ----------
    with_checkpoints : bool
        Whether this release can export a state from inside a chunk.
    """
    low = {**_request("low", [["range", 10, 130]], 2), "priority": 9}
    high = {**_request("high", [["const", 900, 15]], 6), "priority": 0}
    other = {**_request("other", [["const", 901, 1]], 1), "priority": 5}
    priority = {
        "prefix_caching": True,
        "num_blocks": 10,
        "max_num_batched_tokens": 64,
        "long_prefill_token_threshold": 32,
        "scheduler_reserve_full_isl": False,
        "policy": "priority",
    }
    scenarios = [
        {
            "name": "low is struck out of step 3 and resumes at 112, of which 96 were computed",
            "config": _PLAIN | priority,
            "accept": 0,
            "arrivals": {"0": [other, low], "1": [high]},
        }
    ]
    checkpoints = {
        "prefix_caching": True,
        "kda": True,
        "block_size": 64,
        "num_blocks": 100,
        "max_num_batched_tokens": 1024,
        "prefix_match_unit": 16,
        "prefill_checkpoint_alignment": 16,
    }
    if with_checkpoints:
        scenarios.append(
            {
                "name": "c resumes at 64 from the state after 32 tokens",
                "config": _PLAIN | checkpoints,
                "accept": 0,
                "arrivals": {
                    "0": [_request("a", [["range", 10, 40]], 2)],
                    "4": [_request("b", [["range", 10, 200]], 2)],
                    "8": [_request("c", [["range", 10, 64], ["const", 5, 20]], 2)],
                },
            }
        )
    return scenarios
