"""Compile kernels for GPUs that are not here and read what the compiler says about them.

``compile_rows`` starts one Python process without ``TRITON_INTERPRET`` for all rows; this file is
also the program that process runs. Nothing is executed, so no GPU is needed. Triton keeps compiled
kernels in its own cache, keyed by their source, so a second run only reads reports.
"""

from __future__ import annotations

import bisect
import itertools
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

#: What one program may use on sm_90 and sm_103 (227 KiB).
SHARED_BYTES_PER_PROGRAM = 232_448
#: What a multiprocessor has for all its programs; each program costs 1 KiB more than it asks for.
SHARED_BYTES_PER_SM = 228 * 1024
REGISTERS_PER_SM = 65_536


@dataclass(frozen=True)
class Row:
    """One kernel at one shape for one target.

    ``signature`` maps run-time arguments to Triton types (``"*bf16"``, ``"i32"``, ``"fp32"``);
    pointers and integers are taken to be multiples of 16, as they are at K3's shapes. ``constants``
    are the compile-time arguments; a string such as ``"tl.float32"`` names a type.
    ``programs_per_sm`` is how many programs the configuration was chosen to keep on one
    multiprocessor. ``stack`` is how many bytes a thread may spill: only where that was measured to
    cost less than what avoids it.
    """

    name: str
    module: str
    kernel: str
    capability: int
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    programs_per_sm: int = 1
    stack: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}-sm_{self.capability}"


@dataclass(frozen=True)
class Report:
    """What the compiler used: registers a thread, stack and local bytes, shared bytes.

    ``opcodes`` counts the instructions of the machine code by name, such as ``"HGMMA"``; empty if
    this Triton brings no disassembler for the target.
    """

    registers: int
    stack: int
    local: int
    shared: int
    opcodes: dict[str, int]

    @property
    def instructions(self) -> int:
        """Length of the machine code, without what only fills it up."""
        return sum(count for name, count in self.opcodes.items() if name != "NOP")

    def programs_per_sm(self, num_warps: int) -> int:
        """Programs that fit one multiprocessor by registers, shared memory and threads."""
        # Registers are handed out per warp in units of 256.
        per_warp = -(-self.registers * 32 // 256) * 256
        by_registers = REGISTERS_PER_SM // (per_warp * num_warps)
        by_shared = SHARED_BYTES_PER_SM // (self.shared + 1024)
        return min(by_registers, by_shared, 64 // num_warps)


def compile_rows(rows: Sequence[Row], *, package_dir: Path, timeout: float = 300) -> list[Report]:
    """Compile every row in one child process; ``package_dir`` holds the kernel package."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_DEFAULT_FP_FUSION"] = "1"
    path = [str(package_dir), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps([asdict(row) for row in rows]),
        capture_output=True, text=True, env=environment, timeout=timeout,
    )  # fmt: skip
    if done.returncode:
        raise AssertionError(f"compilation failed:\n{done.stderr[-4000:]}")
    reports = json.loads(done.stdout.splitlines()[-1])
    return [Report(**report) for report in reports]


def _compile(row: Row) -> tuple[Report, str, bytes]:
    """Return the report without opcodes, the target as nvdisasm calls it, and the machine code."""
    import importlib

    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(row.module), row.kernel)
    names = list(kernel.arg_names)
    unknown = (set(row.signature) | set(row.constants)) ^ set(names)
    if unknown:
        raise ValueError(f"{row}: arguments of the row and of {row.kernel} differ in {unknown}")
    constants = {
        (names.index(name),): getattr(tl, value[3:]) if str(value).startswith("tl.") else value
        for name, value in row.constants.items()
    }
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in row.signature.items()
        if kind.startswith(("*", "i"))
    }
    source = ASTSource(
        kernel,
        signature={name: row.signature.get(name, "constexpr") for name in names},
        constexprs=constants,
        attrs=aligned,
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", row.capability, 32),
        options={"num_warps": row.num_warps, **row.options},
    )
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        dump = subprocess.run(
            [tools / "cuobjdump", "-res-usage", cubin.name],
            capture_output=True,
            text=True,
            check=True,
        )
    usage = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", dump.stdout + dump.stderr))
    target = re.search(r"^\.target sm_(\w+)", compiled.asm["ptx"], flags=re.MULTILINE)
    if set(usage) != {"REG", "STACK", "LOCAL"} or target is None:
        raise ValueError(f"cuobjdump gave no resource usage for {row}: {dump.stdout}{dump.stderr}")
    # Dynamic shared memory is not in the cubin; Triton knows how much it will ask for.
    report = Report(
        int(usage["REG"]), int(usage["STACK"]), int(usage["LOCAL"]), compiled.metadata.shared, {}
    )
    return report, f"SM{target[1]}", _machine_code(compiled.asm["cubin"])


def _machine_code(cubin: bytes) -> bytes:
    """Return the sections ``.text.*`` of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<3H", cubin, 58)
    # Of each section: its name's place among the names, and the file offset and length.
    sections = [
        (where, *struct.unpack_from("<2Q", cubin, table + i * size + 24))
        for i in range(count)
        for (where,) in [struct.unpack_from("<I", cubin, table + i * size)]
    ]
    first_name = sections[names][1]
    return b"".join(
        cubin[offset : offset + length]
        for where, offset, length in sections
        if cubin.startswith(b".text.", first_name + where)
    )


def _opcodes(target: str, codes: Sequence[bytes]) -> list[dict[str, int]]:
    """Count the instructions of every code by name, none if there is no disassembler for it.

    All in one call: starting ``nvdisasm`` takes longer than what it then does.
    """
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".bin") as binary:
        binary.write(b"".join(codes))
        binary.flush()
        shown = subprocess.run(
            [tool, "--binary", target, binary.name], capture_output=True, text=True, check=False
        )
    # Triton 3.6 brings a disassembler that is older than its compiler for Blackwell.
    if "is not defined for option 'binary'" in shown.stderr:
        return [{} for _ in codes]
    # An address in a comment, perhaps a predicate, the name, and behind a dot its variants.
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", shown.stdout)
    ends = list(itertools.accumulate(len(code) for code in codes))
    counts: list[Counter[str]] = [Counter() for _ in codes]
    for address, name in found:
        counts[bisect.bisect_right(ends, int(address, 16))][name] += 1
    if shown.returncode or not all(counts):
        raise ValueError(f"nvdisasm shows not all instructions for {target}: {shown.stderr}")
    return [dict(count) for count in counts]


def main() -> None:
    """Read rows from standard input and print their reports."""
    requested = [Row(**row) for row in json.load(sys.stdin)]
    with ProcessPoolExecutor(min(4, os.cpu_count() or 1, len(requested))) as pool:
        compiled = list(pool.map(_compile, requested))
        by_target: dict[str, list[int]] = {}
        for i, (_, target, _) in enumerate(compiled):
            by_target.setdefault(target, []).append(i)
        codes = [[compiled[i][2] for i in rows] for rows in by_target.values()]
        counted = list(pool.map(_opcodes, by_target, codes))
    reports = [asdict(report) for report, _, _ in compiled]
    for rows, counts in zip(by_target.values(), counted, strict=True):
        for i, count in zip(rows, counts, strict=True):
            reports[i]["opcodes"] = count
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
