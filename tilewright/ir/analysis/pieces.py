"""The part of a compute that one rank does: fewer indices of its axes, or the looked-up rows of a table that it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.compute import Compute, Map, Reduce
from tilewright.ir.forms.expr import (
    Axis,
    Expr,
    ExprLike,
    Load,
    all_of,
    const,
    le,
    load,
    lt,
    rewrite,
    select,
    substitute,
)
from tilewright.ir.forms.expr import var as variable
from tilewright.ir.forms.mesh import WHOLE, AxisPart, Coordinates, Interval, Mesh, Place, Spread, block
from tilewright.ir.forms.sharded import ShardedCompute
from tilewright.ir.forms.tensor import Tensor


def axis_ranges(piece: ShardedCompute, mesh: Mesh, at: Coordinates) -> dict[Axis, Interval]:
    """What a rank does of every axis that is cut."""
    found: dict[Axis, Interval] = {}
    for cut, size, number in zip(piece.cuts, mesh.sizes, at, strict=True):
        if isinstance(cut, Axis):
            found[cut] = block(found.get(cut, (0, int(cut.extent))), size, number)  # type: ignore[arg-type]
    return found


def looked_up_dim(compute: Compute, table: Tensor) -> int | None:
    """The dimension at which a Map that copies rows of a table looks them up; None where it does something else."""
    if not isinstance(compute, Map) or not isinstance(compute.value, Load) or compute.value.source is not table:
        return None
    dims = [d for d, index in enumerate(compute.value.indices) if index.reads]
    return dims[0] if len(dims) == 1 and table.dtype.kind in "fiu" else None


def gives(compute: Compute, cuts: tuple[Axis | Tensor | None, ...]) -> Spread:
    """How the results lie when a compute is cut so."""
    return Spread(tuple(_given(compute, cut) for cut in cuts))


def _given(compute: Compute, cut: Axis | Tensor | None) -> AxisPart:
    if cut is None:
        return WHOLE
    if isinstance(cut, Tensor):
        return AxisPart(operator="add")
    if cut in compute.axes:  # type: ignore[union-attr]
        return AxisPart(dim=compute.axes.index(cut))  # type: ignore[union-attr]
    return AxisPart(operator=compute.monoid.operator)  # type: ignore[union-attr]


def part_of(
    piece: ShardedCompute,
    mesh: Mesh,
    at: Coordinates,
    outputs: tuple[Tensor, ...],
    held: Mapping[Tensor, tuple[Tensor, Place]],
) -> Compute:
    """A rank's part of a compute. It gives `outputs`, and reads for every tensor the one in its place, which begins
    where the place says."""
    tables = _rows(piece, mesh, at)
    compute = piece.compute
    if tables:
        assert isinstance(compute, Map)
        compute = replace(compute, value=rewrite(compute.value, lambda n: _guarded(n, tables, piece.compute)))
    return narrowed(compute, axis_ranges(piece, mesh, at), outputs, held)


def narrowed(
    compute: Compute, ranges: Mapping[Axis, Interval], outputs: tuple[Tensor, ...],
    held: Mapping[Tensor, tuple[Tensor, Place]],
) -> Compute:  # fmt: skip
    """A compute over a part of some axes. It gives `outputs`, and reads for every tensor the one in its place, which
    begins where the place says."""
    if not isinstance(compute, Map | Reduce):
        return compute
    own = {axis: Axis(axis.name, count) for axis, (_, count) in ranges.items()}
    moved: dict[Axis, ExprLike] = {axis: variable(new) + ranges[axis][0] for axis, new in own.items()}

    def local(value: Expr) -> Expr:
        here = substitute(value, moved)
        return simplify(rewrite(here, lambda n: _shifted(n, held) if isinstance(n, Load) else None))

    axes = tuple(own.get(axis, axis) for axis in compute.axes)
    if isinstance(compute, Map):
        return replace(compute, output=outputs[0], axes=axes, value=local(compute.value))
    summed = tuple(own.get(axis, axis) for axis in compute.reduce_axes)
    elements = tuple(local(element) for element in compute.elements)
    return replace(compute, outputs=outputs, axes=axes, reduce_axes=summed, elements=elements)


def _rows(piece: ShardedCompute, mesh: Mesh, at: Coordinates) -> dict[Tensor, Interval]:
    found: dict[Tensor, Interval] = {}
    for cut, size, number in zip(piece.cuts, mesh.sizes, at, strict=True):
        if isinstance(cut, Tensor):
            dim = looked_up_dim(piece.compute, cut)
            assert dim is not None
            found[cut] = block(found.get(cut, (0, int(cut.shape[dim]))), size, number)  # type: ignore[arg-type]
    return found


def _guarded(node: Expr, tables: Mapping[Tensor, Interval], compute: Compute) -> Expr | None:
    """A row that another rank has counts as zero here."""
    if not isinstance(node, Load) or node.source not in tables:
        return None
    dim = looked_up_dim(compute, node.source)
    assert dim is not None
    first, count = tables[node.source]
    row = node.indices[dim]
    here = all_of((le(const(first, row.dtype), row), lt(row, const(first + count, row.dtype))))
    return select(here, node, const(0, node.dtype))


def _shifted(node: Load, held: Mapping[Tensor, tuple[Tensor, Place]]) -> Expr | None:
    if node.source not in held:
        return None
    here, place = held[node.source]
    return load(here, [i - first if first else i for i, (first, _) in zip(node.indices, place, strict=True)])


def place_bytes(place: Place, tensor: Tensor) -> int:
    return prod(count for _, count in place) * tensor.dtype.bytes
