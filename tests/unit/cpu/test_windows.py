"""Windows over single channels by lane-wise dot products, on shapes nobody tuned for, and rounding to bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.cpu_stages import CPU, run_native
from tests.unit.cpu.test_instructions import assembly, innermost, lowered, numbers, target_of
from tilewright.backend import renderable
from tilewright.backend.cpu import machine_code
from tilewright.intrinsics.cpu import WINDOW_DOTS, Dot
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.expr import Expr, all_of, cast, const, le, load, lt, maximum, minimum, op, select
from tilewright.ir.forms.loops import Instruction, statements
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.interpret import evaluate
from tilewright.ops.builder import Builder
from tilewright.options import Options

Pads = tuple[int, int, int, int]
every_dot = pytest.mark.parametrize("dot", WINDOW_DOTS.values(), ids=list(WINDOW_DOTS))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def window(
    dot: Dot, size: tuple[int, int, int, int], kernel: tuple[int, int], stride: int, pads: Pads, is_bytes: bool = True
) -> Program:
    """Channels last, each with a window of its own; the result rounded to bytes."""
    n, h, w, c = size
    (pair, _), *_ = dot.instructions
    a_type, b_type = (dtypes.by_name(x) for x in pair)
    builder = Builder()
    x = Tensor("x", size, a_type)
    weights = builder.constant(numbers(b_type, (c, *kernel), 2), name="w")
    scale = builder.constant(numbers(dtypes.float32, (c,), 5) * 0.002, name="s")
    top, left, bottom, right = pads
    out = (n, (h + top + bottom - kernel[0]) // stride + 1, (w + left + right - kernel[1]) // stride + 1, c)

    def element(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Expr:
        row, column = i[1] * stride + r[0] - top, i[2] * stride + r[1] - left
        value: Expr = cast(load(x, (i[0], row, column, i[3])), dtypes.int32)
        if any(pads):
            inside = all_of([le(0, row), lt(row, h), le(0, column), lt(column, w)])
            value = select(inside, value, const(0, dtypes.int32))
        return value * cast(load(weights, (i[3], r[0], r[1])), dtypes.int32)

    total = builder.reduce("t", out, kernel, element, "add")

    def finished(*i: Expr) -> Expr:
        number = cast(load(total, i), dtypes.float32) * builder.read(scale, (i[3],)) + 0.25
        if not is_bytes:
            return number
        whole = op("round", minimum(maximum(number, -125.0), 130.0)) + const(-3.0, dtypes.float32)
        return cast(whole, dtypes.int8)

    result = builder.map("y", out, finished)
    return Program((x,), (result,), tuple(builder.computes), builder.constants)


CASES = {
    "odd-channels": ((1, 9, 11, 17), (3, 3), 1, (1, 1, 1, 1)),
    "strided": ((2, 10, 13, 40), (3, 3), 2, (1, 1, 1, 1)),
    "five": ((1, 8, 9, 33), (5, 5), 1, (2, 2, 2, 2)),
    "asymmetric": ((1, 7, 12, 24), (3, 3), 2, (0, 1, 1, 0)),
    "unpadded": ((1, 6, 7, 16), (2, 4), 1, (0, 0, 0, 0)),
    "wide-pads": ((1, 4, 3, 48), (3, 5), 3, (2, 4, 1, 3)),
}


@pytest.mark.sample(12)
@every_dot
@pytest.mark.parametrize("name", CASES)
def test_windows_are_exact(name: str, dot: Dot, cache: Path) -> None:
    """Interpreter of Loops, portable C and, where it runs, native C all agree with the Program."""
    made = lowered(window(dot, *CASES[name]), target_of(dot))
    used = {s.name for k in made.loops.kernels for s in statements(k.body) if isinstance(s, Instruction)}
    assert {dot.name, "interleave_4"} <= used
    given = {"x": numbers(made.program.inputs[0].dtype, CASES[name][0], 3)}
    wanted = evaluate(made.program, given)["y"]
    assert np.array_equal(made.on_loops(given)["y"], wanted)
    dialects = ("portable", "c") if set(dot.features) <= set(CPU.features) else ("portable",)
    loops = renderable(made.loops, target_of(dot))
    for dialect in dialects:
        sources = machine_code.render(loops, target_of(dot), dialect)
        with machine_code.load(
            sources, loops, made.program, made.plan, CPU, Options(cache_dir=cache, threads=2)
        ) as model:
            assert np.array_equal(run_native(model, made.program, given)["y"], wanted)


@pytest.mark.parametrize("channels", [3, 8, 15])
def test_few_channels_run_as_any_sum(channels: int, cache: Path) -> None:
    dot = WINDOW_DOTS["sdot_int8_lanes"]
    made = lowered(window(dot, (1, 6, 7, channels), (3, 3), 1, (1, 1, 1, 1)), target_of(dot))
    assert all(n.instruction is None for k in made.plan.kernels for n in k.leaves)
    given = {"x": numbers(dtypes.int8, (1, 6, 7, channels), 3)}
    loops = renderable(made.loops, target_of(dot))
    sources = machine_code.render(loops, target_of(dot), "portable")
    with machine_code.load(sources, loops, made.program, made.plan, CPU, Options(cache_dir=cache)) as model:
        assert np.array_equal(run_native(model, made.program, given)["y"], evaluate(made.program, given)["y"])


def test_bytes_are_rounded_by_adding() -> None:
    """No conversion and no lane by itself between the sums and the store."""
    dot = WINDOW_DOTS["sdot_int8_lanes"]
    made = lowered(window(dot, (1, 9, 16, 32), (3, 3), 1, (1, 1, 1, 1)), target_of(dot))
    source = machine_code.render(renderable(made.loops, target_of(dot)), target_of(dot))["k0"]
    assert "tw_int8_of_rounded_4v4f32" in source and "nearbyint" not in source and "lanes[" not in source


@pytest.mark.parametrize(
    ("name", "processor"), [("vnni_int8_lanes", "sapphirerapids"), ("vnni_int8_256_lanes", "alderlake")]
)
def test_loops_for_x86_spill_nothing(name: str, processor: str, tmp_path: Path) -> None:
    dot = WINDOW_DOTS[name]
    made = lowered(window(dot, (1, 12, 32, 64), (3, 3), 1, (1, 1, 1, 1), is_bytes=False), target_of(dot))
    source = machine_code.render(renderable(made.loops, target_of(dot)), target_of(dot))["k0"]
    loop = innermost(assembly(source, processor, tmp_path), "vpdpbusd" if "256" not in name else "{vex}")
    assert not any("(%rsp)" in x for x in loop)
