"""The Loops: explicit loops, buffers with a memory, barriers and instructions; what a renderer writes down as it is.

Loops of kind PARALLEL, BLOCK, THREAD and VECTOR run their iterations side by side; a Barrier inside makes all
iterations of the named scope arrive before any goes on (the SIMT reading, which the interpreter follows literally).
BLOCK loops beside each other in a kernel are one launch, in no order: what one writes the others do not touch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import Axis, Expr, Extent, Symbol


class Memory(Enum):
    GLOBAL = "global"  # a tensor in DRAM / device memory: kernel parameters
    SCRATCH = "scratch"  # private to a worker, sized to stay in its caches
    SHARED = "shared"  # a GPU block's shared memory
    REGISTER = "register"  # private to a lane or thread; indices are constants after unrolling
    TILE = "tile"  # a matrix register: instructions alone touch it, whole; its number is its place among those alive


class ForKind(Enum):
    SERIAL = "serial"
    UNROLL = "unroll"  # written out by lower/unroll.py before rendering
    PARALLEL = "parallel"  # tiles handed to the worker team; the outermost loop of a CPU kernel
    BLOCK = "block"  # GPU grid
    THREAD = "thread"  # GPU threads of a block, x fastest
    VECTOR = "vector"  # lanes of one vector register


class Scope(Enum):
    BLOCK = "block"
    WARP = "warp"
    GRID = "grid"


@dataclass(frozen=True, eq=False)
class Buffer:
    """Storage with a row-major shape. Identity counts; names are unique within a kernel. One may be allocated again."""

    name: str
    shape: tuple[Extent, ...]
    dtype: DType
    memory: Memory

    def __repr__(self) -> str:
        return f"{self.name}: {self.memory.value} {self.dtype.name}{list(self.shape)}"


@dataclass(frozen=True, eq=False)
class For:
    axis: Axis  # runs from 0 to extent - 1; the extent may be an expression of outer axes
    kind: ForKind
    body: tuple[Stmt, ...]


@dataclass(frozen=True, eq=False)
class If:
    condition: Expr
    then: tuple[Stmt, ...]
    otherwise: tuple[Stmt, ...] = ()


@dataclass(frozen=True, eq=False)
class Alloc:
    """A buffer that lives for `body`; its contents start undefined."""

    buffer: Buffer
    body: tuple[Stmt, ...]


@dataclass(frozen=True, eq=False)
class Store:
    buffer: Buffer
    indices: tuple[Expr, ...]
    value: Expr


@dataclass(frozen=True, eq=False)
class Barrier:
    scope: Scope


@dataclass(frozen=True, eq=False)
class Operand:
    """A rectangular piece of a buffer, as an instruction sees it: `origin` inside the buffer."""

    buffer: Buffer
    origin: tuple[Expr, ...]


PREFETCH = "prefetch"  # the instruction that asks for a line of memory before it is needed
PREFETCH_BESIDE = "prefetch_beside"  # the same into the last cache: nearer ones have what is needed now
PREFETCH_TILE = "prefetch_tile"  # the same into the tile level, the first cache left alone
HINTS = frozenset({PREFETCH, PREFETCH_BESIDE, PREFETCH_TILE})


@dataclass(frozen=True, eq=False)
class Instruction:
    """An entry of the intrinsics table applied to operands (first the destination) and scalar immediates.

    Warp shuffles, vector copies, asynchronous copies, MMA: the table gives text and meaning.
    """

    name: str
    operands: tuple[Operand, ...]
    scalars: tuple[Expr, ...] = ()


Stmt = For | If | Alloc | Store | Barrier | Instruction


@dataclass(frozen=True, eq=False)
class Kernel:
    """One function: reads and writes its parameters; `symbols` are extents given at the call.

    `step` is the axis whose value the caller passes when it repeats the kernel (a Scan's step), or None.
    """

    name: str
    params: tuple[Buffer, ...]
    body: tuple[Stmt, ...]
    symbols: tuple[Symbol, ...] = ()
    step: Axis | None = None


@dataclass(frozen=True)
class Call:
    """One run of a kernel: `arguments` are tensor names bound to the kernel's parameters in order.

    A Scan is written out as its steps: each binds the carried state of the step before and passes its own `step`.
    """

    kernel: str
    arguments: tuple[str, ...]
    step: int = 0


@dataclass(frozen=True)
class Jump:
    """In front of call `at` the run goes on in front of call `target`: always, or where tensor `condition` is false.
    Those in front of one call are looked at in order; at the target, those behind the first `passed`."""

    at: int
    target: int
    passed: int = 0
    condition: str | None = None


@dataclass(frozen=True)
class Storage:
    """Where a tensor lives at run time: `storage_shape` is its shape in its layout, padding included."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    role: str  # "input", "output", "constant", "temporary"
    position: int = 0  # among inputs or outputs


@dataclass(frozen=True)
class LoopProgram:
    """All kernels of a model and the order they run in."""

    kernels: tuple[Kernel, ...]
    calls: tuple[Call, ...]
    tensors: tuple[Storage, ...]
    jumps: tuple[Jump, ...] = ()  # by the call they stand in front of

    def kernel(self, name: str) -> Kernel:
        return next(k for k in self.kernels if k.name == name)

    def first_jumps(self) -> dict[int, int]:
        """The number of the first jump in front of each call that has one."""
        return {jump.at: number for number, jump in reversed(list(enumerate(self.jumps)))}


def statements(body: tuple[Stmt, ...]) -> Iterator[Stmt]:
    """Every statement, outer before inner."""
    stack = list(reversed(body))
    while stack:
        stmt = stack.pop()
        yield stmt
        if isinstance(stmt, For | Alloc):
            stack.extend(reversed(stmt.body))
        elif isinstance(stmt, If):
            stack.extend(reversed((*stmt.then, *stmt.otherwise)))


_COPY = re.compile(r"copy(?:_async(?:_or_zero)?)?(\d+)")  # its name says how many elements a copy moves


def copied_elements(instruction: Instruction) -> int:
    """Elements that an instruction moves from its second operand to its first; 0 where it computes."""
    found = _COPY.fullmatch(instruction.name)
    return int(found[1]) if found else 0


def stmt_exprs(stmt: Stmt) -> tuple[Expr, ...]:
    """The expressions a statement holds itself."""
    if isinstance(stmt, Store):
        return (*stmt.indices, stmt.value)
    if isinstance(stmt, If):
        return (stmt.condition,)
    if isinstance(stmt, For) and isinstance(stmt.axis.extent, Expr):
        return (stmt.axis.extent,)
    if isinstance(stmt, Instruction):
        return (*(i for o in stmt.operands for i in o.origin), *stmt.scalars)
    return ()
