"""Brings weights near that the kernels after this one read: every register tile asks for a few of their lines.

A line takes hundreds of cycles from main memory and a register tile thousands, so what is asked for a little at a time
costs next to nothing. They come as far as the last cache: in a nearer one they would push out what is needed now.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.expr import Axis, Expr, const, var
from tilewright.ir.forms.loops import PREFETCH_BESIDE, Buffer, For, ForKind, Instruction, Kernel, Operand, Stmt
from tilewright.target.instruction_sets import LINE_BYTES
from tilewright.tile_graph.algebra.propagate import extent_of


def prefetch_weights(kernel: Kernel, weights: Sequence[Buffer]) -> Kernel:
    """The kernel with the weights as further parameters, each tile asking for its even part of them."""
    if not weights:
        return kernel
    (grid,) = kernel.body
    assert isinstance(grid, For) and grid.kind is ForKind.PARALLEL
    body = tuple(grid.body)
    for buffer in weights:
        body = _with_prefetches(body, buffer, grid.axis, [])
    params = (*kernel.params, *weights)
    return Kernel(kernel.name, params, (For(grid.axis, grid.kind, body),), kernel.symbols, kernel.step)


def _with_prefetches(body: tuple[Stmt, ...], weights: Buffer, tile: Axis, loops: list[Axis]) -> tuple[Stmt, ...]:
    """Down into the loop that does most, to where register tiles are computed."""
    serial = [s for s in body if isinstance(s, For) and s.kind is ForKind.SERIAL]
    if len(serial) < len(body):
        return (*_hints(weights, tile, loops), *body)
    longest = max(serial, key=lambda s: extent_of(s.axis.extent))
    inner = _with_prefetches(tuple(longest.body), weights, tile, [*loops, longest.axis])
    return tuple(For(s.axis, s.kind, inner) if s is longest else s for s in body)


def _hints(weights: Buffer, tile: Axis, loops: Sequence[Axis]) -> tuple[Stmt, ...]:
    line = LINE_BYTES // weights.dtype.bytes
    lines = prod(extent_of(e) for e in weights.shape) // extent_of(tile.extent) // line
    each = -(-lines // prod(extent_of(a.extent) for a in loops))
    number: Expr = const(0)
    for loop in loops:
        number = number * extent_of(loop.extent) + var(loop)
    ask = Axis("ask", each)
    place = simplify((var(tile) * lines + number * each + var(ask)) * line)
    return (For(ask, ForKind.SERIAL, (Instruction(PREFETCH_BESIDE, (Operand(weights, (place,)),)),)),)
