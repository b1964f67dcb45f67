"""Time the rungs of the KDA ladders: ``python -m benchmarks.kda_ladder``.

Needs a CUDA device. One KDA layer as one of eight tensor-parallel ranks sees it, 12 heads. Rungs of
a size are compared with a float64 recurrence and then timed in turns. The result is what lesson 06
shows; ``--part`` chooses parts of it:

``decode``      every rung at 1 to 256 requests
``programs``    the delta rule alone, cut into programs of different size
``verify``      eight drafts: a state for each token, or records and a commit
``prefill``     every rung over 8192 tokens, and each launch of a rung alone
``walks``       the walk alone with states cut differently, and with more segments
``checkpoint``  8000 tokens with the state after 7680 kept on the way, and in two calls
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from benchmarks.kda_ladder_decode import decode, programs, verify
from benchmarks.kda_ladder_prefill import checkpoint, prefill, walks
from benchmarks.kda_ladder_rows import Row
from benchmarks.provenance import provenance

__all__ = ["PARTS", "measure"]

PARTS: dict[str, Callable[[torch.Generator], Iterable[Row]]] = {
    "decode": decode,
    "programs": programs,
    "verify": verify,
    "prefill": prefill,
    "walks": walks,
    "checkpoint": checkpoint,
}


def measure(seed: int, parts: Iterable[str] = tuple(PARTS)) -> list[Row]:
    """Time the chosen parts; return their rows."""
    rows = []
    for part in parts:
        for row in PARTS[part](torch.Generator("cuda").manual_seed(seed)):
            rows.append(row)
            keys = ("rung", "way", "batch", "block_v", "num_warps", "segments", "tokens")
            name = " ".join(str(row[key]) for key in keys if key in row)
            floor = row.get("floor_us")
            share = f"{floor / row['us']:6.1%}" if floor else ""
            print(f"{row['part']:<10} {name:<22} {row['us']:10.1f} us  {share}", flush=True)
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kda_ladder", description=__doc__)
    parser.add_argument("--part", choices=tuple(PARTS), action="append", dest="parts")
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument("--output", type=Path, metavar="FILE")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("timing the rungs needs a CUDA device, and PyTorch finds none here")
    rows = measure(options.seed, options.parts or tuple(PARTS))
    if options.output:
        made = provenance({}, seed=options.seed)
        result = {"schema_version": 1, "provenance": made, "rows": rows}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        unfinished = options.output.with_name(options.output.name + ".part")
        unfinished.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(options.output)


if __name__ == "__main__":
    main()
