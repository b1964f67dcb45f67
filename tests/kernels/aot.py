"""Compile kernels for GPUs that are not here and read what the compiler says about them.

``compile_rows`` starts one Python process without ``TRITON_INTERPRET`` for all rows; this file is
also the program that process runs. Nothing is executed, so no GPU is needed. Triton keeps compiled
kernels in its own cache, keyed by their source, so a second run only reads reports.
"""

from __future__ import annotations

import json
import os
import re
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
    multiprocessor.
    """

    name: str
    module: str
    kernel: str
    capability: int
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    programs_per_sm: int = 1
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


def _compile(row: Row) -> Report:
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
        code = subprocess.run(
            [tools / "nvdisasm", "-c", cubin.name], capture_output=True, text=True, check=False
        )
    usage = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", dump.stdout + dump.stderr))
    if set(usage) != {"REG", "STACK", "LOCAL"}:
        raise ValueError(f"cuobjdump gave no resource usage for {row}: {dump.stdout}{dump.stderr}")
    # An address in a comment, perhaps a predicate, the name, and behind a dot its variants.
    opcodes = Counter(
        re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", code.stdout)
    )
    # Triton 3.6 brings a disassembler that is older than its compiler for Blackwell.
    if not opcodes and "Cannot decode architecture" not in code.stderr:
        raise ValueError(f"nvdisasm shows no instruction of {row}: {code.stdout}{code.stderr}")
    # Dynamic shared memory is not in the cubin; Triton knows how much it will ask for.
    return Report(
        int(usage["REG"]),
        int(usage["STACK"]),
        int(usage["LOCAL"]),
        compiled.metadata.shared,
        dict(opcodes),
    )


if __name__ == "__main__":
    requested = [Row(**row) for row in json.load(sys.stdin)]
    with ProcessPoolExecutor(min(4, os.cpu_count() or 1, len(requested))) as pool:
        print(json.dumps([asdict(report) for report in pool.map(_compile, requested)]))
