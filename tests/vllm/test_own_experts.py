"""Our experts in vLLM through its hook for layers out of its tree."""

from __future__ import annotations

import sys
from pathlib import Path

from kimik3_lab.reference import checkpoint
from kimik3_lab.vllm_cpu.own_experts import run_experts

FOLDER = Path(__file__).resolve().parents[2] / "data" / "tiny-k3"
PROMPTS = [[3 + (7 * i + length) % 500 for i in range(length)] for length in (9, 40)]


def test_vllm_computes_with_our_experts_and_the_tokens_stay() -> None:
    found = run_experts(PROMPTS, ours=True, model=FOLDER, venv=Path(sys.executable).parents[1])
    model = checkpoint.load(FOLDER)
    expected = [tuple(model.generate(prompt, 8, stop_token_ids=())) for prompt in PROMPTS]
    assert list(found.tokens) == expected
    # Each expert layer, in each of at least eight steps.
    layers = model.config.num_hidden_layers - model.config.first_k_dense_replace
    assert found.calls >= 8 * layers
    assert found.layers == ("LabRoutedExperts",)
