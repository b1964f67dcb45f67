"""The two kinds of scenario that all families start from: any cache, and a busy hybrid cache.

Needs the standard library only. Every key drawn here is one that the plainest recordings have.
"""

from __future__ import annotations

from random import Random
from typing import Any

__all__ = ["base", "hybrid"]

#: Drafters that are scheduled differently: by extra slots, by look-ahead, or neither.
_DRAFTERS = ("ngram", "dspark", "dflash", "eagle3-parallel", "draft_model")
_PARALLEL = ("dspark", "dflash", "eagle3-parallel", "draft_model")


def base(
    rng: Random, *, tight: bool = False, caching: bool | None = None, kda: bool | None = None
) -> dict[str, Any]:
    """Draw a small workload under a random configuration.

    Parameters
    ----------
    rng : random.Random
        Where all choices come from.
    tight : bool
        Hardly more blocks than the longest request needs, so that requests are preempted.
    caching, kda : bool, optional
        Fix the prefix cache, or whether there is a KDA group, instead of drawing it.
    """
    kda = rng.random() < 0.4 if kda is None else kda
    caching = rng.random() < 0.7 if caching is None else caching
    block_size = rng.choice([16, 32, 64, 128] if kda else [16, 32])
    spec = rng.choice([None, None, *_DRAFTERS])
    if kda and spec in ("eagle3-parallel", "draft_model"):
        spec = "dspark"
    k = rng.choice([1, 2, 4, 7, 8]) if spec else 0
    seqs = rng.choice([1, 2, 4, 8, 16])
    budget = rng.choice([48, 64, 128, 256, 512, 1024])
    if kda and caching:
        budget = max(budget, block_size)
    if spec in _PARALLEL:
        budget = max(budget, 2 * seqs * (k + 1) + (block_size if kda else 0))
    shared = rng.randint(0, 400)
    arrivals, lengths = _arrivals(rng, block_size, shared)
    threshold = rng.choice([0, 0, 0, 48]) if not kda else 0
    config = {
        "max_num_seqs": seqs,
        "max_num_batched_tokens": budget,
        "block_size": block_size,
        "num_blocks": _num_blocks(rng, lengths, block_size, k, kda, tight),
        "prefix_caching": caching,
        "kda": kda,
        "spec": spec,
        "k": k,
        "long_prefill_token_threshold": threshold,
    }
    return {"config": config, "accept": rng.randint(0, k), "arrivals": arrivals}


def hybrid(
    rng: Random,
    *,
    repeats: bool = True,
    specs: tuple[str | None, ...] = (None, None, "ngram", "dspark", "dflash"),
) -> dict[str, Any]:
    """Draw a workload for MLA and KDA in one pool, whose requests share and repeat prompts.

    Parameters
    ----------
    rng : random.Random
        Where all choices come from.
    repeats : bool
        Whether later requests often bring a prompt that was there, or go on where one ended.
    specs : tuple
        Drafters to draw from.
    """
    block_size = rng.choice([32, 64, 64, 128])
    spec = rng.choice(specs)
    k = rng.choice([1, 2, 4, 8]) if spec else 0
    seqs = rng.choice([2, 4, 8])
    budget = max(rng.choice([128, 256, 512, 1024]), block_size)
    if spec in _PARALLEL:
        budget = max(budget, 2 * seqs * (k + 1) + block_size)
    arrivals, lengths = _arrivals(rng, block_size, rng.randint(60, 400), late=True)
    if repeats:
        lengths = _repeat(rng, arrivals, block_size)
    config = {
        "max_num_seqs": seqs,
        "max_num_batched_tokens": budget,
        "block_size": block_size,
        "num_blocks": _num_blocks(rng, lengths, block_size, k, True, rng.random() < 0.3),
        "prefix_caching": True,
        "kda": True,
        "spec": spec,
        "k": k,
        "long_prefill_token_threshold": 0,
    }
    return {"config": config, "accept": rng.randint(0, k), "arrivals": arrivals}


def _arrivals(
    rng: Random, block_size: int, shared: int, *, late: bool = False
) -> tuple[dict[str, list[dict[str, Any]]], list[int]]:
    """Draw requests by arrival step, and their lengths in tokens with their output."""
    steps = [0, 0, 3, 6, 12, 20, 30] if late else [0, 0, 0, 1, 2, 5, 9]
    arrivals: dict[int, list[dict[str, Any]]] = {}
    lengths = []
    for number in range(rng.randint(2, 10)):
        pieces: list[list[Any]] = []
        if shared and rng.random() < 0.6:
            cut = rng.choice(
                [shared, max(1, shared // 2), block_size * max(1, shared // block_size)]
            )
            pieces.append(["range", 10, cut])
        own = rng.choice([1, 3, block_size - 1, block_size, block_size + 1, rng.randint(1, 300)])
        pieces.append(["const", 500 + number, own])
        max_tokens = rng.choice([1, 2, 5, 12, 24, 40, 70])
        request = {"id": f"r{number}", "prompt": pieces, "max_tokens": max_tokens}
        arrivals.setdefault(rng.choice(steps), []).append(request)
        lengths.append(sum(piece[2] for piece in pieces) + max_tokens)
    return {str(step): arrivals[step] for step in sorted(arrivals)}, lengths


def _repeat(rng: Random, arrivals: dict[str, list[dict[str, Any]]], block_size: int) -> list[int]:
    """Let some requests bring an earlier prompt again, whole, cut or longer; return all lengths."""
    seen: list[list[list[Any]]] = []
    lengths = []
    for requests in arrivals.values():
        for request in requests:
            if seen and rng.random() < 0.5:
                pieces = [list(piece) for piece in rng.choice(seen)]
                more = rng.choice([0, 0, 1, block_size // 2, block_size, rng.randint(1, 200)])
                if more:
                    pieces.append(["const", 900 + len(lengths), more])
                elif pieces[-1][2] > 1 and rng.random() < 0.4:
                    pieces[-1][2] -= rng.randint(1, pieces[-1][2] - 1)
                request["prompt"] = pieces
            seen.append(request["prompt"])
            total = sum(piece[2] for piece in request["prompt"])
            lengths.append(total + request["max_tokens"])
    return lengths


def _num_blocks(
    rng: Random, lengths: list[int], block_size: int, k: int, kda: bool, tight: bool
) -> int:
    """Draw a pool in which the longest request fits, be it alone."""
    longest = max(lengths) // block_size
    if tight:
        spare = 2 + 2 * k // block_size + (k + 5 if kda else 0)
        return longest + spare + rng.choice([0, 1, 2, 4, longest // 2])
    need = longest + 8 + (k + 4 if kda else 0)
    return need + rng.choice([1, 2, 4, 8, need, 4096])
