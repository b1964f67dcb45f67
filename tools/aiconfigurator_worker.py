"""Ask aiconfigurator for many estimates in one process; runs in aiconfigurator's own environment.

``tools/compare_aiconfigurator.py`` starts it. On standard input come keyword arguments of
``cli_estimate``, a JSON object a line; on standard output go estimates, or the reason why there is
none. The command line takes six seconds a point, most of them to start, so that a scan needs this.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from importlib import metadata


def main() -> None:
    """Answer line by line."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    from aiconfigurator.cli.api import cli_estimate

    print(json.dumps({"version": metadata.version("aiconfigurator")}), flush=True)
    for line in sys.stdin:
        try:
            found = cli_estimate(**json.loads(line))
        except Exception as error:  # a table that it lacks, a batch that does not fit
            answer = {"error": f"{type(error).__name__}: {error}"[:200]}
        else:
            answer = {
                "ttft_ms": float(found.ttft),
                "latency_ms": float(found.request_latency),
                "tokens_per_s": float(found.tokens_per_second),
            }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
