"""Lesson 04 counts instructions: compile the gate-up kernel for a GPU that is not here.

Needs Triton and ``k3_kernels``; no GPU. :func:`gate_up_loops` starts a process of its own,
because Triton in the lesson's process interprets kernels; this file is also the program that runs
there. :mod:`kimik3_lab.teaching.compiler` compiles.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, dataclass

from kimik3_lab.teaching.compiler import compile_kernel, run_apart, show_code

__all__ = ["LoopCount", "count_loop", "gate_up_loops"]

LAYOUTS = ("nibbles", "rotated")
#: K3's gate-up on one of eight tensor-parallel ranks, up to 8 tokens an expert.
_SHAPE = {
    "H": 3584, "I": 384, "TOP_K": 16, "NUM_EXPERTS": 896, "BETA": 4.0, "LINEAR_BETA": 25.0,
    "FUSED": True, "WIDE": False, "MAX_PAIRS": 0, "BLOCK_M": 8, "SPLIT_K": 1, "UNROLL": 2,
}  # fmt: skip
#: Weights that one of 128 threads unpacks in a turn: 64 + 64 rows, 2 steps of 128 columns.
_WEIGHTS_A_TURN = 128 * 256 // 128
_LABEL = re.compile(r"^\s*(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")
_BRANCH = re.compile(r"\bBRA\b.*\((\.L_x_\d+)\)")


@dataclass(frozen=True)
class LoopCount:
    """Instructions of one thread in one turn of the main loop, and the weights it unpacks.

    Examples
    --------
    >>> LoopCount("3.6.0", 640, 256).per_weight
    2.5
    """

    triton: str
    instructions: int
    weights: int

    @property
    def per_weight(self) -> float:
        """Instructions for one weight."""
        return self.instructions / self.weights


def gate_up_loops(*, capability: int = 90, timeout: float = 240) -> dict[str, LoopCount]:
    """Compile the MXFP4 gate-up kernel in both bit layouts and count its main loop.

    Parameters
    ----------
    capability
        Compute capability times ten: 90 is Hopper.
    timeout
        Seconds for the compiler.

    Returns
    -------
    dict
        By layout, ``"nibbles"`` and ``"rotated"``.

    Raises
    ------
    RuntimeError
        If the compiler fails; the message ends with what it said.
    """
    found = run_apart(__name__, [], kernel="gate_up_kernel", capability=capability, timeout=timeout)
    return {layout: LoopCount(**count) for layout, count in found.items()}


def count_loop(assembly: str) -> int:
    """Count the instructions of the longest loop: from a label to a branch back to it.

    Raises
    ------
    ValueError
        If there is no branch back.

    Examples
    --------
    >>> code = [".L_x_0:", "/*0010*/ IADD3 R1, R1, 1 ;", "/*0020*/ @P0 BRA `(.L_x_0) ;"]
    >>> count_loop(chr(10).join(code))
    2
    """
    labels: dict[str, int] = {}
    longest = count = 0
    for line in assembly.splitlines():
        if match := _LABEL.match(line):
            labels[match[1]] = count
        match = _INSTRUCTION.search(line)
        if match is None or match[1] == "NOP":
            continue
        count += 1
        target = _BRANCH.search(line)
        if target and target[1] in labels:
            longest = max(longest, count - labels[target[1]])
    if not longest:
        raise ValueError(
            f"got {count} instructions without a branch back to a label, expected a loop: look at "
            "what nvdisasm printed"
        )
    return longest


def _compile(rotated: bool, capability: int) -> LoopCount:
    import triton
    import triton.language as tl
    from k3_kernels.moe_config import MoEConfig
    from k3_kernels.moe_gemm_kernel import gate_up_kernel

    types = {"out_ptr": "*bf16", "x_ptr": "*bf16", "partial_ptr": "*fp32"}
    types |= {f"{n}_ptr": "*i32" for n in ("words", "scales", "ids", "block_experts", "counter")}
    types |= {"x_stride": "i32", "num_pairs": "i32", "first_expert": "i32"}
    constants = {**_SHAPE, "ROTATED": rotated, "COMPUTE": tl.bfloat16}
    config = MoEConfig()
    cubin = compile_kernel(
        gate_up_kernel, types, constants, capability=capability, num_warps=config.gate_warps,
        num_stages=config.gate_stages,
    )  # fmt: skip
    loop = count_loop(show_code(cubin, "nvdisasm", "-c"))
    return LoopCount(triton.__version__, loop, _WEIGHTS_A_TURN)


if __name__ == "__main__":
    counts = {name: asdict(_compile(name == "rotated", int(sys.argv[1]))) for name in LAYOUTS}
    print(json.dumps(counts))
