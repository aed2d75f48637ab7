"""Asks for the rows that windows over every channel by itself read next, block by block, while those before are summed.

A block of outputs reads as many short rows as its window is wide, each of a few lines; hardware does not foresee them.
The same block one row further reads most of them again: what is new to it is asked for, once among neighbouring blocks.
On a Neoverse N1 windows of 3 x 3 that read from the outer cache take a third less time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tilewright.backend.cpu.vector.parts import NestParts
from tilewright.ir.analysis.simplify import Linear, join_divisions, linear, simplify
from tilewright.ir.forms.bounds import static
from tilewright.ir.forms.expr import Axis, Expr, Load, Var, axes_of, const, loads, substitute, var
from tilewright.ir.forms.loops import PREFETCH, Buffer, Instruction, Memory, Operand, Stmt
from tilewright.lower.access import Access
from tilewright.lower.register_block import RegisterBlock
from tilewright.target.instruction_sets import LINE_BYTES
from tilewright.tile_graph.algebra.nest import is_window
from tilewright.tile_graph.algebra.propagate import extent_of


def rows_asked(low: NestParts, block: RegisterBlock, across: Axis | None) -> tuple[Stmt, ...]:
    """What a block of windows asks for of the next row, where the plan has it ask."""
    if not low.options.ahead or len(low.register) != 2 or not is_window(low.nest, low.vector):
        return ()
    single = [a for a in low.loop_axes if a not in low.register and static(low.ranges[a].count) != 1]
    beside = next((u for u in block.unrolled if u is not across), None)
    return _next_rows(low.nest.elements, block, single[-1], low.reduction, beside, low.access) if single else ()


def _next_rows(
    elements: Sequence[Expr],
    block: RegisterBlock,
    row: Axis,
    reduction: Sequence[Axis],
    beside: Axis | None,
    access: Access,
) -> tuple[Stmt, ...]:
    """Hints for what a block reads one `row` further and not here, neighbouring blocks along `beside` left out."""
    hints: list[Stmt] = []
    places = {**block.env, **{r: var(r) for r in reduction}}
    for node in loads(*elements):
        if row not in axes_of(*node.indices):
            continue
        here, there = (access.lower(substitute(node, places | {row: place}))
                       for place in (places[row], simplify(places[row] + 1)))  # fmt: skip
        if not isinstance(here, Load) or not isinstance(there, Load) or not _is_global(there):
            continue
        moving = (*block.unrolled, *reduction, *([block.lane] if block.lane is not None else []))
        steps = _steps(_offset(there), moving)
        apart = _apart(_offset(here), _offset(there))
        if steps is None or not apart:
            continue
        starts = _sums(steps, [a for a in moving if a is not block.lane])
        ahead = {s + apart for s in starts}
        shift = steps[beside] * extent_of(beside.extent) if beside is not None else 0
        fresh = ahead - starts - ({s + shift for s in ahead} if shift else set())
        first = {a: const(0) for a in moving}
        *outer, last = (simplify(substitute(index, first)) for index in there.indices)
        for place in _lines(fresh, LINE_BYTES // node.dtype.bytes):
            origin = (*outer, simplify(last + (place - apart)))
            hints.append(Instruction(PREFETCH, (Operand(_buffer(there), origin),)))
    return tuple(hints)


def _is_global(node: Load) -> bool:
    return isinstance(node.source, Buffer) and node.source.memory is Memory.GLOBAL and not loads(*node.indices)


def _buffer(node: Load) -> Buffer:
    assert isinstance(node.source, Buffer)
    return node.source


def _offset(node: Load) -> Linear:
    offset: Expr = const(0)
    for index, size in zip(node.indices, node.source.shape, strict=True):
        offset = offset * size + index
    return join_divisions(linear(simplify(offset)))


def _steps(offset: Linear, moving: Iterable[Axis]) -> dict[Axis, int] | None:
    """How far a read moves along each axis; None where that is no number."""
    found = {axis: offset.terms.get(var(axis), 0) for axis in moving}
    others = [term for term in offset.terms if not isinstance(term, Var)]
    return None if any(axis in axes_of(term) for term in others for axis in found) else found


def _apart(here: Linear, there: Linear) -> int:
    return there.constant - here.constant if here.terms == there.terms else 0


def _sums(steps: Mapping[Axis, int], axes: Iterable[Axis]) -> set[int]:
    found = {0}
    for axis in axes:
        found = {place + steps[axis] * turn for place in found for turn in range(extent_of(axis.extent))}
    return found


def _lines(places: Iterable[int], line: int) -> list[int]:
    """Of places in memory those that are a line apart."""
    found: list[int] = []
    for place in sorted(places):
        if not found or place - found[-1] >= line:
            found.append(place)
    return found
