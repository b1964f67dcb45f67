"""Kernel tests: on a CUDA device compiled, everywhere else in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Generator

import bounds
import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # Before anything imports Triton: see k3_kernels._compat.
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
torch.set_num_threads(1)
# A wrong kernel may write anywhere. The interpreter sees it; on a GPU every test behind it fails.
collect_ignore_glob = ["*_mutants.py"] if HAS_GPU else []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Check every address in the interpreter, also those of fixtures."""
    if HAS_GPU or importlib.util.find_spec("triton") is None:
        return (yield)
    with bounds.checked():
        return (yield)


@pytest.fixture(scope="session")
def device() -> str:
    """Where the kernels run."""
    return "cuda" if HAS_GPU else "cpu"
