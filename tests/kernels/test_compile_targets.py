"""Every kernel compiles for Hopper and Blackwell at K3's shapes, without spills and within limits.

A later kernel adds its rows to ``ROWS`` and nothing else. How long the machine code of a row is, is
kept in ``instruction_baseline.json`` by version of Triton: ``python tests/kernels/baseline.py``
writes the counts of the version at hand.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import aot
import baseline
import pytest
from attn_res_rows import attn_res_rows
from decode_rows import decode_rows
from filelock import FileLock
from kda_rows import kda_rows
from mla_rows import mla_rows
from moe_rows import moe_rows, tile_rows
from routing_rows import dispatch_rows, finalize_rows, routing_rows
from seat_rows import seat_rows

pytest.importorskip("triton", reason="compiling needs Triton")

import k3_kernels

ROWS = [
    *attn_res_rows(),
    *routing_rows(),
    *dispatch_rows(),
    *finalize_rows(),
    *moe_rows(),
    *tile_rows(),
    *kda_rows(),
    *decode_rows(),
    *mla_rows(),
    *seat_rows(),
]

#: Rows whose products are large enough for a warp group.
LARGE = [
    *(row for row in kda_rows() if "prefill" in row.name),
    *(row for row in mla_rows() if "T9" in row.name),
]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, aot.Report]:
    """Compile all rows once, even if several test processes share these tests."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # the folder of all of them
    file = folder / "reports.json"
    with FileLock(f"{file}.lock"):
        if not file.exists():
            package_dir = Path(k3_kernels.__file__).parents[1]
            compiled = aot.compile_rows(ROWS, package_dir=package_dir, timeout=1200)
            file.write_text(json.dumps([asdict(report) for report in compiled]), encoding="utf-8")
    compiled = [aot.Report(**report) for report in json.loads(file.read_text(encoding="utf-8"))]
    return {str(row): report for row, report in zip(ROWS, compiled, strict=True)}


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_fits_the_target(row: aot.Row, reports: dict[str, aot.Report]) -> None:
    report = reports[str(row)]
    assert report.stack <= row.stack and report.local == 0, f"{row} spills: {report}"
    assert report.shared <= aot.SHARED_BYTES_PER_PROGRAM, f"{row}: {report}"
    assert report.programs_per_sm(row.num_warps) >= row.programs_per_sm, f"{row}: {report}"


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_is_as_long_as_it_was(row: aot.Row, reports: dict[str, aot.Report]) -> None:
    """A change that makes a kernel longer has to be meant; one that shortens it, be kept."""
    known = baseline.load()
    if known is None:
        pytest.skip(f"nothing is recorded for Triton {baseline.version()}")
    if not reports[str(row)].opcodes:
        pytest.skip(f"Triton {baseline.version()} cannot disassemble sm_{row.capability}")
    assert str(row) in known, f"{row} is new: {baseline.HOW_TO}"
    count = reports[str(row)].instructions
    assert 0.95 * known[str(row)] <= count <= 1.02 * known[str(row)], (
        f"{row} has {count} instructions, recorded are {known[str(row)]}: if that is meant, "
        f"{baseline.HOW_TO}"
    )


@pytest.mark.parametrize("row", moe_rows(), ids=str)
def test_uses_the_large_matrix_instruction(row: aot.Row, reports: dict[str, aot.Report]) -> None:
    """64 rows and four warps are a warp group's: wgmma on Hopper, tcgen05 on Blackwell.

    With only 8 columns Triton 3.6 multiplies with mma.sync on Hopper.
    """
    import triton

    few = row.constants["BLOCK_M"] < 16 and row.capability == 90
    old = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
    expected = "UTCHMMA" if row.capability == 103 else "HMMA" if few and old else "HGMMA"
    if not reports[str(row)].opcodes:
        pytest.skip(f"Triton {triton.__version__} cannot disassemble sm_{row.capability}")
    used = {name for name in ("HMMA", "HGMMA", "UTCHMMA") if reports[str(row)].opcodes.get(name)}
    assert used == {expected}


@pytest.mark.parametrize("row", LARGE, ids=str)
def test_prefill_and_attention_use_the_large_matrix_instruction(
    row: aot.Row, reports: dict[str, aot.Report]
) -> None:
    if not reports[str(row)].opcodes:
        pytest.skip(f"nothing disassembles sm_{row.capability} here")
    used = {name for name in ("HMMA", "HGMMA", "UTCHMMA") if reports[str(row)].opcodes.get(name)}
    assert used == {"UTCHMMA" if row.capability == 103 else "HGMMA"}


def test_report_sees_a_spill() -> None:
    """The same kernel held to 32 registers a thread spills, and the report says so."""
    last = ROWS[0]
    squeezed = aot.Row(**{**vars(last), "name": "squeezed", "options": {"maxnreg": 32}})
    (report,) = aot.compile_rows([squeezed], package_dir=Path(k3_kernels.__file__).parents[1])
    assert report.stack > 0
    assert report.registers <= 32
