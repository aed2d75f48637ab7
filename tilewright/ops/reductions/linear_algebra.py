"""Determinants: elimination with a pivot, a column a step."""

from __future__ import annotations

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Monoid, Reduce, Scan
from tilewright.ir.forms.expr import Axis, Expr, cast, const, eq, load, lt, op, select, state, var
from tilewright.ir.forms.graph import Node
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import Builder, dims
from tilewright.ops.reductions.reduction import exceeds_first
from tilewright.ops.registry import operator


@operator("Det", since=11)
def det(b: Builder, node: Node, x: Tensor) -> Tensor:
    if x.rank < 2 or dims(x)[-1] != dims(x)[-2]:
        raise b.invalid(f"shape {list(dims(x))} has no square matrices in its last two axes")
    lead, size, wide = dims(x)[:-2], dims(x)[-1], dtypes.accumulator(x.dtype)
    if size == 0:
        return b.map("", lead, lambda *i: const(1, x.dtype))
    step = Axis("t", size)
    matrix, product = b.tensor("matrix", (*lead, size, size), wide), b.tensor("product", lead, wide)
    pivot = _pivot(b, matrix, step, wide)
    place = pivot.outputs[0]

    def row_of(i: tuple[Expr, ...], row: Expr) -> Expr:
        """Which row stands at `row` once the pivot's has changed places with the current one."""
        chosen = cast(load(place, i), dtypes.index)
        return select(eq(row, var(step)), chosen, select(eq(row, chosen), var(step), row))

    def eliminated(*i: Expr) -> Expr:
        batch, row, column = i[:-2], i[-2], i[-1]
        source, chosen = row_of(batch, row), cast(load(place, batch), dtypes.index)
        head = load(matrix, (*batch, chosen, var(step)))
        # of a column of zeros nothing is left to take away
        factor = select(eq(head, 0), const(0, wide), op("div", load(matrix, (*batch, source, var(step))), head))
        value = load(matrix, (*batch, source, column))
        return select(lt(var(step), row), value - factor * load(matrix, (*batch, chosen, column)), value)

    def multiplied(*i: Expr) -> Expr:
        chosen = cast(load(place, i), dtypes.index)
        value = load(product, i) * load(matrix, (*i, chosen, var(step)))
        return select(eq(chosen, var(step)), value, -value)

    following = b.map_compute("eliminated", (*lead, size, size), eliminated)
    total = b.map_compute("multiplied", lead, multiplied)
    start = (
        b.map("given", (*lead, size, size), lambda *i: b.wide(x, i)),
        b.filled(lead, 1, wide, "one"),
    )
    final = b.tensor("" if wide is x.dtype else "wide", lead, wide)
    body = (pivot, following, total)
    b.emit(Scan(step, start, (matrix, product), body, (following.output, total.output), (None, final), (),
                origin=b.origin))  # fmt: skip
    return b.cast("", final, x.dtype)


def _pivot(b: Builder, matrix: Tensor, step: Axis, wide: dtypes.DType) -> Reduce:
    """The row, from the current one on, whose element in the current column is the largest."""
    *lead, size, _ = dims(matrix)
    axes = tuple(Axis(f"i{n}", extent) for n, extent in enumerate(lead))
    rows = Axis("r0", size)
    av, bv, ai, bi = state("a0", wide), state("b0", wide), state("a1", dtypes.int32), state("b1", dtypes.int32)
    takes = exceeds_first(av, bv, lt(bi, ai))
    last = const(size - 1, dtypes.int32)
    monoid = Monoid((av, ai), (bv, bi), (const(-1, wide), last), (select(takes, bv, av), select(takes, bi, ai)), (ai,))
    done = lt(var(rows), var(step))
    size_of = op("abs", load(matrix, (*map(var, axes), var(rows), var(step))))
    elements = (select(done, const(-1, wide), size_of), select(done, last, cast(var(rows), dtypes.int32)))
    return Reduce((b.tensor("pivot", tuple(lead), dtypes.int32),), axes, (rows,), elements, monoid, b.origin)
