"""Splits of reduction elements: what the rules give is the same number, and what must not be split is not."""

from __future__ import annotations

import numpy as np
import pytest

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.expr import Axis, Expr, Load, cast, const, load, loads, op, select, var, walk
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.values import evaluate_exprs
from tilewright.tile_graph.algebra.separate import change, split_product, split_sum

F = dtypes.float32
ROW, COLUMN = Axis("i", 3), Axis("j", 5)
X = load(Tensor("x", (3, 5), F), [var(ROW), var(COLUMN)])
Y = load(Tensor("y", (5,), F), [var(COLUMN)])
M = load(Tensor("m", (3,), F), [var(ROW)])
L = load(Tensor("l", (3,), F), [var(ROW)])
VARIABLES = frozenset((M, L))
PLACE = cast(var(COLUMN), F)


def value(node: Expr, numbers: dict[Expr, float]) -> float:
    found = evaluate_exprs(
        (node,), lambda leaf: np.asarray(2), lambda read, _: np.asarray(numbers[read], np.float64), wide=True
    )
    return float(found[0])


def numbers(rng: np.random.Generator) -> dict[Expr, float]:
    return {node: float(rng.uniform(0.3, 2.0) * rng.choice([-1, 1])) for node in (X, Y, M, L)}


def exp(node: Expr) -> Expr:
    return op("exp", node)


PRODUCTS = {
    "softmax": exp(X - M) / L * Y,
    "scaled": exp((X - M) * 0.125),
    "quotient": (X / M) * (X / M) * Y,
    "root of a variable": op("abs", X) * op("rsqrt", op("abs", M)),
    "root of a magnitude": op("sqrt", op("abs", X) * op("abs", M)),
    "negated": -(X * M),
    "magnitude": op("abs", X / M),
    "power": op("pow", X / M, const(3.0, F)),
    "masked": select(op("lt", X, 0.5), exp(X - M), const(0.0, F)),
    "both branches": select(op("lt", X, 0.5), X * M, Y * M),
    "place": PLACE * M * X,
}
SUMS = {
    "difference": X - M,
    "scaled": (X - M) * 2.0,
    "halved": (X - M) / 4.0,
    "negated": -(X + M),
    "several": (X - M) + (Y + L) * 0.5,
    "from the left": const(3.0, F) * (X + M),
}
NOT_PRODUCTS = {
    "sine": op("sin", X - M),
    "difference": X - M,
    "square of a difference": (X - M) * (X - M),
    "root of a sign": op("sqrt", X * M),
    "power by data": op("pow", M, X),
    "power of a sign": op("pow", X * M, const(0.5, F)),
    "chosen by a variable": select(op("lt", M, 0.5), X * M, Y * M),
    "branches differ": select(op("lt", X, 0.5), X * M, Y * L),
    "exponent by place": exp((X - M) * PLACE),
    "place in the exponent": exp(M * PLACE),
    "rounded": cast(cast(X * M, dtypes.float16), F),
}
NOT_SUMS = {
    "product": X * M,
    "scaled by data": (X - M) * Y,
    "scaled by place": (X - M) * PLACE,
    "divided by a variable": X / M,
    "exponential": exp(X - M),
    "larger": op("max", X, M),
}


def parts(split: tuple[Expr | None, Expr | None] | None) -> tuple[Expr, Expr]:
    assert split is not None and split[1] is not None
    return split[0] if split[0] is not None else const(0.0, F), split[1]


def test_rounding_to_bfloat16_is_relative() -> None:
    """Its range is float32's: the factor may be applied to the rounded rest."""
    first, rest = parts(split_product(cast(cast(X * M, dtypes.bfloat16), F), VARIABLES))
    assert first is cast(cast(X, dtypes.bfloat16), F) and rest is M


def check_free(factor: Expr) -> None:
    """b reads the variables and nothing else, not even a position outside their own indices."""
    assert set(loads(factor)) <= VARIABLES
    inside = {id(i) for n in loads(factor) for i in walk(*n.indices)}
    assert not any(n is PLACE or (id(n) not in inside and n is var(COLUMN)) for n in walk(factor))


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str) -> None:
    split = split_product(PRODUCTS[name], VARIABLES)
    assert split is not None and split[1] is not None
    check_free(split[1])
    rng = np.random.default_rng(1)
    for _ in range(20):
        at = numbers(rng)
        first = 1.0 if split[0] is None else value(split[0], at)
        assert first * value(split[1], at) == pytest.approx(value(PRODUCTS[name], at), rel=1e-12)


@pytest.mark.parametrize("name", SUMS)
def test_sums(name: str) -> None:
    first, factor = parts(split_sum(SUMS[name], VARIABLES))
    check_free(factor)
    rng = np.random.default_rng(2)
    for _ in range(20):
        at = numbers(rng)
        assert value(first, at) + value(factor, at) == pytest.approx(value(SUMS[name], at), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", NOT_PRODUCTS)
def test_not_products(name: str) -> None:
    assert split_product(NOT_PRODUCTS[name], VARIABLES) is None


@pytest.mark.parametrize("name", NOT_SUMS)
def test_not_sums(name: str) -> None:
    assert split_sum(NOT_SUMS[name], VARIABLES) is None


@pytest.mark.parametrize("name", PRODUCTS)
def test_partial_sums_follow(name: str) -> None:
    """Σ f(x, old) · b(new)/b(old) = Σ f(x, new)."""
    check_following("add", PRODUCTS[name], split_product(PRODUCTS[name], VARIABLES), np.sum)


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("operator", ["max", "min"])
def test_partial_extremes_follow(name: str, operator: str) -> None:
    check_following(operator, SUMS[name], split_sum(SUMS[name], VARIABLES), np.max if operator == "max" else np.min)


def check_following(operator: str, element: Expr, split, reduce) -> None:
    assert split is not None and split[1] is not None
    rng = np.random.default_rng(3)
    old_names: dict[Expr, Expr] = {n: load(Tensor(f"{n.source.name}_old", (3,), F), n.indices) for n in (M, L)}
    new_names: dict[Expr, Expr] = {n: n for n in (M, L)}
    correction = change(operator, split[1], old_names, new_names)
    for _ in range(10):
        data = [(float(rng.normal()), float(rng.normal())) for _ in range(7)]
        old, new = numbers(rng), numbers(rng)
        for node in (M, L):  # a scale keeps its sign: roots of negative numbers are nobody's business here
            new[node] = abs(new[node]) * np.sign(old[node])
        under_old = reduce([value(element, {**old, X: x, Y: y}) for x, y in data])
        under_new = reduce([value(element, {**new, X: x, Y: y}) for x, y in data])
        step = value(correction, {**new, **{old_names[n]: old[n] for n in (M, L)}})
        moved = under_old * step if operator == "add" else under_old + step
        assert moved == pytest.approx(under_new, rel=1e-9, abs=1e-9)


def test_change_of_exponentials_does_not_overflow() -> None:
    old: dict[Expr, Expr] = {M: load(Tensor("m_old", (3,), F), [var(ROW)])}
    step = change("add", exp(-M), old, {M: M})
    assert value(step, {M: 1000.0, old[M]: 999.0}) == pytest.approx(np.exp(-1.0))


def test_nothing_to_split() -> None:
    assert split_product(X, VARIABLES) == (X, None)
    assert split_sum(X, VARIABLES) == (X, None)
    split = split_product(M / L, VARIABLES)
    assert split == (None, M / L)


def test_random_products() -> None:
    """Random expressions: wherever the rules split, the parts multiply to the whole."""
    rng = np.random.default_rng(4)
    splits = 0
    for _ in range(300):
        node = random_expression(rng, 3)
        split = split_product(node, VARIABLES)
        if split is None or split[1] is None:
            continue
        splits += 1
        check_free(split[1])
        for _ in range(3):
            at = numbers(rng)
            whole = value(node, at)
            first = 1.0 if split[0] is None else value(split[0], at)
            if np.isfinite(whole) and 1e-200 < abs(whole) < 1e200:
                assert first * value(split[1], at) == pytest.approx(whole, rel=1e-9), node
    assert splits > 60


def random_expression(rng: np.random.Generator, depth: int) -> Expr:
    leaves: list[Expr] = [X, Y, M, L, PLACE, const(0.5, F)]
    if depth == 0:
        return leaves[int(rng.integers(len(leaves)))]
    kind = rng.choice(["mul", "div", "add", "sub", "exp", "neg", "abs", "sqrt", "pow", "select", "leaf"])
    if kind == "leaf":
        return random_expression(rng, 0)
    first = random_expression(rng, depth - 1)
    if kind in ("exp", "neg", "abs", "sqrt"):
        return op(str(kind), first)
    if kind == "pow":
        return op("pow", first, const(float(rng.choice([2.0, 3.0, 0.5, -1.0])), F))
    second = random_expression(rng, depth - 1)
    if kind == "select":
        return select(op("lt", X, 0.1), first, second)
    return op(str(kind), first, second)


def test_loads_are_compared_by_identity() -> None:
    """The same tensor read elsewhere is another variable."""
    elsewhere = load(M.source, [const(0)])
    assert isinstance(elsewhere, Load)
    assert split_product(exp(X - elsewhere), VARIABLES) == (exp(X - elsewhere), None)
