"""What tests of programs in PyTorch share."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture
def quiet() -> Iterator[None]:
    """Nothing is recorded for gradients, and PyTorch's own warnings are not of interest."""
    import torch

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
