"""Runs Loops for their addresses alone: a small C program counts what is loaded and stored, memory by memory, and plays
every access through caches that forget the line used least recently.

Written out blocks are straight lines of code: what they load twice from one place they load once. Nothing here knows
of plans or of how traffic is predicted.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from tilewright.ir.analysis.simplify import linear, simplify
from tilewright.ir.forms.expr import Axis, Const, Expr, Load, Op, Var, const, is_op, substitute, var
from tilewright.ir.forms.loops import (
    HINTS,
    Alloc,
    Barrier,
    Buffer,
    For,
    ForKind,
    If,
    Instruction,
    Kernel,
    LoopProgram,
    Memory,
    Operand,
    Stmt,
    Store,
    statements,
)
from tilewright.lower.unroll import unroll
from tilewright.tile_graph.algebra.propagate import extent_of

LINE = 64
_MEMORIES = [m for m in Memory if m not in (Memory.REGISTER, Memory.TILE)]

_RUNTIME = """
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
typedef int64_t I;
#define LEVELS %(levels)d
#define LINES %(lines)dLL
#define CALLS %(calls)d
static const I capacity[] = {%(capacities)s};
typedef struct { int32_t *older, *newer; int32_t *writer; uint8_t *in; I used; int32_t first, last; } Cache;
static Cache caches[LEVELS];
static I fetched[LEVELS][CALLS], written[LEVELS][CALLS], counted[%(memories)d][2][CALLS];
static I accesses;
static int call;
static inline I fdiv(I a, I b) { I q = a / b; return q * b > a ? q - 1 : q; }
static inline I fmod_(I a, I b) { return a - fdiv(a, b) * b; }
static inline I lo(I a, I b) { return a < b ? a : b; }
static inline I hi(I a, I b) { return a > b ? a : b; }
static void use(int level, int32_t line, int store) {
  Cache *c = caches + level;
  if (c->in[line]) {
    if (c->last != line) {
      int32_t o = c->older[line], n = c->newer[line];
      if (o >= 0) c->newer[o] = n; else c->first = n;
      c->older[n] = o;
      c->older[line] = c->last; c->newer[c->last] = line; c->newer[line] = -1; c->last = line;
    }
  } else {
    fetched[level][call] += %(line)d;
    if (c->used == capacity[level]) {
      int32_t out = c->first;
      c->first = c->newer[out];
      if (c->first >= 0) c->older[c->first] = -1; else c->last = -1;
      c->in[out] = 0;
      if (c->writer[out] >= 0) { written[level][c->writer[out]] += %(line)d; c->writer[out] = -1; }
      c->used--;
    }
    c->in[line] = 1; c->used++;
    c->older[line] = c->last; c->newer[line] = -1;
    if (c->last >= 0) c->newer[c->last] = line; else c->first = line;
    c->last = line;
  }
  if (store) c->writer[line] = call;
}
static void touch(I at, I size, int store, int memory) {
  counted[memory][store][call] += size;
  accesses++;
  for (I line = at / %(line)d; line <= (at + size - 1) / %(line)d; line++)
    for (int level = 0; level < LEVELS; level++) use(level, (int32_t)line, store);
}
"""

_MAIN = """
void run(I *out) {
  for (int l = 0; l < LEVELS; l++) {
    Cache *c = caches + l;
    c->older = malloc(LINES * 4); c->newer = malloc(LINES * 4); c->writer = malloc(LINES * 4);
    c->in = calloc(LINES, 1); memset(c->writer, 255, LINES * 4);
    c->used = 0; c->first = c->last = -1;
  }
%(run)s
  I *o = out;
  for (int l = 0; l < LEVELS; l++) {
    Cache *c = caches + l;
    for (I i = 0; i < LINES; i++) if (c->writer[i] >= 0) written[l][c->writer[i]] += %(line)d;
    free(c->older); free(c->newer); free(c->writer); free(c->in);
    for (int k = 0; k < CALLS; k++) *o++ = fetched[l][k];
    for (int k = 0; k < CALLS; k++) *o++ = written[l][k];
  }
  for (int m = 0; m < %(memories)d; m++)
    for (int w = 0; w < 2; w++)
      for (int k = 0; k < CALLS; k++) *o++ = counted[m][w][k];
  *o = accesses;
}
"""


@dataclass(frozen=True)
class Traced:
    """Bytes by call: fetched into each cache and written back from it, and by memory loaded and stored."""

    fetched: list[list[int]]  # by cache
    written: list[list[int]]
    loaded: dict[Memory, list[int]]
    stored: dict[Memory, list[int]]
    accesses: int


def trace(loops: LoopProgram, capacities: Sequence[int], folder: Path) -> Traced:
    """One run of a program, caches of these bytes empty at first and written back in the end."""
    base: dict[str, int] = {}
    place = 0
    for storage in loops.tensors:
        base[storage.name] = place
        place += -(-prod(storage.shape) * storage.dtype.bytes // LINE) * LINE
    functions = []
    for kernel in loops.kernels:
        writer = _Writer(kernel, place)
        functions.append(writer.text())
        place = writer.end
    run = []
    for number, call in enumerate(loops.calls):
        given = ", ".join(str(base[a]) for a in call.arguments)
        run.append(f"  call = {number}; {call.kernel}({call.step}{', ' if given else ''}{given});")
    facts = {"levels": len(capacities), "lines": place // LINE + 2, "calls": len(loops.calls), "line": LINE,
             "capacities": ", ".join(str(max(1, c // LINE)) for c in capacities), "memories": len(_MEMORIES),
             "run": "\n".join(run)}  # fmt: skip
    source = folder / "trace.c"
    source.write_text(_RUNTIME % facts + "\n".join(functions) + _MAIN % facts)
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler is not None, "no C compiler to trace with"
    library = folder / f"trace{len(list(folder.iterdir()))}.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-w", "-o", str(library), str(source)], check=True)
    calls = len(loops.calls)
    out = (ctypes.c_int64 * (2 * calls * (len(capacities) + len(_MEMORIES)) + 1))()
    ctypes.CDLL(str(library)).run(out)
    rows = [list(out[i * calls : (i + 1) * calls]) for i in range(2 * (len(capacities) + len(_MEMORIES)))]
    first = 2 * len(capacities)
    return Traced(
        rows[0:first:2], rows[1:first:2],
        {m: rows[first + 2 * i] for i, m in enumerate(_MEMORIES)},
        {m: rows[first + 2 * i + 1] for i, m in enumerate(_MEMORIES)}, out[len(rows) * calls],
    )  # fmt: skip


def _starts_a_sum(stmt: Alloc) -> bool:
    first = next((s for s in statements(stmt.body) if isinstance(s, Store)), None)
    return first is not None and first.buffer is stmt.buffer and not first.value.reads


class _Writer:
    """One kernel as C that touches what the kernel would."""

    def __init__(self, kernel: Kernel, place: int) -> None:
        self.kernel = unroll(kernel)
        self.at: dict[Buffer, str] = {b: f"p{i}" for i, b in enumerate(kernel.params)}
        for stmt in statements(self.kernel.body):
            if isinstance(stmt, Alloc) and stmt.buffer.memory in _MEMORIES:
                self.at[stmt.buffer] = str(place)
                size = prod(extent_of(e) for e in stmt.buffer.shape) * stmt.buffer.dtype.bytes
                place += -(-size // LINE) * LINE
        self.end = place
        self.names: dict[Axis, str] = {}
        if kernel.step is not None:
            self.names[kernel.step] = "step"
        self.lines: list[str] = []

    def text(self) -> str:
        self.body(self.kernel.body)
        given = "".join(f", I p{i}" for i in range(len(self.kernel.params)))
        return f"static void {self.kernel.name}(I step{given}) {{\n" + "\n".join(self.lines) + "\n}\n"

    def body(self, body: Sequence[Stmt], known: set[str] | None = None) -> None:
        """Statements; `known` are loads that the straight line of code before has done."""
        known = set() if known is None else known
        for stmt in body:
            if isinstance(stmt, For) and stmt.kind is ForKind.VECTOR:
                self.vector(stmt.axis, stmt.body, known)
            elif isinstance(stmt, For):
                known.clear()
                name = self.name(stmt.axis)
                self.lines.append(f"for (I {name} = 0; {name} < {self.c(stmt.axis.extent)}; {name}++) {{")
                self.body(stmt.body)
                self.lines.append("}")
            elif isinstance(stmt, If):
                known.clear()
                self.lines.append(f"if ({self.c(stmt.condition)}) {{")
                self.body(stmt.then)
                self.lines.append("} else {")
                self.body(stmt.otherwise)
                self.lines.append("}")
            elif isinstance(stmt, Alloc):
                if _starts_a_sum(stmt):  # accumulators need the registers
                    known.clear()
                self.body(stmt.body, known)
            elif isinstance(stmt, Store):
                self.store(stmt, None, known)
            elif isinstance(stmt, Instruction):
                self.instruction(stmt)
            elif not isinstance(stmt, Barrier):
                raise AssertionError(f"no way to trace {stmt}")

    def vector(self, lane: Axis, body: Sequence[Stmt], known: set[str]) -> None:
        for stmt in body:
            if isinstance(stmt, Alloc):
                self.vector(lane, stmt.body, known)
            elif isinstance(stmt, Store):
                self.store(stmt, lane, known)
            else:
                raise AssertionError(f"no way to trace {stmt} on lanes")

    def store(self, stmt: Store, lane: Axis | None, known: set[str]) -> None:
        self.value(stmt.value, lane, known)
        for index in stmt.indices:
            self.value(index, lane, known)
        if stmt.buffer.memory in _MEMORIES:
            self.touch(stmt.buffer, stmt.indices, lane, True, None)
            for key in [k for k in known if k.startswith(f"{self.at[stmt.buffer]} ")]:
                known.discard(key)

    def value(self, root: Expr, lane: Axis | None, known: set[str] | None) -> None:
        """All that an expression loads; of a choice only what is chosen."""
        seen: set[int] = set()
        stack = [root]
        while stack:
            node = stack.pop()
            if id(node) in seen or not node.reads:
                continue
            seen.add(id(node))
            if is_op(node, "select") and (node.args[1].reads or node.args[2].reads):
                self.value(node.args[0], lane, known)
                self.chosen(node, lane)
                continue
            if isinstance(node, Load) and node.source.memory in _MEMORIES:
                self.touch(node.source, node.indices, lane, False, known)
            stack.extend(node.args)

    def chosen(self, node: Expr, lane: Axis | None) -> None:
        condition, *sides = node.args
        if lane is not None and lane in condition.axes:
            for place in range(extent_of(lane.extent)):
                at = {lane: const(place)}
                self.either(substitute(condition, at), [substitute(s, at) for s in sides], None)
        else:
            self.either(condition, sides, lane)

    def either(self, condition: Expr, sides: Sequence[Expr], lane: Axis | None) -> None:
        self.lines.append(f"if ({self.c(condition)}) {{")
        self.value(sides[0], lane, None)
        self.lines.append("} else {")
        self.value(sides[1], lane, None)
        self.lines.append("}")

    def touch(
        self, buffer: Buffer, indices: Sequence[Expr], lane: Axis | None, is_store: bool, known: set[str] | None
    ) -> None:
        offset: Expr = const(0)
        for index, size in zip(indices, buffer.shape, strict=True):
            offset = offset * size + index
        offset = simplify(offset)
        size = buffer.dtype.bytes
        base = self.at[buffer]
        if lane is not None and lane in offset.axes:
            found = linear(offset)
            plain = all(isinstance(t, Var) or lane not in t.axes for t in found.terms)
            if plain and found.terms.get(var(lane)) == 1:
                offset = simplify(substitute(offset, {lane: const(0)}))
                size *= extent_of(lane.extent)
            else:
                for place in range(extent_of(lane.extent)):
                    at = simplify(substitute(offset, {lane: const(place)}))
                    self.touch_at(buffer, base, at, size, is_store, known)
                return
        self.touch_at(buffer, base, offset, size, is_store, known)

    def touch_at(
        self, buffer: Buffer, base: str, offset: Expr, size: int, is_store: bool, known: set[str] | None
    ) -> None:
        place = self.c(offset)
        if known is not None:
            key = f"{base} {place} {size}"
            if key in known:
                return
            known.add(key)
        memory = _MEMORIES.index(buffer.memory)
        self.lines.append(f"touch({base} + ({place}) * {buffer.dtype.bytes}, {size}, {int(is_store)}, {memory});")

    def instruction(self, stmt: Instruction) -> None:
        if stmt.name in HINTS:
            return
        if stmt.name == "copy_run":
            to, source = stmt.operands
            self.run(source, stmt.scalars[0], False)
            self.run(to, stmt.scalars[0], True)
        elif stmt.name == "clear_run":
            self.run(stmt.operands[0], stmt.scalars[0], True)
        elif any(o.buffer.memory in _MEMORIES for o in stmt.operands):
            raise AssertionError(f"no way to trace the instruction {stmt.name}")

    def run(self, operand: Operand, count: Expr, is_store: bool) -> None:
        offset: Expr = const(0)
        for index, size in zip(operand.origin, operand.buffer.shape, strict=True):
            offset = offset * size + index
        assert isinstance(count, Const)
        size = int(count.value) * operand.buffer.dtype.bytes
        self.touch_at(operand.buffer, self.at[operand.buffer], simplify(offset), size, is_store, None)

    def name(self, axis: Axis) -> str:
        return self.names.setdefault(axis, f"i{len(self.names)}")

    def c(self, value: Expr | int) -> str:
        if isinstance(value, int):
            return str(value)
        if isinstance(value, Const):
            return str(int(value.value))
        if isinstance(value, Var):
            return self.name(value.axis)
        if isinstance(value, Load):
            return "0"  # data decides: the first place will do
        assert isinstance(value, Op), value
        args = [self.c(a) for a in value.args]
        name = value.op.name
        calls = {"floordiv": "fdiv", "mod": "fmod_", "min": "lo", "max": "hi"}
        signs = {"add": "+", "sub": "-", "mul": "*", "lt": "<", "le": "<=", "eq": "==", "ne": "!=", "and": "&&",
                 "or": "||"}  # fmt: skip
        if name in calls:
            return f"{calls[name]}({args[0]}, {args[1]})"
        if name in signs:
            return f"({args[0]} {signs[name]} {args[1]})"
        if name == "select":
            return f"({args[0]} ? {args[1]} : {args[2]})"
        if name == "not":
            return f"(!{args[0]})"
        if name == "neg":
            return f"(-{args[0]})"
        if name == "cast":
            return args[0]
        raise AssertionError(f"no way to write {name}")
