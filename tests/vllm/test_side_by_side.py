"""The lab's engine and real vLLM: the same requests, the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kimik3_lab.serving.server import start_in_background
from kimik3_lab.vllm_cpu.serve import start_vllm
from kimik3_lab.vllm_cpu.side_by_side import SideBySide, compare_servers

FOLDER = Path(__file__).resolve().parents[2] / "data" / "tiny-k3"
PROMPTS = (
    "def main(argv):\n    return",
    "class Scheduler:\n    def __init__(self",
    "import os\nimport sys\n\n",
    "for number in range(10):\n",
)


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, str]]:
    with (
        start_in_background(FOLDER, threads=1, max_model_len=512) as ours,
        start_vllm(FOLDER, timeout=900) as theirs,
    ):
        yield {"k3lab": ours.base_url, "vLLM": theirs.base_url}


@pytest.mark.parametrize("concurrency", [1, 4])
def test_the_same_tokens(servers: dict[str, str], concurrency: int, measured: list[str]) -> None:
    both = compare_servers(servers, PROMPTS, max_tokens=16, concurrency=concurrency)
    assert both.differences() == []
    for row in both.rows():
        assert row["output_tokens"] == row["counted_output_tokens"] == 16 * len(PROMPTS)
        assert 0 < row["first_token_ms"] <= 1e3 * row["seconds"]
        measured.append(
            f"side by side, {row['server']}, {concurrency} at once: first token "
            f"{row['first_token_ms']:.0f} ms, each further {row['token_ms']:.1f} ms"
        )
    prompts = {row["counted_prompt_tokens"] for row in both.rows()}
    assert len(prompts) == 1 and prompts.pop() > 20


def test_other_prompts_would_be_seen(servers: dict[str, str]) -> None:
    one = compare_servers({"k3lab": servers["k3lab"]}, PROMPTS[:1], max_tokens=4)
    two = compare_servers({"vLLM": servers["vLLM"]}, PROMPTS[1:2], max_tokens=4)
    both = SideBySide({**one.answers, **two.answers}, {})
    assert both.differences() != []
