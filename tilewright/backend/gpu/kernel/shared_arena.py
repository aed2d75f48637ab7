"""Places a kernel's shared buffers in one arena; buffers never live at the same time may share bytes.

Time is counted in phases, the stretches between block barriers: threads drift apart within a phase, so two buffers may
share bytes only if no phase touches both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewright.errors import InternalError
from tilewright.intrinsics.gpu_matrix import FORMS
from tilewright.ir.forms.bounds import lower, static
from tilewright.ir.forms.expr import Axis, Expr, loads
from tilewright.ir.forms.loops import (
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
from tilewright.target.instruction_sets import BANK_ROW_BYTES, MATRIX_BYTES


@dataclass(frozen=True)
class SharedArena:
    offsets: Mapping[str, int]  # first byte by buffer name
    bytes: int


@dataclass(frozen=True)
class ArenaRegion:
    """Bytes that are in use from one phase to another; a region that is never used has its end before its beginning."""

    bytes: int
    first: int
    last: int
    alignment: int = BANK_ROW_BYTES

    def meets(self, other: ArenaRegion) -> bool:
        return self.first <= other.last and other.first <= self.last


def place_shared(kernel: Kernel) -> SharedArena:
    """Offsets for every buffer in shared memory, first fit, the largest first."""
    buffers = [s.buffer for s in statements(kernel.body) if isinstance(s, Alloc) and s.buffer.memory is Memory.SHARED]
    if not buffers:
        return SharedArena({}, 0)
    live = _live_phases(kernel)
    matrices = {o.buffer for s in statements(kernel.body) if isinstance(s, Instruction) and s.name in FORMS
                for o in s.operands}  # fmt: skip
    offsets, total = place([
        ArenaRegion(_size(kernel, b), *live.get(b, (0, -1)), MATRIX_BYTES if b in matrices else BANK_ROW_BYTES)
        for b in buffers
    ])  # fmt: skip
    return SharedArena({b.name: at for b, at in zip(buffers, offsets, strict=True)}, total)


def place(regions: Sequence[ArenaRegion]) -> tuple[list[int], int]:
    """The first byte of every region, and how many all take together: first fit, the largest first."""
    placed: list[int] = []
    offsets = [0] * len(regions)
    for number in sorted(range(len(regions)), key=lambda n: -regions[n].bytes):
        own = regions[number]
        rivals = sorted((offsets[p], offsets[p] + regions[p].bytes) for p in placed if own.meets(regions[p]))
        offsets[number] = _first_gap(rivals, own.bytes, own.alignment)
        placed.append(number)
    return offsets, max((at + r.bytes for at, r in zip(offsets, regions, strict=True)), default=0)


def whole_lines(size: int) -> int:
    return -(-size // BANK_ROW_BYTES) * BANK_ROW_BYTES


def _size(kernel: Kernel, buffer: Buffer) -> int:
    count = 1
    for extent in buffer.shape:
        known = static(extent)
        if known is None:
            raise InternalError(f"{kernel.name}: shared buffer {buffer.name} has no fixed size")
        count *= known
    return whole_lines(count * buffer.dtype.bytes)


def _first_gap(taken: list[tuple[int, int]], size: int, alignment: int) -> int:
    start = 0
    for first, end in taken:
        if start + size <= first:
            return start
        start = max(start, -(-end // alignment) * alignment)
    return start


@dataclass
class _Walk:
    blocks: frozenset[Axis]
    phase: int
    live: dict[Buffer, tuple[int, int]]

    def is_of_blocks(self, condition: Expr) -> bool:
        """Whether all threads of a block decide alike, so that all of them meet the barriers behind it or none does."""
        is_read = all(isinstance(n.source, Buffer) and n.source.memory is Memory.GLOBAL for n in loads(condition))
        return self.blocks.issuperset(condition.axes) and is_read


def _live_phases(kernel: Kernel) -> dict[Buffer, tuple[int, int]]:
    """First and last phase that touches each shared buffer."""
    blocks = frozenset(s.axis for s in statements(kernel.body) if isinstance(s, For) and s.kind is ForKind.BLOCK)
    state = _Walk(blocks, 0, {})
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
            is_counted = counted and state.is_of_blocks(stmt.condition)
            _visit(stmt.then, state, is_counted)
            _visit(stmt.otherwise, state, is_counted)
        elif isinstance(stmt, For):
            _visit_loop(stmt, state, counted)


def _visit_loop(loop: For, state: _Walk, counted: bool) -> None:
    begin = state.phase
    _visit(loop.body, state, counted and lower(loop.axis.extent) >= 1)
    if loop.kind not in (ForKind.SERIAL, ForKind.UNROLL):
        return
    # What an iteration leaves may be read by the next: live in the whole loop. A buffer of one iteration is not, unless
    # others may begin the next one while it is still in use, no barrier being between.
    inside = list(statements(loop.body))
    own = {s.buffer for s in inside if isinstance(s, Alloc)}
    for buffer in {b for inner in inside for b in touched(inner)}:
        if buffer not in own or state.live[buffer][1] == state.phase:
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
