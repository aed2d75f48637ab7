"""Loops to C with GNU vector types: one function a kernel, called once for every tile.

A VECTOR loop becomes vector values: contiguous accesses are vector loads and stores, uniform values are broadcast,
anything else is put together lane by lane.
"""

from __future__ import annotations

from math import prod

import numpy as np

from tilewright.errors import InternalError
from tilewright.intrinsics.cpu import CPU
from tilewright.intrinsics.table import check
from tilewright.ir import dtypes
from tilewright.ir.bounds import bounds
from tilewright.ir.dtypes import DType
from tilewright.ir.expr import Axis, Const, Expr, Load, Op, State, Symbol, Var, const, loads, substitute, var
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
    Stmt,
    Store,
    statements,
)
from tilewright.ir.simplify import Linear, linear, simplify
from tilewright.render import c_bytes, c_convert, c_math, c_transpose
from tilewright.render.c_address import constants, element_name, flat, lane_buffers, lane_stride, whole_vector
from tilewright.render.c_pairs import register_call
from tilewright.render.c_scope import Scope, Scopes
from tilewright.render.c_text import (
    INFIX,
    MASK_INFIX,
    TYPES,
    cast,
    element_type,
    literal,
    mask_dtype,
    prelude,
    scalar_call,
    vector_name,
)


class CKernel:
    """Writes one kernel."""

    def __init__(self, kernel: Kernel, scratch_offsets: dict[Buffer, int], dialect: str = "c") -> None:
        self.kernel = kernel
        self.scratch_offsets = scratch_offsets
        self.lines: list[str | Scope] = []
        self.depth = 1
        self.names: dict[Axis, str] = {}
        self.taken: dict[str, int] = {}
        self.reserved = {b.name for b in kernel.params}
        self.reserved |= {s.buffer.name for s in statements(kernel.body) if isinstance(s, Alloc)}
        self.scopes = Scopes(self.scalar, self.fresh)
        self.held: dict[Expr, str] = {}  # vectors read from memory since the last store to memory, by name
        self.lane: Axis | None = None
        self.lane_buffers = lane_buffers(kernel)
        self.used_math: dict[tuple[str, int], set[str]] = {}
        self.used_vectors: set[tuple[DType, int]] = set()
        self.used_conversions: set[c_convert.Conversion] = set()
        self.used_squares: set[tuple[DType, int]] = set()
        self.used_packings: set[c_bytes.Packing] = set()
        self.dialect = dialect
        self.tiles: list[Buffer] = []  # matrix registers in use; the place is the number
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
        arguments = "void *const *buffers, const int64_t *extents, int64_t tile, char *scratch"
        head = f"void {self.kernel.name}({arguments}) {{\n"
        lines = [line for part in self.lines for line in (part.declarations if isinstance(part, Scope) else (part,))]
        body = "".join(self.used_instructions) + self.vector_types() + head + "\n".join(lines) + "\n}\n"
        return prelude(body) + body

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
        out.extend(map(c_convert.text, conversions))
        for dtype, lanes in sorted(self.used_squares, key=lambda p: (p[0].name, p[1])):
            declare(dtype, lanes)
            declare(mask_dtype(dtype), lanes)
            out.append(c_transpose.functions(vector_name(dtype, lanes), vector_name(mask_dtype(dtype), lanes), lanes))
        out.extend([c_bytes.PRELUDE] if packings else [])
        out.extend(map(c_bytes.text, packings))
        for (name, lanes), used in sorted(self.used_math.items()):
            dtype = dtypes.by_name(name)
            declare(dtype, lanes)
            declare(mask_dtype(dtype), lanes)
            out.append(c_math.text(used, vector_name(dtype, lanes), vector_name(mask_dtype(dtype), lanes), lanes))
        return "".join(out)

    def emit(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    def name(self, axis: Axis) -> str:
        if axis not in self.names:
            self.names[axis] = self.fresh("".join(c if c.isalnum() or c == "_" else "_" for c in axis.name))
        return self.names[axis]

    def fresh(self, stem: str) -> str:
        while True:
            count = self.taken.get(stem, 0)
            self.taken[stem] = count + 1
            name = f"{stem}_{count}"
            if name not in self.reserved:
                return name

    # --- statements

    def block(self, body: tuple[Stmt, ...]) -> None:
        position = 0
        while position < len(body):
            if position + 1 < len(body) and self.pair(body[position], body[position + 1]):
                position += 2
                continue
            together = c_bytes.side_by_side(body[position : position + c_bytes.MOST])
            if len(together) > 1:
                self.store_bytes(together)
            else:
                self.statement(body[position])
            position += max(1, len(together))

    def pair(self, first: Stmt, second: Stmt) -> bool:
        """Two calls of one function that stand together are written as one; whether these were."""
        calls = register_call(first), register_call(second)
        if calls[0] is None or calls[1] is None or calls[0].name != calls[1].name or calls[0].lanes != calls[1].lanes:
            return False
        name, lanes = calls[0].name, whole_vector(calls[0].lanes)
        self.used_math.setdefault((dtypes.float32.name, lanes), set()).add(f"{name}_pair")
        arguments = ", ".join([c.argument for c in calls if c] + [f"&{c.result}" for c in calls if c])
        self.emit(f"tw_{name}_pair_{vector_name(dtypes.float32, lanes)}({arguments});")
        return True

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

    def packed(self, packing: c_bytes.Packing, texts: list[str], added: int) -> str:
        self.used_packings.add(packing)
        text = f"{c_bytes.name(packing)}({', '.join(texts)})"
        dtype, lanes, count = packing
        # bytes wrap around, so that either reading of them may be added
        more = (added + 128) % 256 - 128 if dtype is dtypes.int8 else added % 256
        kind = vector_name(dtype, lanes * count)
        return f"({text} + ({kind}){{{', '.join([str(more)] * (lanes * count))}}})" if more else text

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
        lanes = self.lane_buffers.get(buffer)
        shape = buffer.shape[:-1] if lanes else buffer.shape
        names = [element_name(buffer, index) for index in np.ndindex(*shape)]  # type: ignore[arg-type]
        kind = TYPES[buffer.dtype.name]
        if lanes:
            self.used_vectors.add((buffer.dtype, lanes))
            kind = vector_name(buffer.dtype, lanes)
        self.emit(f"{kind} {', '.join(names)};")
        self.block(stmt.body)
        self.held = {}
        self.depth -= 1
        self.emit("}")

    def store(self, stmt: Store) -> None:
        if stmt.buffer.memory is Memory.REGISTER:
            self.store_register(stmt)
            return
        self.store_memory(stmt)
        self.held = {}

    def store_register(self, stmt: Store) -> None:
        if self.lane is None:
            bits = ".bits" if stmt.buffer in self.lane_buffers and stmt.buffer.dtype is dtypes.bfloat16 else ""
            self.emit(f"{self.place(stmt.buffer, stmt.indices)} = {self.scalar(stmt.value)}{bits};")
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
            value = self.scalar(stmt.value)
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
            self.emit(f"{{ {kind} lanes = {whole};")
            for i, at in enumerate(places):
                self.emit(f"  {name}[{at}]{self.bits(stmt.value)} = lanes[{i}];")
            self.emit("}")
            return
        lane, self.lane = self.lane, None
        places = self.lane_offsets(offset, stride, int(lane.extent), lane)  # type: ignore[arg-type]
        for i, at in enumerate(places):
            self.emit(f"{name}[{at}] = {self.scalar(substitute(stmt.value, {lane: const(i)}))};")
        self.lane = lane

    def lane_offsets(self, offset: Linear, stride: int | None, count: int, lane: Axis | None = None) -> list[str]:
        """Texts of the offset on the first `count` lanes."""
        lane = lane or self.lane
        assert lane is not None
        if stride is not None:
            still = Linear({t: c for t, c in offset.terms.items() if t is not var(lane)}, offset.constant)
            return [self.scopes.offset(still, stride * i) for i in range(count)]
        whole = offset.expr()
        return [self.scopes.offset(linear(simplify(substitute(whole, {lane: const(i)})))) for i in range(count)]

    def place(self, buffer: Buffer, indices: tuple[Expr, ...]) -> str:
        if buffer.memory is Memory.REGISTER:
            position = constants(indices)
            if buffer in self.lane_buffers:
                return f"{element_name(buffer, position[:-1])}[{position[-1]}]"
            return element_name(buffer, position)
        return f"{buffer.name}[{self.scopes.offset(flat(buffer, indices))}]"

    # --- scalar expressions

    def scalar(self, value: Expr) -> str:
        texts = self.scopes.inner.texts
        stack = [value]
        while stack:
            node = stack[-1]
            if node not in texts:
                waiting = [] if isinstance(node, Load) else [a for a in node.args if a not in texts]
                if waiting:
                    stack.extend(waiting)
                    continue
                texts[node] = self.scalar_node(node, texts)
            stack.pop()
        return texts[value]

    def scalar_node(self, node: Expr, done: dict[Expr, str]) -> str:
        if isinstance(node, Const):
            return literal(node)
        if isinstance(node, Var):
            return self.name(node.axis)
        if isinstance(node, Symbol):
            return node.name
        if isinstance(node, Load):
            place = self.place(node.source, node.indices)
            if node.dtype is dtypes.bfloat16 and node.source in self.lane_buffers:
                return f"((tw_bf16){{{place}}})"
            return place
        if isinstance(node, State):
            raise InternalError(f"{self.kernel.name}: state {node.name} left in an expression")
        assert isinstance(node, Op)
        args = [done[a] for a in node.args]
        name = node.op.name
        if name == "cast":
            return cast(args[0], node.args[0].dtype, node.dtype)
        operand = node.args[-1].dtype
        if name in ("floordiv", "mod") and node.dtype.is_int:
            low, _ = bounds(node.args[0])
            divisor_low, _ = bounds(node.args[1])
            if low >= 0 and divisor_low > 0:
                return f"({args[0]} {'/' if name == 'floordiv' else '%'} {args[1]})"
        if operand is dtypes.bfloat16:
            wide = [args[0], *(cast(a, operand, dtypes.float32) for a in args[1:])] if name == "select" else [
                cast(a, operand, dtypes.float32) for a in args]  # fmt: skip
            text = self.scalar_operation(name, wide, dtypes.float32)
            return text if node.dtype.kind == "b" else cast(text, dtypes.float32, operand)
        return self.scalar_operation(name, args, operand)

    def scalar_operation(self, name: str, args: list[str], operand: DType) -> str:
        if name not in c_math.TRANSCENDENTAL or operand is dtypes.float64:
            return scalar_call(name, args, operand)
        self.used_math.setdefault((dtypes.float32.name, c_math.LEAST_LANES), set()).add(name)
        kind = vector_name(dtypes.float32, c_math.LEAST_LANES)
        return f"tw_{name}_{kind}({', '.join(f'({kind}){{{a}}}' for a in args)})[0]"

    # --- vector expressions

    def vector(self, value: Expr, hold: bool = False) -> str | None:
        """The value on all lanes: a scalar text when it is the same on every lane, None when it has no vector form.

        `hold` gives names to what is read from memory, for the statements that follow.
        """
        assert self.lane is not None
        done: dict[Expr, str | None] = {}
        certain = self.always_evaluated(value) if hold else set()
        stack = [value]
        while stack:
            node = stack[-1]
            if node not in done:
                waiting = [a for a in self.vector_operands(node) if a not in done]
                if waiting:
                    stack.extend(reversed(waiting))
                    continue
                held = node in certain and self.holdable(node)
                done[node] = self.hold(node) if held else self.vector_node(node, done)
            stack.pop()
        return done[value]

    @property
    def count(self) -> int:
        """Lanes in use."""
        assert self.lane is not None
        return int(self.lane.extent)  # type: ignore[arg-type]

    @property
    def width(self) -> int:
        """Lanes of the registers: a partly filled vector takes the next power of two."""
        return whole_vector(self.count)

    def depends(self, node: Expr) -> bool:
        return self.lane in node.axes

    def vector_operands(self, node: Expr) -> tuple[Expr, ...]:
        """The operands that need a vector form before the node can have one."""
        if not isinstance(node, Op) or not self.depends(node) or self.lanes_only(node):
            return ()
        return node.args

    def lanes_only(self, node: Op) -> bool:
        """Operations without a vector form: on narrow floats, between masks and numbers, on indices; guarded reads."""
        operand = node.args[-1].dtype
        name = node.op.name
        if name == "cast" and c_convert.needs_function(operand, node.dtype):
            return False
        if name == "select" and operand is dtypes.bfloat16:
            return self.depends(node.args[0])
        if operand in (dtypes.bfloat16, dtypes.float16):
            return True
        if name == "cast":
            return node.dtype.kind == "b" or operand.kind == "b" or node.dtype in (dtypes.bfloat16, dtypes.float16)
        if name == "select":
            return self.depends(node.args[0]) and self.guards_reads(node)
        return node.dtype is dtypes.index and operand is dtypes.index

    def guards_reads(self, node: Op) -> bool:
        condition, then, otherwise = node.args
        if node.dtype is dtypes.float64 or self.mask_width(condition) != node.dtype.bits:
            return True
        reads_memory = any(x.source.memory is not Memory.REGISTER for x in loads(then, otherwise))
        return reads_memory and self.compares_places(condition)

    def compares_places(self, condition: Expr) -> bool:
        """Whether a condition is about indices, not about what is read at them or numbers made of them."""
        stack = [condition]
        while stack:
            node = stack.pop()
            if node.dtype is dtypes.index:
                return True
            if not isinstance(node, Load) and not (isinstance(node, Op) and node.op.name == "cast"):
                stack.extend(node.args)
        return False

    def always_evaluated(self, value: Expr) -> set[Expr]:
        """Nodes that no condition keeps from being evaluated."""
        found: set[Expr] = set()
        stack = [value]
        while stack:
            node = stack.pop()
            if node in found:
                continue
            found.add(node)
            operands = self.vector_operands(node)
            stack.extend(operands[:1] if isinstance(node, Op) and node.op.name == "select" else operands)
        return found

    def holdable(self, node: Expr) -> bool:
        """Plain reads of memory: the same until the next store to memory."""
        if self.is_widened(node):
            node = node.args[0]
        if not isinstance(node, Load) or node.source.memory is Memory.REGISTER or node.dtype.kind == "b":
            return False
        return not any(i.reads for i in node.indices)

    def is_widened(self, node: Expr) -> bool:
        """A read that is converted on the way: kept in the type that is computed with."""
        if not isinstance(node, Op) or node.op.name != "cast" or not isinstance(node.args[0], Load):
            return False
        return c_convert.needs_function(node.args[0].dtype, node.dtype) and node.dtype.bits > node.args[0].dtype.bits

    def hold(self, node: Expr) -> str | None:
        assert self.lane is not None
        if node not in self.held:
            lanes = self.width
            text: str | None
            if not self.depends(node):
                text = self.splat(node, self.scalar(node), lanes)
            elif isinstance(node, Load):
                text = self.vector_load(node, lanes)
            else:
                text = self.vector_node(node, {a: self.hold(a) for a in node.args})
            if text is None:
                return None
            self.used_vectors.add((node.dtype, lanes))
            self.held[node] = self.fresh("x")
            self.emit(f"const {vector_name(node.dtype, lanes)} {self.held[node]} = {text};")
        return self.held[node]

    def vector_node(self, node: Expr, done: dict[Expr, str | None]) -> str | None:
        assert self.lane is not None
        if not self.depends(node):
            return self.scalar(node)
        lanes = self.width
        if isinstance(node, Var):
            return None
        if isinstance(node, Load):
            return self.vector_load(node, lanes)
        assert isinstance(node, Op)
        name = node.op.name
        operand = node.args[-1].dtype
        if self.lanes_only(node):
            plain_index = node.dtype is dtypes.index and name not in ("select", "cast")
            return None if node.dtype.kind == "b" or plain_index else self.by_lanes(node)
        if name == "cast" and operand is dtypes.index and node.dtype is dtypes.int32:
            return self.ramp(node, lanes)
        args = [done[a] for a in node.args]
        if any(a is None for a in args):
            return self.by_lanes(node) if node.dtype.kind != "b" else None
        if name == "select" and not self.depends(node.args[0]):
            a, b = (self.splat(e, t, lanes) for e, t in zip(node.args[1:], args[1:], strict=True))
            # an unaligned read has a type of its own, and both arms need the same
            kind = vector_name(node.dtype, lanes)
            return f"({args[0]} ? ({kind}){a} : ({kind}){b})"
        texts = [self.splat(a, t, lanes) for a, t in zip(node.args, args, strict=True)]
        if name == "select":
            self.used_math.setdefault((node.dtype.name, lanes), set()).add("select")
            return f"tw_select_{vector_name(node.dtype, lanes)}({', '.join(texts)})"
        if name == "cast":
            self.used_vectors.add((node.dtype, lanes))
            bytes_of = c_bytes.rounded(node)
            if bytes_of is not None and done.get(bytes_of.value) is not None:
                value = self.splat(bytes_of.value, done[bytes_of.value], lanes)
                return self.packed((node.dtype, lanes, 1), [value], bytes_of.added)
            if c_convert.needs_function(operand, node.dtype):
                self.used_conversions.add((operand, node.dtype, lanes))
                return f"{c_convert.name((operand, node.dtype, lanes))}({texts[0]})"
            return f"__builtin_convertvector({texts[0]}, {vector_name(node.dtype, lanes)})"
        if operand.kind == "b":
            if name in MASK_INFIX and self.mask_width(node) is not None:
                return f"({texts[0]} {MASK_INFIX[name]} {texts[1]})"
            return f"(~{texts[0]})" if name == "not" else None
        if name == "div" and operand.is_int and self.count < lanes:
            return self.by_lanes(node)  # the lanes not in use hold zeros
        if name in INFIX:
            return f"({texts[0]} {INFIX[name]} {texts[1]})"
        if name == "neg":
            return f"(-{texts[0]})"
        if name == "isnan":
            return f"({texts[0]} != {texts[0]})"
        if name == "round" and operand is dtypes.float32 and c_bytes.is_small(node.args[0]):
            return c_bytes.rounding(texts[0])
        if name in ("min", "max") and isinstance(node.args[1], Const) and node.args[1].value == node.args[1].value:
            name = f"{name}_constant" if operand is dtypes.float32 else name
        if name in c_math.FUNCTIONS and operand is dtypes.float32:
            self.used_math.setdefault((operand.name, lanes), set()).add(name)
            return f"tw_{name}_{vector_name(operand, lanes)}({', '.join(t for t in texts if t)})"
        if name in ("min", "max") and operand.is_int and operand.bits <= 32:
            self.used_math.setdefault((operand.name, lanes), set()).add(f"whole_{name}")
            return f"tw_whole_{name}_{vector_name(operand, lanes)}({', '.join(t for t in texts if t)})"
        return self.by_lanes(node) if node.dtype.kind != "b" else None

    def ramp(self, node: Op, lanes: int) -> str:
        """An index as a number on every lane: the first lane's, and steps from there."""
        assert self.lane is not None
        total = linear(simplify(node.args[0]))
        stride = lane_stride(total, self.lane)
        if stride is None:
            return self.by_lanes(node)
        self.used_vectors.add((node.dtype, lanes))
        still = Linear({t: c for t, c in total.terms.items() if t is not var(self.lane)}, total.constant)
        kind = vector_name(node.dtype, lanes)
        steps = ", ".join(str(stride * i) for i in range(lanes))
        return f"(((int32_t)({self.scopes.offset(still)}) - ({kind}){{}}) + ({kind}){{{steps}}})"

    def vector_load(self, node: Load, lanes: int) -> str | None:
        assert self.lane is not None
        if node.source.memory is Memory.REGISTER:
            if not self.depends(node.indices[-1]):
                return self.column(node, lanes)
            name = element_name(node.source, constants(node.indices[:-1]))
            if node.indices[-1] is var(self.lane) and self.lane_buffers.get(node.source, lanes) == lanes:
                return name
            # a part of a longer vector, which compilers know by its places
            start = linear(node.indices[-1]).constant
            self.used_vectors.add((node.dtype, lanes))
            parts = ", ".join(f"{name}[{start + i}]" for i in range(self.count))
            return f"(({vector_name(node.dtype, lanes)}){{{parts}}})"
        if node.dtype.kind == "b":
            return None
        offset = flat(node.source, node.indices)
        stride = lane_stride(offset, self.lane)
        self.used_vectors.add((node.dtype, lanes))
        kind = vector_name(node.dtype, lanes)
        if stride == 1 and (self.count == lanes or self.is_readable_past(node.source, offset, lanes)):
            return f"(*(const {kind}u *)({node.source.name} + {self.lane_offsets(offset, 1, 1)[0]}))"
        if stride == 2 and self.count == lanes and self.is_readable_past(node.source, offset, 2 * lanes):
            self.used_squares.add((node.dtype, lanes))
            first, *_, second = self.lane_offsets(offset, 2, lanes // 2 + 1)
            halves = (f"*(const {kind}u *)({node.source.name} + {at})" for at in (first, second))
            return f"tw_even_{kind}({', '.join(halves)})"
        reads = [f"{node.source.name}[{at}]{self.bits(node)}" for at in self.lane_offsets(offset, stride, self.count)]
        return f"(({kind}){{{', '.join(reads)}}})"

    def column(self, node: Load, lanes: int) -> str:
        """A column of a square of vectors: lane i is from row i."""
        if node.indices[-2] is not var(self.lane) or node.source.shape[-2:] != (lanes, lanes):  # type: ignore[arg-type]
            raise InternalError(f"{self.kernel.name}: {node} is no column of a square")
        *lead, number = constants((*node.indices[:-2], node.indices[-1]))
        kind = vector_name(node.dtype, lanes)
        self.used_squares.add((node.dtype, lanes))
        rows = [element_name(node.source, (*lead, row)) for row in range(lanes)]
        return c_transpose.column(rows, number, kind)

    def is_readable_past(self, buffer: Buffer, offset: Linear, lanes: int) -> bool:
        """Whether a whole vector from the first lane's offset stays inside the buffer; the surplus is never used."""
        if not all(isinstance(e, int) for e in buffer.shape):
            return False
        still = Linear({t: c for t, c in offset.terms.items() if t is not var(self.lane)}, offset.constant)  # type: ignore[arg-type]
        return bool(bounds(still.expr())[1] + lanes <= prod(buffer.shape))  # type: ignore[operator]

    def mask_width(self, condition: Expr) -> int | None:
        """Bits of the elements of a mask, when all its comparisons agree."""
        widths: set[int | None] = set()
        stack = [condition]
        while stack:
            node = stack.pop()
            if isinstance(node, Op) and node.op.name in ("and", "or", "not"):
                stack.extend(node.args)
            elif isinstance(node, Op) and self.depends(node):
                widths.add(node.args[0].dtype.bits if node.args[0].dtype.kind != "b" else None)
            else:
                widths.add(None)
        return widths.pop() if len(widths) == 1 else None

    def splat(self, value: Expr, text: str | None, lanes: int) -> str:
        assert text is not None
        if self.depends(value) or text == self.held.get(value):
            return text
        self.used_vectors.add((value.dtype, lanes))
        kind = vector_name(value.dtype, lanes)
        if isinstance(value, Const):
            return f"(({kind}){{{', '.join([text + self.bits(value)] * lanes)}}})"
        return f"(({text}){self.bits(value)} - ({kind}){{}})"

    def bits(self, value: Expr) -> str:
        """Behind a scalar that goes into a lane: a bfloat16 is a struct outside of vectors."""
        return ".bits" if value.dtype is dtypes.bfloat16 else ""

    def by_lanes(self, node: Expr) -> str:
        """A vector put together from scalars."""
        texts = self.lane_texts(node)
        self.used_vectors.add((node.dtype, self.width))
        return f"(({vector_name(node.dtype, self.width)}){{{', '.join(t + self.bits(node) for t in texts)}}})"

    def lane_texts(self, node: Expr) -> list[str]:
        """The scalar on every lane."""
        assert self.lane is not None
        lane, self.lane = self.lane, None
        lanes = range(int(lane.extent))  # type: ignore[arg-type]
        texts = [self.scalar(simplify(substitute(node, {lane: const(i)}))) for i in lanes]
        self.lane = lane
        return texts


def render_kernel(kernel: Kernel, scratch_offsets: dict[Buffer, int], dialect: str = "c") -> str:
    """The C text; the dialect "portable" spells instructions of other machines by what they mean."""
    return CKernel(kernel, scratch_offsets, dialect).text()
