"""Expressions as C-like text: precedence, constants, casts, selects and shared subexpressions.

A Dialect is data: how each row of the scalar table and each element type is spelled. Renderers subclass the
printer for what differs in kind (how memory is read), never to decide anything.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tilewright.errors import InternalError
from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bounds import bounds, exceeds
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import (
    Axis,
    Const,
    Expr,
    Extent,
    Load,
    Op,
    Symbol,
    Var,
    add,
    as_expr,
    const,
    mul,
    walk,
)

# C's binding strengths, tightest first.
PRIMARY, UNARY, MULTIPLY, ADD, COMPARE, EQUAL, AND, OR, TERNARY, LOWEST = 16, 15, 13, 12, 10, 9, 5, 4, 3, 0
BIT_AND, BIT_XOR, BIT_OR = 8, 7, 6
_INT32 = (-(1 << 31), (1 << 31) - 1)


@dataclass(frozen=True)
class Infix:
    symbol: str
    precedence: int


@dataclass(frozen=True)
class Prefix:
    symbol: str


@dataclass(frozen=True)
class Function:
    """A call; `{t}` in the name becomes the C type the operands compute in; `by_type` has exceptions."""

    name: str
    by_type: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Division:
    """Flooring division or remainder: C's own operator where the operands' signs allow, else a function."""

    symbol: str
    function: str


@dataclass(frozen=True)
class Ternary:
    """condition ? then : otherwise; the branch not taken is not evaluated, so it may read out of bounds."""


@dataclass(frozen=True)
class Conversion:
    """A cast to the node's own type."""


@dataclass(frozen=True)
class Reinterpretation:
    """The bits of the operand as the node's own type: a call with `{to}` and `{t}`, the two C types, in its name."""

    name: str


Spelling = Infix | Prefix | Function | Division | Ternary | Conversion | Reinterpretation

# What C and every language grown from it spell alike.
COMMON_SPELLINGS: Mapping[str, Spelling] = {
    "add": Infix("+", ADD),
    "sub": Infix("-", ADD),
    "mul": Infix("*", MULTIPLY),
    "div": Infix("/", MULTIPLY),
    "neg": Prefix("-"),
    "lt": Infix("<", COMPARE),
    "le": Infix("<=", COMPARE),
    "eq": Infix("==", EQUAL),
    "ne": Infix("!=", EQUAL),
    "and": Infix("&&", AND),
    "or": Infix("||", OR),
    "not": Prefix("!"),
    "bitand": Infix("&", BIT_AND),
    "bitor": Infix("|", BIT_OR),
    "bitxor": Infix("^", BIT_XOR),
    "select": Ternary(),
    "cast": Conversion(),
}


@dataclass(frozen=True)
class Dialect:
    name: str
    types: Mapping[str, str]  # element type -> C type
    spellings: Mapping[str, Spelling]  # every row of ir.scalar.OPS
    infinity: str
    nan: str
    # Types that only store: their arithmetic is done in another one and rounded back.
    computes_as: Mapping[str, DType] = field(default_factory=dict)
    narrow_index: bool = False  # compute int64 values that provably fit in 32 bits as int


class Identifiers:
    """Distinct identifiers for the axes, buffers and temporaries of one function."""

    def __init__(self, reserved: frozenset[str] = frozenset()) -> None:
        self._taken = set(reserved)
        self._given: dict[object, str] = {}

    def of(self, key: object, wish: str) -> str:
        """The identifier of `key`, made from `wish` at first sight."""
        if key not in self._given:
            self._given[key] = self.fresh(wish)
        return self._given[key]

    def fresh(self, wish: str) -> str:
        stem = re.sub(r"\W", "_", wish) or "v"
        if stem[0].isdigit():
            stem = "v" + stem
        name, number = stem, 1
        while name in self._taken:
            name, number = f"{stem}_{number}", number + 1
        self._taken.add(name)
        return name


def row_major(shape: tuple[Extent, ...], indices: tuple[Expr, ...]) -> Expr:
    """The offset of an element in row-major order."""
    offset: Expr = const(0)
    for extent, index in zip(shape, indices, strict=True):
        offset = add(mul(offset, as_expr(extent)), index)
    return simplify(offset)


class ExprPrinter:
    """Prints expressions; nodes bound to a temporary print as its name."""

    def __init__(self, dialect: Dialect, names: Identifiers) -> None:
        self.dialect = dialect
        self.names = names
        self.bound: dict[Expr, str] = {}
        self._narrow: dict[Expr, bool] = {}

    # ---- to be overridden where memory is read differently

    def load(self, node: Load) -> str:
        offset = self.text(row_major(node.source.shape, node.indices))
        return f"{self.names.of(node.source, node.source.name)}[{offset}]"

    def convert(self, dtype: DType, text: str, precedence: int) -> tuple[str, int]:
        """`text` as a value of `dtype`."""
        inner = text if precedence >= UNARY else f"({text})"
        return f"({self.c_type(dtype)}){inner}", UNARY

    # ---- printing

    def text(self, root: Expr, precedence: int = LOWEST) -> str:
        """The expression, in parentheses if it binds weaker than `precedence`."""
        done: dict[Expr, tuple[str, int]] = {}
        for node in walk(root):
            done[node] = self._node(node, done)
        return _wrapped(done[root], precedence)

    def let(self, *roots: Expr) -> tuple[list[str], list[str]]:
        """Declarations of temporaries for what the roots use more than once, and the roots' texts after them.

        The temporaries stay bound until `forget`.
        """
        lines = []
        for node in _worth_naming(roots):
            if node in self.bound:
                continue
            text = self.text(node)
            name = self.names.fresh("t")
            lines.append(f"const {self.value_type(node)} {name} = {text};")
            self.bound[node] = name
        return lines, [self.text(r) for r in roots]

    def forget(self) -> None:
        self.bound.clear()

    def c_type(self, dtype: DType) -> str:
        return self.dialect.types[dtype.name]

    def value_type(self, node: Expr) -> str:
        """The C type that holds the value of `node`."""
        return self.c_type(dtypes.int32 if self.is_narrow(node) else node.dtype)

    def is_narrow(self, node: Expr) -> bool:
        """Whether an int64 value is computed as int."""
        if not self.dialect.narrow_index or node.dtype is not dtypes.int64:
            return False
        for part in walk(node):
            if part not in self._narrow:
                self._narrow[part] = part.dtype is dtypes.int64 and self._fits(part)
        return self._narrow[node]

    def _fits(self, node: Expr) -> bool:
        if isinstance(node, Var):
            return axis_is_narrow(node.axis)
        if isinstance(node, Load | Symbol) or (isinstance(node, Op) and node.op.name == "cast"):
            return False
        if not all(self._narrow[a] for a in node.args if a.dtype is dtypes.int64):
            return False
        low, high = bounds(node)
        return _INT32[0] <= low and high <= _INT32[1]

    def _node(self, node: Expr, done: Mapping[Expr, tuple[str, int]]) -> tuple[str, int]:
        if node in self.bound:
            return self.bound[node], PRIMARY
        if isinstance(node, Const):
            return self._constant(node)
        if isinstance(node, Var):
            return self.names.of(node.axis, node.axis.name), PRIMARY
        if isinstance(node, Symbol):
            return self.names.of(node, node.name), PRIMARY
        if isinstance(node, Load):
            return self.load(node), PRIMARY
        if isinstance(node, Op):
            return self._operation(node, [done[a] for a in node.args])
        raise InternalError(f"{type(node).__name__} has no place in Loops")

    def _operation(self, node: Op, args: list[tuple[str, int]]) -> tuple[str, int]:
        spelling = self.dialect.spellings[node.op.name]
        if isinstance(spelling, Conversion):
            return self.convert(node.dtype, *self._in_compute_type(node.args[0], args[0]))
        if isinstance(spelling, Reinterpretation):
            source = node.args[0].dtype
            name = spelling.name.replace("{to}", self.c_type(node.dtype)).replace("{t}", self.c_type(source))
            stored = source.name in self.dialect.computes_as  # back from the type that it reads as
            return f"{name}({self.convert(source, *args[0])[0] if stored else args[0][0]})", PRIMARY
        args = [self._in_compute_type(a, t) for a, t in zip(node.args, args, strict=True)]
        if isinstance(spelling, Ternary):
            condition, then, otherwise = args
            if node.dtype.name in self.dialect.computes_as:
                # what is stored in 16 bits and what it is read as convert to each other: C++ would not choose
                wide = self.c_type(self.dialect.computes_as[node.dtype.name])
                then, otherwise = ((f"({wide}){_wrapped(t, UNARY)}", UNARY) for t in (then, otherwise))
            if node.dtype is dtypes.int64 and node.wraps:
                # a short literal beside a view's element, which converts to any integer, would make both short
                wide = self.c_type(node.dtype)
                then, otherwise = (
                    (f"({wide}){_wrapped(t, UNARY)}", UNARY) if isinstance(a, Const) else t
                    for a, t in zip(node.args[1:], (then, otherwise), strict=True)
                )
            text = (
                f"{_wrapped(condition, TERNARY + 1)} ? {_wrapped(then, TERNARY + 1)} : {_wrapped(otherwise, TERNARY)}"
            )
            return self._rounded(node, (text, TERNARY))
        if isinstance(spelling, Infix):
            return self._rounded(node, self._infix(node, spelling, args))
        if isinstance(spelling, Prefix):
            if node.op.name == "neg" and node.dtype.bits >= 32 and exceeds(node):
                wide = self.c_type(dtypes.uint64 if node.dtype.bits == 64 else dtypes.uint32)
                return f"({self.c_type(node.dtype)})(0 - ({wide}){_wrapped(args[0], UNARY)})", UNARY
            return self._rounded(node, (spelling.symbol + _wrapped(args[0], UNARY + 1), UNARY))
        if isinstance(spelling, Division):
            low = bounds(node.args[0])[0]
            if low >= 0 and bounds(node.args[1])[0] >= 1:
                return self._rounded(node, self._infix(node, Infix(spelling.symbol, MULTIPLY), args))
            return self._rounded(node, self._call(node, spelling.function, args))
        name = spelling.by_type.get(node.args[0].dtype.name, spelling.name)
        return self._rounded(node, self._call(node, name, args))

    def _infix(self, node: Op, spelling: Infix, args: list[tuple[str, int]]) -> tuple[str, int]:
        left, right = args
        # C computes small numbers as int, which holds their sums, and those of 8 bits' products
        enough = node.dtype.bits <= (8 if spelling.symbol == "*" else 16)
        if spelling.symbol in "+-*" and not enough and exceeds(node):
            # among unsigned numbers, which wrap around; C leaves open what signed ones do
            wide = self.c_type(dtypes.uint64 if node.dtype.bits == 64 else dtypes.uint32)
            product = " ".join(
                (f"({wide}){_wrapped(left, UNARY)}", spelling.symbol, f"({wide}){_wrapped(right, UNARY)}")
            )
            if node.dtype.bits < 32:
                return product, spelling.precedence
            return f"({self.c_type(node.dtype)})({product})", UNARY
        if node.dtype is dtypes.int64 and self._must_widen(node):
            left = f"({self.c_type(dtypes.int64)}){_wrapped(left, UNARY)}", UNARY
        # the right operand needs one step more: a - (b - c)
        exact = spelling.symbol in ("+", "*", "&&", "||") and not node.args[0].dtype.is_float
        strength = spelling.precedence if exact and not self._mixed_widths(node) else spelling.precedence + 1
        text = f"{_wrapped(left, spelling.precedence)} {spelling.symbol} {_wrapped(right, strength)}"
        return text, spelling.precedence

    def _mixed_widths(self, node: Op) -> bool:
        # Dropping the parentheses of a + (b + c) would let C add a and b first, perhaps in too narrow a type.
        return self.dialect.narrow_index and node.dtype is dtypes.int64

    def _must_widen(self, node: Op) -> bool:
        """All operands are int but the result needs 64 bits."""
        if not self.dialect.narrow_index or self.is_narrow(node):
            return False
        return all(self.is_narrow(a) for a in node.args)

    def _call(self, node: Op, name: str, args: list[tuple[str, int]]) -> tuple[str, int]:
        operand = node.args[0].dtype
        operand = self.dialect.computes_as.get(operand.name, operand)
        if operand is dtypes.int64 and all(self.is_narrow(a) for a in node.args) and self.is_narrow(node):
            operand = dtypes.int32
        texts = ", ".join(text for text, _ in args)
        return f"{name.replace('{t}', self.c_type(operand))}({texts})", PRIMARY

    def _in_compute_type(self, node: Expr, printed: tuple[str, int]) -> tuple[str, int]:
        """An operand as arithmetic takes it; storage types convert by themselves in C++."""
        return printed

    def _rounded(self, node: Op, printed: tuple[str, int]) -> tuple[str, int]:
        """C computes small integers as int and storage types in another type: back to the node's own."""
        small = node.dtype.is_int and node.dtype.bits < 32
        if small or node.dtype.name in self.dialect.computes_as:
            return self.convert(node.dtype, *printed)
        return printed

    def _constant(self, node: Const) -> tuple[str, int]:
        if node.dtype.kind == "b":
            return ("true" if node.value else "false"), PRIMARY
        if node.dtype.is_storage:
            return str(node.value), PRIMARY
        if not node.dtype.is_float:
            return integer_text(int(node.value), node.dtype)
        compute = self.dialect.computes_as.get(node.dtype.name)
        printed = self._float(float(node.value), compute or node.dtype)
        return self.convert(node.dtype, *printed) if compute is not None else printed

    def _float(self, value: float, dtype: DType) -> tuple[str, int]:
        if dtype is dtypes.float32:
            with np.errstate(over="ignore"):  # beyond float32 is its infinity
                value = float(np.float32(value))
        if math.isnan(value):
            return self.dialect.nan, PRIMARY
        negative = math.copysign(1.0, value) < 0
        if math.isinf(value):
            return ("-" if negative else "") + self.dialect.infinity, UNARY if negative else PRIMARY
        text = str(np.float32(value)) if dtype is dtypes.float32 else repr(value)
        text += "" if any(c in text for c in ".e") else ".0"
        return text + ("f" if dtype is dtypes.float32 else ""), UNARY if negative else PRIMARY


def integer_text(value: int, dtype: DType = dtypes.index) -> tuple[str, int]:
    """An integer literal and its precedence."""
    if dtype.kind == "u":
        return str(value) + ("ULL" if dtype.bits == 64 else "u"), PRIMARY
    if value == -(1 << 63):
        return f"(-{(1 << 63) - 1}LL - 1)", PRIMARY
    if value == _INT32[0]:
        return f"({_INT32[0] + 1} - 1)", PRIMARY
    suffix = "" if _INT32[0] <= value <= _INT32[1] else "LL"
    return f"{value}{suffix}", UNARY if value < 0 else PRIMARY


def _wrapped(printed: tuple[str, int], precedence: int) -> str:
    text, own = printed
    return text if own >= precedence else f"({text})"


def _worth_naming(roots: tuple[Expr, ...]) -> list[Expr]:
    """Nodes used more than once that may be computed ahead, operands first.

    What holds a load may only move ahead if it is evaluated anyway: under a select it may be out of bounds.
    """
    uses: dict[Expr, int] = {}
    size: dict[Expr, int] = {}
    reads: dict[Expr, bool] = {}
    order = list(walk(*roots))
    for node in order:
        for arg in node.args:
            uses[arg] = uses.get(arg, 0) + 1
        size[node] = 1 + sum(size[a] for a in node.args)
        reads[node] = isinstance(node, Load) or any(reads[a] for a in node.args)
    always = _always_evaluated(roots)
    named: list[Expr] = []
    for node in order:
        if uses.get(node, 0) < 2 or not isinstance(node, Op | Load):
            continue
        if isinstance(node, Op) and node.dtype in (dtypes.index, dtypes.bool_) and size[node] < 8:
            continue  # short index arithmetic reads better in place
        if not reads[node] or node in always:
            named.append(node)
    return named


def _always_evaluated(roots: tuple[Expr, ...]) -> set[Expr]:
    seen: set[Expr] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        lazy = isinstance(node, Op) and node.op.name in ("select", "and", "or")
        stack.extend(node.args[:1] if lazy else node.args)
    return seen


def axis_is_narrow(axis: Axis) -> bool:
    """Whether every value of the axis, and the one that ends its loop, fits in an int."""
    return (axis.extent if isinstance(axis.extent, int) else bounds(axis.extent)[1]) <= _INT32[1]
