"""Results of a register tile a few vectors at a time, in a loop over accumulators that are left in memory first.

Written out, what follows a sum is most of a kernel's text where it is long: every accumulator has a copy of it. Left in
the first cache for a moment they are all computed by one, and each costs a store and a read more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.expr import Axis, Expr, Load, const, load, loads, replace_nodes, substitute, var
from tilewright.ir.forms.loops import Alloc, Buffer, For, ForKind, Memory, Stmt, Store
from tilewright.lower.nesting import alloc, unrolled
from tilewright.lower.register_block import RegisterBlock
from tilewright.tile_graph.algebra.propagate import extent_of


def in_turn(
    block: RegisterBlock, stores: tuple[Stmt, ...], states: Sequence[Buffer], together: int, fresh: Callable[[str], str]
) -> tuple[Stmt, ...]:
    """The stores of a block's results, about so many vectors at a time; as they are where there are no more, or where
    they are written otherwise than position by position."""
    body = _written_out(block, stores)
    if body is None or not block.unrolled:
        return stores
    walked = max(block.unrolled, key=lambda a: extent_of(a.extent))
    others = prod(extent_of(a.extent) for a in block.unrolled if a is not walked)
    size = max(1, together // others)
    turns, rest = divmod(extent_of(walked.extent), size)
    if turns < 2:
        return stores
    left = {s: Buffer(fresh("sums"), s.shape, s.dtype, Memory.SCRATCH) for s in states}
    leave = block.around(*(Store(b, block.index, load(s, block.index)) for s, b in left.items()))

    def at(place: Expr, inside: Axis) -> tuple[Stmt, ...]:
        moved = tuple(_moved(s, {walked: place}, left) for s in body)
        lanes = (For(block.lane, ForKind.VECTOR, moved),) if block.lane is not None else moved
        return unrolled([inside if a is walked else a for a in block.unrolled], lanes)

    turn, part = Axis(f"{walked.name}_turn", turns), Axis(walked.name, size)
    found: list[Stmt] = [*leave, For(turn, ForKind.SERIAL, at(simplify(var(turn) * size + var(part)), part))]
    if rest:
        last = Axis(walked.name, rest)
        found.extend(at(simplify(const(turns * size) + var(last)), last))
    return alloc(list(left.values()), found)


def _written_out(block: RegisterBlock, stores: tuple[Stmt, ...]) -> tuple[Stmt, ...] | None:
    """What is done at every position; None where statements are not the block's positions one by one."""
    loops = [*((a, ForKind.UNROLL) for a in block.unrolled)]
    if block.lane is not None:
        loops.append((block.lane, ForKind.VECTOR))
    body = stores
    for axis, kind in loops:
        (loop, *others) = body
        if others or not isinstance(loop, For) or loop.axis is not axis or loop.kind is not kind:
            return None
        body = loop.body
    return body


def _moved(stmt: Stmt, env: Mapping[Axis, Expr], left: Mapping[Buffer, Buffer]) -> Stmt:
    """A statement at another position, with its accumulators read from where they were left."""
    if isinstance(stmt, Alloc):
        return Alloc(stmt.buffer, tuple(_moved(s, env, left) for s in stmt.body))
    assert isinstance(stmt, Store)
    held: dict[Expr, Expr] = {n: _left(n, left) for n in loads(stmt.value) if n.source in left}
    value = simplify(substitute(replace_nodes(stmt.value, held), dict(env)))
    return Store(stmt.buffer, tuple(simplify(substitute(i, dict(env))) for i in stmt.indices), value)


def _left(node: Load, left: Mapping[Buffer, Buffer]) -> Expr:
    assert isinstance(node.source, Buffer)
    return load(left[node.source], node.indices)
