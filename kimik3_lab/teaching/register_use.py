"""Lesson 06 reads registers: compile the walk over a prompt for a GPU that is not here.

Needs Triton and ``k3_kernels``; no GPU. :func:`walk_registers` starts a process of its own, because
Triton in the lesson's process interprets kernels; this file is also the program that runs there.
:mod:`kimik3_lab.teaching.compiler` compiles.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass

from kimik3_lab.teaching.compiler import compile_kernel, run_apart, show_code

__all__ = ["RegisterUse", "parse_usage", "walk_registers"]

_HEAD_DIM, _CHUNK = 128, 64


@dataclass(frozen=True)
class RegisterUse:
    """What the compiler gave a thread of a program that takes ``block_v`` values of a state.

    Attributes
    ----------
    triton
        Version of the compiler.
    block_v, num_warps
        Values and warps of a program.
    registers, spilled_bytes
        Of one thread. What does not fit into 255 registers is spilled to memory.

    Examples
    --------
    >>> RegisterUse("3.9.0", 128, 4, 255, 592).state_registers
    128
    """

    triton: str
    block_v: int
    num_warps: int
    registers: int
    spilled_bytes: int

    @property
    def state_registers(self) -> int:
        """Registers of a thread that the float32 state alone takes."""
        return self.block_v * _HEAD_DIM // (32 * self.num_warps)


def walk_registers(
    shapes: Sequence[tuple[int, int]], *, capability: int = 90, timeout: float = 240
) -> list[RegisterUse]:
    """Compile the prefill ladder's walk for some numbers of values and warps.

    Parameters
    ----------
    shapes
        (values, warps) of a program.
    capability
        Compute capability times ten: 90 is Hopper.
    timeout
        Seconds for the compiler.

    Raises
    ------
    RuntimeError
        If the compiler fails; the message ends with what it said.
    """
    uses = run_apart(
        __name__, [json.dumps(list(shapes))], kernel="walk_kernel", capability=capability,
        timeout=timeout,
    )  # fmt: skip
    return [RegisterUse(**use) for use in uses]


def parse_usage(text: str) -> tuple[int, int]:
    """Return registers and spilled bytes of a thread from what ``cuobjdump -res-usage`` printed.

    Raises
    ------
    ValueError
        If it printed something else.

    Examples
    --------
    >>> parse_usage("Function walk_kernel:  REG:255 STACK:592 SHARED:0 LOCAL:0 CONSTANT[0]:720")
    (255, 592)
    """
    found = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text))
    if set(found) != {"REG", "STACK", "LOCAL"}:
        raise ValueError(f"got {text!r}, expected REG, STACK and LOCAL: look at the tool's output")
    return int(found["REG"]), int(found["STACK"]) + int(found["LOCAL"])


def _compile(shape: tuple[int, int], capability: int) -> RegisterUse:
    import triton
    import triton.language as tl
    from k3_kernels.kda_ladder_prefill_kernel import walk_kernel

    block_v, num_warps = shape
    types = dict.fromkeys(("out", "v", "kg", "qg", "kd", "solve", "scores"), "*bf16")
    types |= dict.fromkeys(("decay", "starts", "ends", "maps"), "*fp32")
    types = {f"{name}_ptr": kind for name, kind in types.items()}
    integers = ("out_stride", "v_stride", "num_tokens", "num_chunks", "segment_chunks")
    types |= dict.fromkeys(integers, "i32")
    constants = {"D": _HEAD_DIM, "CHUNK": _CHUNK, "BLOCK_V": block_v, "SURVEY": False, "STAGES": 2,
                 "COMPUTE": tl.float32}  # fmt: skip
    cubin = compile_kernel(
        walk_kernel, types, constants, capability=capability, num_warps=num_warps
    )
    usage = parse_usage(show_code(cubin, "cuobjdump", "-res-usage"))
    return RegisterUse(triton.__version__, block_v, num_warps, *usage)


if __name__ == "__main__":
    wanted = [tuple(shape) for shape in json.loads(sys.argv[2])]
    with ProcessPoolExecutor(min(2, len(wanted))) as pool:
        uses = pool.map(_compile, wanted, [int(sys.argv[1])] * len(wanted))
        print(json.dumps([asdict(use) for use in uses]))
