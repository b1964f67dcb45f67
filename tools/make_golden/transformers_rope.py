"""Record YaRN's frequencies and attention factor as transformers computes them.

python tools/make_golden/transformers_rope.py [--check]
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from fixtures import Case, Oracle, Source, main
from lift import sha256
from torch import Generator, Tensor
from transformers import DeepseekV3Config, modeling_rope_utils

VERSION = "5.19.0"
#: width, theta, factor, trained context
SHAPES = {
    "released": (64, 50_000.0, 32.0, 32_768),
    "deepseek_v3": (64, 10_000.0, 40.0, 4_096),
    "wide": (128, 1_000_000.0, 4.0, 32_768),
    "small": (12, 100.0, 8.0, 128),
}


def make_cases(_: Generator) -> dict[str, Case]:
    names = ("width", "theta", "factor", "original")
    return {
        name: Case({"width": torch.tensor(shape[0])}, dict(zip(names, shape, strict=True)))
        for name, shape in SHAPES.items()
    }


def run(_: str, case: Case) -> dict[str, Tensor]:
    params = case.params
    config = DeepseekV3Config(
        qk_rope_head_dim=params["width"],
        max_position_embeddings=round(params["original"] * params["factor"]),
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": params["theta"],
            "factor": params["factor"],
            "original_max_position_embeddings": params["original"],
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    )
    config.head_dim = params["width"]
    frequencies, cosine_factor = modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](config)
    return {"frequencies": frequencies, "cosine_factor": torch.tensor(cosine_factor)}


def build(_: Path) -> Oracle:
    if transformers.__version__ != VERSION:
        raise RuntimeError(
            f"transformers is {transformers.__version__}, the fixture is of {VERSION}: "
            "pip install -r tools/make_golden/requirements.txt"
        )
    file = Path(modeling_rope_utils.__file__)
    member = str(file.relative_to(Path(transformers.__file__).parent.parent))
    how = "the installed package"
    return Oracle(
        name="transformers_rope",
        package="transformers",
        version=VERSION,
        licence="Apache-2.0, (c) 2026 The HuggingFace Inc. team",
        sources=[Source(member, ["_compute_yarn_parameters"], sha256(file), how)],
        make_cases=make_cases,
        run=run,
        seed=20_009,
    )


if __name__ == "__main__":
    main(build, "Record or check the fixture of transformers' YaRN.")
