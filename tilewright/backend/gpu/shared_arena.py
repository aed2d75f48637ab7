"""Places a kernel's shared buffers in one arena; buffers never live at the same time may share bytes.

Time is counted in phases, the stretches between block barriers: threads drift apart within a phase, so two buffers may
share bytes only if no phase touches both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilewright.errors import InternalError
from tilewright.intrinsics.gpu_matrix import FORMS
from tilewright.ir.bounds import lower, static
from tilewright.ir.expr import loads
from tilewright.ir.loops import (
    Alloc,
    Barrier,
    Buffer,
    For,
    ForKind,
    If,
    Instruction,
    Kernel,
    Memory,
    Scope,
    Stmt,
    Store,
    statements,
    stmt_exprs,
)

ALIGNMENT = 128  # bytes: a bank row, and enough for every vector copy
_MATRIX_ALIGNMENT = 1024  # of what tensor cores read by themselves: eight lines whose packets change places


@dataclass(frozen=True)
class SharedArena:
    offsets: Mapping[str, int]  # first byte by buffer name
    bytes: int


def place_shared(kernel: Kernel) -> SharedArena:
    """Offsets for every buffer in shared memory, first fit, the largest first."""
    buffers = [s.buffer for s in statements(kernel.body) if isinstance(s, Alloc) and s.buffer.memory is Memory.SHARED]
    if not buffers:
        return SharedArena({}, 0)
    live = _live_phases(kernel)
    matrices = {o.buffer for s in statements(kernel.body) if isinstance(s, Instruction) and s.name in FORMS
                for o in s.operands}  # fmt: skip
    sizes = {b: _size(kernel, b) for b in buffers}
    placed: list[Buffer] = []
    offsets: dict[Buffer, int] = {}
    for buffer in sorted(buffers, key=lambda b: (-sizes[b], buffers.index(b))):
        rivals = sorted((offsets[p], offsets[p] + sizes[p]) for p in placed if _meet(live.get(p), live.get(buffer)))
        offsets[buffer] = _first_gap(rivals, sizes[buffer], _MATRIX_ALIGNMENT if buffer in matrices else ALIGNMENT)
        placed.append(buffer)
    total = max(offsets[b] + sizes[b] for b in buffers)
    return SharedArena({b.name: offsets[b] for b in buffers}, total)


def _size(kernel: Kernel, buffer: Buffer) -> int:
    count = 1
    for extent in buffer.shape:
        known = static(extent)
        if known is None:
            raise InternalError(f"{kernel.name}: shared buffer {buffer.name} has no fixed size")
        count *= known
    return -(-count * buffer.dtype.bytes // ALIGNMENT) * ALIGNMENT


def _meet(a: tuple[int, int] | None, b: tuple[int, int] | None) -> bool:
    return a is not None and b is not None and a[0] <= b[1] and b[0] <= a[1]


def _first_gap(taken: list[tuple[int, int]], size: int, alignment: int) -> int:
    start = 0
    for first, end in taken:
        if start + size <= first:
            return start
        start = max(start, -(-end // alignment) * alignment)
    return start


@dataclass
class _Walk:
    phase: int
    live: dict[Buffer, tuple[int, int]]


def _live_phases(kernel: Kernel) -> dict[Buffer, tuple[int, int]]:
    """First and last phase that touches each shared buffer."""
    state = _Walk(0, {})
    for stmt in kernel.body:
        _visit((stmt,), state, counted=True)
        state.phase += 1  # no block runs two loops over blocks that stand beside each other
    return state.live


def _visit(body: tuple[Stmt, ...], state: _Walk, counted: bool) -> None:
    for stmt in body:
        if isinstance(stmt, Barrier):
            # A barrier that a branch or an empty loop may skip separates nothing for sure.
            state.phase += 1 if counted and stmt.scope is not Scope.WARP else 0
            continue
        for buffer in touched(stmt):
            _extend(state, buffer, state.phase, state.phase)
        if isinstance(stmt, Alloc):
            _visit(stmt.body, state, counted)
        elif isinstance(stmt, If):
            _visit(stmt.then, state, False)
            _visit(stmt.otherwise, state, False)
        elif isinstance(stmt, For):
            _visit_loop(stmt, state, counted)


def _visit_loop(loop: For, state: _Walk, counted: bool) -> None:
    begin = state.phase
    _visit(loop.body, state, counted and lower(loop.axis.extent) >= 1)
    if loop.kind not in (ForKind.SERIAL, ForKind.UNROLL):
        return
    # What an iteration leaves may be read by the next: live in the whole loop.
    for inner in statements(loop.body):
        for buffer in touched(inner):
            _extend(state, buffer, begin, state.phase)


def _extend(state: _Walk, buffer: Buffer, first: int, last: int) -> None:
    known = state.live.get(buffer, (first, last))
    state.live[buffer] = (min(known[0], first), max(known[1], last))


def touched(stmt: Stmt) -> list[Buffer]:
    """The shared buffers a statement itself reads or writes."""
    found = [node.source for node in loads(*stmt_exprs(stmt))]
    if isinstance(stmt, Store):
        found.append(stmt.buffer)
    if isinstance(stmt, Instruction):
        found += [operand.buffer for operand in stmt.operands]
    return [b for b in found if b.memory is Memory.SHARED]
