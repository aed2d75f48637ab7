"""Which answers count as the same: to the last bit, or as closely as `verify` asks for; whole numbers always equal."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.cpu_stages import model_of, programs
from tilewright.target import machine
from tilewright.tune.answers import are_same

Array = np.ndarray
FLOATS = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)
INTEGERS = np.arange(12, dtype=np.int64).reshape(3, 4)


@pytest.mark.parametrize(
    ("change", "exactly", "nearly"),
    [
        (lambda floats, integers: (floats, integers), True, True),
        (lambda floats, integers: (np.nextafter(floats, np.float32(9)), integers), False, True),
        (lambda floats, integers: (floats * np.float32(1.001), integers), False, False),
        (lambda floats, integers: (np.where(floats > 1.9, np.float32(np.nan), floats), integers), False, False),
        (lambda floats, integers: (floats, integers + (integers == 11)), False, False),  # one of them, by one
    ],
    ids=["equal", "last bits", "a thousandth", "not a number", "a whole number"],
)
def test_all_outputs_count(change: Callable[[Array, Array], tuple[Array, Array]], exactly: bool, nearly: bool) -> None:
    model = model_of([("Relu", ["x"], "y", {})], {"x": (3, 4)}, {"y": (3, 4)}, {})
    program = programs(model, machine("neoverse_n1"))["layout"]
    found = change(FLOATS, INTEGERS)
    for order in (slice(None), slice(None, None, -1)):  # whichever output it is
        one, other = (FLOATS, INTEGERS)[order], found[order]
        assert are_same(program, one, other, exact=True) == exactly
        assert are_same(program, one, other, exact=False) == nearly
