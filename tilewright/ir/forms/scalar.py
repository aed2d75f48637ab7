"""The table of scalar operations: one row each with arity, result type, NumPy meaning and interval rule.

Every renderer spells every row (a test holds this), and no other file lists operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Interval = tuple[float, float]  # closed; ±inf where unbounded; integers stay exact Python ints
UNBOUNDED: Interval = (-math.inf, math.inf)


@dataclass(frozen=True, eq=False)
class ScalarOp:
    name: str
    arity: int
    result: str  # "same": the operands' type; "bool"; "cast", "bits": given by the node
    numpy: Callable[..., Any]
    interval: Callable[..., Interval] | None = None
    kinds: str = "fiub"  # operand kinds it is defined for
    symbol: str = ""  # infix spelling in text dumps, if any

    def __repr__(self) -> str:
        return self.name


def _erf(x: Any) -> Any:
    # math.erf elementwise: NumPy has none, and SciPy would be a big dependency for one function.
    x = np.asarray(x)
    wide = x.astype(np.float64)
    flat = np.fromiter((math.erf(v) for v in wide.ravel()), np.float64, wide.size)
    return flat.reshape(x.shape).astype(x.dtype)


def _sigmoid(x: Any) -> Any:
    x = np.asarray(x)
    with np.errstate(over="ignore"):
        return (1 / (1 + np.exp(-x.astype(np.float64)))).astype(x.dtype)


def _truncdiv(a: Any, b: Any) -> Any:
    a, b = np.asarray(a), np.asarray(b)
    quotient = np.floor_divide(a, b)
    short = (quotient * b != a) & ((a < 0) != (b < 0)) & (b != 0)
    return quotient + short.astype(quotient.dtype)


def _mul_bounds(a: Interval, b: Interval) -> Interval:
    products = [0 if 0 in (x, y) else x * y for x in a for y in b]
    return min(products), max(products)


def _quotient(a: float, b: float) -> float:
    return a if math.isinf(a) else int(abs(a) // b) * (1 if a >= 0 else -1)


def _truncdiv_bounds(a: Interval, b: Interval) -> Interval:
    if b[0] != b[1] or not 0 < b[0] < math.inf:
        return UNBOUNDED
    return _quotient(a[0], b[0]), _quotient(a[1], b[0])


def _floordiv_bounds(a: Interval, b: Interval) -> Interval:
    if b[0] != b[1] or not 0 < b[0] < math.inf:
        return UNBOUNDED
    return tuple(x if math.isinf(x) else x // b[0] for x in a)  # type: ignore[return-value]


def _mod_bounds(a: Interval, b: Interval) -> Interval:
    if b[0] != b[1] or not 0 < b[0] < math.inf:
        return UNBOUNDED
    if a[0] >= 0 and a[1] < b[0]:
        return a
    return 0, b[0] - 1


def _abs_bounds(a: Interval) -> Interval:
    if a[0] >= 0:
        return a
    return (0 if a[1] >= 0 else -a[1]), max(-a[0], a[1])


def _and_bounds(a: Interval, b: Interval) -> Interval:
    if a[0] < 0 or b[0] < 0:
        return UNBOUNDED
    return 0, min(a[1], b[1])


def _or_bounds(a: Interval, b: Interval) -> Interval:
    if a[0] < 0 or b[0] < 0 or math.inf in (a[1], b[1]):
        return UNBOUNDED
    return 0, (1 << max(int(a[1]), int(b[1])).bit_length()) - 1


def _shift_left(a: Any, b: Any) -> Any:
    return np.left_shift(a, np.asarray(b) & (np.asarray(a).dtype.itemsize * 8 - 1))


def _shift_right(a: Any, b: Any) -> Any:
    return np.right_shift(a, np.asarray(b) & (np.asarray(a).dtype.itemsize * 8 - 1))


def _monotone(f: Callable[[float], float]) -> Callable[[Interval], Interval]:
    def rule(a: Interval) -> Interval:
        try:
            return f(a[0]), f(a[1])
        except (ValueError, OverflowError):
            return UNBOUNDED

    return rule


def _op(*args: Any, **kwargs: Any) -> ScalarOp:
    return ScalarOp(*args, **kwargs)


_ROWS = [
    # arithmetic
    _op("add", 2, "same", np.add, lambda a, b: (a[0] + b[0], a[1] + b[1]), "fiu", "+"),
    _op("sub", 2, "same", np.subtract, lambda a, b: (a[0] - b[1], a[1] - b[0]), "fiu", "-"),
    _op("mul", 2, "same", np.multiply, _mul_bounds, "fiu", "*"),
    _op("div", 2, "same", np.divide, None, "f", "/"),
    # of integers, by zero: 0; the lowest by -1: itself, as everything wraps
    _op("truncdiv", 2, "same", _truncdiv, _truncdiv_bounds, "iu"),
    _op("floordiv", 2, "same", np.floor_divide, _floordiv_bounds, "iu", "//"),
    _op("mod", 2, "same", np.mod, _mod_bounds, "iu", "%"),
    _op("fmod", 2, "same", np.fmod, None, "fiu"),
    _op("min", 2, "same", np.minimum, lambda a, b: (min(a[0], b[0]), min(a[1], b[1]))),
    _op("max", 2, "same", np.maximum, lambda a, b: (max(a[0], b[0]), max(a[1], b[1]))),
    _op("pow", 2, "same", np.power, None, "f"),
    _op("neg", 1, "same", np.negative, lambda a: (-a[1], -a[0]), "fi"),
    _op("abs", 1, "same", np.abs, _abs_bounds, "fi"),
    _op("sign", 1, "same", np.sign, lambda a: (-1, 1), "fi"),
    # real functions
    _op("exp", 1, "same", np.exp, lambda a: (0, math.inf), "f"),
    _op("exp2", 1, "same", np.exp2, lambda a: (0, math.inf), "f"),
    _op("log", 1, "same", np.log, None, "f"),
    _op("sqrt", 1, "same", np.sqrt, lambda a: (0, math.inf), "f"),
    _op("rsqrt", 1, "same", lambda x: 1 / np.sqrt(x), lambda a: (0, math.inf), "f"),
    _op("tanh", 1, "same", np.tanh, lambda a: (-1, 1), "f"),
    _op("erf", 1, "same", _erf, lambda a: (-1, 1), "f"),
    _op("sigmoid", 1, "same", _sigmoid, lambda a: (0, 1), "f"),
    _op("sin", 1, "same", np.sin, lambda a: (-1, 1), "f"),
    _op("cos", 1, "same", np.cos, lambda a: (-1, 1), "f"),
    _op("floor", 1, "same", np.floor, _monotone(math.floor), "f"),
    _op("ceil", 1, "same", np.ceil, _monotone(math.ceil), "f"),
    _op("round", 1, "same", np.round, None, "f"),  # halves to even
    _op("trunc", 1, "same", np.trunc, _monotone(math.trunc), "f"),
    # comparison and logic
    _op("lt", 2, "bool", np.less, None, "fiu", "<"),
    _op("le", 2, "bool", np.less_equal, None, "fiu", "<="),
    _op("eq", 2, "bool", np.equal, None, "fiub", "=="),
    _op("ne", 2, "bool", np.not_equal, None, "fiub", "!="),
    _op("and", 2, "bool", np.logical_and, None, "b", "and"),
    _op("or", 2, "bool", np.logical_or, None, "b", "or"),
    _op("not", 1, "bool", np.logical_not, None, "b"),
    _op("isnan", 1, "bool", np.isnan, None, "f"),
    _op("isinf", 1, "bool", np.isinf, None, "f"),
    # bits of integers; a shift takes the low bits of its count alone, and to the right it keeps the sign of signed ones
    _op("bitand", 2, "same", np.bitwise_and, _and_bounds, "iu"),
    _op("bitor", 2, "same", np.bitwise_or, _or_bounds, "iu"),
    _op("bitxor", 2, "same", np.bitwise_xor, _or_bounds, "iu"),
    _op("shl", 2, "same", _shift_left, None, "iu"),
    _op("shr", 2, "same", _shift_right, None, "iu"),
    # the same bits as the node's own type, which is as wide
    _op("bitcast", 1, "bits", lambda x: x, None, "fiubs"),
    # select(condition, then, otherwise); cast: to the node's own type, floats to integers truncate
    _op("select", 3, "same", np.where, lambda c, a, b: (min(a[0], b[0]), max(a[1], b[1])), "fiubs"),
    _op("cast", 1, "cast", lambda x: x, lambda a: a),
]

OPS: dict[str, ScalarOp] = {row.name: row for row in _ROWS}

# Functions that machines compute as one chain of dependent operations, the same for every argument: several run side
# by side in little more than the time of one.
CHAINS = frozenset({"exp", "log", "tanh", "erf", "sigmoid"})
