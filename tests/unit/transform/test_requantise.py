"""Rounding to bytes: steps in constant factors, clamps merged, numbers that never become bytes, extremes of bytes."""

from __future__ import annotations

import numpy as np
import pytest

from tilewright.ir.analysis.verify import verify_program
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Map, Program, Reduce
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import Expr, cast, const, is_op, load, maximum, minimum, op, walk
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.interpret import evaluate
from tilewright.ops.builder import Builder
from tilewright.transform.clean.fold import fold_constants
from tilewright.transform.quantise.extremes import extremes_of_bytes
from tilewright.transform.quantise.requantise import merge_steps

SHAPE = (7, 33)


def number(value: float) -> Expr:
    return const(value, dtypes.float32)


def quantised(b: Builder, name: str, x: Tensor, step: float, zero: int, dtype: DType, shift: int = 0) -> Tensor:
    info = np.iinfo(np.uint8 if shift else dtype.numpy)

    def value(*i: Expr) -> Expr:
        whole = op("round", load(x, i) / number(step)) + number(zero)
        kept = minimum(maximum(whole, number(info.min)), number(info.max))
        return cast(kept + number(shift) if shift else kept, dtype)

    return b.map(name, x.shape, value)  # type: ignore[arg-type]


def dequantised(b: Builder, name: str, q: Tensor, step: float, zero: int) -> Tensor:
    def value(*i: Expr) -> Expr:
        whole = cast(load(q, i), dtypes.int32) - const(zero, dtypes.int32)
        return cast(whole, dtypes.float32) * number(step)

    return b.map(name, q.shape, value)  # type: ignore[arg-type]


def scaled(b: Builder, name: str, sums: Tensor) -> Tensor:
    rng = np.random.default_rng(1)
    scale = b.constant((rng.random(SHAPE[1]) * 1e-3 + 1e-4).astype(np.float32), name=f"{name}_s")
    bias = b.constant(rng.standard_normal(SHAPE[1]).astype(np.float32), name=f"{name}_b")

    def value(*i: Expr) -> Expr:
        return cast(load(sums, i), dtypes.float32) * b.read(scale, i[1:]) + b.read(bias, i[1:])

    return b.map(name, SHAPE, value)


def finished(b: Builder, inputs: tuple[Tensor, ...], result: Tensor) -> tuple[Program, Program]:
    """The Program as it was built, and with its steps merged."""
    before = fold_constants(Program(inputs, (result,), tuple(b.computes), b.constants))
    after = fold_constants(merge_steps(before))
    verify_program(after)
    return before, after


def operators(program: Program) -> list[str]:
    nodes = walk(*(c.value for c in program.computes if isinstance(c, Map)))
    return sorted(n.op.name for n in nodes if n.args and hasattr(n, "op"))


@pytest.mark.parametrize(
    ("dtype", "zero", "shift"), [(dtypes.uint8, 0, 0), (dtypes.int8, -128, 0), (dtypes.int8, 0, -128)]
)
def test_a_rectifier_and_its_limit_merge_with_the_clamp(dtype: DType, zero: int, shift: int) -> None:
    b = Builder()
    sums = Tensor("sums", SHAPE, dtypes.int32)
    x = scaled(b, "x", sums)
    limited = b.map("l", SHAPE, lambda *i: minimum(maximum(load(x, i), number(0.0)), number(6.0)))
    before, after = finished(b, (sums,), quantised(b, "q", limited, 6.0 / 255, zero, dtype, shift))
    assert len([c for c in after.computes if isinstance(c, Map)]) == 1
    found = operators(after)
    assert "div" not in found and found.count("max") == 1 and found.count("min") == 1
    given = {"sums": np.random.default_rng(2).integers(-20000, 20000, SHAPE).astype(np.int32)}
    difference = np.abs(evaluate(before, given)["q"].astype(int) - evaluate(after, given)["q"].astype(int))
    assert difference.max() <= 1 and np.count_nonzero(difference) <= 2


def test_a_limit_inside_the_range_stays() -> None:
    b = Builder()
    sums = Tensor("sums", SHAPE, dtypes.int32)
    x = scaled(b, "x", sums)
    limited = b.map("l", SHAPE, lambda *i: minimum(maximum(load(x, i), number(0.0)), number(6.0)))
    before, after = finished(b, (sums,), quantised(b, "q", limited, 0.05, 10, dtypes.uint8))
    assert operators(after).count("min") == 2
    given = {"sums": np.random.default_rng(2).integers(-20000, 20000, SHAPE).astype(np.int32)}
    assert np.abs(evaluate(before, given)["q"].astype(int) - evaluate(after, given)["q"].astype(int)).max() <= 1


def test_an_input_is_divided_as_the_model_says() -> None:
    b = Builder()
    x = Tensor("x", SHAPE, dtypes.float32)
    before, after = finished(b, (x,), quantised(b, "q", x, 0.0345, 123, dtypes.uint8))
    given = {"x": np.random.default_rng(3).standard_normal(SHAPE).astype(np.float32) * 4}
    assert "div" in operators(after)
    assert np.array_equal(evaluate(before, given)["q"], evaluate(after, given)["q"])


def test_a_sum_of_two_branches_keeps_one_as_bytes() -> None:
    b = Builder()
    sums = tuple(Tensor(f"sums{i}", SHAPE, dtypes.int32) for i in range(2))
    branches = []
    for i, given in enumerate(sums):
        q = quantised(b, f"q{i}", scaled(b, f"x{i}", given), 0.04, 100 + i, dtypes.uint8)
        branches.append(dequantised(b, f"d{i}", q, 0.04, 100 + i))
    total = b.map("t", SHAPE, lambda *i: maximum(load(branches[0], i) + load(branches[1], i), number(0.0)))
    before, after = finished(b, sums, quantised(b, "q", total, 0.06, 0, dtypes.uint8))
    made = [c for c in after.computes if isinstance(c, Map)]
    assert [c.output.dtype for c in made] == [dtypes.uint8, dtypes.uint8]  # one branch, and the result
    assert not any(is_op(n, "div") for c in made for n in walk(c.value))
    rng = np.random.default_rng(4)
    arrays = {t.name: rng.integers(-9999, 9999, SHAPE).astype(np.int32) for t in sums}
    assert np.abs(evaluate(before, arrays)["q"].astype(int) - evaluate(after, arrays)["q"].astype(int)).max() <= 1


@pytest.mark.parametrize("operator", ["max", "min"])
@pytest.mark.parametrize(("dtype", "shift"), [(dtypes.uint8, 0), (dtypes.int8, -128)])
def test_extremes_are_taken_of_bytes(operator: str, dtype: DType, shift: int) -> None:
    b = Builder()
    q = Tensor("q", (5, 12), dtypes.uint8)
    d = dequantised(b, "d", q, 0.03, 7)
    pooled = b.reduce("p", (5, 6), (2,), lambda i, r: load(d, (i[0], i[1] * 2 + r[0])), operator)
    result = quantised(b, "y", pooled, 0.03, 7, dtype, shift)
    before = fold_constants(Program((q,), (result,), tuple(b.computes), b.constants))
    after = fold_constants(extremes_of_bytes(before))
    verify_program(after)
    (reduction,) = [c for c in after.computes if isinstance(c, Reduce)]
    assert reduction.outputs[0].dtype is dtypes.uint8
    given = {"q": np.random.default_rng(5).integers(0, 256, (5, 12)).astype(np.uint8)}
    assert np.array_equal(evaluate(before, given)["y"], evaluate(after, given)["y"])


def test_extremes_quantised_otherwise_stay_numbers() -> None:
    b = Builder()
    q = Tensor("q", (5, 12), dtypes.uint8)
    d = dequantised(b, "d", q, 0.03, 7)
    pooled = b.reduce("p", (5,), (12,), lambda i, r: load(d, (i[0], r[0])), "max")
    result = quantised(b, "y", pooled, 0.04, 7, dtypes.uint8)
    program = fold_constants(Program((q,), (result,), tuple(b.computes), b.constants))
    (reduction,) = [c for c in extremes_of_bytes(program).computes if isinstance(c, Reduce)]
    assert reduction.outputs[0].dtype is dtypes.float32
