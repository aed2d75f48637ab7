"""What a model has to do whatever its schedule: operations of its computes, and memory of its arena over the calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Compute, Map, Reduce
from tilewright.ir.forms.expr import Axis, Expr, Op, walk
from tilewright.ir.forms.loops import LoopProgram
from tilewright.ir.forms.tensor import elements
from tilewright.ir.meaning.traffic import count_traffic
from tilewright.lower.memory import arena
from tilewright.tile_graph.algebra.nest import Nest, roots_of
from tilewright.tile_graph.algebra.propagate import box_elements, extent_of, propagate, whole
from tilewright.tile_graph.plan.form import Tile

_MOVES = ("cast", "bitcast", "select")


def kernel_operations(kernel: Tile, nests: Sequence[Nest], computes: Mapping[str, Compute]) -> int:
    """Operations of a kernel's leaves on what its results need: of a result that is read in part, of that part."""
    boxes = propagate(nests, {root: tuple(whole(extent_of(a.extent)) for a in root.axes) for root in roots_of(nests)})
    total = 0.0
    for leaf, nest in zip(kernel.leaves, nests, strict=True):
        share = float(box_elements(boxes[nest])) / max(1, _points(nest.axes))
        inside = dict.fromkeys((leaf.core, *leaf.epilogue, *leaf.composed))
        total += share * sum(operations(computes[name]) for name in inside)
    return round(total)


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


def distinct_bytes(loops: LoopProgram, name: str) -> int | None:
    """Bytes of tensors that the Loops of a kernel load and store in a call, no tensor more than once each way; None for
    steps of a Scan, which are not all alike."""
    call = next((c for c in loops.calls if c.kernel == name), None)
    if call is None or loops.kernel(name).step is not None:
        return None
    sizes = {t.name: elements(t.shape) * t.dtype.bytes for t in loops.tensors}
    kernel = loops.kernel(name)
    counted = count_traffic(kernel)
    places = list(zip((p.name for p in kernel.params), call.arguments, strict=True))
    return int(sum(min(way.get(param, 0.0), sizes.get(tensor, 0)) for way in (counted.loaded, counted.stored)
                   for param, tensor in places))  # fmt: skip


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
