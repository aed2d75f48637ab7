"""Memory by liveness: offsets of temporaries in one arena, and of a kernel's scratch buffers in a worker's scratch."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from tilewright.ir.forms.expr import loads
from tilewright.ir.forms.loops import (
    Alloc,
    Buffer,
    For,
    ForKind,
    If,
    Instruction,
    Kernel,
    LoopProgram,
    Memory,
    Stmt,
    Store,
    statements,
    stmt_exprs,
)
from tilewright.ir.forms.tensor import elements
from tilewright.target.instruction_sets import LINE_BYTES


@dataclass(frozen=True)
class Lifetime:
    """Something of `bytes` that is needed from `first` to `last`, both included."""

    key: Hashable
    bytes: int
    first: int
    last: int


def place(lifetimes: Iterable[Lifetime]) -> tuple[dict[Hashable, int], int]:
    """Offsets so that no two things alive at once overlap (largest first, tightest gap), and the total."""
    offsets: dict[Hashable, int] = {}
    placed: list[tuple[Lifetime, int]] = []
    total = 0
    for item in sorted(lifetimes, key=lambda i: (-i.bytes, i.first, str(i.key))):
        size = _aligned(item.bytes)
        busy = sorted((o, o + _aligned(p.bytes)) for p, o in placed if p.first <= item.last and item.first <= p.last)
        best: tuple[int, int] | None = None
        end = 0
        for start, stop in busy:
            if start - end >= size and (best is None or start - end < best[0]):
                best = (start - end, end)
            end = max(end, stop)
        offset = end if best is None else best[1]
        offsets[item.key] = offset
        placed.append((item, offset))
        total = max(total, offset + size)
    return offsets, total


def _aligned(size: int) -> int:
    return max(LINE_BYTES, -(-size // LINE_BYTES) * LINE_BYTES)


def arena(loops: LoopProgram) -> tuple[dict[str, int], int]:
    """Arena offsets of all temporaries of a model."""
    offsets, total = place(_lifetimes(loops))
    return offsets, total  # type: ignore[return-value]


def alive(loops: LoopProgram) -> list[tuple[frozenset[str], int]]:
    """By call: the temporaries that are needed then, and their bytes."""
    lives = _lifetimes(loops)
    found = []
    for number in range(len(loops.calls)):
        here = [life for life in lives if life.first <= number <= life.last]
        found.append((frozenset(str(life.key) for life in here), sum(life.bytes for life in here)))
    return found


def _lifetimes(loops: LoopProgram) -> list[Lifetime]:
    """Of temporaries, in calls."""
    sizes = {t.name: elements(t.shape) * t.dtype.bytes for t in loops.tensors if t.role == "temporary"}
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for number, call in enumerate(loops.calls):
        for name in call.arguments:
            if name in sizes:
                first.setdefault(name, number)
                last[name] = number
    for jump in loops.jumps:
        if jump.condition in first:
            last[jump.condition] = max(last[jump.condition], jump.at)
    # what comes into a loop from outside is there for every turn of it
    for jump in sorted((j for j in loops.jumps if j.target < j.at), key=lambda j: j.at - j.target):
        for name in first:
            if first[name] < jump.target <= last[name]:
                last[name] = max(last[name], jump.at - 1)
    return [Lifetime(n, sizes[n], first[n], last[n]) for n in sizes if n in first]


def scratch(kernel: Kernel, memory: Memory = Memory.SCRATCH) -> tuple[dict[Buffer, int], int]:
    """Offsets of a kernel's scratch buffers; an Alloc is alive from its first to its last use in the statements."""
    allocated: dict[Buffer, None] = {}
    if not any(isinstance(s, Alloc) and s.buffer.memory is memory for s in statements(kernel.body)):
        return {}, 0
    uses: dict[Buffer, list[int]] = {}
    clock = 0

    def visit(body: tuple[Stmt, ...], inside: bool) -> None:
        nonlocal clock
        for stmt in body:
            if isinstance(stmt, Alloc):
                if stmt.buffer.memory is memory:
                    allocated[stmt.buffer] = None
                visit(stmt.body, inside)
                continue
            if isinstance(stmt, For) and not inside and _only_wraps(stmt):
                visit(stmt.body, False)
                continue
            # one tick a statement at the outermost sequence: inside a loop, everything lives through the whole loop
            if not inside:
                for buffer in _touched(stmt):
                    uses.setdefault(buffer, []).append(clock)
            if isinstance(stmt, For):
                visit(stmt.body, True)
            elif isinstance(stmt, If):
                visit((*stmt.then, *stmt.otherwise), True)
            if not inside:
                clock += 1

    visit(kernel.body, False)
    lifetimes = []
    for buffer in allocated:
        moments = uses.get(buffer, [0])
        lifetimes.append(Lifetime(buffer, elements(buffer.shape) * buffer.dtype.bytes, min(moments), max(moments)))
    offsets, total = place(lifetimes)
    return offsets, total  # type: ignore[return-value]


def _only_wraps(stmt: For) -> bool:
    """The grid loop around everything: not a loop that keeps buffers alive."""
    return stmt.kind in (ForKind.PARALLEL, ForKind.BLOCK, ForKind.THREAD)


def _touched(stmt: Stmt) -> set[Buffer]:
    found: set[Buffer] = set()
    for inner in statements((stmt,)):
        found.update(n.source for n in loads(*stmt_exprs(inner)))
        if isinstance(inner, Store):
            found.add(inner.buffer)
        elif isinstance(inner, Instruction):
            found.update(o.buffer for o in inner.operands)
    return found
