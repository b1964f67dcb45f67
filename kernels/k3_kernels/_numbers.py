"""Checks of arguments that are plain numbers, so that a message names the argument.

Needs nothing. Used by the operators of this package: Triton would take a string or None for a
kernel's argument and fail without saying which, or compute with half an expert.
"""

from __future__ import annotations

import math
from typing import Any

__all__ = ["INT32_MAX", "check_experts_here", "check_int", "check_number"]

INT32_MAX = 2**31 - 1


def check_int(
    operator: str, name: str, value: Any, *, at_least: int, at_most: int = INT32_MAX
) -> None:
    """Refuse anything but a Python int within bounds.

    Raises
    ------
    TypeError
        If it is no int; a bool is none.
    ValueError
        If it is out of bounds.

    Examples
    --------
    >>> check_int("dispatch", "num_experts", 0, at_least=1)
    Traceback (most recent call last):
    ValueError: k3_kernels.dispatch: num_experts must be at least 1, got 0
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"k3_kernels.{operator}: {name} must be an int, got {type(value).__name__} {value!r}"
        )
    if value < at_least:
        raise ValueError(f"k3_kernels.{operator}: {name} must be at least {at_least}, got {value}")
    if value > at_most:
        raise ValueError(f"k3_kernels.{operator}: {name} must be at most {at_most}, got {value}")


def check_number(
    operator: str,
    name: str,
    value: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> None:
    """Refuse anything but a finite Python int or float within bounds.

    Raises
    ------
    TypeError
        If it is no number.
    ValueError
        If it is not finite or out of bounds.

    Examples
    --------
    >>> check_number("finalize", "eps", "x", at_least=0.0)
    Traceback (most recent call last):
    TypeError: k3_kernels.finalize: eps must be a number, got str 'x'
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(
            f"k3_kernels.{operator}: {name} must be a number, got {type(value).__name__} {value!r}"
        )
    if not -math.inf < value < math.inf:
        bound = "finite"
    elif at_least is not None and value < at_least:
        bound = f"at least {at_least:g}"
    elif above is not None and value <= above:
        bound = f"above {above:g}"
    elif below is not None and value >= below:
        bound = f"below {below:g}"
    else:
        return
    raise ValueError(f"k3_kernels.{operator}: {name} must be {bound}, got {value}")


def check_experts_here(operator: str, first_expert: Any, num_experts: Any) -> None:
    """Check which experts are on a rank; all their ids must be int32, whose differences wrap.

    Raises
    ------
    TypeError, ValueError
        As :func:`check_int`, or if the last expert's id is beyond int32.

    Examples
    --------
    >>> check_experts_here("dispatch", 2**31 - 2, 2)
    >>> check_experts_here("dispatch", 2**31 - 2, 3)
    Traceback (most recent call last):
    ValueError: k3_kernels.dispatch: first_expert + num_experts is 2147483649, expected at most \
2147483648: expert ids are int32
    """
    check_int(operator, "num_experts", num_experts, at_least=1)
    check_int(operator, "first_expert", first_expert, at_least=0)
    if first_expert + num_experts > INT32_MAX + 1:
        raise ValueError(
            f"k3_kernels.{operator}: first_expert + num_experts is {first_expert + num_experts}, "
            f"expected at most {INT32_MAX + 1}: expert ids are int32"
        )
