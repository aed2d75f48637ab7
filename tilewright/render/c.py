"""Loops to C with GNU vector types: one function a kernel, called once for every tile.

A VECTOR loop becomes vector values: contiguous accesses are vector loads and stores, uniform values are broadcast,
anything else is put together lane by lane.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from tilewright.errors import InternalError
from tilewright.intrinsics.cpu import CPU
from tilewright.intrinsics.table import check, check_registers
from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import const, substitute
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
    Stmt,
    Store,
)
from tilewright.render import c_bytes, c_convert, c_guarded, c_math, c_part, c_transpose
from tilewright.render.c_address import constants, element_name, flat, lane_stride, whole_vector
from tilewright.render.c_chains import RegisterCall, calls_together
from tilewright.render.c_expressions import CExpressions
from tilewright.render.c_scope import LoopScope
from tilewright.render.c_text import (
    TYPES,
    element_type,
    mask_dtype,
    once,
    prelude,
    vector_name,
)

_MOST_INLINED = 24  # calls of a function in a kernel; beyond, a call costs less than the text of another copy
_ARGUMENTS = "void *const *buffers, const int64_t *extents, int64_t tile, char *scratch"


class CKernel(CExpressions):
    """Writes one kernel: its frame and its statements."""

    def __init__(self, kernel: Kernel, scratch_offsets: dict[Buffer, int], dialect: str = "c") -> None:
        super().__init__(kernel)
        self.scratch_offsets = scratch_offsets
        self.dialect = dialect
        self.tiles: list[Buffer] = []  # matrix registers in use; the place is the number
        self.registers: set[str] = set()  # names of the register elements around the statement being written
        self.calls_made: Counter[tuple[str, int, int]] = Counter()  # by function, lanes and calls together
        self.used_instructions: dict[str, None] = {}  # what must be declared for them, in order

    # --- frame

    def text(self) -> str:
        for position, buffer in enumerate(self.kernel.params):
            self.emit(f"{TYPES[buffer.dtype.name]} *restrict {buffer.name} = buffers[{position}];")
        for position, symbol in enumerate(self.kernel.symbols):
            self.emit(f"const int64_t {symbol.name} = extents[{position}];")
        outermost = self.scopes.open(self.depth)
        if self.kernel.step is not None:
            self.names[self.kernel.step] = "step"
            self.scopes.bind(self.kernel.step)
            self.emit(f"const int64_t step = extents[{len(self.kernel.symbols)}];")
        self.lines.append(outermost)
        self.block(self.kernel.body)
        head = f"void {self.kernel.name}({_ARGUMENTS}) {{\n"
        lines = [
            line for part in self.lines for line in (part.declarations if isinstance(part, LoopScope) else (part,))
        ]
        instructions = "".join(once(text) for text in self.used_instructions if text)
        called, statements = self.called_functions("\n".join(lines))
        body = instructions + self.vector_types() + called + head + statements + "\n}\n"
        return prelude(body) + body

    def called_functions(self, statements: str) -> tuple[str, str]:
        """Functions that many statements call are called, not written out for each; the statements that call them."""
        texts = ""
        for (name, lanes, count), calls in self.calls_made.items():
            if calls > _MOST_INLINED:
                kind = vector_name(dtypes.float32, lanes)
                texts += once(c_math.called(name, kind, count))
                statements = statements.replace(f"tw_{name}_{kind}(", f"{c_math.called_name(name, kind)}(")
        return texts, statements

    def vector_types(self) -> str:
        out: list[str] = []
        declared: set[str] = set()

        def declare(dtype: DType, lanes: int) -> None:
            name = vector_name(dtype, lanes)
            if name in declared:
                return
            declared.add(name)
            kind, size = element_type(dtype), f"vector_size({lanes * dtype.bytes})"
            out.append(f"typedef {kind} {name} __attribute__(({size}));\n")
            out.append(f"typedef {kind} {name}u __attribute__(({size}, aligned({dtype.bytes}), may_alias));\n")

        conversions = sorted(self.used_conversions, key=c_convert.name)
        packings = sorted(self.used_packings, key=c_bytes.name)
        vectors = self.used_vectors.union(*map(c_convert.vectors, conversions), *map(c_bytes.vectors, packings))
        for dtype, lanes in sorted(vectors, key=lambda p: (p[0].name, p[1])):
            declare(dtype, lanes)
            declare(mask_dtype(dtype), lanes)
        out.extend(once(c_convert.text(each)) for each in conversions)
        for dtype, lanes in sorted(self.used_parts, key=lambda p: (p[0].name, p[1])):
            out.append(once(c_part.functions(element_type(dtype), vector_name(dtype, lanes), lanes)))
        for dtype, whole, lanes, start in sorted(self.used_slices, key=lambda s: (s[0].name, *s[1:])):
            declare(dtype, whole)
            slices = c_part.slice_function(vector_name(dtype, whole), vector_name(dtype, lanes), lanes, start)
            out.append(once(slices))
        for dtype, lanes in sorted(self.used_squares, key=lambda p: (p[0].name, p[1])):
            declare(dtype, lanes)
            declare(mask_dtype(dtype), lanes)
            squares = c_transpose.functions(vector_name(dtype, lanes), vector_name(mask_dtype(dtype), lanes), lanes)
            out.append(once(squares))
        out.extend([c_bytes.PRELUDE] if packings else [])
        out.extend(once(c_bytes.text(each)) for each in packings)
        for (name, lanes), used in sorted(self.used_math.items()):
            dtype = dtypes.by_name(name)
            declare(dtype, lanes)
            declare(mask_dtype(dtype), lanes)
            out.append(c_math.text(used, vector_name(dtype, lanes), vector_name(mask_dtype(dtype), lanes), lanes))
        for dtype, lanes in sorted(self.used_insides, key=lambda p: (p[0].name, p[1])):
            out.append(once(c_guarded.inside(vector_name(dtype, lanes), dtype, lanes)))
        for dtype, lanes in sorted(self.used_runs, key=lambda p: (p[0].name, p[1])):
            kind, mask = vector_name(dtype, lanes), vector_name(mask_dtype(dtype), lanes)
            out.append(once(c_guarded.read(element_type(dtype), kind, mask, dtype, lanes)))
        return "".join(out)

    # --- statements

    def block(self, body: tuple[Stmt, ...]) -> None:
        position = 0
        while position < len(body):
            calls = calls_together(body[position : position + c_math.MOST_TOGETHER])
            if len(calls) > 1:
                self.call_together(calls)
                position += len(calls)
                continue
            together = c_bytes.side_by_side(body[position : position + c_bytes.MOST])
            if len(together) > 1:
                self.store_bytes(together)
            else:
                self.statement(body[position])
            position += max(1, len(together))

    def call_together(self, calls: list[RegisterCall]) -> None:
        name, lanes = c_math.together(calls[0].name, len(calls)), whole_vector(calls[0].lanes)
        self.used_math.setdefault((dtypes.float32.name, lanes), set()).add(name)
        self.calls_made[name, lanes, len(calls)] += 1
        arguments = ", ".join([c.argument for c in calls] + [f"&{c.result}" for c in calls])
        self.emit(f"tw_{name}_{vector_name(dtypes.float32, lanes)}({arguments});")

    def store_bytes(self, together: list[For]) -> None:
        """One store of what several vectors hold."""
        texts: list[str] = []
        added = 0
        lanes = 0
        for stmt in together:
            store = stmt.body[0]
            assert isinstance(store, Store)
            self.lane = stmt.axis
            lanes = self.width
            found = c_bytes.rounded(store.value)
            value = None if found is None else self.vector(found.value)
            if found is None or value is None:
                self.lane = None
                for each in together:
                    self.statement(each)
                return
            added = found.added
            texts.append(self.splat(found.value, value, lanes))
        first = together[0].body[0]
        assert isinstance(first, Store)
        self.lane = together[0].axis
        place = self.lane_offsets(flat(first.buffer, first.indices), 1, 1)[0]
        self.lane = None
        dtype = first.buffer.dtype
        kind = vector_name(dtype, lanes * len(together))
        self.used_vectors.add((dtype, lanes * len(together)))
        packed = self.packed((dtype, lanes, len(together)), texts, added)
        self.emit(f"*({kind}u *)({first.buffer.name} + {place}) = {packed};")
        self.held = {}

    def statement(self, stmt: Stmt) -> None:
        if not isinstance(stmt, Store) and not (isinstance(stmt, For) and stmt.kind is ForKind.VECTOR):
            self.held = {}
        if isinstance(stmt, For):
            self.loop(stmt)
        elif isinstance(stmt, If):
            self.emit(f"if ({self.scalar(stmt.condition)}) {{")
            self.indented(stmt.then)
            if stmt.otherwise:
                self.emit("} else {")
                self.indented(stmt.otherwise)
            self.emit("}")
        elif isinstance(stmt, Alloc):
            self.alloc(stmt)
        elif isinstance(stmt, Store):
            self.store(stmt)
        elif isinstance(stmt, Barrier):
            raise InternalError(f"{self.kernel.name}: a CPU kernel has no barrier inside")
        else:
            self.instruction(stmt)

    def instruction(self, stmt: Instruction) -> None:
        row = CPU.get(stmt.name)
        if row is None:
            raise InternalError(f"{self.kernel.name}: no C for instruction {stmt.name}")
        check(row, stmt)
        check_registers(row, stmt)
        texts = {f"scalar{i}": self.scalar(simplify(s)) for i, s in enumerate(stmt.scalars)}
        for i, operand in enumerate(stmt.operands):
            buffer = operand.buffer
            texts[f"type{i}"] = TYPES[buffer.dtype.name]
            if buffer.memory is Memory.TILE:
                texts[f"tile{i}"] = buffer.name if self.dialect == "portable" else str(self.tiles.index(buffer))
            elif buffer.memory is Memory.REGISTER:
                texts[f"element{i}"] = element_name(buffer, constants(operand.origin[:-1]))
            else:
                texts[f"place{i}"] = f"({buffer.name} + {self.scopes.offset(flat(buffer, operand.origin))})"
        self.used_instructions[row.prelude.get(self.dialect, "")] = None
        text = row.text[self.dialect].format(**texts)
        if text:
            self.emit(text)

    def indented(self, body: tuple[Stmt, ...]) -> None:
        self.depth += 1
        self.block(body)
        self.depth -= 1
        self.held = {}

    def loop(self, stmt: For) -> None:
        if stmt.kind is ForKind.PARALLEL:
            self.names[stmt.axis] = "tile"
            self.scopes.bind(stmt.axis)
            self.block(stmt.body)
            return
        if stmt.kind is ForKind.VECTOR:
            self.lane = stmt.axis
            self.block(stmt.body)
            self.lane = None
            return
        if stmt.kind is not ForKind.SERIAL:
            raise InternalError(f"{self.kernel.name}: a {stmt.kind.value} loop reached the C renderer")
        extent = stmt.axis.extent
        limit = str(extent) if isinstance(extent, int) else self.scalar(extent)
        name = self.name(stmt.axis)
        self.emit(f"for (int64_t {name} = 0; {name} < {limit}; ++{name}) {{")
        self.lines.append(self.scopes.open(self.depth + 1, stmt.axis))
        self.indented(stmt.body)
        self.scopes.close()
        self.emit("}")

    def alloc(self, stmt: Alloc) -> None:
        buffer = stmt.buffer
        if buffer.memory is Memory.SCRATCH:
            kind = TYPES[buffer.dtype.name]
            # not restrict: buffers that are never alive together share bytes
            self.emit(f"{kind} *{buffer.name} = ({kind} *)(scratch + {self.scratch_offsets[buffer]});")
            self.block(stmt.body)
            return
        if buffer.memory is Memory.TILE:
            if self.dialect == "portable":
                self.emit(f"tw_tile {buffer.name};")
            self.tiles.append(buffer)
            self.block(stmt.body)
            self.tiles.remove(buffer)
            return
        self.emit("{")
        self.depth += 1
        names, body = self.declared(buffer), stmt.body
        while len(body) == 1 and isinstance(body[0], Alloc) and body[0].buffer.memory is Memory.REGISTER:
            names += self.declared(body[0].buffer)  # in the same block: compilers take some hundred inside each other
            body = body[0].body
        self.block(body)
        self.registers.difference_update(names)
        self.held = {}
        self.depth -= 1
        self.emit("}")

    def declared(self, buffer: Buffer) -> list[str]:
        """Names of the registers of a buffer."""
        lanes = self.lane_buffers.get(buffer)
        shape = buffer.shape[:-1] if lanes else buffer.shape
        names = [element_name(buffer, index) for index in np.ndindex(*shape)]  # type: ignore[arg-type]
        kind = TYPES[buffer.dtype.name]
        if lanes:
            self.used_vectors.add((buffer.dtype, lanes))
            kind = vector_name(buffer.dtype, lanes)
        if not self.registers.isdisjoint(names):
            raise InternalError(f"{self.kernel.name}: {buffer.name} would hide another register of the same name")
        self.registers.update(names)
        self.emit(f"{kind} {', '.join(names)};")
        return names

    def store(self, stmt: Store) -> None:
        if stmt.buffer.memory is Memory.REGISTER:
            self.store_register(stmt)
            return
        self.store_memory(stmt)
        self.held = {}

    def store_register(self, stmt: Store) -> None:
        if self.lane is None:
            bits = ".bits" if stmt.buffer in self.lane_buffers and stmt.buffer.dtype is dtypes.bfloat16 else ""
            self.emit(f"{self.place(stmt.buffer, stmt.indices)} = {self.value(stmt.value)}{bits};")
            return
        if not any(self.depends(i) for i in stmt.indices):
            text = self.vector(stmt.value) or self.by_lanes(stmt.value)
            self.emit(f"{self.place(stmt.buffer, stmt.indices)} = {text};")
            return
        lanes = self.width
        register = element_name(stmt.buffer, constants(stmt.indices[:-1]))
        text = self.vector(stmt.value, hold=True) or self.by_lanes(stmt.value)
        self.used_vectors.add((stmt.buffer.dtype, lanes))
        self.emit(f"{register} = {self.splat(stmt.value, text, lanes)};")

    def store_memory(self, stmt: Store) -> None:
        name = stmt.buffer.name
        if self.lane is None:
            value = self.value(stmt.value)
            self.emit(f"{self.place(stmt.buffer, stmt.indices)} = {value};")
            return
        lanes = self.width
        value_text = self.vector(stmt.value)
        offset = flat(stmt.buffer, stmt.indices)
        stride = lane_stride(offset, self.lane)
        if value_text is not None and stmt.value.dtype.kind != "b":
            self.used_vectors.add((stmt.buffer.dtype, lanes))
            kind = vector_name(stmt.buffer.dtype, lanes)
            whole = self.splat(stmt.value, value_text, lanes)
            contiguous = stride == 1 and self.count == lanes
            places = self.lane_offsets(offset, stride, 1 if contiguous else self.count)
            if contiguous:
                self.emit(f"*({kind}u *)({name} + {places[0]}) = {whole};")
                return
            if stride == 1 and self.count > 2 and c_part.is_maskable(stmt.buffer.dtype, lanes):
                self.used_parts.add((stmt.buffer.dtype, lanes))
                self.emit(f"tw_keep_{kind}({name} + {places[0]}, {whole}, {self.count});")
                return
            self.emit(f"{{ {kind} lanes = {whole};")
            for i, at in enumerate(places):
                self.emit(f"  {name}[{at}]{self.bits(stmt.value)} = lanes[{i}];")
            self.emit("}")
            return
        lane, self.lane = self.lane, None
        places = self.lane_offsets(offset, stride, int(lane.extent), lane)  # type: ignore[arg-type]
        for i, at in enumerate(places):
            self.emit(f"{name}[{at}] = {self.value(substitute(stmt.value, {lane: const(i)}))};")
        self.lane = lane


def render_as(name: str, same: str) -> str:
    """A kernel that does what another does."""
    declared = f"void {same}({_ARGUMENTS});\n"
    return prelude("") + declared + f"void {name}({_ARGUMENTS}) {{\n    {same}(buffers, extents, tile, scratch);\n}}\n"


def render_kernel(kernel: Kernel, scratch_offsets: dict[Buffer, int], dialect: str = "c") -> str:
    """The C text; the dialect "portable" spells instructions of other machines by what they mean."""
    return CKernel(kernel, scratch_offsets, dialect).text()
