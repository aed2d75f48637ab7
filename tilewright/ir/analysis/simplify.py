"""Simplification of expressions: constants folded, index arithmetic kept as sums of terms, division by intervals.

Index arithmetic never leaves its type. Data of that type wraps around: its sums may still be put in another order, but
what compares or divides them holds only where their intervals show that nothing wraps.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bounds import bounds
from tilewright.ir.forms.expr import Const, Expr, Op, _make_op, const, is_op, select, wrapped_integer
from tilewright.ir.forms.scalar import OPS, Interval

_ADD, _SUB, _MUL = OPS["add"], OPS["sub"], OPS["mul"]
# what NumPy would give for indices, without its overhead
_OF_INDICES: dict[str, Callable[[int, int], int]] = {
    "lt": operator.lt, "le": operator.le, "eq": operator.eq, "ne": operator.ne, "floordiv": operator.floordiv,
    "mod": operator.mod, "min": min, "max": max,
}  # fmt: skip
_LIMIT = 1 << 63
_ITSELF = object()  # kept on a node that is its own simplified form: a reference to itself would be a cycle


@dataclass(slots=True)  # not frozen: so many are made that it takes a tenth of planning
class Linear:
    """sum(coefficient * term) + constant over integers; terms are expressions that are not sums."""

    terms: dict[Expr, int]
    constant: int

    def scaled(self, factor: int) -> Linear:
        if factor == 0:
            return Linear({}, 0)
        return Linear({t: c * factor for t, c in self.terms.items()}, self.constant * factor)

    def plus(self, other: Linear) -> Linear:
        terms = dict(self.terms)
        for term, coefficient in other.terms.items():
            total = terms.get(term, 0) + coefficient
            if total:
                terms[term] = total
            else:
                terms.pop(term, None)
        return Linear(terms, self.constant + other.constant)

    def expr(self) -> Expr:
        result: Expr | None = None
        # positive terms first: a difference then reads a - b instead of -b + a
        for term, exact in self._positive_first():
            coefficient = wrapped_integer(exact, dtypes.index)
            if not coefficient:
                continue
            size = abs(coefficient)
            lowest = (
                coefficient == dtypes.index.limits[0]
            )  # its size is no number of the type, and it is its own negative
            piece = term if size == 1 else _make_op(_MUL, (term, const(-size if lowest else size)), dtypes.index)
            if result is None:
                result = piece if coefficient > 0 else _make_op(_MUL, (term, const(coefficient)), dtypes.index)
            else:
                result = _make_op(_ADD if coefficient > 0 else _SUB, (result, piece), dtypes.index)
        constant = wrapped_integer(self.constant, dtypes.index)
        if result is None:
            return const(constant)
        if constant == dtypes.index.limits[0]:  # its size is no number of the type
            return _make_op(_ADD, (result, const(constant)), dtypes.index)
        if constant:
            row = _ADD if constant > 0 else _SUB
            result = _make_op(row, (result, const(abs(constant))), dtypes.index)
        return result

    def interval(self) -> Interval:
        """The sum's own interval, without its ever wrapping around."""
        low: float = self.constant
        high: float = self.constant
        for term, coefficient in self.terms.items():
            ends = bounds(term)
            low += coefficient * ends[0 if coefficient > 0 else 1]
            high += coefficient * ends[1 if coefficient > 0 else 0]
        return low, high

    def _positive_first(self) -> list[tuple[Expr, int]]:
        items = list(self.terms.items())
        if all(c > 0 for c in self.terms.values()):
            return items
        return sorted(items, key=lambda item: item[1] < 0)


def linear(node: Expr) -> Linear:
    """An index expression as a sum of terms, kept on the node. Recursive: index sums are shallow."""
    known: Linear | None = node.as_linear
    if known is not None:
        return known
    if isinstance(node, Const):
        return Linear({}, int(node.value))
    total = _sum_of_terms(node) if isinstance(node, Op) and node.dtype is dtypes.index else None
    if total is None:
        return Linear({node: 1}, 0)
    node.as_linear = total
    return total


def _sum_of_terms(node: Op) -> Linear | None:
    name = node.op.name
    if name == "add":
        return linear(node.args[0]).plus(linear(node.args[1]))
    if name == "sub":
        return linear(node.args[0]).plus(linear(node.args[1]).scaled(-1))
    if name == "neg":
        return linear(node.args[0]).scaled(-1)
    if name == "mul":
        a, b = linear(node.args[0]), linear(node.args[1])
        if not a.terms:
            return b.scaled(a.constant)
        if not b.terms:
            return a.scaled(b.constant)
    return None


def simplify(root: Expr) -> Expr:
    """An expression of the same value, smaller where the rules know how. The result is kept on every node met."""
    if root.simplified is not None:
        return _simple(root)
    stack = [root]
    while stack:
        node = stack[-1]
        if node.simplified is None:
            waiting = [a for a in node.args if a.simplified is None]
            if waiting:
                stack.extend(waiting)
                continue
            new = _with_simple_operands(node)
            replaced = _rule(new)
            result = new if replaced is None else replaced
            node.simplified = _ITSELF if result is node else result
        stack.pop()
    return _simple(root)


def _simple(node: Expr) -> Expr:
    form: Expr = node.simplified
    return node if form is _ITSELF else form


def _with_simple_operands(node: Expr) -> Expr:
    for arg in node.args:
        if arg.simplified is not _ITSELF:
            return node.rebuild(tuple([_simple(a) for a in node.args]))
    return node


def difference(a: Expr, b: Expr) -> int | None:
    """a - b when it is a constant."""
    gap = linear(simplify(a)).plus(linear(simplify(b)).scaled(-1))
    return None if gap.terms else gap.constant


def _rule(node: Expr) -> Expr | None:
    if not isinstance(node, Op):
        return None
    if all(isinstance(a, Const) for a in node.args):
        return _fold(node)
    name = node.op.name
    if name == "select":
        return _select(node)
    if name in ("and", "or"):
        return _logic(node)
    if name == "not" and is_op(node.args[0], "not"):
        return node.args[0].args[0]
    if node.dtype is dtypes.index:
        if name in ("add", "sub", "mul", "neg"):
            return _same_or(node, linear(node).expr())
        if name == "floordiv":
            return _divide(node)
        if name == "mod":
            return _modulo(node)
        if name in ("min", "max"):
            return _extreme(node)
    if name in ("lt", "le", "eq", "ne") and node.args[0].dtype is dtypes.index:
        return _compare(node)
    if node.dtype.is_float and name in ("add", "sub", "mul", "div"):
        return _float_identity(node)
    return None


def _same_or(node: Expr, new: Expr) -> Expr | None:
    return None if new is node else new


def _fold(node: Op) -> Expr | None:
    if node.dtype is dtypes.index and node.op in (_ADD, _SUB, _MUL):
        total = linear(node).constant
        if abs(total) < 1 << 62:  # beyond, NumPy's wrap-around decides
            return const(total)
    divides_safely = node.op.name not in ("floordiv", "mod") or node.args[1].value > 0  # type: ignore[attr-defined]
    if node.args[0].dtype is dtypes.index and node.op.name in _OF_INDICES and divides_safely:
        return const(_OF_INDICES[node.op.name](*(a.value for a in node.args)), node.dtype)  # type: ignore[attr-defined]
    if any(n.dtype.is_storage for n in (node, *node.args)):
        return None
    values = [np.asarray(a.value, a.dtype.numpy) for a in node.args]  # type: ignore[attr-defined]
    if node.op.result == "bits":
        return const(values[0].view(node.dtype.numpy).item(), node.dtype)
    with np.errstate(all="ignore"):
        result = node.op.numpy(*values)
        return const(np.asarray(result).astype(node.dtype.numpy).item(), node.dtype)


def _select(node: Op) -> Expr | None:
    condition, then, otherwise = node.args
    if isinstance(condition, Const):
        return then if condition.value else otherwise
    if then is otherwise:
        return then
    # select(c, select(c, a, b), d) → select(c, a, d)
    if is_op(then, "select") and then.args[0] is condition:
        return select(condition, then.args[1], otherwise)
    return None


def _logic(node: Op) -> Expr | None:
    a, b = node.args
    absorbing = node.op.name == "or"
    for one, other in ((a, b), (b, a)):
        if isinstance(one, Const):
            return one if bool(one.value) == absorbing else other
    return a if a is b else None


def _divide(node: Op) -> Expr | None:
    a, divisor = node.args
    if not isinstance(divisor, Const) or divisor.value <= 0:
        return None
    d = int(divisor.value)
    if d == 1:
        return a
    low, high = bounds(a)
    if not math.isinf(low) and not math.isinf(high) and low // d == high // d:
        return const(int(low // d))
    if not _is_exact(a):
        return None
    whole, rest = _split_multiples(linear(a), d)
    if whole.terms or whole.constant:
        inner = rest.expr()
        return simplify(whole.expr() + simplify(inner // d)) if rest.terms else whole.expr()
    # (g·x + r) // d with 0 <= r < g and g | d  ->  x // (d/g)
    reduced = _drop_small(rest, d)
    if reduced is not None:
        return simplify(reduced[0].expr() // (d // reduced[1]))
    # (x // a) // b -> x // (a·b)
    if is_op(a, "floordiv") and isinstance(a.args[1], Const) and 0 < a.args[1].value < _LIMIT // d:
        return simplify(a.args[0] // int(a.args[1].value * d))
    return None


def _modulo(node: Op) -> Expr | None:
    a, divisor = node.args
    if not isinstance(divisor, Const) or divisor.value <= 0:
        return None
    d = int(divisor.value)
    if d == 1:
        return const(0)
    low, high = bounds(a)
    if not math.isinf(low) and not math.isinf(high) and low // d == high // d:
        return simplify(a - int(low // d) * d)
    if not _is_exact(a):
        return None
    whole, rest = _split_multiples(linear(a), d)
    if whole.terms or whole.constant:
        return simplify(rest.expr() % d)
    reduced = _drop_small(rest, d)
    if reduced is not None:
        quotient, g, remainder = reduced
        return simplify(simplify(quotient.expr() % (d // g)) * g + remainder.expr())
    return None


def _split_multiples(value: Linear, d: int) -> tuple[Linear, Linear]:
    """value = d · whole + rest, every coefficient of rest in [0, d) except where a term must stay."""
    whole = {t: c // d for t, c in value.terms.items() if c % d == 0}
    rest = {t: c for t, c in value.terms.items() if c % d != 0}
    return Linear(whole, value.constant // d), Linear(rest, value.constant % d)


def _drop_small(value: Linear, d: int) -> tuple[Linear, int, Linear] | None:
    """value = g · quotient + remainder with g | d, g > 1 and 0 <= remainder < g, for the largest such g."""
    for g in sorted({math.gcd(c, d) for c in value.terms.values()}, reverse=True):
        if g == 1:
            continue
        big = {t: c // g for t, c in value.terms.items() if c % g == 0}
        small = Linear({t: c for t, c in value.terms.items() if c % g}, value.constant % g)
        low, high = bounds(small.expr())
        if big and low >= 0 and high < g:
            return Linear(big, value.constant // g), g, small
    return None


def _extreme(node: Op) -> Expr | None:
    a, b = node.args
    low, high = _gap(a, b)
    smaller = node.op.name == "min"
    if high <= 0:
        return a if smaller else b
    if low >= 0:
        return b if smaller else a
    return None


def _is_exact(value: Expr) -> bool:
    """Whether a sum is what it would be among all integers."""
    if not value.wraps:
        return True
    low, high = linear(value).interval()
    return low >= -_LIMIT and high < _LIMIT


def _gap(a: Expr, b: Expr) -> Interval:
    """The interval of a - b among all integers."""
    if _is_exact(a) and _is_exact(b):
        return (
            bounds(simplify_difference(a, b))
            if not (a.wraps or b.wraps)
            else linear(a).plus(linear(b).scaled(-1)).interval()
        )
    left, right = bounds(a), bounds(b)
    return left[0] - right[1], left[1] - right[0]


def simplify_difference(a: Expr, b: Expr) -> Expr:
    """a - b, both of indices."""
    return linear(a).plus(linear(b).scaled(-1)).expr()


def _compare(node: Op) -> Expr | None:
    low, high = _gap(node.args[0], node.args[1])
    name = node.op.name
    truth: bool | None = None
    if name == "lt":
        truth = True if high < 0 else False if low >= 0 else None
    elif name == "le":
        truth = True if high <= 0 else False if low > 0 else None
    elif low == high == 0:
        truth = name == "eq"
    elif low > 0 or high < 0:
        truth = name == "ne"
    return None if truth is None else const(truth, dtypes.bool_)


def _float_identity(node: Op) -> Expr | None:
    """Exact identities alone: x·1 and x/1 (x + 0 would turn -0.0 into 0.0)."""
    a, b = node.args
    name = node.op.name
    if isinstance(b, Const) and b.value == 1 and name in ("mul", "div"):
        return a
    if isinstance(a, Const) and a.value == 1 and name == "mul":
        return b
    return None


def join_divisions(total: Linear) -> Linear:
    """c·d·(x // d) + c·(x % d) is c·x: what packing split, addressing puts together again."""
    for term, coefficient in total.terms.items():
        if isinstance(term, Op) and term.op.name == "mod" and isinstance(term.args[1], Const):
            divisor = int(term.args[1].value)
            quotient = simplify(term.args[0] // divisor)
            if total.terms.get(quotient) == coefficient * divisor:
                terms = {t: c for t, c in total.terms.items() if t is not term and t is not quotient}
                return join_divisions(Linear(terms, total.constant).plus(linear(term.args[0]).scaled(coefficient)))
    return total
