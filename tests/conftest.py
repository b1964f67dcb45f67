"""What test files of several folders ask for by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread for PyTorch: small models are no faster with more, and results repeat."""
    import torch  # not everybody who loads this file has it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
