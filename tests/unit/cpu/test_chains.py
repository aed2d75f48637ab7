"""Calls of one function side by side: where they are brought together, where they stay apart, and what they compute."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.cpu_stages import CPU, error, evaluated, lowered, model_of, programs, random_inputs
from tilewright.backend.cpu.kernel.chains import join_calls
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.expr import Axis, Expr, const, load, lt, op, select, var
from tilewright.ir.forms.loops import Alloc, Buffer, For, ForKind, Kernel, Memory, Stmt, Store, statements
from tilewright.ir.meaning.interpret_loops import run_kernel
from tilewright.lower.memory import scratch
from tilewright.lower.unroll import unroll
from tilewright.render.c import render_kernel

LANES = 4
IN = Buffer("p0", (8, LANES), dtypes.float32, Memory.GLOBAL)
OUT = Buffer("p1", (8, LANES), dtypes.float32, Memory.GLOBAL)


def written(*values: tuple[Axis, Expr]) -> Kernel:
    """A kernel that stores each value, on four lanes, to its own row of `out`."""
    body = tuple(
        For(lane, ForKind.VECTOR, (Store(OUT, (const(i), var(lane)), value),)) for i, (lane, value) in enumerate(values)
    )
    return Kernel("k", (IN, OUT), body)


def read(row: int, lane: Axis, source: Buffer = IN) -> Expr:
    return load(source, (const(row), var(lane)))


def lane() -> Axis:
    return Axis("lane", LANES)


def run(kernel: Kernel) -> np.ndarray:
    rng = np.random.default_rng(3)
    arrays = {b: rng.standard_normal(b.shape).astype(np.float32) for b in kernel.params}  # type: ignore[arg-type]
    run_kernel(kernel, dict(arrays))
    return arrays[OUT]


def joined_in(kernel: Kernel) -> list[int]:
    """How many calls stand together, in the order of the text."""
    text = render_kernel(kernel, {}).split("void k(")[1]
    return [int(count) for count in re.findall(r"tw_[a-z]+_(\d)_v4f32\(", text)]


@pytest.mark.parametrize(("most", "found"), [(2, [2, 2, 2, 2]), (3, [3, 3, 2]), (4, [4, 4])])
def test_neighbouring_stores_run_together(most: int, found: list[int]) -> None:
    lanes = [lane() for _ in range(8)]
    kernel = written(*((a, read(i, a) * op("sigmoid", read(i, a))) for i, a in enumerate(lanes)))
    joined = join_calls(kernel, most)
    assert joined_in(kernel) == [] and joined_in(joined) == found
    np.testing.assert_array_equal(run(joined), run(kernel))


def test_two_calls_of_one_store_run_together_and_a_third_stays_alone() -> None:
    a = lane()
    value = op("tanh", read(0, a)) + op("tanh", read(1, a)) * op("tanh", read(2, a))
    joined = join_calls(written((a, value)), 2)
    text = render_kernel(joined, {}).split("void k(")[1]
    assert joined_in(joined) == [2] and text.count("tw_tanh_v4f32(") == 1
    np.testing.assert_array_equal(run(joined), run(written((a, value))))


def test_as_many_registers_as_calls_take() -> None:
    counts = {n: replace(CPU, vector_registers=n).calls_together for n in (16, 32)}
    assert counts == {16: 2, 32: 4}


def test_calls_inside_calls_join_from_the_inside() -> None:
    lanes = [lane(), lane()]
    kernel = written(*((a, op("tanh", op("log", op("exp", read(i, a)) + 1.0))) for i, a in enumerate(lanes)))
    joined = join_calls(kernel, 4)
    assert joined_in(joined) == [2, 2, 2]
    np.testing.assert_array_equal(run(joined), run(kernel))


def test_different_functions_and_a_lone_call_stay_as_they_are() -> None:
    a, b = lane(), lane()
    kernel = written((a, op("exp", read(0, a))), (b, op("tanh", read(1, b))))
    assert joined_in(join_calls(kernel, 4)) == []


def test_a_call_does_not_pass_the_store_it_reads() -> None:
    a, b = lane(), lane()
    kernel = written((a, op("exp", read(0, a))), (b, op("exp", read(0, b, OUT))))
    joined = join_calls(kernel, 4)
    assert joined_in(joined) == []
    np.testing.assert_array_equal(run(joined), run(kernel))


def test_a_call_passes_stores_to_other_places() -> None:
    a, b = lane(), lane()
    kernel = written((a, op("exp", read(5, a, OUT))), (b, op("exp", read(6, b, OUT))))
    assert joined_in(join_calls(kernel, 4)) == [2]


def test_a_call_that_a_condition_makes_safe_stays_behind_it() -> None:
    """Row i - 1 is read where there is one."""
    i, lanes = Axis("i", 8), [lane(), lane()]
    values = [select(lt(0, var(i)), op("exp", load(IN, (var(i) - 1, var(a)))), 0.0) for a in lanes]
    rows = [For(a, ForKind.VECTOR, (Store(OUT, (var(i), var(a)), v),)) for a, v in zip(lanes, values, strict=True)]
    kernel = Kernel("k", (IN, OUT), (For(i, ForKind.SERIAL, tuple(rows)),))
    assert joined_in(join_calls(kernel, 4)) == []


def test_a_call_that_is_safe_in_any_case_runs_in_any_case() -> None:
    lanes = [lane(), lane()]
    kernel = written(*((a, select(lt(read(i, a), 0.0), op("exp", read(i, a)), 0.0)) for i, a in enumerate(lanes)))
    joined = join_calls(kernel, 4)
    assert joined_in(joined) == [2]
    np.testing.assert_array_equal(run(joined), run(kernel))


def test_of_calls_on_both_sides_of_a_condition_one_runs() -> None:
    lanes = [lane(), lane()]
    either = [select(lt(read(i, a), 0.0), op("exp", read(i, a)), op("tanh", read(i, a))) for i, a in enumerate(lanes)]
    assert joined_in(join_calls(written(*zip(lanes, either, strict=True)), 4)) == []


def test_registers_of_a_vector_loop_are_kept() -> None:
    body: list[Stmt] = []
    held = Buffer("value", (LANES,), dtypes.float32, Memory.REGISTER)
    for row in range(2):
        a = lane()
        stores: tuple[Stmt, ...] = (
            Store(held, (var(a),), op("exp", read(row, a))),
            Store(OUT, (const(row), var(a)), load(held, (var(a),))),
            Store(OUT, (const(row + 4), var(a)), load(held, (var(a),))),
        )
        body.append(For(a, ForKind.VECTOR, (Alloc(held, stores),)))
    kernel = Kernel("k", (IN, OUT), tuple(body))
    joined = join_calls(kernel, 4)
    assert joined_in(joined) == [2]
    assert len([s for s in statements(joined.body) if isinstance(s, Alloc) and s.buffer is held]) == 1
    np.testing.assert_array_equal(run(joined), run(kernel))


@pytest.mark.sample(3)
@pytest.mark.parametrize("columns", [7, 8, 13, 40])
@pytest.mark.parametrize("function", ["Sigmoid", "Tanh", "Erf", "Exp"])
def test_a_function_of_a_product(kernel_cache: Path, function: str, columns: int) -> None:
    rng = np.random.default_rng(columns)
    weight = (0.2 * rng.standard_normal((19, columns))).astype(np.float32)
    steps = [("MatMul", ["x", "w"], "y", {}), (function, ["y"], "s", {}), ("Mul", ["y", "s"], "z", {})]
    program = programs(model_of(steps, {"x": (11, 19)}, {"z": (11, columns)}, {"w": weight}))["layout"]
    built = lowered(program)
    texts = [render_kernel(join_calls(unroll(k), 4), scratch(k)[0]) for k in built.loops.kernels]
    assert any(re.search(rf"tw_{function.lower()}_[234]_", text) for text in texts)
    inputs = random_inputs(program)
    exact = evaluated(program, inputs, wide=True)
    assert error(built.natively(inputs, kernel_cache)["z"], exact["z"]) < 1e-6
