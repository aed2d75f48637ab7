"""Every way to share a compute out to a mesh, by propagation: no operator is known here.

An axis of the output that is cut leaves the results cut; an axis summed over leaves terms of a sum; rows of a table
that are looked up may be shared out too. The box that each rank's part then reads says how every operand has to lie:
cut where the box is inside a rank's block, with a halo where it reaches into a neighbour's, whole elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from tilewright.ir.analysis.pieces import axis_ranges, gives, looked_up_dim
from tilewright.ir.forms.compute import Compute, Map, Reduce, reads
from tilewright.ir.forms.expr import Axis, Const, Expr, const
from tilewright.ir.forms.mesh import OPERATORS, WHOLE, AxisPart, Coordinates, Interval, Mesh, Place, Spread, inside
from tilewright.ir.forms.sharded import ShardedCompute
from tilewright.ir.forms.tensor import Tensor, extents
from tilewright.tile_graph.algebra.nest import Nest, build_nest
from tilewright.tile_graph.algebra.propagate import Range, index_range, whole

Cut = Axis | Tensor | None


@dataclass(frozen=True)
class Strategy:
    """One way to share a compute out: what is cut by mesh axis, how the results then lie, and of every tensor read the
    spreads of which one will do; one that holds more does as well."""

    cuts: tuple[Cut, ...]
    gives: Spread
    needs: Mapping[Tensor, tuple[Spread, ...]]

    def piece(self, compute: Compute, read_as: Mapping[Tensor, Spread]) -> ShardedCompute:
        return ShardedCompute(compute, self.cuts, read_as, self.gives)


def strategies(compute: Compute, mesh: Mesh) -> Iterator[Strategy]:
    """Every way to share a compute out, that of doing all of it everywhere first."""
    found = (strategy_of(compute, cuts, mesh) for cuts in product(*cut_choices(compute, mesh)))
    yield from (each for each in found if each is not None)


def cut_choices(compute: Compute, mesh: Mesh) -> tuple[tuple[Cut, ...], ...]:
    """By mesh axis what may be cut along it, nothing first; not all of these go together."""
    return tuple((None, *_cuts(compute, size)) for size in mesh.sizes)


def strategy_of(compute: Compute, cuts: tuple[Cut, ...], mesh: Mesh) -> Strategy | None:
    """A compute cut so along each mesh axis; None where these cuts do not go together."""
    if not isinstance(compute, Map | Reduce):
        return Strategy(cuts, Spread.whole(mesh), {t: (Spread.whole(mesh),) for t in reads(compute)})
    spread = gives(compute, cuts)
    if not _can_be(compute, cuts, spread, mesh):
        return None
    return Strategy(cuts, spread, _needs(build_nest(compute, (), {}), compute, cuts, spread, mesh))


def _cuts(compute: Compute, parts: int) -> Iterator[Cut]:
    if parts == 1 or not isinstance(compute, Map | Reduce):
        return
    if any(not isinstance(e, int) for t in (*compute.outputs, *reads(compute)) for e in t.shape):
        return
    yield from (axis for axis in compute.axes if _divides(axis.extent, parts))  # type: ignore[arg-type]
    if isinstance(compute, Reduce) and compute.monoid.operator in OPERATORS:
        yield from (axis for axis in compute.reduce_axes if _divides(axis.extent, parts))  # type: ignore[arg-type]
    for table in reads(compute):
        dim = looked_up_dim(compute, table)
        if dim is not None and _divides(int(table.shape[dim]), parts):  # type: ignore[arg-type]
            yield table


def _divides(extent: int, parts: int) -> bool:
    """Whether each of so many parts has something."""
    return extent - -(-extent // parts) * (parts - 1) >= 1


def _can_be(compute: Compute, cuts: Sequence[Cut], spread: Spread, mesh: Mesh) -> bool:
    """Axes that several mesh axes cut must leave every rank something. Terms of different kinds do not mix."""
    operators = {part.operator for part in spread.parts if part.operator}
    for axis in {cut for cut in cuts if isinstance(cut, Axis)}:
        left = int(axis.extent)  # type: ignore[arg-type]
        for cut, size in zip(cuts, mesh.sizes, strict=True):
            if cut is axis:
                if not _divides(left, size):
                    return False
                left -= -(-left // size) * (size - 1)
    return len(operators) <= 1 and spread.fits(extents(compute.outputs[0]), mesh)


def _needs(
    nest: Nest, compute: Map | Reduce, cuts: tuple[Cut, ...], spread: Spread, mesh: Mesh
) -> dict[Tensor, tuple[Spread, ...]]:
    boxes = {at: read_places(nest, ShardedCompute(compute, cuts, {}, spread), mesh, at) for at in mesh.coordinates}
    return {t: _holding({at: found[t] for at, found in boxes.items()}, t, mesh) for t in reads(compute)}


def read_places(nest: Nest, piece: ShardedCompute, mesh: Mesh, at: Coordinates) -> dict[Tensor, Place]:
    """What a rank's part of a compute reads of every tensor."""
    ranges = axis_ranges(piece, mesh, at)
    box = {axis: Range(const(first), count, int(axis.extent)) for axis, (first, count) in ranges.items()}  # type: ignore[arg-type]
    env = {axis: box.get(axis, whole(int(axis.extent))) for axis in (*nest.axes, *nest.reduce_axes)}  # type: ignore[arg-type]
    places = {t: tuple(_reached(indices, env, extent) for indices, extent in zip(dims, extents(t), strict=True))
              for t, dims in nest.reach.items()}  # fmt: skip
    for table in [cut for cut in piece.cuts if isinstance(cut, Tensor)]:
        dim = looked_up_dim(piece.compute, table)
        assert dim is not None
        rows = Spread(tuple(AxisPart(dim) if cut is table else WHOLE for cut in piece.cuts))
        row = rows.place(extents(table), mesh, at)[dim]
        places[table] = (*places[table][:dim], row, *places[table][dim + 1 :])
    return places


def _reached(indices: Sequence[Expr], env: Mapping[Axis, Range], extent: int) -> Interval:
    """What some indices cover together. Where a box begins is a number here, so that each is clipped at both ends."""
    found = [_clipped(index_range(index, env, extent, clip=False)) for index in indices]
    some = [(first, count) for first, count in found if count]
    if not some:
        return 0, 0
    first = min(start for start, _ in some)
    return first, max(start + count for start, count in some) - first


def _clipped(part: Range) -> Interval:
    if not isinstance(part.low, Const):
        return 0, part.extent
    start = min(max(0, int(part.low.value)), part.extent)
    return start, max(0, min(part.extent, int(part.low.value) + int(part.size)) - start)


def _holding(boxes: Mapping[Coordinates, Place], tensor: Tensor, mesh: Mesh) -> tuple[Spread, ...]:
    """The spreads with least on a rank in which every rank has its box."""
    found = [Spread.whole(mesh)]
    for axis, size in enumerate(mesh.sizes):
        if size > 1:
            found = [each for spread in found for each in _cut_more(spread, axis, boxes, tensor, mesh)]
    return tuple(dict.fromkeys(found))


def _cut_more(
    spread: Spread, axis: int, boxes: Mapping[Coordinates, Place], tensor: Tensor, mesh: Mesh
) -> list[Spread]:
    shape = extents(tensor)
    tried = [spread.with_part(axis, AxisPart(dim)) for dim in range(tensor.rank)]
    there = [each for each in tried if each.fits(shape, mesh)]
    holding = [each for each in there if _holds(each, boxes, shape, mesh)]
    if holding:
        return holding
    reaching = [_with_halo(each, axis, boxes, shape, mesh) for each in there]
    return [each for each in reaching if each is not None] or [spread]


def _holds(spread: Spread, boxes: Mapping[Coordinates, Place], shape: Sequence[int], mesh: Mesh) -> bool:
    return all(inside(box, spread.place(shape, mesh, at)) for at, box in boxes.items())


def _with_halo(
    spread: Spread, axis: int, boxes: Mapping[Coordinates, Place], shape: Sequence[int], mesh: Mesh
) -> Spread | None:
    """The blocks with as much of their neighbours as the boxes reach into; None where that is not in neighbours alone,
    or where some rank would have all of the dimension."""
    part = spread.parts[axis]
    assert part.dim is not None
    before = after = 0
    for at, box in boxes.items():
        first, count = spread.place(shape, mesh, at)[part.dim]
        begin, n = box[part.dim]
        before, after = max(before, first - begin), max(after, begin + n - first - count)
    wider = spread.with_part(axis, replace(part, before=before, after=after))
    if not wider.fits(shape, mesh) or not _holds(wider, boxes, shape, mesh):
        return None
    return None if any(wider.place(shape, mesh, at)[part.dim][1] == shape[part.dim] for at in boxes) else wider
