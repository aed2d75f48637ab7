"""Loops to C with GNU vector types: one function a kernel, called once for every tile.

A VECTOR loop becomes vector values: contiguous accesses are vector loads and stores, uniform values are broadcast,
anything else is put together lane by lane.
"""

from __future__ import annotations

import math

import numpy as np

from tilewright.errors import InternalError
from tilewright.ir import dtypes
from tilewright.ir.bounds import bounds
from tilewright.ir.dtypes import DType
from tilewright.ir.expr import Axis, Const, Expr, Load, Op, State, Symbol, Var, axes_of, const, loads, substitute, walk
from tilewright.ir.loops import Alloc, Barrier, Buffer, For, ForKind, If, Kernel, Memory, Stmt, Store, statements, stmt_exprs
from tilewright.ir.simplify import linear, simplify
from tilewright.render import c_math

_TYPES = {
    "float32": "float", "float64": "double", "float16": "_Float16", "bfloat16": "tw_bf16", "bool": "uint8_t",
    "int8": "int8_t", "int16": "int16_t", "int32": "int32_t", "int64": "int64_t",
    "uint8": "uint8_t", "uint16": "uint16_t", "uint32": "uint32_t", "uint64": "uint64_t",
}  # fmt: skip

_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "eq": "==", "ne": "!=",
          "and": "&&", "or": "||"}  # fmt: skip
_MASK_INFIX = {"and": "&", "or": "|"}
_LIBM = {"exp": "exp", "log": "log", "sqrt": "sqrt", "tanh": "tanh", "erf": "erf", "sin": "sin", "cos": "cos",
         "floor": "floor", "ceil": "ceil", "round": "nearbyint", "trunc": "trunc", "pow": "pow", "fmod": "fmod"}  # fmt: skip

_PRELUDE = """#include <stdint.h>
#include <math.h>
typedef struct { uint16_t bits; } tw_bf16;
static inline float tw_from_bf16(tw_bf16 x) { union { uint32_t u; float f; } v = { (uint32_t)x.bits << 16 }; return v.f; }
static inline tw_bf16 tw_to_bf16(float x) {
    union { float f; uint32_t u; } v = { x };
    if (x != x) return (tw_bf16){ (uint16_t)((v.u >> 16) | 0x40) };
    return (tw_bf16){ (uint16_t)((v.u + 0x7fff + ((v.u >> 16) & 1)) >> 16) };
}
#define tw_floordiv(a, b) ({ __auto_type _a = (a); __auto_type _b = (b); __auto_type _q = _a / _b; \\
    _q - ((_a % _b != 0) && ((_a < 0) != (_b < 0))); })
#define tw_mod(a, b) ({ __auto_type _a = (a); __auto_type _b = (b); __auto_type _r = _a % _b; \\
    _r + ((_r != 0) && ((_r < 0) != (_b < 0)) ? _b : 0); })
#define tw_max(a, b) ({ __auto_type _a = (a); __auto_type _b = (b); (_a > _b) || (_a != _a) ? _a : _b; })
#define tw_min(a, b) ({ __auto_type _a = (a); __auto_type _b = (b); (_a < _b) || (_a != _a) ? _a : _b; })
#define tw_abs(a) ({ __auto_type _a = (a); _a < 0 ? -_a : _a; })
#define tw_sign(a) ({ __auto_type _a = (a); _a != _a ? _a : (__typeof__(_a))((_a > 0) - (_a < 0)); })
"""


def scalar_call(name: str, args: list[str], dtype: DType) -> str:
    """A row of the scalar table, on C scalars."""
    if name in _INFIX:
        return f"({args[0]} {_INFIX[name]} {args[1]})"
    if name == "select":
        return f"({args[0]} ? {args[1]} : {args[2]})"
    if name == "neg":
        return f"(-{args[0]})"
    if name == "not":
        return f"(!{args[0]})"
    if name in ("floordiv", "mod", "min", "max", "sign"):
        return f"tw_{name}({', '.join(args)})"
    if name == "abs":
        return f"fabs{_suffix(dtype)}({args[0]})" if dtype.is_float else f"tw_abs({args[0]})"
    if name == "fmod" and dtype.is_int:
        return f"({args[0]} % {args[1]})"
    if name == "rsqrt":
        return f"(1 / sqrt{_suffix(dtype)}({args[0]}))"
    if name == "sigmoid":
        return f"(1 / (1 + exp{_suffix(dtype)}(-{args[0]})))"
    if name in ("isnan", "isinf"):
        return f"({args[0]} != {args[0]})" if name == "isnan" else f"(__builtin_isinf({args[0]}) != 0)"
    if name in _LIBM:
        return f"{_LIBM[name]}{_suffix(dtype)}({', '.join(args)})"
    raise InternalError(f"the C renderer does not spell {name}")


def _suffix(dtype: DType) -> str:
    return "" if dtype is dtypes.float64 else "f"


def literal(value: Const) -> str:
    if value.dtype.kind == "b":
        return "1" if value.value else "0"
    if value.dtype.is_int:
        return str(value.value) if abs(value.value) < 1 << 31 else f"INT64_C({value.value})" if value.value != -(1 << 63) else "INT64_MIN"
    number = float(value.value)
    if math.isnan(number):
        return "NAN"
    if math.isinf(number):
        return "INFINITY" if number > 0 else "(-INFINITY)"
    if value.dtype is dtypes.float64:
        return repr(number)
    text = repr(float(np.float32(number))) if math.isfinite(float(np.float32(number))) else repr(number)
    text = np.format_float_scientific(np.float32(number), unique=True) if "e" in text else text
    if number < 0 or (number == 0 and math.copysign(1, number) < 0):
        return f"({text}f)"
    return f"{text}f"


class CKernel:
    """Writes one kernel."""

    def __init__(self, kernel: Kernel, scratch_offsets: dict[Buffer, int]) -> None:
        self.kernel = kernel
        self.scratch_offsets = scratch_offsets
        self.lines: list[str] = []
        self.depth = 1
        self.names: dict[Axis, str] = {}
        self.taken: dict[str, int] = {}
        self.lane: Axis | None = None
        self.lane_buffers = _lane_buffers(kernel)
        self.used_math: dict[tuple[str, int], set[str]] = {}
        self.used_vectors: set[tuple[DType, int]] = set()

    # --- frame

    def text(self) -> str:
        for position, buffer in enumerate(self.kernel.params):
            self.emit(f"{_TYPES[buffer.dtype.name]} *restrict {buffer.name} = buffers[{position}];")
        for position, symbol in enumerate(self.kernel.symbols):
            self.emit(f"const int64_t {symbol.name} = extents[{position}];")
        if self.kernel.step is not None:
            self.names[self.kernel.step] = "step"
            self.emit(f"const int64_t step = extents[{len(self.kernel.symbols)}];")
        self.block(self.kernel.body)
        head = f"void {self.kernel.name}(void *const *buffers, const int64_t *extents, int64_t tile, char *scratch) {{\n"
        return _PRELUDE + self.vector_types() + head + "\n".join(self.lines) + "\n}\n"

    def vector_types(self) -> str:
        out: list[str] = []
        declared: set[str] = set()

        def declare(dtype: DType, lanes: int) -> None:
            name = vector_name(dtype, lanes)
            if name in declared:
                return
            declared.add(name)
            size = lanes * dtype.bytes
            out.append(f"typedef {_TYPES[dtype.name]} {name} __attribute__((vector_size({size})));\n")
            out.append(f"typedef {_TYPES[dtype.name]} {name}u __attribute__((vector_size({size}), aligned({dtype.bytes}), may_alias));\n")

        for dtype, lanes in sorted(self.used_vectors, key=lambda p: (p[0].name, p[1])):
            declare(dtype, lanes)
            declare(_mask_dtype(dtype), lanes)
        for (name, lanes), used in sorted(self.used_math.items()):
            dtype = dtypes.by_name(name)
            declare(dtype, lanes)
            declare(_mask_dtype(dtype), lanes)
            out.append(c_math.text(used, vector_name(dtype, lanes), vector_name(_mask_dtype(dtype), lanes)))
        return "".join(out)

    def emit(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    def name(self, axis: Axis) -> str:
        if axis not in self.names:
            stem = "".join(c if c.isalnum() or c == "_" else "_" for c in axis.name)
            count = self.taken.get(stem, 0)
            self.taken[stem] = count + 1
            self.names[axis] = f"{stem}_{count}"
        return self.names[axis]

    # --- statements

    def block(self, body: tuple[Stmt, ...]) -> None:
        for stmt in body:
            self.statement(stmt)

    def statement(self, stmt: Stmt) -> None:
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
            raise InternalError(f"{self.kernel.name}: no C for instruction {stmt.name}")

    def indented(self, body: tuple[Stmt, ...]) -> None:
        self.depth += 1
        self.block(body)
        self.depth -= 1

    def loop(self, stmt: For) -> None:
        if stmt.kind is ForKind.PARALLEL:
            self.names[stmt.axis] = "tile"
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
        self.indented(stmt.body)
        self.emit("}")

    def alloc(self, stmt: Alloc) -> None:
        buffer = stmt.buffer
        if buffer.memory is Memory.SCRATCH:
            kind = _TYPES[buffer.dtype.name]
            self.emit(f"{kind} *restrict {buffer.name} = ({kind} *)(scratch + {self.scratch_offsets[buffer]});")
            self.block(stmt.body)
            return
        self.emit("{")
        self.depth += 1
        lanes = self.lane_buffers.get(buffer)
        shape = buffer.shape[:-1] if lanes else buffer.shape
        if lanes:
            self.used_vectors.add((buffer.dtype, lanes))
        kind = vector_name(buffer.dtype, lanes) if lanes else _TYPES[buffer.dtype.name]
        names = [_element_name(buffer, index) for index in np.ndindex(*shape)]  # type: ignore[arg-type]
        self.emit(f"{kind} {', '.join(names)};")
        self.block(stmt.body)
        self.depth -= 1
        self.emit("}")

    def store(self, stmt: Store) -> None:
        if self.lane is None:
            value = self.scalar(stmt.value)
            self.emit(f"{self.place(stmt.buffer, stmt.indices)} = {value};")
            return
        lanes = int(self.lane.extent)  # type: ignore[arg-type]
        value = self.vector(stmt.value)
        if stmt.buffer.memory is Memory.REGISTER:
            text = value if value is not None else self.by_lanes(stmt.value)
            if self.lane in axes_of(*stmt.indices):
                self.used_vectors.add((stmt.buffer.dtype, lanes))
                self.emit(f"{_element_name(stmt.buffer, _constants(stmt.indices[:-1]))} = {self.splat(stmt.value, text, lanes)};")
            else:
                self.emit(f"{self.place(stmt.buffer, stmt.indices)} = {text};")
            return
        offset = self.flat(stmt.buffer, stmt.indices)
        stride = _lane_stride(offset, self.lane)
        if value is not None and stmt.value.dtype.kind != "b" and stmt.value.dtype is not dtypes.bfloat16:
            self.used_vectors.add((stmt.buffer.dtype, lanes))
            kind = vector_name(stmt.buffer.dtype, lanes)
            whole = self.splat(stmt.value, value, lanes)
            if stride == 1:
                start = self.scalar(simplify(substitute(offset, {self.lane: 0})))
                self.emit(f"*({kind}u *)({stmt.buffer.name} + {start}) = {whole};")
                return
            self.emit(f"{{ {kind} lanes = {whole};")
            for i in range(lanes):
                at = self.scalar(simplify(substitute(offset, {self.lane: i})))
                self.emit(f"  {stmt.buffer.name}[{at}] = lanes[{i}];")
            self.emit("}")
            return
        lane, self.lane = self.lane, None
        for i in range(lanes):
            at = self.scalar(simplify(substitute(offset, {lane: i})))
            self.emit(f"{stmt.buffer.name}[{at}] = {self.scalar(substitute(stmt.value, {lane: i}))};")
        self.lane = lane

    def place(self, buffer: Buffer, indices: tuple[Expr, ...]) -> str:
        if buffer.memory is Memory.REGISTER:
            position = _constants(indices)
            if buffer in self.lane_buffers:
                return f"{_element_name(buffer, position[:-1])}[{position[-1]}]"
            return _element_name(buffer, position)
        return f"{buffer.name}[{self.scalar(self.flat(buffer, indices))}]"

    def flat(self, buffer: Buffer, indices: tuple[Expr, ...]) -> Expr:
        offset: Expr = const(0)
        for index, extent in zip(indices, buffer.shape, strict=True):
            offset = offset * extent + index
        return _join_divisions(simplify(offset))

    # --- scalar expressions

    def scalar(self, value: Expr) -> str:
        done: dict[int, str] = {}
        for node in walk(value):
            if id(node) in done:
                continue
            done[id(node)] = self.scalar_node(node, done)
        return done[id(value)]

    def scalar_node(self, node: Expr, done: dict[int, str]) -> str:
        if isinstance(node, Const):
            return literal(node)
        if isinstance(node, Var):
            return self.name(node.axis)
        if isinstance(node, Symbol):
            return node.name
        if isinstance(node, Load):
            return self.place(node.source, node.indices)
        if isinstance(node, State):
            raise InternalError(f"{self.kernel.name}: state {node.name} left in an expression")
        assert isinstance(node, Op)
        args = [done[id(a)] for a in node.args]
        name = node.op.name
        if name == "cast":
            return _cast(args[0], node.args[0].dtype, node.dtype)
        operand = node.args[-1].dtype
        if name in ("floordiv", "mod") and node.dtype.is_int:
            low, _ = bounds(node.args[0])
            divisor_low, _ = bounds(node.args[1])
            if low >= 0 and divisor_low > 0:
                return f"({args[0]} {'/' if name == 'floordiv' else '%'} {args[1]})"
        if operand is dtypes.bfloat16:
            wide = [args[0], *(_cast(a, operand, dtypes.float32) for a in args[1:])] if name == "select" else [
                _cast(a, operand, dtypes.float32) for a in args]  # fmt: skip
            text = scalar_call(name, wide, dtypes.float32)
            return text if node.dtype.kind == "b" else _cast(text, dtypes.float32, operand)
        return scalar_call(name, args, operand)

    # --- vector expressions

    def vector(self, value: Expr) -> str | None:
        """The value on all lanes: a scalar text when it is the same on every lane, None when it has no vector form."""
        assert self.lane is not None
        done: dict[int, str | None] = {}
        for node in walk(value):
            done[id(node)] = self.vector_node(node, done)
        return done[id(value)]

    def depends(self, node: Expr) -> bool:
        return self.lane in axes_of(node)

    def vector_node(self, node: Expr, done: dict[int, str | None]) -> str | None:
        assert self.lane is not None
        if not self.depends(node):
            lane, self.lane = self.lane, None
            text = self.scalar(node)
            self.lane = lane
            return text
        lanes = int(self.lane.extent)  # type: ignore[arg-type]
        if isinstance(node, Load):
            return self.vector_load(node, lanes)
        if isinstance(node, Var):
            return None
        assert isinstance(node, Op)
        name = node.op.name
        operand = node.args[-1].dtype
        if operand in (dtypes.bfloat16, dtypes.float16) or (name == "cast" and (node.dtype.kind == "b" or operand.kind == "b")):
            return self.by_lanes(node) if node.dtype.kind != "b" else None
        if name == "select":
            return self.vector_select(node, done, lanes)
        if node.dtype is dtypes.index and operand is dtypes.index:
            return None
        args = [done[id(a)] for a in node.args]
        if any(a is None for a in args):
            return self.by_lanes(node) if node.dtype.kind != "b" else None
        texts = [self.splat(a, t, lanes) if not self.depends(a) else t for a, t in zip(node.args, args, strict=True)]
        if name == "cast":
            if node.dtype in (dtypes.bfloat16, dtypes.float16):
                return self.by_lanes(node)
            self.used_vectors.add((node.dtype, lanes))
            return f"__builtin_convertvector({texts[0]}, {vector_name(node.dtype, lanes)})"
        if operand.kind == "b":
            if name in _MASK_INFIX and self.mask_width(node) is not None:
                return f"({texts[0]} {_MASK_INFIX[name]} {texts[1]})"
            return f"(~{texts[0]})" if name == "not" else None
        if name in _INFIX:
            return f"({texts[0]} {_INFIX[name]} {texts[1]})"
        if name == "neg":
            return f"(-{texts[0]})"
        if name == "isnan":
            return f"({texts[0]} != {texts[0]})"
        if name in c_math.FUNCTIONS and operand is dtypes.float32:
            self.used_math.setdefault((operand.name, lanes), set()).add(name)
            return f"tw_{name}_{vector_name(operand, lanes)}({', '.join(t for t in texts if t)})"
        return self.by_lanes(node) if node.dtype.kind != "b" else None

    def vector_load(self, node: Load, lanes: int) -> str | None:
        assert self.lane is not None
        if node.source.memory is Memory.REGISTER:
            return _element_name(node.source, _constants(node.indices[:-1]))
        if node.dtype.kind == "b":
            return None
        offset = self.flat(node.source, node.indices)
        if node.dtype is not dtypes.bfloat16 and _lane_stride(offset, self.lane) == 1:
            self.used_vectors.add((node.dtype, lanes))
            start = self.scalar(simplify(substitute(offset, {self.lane: 0})))
            return f"(*(const {vector_name(node.dtype, lanes)}u *)({node.source.name} + {start}))"
        return self.by_lanes(node) if node.dtype is not dtypes.bfloat16 else None

    def vector_select(self, node: Op, done: dict[int, str | None], lanes: int) -> str | None:
        condition, then, otherwise = node.args
        texts = [done[id(a)] for a in (then, otherwise)]
        uniform = not self.depends(condition)
        if any(t is None for t in texts):
            return self.by_lanes(node)
        a, b = (self.splat(e, t, lanes) for e, t in zip((then, otherwise), texts, strict=True))
        if uniform:
            return f"({done[id(condition)]} ? {a} : {b})"
        mask = done[id(condition)]
        reads_memory = any(x.source.memory is not Memory.REGISTER for x in loads(then, otherwise))
        guards_index = any(n.dtype is dtypes.index for n in walk(condition)) and reads_memory
        if mask is None or guards_index or self.mask_width(condition) != node.dtype.bits or node.dtype is dtypes.float64:
            return self.by_lanes(node)
        self.used_math.setdefault((node.dtype.name, lanes), set()).add("select")
        return f"tw_select_{vector_name(node.dtype, lanes)}({mask}, {a}, {b})"

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
        if self.depends(value):
            return text
        self.used_vectors.add((value.dtype, lanes))
        kind = vector_name(value.dtype, lanes)
        return f"(({kind}){{{', '.join([text] * lanes)}}})" if isinstance(value, Const) else f"(({text}) - ({kind}){{}})"

    def by_lanes(self, node: Expr) -> str:
        """A vector put together from scalars."""
        assert self.lane is not None
        lane, self.lane = self.lane, None
        lanes = int(lane.extent)  # type: ignore[arg-type]
        texts = [self.scalar(_simplify_indices(substitute(node, {lane: i}))) for i in range(lanes)]
        self.lane = lane
        self.used_vectors.add((node.dtype, lanes))
        return f"(({vector_name(node.dtype, lanes)}){{{', '.join(texts)}}})"


def _simplify_indices(node: Expr) -> Expr:
    return simplify(node)


def _join_divisions(offset: Expr) -> Expr:
    """c·d·(x // d) + c·(x % d) is c·x: what packing split, addressing puts together again."""
    total = linear(offset)
    for term, coefficient in list(total.terms.items()):
        if isinstance(term, Op) and term.op.name == "mod" and isinstance(term.args[1], Const):
            divisor = int(term.args[1].value)
            quotient = simplify(term.args[0] // divisor)
            if total.terms.get(quotient) == coefficient * divisor:
                terms = {t: c for t, c in total.terms.items() if t is not term and t is not quotient}
                rest = type(total)(terms, total.constant).plus(linear(term.args[0]).scaled(coefficient))
                return _join_divisions(rest.expr())
    return offset


def _cast(text: str, source: DType, target: DType) -> str:
    if source is dtypes.bfloat16:
        return _cast(f"tw_from_bf16({text})", dtypes.float32, target)
    if target is dtypes.bfloat16:
        return f"tw_to_bf16((float)({text}))"
    if target.kind == "b":
        return f"({text} != 0)"
    return f"(({_TYPES[target.name]}){text})"


def _lane_buffers(kernel: Kernel) -> dict[Buffer, int]:
    """Register buffers whose last axis is the lanes of a vector."""
    lanes: dict[Buffer, int] = {}
    vector_axes: set[Axis] = {s.axis for s in statements(kernel.body) if isinstance(s, For) and s.kind is ForKind.VECTOR}
    for stmt in statements(kernel.body):
        accesses = [(n.source, n.indices) for n in loads(*stmt_exprs(stmt))]
        if isinstance(stmt, Store):
            accesses.append((stmt.buffer, stmt.indices))
        for buffer, indices in accesses:
            if buffer.memory is Memory.REGISTER and indices and isinstance(indices[-1], Var) and indices[-1].axis in vector_axes:
                lanes[buffer] = int(indices[-1].axis.extent)  # type: ignore[arg-type]
    return lanes


def _lane_stride(offset: Expr, lane: Axis) -> int | None:
    total = linear(offset)
    stride = 0
    for term, coefficient in total.terms.items():
        if isinstance(term, Var) and term.axis is lane:
            stride = coefficient
        elif lane in axes_of(term):
            return None
    return stride


def _constants(indices: tuple[Expr, ...]) -> tuple[int, ...]:
    result = []
    for index in indices:
        known = simplify(index)
        if not isinstance(known, Const):
            raise InternalError(f"register index {index} is not a constant")
        result.append(int(known.value))
    return tuple(result)


def _element_name(buffer: Buffer, position: tuple[int, ...]) -> str:
    return "_".join([buffer.name, *map(str, position)])


def _mask_dtype(dtype: DType) -> DType:
    return {8: dtypes.int8, 16: dtypes.int16, 32: dtypes.int32, 64: dtypes.int64}[dtype.bits]


def vector_name(dtype: DType, lanes: int) -> str:
    return f"v{lanes}{dtype.kind}{dtype.bits}"


def render_kernel(kernel: Kernel, scratch_offsets: dict[Buffer, int]) -> str:
    return CKernel(kernel, scratch_offsets).text()
