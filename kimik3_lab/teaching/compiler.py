"""Compile a kernel for a GPU that is not here, and let NVIDIA's tools say what came out.

Needs Triton once it is called, whose wheel brings assembler and disassembler; no GPU. Triton in a
lesson's process interprets kernels, so a module that compiles runs itself as a program of its own
(:func:`run_apart`). Used by :mod:`kimik3_lab.teaching.machine_code` (lesson 04) and
:mod:`kimik3_lab.teaching.register_use` (lesson 06).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

__all__ = ["compile_kernel", "run_apart", "show_code"]


def run_apart(
    module: str, arguments: Sequence[str], *, kernel: str, capability: int, timeout: float
) -> Any:
    """Run a module as a program in which Triton compiles; return the JSON of its last line.

    Parameters
    ----------
    module
        Name of the module, such as ``"kimik3_lab.teaching.machine_code"``.
    arguments
        Of its command line, behind the capability.
    kernel
        What it compiles, for the message.
    capability
        Compute capability times ten: 90 is Hopper.
    timeout
        Seconds that it may take.

    Raises
    ------
    RuntimeError
        If it fails; the message ends with what it said.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", module, str(capability), *arguments],
        capture_output=True, text=True, env=environment, timeout=timeout,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(
            f"compiling {kernel} for sm_{capability} failed, expected machine code. Triton "
            f"said: {done.stderr[-2000:]}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def compile_kernel(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    capability: int,
    **options: Any,
) -> bytes:
    """Compile a Triton kernel and return its cubin.

    Parameters
    ----------
    kernel
        What ``@triton.jit`` made.
    types
        By argument at run time: ``"*bf16"``, ``"i32"``, ``"fp32"``. All are taken to be multiples
        of 16, as pointers and strides are at K3's shapes.
    constants
        By argument that is known to the compiler.
    capability
        Compute capability times ten.
    options
        Of the compiler: ``num_warps``, ``num_stages``.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(kernel.arg_names)
    source = ASTSource(
        kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in types},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    cubin: bytes = compiled.asm["cubin"]
    return cubin


def show_code(cubin: bytes, tool: Literal["cuobjdump", "nvdisasm"], option: str) -> str:
    """Return what one of NVIDIA's tools, as Triton brings them, prints about a cubin.

    Raises
    ------
    subprocess.CalledProcessError
        If the tool fails.
    """
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([path, option, file.name], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
