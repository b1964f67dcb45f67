"""Record compressed-tensors' MXFP4: its decoder on every byte, and whole matrices both ways.

The package is imported as published from the unpacked wheel; it needs what ``requirements.txt``
lists.

    python tools/make_golden/compressed_tensors_fp4.py [--check] [--cache DIR]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = (
    "1"  # the rounding is torch.compiled, which would need a compiler
)

import torch
from fixtures import Case, Oracle, Source, main
from lift import sha256
from torch import Generator, Tensor
from wheels import fetch

GROUP = 32
HELPERS = "compressed_tensors/compressors/nvfp4/helpers.py"
COMPRESSOR = "compressed_tensors/compressors/mxfp4/base.py"
SCALES = "compressed_tensors/quantization/utils/mxfp_utils.py"


def _matrix(rng: Generator, rows: int, columns: int, low: int, high: int) -> Case:
    """Random bytes, with scale bytes from ``low`` to ``high``."""
    scales = torch.randint(low, high + 1, (rows, columns // GROUP), generator=rng)
    packed = torch.randint(0, 256, (rows, columns // 2), generator=rng)
    return Case({"packed": packed.to(torch.uint8), "scale": scales.to(torch.uint8)})


def _weights(rng: Generator, spread: float) -> Case:
    return Case({"weight": spread * torch.randn((16, 4 * GROUP), generator=rng)})


def _ties(rng: Generator) -> Case:
    """Eighths up to 5.5: values on the grid, in the middle of two grid points, and beside.

    The last value of each group is 5.5, which makes the scale 1, so all are rounded as they are.
    """
    eighths = torch.randint(-44, 45, (8, 4 * GROUP), generator=rng) / 8
    eighths[:, GROUP - 1 :: GROUP] = 5.5
    return Case({"weight": eighths})


def make_cases(rng: Generator) -> dict[str, Case]:
    return {
        "every_byte": Case({"packed": torch.arange(256, dtype=torch.uint8).view(16, 16)}),
        "matrix": _matrix(rng, 16, 128, 112, 130),
        "matrix_edge_scales": _matrix(rng, 8, 128, 1, 251),
        "matrix_scale_zero": _matrix(rng, 2, 64, 0, 0),
        "weights": _weights(rng, 0.02),
        "weights_large": _weights(rng, 700.0),
        "ties": _ties(rng),
    }


def build(cache: Path) -> Oracle:
    wheel = fetch("compressed-tensors", "0.20.1", cache)
    root = wheel.extract("compressed_tensors/").parent
    sys.path.insert(0, str(root))
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales

    weights = QuantizationArgs(
        num_bits=4, type="float", strategy="group", group_size=GROUP, scale_dtype=torch.uint8
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)

    def run(_: str, case: Case) -> dict[str, Tensor]:
        given = case.inputs
        if "weight" in given:
            weight = given["weight"]
            exponents = generate_mx_scales(weight.unflatten(-1, (-1, GROUP)).abs().amax(-1))
            state = {"weight": weight, "weight_scale": 2.0 ** (exponents - 127)}
            packed = MXFP4PackedCompressor.compress(state, scheme)
            return {"packed": packed["weight_packed"], "scale": packed["weight_scale"]}
        if "scale" in given:
            state = {"weight_packed": given["packed"], "weight_scale": given["scale"]}
            return {"weight": MXFP4PackedCompressor.decompress(state, scheme)["weight"]}
        rows, columns = given["packed"].shape
        values = unpack_fp4_from_uint8(given["packed"], rows, 2 * columns, dtype=torch.float32)
        return {"weight": values}

    functions = {
        HELPERS: ["unpack_fp4_from_uint8", "pack_fp4_to_uint8"],
        COMPRESSOR: ["MXFP4PackedCompressor.compress", "MXFP4PackedCompressor.decompress"],
        SCALES: ["generate_mx_scales"],
    }
    how = "the package, imported as published from the unpacked wheel"
    return Oracle(
        name="compressed_tensors_fp4",
        package="compressed-tensors",
        version="0.20.1",
        licence="Apache-2.0, (c) contributors to the vLLM project",
        sources=[Source(m, f, sha256(root / m), how) for m, f in functions.items()],
        make_cases=make_cases,
        run=run,
        seed=20_004,
        wheel_sha256=wheel.sha256,
        tolerance=0.0,
    )


if __name__ == "__main__":
    main(build, "Record or check the fixture of compressed-tensors' MXFP4.")
