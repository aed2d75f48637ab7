"""How far apart in storage neighbours along the vector are of what a lowered leaf reads and stores."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.ir.analysis.simplify import Linear, join_divisions, linear, simplify
from tilewright.ir.forms.expr import Axis, Const, Expr, Load, Var, axes_of, is_op, var
from tilewright.ir.forms.tensor import Tensor
from tilewright.lower.access import Access, Place
from tilewright.target import Target
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import extent_of


def read_stride(node: Load, nest: Nest, vector: Axis, lanes: int, access: Access) -> int | None:
    """Elements between neighbours along the vector; None where it is not one number."""
    assert isinstance(node.source, Tensor)
    if node.source in nest.accumulated:
        return 1
    if any(i.reads and vector in axes_of(i) for i in node.indices):
        return None
    return stride_of(access.read[node.source], node.indices, vector, lanes)


def stride_of(place: Place, indices: tuple[Expr, ...], vector: Axis, lanes: int) -> int | None:
    """The same of a place in storage."""
    step = 0
    for term, by in join_divisions(offset_at(place, indices)).terms.items():
        if isinstance(term, Var) and term.axis is vector:
            step += by
        elif vector in axes_of(term):
            inner = _inside(term, vector, lanes)
            if inner is None:
                return None
            step += by * inner
    return step


def offset_at(place: Place, indices: tuple[Expr, ...]) -> Linear:
    """The flat position of what lies at indices of a tensor."""
    total = Linear({}, 0)
    sizes = place.buffer.shape[len(place.prefix) :]
    for index, size in zip(place.layout.storage_indices(indices), sizes, strict=True):
        total = total.scaled(extent_of(size)).plus(linear(simplify(index)))
    return total


def squares_along(nest: Nest, vector: Axis | None, blocked: Sequence[Axis], places: Sequence[Linear]) -> Axis | None:
    """The axis of a sum's blocks along which all its results are stored side by side, where they are not along the
    vector."""
    if nest.monoid is None or vector is None or vector not in nest.axes:
        return None
    if any(p.terms.get(var(vector)) == 1 for p in places):
        return None
    found = [a for a in blocked if a is not vector and all(p.terms.get(var(a)) == 1 for p in places)]
    return found[0] if len(found) == 1 else None


def lines_of(offset: Linear, vector: Axis, size: int, target: Target) -> float:
    """Lines of the nearest cache that a vector of neighbours lies on, in the mean: more than one where it begins
    anywhere, as those of windows do."""
    vector_size = target.vector_bytes
    if all(by * size % vector_size == 0 or (isinstance(t, Var) and t.axis is vector) for t, by in offset.terms.items()):
        return 1.0
    return 1 + (vector_size - size) / target.nearest.transaction


def _inside(term: Expr, vector: Axis, lanes: int) -> int | None:
    """Of an index that is no sum, how it moves along a vector that never crosses a multiple."""
    if is_op(term, "mod") or is_op(term, "floordiv"):
        place, size = term.args
        if not isinstance(size, Const) or int(size.value) < lanes:
            return None
        return linear(place).terms.get(var(vector), 0) if is_op(term, "mod") else 0
    if is_op(term, "min") or is_op(term, "max"):
        moving = [a for a in term.args if vector in axes_of(a)]
        return linear(moving[0]).terms.get(var(vector), 0) if len(moving) == 1 else None
    return None
