"""Neighbouring elements in the registers of one thread, moved between memory and there in packets of 16 bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.backend.gpu.maps.unpack import UNPACK, UNPACKED, unpackings
from tilewright.intrinsics.gpu_matrix import ROW_BYTES
from tilewright.ir.analysis.simplify import linear, simplify
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import (
    Axis,
    Expr,
    Load,
    axes_of,
    const,
    is_op,
    load,
    loads,
    replace_nodes,
    rewrite,
    select,
    substitute,
    var,
)
from tilewright.ir.forms.loops import Buffer, For, ForKind, Instruction, Memory, Operand, Stmt, Store
from tilewright.lower.register_block import BufferNames
from tilewright.tile_graph.algebra.propagate import extent_of


def in_registers(
    names: BufferNames,
    value: Expr,
    lane: Axis,
    turn: Axis | None = None,
    which: Callable[[Load], bool] = lambda read: True,
) -> tuple[Expr, list[Stmt], list[Buffer]]:
    """What a value reads beside each other along `lane`, or some of it, fetched in whole packets first; weights are
    unpacked there. With `turn`, into registers of each turn's own."""
    fetched: list[Stmt] = []
    kept: list[Buffer] = []
    buffers: dict[Expr, Buffer] = {}
    for node in certain_loads(value):
        if node.source.memory is Memory.REGISTER or not in_line(node, lane) or not which(node):
            continue
        buffer = buffers[node] = packets_of(names.fresh("beside"), lane, node.dtype, turn)
        kept.append(buffer)
        fetched.extend(in_packets(node.source, node.indices, buffer, lane, is_load=True, turn=turn))
    unpacked: dict[Expr, Buffer] = {}
    for found in unpackings(value, lane) if lane.extent == UNPACKED else ():
        if found.byte in buffers:
            halves = unpacked[found.whole] = packets_of(names.fresh("unpacked"), lane, found.whole.dtype, turn)
            kept.append(halves)
            ends = tuple(Operand(b, (*_of(turn), const(0), const(0))) for b in (halves, buffers[found.byte]))
            fetched.append(Instruction(UNPACK, ends, found.scalars))
    for made in (unpacked, buffers):  # what is unpacked contains what is read
        value = replace_nodes(value, {n: load(b, (*_of(turn), *packet_place(b, lane))) for n, b in made.items()})
    return value, fetched, kept


def chosen_places(value: Expr) -> Expr:
    """The value with conditions that choose between two elements of one tensor choosing where the element lies: one
    load without a branch, so that those of later steps are under way meanwhile."""

    def rule(node: Expr) -> Expr | None:
        if not is_op(node, "select"):
            return None
        condition, one, two = node.args
        if not (isinstance(one, Load) and isinstance(two, Load) and one.source is two.source):
            return None
        places = zip(one.indices, two.indices, strict=True)
        return load(one.source, [a if a is b else select(condition, a, b) for a, b in places])

    return rewrite(value, rule)


def packet_width(lanes: int, dtype: DType) -> int:
    """Elements of so many lanes that are moved as one."""
    return min(lanes, ROW_BYTES // dtype.bytes)


def certain_loads(*values: Expr) -> list[Load]:
    """Reads that are made whatever conditions say: others may lie outside."""
    found: dict[Expr, None] = {}
    stack = list(values)
    while stack:
        node = stack.pop()
        if node in found:
            continue
        found[node] = None
        if is_op(node, "select"):
            stack.extend((node.args[0], *_in_both(*node.args[1:])))
        else:
            stack.extend(node.args)
    return [n for n in found if isinstance(n, Load)]


def _in_both(then: Expr, otherwise: Expr) -> list[Load]:
    """Reads that are made whichever of two values is taken."""
    if set(loads(then)).isdisjoint(loads(otherwise)):
        return []
    certain = set(certain_loads(otherwise))
    return [n for n in certain_loads(then) if n in certain]


def in_line(node: Load, lane: Axis) -> bool:
    """Whether lanes read neighbours of the last dimension, packets beginning at multiples of their size."""
    if not node.indices or lane.extent == 1:
        return False
    width = packet_width(extent_of(lane.extent), node.dtype)
    total = linear(simplify(flat_offset(node)))
    others = [(t, c) for t, c in total.terms.items() if t is not var(lane)]
    if linear(simplify(node.indices[-1])).terms.get(var(lane)) != 1 or total.terms.get(var(lane)) != 1:
        return False
    return total.constant % width == 0 and not any(c % width or lane in axes_of(t) for t, c in others)


def flat_offset(node: Load) -> Expr:
    offset: Expr = const(0)
    for index, size in zip(node.indices, node.source.shape, strict=True):
        offset = offset * size + index
    return offset


def packets_of(name: str, lane: Axis, dtype: DType, turn: Axis | None = None) -> Buffer:
    """Registers for all lanes, by the packets that they are moved in, of every turn."""
    size = extent_of(lane.extent)
    width = packet_width(size, dtype)
    turns = () if turn is None else (extent_of(turn.extent),)
    return Buffer(name, (*turns, size // width, width), dtype, Memory.REGISTER)


def _of(turn: Axis | None) -> tuple[Expr, ...]:
    return () if turn is None else (var(turn),)


def packet_place(register: Buffer, lane: Axis) -> tuple[Expr, Expr]:
    width = extent_of(register.shape[-1])
    return simplify(var(lane) // width), simplify(var(lane) % width)


def in_packets(
    memory: Buffer, indices: Sequence[Expr], register: Buffer, lane: Axis, is_load: bool, turn: Axis | None = None
) -> list[Stmt]:
    """Moves all lanes between memory and registers."""
    packets, width = (extent_of(n) for n in register.shape[-2:])
    made: list[Stmt] = []
    for number in range(packets):
        near = Axis("near", width)
        place = tuple(simplify(substitute(x, {lane: simplify(var(near) + number * width)})) for x in indices)
        own = (*_of(turn), const(number), var(near))
        move = Store(register, own, load(memory, place)) if is_load else Store(memory, place, load(register, own))
        made.append(For(near, ForKind.VECTOR, (move,)))
    return made
