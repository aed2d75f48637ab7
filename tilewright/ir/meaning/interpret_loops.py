"""The meaning of Loops, run with NumPy in lock-step: iterations side by side are a dimension of the arrays.

PARALLEL, BLOCK, THREAD and VECTOR loops add a dimension, as do serial loops whose iterations cannot meet; other loops
run one by one. A condition becomes a mask. All lanes move together, statement by statement, so a barrier holds by
construction. Stricter than hardware: an access out of range, a read of an element never written, and lanes that
disagree about one element all raise LoopFault.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.expr import Axis, Const, Expr, Extent, Load, Op, Symbol, Var
from tilewright.ir.forms.loops import (
    Alloc,
    Barrier,
    Buffer,
    Call,
    For,
    ForKind,
    If,
    Instruction,
    Kernel,
    LoopProgram,
    Memory,
    Stmt,
    Storage,
    Store,
)
from tilewright.ir.meaning import loop_facts
from tilewright.ir.meaning.instruct import INSTRUCTIONS, InstructionContext, Lanes, Mask, Meaning, Value
from tilewright.ir.meaning.loop_facts import Facts
from tilewright.ir.meaning.traffic import Traffic, count_traffic
from tilewright.ir.meaning.values import apply_op

__all__ = [
    "INSTRUCTIONS",
    "InstructionContext",
    "LoopFault",
    "LoopMachine",
    "Traffic",
    "count_traffic",
    "run_kernel",
    "run_loops",
]


class LoopFault(Exception):
    """Loops did what no program may do; the text names the kernel and the buffer."""


@dataclass(frozen=True, eq=False)
class BufferStorage:
    """The storage of a buffer: a copy for each lane that owns one, flat."""

    copy: Value  # which copy a lane owns
    shape: tuple[int, ...]  # of one copy
    data: np.ndarray
    written: np.ndarray | None  # None: contents are defined from the start, or nobody checks


def run_kernel(
    kernel: Kernel,
    buffers: Mapping[Buffer | str, np.ndarray],
    symbols: Mapping[str, int] | None = None,
    step: int = 0,
    instructions: Mapping[str, Meaning] = INSTRUCTIONS,
    check: bool = True,
    facts: Facts | None = None,
) -> None:
    """Run a kernel in place on its parameters' arrays (any shape, C order); `check` looks for faults.

    `facts` carries what was found out about the kernel from one run to the next.
    """
    machine = LoopMachine(kernel, buffers, symbols or {}, step, instructions, check, facts or Facts())
    with np.errstate(all="ignore"):
        machine.run(kernel.body, None)


def run_loops(
    loops: LoopProgram,
    tensors: dict[str, np.ndarray],
    symbols: Mapping[str, int] | None = None,
    instructions: Mapping[str, Meaning] = INSTRUCTIONS,
    check: bool = True,
) -> dict[str, np.ndarray]:
    """Run all calls in place on `tensors` by name; missing outputs and temporaries are made, full of poison."""
    for item in loops.tensors:
        if item.name not in tensors:
            if item.role not in ("output", "temporary"):
                raise LoopFault(f"{item.role} tensor {item.name} is not given")
            tensors[item.name] = _poisoned(item)
    kernels = {k.name: k for k in loops.kernels}
    facts = {k.name: Facts() for k in loops.kernels}
    for call in _in_turn(loops, tensors):
        kernel = kernels[call.kernel]
        if len(kernel.params) != len(call.arguments):
            raise LoopFault(f"kernel {kernel.name} is called with {len(call.arguments)} arguments")
        bound: dict[Buffer | str, np.ndarray] = {}
        bound.update((p, tensors[a]) for p, a in zip(kernel.params, call.arguments, strict=True))
        run_kernel(kernel, bound, symbols, call.step, instructions, check, facts[kernel.name])
    return tensors


def _in_turn(loops: LoopProgram, tensors: Mapping[str, np.ndarray]) -> Iterator[Call]:
    """The calls as a run comes to them, jumps taken."""
    first = loops.first_jumps()
    place, number = 0, first.get(0, 0)
    while True:
        while number < len(loops.jumps) and loops.jumps[number].at == place:
            jump = loops.jumps[number]
            number += 1
            if jump.condition is None or not tensors[jump.condition].reshape(-1)[0]:
                place, number = jump.target, first.get(jump.target, 0) + jump.passed
        if place == len(loops.calls):
            return
        yield loops.calls[place]
        place += 1
        number = first.get(place, len(loops.jumps))


def _poisoned(item: Storage) -> np.ndarray:
    array = np.empty(item.shape, item.dtype.numpy)
    if item.dtype.is_float:
        array.fill(np.nan)
    elif item.dtype.is_int:
        array.fill(np.iinfo(item.dtype.numpy).max)
    else:
        array.fill(True)
    return array


# What Python numbers do without NumPy: most index arithmetic, where NumPy's overhead would dominate.
_PLAIN: Mapping[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "neg": operator.neg,
    "min": min, "max": max,
    "lt": operator.lt, "le": operator.le, "eq": operator.eq, "ne": operator.ne, "not": operator.not_,
    "floordiv": lambda a, b: a // b if b else 0, "mod": lambda a, b: a % b if b else 0, "abs": abs,
    "and": lambda a, b: a and b, "or": lambda a, b: a or b, "select": lambda c, a, b: a if c else b,
}  # fmt: skip


class LoopMachine:
    """One run of one kernel."""

    def __init__(
        self,
        kernel: Kernel,
        buffers: Mapping[Buffer | str, np.ndarray],
        symbols: Mapping[str, int],
        step: int,
        instructions: Mapping[str, Meaning],
        check: bool,
        facts: Facts,
    ) -> None:
        self.kernel = kernel
        self.lanes: list[Lanes] = []
        self._symbols = symbols
        self._instructions = instructions
        self._check = check
        self._env: dict[Axis, Value] = {} if kernel.step is None else {kernel.step: step}
        self._rooms: dict[Buffer, BufferStorage] = {}
        self._facts = facts
        self.groups: list[list[tuple[Buffer, Sequence[Value], Value, Mask]]] = [[]]  # copies not landed, oldest first
        for param in kernel.params:
            given = buffers.get(param)
            array = buffers.get(param.name) if given is None else given
            if array is None:
                raise LoopFault(f"kernel {kernel.name}: parameter {param.name} is not given")
            self._rooms[param] = self._parameter(param, array)

    def fault(self, what: str) -> LoopFault:
        return LoopFault(f"kernel {self.kernel.name}: {what}")

    def _parameter(self, param: Buffer, array: np.ndarray) -> BufferStorage:
        shape = tuple(self._uniform(e) for e in param.shape)
        if not array.flags.c_contiguous or array.size != prod(shape) or array.dtype != param.dtype.numpy:
            raise self.fault(
                f"parameter {param.name} takes {param.dtype.name}{list(shape)} in C order, "
                f"given {array.dtype}{list(array.shape)}"
            )
        return BufferStorage(0, shape, array.reshape(-1), None)

    def _uniform(self, extent: Extent) -> int:
        """An extent for all lanes; where lanes differ, the largest."""
        return extent if isinstance(extent, int) else int(np.max(self.value(extent, None)))

    # Statements

    def run(self, body: Iterable[Stmt], mask: Mask) -> None:
        for stmt in body:
            if isinstance(stmt, Store):
                places = [self.value(i, mask) for i in stmt.indices]
                self.store(stmt.buffer, places, self.value(stmt.value, mask), mask, self._facts.proven(stmt))
                if stmt.buffer.memory is Memory.REGISTER and mask is None:
                    self._forget_rest(stmt.buffer, places)
            elif isinstance(stmt, For):
                self._for(stmt, mask)
            elif isinstance(stmt, If):
                self._if(stmt, mask)
            elif isinstance(stmt, Alloc):
                self._rooms[stmt.buffer] = self._allocate(stmt.buffer)
                self.run(stmt.body, mask)
                del self._rooms[stmt.buffer]
            elif isinstance(stmt, Instruction):
                meaning = self._instructions.get(stmt.name)
                if meaning is None:
                    raise self.fault(f"instruction {stmt.name} has no meaning in the table given")
                meaning(InstructionContext(self, stmt, mask))
            elif not isinstance(stmt, Barrier):
                raise self.fault(f"{type(stmt).__name__} is not a statement")

    def _for(self, loop: For, mask: Mask) -> None:
        extent = loop.axis.extent
        count: Value = extent if isinstance(extent, int) else self.value(extent, mask)
        varying = isinstance(count, np.ndarray) and count.ndim > 0
        if varying:
            active = count if mask is None else np.where(mask, count, 0)
            total = int(active.max(initial=0))
        else:
            total = int(count)
        if self._facts.lock_step(loop) and (total > 1 or loop.kind in (ForKind.THREAD, ForKind.VECTOR)):
            self._lock_step(loop, mask, total, count if varying else None)
        else:
            for value in range(total):
                self._env[loop.axis] = value
                self._masked(loop.body, mask, value < count if varying else None)
        self._env.pop(loop.axis, None)

    def _lock_step(self, loop: For, mask: Mask, total: int, count: np.ndarray | None) -> None:
        chunk = total
        inside = self._facts.lanes_inside(loop)
        if inside is not None:
            around = prod(lane.count for lane in self.lanes)
            chunk = max(1, loop_facts.LANES // max(1, around * inside))
        position = len(self.lanes)
        for start in range(0, total, max(1, chunk)):
            lanes = Lanes(loop.kind, min(chunk, total - start), position)
            self._env[loop.axis] = lanes.index + start
            self.lanes.append(lanes)
            self._masked(loop.body, mask, None if count is None else self._env[loop.axis] < count)
            self.lanes.pop()

    def _if(self, stmt: If, mask: Mask) -> None:
        condition = self.value(stmt.condition, mask)
        if np.ndim(condition) == 0:
            self.run(stmt.then if condition else stmt.otherwise, mask)
            return
        self._masked(stmt.then, mask, condition)
        if stmt.otherwise:
            self._masked(stmt.otherwise, mask, np.logical_not(condition))

    def _masked(self, body: Iterable[Stmt], mask: Mask, condition: np.ndarray | None) -> None:
        narrowed = _both(mask, condition)
        if narrowed is None or narrowed.any():
            self.run(body, narrowed)

    # Memory

    def _allocate(self, buffer: Buffer) -> BufferStorage:
        if buffer.memory is Memory.GLOBAL:
            raise self.fault(f"buffer {buffer.name} is global and cannot be allocated inside a kernel")
        shared_by = () if buffer.memory is Memory.REGISTER else (ForKind.THREAD, ForKind.VECTOR)
        owners = [lane for lane in self.lanes if lane.kind not in shared_by]
        shape = tuple(self._uniform(e) for e in buffer.shape)
        size = prod(shape) * prod(lane.count for lane in owners)
        written = np.zeros(size, np.bool_) if self._check else None
        copy: Value = 0
        for owner in owners:
            copy = copy * owner.count + owner.index
        return BufferStorage(copy, shape, np.zeros(size, buffer.dtype.numpy), written)

    def _place(
        self, buffer: Buffer, indices: Sequence[Value], mask: Mask, doing: str, proven: Sequence[bool]
    ) -> tuple[BufferStorage, Value]:
        """Where elements are in a room's flat data; lanes that are not active are moved into range."""
        room = self._rooms.get(buffer)
        if room is None:
            raise self.fault(f"{buffer.name} is {doing} outside its allocation")
        if len(indices) != len(room.shape):
            raise self.fault(f"{buffer.name} has {len(room.shape)} axes, {doing} with {len(indices)} indices")
        flat = room.copy
        for place, size in enumerate(room.shape):
            index = indices[place]
            if not (proven and proven[place]):
                outside = index.min() < 0 or index.max() >= size if np.size(index) > 1 else not 0 <= index < size
                if outside:
                    self._check_range(buffer, place, np.asarray(index), size, mask, doing)
                    index = np.clip(index, 0, max(size - 1, 0))
            flat = flat * size + index
        return room, flat

    def _check_range(self, buffer: Buffer, place: int, index: np.ndarray, size: int, mask: Mask, doing: str) -> None:
        outside = (index < 0) | (index >= size)
        active = outside if mask is None else outside & mask
        if active.any():
            example = int(np.broadcast_to(index, active.shape)[active][0])
            raise self.fault(f"{buffer.name} is {doing} at {example} on axis {place} of extent {size}")

    def load(self, buffer: Buffer, indices: Sequence[Value], mask: Mask, proven: Sequence[bool] = ()) -> Value:
        room, flat = self._place(buffer, indices, mask, "read", proven)
        if room.written is not None:
            known = room.written[flat]
            if not known.all() and (mask is None or np.any(~known & mask)):
                raise self.fault(f"{buffer.name} is read where nothing was written")
        return room.data[flat]

    def issue(self, buffer: Buffer, indices: Sequence[Value], value: Value, mask: Mask) -> None:
        """A copy that lands at the wait for its group; until then what was there is gone too."""
        room, flat = self._place(buffer, indices, mask, "written", ())
        if room.written is not None:
            places, active = np.broadcast_arrays(flat, True if mask is None else mask)
            room.written[places[active]] = False
        self.groups[-1].append((buffer, indices, value, mask))

    def land(self, pending: int) -> None:
        """All groups but the one that is open and the last `pending`."""
        landed = max(0, len(self.groups) - 1 - pending)
        for group in self.groups[:landed]:
            for buffer, indices, value, mask in group:
                self.store(buffer, indices, value, mask)
        del self.groups[:landed]

    def store(
        self, buffer: Buffer, indices: Sequence[Value], value: Value, mask: Mask, proven: Sequence[bool] = ()
    ) -> None:
        room, flat = self._place(buffer, indices, mask, "written", proven)
        value = np.asarray(value).astype(room.data.dtype, copy=False)
        shape = np.broadcast_shapes(np.shape(flat), value.shape, () if mask is None else mask.shape)
        if mask is not None:
            keep = np.broadcast_to(mask, shape)
            flat = np.broadcast_to(flat, shape)[keep]
            value = np.broadcast_to(value, shape)[keep]
        elif shape != np.shape(flat):
            flat = np.broadcast_to(flat, shape)
        room.data[flat] = value
        if room.written is not None:
            room.written[flat] = True
        if self._check and shape:
            kept = room.data[flat]
            if not np.all((kept == value) | (value != value)):
                raise self.fault(f"{buffer.name}: lanes write different values to one element")

    def _forget_rest(self, buffer: Buffer, places: Sequence[Value]) -> None:
        """A vector that is shorter than its register leaves nothing on the other lanes that may be read."""
        room = self._rooms[buffer]
        lane = next((lane for lane in self.lanes if lane.kind is ForKind.VECTOR), None)
        if room.written is None or lane is None or not places or np.shape(places[-1]) != np.shape(lane.index):
            return
        first = int(np.max(places[-1])) + 1
        if first < room.shape[-1]:
            rest = np.arange(first, room.shape[-1]).reshape([-1 if n > 1 else 1 for n in np.shape(lane.index)])
            _, flat = self._place(buffer, [*places[:-1], rest], None, "written", ())
            room.written[flat] = False

    # Expressions

    def value(self, root: Expr, mask: Mask, known: Mapping[Expr, Value] | None = None) -> Value:
        """An expression on the active lanes; a select's branch that reads memory counts only where taken."""
        values: dict[Expr, Value] = dict(known) if known else {}
        for node in self._facts.plan(root):
            if node in values:
                continue
            if isinstance(node, Op):
                if self._facts.guarded(node):
                    values[node] = self._guarded_select(node, mask, values)
                else:
                    values[node] = _apply(node, [values[a] for a in node.args])
            elif isinstance(node, Const):
                plain = node.dtype is dtypes.index or node.dtype.kind == "b"
                values[node] = node.value if plain else np.asarray(node.value, node.dtype.numpy)
            elif isinstance(node, Load):
                places = [values[a] for a in node.args]
                values[node] = self.load(node.source, places, mask, self._facts.proven(node))
            elif isinstance(node, Var):
                if node.axis not in self._env:
                    raise self.fault(f"axis {node.axis.name} is used outside its loop")
                values[node] = self._env[node.axis]
            elif isinstance(node, Symbol):
                if node.name not in self._symbols:
                    raise self.fault(f"symbol {node.name} has no value")
                values[node] = self._symbols[node.name]
            else:
                raise self.fault(f"{type(node).__name__} cannot stand in loops")
        return values[root]

    def _guarded_select(self, node: Op, mask: Mask, values: Mapping[Expr, Value]) -> Value:
        condition = values[node.args[0]]
        if np.ndim(condition) == 0:
            return self.value(node.args[1 if condition else 2], mask, values)
        then = self.value(node.args[1], _both(mask, condition), values)
        otherwise = self.value(node.args[2], _both(mask, np.logical_not(condition)), values)
        return np.where(condition, then, otherwise)


def _both(mask: Mask, condition: Value) -> Mask:
    if condition is None:
        return mask
    return np.asarray(condition) if mask is None else mask & condition


def _apply(node: Op, args: Sequence[Value]) -> Value:
    if not node.wraps and all(type(a) is int or type(a) is bool for a in args) and node.op.name in _PLAIN:
        return _PLAIN[node.op.name](*args)
    return apply_op(node, [np.asarray(a) for a in args])
