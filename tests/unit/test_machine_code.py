"""Lesson 04's count of instructions finds the main loop."""

from __future__ import annotations

import pytest

from kimik3_lab.teaching import machine_code

CODE = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   LDG.E R2, [R4] ;
.L_x_1:
        /*0020*/              @!P1 IADD3 R1, R1, 0x1, RZ ;
        /*0030*/                   NOP ;
        /*0040*/               @P0 BRA `(.L_x_1) ;
        /*0050*/                   HMMA.16816.F32.BF16 R8, R4, R2, R8 ;
        /*0060*/               @P2 BRA `(.L_x_2) ;
        /*0070*/              @!P0 BRA P3, `(.L_x_0) ;
.L_x_2:
        /*0080*/                   EXIT ;
.L_x_3:
        /*0090*/                   BRA `(.L_x_3);
"""


def test_longest_loop_counts_without_nops_and_forward_branches() -> None:
    assert machine_code.count_loop(CODE) == 6  # LDG, IADD3, BRA, HMMA, BRA, BRA


def test_code_without_a_loop_is_refused() -> None:
    straight = "\n".join(line for line in CODE.splitlines() if "BRA" not in line)
    with pytest.raises(ValueError, match=r"got 5 instructions without a branch back"):
        machine_code.count_loop(straight)


def test_a_compiler_that_fails_is_quoted() -> None:
    pytest.importorskip("triton")
    with pytest.raises(RuntimeError, match=r"sm_0 failed, expected machine code\. Triton said"):
        machine_code.gate_up_loops(capability=0)
