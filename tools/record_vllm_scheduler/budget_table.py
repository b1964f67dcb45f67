"""What one long prefill gets in a step that already carries decoding requests with their drafts.

Needs vLLM. The table is how the releases' budgets are told apart: 0.27.1 sets draft slots aside for
all seats at start-up, later ones for the requests that are scheduled, 0.33.0 for none with DSpark.
"""

from __future__ import annotations

from typing import Any

from drive import Run
from tqdm import tqdm

__all__ = ["budget_table"]

_METHODS = (None, "ngram", "eagle3-parallel", "dspark", "dflash")
_RUNNING = (1, 2, 32, 128, 256, 512)


def budget_table() -> list[dict[str, Any]]:
    """Return a row for each drafter (K = 8) and number of running requests."""
    cases = [(method, running) for method in _METHODS for running in _RUNNING]
    return [_row(*case) for case in tqdm(cases, unit="row", disable=None)]


def _row(method: str | None, running: int) -> dict[str, Any]:
    k = 8 if method else 0
    config = {
        "max_num_seqs": 1024,
        "max_num_batched_tokens": 8192,
        "block_size": 16,
        "num_blocks": 200_000,
        "prefix_caching": False,
        "kda": False,
        "spec": method,
        "k": k,
        "long_prefill_token_threshold": 0,
    }
    decoders = [
        {"id": f"d{i}", "prompt": [["range", 10, 4]], "max_tokens": 1000}
        for i in range(running - 1)
    ]
    prefill = {"id": "prefill", "prompt": [["const", 3, 30_000]], "max_tokens": 4}
    # A decoder has drafts once it has a token; the prefill joins when all have both.
    run = Run({"config": config, "accept": 0, "arrivals": {"0": decoders}})
    run.step(0)
    step = 1
    while any(r.num_output_tokens == 0 for r in run.scheduler.requests.values()):
        run.step(step)
        step += 1
    run.scenario["arrivals"] = {str(step): [prefill]}
    row = run.step(step)
    return {
        "method": method,
        "running": running,
        "prefill": row["scheduled"].get("prefill", 0),
        "total": row["total"],
        "max_num_scheduled_tokens": run.scheduler.max_num_scheduled_tokens,
    }
