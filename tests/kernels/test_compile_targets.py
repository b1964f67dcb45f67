"""Every kernel compiles for Hopper and Blackwell at K3's shapes, without spills and within limits.

A later kernel adds its rows to ``ROWS`` and nothing else.
"""

from __future__ import annotations

from pathlib import Path

import aot
import pytest
from k3_kernels.attn_res import choose_config

pytest.importorskip("triton", reason="compiling needs Triton")

import k3_kernels

HIDDEN = 7168  # Kimi K3's hidden size
CAPABILITIES = (90, 103)  # H200, B300


def attn_res_rows() -> list[aot.Row]:
    """Both regimes, with a full bank and at the first layers."""
    pointers = "out prefix_out blocks prefix delta query key_norm norm"
    strides = "out prefix_out blocks blocks_token prefix delta"
    signature = {f"{name}_ptr": "*bf16" for name in pointers.split()}
    signature |= {f"{name}_stride": "i32" for name in strides.split()}
    signature |= {"key_eps": "fp32", "norm_eps": "fp32"}
    rows = []
    for tokens, programs_per_sm in ((1, 1), (8192, 2)):
        for n_blocks, has_delta in ((8, True), (1, False)):
            config = choose_config(tokens, n_blocks, HIDDEN)
            constants = config.constants(n_blocks, HIDDEN, has_delta, store_prefix=has_delta)
            rows += [
                aot.Row(
                    name=f"attn_res-T{tokens}-n{n_blocks}",
                    module="k3_kernels.attn_res_kernel",
                    kernel="attn_res_kernel",
                    capability=capability,
                    signature=signature,
                    constants={**constants, "COMPUTE": "tl.float32"},
                    num_warps=config.num_warps,
                    programs_per_sm=programs_per_sm,
                )
                for capability in CAPABILITIES
            ]
    return rows


ROWS = attn_res_rows()


@pytest.fixture(scope="module")
def reports() -> dict[str, aot.Report]:
    package_dir = Path(k3_kernels.__file__).parents[1]
    compiled = aot.compile_rows(ROWS, package_dir=package_dir)
    return {str(row): report for row, report in zip(ROWS, compiled, strict=True)}


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_fits_the_target(row: aot.Row, reports: dict[str, aot.Report]) -> None:
    report = reports[str(row)]
    assert report.stack == 0 and report.local == 0, f"{row} spills: {report}"
    assert report.shared <= aot.SHARED_BYTES_PER_PROGRAM, f"{row}: {report}"
    assert report.programs_per_sm(row.num_warps) >= row.programs_per_sm, f"{row}: {report}"


def test_report_sees_a_spill() -> None:
    """The same kernel held to 32 registers a thread spills, and the report says so."""
    last = ROWS[0]
    squeezed = aot.Row(**{**vars(last), "name": "squeezed", "options": {"maxnreg": 32}})
    (report,) = aot.compile_rows([squeezed], package_dir=Path(k3_kernels.__file__).parents[1])
    assert report.stack > 0
    assert report.registers <= 32
