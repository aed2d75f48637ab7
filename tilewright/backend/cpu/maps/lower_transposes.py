"""Blocks of a map that reads along one axis and stores along another: transposed in registers, a square at a time.

Rows are read as whole vectors along the axis that is contiguous where they come from; the columns of the square are
what is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tilewright.backend.cpu.maps.guards import worst
from tilewright.ir.analysis.simplify import Linear, join_divisions, linear, simplify
from tilewright.ir.forms.expr import (
    Axis,
    Const,
    Expr,
    Load,
    Var,
    is_op,
    load,
    replace_nodes,
    rewrite,
    substitute,
    var,
    walk,
)
from tilewright.ir.forms.loops import Alloc, Buffer, For, ForKind, If, Memory, Stmt, Store
from tilewright.lower.nesting import unrolled
from tilewright.lower.register_block import RegisterBlock
from tilewright.target.instruction_sets import MASKED_BYTES
from tilewright.tile_graph.algebra.propagate import extent_of

_TRANSPOSED = ("float32", "int32", "uint32")  # what the shuffles of a square are written for
_WIDE = min(MASKED_BYTES) // 4  # lanes: a part of a square is then transposed like the whole, by masked moves
_MOST_WAYS = 4  # conditions that blocks are written out for


def transposed_stores(
    stores: Sequence[Store],
    block: RegisterBlock,
    rows: Axis,
    lanes: int,
    fresh: Callable[[str], str],
    ways: int = _MOST_WAYS,
) -> tuple[Stmt, ...]:
    """The stores of a block; reads contiguous along its unrolled axis `rows`, not along its lanes, are transposed."""
    lane = block.lane
    wide = lanes >= _WIDE
    if lane is None or (lane.extent != lanes and not wide) or (extent_of(rows.extent) % lanes and not wide):
        return block.around(*stores)
    if extent_of(lane.extent) * 2 <= lanes:
        return block.around(*stores)
    values = [s.value for s in stores]
    reads = _rows(values, lane, rows)
    inner = set(walk(*reads))
    conditions = [n.args[0] for n in walk(*values) if is_op(n, "select") and any(a in inner for a in walk(*n.args[1:]))]
    uniform = [c for c in conditions if not any(a in c.axes for a in (*block.unrolled, lane))]
    uneven = [n.args[0] for n in walk(*values) if is_op(n, "select") and n not in inner and n.args[0] in conditions]
    if not reads or any(c.reads for c in conditions) or ((uniform or uneven) and not ways):
        return block.around(*stores)
    if not uniform and not uneven:
        return _transposed(stores, reads, block, rows, lanes, fresh)
    condition = (uniform or uneven)[0]
    then = transposed_stores([_decided(s, condition, True) for s in stores], block, rows, lanes, fresh, ways - 1)
    if not uniform:  # decided for blocks that lie within it altogether
        inside = [a for a in (*block.unrolled, lane) if a in condition.axes]
        return (If(simplify(worst(condition, inside)), then, block.around(*stores)),)
    otherwise = transposed_stores([_decided(s, condition, False) for s in stores], block, rows, lanes, fresh, ways - 1)
    return (If(condition, then, otherwise),)


def transposed_results(
    stores: Sequence[Store], block: RegisterBlock, lanes: int, fresh: Callable[[str], str]
) -> tuple[Stmt, ...] | None:
    """The stores of a block of results whose rows are contiguous and whose lanes are not: squares of them are
    transposed, rows that fill none are stored lane by lane. None where it is otherwise."""
    lane = block.lane
    if lane is None or lane.extent != lanes or lanes < 2 or any(s.value.dtype.name not in _TRANSPOSED for s in stores):
        return None
    rows = [a for a in block.unrolled if all(_is_along(s, a, lane) for s in stores)]
    if len(rows) != 1 or extent_of(rows[0].extent) < lanes:
        return None
    (along,) = rows
    whole, rest = divmod(extent_of(along.extent), lanes)
    square, row = Axis(f"{along.name}_square", whole), Axis(f"{along.name}_row", lanes)
    column, across = Axis(f"{lane.name}_column", lanes), Axis(f"{along.name}_lane", lanes)
    buffers = [Buffer(fresh("square"), (lanes, lanes), s.value.dtype, Memory.REGISTER) for s in stores]
    at_row = {along: var(square) * lanes + var(row)}
    fill = [Store(b, (var(row), var(lane)), substitute(s.value, at_row)) for s, b in zip(stores, buffers, strict=True)]
    there = {along: var(square) * lanes + var(across), lane: var(column)}
    leave = [
        Store(s.buffer, tuple(simplify(substitute(i, there)) for i in s.indices), load(b, (var(across), var(column))))
        for s, b in zip(stores, buffers, strict=True)
    ]
    body: tuple[Stmt, ...] = (
        For(row, ForKind.UNROLL, (For(lane, ForKind.VECTOR, tuple(fill)),)),
        For(column, ForKind.UNROLL, (For(across, ForKind.VECTOR, tuple(leave)),)),
    )
    for buffer in buffers:
        body = (Alloc(buffer, body),)
    body = (For(square, ForKind.UNROLL, body),)
    if rest:
        left = Axis(along.name, rest)
        moved = {along: var(left) + whole * lanes}
        single = [Store(s.buffer, tuple(simplify(substitute(i, moved)) for i in s.indices), substitute(s.value, moved))
                  for s in stores]  # fmt: skip
        body = (*body, For(left, ForKind.UNROLL, (For(lane, ForKind.VECTOR, tuple(single)),)))
    return unrolled([a for a in block.unrolled if a is not along], body)


def _is_along(store: Store, rows: Axis, lane: Axis) -> bool:
    """Whether neighbours along `rows` are stored side by side, and those along the lanes are not."""
    total = _place(store.indices, store.buffer.shape)
    plain = all(isinstance(t, Var) or (rows not in t.axes and lane not in t.axes) for t in total.terms)
    return plain and total.terms.get(var(rows)) == 1 and total.terms.get(var(lane), 0) > 1


def _transposed(
    stores: Sequence[Store],
    reads: Sequence[Expr],
    block: RegisterBlock,
    rows: Axis,
    lanes: int,
    fresh: Callable[[str], str],
) -> tuple[Stmt, ...]:
    whole, rest = divmod(extent_of(rows.extent), lanes)
    full = _squares(stores, reads, block, rows, (0, whole, lanes), lanes, fresh) if whole else ()
    if not rest:
        return full
    if 2 * rest > lanes:
        return (*full, *_squares(stores, reads, block, rows, (whole, 1, rest), lanes, fresh))
    assert block.lane is not None
    left = Axis(rows.name, rest)
    moved = {rows: var(left) + whole * lanes}
    single = [Store(s.buffer, tuple(simplify(substitute(i, moved)) for i in s.indices), substitute(s.value, moved))
              for s in stores]  # fmt: skip
    others = [a for a in block.unrolled if a is not rows]
    return (*full, *unrolled([*others, left], (For(block.lane, ForKind.VECTOR, tuple(single)),)))


def _squares(
    stores: Sequence[Store], reads: Sequence[Expr], block: RegisterBlock, rows: Axis, part: tuple[int, int, int],
    lanes: int, fresh: Callable[[str], str],
) -> tuple[Stmt, ...]:  # fmt: skip
    """Squares from the first on, so many of them, with so many columns that are used; rows are as many as lanes."""
    assert block.lane is not None
    first, count, columns = part
    number, column = Axis(f"{rows.name}_square", count), Axis(f"{rows.name}_column", columns)
    row, along = Axis(f"{block.lane.name}_row", extent_of(block.lane.extent)), Axis(f"{rows.name}_lane", columns)
    square = var(number) + first
    squares = [Buffer(fresh("square"), (lanes, lanes), n.dtype, Memory.REGISTER) for n in reads]
    body: list[Stmt] = []
    for node, buffer in zip(reads, squares, strict=True):
        value = substitute(node, {block.lane: var(row), rows: square * lanes + var(along)})
        fill = For(along, ForKind.VECTOR, (Store(buffer, (var(row), var(along)), value),))
        body.append(For(row, ForKind.UNROLL, (fill,)))
    held: dict[Expr, Expr] = {n: load(b, (var(block.lane), var(column))) for n, b in zip(reads, squares, strict=True)}
    place = {rows: square * lanes + var(column)}
    transposed = [
        Store(s.buffer, tuple(substitute(i, place) for i in s.indices), substitute(replace_nodes(s.value, held), place))
        for s in stores
    ]
    body.append(For(column, ForKind.UNROLL, (For(block.lane, ForKind.VECTOR, tuple(transposed)),)))
    result: tuple[Stmt, ...] = tuple(body)
    for buffer in squares:
        result = (Alloc(buffer, result),)
    for axis in (number, *(a for a in reversed(block.unrolled) if a is not rows)):
        result = (For(axis, ForKind.UNROLL, result),)
    return result


def _rows(values: Sequence[Expr], lane: Axis, rows: Axis) -> list[Expr]:
    """The largest parts of values that are whole vectors along `rows` on each lane: reads, and choices between them."""
    found = [n for n in walk(*values) if _is_row(n, lane, rows)]
    inside = {part for n in found for arg in n.args for part in walk(arg)}
    return [n for n in found if n not in inside]


def _is_row(node: Expr, lane: Axis, rows: Axis) -> bool:
    if isinstance(node, Load):
        return _is_across(node, lane, rows)
    if not is_op(node, "select") or rows in node.args[0].axes or node.args[0].reads:
        return False
    arms = [a for a in node.args[1:] if not isinstance(a, Const)]
    return bool(arms) and lane in node.args[0].axes and all(_is_row(a, lane, rows) for a in arms)


def _is_across(node: Load, lane: Axis, rows: Axis) -> bool:
    """Whether a read is contiguous along `rows` and not along the lanes."""
    if node.source.memory is Memory.REGISTER or lane not in node.axes or any(i.reads for i in node.indices):
        return False
    total = _place(node.indices, node.source.shape)
    plain = all(isinstance(t, Var) or rows not in t.axes for t in total.terms)
    return plain and total.terms.get(var(rows)) == 1 and total.terms.get(var(lane)) != 1


def _place(indices: Sequence[Expr], shape: Sequence[object]) -> Linear:
    total = Linear({}, 0)
    for index, size in zip(indices, shape, strict=True):
        total = total.scaled(int(size)).plus(linear(simplify(index)))  # type: ignore[call-overload]
    return join_divisions(total)


def _decided(store: Store, condition: Expr, side: bool) -> Store:
    def rule(node: Expr) -> Expr | None:
        if is_op(node, "select") and node.args[0] is condition:
            return rewrite(node.args[1 if side else 2], rule)
        return None

    return replace(store, value=rewrite(store.value, rule))
