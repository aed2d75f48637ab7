"""Scalar expressions, shared by the Program and the Loops: immutable and interned, so identity is equality.

Comparisons are built by functions (`lt`, `eq`...), never by Python's operators; traversal is iterative.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tilewright.ir import dtypes
from tilewright.ir.dtypes import DType
from tilewright.ir.scalar import OPS, ScalarOp


class Source(Protocol):
    """What a Load reads: a Tensor of a Program or a Buffer of Loops."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[Extent, ...]: ...
    @property
    def dtype(self) -> DType: ...


class Expr:
    """A scalar expression of known type. Subclasses are made through the functions below, which intern."""

    __slots__ = ("dtype", "args", "__weakref__")
    dtype: DType
    args: tuple[Expr, ...]

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
        from tilewright.ir.text import expr_text

        return expr_text(self)


ExprLike = Expr | int | float | bool
Extent = int | Expr  # an extent is an integer or an expression over symbols


class Const(Expr):
    __slots__ = ("value",)
    value: int | float | bool


class Symbol(Expr):
    """An extent that is not known before the call; `low` and `high` bound it (both included)."""

    __slots__ = ("name", "low", "high")
    name: str
    low: int
    high: int


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


class State(Expr):
    """A named value without an axis: the operands of a monoid's combine."""

    __slots__ = ("name",)
    name: str


class Load(Expr):
    __slots__ = ("source",)
    source: Any  # Tensor or Buffer; the indices are args

    @property
    def indices(self) -> tuple[Expr, ...]:
        return self.args

    def rebuild(self, args: tuple[Expr, ...]) -> Expr:
        return load(self.source, args)


class Op(Expr):
    __slots__ = ("op",)
    op: ScalarOp

    def rebuild(self, args: tuple[Expr, ...]) -> Expr:
        return _make_op(self.op, args, self.dtype)


_POOL: weakref.WeakValueDictionary[tuple[Any, ...], Expr] = weakref.WeakValueDictionary()


def _intern(cls: type[Expr], dtype: DType, args: tuple[Expr, ...], **fields: Any) -> Any:
    key = (cls, dtype.name, tuple(map(id, args)), *fields.values())
    found = _POOL.get(key)
    if found is not None:
        return found
    node = object.__new__(cls)
    node.dtype = dtype
    node.args = args
    for name, value in fields.items():
        object.__setattr__(node, name, value)
    _POOL[key] = node
    return node


class _FloatKey:
    """A float compared by bits: NaN equals itself and -0.0 differs from 0.0."""

    __slots__ = ("bits",)

    def __init__(self, value: float) -> None:
        self.bits = np.float64(value).tobytes()

    def __hash__(self) -> int:
        return hash(self.bits)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _FloatKey) and self.bits == other.bits


def const(value: int | float | bool | np.generic, dtype: DType = dtypes.index) -> Const:
    if isinstance(value, np.generic):
        value = value.item()
    if dtype.is_float:
        value = float(value)
        key: Any = _FloatKey(value)
    elif dtype.kind == "b":
        value = key = bool(value)
    else:
        value = key = int(value)
    full = (Const, dtype.name, key)
    found = _POOL.get(full)
    if found is None:
        found = object.__new__(Const)
        found.dtype, found.args, found.value = dtype, (), value
        _POOL[full] = found
    return found  # type: ignore[return-value]


def symbol(name: str, low: int = 1, high: int = 1 << 31) -> Symbol:
    return _intern(Symbol, dtypes.index, (), name=name, low=low, high=high)


def var(axis: Axis) -> Var:
    return _intern(Var, dtypes.index, (), axis=axis)


def state(name: str, dtype: DType) -> State:
    return _intern(State, dtype, (), name=name)


def load(source: Source, indices: Iterable[ExprLike]) -> Load:
    idx = tuple(as_expr(i) for i in indices)
    if len(idx) != len(source.shape):
        raise ValueError(f"{source.name} has {len(source.shape)} axes, read with {len(idx)} indices")
    return _intern(Load, source.dtype, idx, source=source)


def as_expr(value: ExprLike, dtype: DType = dtypes.index) -> Expr:
    return value if isinstance(value, Expr) else const(value, dtype)


def _make_op(row: ScalarOp, args: tuple[Expr, ...], dtype: DType) -> Op:
    return _intern(Op, dtype, args, op=row)


def op(name: str, *values: ExprLike) -> Expr:
    """Apply a row of the scalar table; plain Python numbers take the type of the other operands."""
    row = OPS[name]
    if len(values) != row.arity:
        raise ValueError(f"{name} takes {row.arity} operands, got {len(values)}")
    value_operands = values[1:] if name == "select" else values
    typed = [v.dtype for v in value_operands if isinstance(v, Expr)]
    dtype = typed[0] if typed else dtypes.index
    args = tuple(as_expr(v, dtype) for v in value_operands)
    if any(a.dtype is not dtype for a in args):
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
        return const(value.value, dtype)
    return _make_op(OPS["cast"], (value,), dtype)


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


def walk(*roots: Expr) -> Iterator[Expr]:
    """Every distinct node below the roots, operands before their users."""
    done: set[int] = set()
    stack: list[tuple[Expr, bool]] = [(r, False) for r in reversed(roots)]
    while stack:
        node, ready = stack.pop()
        if id(node) in done:
            continue
        if ready:
            done.add(id(node))
            yield node
            continue
        stack.append((node, True))
        stack.extend((a, False) for a in reversed(node.args) if id(a) not in done)


def loads(*roots: Expr) -> list[Load]:
    return [n for n in walk(*roots) if isinstance(n, Load)]


def axes_of(*roots: Expr) -> list[Axis]:
    return [n.axis for n in walk(*roots) if isinstance(n, Var)]


def rewrite(root: Expr, rule: Callable[[Expr], Expr | None]) -> Expr:
    """Rebuild bottom-up; `rule` sees each node after its operands were rewritten, None keeps it."""
    done: dict[int, Expr] = {}
    for node in walk(root):
        args = tuple(done[id(a)] for a in node.args)
        new = node if all(a is b for a, b in zip(args, node.args, strict=True)) else node.rebuild(args)
        replaced = rule(new)
        done[id(node)] = new if replaced is None else replaced
    return done[id(root)]


def substitute(root: Expr, values: Mapping[Axis, ExprLike]) -> Expr:
    """Replace axes by expressions."""
    if not values:
        return root
    return rewrite(root, lambda n: as_expr(values[n.axis]) if isinstance(n, Var) and n.axis in values else None)


def replace_nodes(root: Expr, values: Mapping[Expr, Expr]) -> Expr:
    return rewrite(root, lambda n: values.get(n)) if values else root
