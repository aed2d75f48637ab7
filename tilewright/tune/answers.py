"""Whether another plan gives what the first gives: to the last bit, or as closely as `verify` asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tilewright.compiler.verifying import NARROW_TOLERANCE, TOLERANCE, difference
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Program, all_computes
from tilewright.ir.forms.tensor import Tensor
from tilewright.tile_graph.algebra.propagate import extent_of

Array = np.ndarray[Any, np.dtype[Any]]
_NARROW = (dtypes.bfloat16, dtypes.float16, dtypes.int8, dtypes.uint8)


def ports(program: Program) -> tuple[list[Array], list[Array]]:
    """Random inputs, and places for outputs."""
    rng = np.random.default_rng(0)
    return [_random(rng, t) for t in program.inputs], [np.zeros(_shape(t), t.dtype.numpy) for t in program.outputs]


def answers(runner: Any, program: Program) -> list[Array]:
    inputs, outputs = ports(program)
    runner.run(inputs, outputs)
    return outputs


def are_same(program: Program, one: Sequence[Array], other: Sequence[Array], exact: bool) -> bool:
    """All outputs; whole numbers and truth values are never held to less than being equal."""
    rounds = any(t.dtype in _NARROW for c in all_computes(program).values() for t in c.outputs)
    tolerance = 0.0 if exact else NARROW_TOLERANCE if rounds else TOLERANCE
    return all(_is_same(a, b, tolerance) for a, b in zip(one, other, strict=True))


def _is_same(one: Array, other: Array, tolerance: float) -> bool:
    if one.tobytes() == other.tobytes():
        return True
    if one.dtype.kind not in "fV":
        return False
    return bool(difference(other, one).max(initial=0.0) <= tolerance)


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(extent_of(e) for e in tensor.shape)


def _random(rng: np.random.Generator, tensor: Tensor) -> Array:
    """Normal floats, and whole numbers 0 or 1, in range for indices and masks alike."""
    shape = _shape(tensor)
    values = rng.standard_normal(shape) if tensor.dtype.is_float else rng.integers(0, 2, shape)
    return np.ascontiguousarray(np.asarray(values).astype(tensor.dtype.numpy))
