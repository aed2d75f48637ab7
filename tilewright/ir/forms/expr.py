"""Scalar expressions, shared by the Program and the Loops: immutable and interned, so identity is equality.

Comparisons are built by functions (`lt`, `eq`...), never by Python's operators; traversal is iterative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.pool import POOL, FloatKey, keep
from tilewright.ir.forms.scalar import OPS, ScalarOp
from tilewright.ir.forms.spelling import ATOM, BITS, LET_DEPTH, LET_SIZE, PRECEDENCE, const_text, name_text


class Source(Protocol):
    """What a Load reads: a Tensor of a Program or a Buffer of Loops."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[Extent, ...]: ...
    @property
    def dtype(self) -> DType: ...


class Expr:
    """A scalar expression of known type. Subclasses are made through the functions below, which intern.

    Nodes never change, so what is derived from one (its simplified form, its sum of terms, its interval) is kept on
    it by the module that derives it, and goes when the node goes.
    """

    __slots__ = ("dtype", "args", "axes", "reads", "wraps", "simplified", "as_linear", "interval", "__weakref__")
    dtype: DType
    args: tuple[Expr, ...]
    axes: tuple[Axis, ...]  # every axis below, each once, in the order of a walk
    reads: bool  # whether it is a Load or holds one
    wraps: (
        bool  # whether it holds data (a Load, a State): its integers wrap around, those of indices never reach the end
    )
    simplified: Any
    as_linear: Any
    interval: Any

    def rebuild(self, args: tuple[Expr, ...]) -> Expr:
        return self

    def __add__(self, other: ExprLike) -> Expr:
        return add(self, other)

    def __radd__(self, other: ExprLike) -> Expr:
        return add(other, self)

    def __sub__(self, other: ExprLike) -> Expr:
        return sub(self, other)

    def __rsub__(self, other: ExprLike) -> Expr:
        return sub(other, self)

    def __mul__(self, other: ExprLike) -> Expr:
        return mul(self, other)

    def __rmul__(self, other: ExprLike) -> Expr:
        return mul(other, self)

    def __truediv__(self, other: ExprLike) -> Expr:
        return op("div", self, other)

    def __floordiv__(self, other: ExprLike) -> Expr:
        return op("floordiv", self, other)

    def __mod__(self, other: ExprLike) -> Expr:
        return op("mod", self, other)

    def __neg__(self) -> Expr:
        return op("neg", self)

    def __repr__(self) -> str:
        return spelled(self, lambda thing: name_text(thing.name))

    def spelling(self, args: Sequence[tuple[str, int]], name: Callable[[Any], str]) -> tuple[str, int]:
        """Its text from those of its operands, and how tightly it binds; `name` spells axes and sources."""
        raise NotImplementedError


ExprLike = Expr | int | float | bool
Extent = int | Expr  # an extent is an integer or an expression over symbols


class Const(Expr):
    __slots__ = ("value",)
    value: int | float | bool

    def spelling(self, args: Sequence[tuple[str, int]], name: Callable[[Any], str]) -> tuple[str, int]:
        return const_text(self.value, self.dtype), ATOM


class Symbol(Expr):
    """An extent that is not known before the call; `low` and `high` bound it (both included)."""

    __slots__ = ("name", "low", "high")
    name: str
    low: int
    high: int

    def spelling(self, args: Sequence[tuple[str, int]], name: Callable[[Any], str]) -> tuple[str, int]:
        return f"?{name_text(self.name)}", ATOM


@dataclass(frozen=True, eq=False)
class Axis:
    """An iteration axis from 0 to extent - 1. Identity counts, not the name."""

    name: str
    extent: Extent

    def __repr__(self) -> str:
        return f"{self.name}:{self.extent}"


class Var(Expr):
    """The current value of an axis."""

    __slots__ = ("axis",)
    axis: Axis

    def spelling(self, args: Sequence[tuple[str, int]], name: Callable[[Any], str]) -> tuple[str, int]:
        return name(self.axis), ATOM


class State(Expr):
    """A named value without an axis: the operands of a monoid's combine."""

    __slots__ = ("name",)
    name: str

    def spelling(self, args: Sequence[tuple[str, int]], name: Callable[[Any], str]) -> tuple[str, int]:
        return f"${name_text(self.name)}", ATOM


class Load(Expr):
    __slots__ = ("source",)
    source: Any  # Tensor or Buffer; the indices are args

    @property
    def indices(self) -> tuple[Expr, ...]:
        return self.args

    def rebuild(self, args: tuple[Expr, ...]) -> Expr:
        return load(self.source, args)

    def spelling(self, args: Sequence[tuple[str, int]], name: Callable[[Any], str]) -> tuple[str, int]:
        return f"{name(self.source)}[{', '.join(text for text, _ in args)}]", ATOM


class Op(Expr):
    __slots__ = ("op",)
    op: ScalarOp

    def rebuild(self, args: tuple[Expr, ...]) -> Expr:
        return _make_op(self.op, args, self.dtype)

    def spelling(self, args: Sequence[tuple[str, int]], name: Callable[[Any], str]) -> tuple[str, int]:
        if self.op.name == "cast":
            return f"{self.dtype.name}({args[0][0]})", ATOM
        if self.op.name == "bitcast":
            return f"{BITS}{self.dtype.name}({args[0][0]})", ATOM
        level = PRECEDENCE.get(self.op.name)
        if level is None:
            return f"{self.op.name}({', '.join(text for text, _ in args)})", ATOM
        (left, left_level), (right, right_level) = args
        # comparisons do not chain, everything else groups to the left
        if left_level < level or (level == PRECEDENCE["eq"] and left_level == level):
            left = f"({left})"
        if right_level <= level:
            right = f"({right})"
        return f"{left} {self.op.symbol} {right}", level


def _blank(cls: type[Expr], dtype: DType, args: tuple[Expr, ...], axes: tuple[Axis, ...]) -> Any:
    node = object.__new__(cls)
    node.dtype = dtype
    node.args = args
    node.axes = axes
    node.reads = cls is Load
    node.wraps = cls is Load or cls is State
    for arg in args:
        if arg.reads:
            node.reads = True
        if arg.wraps:
            node.wraps = True
    node.simplified = node.as_linear = node.interval = None
    return node


def _intern(cls: type[Expr], dtype: DType, args: tuple[Expr, ...], field: str, *values: Any) -> Any:
    """The one node of this class with these fields; `field` names them, separated by blanks."""
    key = (cls, dtype.name, args, *values)
    entry = POOL.get(key)
    if entry is not None:
        found = entry()
        if found is not None:
            return found
    node = _blank(cls, dtype, args, _joined_axes(args))
    for name, value in zip(field.split(), values, strict=True):
        setattr(node, name, value)
    return keep(key, node)


def _joined_axes(args: tuple[Expr, ...]) -> tuple[Axis, ...]:
    axes: tuple[Axis, ...] = ()
    for arg in args:
        more = arg.axes
        if more and more is not axes:
            axes = (*axes, *[a for a in more if a not in axes]) if axes else more
    return axes


def const(value: int | float | bool | np.generic, dtype: DType = dtypes.index) -> Const:
    if isinstance(value, np.generic):
        value = value.item()
    if dtype.is_float:
        value = float(value)
        key: Any = FloatKey(value)
    elif dtype.kind == "b":
        value = key = bool(value)
    else:
        value = key = int(value)
    full = (Const, dtype.name, key)
    entry = POOL.get(full)
    if entry is not None:
        found = entry()
        if found is not None:
            return found
    node = _blank(Const, dtype, (), ())
    node.value = value
    return keep(full, node)


def symbol(name: str, low: int = 1, high: int = 1 << 31) -> Symbol:
    return _intern(Symbol, dtypes.index, (), "name low high", name, low, high)


def var(axis: Axis) -> Var:
    key = (Var, axis)
    entry = POOL.get(key)
    if entry is not None:
        found = entry()
        if found is not None:
            return found
    node = _blank(Var, dtypes.index, (), (axis,))
    node.axis = axis
    return keep(key, node)


def state(name: str, dtype: DType) -> State:
    return _intern(State, dtype, (), "name", name)


def load(source: Source, indices: Iterable[ExprLike]) -> Load:
    idx = tuple([i if isinstance(i, Expr) else const(i) for i in indices])
    if len(idx) != len(source.shape):
        raise ValueError(f"{source.name} has {len(source.shape)} axes, read with {len(idx)} indices")
    return _intern(Load, source.dtype, idx, "source", source)


def as_expr(value: ExprLike, dtype: DType = dtypes.index) -> Expr:
    return value if isinstance(value, Expr) else const(value, dtype)


def _make_op(row: ScalarOp, args: tuple[Expr, ...], dtype: DType) -> Op:
    key = (row, dtype.name, args)
    entry = POOL.get(key)
    if entry is not None:
        found = entry()
        if found is not None:
            return found
    node = _blank(Op, dtype, args, _joined_axes(args))
    node.op = row
    return keep(key, node)


def op(name: str, *values: ExprLike) -> Expr:
    """Apply a row of the scalar table; plain Python numbers take the type of the other operands."""
    row = OPS[name]
    if len(values) != row.arity:
        raise ValueError(f"{name} takes {row.arity} operands, got {len(values)}")
    value_operands = values[1:] if name == "select" else values
    typed = [v.dtype for v in value_operands if isinstance(v, Expr)]
    dtype = typed[0] if typed else dtypes.index
    args = tuple([v if isinstance(v, Expr) else const(v, dtype) for v in value_operands])
    for arg in args:
        if arg.dtype is not dtype:
            raise TypeError(f"{name} of mixed types {[a.dtype.name for a in args]}: cast first")
    if dtype.kind not in row.kinds:
        raise TypeError(f"{name} is not defined on {dtype.name}")
    if name == "select":
        return _make_op(row, (as_expr(values[0], dtypes.bool_), *args), dtype)
    return _make_op(row, args, dtypes.bool_ if row.result == "bool" else dtype)


def cast(value: Expr, dtype: DType) -> Expr:
    if value.dtype is dtype:
        return value
    if isinstance(value, Const) and not (value.dtype.is_float and not dtype.is_float):
        if dtype.is_int and value.dtype.is_int:
            return const(wrapped_integer(int(value.value), dtype), dtype)
        if dtype is dtypes.tf32:
            return const(float(dtypes.as_tf32(np.asarray(value.value, np.float32))), dtype)
        return const(value.value, dtype)
    if is_op(value, "cast") and value.args[0].dtype is dtype and dtypes.widens(dtype, value.dtype):
        return value.args[0]  # there and back
    return _make_op(OPS["cast"], (value,), dtype)


def wrapped_integer(value: int, dtype: DType) -> int:
    """What is left of an integer in `dtype`: its low bits."""
    low = value & ((1 << dtype.bits) - 1)
    return low - (1 << dtype.bits) if dtype.kind == "i" and low >> (dtype.bits - 1) else low


def add(a: ExprLike, b: ExprLike) -> Expr:
    return op("add", a, b)


def sub(a: ExprLike, b: ExprLike) -> Expr:
    return op("sub", a, b)


def mul(a: ExprLike, b: ExprLike) -> Expr:
    return op("mul", a, b)


def lt(a: ExprLike, b: ExprLike) -> Expr:
    return op("lt", a, b)


def le(a: ExprLike, b: ExprLike) -> Expr:
    return op("le", a, b)


def eq(a: ExprLike, b: ExprLike) -> Expr:
    return op("eq", a, b)


def minimum(a: ExprLike, b: ExprLike) -> Expr:
    return op("min", a, b)


def maximum(a: ExprLike, b: ExprLike) -> Expr:
    return op("max", a, b)


def select(condition: ExprLike, then: ExprLike, otherwise: ExprLike) -> Expr:
    return op("select", condition, then, otherwise)


def all_of(conditions: Iterable[Expr]) -> Expr:
    result: Expr | None = None
    for condition in conditions:
        result = condition if result is None else op("and", result, condition)
    return const(True, dtypes.bool_) if result is None else result


def is_op(node: Expr, name: str) -> bool:
    return isinstance(node, Op) and node.op.name == name


def flattened(node: Expr, name: str) -> list[Expr]:
    """a, b and c of (a and b) and c: the operands of one operation nested in itself, in order."""
    found: list[Expr] = []
    stack = [node]
    while stack:
        part = stack.pop()
        if is_op(part, name):
            stack.extend(reversed(part.args))
        else:
            found.append(part)
    return found


def spelled(root: Expr, name: Callable[[Any], str]) -> str:
    """The text of an expression, large shared operands and deep chains named in front of it."""
    nodes = list(walk(root))
    uses: dict[int, int] = {}
    for node in nodes:
        for argument in node.args:
            uses[id(argument)] = uses.get(id(argument), 0) + 1
    texts: dict[int, tuple[str, int]] = {}
    sizes: dict[int, int] = {}
    depths: dict[int, int] = {}
    lets: list[str] = []
    for node in nodes:
        texts[id(node)] = node.spelling([texts[id(a)] for a in node.args], name)
        sizes[id(node)] = 1 + sum(sizes[id(a)] for a in node.args)
        depths[id(node)] = 1 + max((depths[id(a)] for a in node.args), default=0)
        big = uses.get(id(node), 0) > 1 and sizes[id(node)] >= LET_SIZE
        if node is not root and (big or depths[id(node)] >= LET_DEPTH):
            lets.append(f"@{len(lets)} = {texts[id(node)][0]}")
            texts[id(node)] = (f"@{len(lets) - 1}", ATOM)
            sizes[id(node)] = depths[id(node)] = 1
    body = texts[id(root)][0]
    return f"let {', '.join(lets)} in {body}" if lets else body


def walk(*roots: Expr) -> Iterator[Expr]:
    """Every distinct node below the roots, operands before their users."""
    done: set[Expr] = set()
    for root in roots:
        if root in done:
            continue
        stack = [(root, iter(root.args))]
        while stack:
            node, operands = stack[-1]
            for arg in operands:
                if arg in done:
                    continue
                if arg.args:
                    stack.append((arg, iter(arg.args)))
                    break
                done.add(arg)
                yield arg
            else:
                stack.pop()
                done.add(node)
                yield node


def loads(*roots: Expr) -> list[Load]:
    """Every distinct Load below the roots, in the order of a walk."""
    done: set[Expr] = set()
    found: list[Load] = []
    for root in roots:
        if not root.reads or root in done:
            continue
        stack = [(root, iter(root.args))]
        while stack:
            node, operands = stack[-1]
            for arg in operands:
                if arg.reads and arg not in done:
                    stack.append((arg, iter(arg.args)))
                    break
            else:
                stack.pop()
                done.add(node)
                if isinstance(node, Load):
                    found.append(node)
    return found


def axes_of(*roots: Expr) -> list[Axis]:
    return list(roots[0].axes if len(roots) == 1 else _joined_axes(roots))


def used_as_numbers(values: Iterable[Expr]) -> set[Axis]:
    """Axes that values use other than to say what they read."""
    found: set[Axis] = set()
    seen: set[Expr] = set()
    stack = list(values)
    while stack:
        node = stack.pop()
        if isinstance(node, Load) or node in seen:
            continue
        seen.add(node)
        if isinstance(node, Var):
            found.add(node.axis)
        stack.extend(node.args)
    return found


def rewrite(root: Expr, rule: Callable[[Expr], Expr | None]) -> Expr:
    """Rebuild bottom-up; `rule` sees each node after its operands were rewritten, None keeps it."""
    done: dict[Expr, Expr] = {}
    for node in walk(root):
        new = _with_args(node, done)
        replaced = rule(new)
        done[node] = new if replaced is None else replaced
    return done[root]


def _with_args(node: Expr, done: Mapping[Expr, Expr]) -> Expr:
    for arg in node.args:
        if done[arg] is not arg:
            return node.rebuild(tuple([done[a] for a in node.args]))
    return node


def substitute(root: Expr, values: Mapping[Axis, ExprLike]) -> Expr:
    """Replace axes by expressions."""
    replaced = values.keys()
    if replaced.isdisjoint(root.axes):
        return root
    if isinstance(root, Var):
        return as_expr(values[root.axis])
    done: dict[Expr, Expr] = {}  # of what mentions an axis; all else stays itself
    stack = [(root, iter(root.args))]
    while stack:
        node, operands = stack[-1]
        for arg in operands:
            if arg in done or replaced.isdisjoint(arg.axes):
                continue
            if isinstance(arg, Var):
                done[arg] = as_expr(values[arg.axis])
                continue
            stack.append((arg, iter(arg.args)))
            break
        else:
            stack.pop()
            done[node] = node.rebuild(tuple([done.get(a, a) for a in node.args]))
    return done[root]


def replace_nodes(root: Expr, values: Mapping[Expr, Expr]) -> Expr:
    return rewrite(root, lambda n: values.get(n)) if values else root
