"""How operator tests run a model: one place, so that every executor can be put under the same tests."""

from __future__ import annotations

import pytest

from tests.ops.running import RunModel, interpret_model


@pytest.fixture(scope="session")
def run_model() -> RunModel:
    """run_model(model, inputs) gives the outputs by name."""
    return interpret_model
