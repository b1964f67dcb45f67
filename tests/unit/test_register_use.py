"""Lesson 06's registers are read off what the compiler prints."""

from __future__ import annotations

import pytest

from kimik3_lab.teaching.register_use import RegisterUse, parse_usage, walk_registers

PRINTED = """
Resource usage:
 Common:
  GLOBAL:0
 Function walk_kernel:
  REG:255 STACK:592 SHARED:0 LOCAL:16 CONSTANT[0]:672 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def test_usage_adds_stack_and_local_memory() -> None:
    assert parse_usage(PRINTED) == (255, 608)


def test_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="expected REG, STACK and LOCAL"):
        parse_usage("cuobjdump fatal: could not open file")


def test_a_state_takes_a_register_for_each_number() -> None:
    assert RegisterUse("3.9.0", 128, 4, 255, 592).state_registers == 128
    assert RegisterUse("3.9.0", 64, 4, 244, 0).state_registers == 64


def test_a_compiler_that_fails_is_quoted() -> None:
    pytest.importorskip("triton")
    with pytest.raises(RuntimeError, match=r"walk_kernel for sm_90 failed, expected machine code"):
        walk_registers([(48, 4)])  # no power of two
