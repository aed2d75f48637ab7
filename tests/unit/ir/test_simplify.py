"""Simplification keeps values and intervals hold, on random expressions at random points."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.ir.analysis.simplify import difference, linear, simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bounds import bounds, lower, static, upper
from tilewright.ir.forms.expr import Axis, Expr, Load, Var, cast, const, load, op, select, symbol, var, walk
from tilewright.ir.forms.tensor import Layout, StorageAxis, Tensor
from tilewright.ir.meaning.values import evaluate_exprs

AXES = (Axis("a", 3), Axis("b", 8), Axis("c", 16), Axis("d", 1))
N = symbol("n", 2, 9)
TABLE = Tensor("table", (5,), dtypes.int64)
VALUES = np.array([-7, 0, 3, 12, 100])


def extend(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    number = st.integers(-20, 20)
    divisor = st.integers(1, 40)
    binary = st.builds(op, st.sampled_from(["add", "sub", "min", "max"]), inner, inner)
    scaled = st.builds(lambda e, k: op("mul", e, k), inner, number)
    product = st.builds(lambda a, b: op("mul", a, b), inner, inner)
    divided = st.builds(lambda n, e, k: op(n, e, k), st.sampled_from(["floordiv", "mod"]), inner, divisor)
    compared = st.builds(op, st.sampled_from(["lt", "le", "eq", "ne"]), inner, inner)
    logic = st.one_of(
        compared,
        st.builds(op, st.sampled_from(["and", "or"]), compared, compared),
        st.builds(lambda c: op("not", c), compared),
    )
    chosen = st.builds(select, logic, inner, inner)
    single = st.builds(op, st.sampled_from(["neg", "abs", "sign"]), inner)
    return st.one_of(binary, scaled, product, divided, divided, chosen, single)


LEAVES = st.one_of(
    st.sampled_from([var(a) for a in AXES]),
    st.integers(-50, 50).map(const),
    st.just(N),
    st.sampled_from([load(TABLE, (var(AXES[0]),)), load(TABLE, (const(4),))]),
)
EXPRESSIONS = st.recursive(LEAVES, extend, max_leaves=12)


def at_many(root: Expr) -> tuple[np.ndarray, np.ndarray]:
    """Values of an expression at random points, and at the corners."""
    generator = np.random.default_rng(0)
    points = {a: np.concatenate([generator.integers(0, a.extent, 60), [0, a.extent - 1]]) for a in AXES}
    sizes = np.concatenate([generator.integers(2, 10, 60), [2, 9]])

    def leaf(node: Expr) -> np.ndarray:
        return points[node.axis] if isinstance(node, Var) else sizes

    def read(node: Load, indices: tuple[np.ndarray, ...]) -> np.ndarray:
        return VALUES[indices[0]]

    (value,) = evaluate_exprs((root,), leaf, read)
    return np.broadcast_to(value, sizes.shape)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(EXPRESSIONS)
def test_simplified_is_equal(root):
    simple = simplify(root)
    assert simple.dtype is root.dtype
    np.testing.assert_array_equal(at_many(simple), at_many(root))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(EXPRESSIONS)
def test_bounds_hold_and_simplifying_again_changes_nothing_wrong(root):
    low, high = bounds(root)
    values = at_many(root)
    assert low <= values.min() and values.max() <= high
    again = simplify(simplify(root))
    np.testing.assert_array_equal(at_many(again), values)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(EXPRESSIONS, EXPRESSIONS)
def test_difference_is_exact(a, b):
    gap = difference(a, b)
    if gap is not None:
        np.testing.assert_array_equal(at_many(a) - at_many(b), gap)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(EXPRESSIONS)
def test_linear_form_is_equal(root):
    np.testing.assert_array_equal(at_many(linear(root).expr()), at_many(root))


def test_what_tiling_needs():
    t, r = Axis("t", 4), Axis("r", 16)
    place = var(t) * 16 + var(r)
    assert simplify(place // 16) is var(t)
    assert simplify(place % 16) is var(r)
    assert simplify((place + 32) // 16) is simplify(var(t) + 2)
    assert simplify((var(t) * 32 + var(r)) // 16) is simplify(var(t) * 2)
    assert simplify(op("lt", place, const(64))) is const(True, dtypes.bool_)
    assert simplify(op("min", const(64), place)) is place
    assert simplify(place // 4 // 4) is var(t)
    assert simplify((var(t) * 16 + var(r)) % 4) is simplify(var(r) % 4)
    assert difference(place + 3, var(r) + var(t) * 16) == 3
    assert difference(place, var(r)) is None


def test_floats_keep_signed_zero_and_casts_fold():
    x = load(Tensor("x", (), dtypes.float32), ())
    zero = const(0.0, dtypes.float32)
    assert simplify(x + zero) is x + zero
    assert simplify(x * const(1.0, dtypes.float32)) is x
    folded = simplify(cast(const(2.7, dtypes.float32), dtypes.int64))
    assert folded is const(2)
    assert simplify(select(const(True, dtypes.bool_), x, zero)) is x


def test_extents():
    assert (lower(N + 1), upper(N + 1)) == (3, 10)
    assert static(N) is None and static(N * 0 + 4) in (4, None) and static(const(6)) == 6
    assert bounds(var(AXES[1]), {AXES[1]: (2, 4)}) == (2, 4)
    assert bounds(var(AXES[1]) // 3) == (0, 2)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from(
        [
            Layout.natural(2),
            Layout.permuted((1, 0)),
            Layout((StorageAxis(1, 4), StorageAxis(0), StorageAxis(1, 1, 4)), -1.0),
            Layout(
                (StorageAxis(1, 8), StorageAxis(0, 2), StorageAxis(1, 2, 4), StorageAxis(0, 1, 2), StorageAxis(1, 1, 2))
            ),
        ]
    ),
    st.integers(1, 9),
    st.integers(1, 17),
)
def test_pack_agrees_with_storage_indices(layout, rows, columns):
    array = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    packed = layout.pack(array)
    assert packed.shape == layout.storage_shape((rows, columns))
    i, j = Axis("i", rows), Axis("j", columns)
    places = layout.storage_indices((var(i), var(j)))
    r, c = np.indices((rows, columns))

    def leaf(node: Expr) -> np.ndarray:
        return r if node.axis is i else c  # type: ignore[attr-defined]

    def read(node: Load, indices: tuple[np.ndarray, ...]) -> np.ndarray:
        raise AssertionError("a layout reads nothing")

    found = packed[tuple(np.broadcast_to(p, r.shape) for p in evaluate_exprs(places, leaf, read))]
    np.testing.assert_array_equal(found, array)
    assert packed.size == array.size or np.count_nonzero(packed == layout.fill) >= packed.size - array.size
    assert sum(1 for _ in walk(*places)) < 20
