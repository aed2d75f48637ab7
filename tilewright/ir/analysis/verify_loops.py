"""The grammar of Loops: where buffers live, how kinds of loops nest, which indices a register takes.

A register buffer with lanes is a vector as wide as its last axis. It is stored whole: a vector loop of another width
would assign between vectors of different sizes, or leave lanes to chance. Shorter loops may read a part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from math import prod

from tilewright.errors import InternalError
from tilewright.ir.analysis.simplify import linear
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bounds import bounds, static, upper
from tilewright.ir.forms.expr import Axis, Const, Expr, Load, Op, State, Symbol, Var, var, walk
from tilewright.ir.forms.loops import (
    Alloc,
    Barrier,
    Buffer,
    Call,
    For,
    ForKind,
    If,
    Instruction,
    Jump,
    Kernel,
    LoopProgram,
    Memory,
    Scope,
    Stmt,
    Storage,
    Store,
)

ROLES = ("input", "output", "constant", "temporary")
_AROUND = {  # which loops may stand around one of a kind; SERIAL and UNROLL stand anywhere but inside a vector
    ForKind.PARALLEL: {ForKind.PARALLEL},
    ForKind.BLOCK: {ForKind.BLOCK},
}


def check_types(node: Expr) -> str | None:
    """What is wrong with the types of one node, or None: rewriting can break what the constructors check."""
    if isinstance(node, Load):
        if len(node.args) != len(node.source.shape):
            return f"{node.source.name} has {len(node.source.shape)} axes, read with {len(node.args)} indices"
        if any(a.dtype is not dtypes.index for a in node.args):
            return f"{node!r} has an index that is not {dtypes.index.name}"
        if node.dtype is not node.source.dtype:
            return f"{node!r} is {node.dtype.name}, but {node.source.name} holds {node.source.dtype.name}"
    if not isinstance(node, Op) or node.op.result == "cast":
        return None
    if node.op.result == "bits":
        same = len(node.args) == 1 and node.args[0].dtype.bits == node.dtype.bits
        return None if same else f"{node!r} changes the number of bits"
    values = node.args[1:] if node.op.name == "select" else node.args
    if node.op.name == "select" and node.args[0].dtype is not dtypes.bool_:
        return f"the condition of {node!r} is {node.args[0].dtype.name}"
    kinds = {a.dtype for a in values}
    if len(node.args) != node.op.arity or len(kinds) != 1 or values[0].dtype.kind not in node.op.kinds:
        return f"{node.op.name} of {[a.dtype.name for a in node.args]} in {node!r}"
    wanted = dtypes.bool_ if node.op.result == "bool" else values[0].dtype
    return None if node.dtype is wanted else f"{node!r} is {node.dtype.name}, expected {wanted.name}"


def verify_loops(loops: LoopProgram) -> None:
    kernels: dict[str, Kernel] = {}
    for kernel in loops.kernels:
        if kernel.name in kernels:
            raise InternalError(f"kernel {kernel.name} is defined twice")
        kernels[kernel.name] = kernel
        verify_kernel(kernel)
    tensors = {s.name: s for s in loops.tensors}
    if len(tensors) != len(loops.tensors):
        raise InternalError("a tensor's name is used twice among the storages")
    for item in loops.tensors:
        if item.role not in ROLES:
            raise InternalError(f"tensor {item.name} has the role {item.role}")
    known = {n: (s.dtype.name, prod(s.shape)) for n, s in tensors.items()}
    for call in loops.calls:
        if call.kernel not in kernels:
            raise InternalError(f"call of kernel {call.kernel}, which is not defined")
        _call(call, kernels[call.kernel], known)
    for jump in loops.jumps:
        _jump(jump, len(loops.calls), tensors)
    if any(a.at > b.at for a, b in pairwise(loops.jumps)):
        raise InternalError("jumps do not stand in the order of the calls")


def _jump(jump: Jump, calls: int, tensors: Mapping[str, Storage]) -> None:
    where = f"jump in front of call {jump.at}"
    if not 0 <= jump.at <= calls or not 0 <= jump.target <= calls or jump.passed < 0:
        raise InternalError(f"{where}: to call {jump.target} of {calls}")
    condition = None if jump.condition is None else tensors.get(jump.condition)
    if jump.condition is not None and (condition is None or condition.dtype is not dtypes.bool_):
        raise InternalError(f"{where}: its condition {jump.condition} is no tensor of bool")


def _call(call: Call, kernel: Kernel, tensors: dict[str, tuple[str, int]]) -> None:
    where = f"call of {call.kernel}"
    if len(call.arguments) != len(kernel.params):
        raise InternalError(f"{where}: {len(call.arguments)} arguments for {len(kernel.params)} parameters")
    for name, param in zip(call.arguments, kernel.params, strict=True):
        if name not in tensors:
            raise InternalError(f"{where}: argument {name} is not a tensor")
        dtype, size = tensors[name]
        if dtype != param.dtype.name:
            raise InternalError(f"{where}: {name} is {dtype}, parameter {param.name} is {param.dtype.name}")
        sizes = [static(e) for e in param.shape]
        known = [s for s in sizes if s is not None]
        if len(known) == len(sizes) and prod(known) != size:
            raise InternalError(f"{where}: {name} has {size} elements, parameter {param.name} {prod(known)}")


def verify_kernel(kernel: Kernel) -> None:
    _KernelCheck(kernel).run()


class _KernelCheck:
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._buffers: set[Buffer] = set()
        self._names: dict[str, Buffer] = {}
        self._loops: list[For] = []
        self._axes: set[Axis] = set() if kernel.step is None else {kernel.step}
        self._divergent = 0  # conditions and loops around in which the threads of a block may part ways

    def fail(self, what: str) -> InternalError:
        return InternalError(f"kernel {self._kernel.name}: {what}")

    def run(self) -> None:
        for param in self._kernel.params:
            if param.memory is not Memory.GLOBAL:
                raise self.fail(f"parameter {param.name} is {param.memory.value}")
            self._declare(param)
        self._body(self._kernel.body)

    def _declare(self, buffer: Buffer) -> None:
        # copies of a loop that is written out have the same buffer, one after the other
        if self._names.setdefault(buffer.name, buffer) is not buffer or buffer in self._buffers:
            raise self.fail(f"the name {buffer.name} is used twice")
        for extent in buffer.shape:
            if buffer.memory is not Memory.GLOBAL and static(extent) is None:
                raise self.fail(f"{buffer.memory.value} buffer {buffer.name} has the extent {extent!r}")
            if isinstance(extent, Expr):
                self._expr(extent)
        self._buffers.add(buffer)

    def _kinds(self) -> set[ForKind]:
        return {loop.kind for loop in self._loops}

    # Expressions

    def _expr(self, root: Expr) -> None:
        for node in walk(root):
            if isinstance(node, Var) and node.axis not in self._axes:
                raise self.fail(f"axis {node.axis.name} is used outside its loop")
            if isinstance(node, State):
                raise self.fail(f"state {node.name} cannot stand in loops")
            if isinstance(node, Symbol) and node not in self._kernel.symbols:
                raise self.fail(f"symbol {node.name} is not one of the kernel's")
            problem = check_types(node)
            if problem:
                raise self.fail(problem)
            if isinstance(node, Load):
                self._access(node.source, node.args)
                self._plain(node.source)
                self._read_width(node)

    def _access(self, buffer: Buffer, indices: tuple[Expr, ...]) -> None:
        if buffer not in self._buffers:
            raise self.fail(f"buffer {buffer.name} is used outside its allocation")
        if len(indices) != len(buffer.shape):
            raise self.fail(f"{buffer.name} has {len(buffer.shape)} axes, used with {len(indices)} indices")
        if buffer.memory is not Memory.REGISTER:
            return
        free = {loop.axis for loop in self._loops if loop.kind in (ForKind.UNROLL, ForKind.VECTOR)}
        for index in indices:
            for node in walk(index):
                if not (isinstance(node, Const | Op) or (isinstance(node, Var) and node.axis in free)):
                    raise self.fail(f"register {buffer.name} is indexed by {index!r}: neither constant nor a lane")

    def _plain(self, buffer: Buffer) -> None:
        if buffer.memory is Memory.TILE:
            raise self.fail(f"tile {buffer.name} is accessed element by element: instructions alone may touch it")

    def _index(self, buffer: Buffer, indices: tuple[Expr, ...]) -> None:
        for index in indices:
            self._expr(index)
            if index.dtype is not dtypes.index:
                raise self.fail(f"{buffer.name} has an index of type {index.dtype.name}")
        self._access(buffer, indices)

    # Widths

    def _lane(self) -> Axis | None:
        return next((loop.axis for loop in self._loops if loop.kind is ForKind.VECTOR), None)

    def _read_width(self, node: Load) -> None:
        """A vector loop reads neighbouring lanes of a register, or a column of a square of registers."""
        lane, buffer, indices = self._lane(), node.source, node.indices
        if lane is None or lane not in node.axes or buffer.memory is not Memory.REGISTER:
            return
        moving = [number for number, index in enumerate(indices) if lane in index.axes]
        count = static(lane.extent)
        is_column = moving == [len(indices) - 2] and indices[-2] is var(lane)
        if is_column and buffer.shape[-2] == buffer.shape[-1] and _same_width(count, buffer.shape[-1]):
            return
        if moving != [len(indices) - 1] or linear(indices[-1]).terms.get(var(lane)) != 1:
            raise self.fail(f"lanes of {lane.name} are neither neighbours nor a column in {node!r}")
        if bounds(indices[-1])[1] >= upper(buffer.shape[-1]):
            raise self.fail(f"{lane.name} reads {count} lanes of {buffer.name}, which has {buffer.shape[-1]}")

    def _stored_width(self, stmt: Store) -> None:
        """A vector loop stores whole registers, and what differs between its lanes to different places. In C vectors
        are of two, four, eight lanes and so on: one that is rounded up to the register's width fills it too, and its
        other lanes must not be read."""
        lane, buffer = self._lane(), stmt.buffer
        if lane is None:
            return
        moving = [number for number, index in enumerate(stmt.indices) if lane in index.axes]
        if not moving and lane in stmt.value.axes:
            raise self.fail(f"the lanes of {lane.name} store different values to one element of {buffer.name}")
        if not moving or buffer.memory is not Memory.REGISTER:
            return
        if moving != [len(stmt.indices) - 1] or stmt.indices[-1] is not var(lane):
            raise self.fail(f"lanes of {lane.name} are not those of register {buffer.name}")
        if not _same_width(static(lane.extent), buffer.shape[-1]):
            raise self.fail(
                f"a vector of {lane.extent} lanes is stored to {buffer.name}, which has {buffer.shape[-1]}: "
                "registers are stored whole"
            )

    def _varies(self, root: Expr) -> bool:
        """May the threads of a block see different values?"""
        lanes = {loop.axis for loop in self._loops if loop.kind in (ForKind.THREAD, ForKind.VECTOR)}
        for node in walk(root):
            if isinstance(node, Var) and node.axis in lanes:
                return True
            if isinstance(node, Load) and node.source.memory is Memory.REGISTER:
                return True
        return False

    # Statements

    def _body(self, body: Iterable[Stmt]) -> None:
        for stmt in body:
            if isinstance(stmt, For):
                self._for(stmt)
            elif isinstance(stmt, If):
                self._if(stmt)
            elif isinstance(stmt, Alloc):
                if stmt.buffer.memory is Memory.GLOBAL:
                    raise self.fail(f"buffer {stmt.buffer.name} is global and cannot be allocated")
                self._declare(stmt.buffer)
                self._body(stmt.body)
                self._buffers.discard(stmt.buffer)
            elif isinstance(stmt, Store):
                self._index(stmt.buffer, stmt.indices)
                self._plain(stmt.buffer)
                self._expr(stmt.value)
                self._stored_width(stmt)
                if stmt.value.dtype is not stmt.buffer.dtype:
                    raise self.fail(
                        f"{stmt.buffer.name} holds {stmt.buffer.dtype.name}, stored is {stmt.value.dtype.name}"
                    )
            elif isinstance(stmt, Barrier):
                self._barrier(stmt)
            elif isinstance(stmt, Instruction):
                for operand in stmt.operands:
                    self._index(operand.buffer, operand.origin)
                for scalar in stmt.scalars:
                    self._expr(scalar)
            else:
                raise self.fail(f"{type(stmt).__name__} is not a statement")

    def _for(self, loop: For) -> None:
        axis, around = loop.axis, self._kinds()
        if axis in self._axes:
            raise self.fail(f"axis {axis.name} is bound by two loops at once")
        if isinstance(axis.extent, Expr):
            self._expr(axis.extent)
        elif axis.extent < 0:
            raise self.fail(f"loop {axis.name} has the extent {axis.extent}")
        if ForKind.VECTOR in around:
            raise self.fail(f"loop {axis.name} is inside a vector loop")
        if loop.kind in _AROUND and not around <= _AROUND[loop.kind]:
            others = ", ".join(sorted(k.value for k in around - _AROUND[loop.kind]))
            raise self.fail(f"{loop.kind.value} loop {axis.name} is inside a {others} loop")
        if loop.kind is ForKind.THREAD and ForKind.BLOCK not in around:
            raise self.fail(f"thread loop {axis.name} is not inside a block loop")
        if loop.kind in (ForKind.VECTOR, ForKind.THREAD) and static(axis.extent) is None:
            raise self.fail(f"{loop.kind.value} loop {axis.name} has the extent {axis.extent!r}, not a constant")
        varies = isinstance(axis.extent, Expr) and self._varies(axis.extent)
        self._divergent += varies
        self._loops.append(loop)
        self._axes.add(axis)
        self._body(loop.body)
        self._axes.discard(axis)
        self._loops.pop()
        self._divergent -= varies

    def _if(self, stmt: If) -> None:
        self._expr(stmt.condition)
        if stmt.condition.dtype is not dtypes.bool_:
            raise self.fail(f"condition {stmt.condition!r} is {stmt.condition.dtype.name}")
        varies = self._varies(stmt.condition)
        self._divergent += varies
        self._body(stmt.then)
        self._body(stmt.otherwise)
        self._divergent -= varies

    def _barrier(self, stmt: Barrier) -> None:
        if ForKind.BLOCK not in self._kinds():
            raise self.fail(f"a {stmt.scope.value} barrier is not inside a block loop")
        if ForKind.VECTOR in self._kinds():
            raise self.fail(f"a {stmt.scope.value} barrier is inside a vector loop")
        if stmt.scope is not Scope.WARP and self._divergent:
            raise self.fail(f"a {stmt.scope.value} barrier is inside a condition that threads may not share")


def _same_width(count: int | None, lanes: int | Expr) -> bool:
    """Whether so many lanes, rounded up to a vector of C, are as wide as a register with these lanes."""
    return count is not None and isinstance(lanes, int) and count <= lanes and _rounded(count) == _rounded(lanes)


def _rounded(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
