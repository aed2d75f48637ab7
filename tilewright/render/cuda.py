"""Loops to CUDA C++: one kernel function that touches memory only through the views of tilewright.cuh.

The same text compiles for the device and, by a host compiler, for the emulator.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from tilewright.errors import InternalError
from tilewright.intrinsics.gpu import GPU
from tilewright.intrinsics.gpu_matrix import FORMS
from tilewright.intrinsics.table import check
from tilewright.ir.analysis.simplify import linear, simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bounds import static
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import Axis, Const, Expr, Extent, Load, Op, Var, as_expr, const, is_op, loads, walk
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
    Operand,
    Scope,
    Stmt,
    Store,
    statements,
    stmt_exprs,
)
from tilewright.render.c_bytes import is_small, rounded
from tilewright.render.clike import (
    COMMON_SPELLINGS,
    PRIMARY,
    Dialect,
    Division,
    ExprPrinter,
    Function,
    Identifiers,
    Infix,
    Reinterpretation,
    axis_is_narrow,
)
from tilewright.render.launch_shape import axes_of_kind, launch_shape, loops_over_blocks, meets

HEADER = "tilewright.cuh"
_MEETING = "tw_meeting"  # a launch's own, zero before the first
_TURN = "tw_turn"  # which the blocks that meet there have seen

_LEAST_DIVISOR = 2.0**-100  # neither it nor its reciprocal is near the ends of float32
_FLOATS = ("float32", "float64", "float16", "bfloat16", "tf32")

CUDA = Dialect(
    name="cuda",
    types={
        "float32": "float",
        "float64": "double",
        "float16": "tw::half",
        "bfloat16": "tw::bfloat16",
        "tf32": "tw::tf32",
        "int8": "signed char",
        "uint8": "unsigned char",
        "int16": "short",
        "uint16": "unsigned short",
        "int32": "int",
        "uint32": "unsigned",
        "int64": "long long",
        "uint64": "unsigned long long",
        "bool": "bool",
        **{d.name: "unsigned char" for d in dtypes.STORAGE},
        "float8e4m3fn": "tw::e4m3",
    },
    spellings={
        **COMMON_SPELLINGS,
        "truncdiv": Division("/", "tw::quotient<{t}>"),
        "floordiv": Division("/", "tw::floordiv<{t}>"),
        "mod": Division("%", "tw::modulo<{t}>"),
        "fmod": Function("tw::remainder<{t}>", dict.fromkeys(_FLOATS, "tw::fmod")),
        "min": Function("tw::minimum<{t}>"),
        "max": Function("tw::maximum<{t}>"),
        "abs": Function("tw::absolute_integer<{t}>", dict.fromkeys(_FLOATS, "tw::absolute")),
        "sign": Function("tw::sign<{t}>"),
        **{
            name: Function(f"tw::{name}")
            for name in ("pow", "exp", "exp2", "log", "sqrt", "rsqrt", "tanh", "erf", "sigmoid", "sin", "cos", "floor",
                         "ceil", "round", "trunc")
        },
        "isnan": Function("tw::is_nan<{t}>"),
        "isinf": Function("tw::is_inf<{t}>"),
        "shl": Function("tw::shift_left<{t}>"),
        "shr": Function("tw::shift_right<{t}>"),
        "bitcast": Reinterpretation("tw::bits_as<{to}, {t}>"),
    },
    infinity="tw::infinity()",
    nan="tw::nan()",
    computes_as={"float16": dtypes.float32, "bfloat16": dtypes.float32, "tf32": dtypes.float32},
    narrow_index=True,
)  # fmt: skip


def written_params(kernel: Kernel) -> tuple[Buffer, ...]:
    """The parameters a kernel writes, in order."""
    targets: set[Buffer] = set()
    for stmt in statements(kernel.body):
        if isinstance(stmt, Store):
            targets.add(stmt.buffer)
        elif isinstance(stmt, Instruction):
            rules = GPU[stmt.name].operands
            targets |= {o.buffer for o, r in zip(stmt.operands, rules, strict=True) if r.written}
    return tuple(p for p in kernel.params if p in targets)


def _fills_registers(body: tuple[Stmt, ...]) -> bool:
    """Whether a trip multiplies matrices, or reads for several trips at once into registers of its own."""
    own = [s.buffer.shape for s in body if isinstance(s, Alloc) and s.buffer.memory is Memory.REGISTER]
    return any(static(n) != 1 for shape in own for n in shape[:1]) or _multiplies_matrices(body)


def _multiplies_matrices(body: tuple[Stmt, ...]) -> bool:
    return any(isinstance(s, Instruction) and s.name in FORMS for s in statements(body))


def _read_buffers(kernel: Kernel) -> set[Buffer]:
    found: set[Buffer] = set()
    for stmt in statements(kernel.body):
        found.update(n.source for n in loads(*stmt_exprs(stmt)))
        if isinstance(stmt, Instruction):
            rules = GPU[stmt.name].operands
            found |= {o.buffer for o, r in zip(stmt.operands, rules, strict=True) if not r.written}
    return found


def render_kernel(kernel: Kernel, shared_offsets: Mapping[str, int]) -> str:
    """The kernel as CUDA C++; `shared_offsets` says where each shared buffer begins in the arena."""
    return _Writer(kernel, shared_offsets).write()


class CudaPrinter(ExprPrinter):
    """Memory is read through views, indexed per dimension."""

    def load(self, node: Load) -> str:
        return self.element(node.source, node.indices)

    def element(self, buffer: Buffer, indices: tuple[Expr, ...]) -> str:
        return f"{self.names.of(buffer, buffer.name)}({', '.join(self.text(i) for i in indices)})"

    def place(self, operand: Operand, unrolled: Collection[Axis] = ()) -> str:
        name = self.names.of(operand.buffer, operand.buffer.name)
        if operand.origin and _has_narrow_offsets(operand.buffer):
            near, far = zip(*(_split_known(i, unrolled) for i in operand.origin), strict=True)
            is_apart = any(not isinstance(f, Const) or f.value for f in far)
            if is_apart and not all(isinstance(n, Const) for n in near):
                return f"{name}.apart({', '.join(self.text(i) for i in (*near, *far))})"
        return f"{name}.at({', '.join(self.text(i) for i in operand.origin)})"

    def _constant(self, node: Const) -> tuple[str, int]:
        if node.dtype is dtypes.float8e4m3fn:  # given by its bits, and a number here
            return self._float(float(np.uint8(node.value).view(node.dtype.numpy)), dtypes.float32)
        return super()._constant(node)

    def _operation(self, node: Op, args: list[tuple[str, int]]) -> tuple[str, int]:
        small = rounded(node)
        if small is not None:
            return f"tw::rounded_byte<{self.c_type(node.dtype)}>({self.text(small.value)}, {small.added})", PRIMARY
        if is_op(node, "bitcast") and node.args[0].dtype is dtypes.float8e4m3fn:
            # an emulated view gives a number, whose code is the same
            kind = self.c_type(node.args[0].dtype)
            return f"tw::bits_as<{self.c_type(node.dtype)}, {kind}>({kind}({args[0][0]}))", PRIMARY
        if is_op(node, "select") and node.dtype is dtypes.float8e4m3fn:
            # a constant and an element of an emulated view are numbers, which C++ would not choose a code beside
            kind = self.c_type(node.dtype)
            args = [args[0], *((f"{kind}({text})", PRIMARY) for text, _ in args[1:])]
        if is_op(node, "round") and node.dtype is dtypes.float32 and is_small(node.args[0]):
            return f"tw::round_small({self.text(node.args[0])})", PRIMARY
        if node.op.name != "select" or node.dtype.name not in CUDA.computes_as or _may_be_outside(node):
            return super()._operation(node, args)
        # conversions are assembly, which the compiler would branch around
        condition, *both = (self._in_compute_type(a, t)[0] for a, t in zip(node.args, args, strict=True))
        wide = self.c_type(CUDA.computes_as[node.dtype.name])
        text = f"tw::choose({condition}, {', '.join(f'static_cast<{wide}>({t})' for t in both)})"
        return self._rounded(node, (text, PRIMARY))

    def _call(self, node: Op, name: str, args: list[tuple[str, int]]) -> tuple[str, int]:
        if node.op.name not in ("min", "max") or node.dtype.name not in CUDA.computes_as:
            return super()._call(node, name, args)
        # the larger of two numbers is one of them: nothing is rounded, and nothing need be converted
        kind = self.c_type(node.dtype)
        return f"{name.replace('{t}', kind)}({', '.join(f'{kind}({text})' for text, _ in args)})", PRIMARY

    def _infix(self, node: Op, spelling: Infix, args: list[tuple[str, int]]) -> tuple[str, int]:
        above = node.args[0]
        if node.op.name == "div" and node.dtype is dtypes.float32 and isinstance(above, Const) and above.value == 1:
            return f"tw::reciprocal({args[1][0]})", PRIMARY
        below = node.args[1]
        if node.op.name == "div" and node.dtype is dtypes.float32 and isinstance(below, Const) and _is_long(below):
            inverse = self.text(const(np.float32(1) / np.float32(below.value), dtypes.float32))
            return f"tw::divided({args[0][0]}, {args[1][0]}, {inverse})", PRIMARY
        return super()._infix(node, spelling, args)

    def value_type(self, node: Expr) -> str:
        if isinstance(node, Load) and node.dtype.name in CUDA.computes_as:
            # as an emulated view gives it; it holds the same number
            return self.c_type(CUDA.computes_as[node.dtype.name])
        return super().value_type(node)

    def convert(self, dtype: DType, text: str, precedence: int) -> tuple[str, int]:
        if dtype.name in CUDA.computes_as:
            return f"{self.c_type(dtype)}({text})", PRIMARY
        return super().convert(dtype, text, precedence)


def _may_be_outside(choice: Op) -> bool:
    """Whether memory is read for what is chosen between, which may only be done where it is chosen."""
    return any(n.source.memory is not Memory.REGISTER for n in loads(*choice.args[1:]))


def _is_long(divisor: Const) -> bool:
    """Whether a division is many instructions: by a power of two it is one."""
    size = abs(divisor.value)
    return _LEAST_DIVISOR <= size <= 1 / _LEAST_DIVISOR and math.frexp(size)[0] != 0.5


def _has_narrow_offsets(buffer: Buffer) -> bool:
    """Memory whose elements are counted in 32 bits, all extents known."""
    known = [e for e in map(static, buffer.shape) if e is not None]
    is_known = len(known) == len(buffer.shape)
    return buffer.memory is not Memory.REGISTER and is_known and math.prod(known) < 1 << 31


def _split_known(index: Expr, unrolled: Collection[Axis]) -> tuple[Expr, Expr]:
    """What of an index is known only when the kernel runs, and what when it is compiled."""
    form = linear(index)
    known: Expr = const(form.constant)
    for term, factor in form.terms.items():
        if isinstance(term, Var) and term.axis in unrolled:
            known = simplify(known + term * factor)
    return simplify(index - known), known


@dataclass
class _Writer:
    kernel: Kernel
    shared_offsets: Mapping[str, int]
    lines: list[str] = field(default_factory=list)
    depth: int = 0
    unrolled: set[Axis] = field(default_factory=set)  # loops around that are unrolled
    block_axes: dict[Axis, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = Identifiers(_RESERVED)
        self.printer = CudaPrinter(CUDA, self.names)
        beside = loops_over_blocks(self.kernel)
        if len(beside) < 2:
            axes = axes_of_kind(self.kernel.body, ForKind.BLOCK)
            places = zip(reversed(axes), ("tw::block_x()", "tw::block_y()", "tw::block_z()"), strict=False)
            self.block_axes = dict(places)
        first = 0
        for loop in beside if len(beside) > 1 else ():
            self.block_axes[loop.axis] = f"tw::block_x() - {first}" if first else "tw::block_x()"
            first += static(loop.axis.extent) or 0

    def write(self) -> str:
        kernel = self.kernel
        shape = launch_shape(kernel)
        written = set(written_params(kernel))
        read = _read_buffers(kernel)
        function = self.names.fresh(kernel.name)
        if function != kernel.name:
            raise InternalError(f"{kernel.name!r} is no name for a CUDA function")
        params, views = [], []
        for buffer in kernel.params:
            name = self.names.of(buffer, buffer.name)
            kind = ("" if buffer in written else "const ") + self.printer.c_type(buffer.dtype)
            data = self.names.fresh(f"{name}_data")
            # What threads, or kernels, hand to each other must not be restrict: the promise that nobody else writes it
            # would let a load move above the barrier, or the wait for the kernel before, that orders it.
            alone = " __restrict__" if buffer in written and buffer not in read else ""
            params.append(f"{kind}*{alone} {data}")
            views.append((buffer, kind, name, data))
        for symbol in kernel.symbols:
            params.append(f"long long {self.names.of(symbol, symbol.name)}")
        if kernel.step is not None:
            params.append(f"int {self.names.of(kernel.step, kernel.step.name)}")
        if meets(kernel):
            params.append(f"unsigned* {_MEETING}")
        grid = " x ".join(self._extent(e) for e in shape.grid)
        self.line(f'#include "{HEADER}"')
        self.line("")
        self.line(f"// grid {grid}, {shape.threads} threads a block")
        # fragments fill the registers: the assembler is not to spill them for more blocks at a time
        bounds = f"{shape.threads}, 1" if _multiplies_matrices(kernel.body) else f"{shape.threads}"
        self.line(f'extern "C" __global__ void __launch_bounds__({bounds})')
        self.line(f"{function}({', '.join(params)}) {{")
        self.depth += 1
        self.line("tw::begin();")
        if meets(kernel):
            self.line(f"unsigned {_TURN} = tw::grid_turn({_MEETING});")
        for buffer, kind, name, data in views:
            self._global_view(buffer, kind, name, data)
        self._whole(kernel.body)
        self.depth -= 1
        self.line("}")
        return "\n".join(self.lines) + "\n"

    def _whole(self, body: tuple[Stmt, ...]) -> None:
        """The kernel's statements. Of blocks beside each other, a block's number tells which loop it is of."""
        beside = loops_over_blocks(self.kernel)
        if len(beside) < 2:
            self.body(body)
            return
        end = 0
        for loop in beside[:-1]:
            end += static(loop.axis.extent) or 0
            self.block(f"{'} else ' if loop is not beside[0] else ''}if (tw::block_x() < {end}) {{", (loop,))
        self.block("} else {", (beside[-1],))
        self.line("}")

    def line(self, text: str) -> None:
        self.lines.append("  " * self.depth + text if text else "")

    def body(self, stmts: tuple[Stmt, ...]) -> None:
        for stmt in stmts:
            self.stmt(stmt)

    def block(self, head: str, stmts: tuple[Stmt, ...]) -> None:
        self.line(head)
        self.depth += 1
        self.body(stmts)
        self.depth -= 1

    def stmt(self, stmt: Stmt) -> None:
        if isinstance(stmt, For):
            self._for(stmt)
        elif isinstance(stmt, If):
            (condition,) = self._let(stmt.condition)
            self.block(f"if ({condition}) {{", stmt.then)
            if stmt.otherwise:
                self.block("} else {", stmt.otherwise)
            self.line("}")
        elif isinstance(stmt, Alloc):
            self._alloc(stmt)
        elif isinstance(stmt, Store):
            self._store(stmt)
        elif isinstance(stmt, Barrier):
            self._barrier(stmt)
        elif isinstance(stmt, Instruction):
            self._instruction(stmt)

    # ---- statements

    def _for(self, loop: For) -> None:
        axis = loop.axis
        name = self.names.of(axis, axis.name)
        kind = "int" if axis_is_narrow(axis) else "long long"
        if loop.kind is ForKind.BLOCK:
            self.line(f"const int {name} = {self.block_axes[axis]};")
            self.body(loop.body)
            return
        if loop.kind is ForKind.THREAD:
            self.line(f"const int {name} = tw::thread();")
            self.body(loop.body)
            return
        if loop.kind is ForKind.PARALLEL:
            raise InternalError(f"{self.kernel.name}: {axis.name} is a loop for CPU workers")
        if loop.kind is ForKind.VECTOR and self._vector_copy(loop):
            return
        if loop.kind in (ForKind.UNROLL, ForKind.VECTOR):
            self.line("#pragma unroll")
        (end,) = self._let(as_expr(axis.extent))
        begin = f"{kind} {name} = 0"
        if loop.kind is ForKind.SERIAL and kind == "int" and _fills_registers(loop.body):
            # what is written out already fills the registers
            begin, end = f"{begin}, {name}_end = tw::times({end})", f"{name}_end"
        self.unrolled.update((axis,) if loop.kind is ForKind.UNROLL else ())
        self.block(f"for ({begin}; {name} < {end}; ++{name}) {{", loop.body)
        self.unrolled.discard(axis)
        self.line("}")

    def _alloc(self, alloc: Alloc) -> None:
        buffer = alloc.buffer
        kind = self.printer.c_type(buffer.dtype)
        extents = [static(e) for e in buffer.shape]
        if any(e is None for e in extents) or buffer.memory not in (Memory.SHARED, Memory.REGISTER):
            raise InternalError(f"{self.kernel.name}: {buffer!r} cannot be allocated on a GPU")
        arguments = ", ".join([kind, *map(str, extents)])
        name = self.names.of(buffer, buffer.name)
        if buffer.memory is Memory.SHARED:
            offset = self.shared_offsets[buffer.name]
            self.line(f'const tw::Shared<{arguments}> {name}({offset}, "{buffer.name}");')
        else:
            self.line(f'tw::Regs<{arguments}> {name}("{buffer.name}");')
        self.body(alloc.body)

    def _store(self, store: Store) -> None:
        texts = self._let(*store.indices, store.value, forget=False)
        value = texts[-1]
        if isinstance(store.value, Load) and store.value.dtype.name in CUDA.computes_as:
            value = f"{self.printer.c_type(store.value.dtype)}({value})"
        self.line(f"{self.printer.element(store.buffer, store.indices)} = {value};")
        self.printer.forget()

    def _barrier(self, barrier: Barrier) -> None:
        words = {Scope.BLOCK: "barrier()", Scope.WARP: "warp_barrier()"}
        words[Scope.GRID] = f"grid_barrier({_MEETING}, {_TURN})"
        self.line(f"tw::{words[barrier.scope]};")

    def _instruction(self, instruction: Instruction) -> None:
        if instruction.name not in GPU:
            raise InternalError(f"{self.kernel.name}: no GPU instruction {instruction.name}")
        row = GPU[instruction.name]
        check(row, instruction)
        self.line(row.text["cuda"].format(**self._operand_texts(instruction)))

    def _operand_texts(self, instruction: Instruction) -> dict[str, str]:
        texts = {f"scalar{i}": self.printer.text(simplify(s)) for i, s in enumerate(instruction.scalars)}
        for i, operand in enumerate(instruction.operands):
            texts[f"element{i}"] = self.printer.element(operand.buffer, operand.origin)
            texts[f"place{i}"] = self.printer.place(operand, self.unrolled)
            texts[f"type{i}"] = self.printer.c_type(operand.buffer.dtype)
        return texts

    def _vector_copy(self, loop: For) -> bool:
        """A VECTOR loop that only moves neighbours, aligned on both sides, is one vector copy."""
        span = static(loop.axis.extent)
        if span is None or len(loop.body) != 1 or f"copy{span}" not in GPU:
            return False
        store = loop.body[0]
        if not isinstance(store, Store) or not isinstance(store.value, Load):
            return False
        source = store.value
        if store.buffer.dtype.bytes * span not in GPU[f"copy{span}"].packet_bytes:
            return False
        to = _aligned_origin(store.buffer, store.indices, loop.axis, span)
        origin = _aligned_origin(source.source, source.indices, loop.axis, span)
        if to is None or origin is None:
            return False
        self._instruction(Instruction(f"copy{span}", (Operand(store.buffer, to), Operand(source.source, origin))))
        return True

    # ---- pieces

    def _let(self, *roots: Expr, forget: bool = True) -> list[str]:
        lines, texts = self.printer.let(*roots)
        for text in lines:
            self.line(text)
        if forget:
            self.printer.forget()
        return texts

    def _extent(self, extent: Extent) -> str:
        return str(extent) if isinstance(extent, int) else self.printer.text(extent)

    def _global_view(self, buffer: Buffer, kind: str, name: str, data: str) -> None:
        extents, given = [kind], []
        for extent in buffer.shape:
            known = static(extent)
            extents.append("tw::any" if known is None else str(known))
            if known is None:
                given.append(self._extent(extent))
        arguments = ", ".join([data, f'"{buffer.name}"', *given])
        self.line(f"const tw::Global<{', '.join(extents)}> {name}({arguments});")


def _aligned_origin(buffer: Buffer, indices: tuple[Expr, ...], axis: Axis, span: int) -> tuple[Expr, ...] | None:
    """Where the axis starts, if it walks the last dimension by ones from a multiple of `span`."""
    if not indices or any(_uses(i, axis) for i in indices[:-1]):
        return None
    if len(indices) > 1 and (static(buffer.shape[-1]) or 1) % span:
        return None
    last = linear(simplify(indices[-1]))
    others = {t: c for t, c in last.terms.items() if not (isinstance(t, Var) and t.axis is axis)}
    if len(others) != len(last.terms) - 1 or any(_uses(t, axis) for t in others):
        return None
    steps = [c for t, c in last.terms.items() if t not in others]
    if steps != [1] or math.gcd(last.constant, *others.values()) % span:
        return None
    start = type(last)(others, last.constant).expr()
    return (*indices[:-1], start)


def _uses(root: Expr, axis: Axis) -> bool:
    return any(isinstance(n, Var) and n.axis is axis for n in walk(root))


# Names a kernel may not give to its own things.
_RESERVED = frozenset((
    "tw", "tw_arena", "alignas", "alignof", "asm", "auto", "bool", "break", "case", "catch", "char", "class",
    "const", "constexpr", "continue", "default", "delete", "do", "double", "else", "enum", "explicit", "export",
    "extern", "false", "float", "for", "friend", "goto", "if", "inline", "int", "long", "mutable", "namespace",
    "new", "noexcept", "nullptr", "operator", "private", "protected", "public", "register", "return", "short",
    "signed", "sizeof", "static", "struct", "switch", "template", "this", "throw", "true", "try", "typedef",
    "typeid", "typename", "union", "unsigned", "using", "virtual", "void", "volatile", "while", "threadIdx",
    "blockIdx", "blockDim", "gridDim", "warpSize", "half", "float4", "int4", "any"
))  # fmt: skip
