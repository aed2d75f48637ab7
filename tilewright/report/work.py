"""What a model has to do whatever its schedule: operations of its computes, and memory of its arena over the calls."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

from tilewright.ir import dtypes
from tilewright.ir.compute import Compute, Map, Reduce
from tilewright.ir.expr import Axis, Expr, Op, walk
from tilewright.ir.loops import LoopProgram
from tilewright.ir.tensor import elements
from tilewright.lower.memory import arena

_MOVES = ("cast", "bitcast", "select")


def operations(compute: Compute) -> int:
    """Arithmetic operations on data: a multiplication and the addition after it are two, as machines' rates count."""
    if isinstance(compute, Map):
        return _points(compute.axes) * _arithmetic(compute.value)
    if not isinstance(compute, Reduce):
        return 0
    monoid = compute.monoid
    step = _arithmetic(*compute.elements) + _arithmetic(*monoid.combine)
    points = _points(compute.axes)
    return points * (_points(compute.reduce_axes) * step + _arithmetic(*monoid.final))


def _points(axes: Iterable[Axis]) -> int:
    return prod(a.extent for a in axes if isinstance(a.extent, int))


def _arithmetic(*values: Expr) -> int:
    """Operations of expressions, those on indices and masks left out."""
    return sum(
        1
        for node in walk(*values)
        if isinstance(node, Op) and node.op.name not in _MOVES and node.dtype is not dtypes.index
        and node.dtype.kind != "b"
    )  # fmt: skip


def memory_over_time(loops: LoopProgram) -> dict[str, Any]:
    """Every temporary with its place in the arena and the calls it lives through; in bytes, calls counted from 0."""
    offsets, total = arena(loops)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for number, call in enumerate(loops.calls):
        for name in call.arguments:
            first.setdefault(name, number)
            last[name] = number
    sizes = {t.name: elements(t.shape) * t.dtype.bytes for t in loops.tensors}
    return {
        "bytes": total,
        "tensors": [
            {"tensor": name, "offset": offset, "bytes": sizes[name], "first": first[name], "last": last[name]}
            for name, offset in sorted(offsets.items(), key=lambda item: (first[item[0]], item[1]))
        ],
    }
