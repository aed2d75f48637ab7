"""Reads turned round: for one element of a tensor, at which indices a compute reads it.

    y[b, c] reads x[b, c // 8, c % 8]     x[i, j, k] is read at b = i, c = j * 8 + k
    y[p] reads x[p * 2 + q - 1]           x[i] is read, for every q, at p = (i - q + 1) // 2 where that leaves nothing

An axis for which no equation can be solved is gone through, with a condition: so are rows that data look up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tilewright.ir.analysis.simplify import linear, simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.expr import Axis, Const, Expr, Var, all_of, cast, const, eq, is_op, le, lt, substitute, var


@dataclass(frozen=True)
class Reading:
    """Where elements of a tensor are read: axes as expressions of its own indices `axes` and of the axes `left`, which
    are gone through, and the condition under which it is so."""

    axes: tuple[Axis, ...]
    values: Mapping[Axis, Expr]
    left: tuple[Axis, ...]
    condition: Expr


def readings(indices: Sequence[Expr], shape: Sequence[int], domain: Sequence[Axis]) -> Reading:
    """Of a tensor of this shape, read at `indices` for all of `domain`."""
    return _Solver(indices, shape, domain).run()


@dataclass
class _Solver:
    indices: Sequence[Expr]
    shape: Sequence[int]
    domain: Sequence[Axis]
    values: dict[Axis, Expr] = field(default_factory=dict)
    conditions: list[Expr] = field(default_factory=list)

    def run(self) -> Reading:
        self.values.update({axis: const(0) for axis in self.domain if axis.extent == 1})
        axes = tuple(Axis(f"i{n}", extent) for n, extent in enumerate(self.shape))
        waiting = _joined([(simplify(index), var(axis)) for index, axis in zip(self.indices, axes, strict=True)])
        while waiting:
            # plain axes first: what they say makes the others easier
            waiting.sort(key=lambda each: len(self._unknown(each[0])))
            left, right = waiting.pop(0)
            if not self._solve(left, right):
                same = simplify(substitute(left, self.values))
                self.conditions.append(eq(same, cast(right, same.dtype)))
        unknown = tuple(axis for axis in self.domain if axis not in self.values)
        # an axis that was gone through when an equation was met may have been solved by a later one
        known = {axis: simplify(substitute(value, self.values)) for axis, value in self.values.items()}
        condition = simplify(substitute(all_of(self.conditions), self.values))
        return Reading(axes, known, unknown, condition)

    def _unknown(self, index: Expr) -> list[Axis]:
        return [axis for axis in index.axes if axis in self.domain and axis not in self.values]

    def _solve(self, left: Expr, right: Expr) -> bool:
        """Settle axes so that two sides are equal; False where none can be."""
        index = simplify(substitute(left, self.values))
        if index.dtype is not dtypes.index:
            return False
        total = linear(index)
        terms = {t: c for t, c in total.terms.items() if isinstance(t, Var) and t.axis in self._unknown(t)}
        others = {t: c for t, c in total.terms.items() if t not in terms}
        if not terms or any(self._unknown(term) for term in others):
            return False
        rest = right - const(total.constant)
        for term, coefficient in others.items():
            rest = rest - term * coefficient
        ordered = sorted(terms.items(), key=lambda each: -each[1])
        if not _are_digits(ordered):
            # the longest axis is what the others leave of it
            longest = max(ordered, key=lambda each: (int(each[0].axis.extent), each[1]))  # type: ignore[arg-type]
            for term, coefficient in ordered:
                rest = rest if term is longest[0] else rest - term * coefficient
            ordered = [longest]
        for term, coefficient in ordered:
            axis = term.axis
            if coefficient < 0:
                rest, coefficient = const(0) - rest, -coefficient
            found = simplify(rest // coefficient)
            self.conditions += [le(0, found), lt(found, axis.extent)]
            self.values[axis] = found
            rest = simplify(rest - found * coefficient)
        self.conditions.append(eq(rest, 0))
        return True


def _are_digits(terms: Sequence[tuple[Var, int]]) -> bool:
    """Whether coefficients are such that a sum is of one choice of the axes alone, as digits are of a number."""
    for number, (_, coefficient) in enumerate(terms):
        extents = [(int(t.axis.extent), c) for t, c in terms[number + 1 :]]  # type: ignore[arg-type]
        below = sum(c * (extent - 1) for extent, c in extents)
        if coefficient <= below or (coefficient < 0 and len(terms) > 1):
            return False
    return True


def _joined(equations: Sequence[tuple[Expr, Expr]]) -> list[tuple[Expr, Expr]]:
    """Quotients and remainders of one value are this value."""
    found = list(equations)
    while True:
        pair = next(((q, r) for q in found for r in found if _is_pair(q[0], r[0])), None)
        if pair is None:
            return found
        quotient, remainder = pair
        size = remainder[0].args[1]
        found = [each for each in found if each is not quotient and each is not remainder]
        found.append((remainder[0].args[0], simplify(quotient[1] * size + remainder[1])))


def _is_pair(quotient: Expr, remainder: Expr) -> bool:
    """Whether these are x // n and x % n."""
    if not is_op(quotient, "floordiv") or not is_op(remainder, "mod"):
        return False
    if not isinstance(quotient.args[1], Const) or not isinstance(remainder.args[1], Const):
        return False
    return simplify(remainder.args[0] // remainder.args[1]) is simplify(quotient)
