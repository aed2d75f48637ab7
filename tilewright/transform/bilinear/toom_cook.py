"""The transforms of Winograd's F(m, 3), as exact matrices and as expressions that share their common parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from tilewright.ir.forms.expr import Expr, add, const, eq, mul, select, sub

TAPS = 3
# Pairs of points of opposite sign share half of their sums. Of such pairs 5/8 and 3/2 let rounding grow least: over two
# axes what is rounded between the transforms reaches the result 4.8 times as large as in one product, by the customary
# 1 and 2 10.8 times (a direct sum rounds nine times as many products: 3). Every coefficient is exact in float32.
# Of two outputs each sums products of its own window alone. Four that do take eight products (docs/precision.md).
POINTS: dict[int, tuple[Fraction, ...]] = {
    2: (Fraction(0), Fraction(1), Fraction(-1)),
    4: (Fraction(0), Fraction(5, 8), Fraction(-5, 8), Fraction(3, 2), Fraction(-3, 2)),
}
SIZES = tuple(POINTS)


@dataclass(frozen=True)
class Matrices:
    """y = output · ((filter · g) * (input · d)): for d of m + 2 values and g of three taps."""

    output: tuple[tuple[Fraction, ...], ...]
    filter: tuple[tuple[Fraction, ...], ...]
    input: tuple[tuple[Fraction, ...], ...]


def _matrices(m: int) -> Matrices:
    """Toom's and Cook's construction with the points of `m`, infinity being the last."""
    points = POINTS[m]
    one, zero = Fraction(1), Fraction(0)
    output = tuple((*(p**u for p in points), one if u == m - 1 else zero) for u in range(m))
    filters: list[tuple[Fraction, ...]] = []
    inputs: list[tuple[Fraction, ...]] = []
    for p in points:
        others = [q for q in points if q != p]
        scale = prod((p - q for q in others), start=one)
        filters.append(tuple(p**s / scale for s in range(TAPS)))
        inputs.append((*_polynomial(others), zero))
    filters.append((*([zero] * (TAPS - 1)), one))
    inputs.append(_polynomial(points))
    return Matrices(output, tuple(filters), tuple(inputs))


def _polynomial(roots: Sequence[Fraction]) -> tuple[Fraction, ...]:
    """Coefficients of the product of (x - root), lowest first."""
    result = [Fraction(1)]
    for root in roots:
        shifted = [Fraction(0), *result]
        result = [s - root * c for s, c in zip(shifted, [*result, Fraction(0)], strict=True)]
    return tuple(result)


MATRICES = {m: _matrices(m) for m in SIZES}


def keeps_windows(made: Matrices) -> bool:
    """Whether no product that goes into an output reads an input outside its window. What is rounded is then bounded by
    the inputs that an output depends on; otherwise by all of the tile, whose terms cancel in exact arithmetic only."""
    return all(
        u <= place < u + TAPS
        for u, row in enumerate(made.output)
        for weight, values in zip(row, made.input, strict=True)
        for place, coefficient in enumerate(values)
        if weight and coefficient
    )


WINDOWED = tuple(m for m in SIZES if keeps_windows(MATRICES[m]))


# --- the transforms as expressions


def transformed_input(m: int, at: Expr, values: Sequence[Expr]) -> Expr:
    """Value `at` of the input transform: rows of opposite points share their even and their odd half."""
    rows = MATRICES[m].input
    cases: list[Expr] = []
    for row, point in zip(rows, (*POINTS[m], None), strict=True):
        if not point:  # zero and infinity stand alone
            cases.append(_sum(row, values))
            continue
        parity = (m + 2) % 2  # the leading coefficient belongs to one half, which is the plain one
        plain = [c if i % 2 == parity else Fraction(0) for i, c in enumerate(row)]
        turned = [c / point if i % 2 != parity else Fraction(0) for i, c in enumerate(row)]
        cases.append(_plus(_sum(plain, values), point, _sum(turned, values)))
    return _case(at, cases)


def transformed_output(m: int, at: Expr, values: Sequence[Expr]) -> Expr:
    """Value `at` of the output transform: opposite points are added for even outputs and subtracted for odd ones."""
    points = POINTS[m]
    cases: list[Expr] = []
    for u, row in enumerate(MATRICES[m].output):
        total: Expr | None = values[0] if u == 0 else None
        for k in range(1, len(points), 2):
            both = add(values[k], values[k + 1]) if u % 2 == 0 else sub(values[k], values[k + 1])
            total = _plus(total, row[k], both)
        if u == m - 1:
            total = _plus(total, Fraction(1), values[-1])
        assert total is not None
        cases.append(total)
    return _case(at, cases)


def _case(at: Expr, cases: Sequence[Expr]) -> Expr:
    result = cases[-1]
    for number in reversed(range(len(cases) - 1)):
        result = select(eq(at, number), cases[number], result)
    return result


def _sum(coefficients: Sequence[Fraction], values: Sequence[Expr]) -> Expr:
    """The terms from the last, which comes with factor one, to the first: each but the last is a multiply-add."""
    result: Expr | None = None
    for coefficient, value in reversed(list(zip(coefficients, values, strict=True))):
        if coefficient:
            result = _plus(result, coefficient, value)
    assert result is not None
    return result


def _plus(total: Expr | None, coefficient: Fraction, value: Expr) -> Expr:
    size = abs(coefficient)
    scaled = value if size == 1 else mul(value, const(float(size), value.dtype))
    if total is None:
        return scaled if coefficient > 0 else mul(value, const(float(coefficient), value.dtype))
    return add(total, scaled) if coefficient > 0 else sub(total, scaled)
