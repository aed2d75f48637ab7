"""Scalar expressions of Loops as C, the names they take, and what a kernel's expressions need declared."""

from __future__ import annotations

from tilewright.errors import InternalError
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bounds import bounds, exceeds
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import Axis, Const, Expr, Load, Op, State, Symbol, Var
from tilewright.ir.forms.loops import Alloc, Buffer, Kernel, Memory, statements
from tilewright.render import c_bytes, c_convert, c_math
from tilewright.render.c_address import constants, element_name, flat, lane_buffers
from tilewright.render.c_guarded import LaneRun
from tilewright.render.c_long import ExprParts, LongValues
from tilewright.render.c_scope import LoopScope, Scopes
from tilewright.render.c_text import (
    DIVISIONS,
    WRAPPING,
    any_divisor,
    bits_as,
    cast,
    literal,
    scalar_call,
    vector_name,
    wrapping,
)


class CScalars(LongValues):
    """Writes the scalars of one kernel, and remembers what its expressions need declared."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.lines: list[str | LoopScope] = []
        self.depth = 1
        self.names: dict[Axis, str] = {}
        self.taken: dict[str, int] = {}
        self.reserved = {b.name for b in kernel.params}
        self.reserved |= {s.buffer.name for s in statements(kernel.body) if isinstance(s, Alloc)}
        self.scopes = Scopes(self.scalar, self.fresh)
        # vectors read from memory since the last store to memory, by name: what is the same on all lanes may be read by
        # loops of several widths, and is a vector of its own in each
        self.held: dict[tuple[Expr, int], str] = {}
        self.lane: Axis | None = None
        self.parts: ExprParts | None = None  # of the vector expression being written
        self.lane_buffers = lane_buffers(kernel)
        self.used_math: dict[tuple[str, int], set[str]] = {}
        self.used_vectors: set[tuple[DType, int]] = set()
        self.used_conversions: set[c_convert.Conversion] = set()
        self.used_squares: set[tuple[DType, int]] = set()
        self.used_packings: set[c_bytes.Packing] = set()
        self.used_parts: set[tuple[DType, int]] = set()
        self.live: LaneRun | None = None  # the lanes that what is being written is used on; nothing is read for others
        self.used_runs: set[tuple[DType, int]] = set()
        self.used_insides: set[tuple[DType, int]] = set()
        self.used_slices: set[tuple[DType, int, int, int]] = set()  # lanes of a vector, of its part, and from which on

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

    def place(self, buffer: Buffer, indices: tuple[Expr, ...]) -> str:
        if buffer.memory is Memory.REGISTER:
            position = constants(indices)
            if buffer in self.lane_buffers:
                return f"{element_name(buffer, position[:-1])}[{position[-1]}]"
            return element_name(buffer, position)
        return f"{buffer.name}[{self.scopes.offset(flat(buffer, indices))}]"

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
        if name == "bitcast":
            return bits_as(args[0], node.args[0].dtype, node.dtype)
        operand = node.args[-1].dtype
        if node.dtype.is_int and name in DIVISIONS:
            low, _ = bounds(node.args[0])
            divisor_low, divisor_high = bounds(node.args[1])
            if low >= 0 and divisor_low > 0:
                return f"({args[0]} {DIVISIONS[name]} {args[1]})"
            if divisor_low <= 0 and divisor_high >= -1:
                return any_divisor(name, args, operand)
        if name in WRAPPING and exceeds(node):
            return wrapping(name, args, operand)
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
