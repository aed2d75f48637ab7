"""CUDA text: every scalar row is spelled, expressions keep their meaning, index arithmetic stays narrow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.gpu_kernels import F32, SYNC, at, f32, loop, matmul, put, register, scale, shared, tensor, within
from tests.gpu_launch import source_of
from tilewright.backend.gpu.kernel.shared_arena import place_shared
from tilewright.errors import InternalError
from tilewright.intrinsics.gpu import GPU, MEANINGS
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.expr import Axis, Expr, cast, const, eq, load, lt, op, select, symbol, var
from tilewright.ir.forms.loops import For, ForKind, If, Instruction, Kernel, Stmt, Store
from tilewright.ir.forms.scalar import OPS
from tilewright.ir.meaning.interpret_loops import run_kernel
from tilewright.render.clike import Identifiers
from tilewright.render.cuda import CUDA, CudaPrinter, launch_shape, render_kernel
from tilewright.runtime.cache import Cache
from tilewright.runtime.emulator import EmulatedModule

X = tensor("x", 8, 8)
i, j = var(Axis("i", 8)), var(Axis("j", 8))


def text(node: Expr) -> str:
    return CudaPrinter(CUDA, Identifiers()).text(node)


def test_every_row_is_spelled() -> None:
    assert set(CUDA.spellings) == set(OPS)


def test_every_type_is_spelled() -> None:
    assert set(CUDA.types) == {d.name for d in dtypes.EVERY}


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ((i + j) * 2, "(i + j) * 2"),
        (i - (j - 1), "i - (j - 1)"),
        (op("neg", op("neg", i)), "-(-i)"),
        (i // 4 % 2, "i / 4 % 2"),
        ((i - 3) // 4, "tw::floordiv<int>(i - 3, 4)"),
        (select(lt(i, j), i, j + 1), "i < j ? i : j + 1"),
        (op("and", lt(i, j), op("or", eq(i, 0), eq(j, 0))), "i < j && (i == 0 || j == 0)"),
        (const(-0.0, F32), "-0.0f"),
        (const(float("-inf"), F32), "-tw::infinity()"),
        (const(float("nan"), F32), "tw::nan()"),
        (const(0.1, F32), "0.1f"),
        (const(1e30, F32), "1e+30f"),
        (const(0.1, dtypes.float64), "0.1"),
        (const(1 << 40), "1099511627776LL"),
        (const(-(1 << 63)), "(-9223372036854775807LL - 1)"),
        (const(7, dtypes.uint32), "7u"),
        (const(0.5, dtypes.float16), "tw::half(0.5f)"),
        (cast(i, F32) / f32(3), "tw::divided((float)i, 3.0f, 0.33333334f)"),
        (cast(i + 1, dtypes.int8), "(signed char)(i + 1)"),
        (f32(1) - (f32(2) + cast(i, F32)), "1.0f - (2.0f + (float)i)"),
        (f32(1) + (f32(2) + cast(i, F32)), "1.0f + (2.0f + (float)i)"),
    ],
)
def test_expressions(node: Expr, expected: str) -> None:
    assert text(node) == expected


def test_index_arithmetic_widens_where_it_must() -> None:
    big = var(Axis("b", 1 << 20))
    assert text(big * 1024) == "b * 1024"
    assert text(big * (1 << 20)) == "(long long)b * 1048576"
    assert text(big + symbol("n")) == "b + n"


def test_small_integers_wrap() -> None:
    value = load(tensor("q", 8, dtype=dtypes.int8), (i,))
    assert text(value + value) == "(signed char)(q(i) + q(i))"


def test_what_is_used_twice_is_named_once() -> None:
    value = op("exp", load(X, (i, j)))
    lines, texts = CudaPrinter(CUDA, Identifiers()).let(value * value)
    assert lines == ["const float t = tw::exp(x(i, j));"]
    assert texts == ["t * t"]


def test_a_guarded_read_stays_behind_its_guard() -> None:
    value = load(X, (i, j))
    lines, texts = CudaPrinter(CUDA, Identifiers()).let(select(lt(i, 4), value * value, f32(0)))
    assert lines == []
    assert texts == ["i < 4 ? x(i, j) * x(i, j) : 0.0f"]


def one_thread(body: list[Stmt], *params: object, name: str = "k") -> Kernel:
    threads = loop("t", 1, lambda _: body, ForKind.THREAD)
    return Kernel(name, params, (loop("b", 1, lambda _: [threads], ForKind.BLOCK),))  # type: ignore[arg-type]


def test_matmul_text() -> None:
    source = source_of(matmul().kernel)
    assert 'extern "C" __global__ void __launch_bounds__(64)' in source
    assert 'const tw::Global<const float, 32, 24> a(a_data, "a");' in source
    assert 'const tw::Shared<float, 8, 16> b_tile(512, "b_tile");' in source
    assert "acc(i_1, j_1) = acc(i_1, j_1) + a_tile(t / 8 * 2 + i_1, kk) * b_tile(kk, t % 8 * 2 + j_1);" in source
    assert source == source_of(matmul().kernel)


def test_symbols_are_arguments() -> None:
    source = source_of(scale().kernel)
    assert "float* __restrict__ y_data, long long n)" in source
    assert 'const tw::Global<float, tw::any> y(y_data, "y", n);' in source
    assert launch_shape(scale().kernel).threads == 32


def test_the_step_is_an_argument() -> None:
    step = Axis("step", 10)
    y = tensor("y", 10)
    kernel = Kernel("k", (y,), one_thread([put(y, (var(step),), f32(1))], y).body, step=step)
    assert "y_data, int step)" in source_of(kernel)
    assert "y(step) = 1.0f;" in source_of(kernel)


@pytest.mark.parametrize(("start", "together"), [(0, True), (4, True), (2, False)])
def test_aligned_vector_loops_become_copies(start: int, together: bool) -> None:
    y = tensor("y", 8, 8)
    axis = Axis("v", 4)
    copy = For(axis, ForKind.VECTOR, (put(y, (1, var(axis)), load(X, (2, var(axis) + start))),))
    source = source_of(one_thread([copy], X, y))
    assert (f"tw::copy<4>(y.at(1, 0), x.at(2, {start}));" in source) is together
    assert ("#pragma unroll" in source) is not together


def test_a_cpu_loop_is_refused() -> None:
    with pytest.raises(InternalError, match="loop for CPU workers"):
        render_kernel(one_thread([loop("p", 4, lambda _: [], ForKind.PARALLEL)]), {})


def test_an_instruction_on_the_wrong_memory_is_refused() -> None:
    bad = Instruction("shuffle_xor", (at(X, 0, 0), at(X, 0, 0)), (const(1),))
    with pytest.raises(InternalError, match="shuffle_xor: x lies in global memory"):
        render_kernel(one_thread([bad], X), {})


def test_shared_buffers_share_bytes_across_barriers_only() -> None:
    y = tensor("y", 32)
    a, b, c = shared("a", 32), shared("b", 64), shared("c", 32)

    def kernel(between: list[Stmt]) -> Kernel:
        def thread(t: Expr) -> list[Stmt]:
            return [
                put(a, (t,), f32(1)), put(b, (t,), load(a, (t,))), SYNC,
                put(y, (t,), load(b, (t,))), *between, put(c, (t,), f32(2)), put(y, (t,), load(c, (t,))),
            ]  # fmt: skip

        return Kernel("k", (y,), tuple(within([a, b, c], [loop("t", 32, thread, ForKind.THREAD)])))

    apart = place_shared(kernel([]))
    assert apart.offsets == {"b": 0, "a": 256, "c": 256}  # c may take a's place, b is still read beside it
    assert place_shared(kernel([SYNC])).offsets == {"b": 0, "a": 256, "c": 0}
    assert apart.bytes == 384


def test_barriers_behind_a_condition_of_the_block_separate() -> None:
    y, numbers = tensor("y", 4, 32), tensor("numbers", 1)
    a, b = shared("a", 32), shared("b", 32)

    def kernel(condition: Callable[[Expr, Expr], Expr]) -> Kernel:
        def block(k: Expr) -> list[Stmt]:
            def thread(t: Expr) -> list[Stmt]:
                inside = (put(a, (t,), f32(1)), put(y, (k, t), load(a, (t,))), SYNC,
                          put(b, (t,), f32(2)), put(y, (k, t), load(b, (t,))))  # fmt: skip
                return [If(condition(k, t), inside)]

            return within([a, b], [loop("t", 32, thread, ForKind.THREAD)])

        return Kernel("k", (y, numbers), (loop("k", 4, block, ForKind.BLOCK),))

    told = load(numbers, (0,))
    assert place_shared(kernel(lambda k, t: lt(cast(k, dtypes.float32), told))).bytes == 128
    assert place_shared(kernel(lambda k, t: lt(k + t, const(8)))).bytes == 256  # some threads meet none
    assert place_shared(kernel(lambda k, t: lt(load(a, (0,)), told))).bytes == 256


def test_scalar_rows_mean_what_the_table_says(tmp_path: Path) -> None:
    """Every row on every element type of its kinds, against NumPy; each type is one kernel."""
    count = 64
    rng = np.random.default_rng(11)
    plan = []
    for dtype in (dtypes.float32, dtypes.float64, dtypes.float16, dtypes.int32, dtypes.int8, dtypes.uint8):
        rows = [r for r in OPS.values() if dtype.kind in r.kinds and r.name not in ("cast", "select")]
        sources = [tensor(f"x{n}", count, dtype=dtype) for n in range(2)]
        outputs = [tensor(f"y_{r.name}", count, dtype=dtypes.bool_ if r.result == "bool" else dtype) for r in rows]

        def thread(t: Expr, rows=rows, sources=sources, outputs=outputs) -> list[Stmt]:  # type: ignore[no-untyped-def]
            values = [load(s, (t,)) for s in sources]
            return [
                put(o, (t,), op(r.name, *values[: r.arity])) for r, o in zip(rows, outputs, strict=True)
            ]  # fmt: skip

        kernel = Kernel(f"rows_{dtype.name}", (*sources, *outputs), (loop("t", count, thread, ForKind.THREAD),))
        if dtype.is_float:
            inputs = [rng.uniform(0.1, 3, count).astype(dtype.numpy), rng.uniform(0.2, 2, count).astype(dtype.numpy)]
        else:
            low = -9 if dtype.kind == "i" else 0
            inputs = [rng.integers(low, 10, count).astype(dtype.numpy) for _ in range(2)]
            inputs[1][inputs[1] == 0] = 3
        plan.append((dtype, rows, kernel, inputs))
    module = EmulatedModule({k.name: source_of(k) for _, _, k, _ in plan}, Cache(tmp_path), optimise=0)
    for dtype, rows, kernel, inputs in plan:
        outputs = [np.zeros(count, bool if r.result == "bool" else dtype.numpy) for r in rows]
        module.launch(kernel.name, (1, 1, 1), count, 0, [*inputs, *outputs])
        for row, output in zip(rows, outputs, strict=True):
            expected = row.numpy(*inputs[: row.arity])
            if dtype.is_float and row.result != "bool":
                tolerance = {"float16": 2e-3, "float32": 1e-5, "float64": 1e-12}[dtype.name]
                np.testing.assert_allclose(output, expected, rtol=tolerance, err_msg=f"{row.name} of {dtype.name}")
            else:
                np.testing.assert_array_equal(output, expected, err_msg=f"{row.name} of {dtype.name}")


def test_instructions_mean_what_the_interpreter_says(tmp_path: Path) -> None:
    """Shuffles and copies on the emulator against the meaning in the table."""
    x, y = tensor("x", 64, 4), tensor("y", 64, 4)
    held, moved, tile = register("held", 4), register("moved", 4), shared("tile", 64, 4)
    shuffles = [("shuffle_xor", 5), ("shuffle_down", 3), ("shuffle", 7)]

    def thread(t: Expr) -> list[Stmt]:
        exchange = [
            Instruction(name, (at(moved, n), at(held, n)), (const(argument),))
            for n, (name, argument) in enumerate(shuffles)
        ]
        return within(
            [held, moved],
            [
                Instruction("copy_async4", (at(tile, t, 0), at(x, t, 0))),
                Instruction("commit", ()),
                Instruction("wait", (), (const(0),)),
                Instruction("copy4", (at(held, 0), at(tile, t, 0))),
                *exchange,
                put(moved, (3,), load(held, (3,))),
                Instruction("copy4", (at(y, t, 0), at(moved, 0))),
            ],
        )

    kernel = Kernel("moves", (x, y), tuple(within([tile], [loop("t", 64, thread, ForKind.THREAD)])))
    data = np.random.default_rng(12).standard_normal((64, 4), np.float32)
    expected, output = np.zeros_like(data), np.zeros_like(data)
    run_kernel(kernel, {x: data, y: expected}, instructions=MEANINGS)
    module = EmulatedModule({"moves": source_of(kernel)}, Cache(tmp_path), optimise=0)
    module.launch("moves", (1, 1, 1), 64, place_shared(kernel).bytes, [data, output])
    np.testing.assert_array_equal(output, expected)
    assert not np.array_equal(output, data)
    assert set(MEANINGS) == set(GPU)


def test_only_what_is_written_alone_is_restrict() -> None:
    """Restrict would promise that nobody else writes it, and a load could move above the barrier, or above the wait
    for the kernel before, which stands first."""
    source, passed, result = tensor("source", 32), tensor("passed", 32), tensor("result", 32)
    tile, thread = Axis("tile", 1), Axis("thread", 32)
    body: tuple[Stmt, ...] = (
        Store(passed, (var(thread),), load(source, [var(thread)])),
        SYNC,
        Store(result, (var(thread),), load(passed, [const(31) - var(thread)])),
    )
    kernel = Kernel("k", (source, passed, result), (For(tile, ForKind.BLOCK, (For(thread, ForKind.THREAD, body),)),))
    lines = render_kernel(kernel, {}).splitlines()
    (head,) = (line for line in lines if line.startswith("k("))
    assert "const float* source_data" in head and "float* __restrict__ result_data" in head
    assert "float* passed_data" in head and lines[lines.index(head) + 1] == "  tw::begin();"


def test_a_named_half_is_held_as_it_is_computed_with() -> None:
    """An emulated view gives a float; what is computed is rounded to the type it has."""
    half = load(tensor("h", 8, dtype=dtypes.float16), (i,))
    printer = CudaPrinter(CUDA, Identifiers())
    assert (printer.value_type(half), printer.value_type(half + half)) == ("float", "tw::half")
