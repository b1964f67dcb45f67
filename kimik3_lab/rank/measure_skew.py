"""Measure the trained tiny K3's expert loads on held-out text.

``python -m kimik3_lab.rank.measure_skew``

Needs torch and tokenizers; half a minute on a CPU. The rank ladder reads what it writes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from kimik3_lab.paths import data_dir, default_model_dir
from kimik3_lab.provenance import provenance
from kimik3_lab.rank.routing_skew import PROFILE_FILE, measure_profile
from kimik3_lab.reference import checkpoint
from kimik3_lab.reference.batch import BatchMixer

__all__ = ["main", "measure"]

_LENGTH, _WINDOWS = 256, 48


def measure(num_windows: int = _WINDOWS) -> dict[str, Any]:
    """Measure on so many windows of 256 tokens, the same as lesson 02 takes."""
    from tokenizers import Tokenizer

    folder = default_model_dir()
    model = checkpoint.load(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    files = sorted((data_dir() / "held_out").rglob("*.py"))
    windows = []
    for file in files:
        ids = tokenizer.encode(file.read_text(encoding="utf-8")).ids
        for start in range(0, len(ids) - _LENGTH, 4 * _LENGTH):
            windows.append([model.config.bos_token_id, *ids[start : start + _LENGTH - 1]])
    windows = windows[:num_windows]
    mixer = BatchMixer(model.new_state(), len(windows))
    profile = measure_profile(model, torch.tensor(windows).flatten(), mixer)
    return {
        "profile": [round(share, 8) for share in profile],
        "experts": model.config.num_experts,
        "top_k": model.config.num_experts_per_token,
        "layers": len(model.config.moe_layer_ids),
        "tokens": len(windows) * _LENGTH,
        "busiest_over_mean": round(max(profile) * model.config.num_experts, 4),
    }


def main() -> None:
    """Write the profile with where it came from."""
    path = data_dir() / PROFILE_FILE
    body = {
        "schema_version": 1,
        "evidence": "Measured",
        "what": "share of all choices of the busiest expert, the second ..., mean over MoE layers",
        **measure(),
        "provenance": provenance(command="python -m kimik3_lab.rank.measure_skew"),
    }
    temporary = Path(f"{path}.tmp")
    temporary.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
    print(f"busiest of {body['experts']} experts: {body['busiest_over_mean']} times the mean")


if __name__ == "__main__":
    main()
