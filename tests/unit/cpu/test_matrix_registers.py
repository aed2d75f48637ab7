"""Contractions on matrix registers, planned for a machine that has them: what stays in the first cache, what is copied,
and that every way of reading rows gives the interpreter's answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.tile_loads import counted
from tests.cpu_stages import CPU, Lowered, run_native
from tests.unit.cpu.test_instructions import assembly, conv, matmul, numbers
from tilewright.backend import backend_for, renderable
from tilewright.backend.cpu import machine_code
from tilewright.intrinsics.cpu import DOTS, TILE_BYTES, TILE_ROWS
from tilewright.ir.analysis.verify import verify_loops
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Program, Reduce
from tilewright.ir.forms.expr import load
from tilewright.ir.forms.loops import PREFETCH, PREFETCH_TILE, Instruction, statements
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.interpret import evaluate
from tilewright.lower.program import lower_program
from tilewright.ops.builder import Builder
from tilewright.options import Options
from tilewright.schedule.planner import make_plan
from tilewright.target import machine
from tilewright.tile_graph.plan.leaf_form import TileForm
from tilewright.transform.precision.choose import set_precision

TARGET = machine("emerald_rapids")
NARROW, BYTES = DOTS["amx_bf16"], DOTS["amx_int8"]
PAIR = ("bfloat16", "bfloat16")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def planned(program: Program) -> Lowered:
    plan = make_plan(program, TARGET)
    loops = lower_program(program, plan, backend_for(TARGET).lower_kernel)
    verify_loops(loops)
    return Lowered(program, plan, loops)


def scratch_names(made: Lowered) -> set[str]:
    """Buffers that tile loads read."""
    done = (s for k in made.loops.kernels for s in statements(k.body))
    return {s.operands[1].buffer.name for s in done if isinstance(s, Instruction) and s.name == "tile_load"}


def hints(made: Lowered, name: str) -> set[str]:
    done = (s for k in made.loops.kernels for s in statements(k.body))
    return {s.operands[0].buffer.name for s in done if isinstance(s, Instruction) and s.name == name}


def check(made: Lowered, cache: Path, interpreted: bool = True) -> None:
    given = {t.name: numbers(t.dtype, t.shape, 3) for t in made.program.inputs}  # type: ignore[arg-type]
    name = made.program.outputs[0].name
    wanted = evaluate(made.program, given)[name].astype(np.float64)
    found = [made.on_loops(given)[name]] if interpreted else []
    loops = renderable(made.loops, TARGET)
    sources = machine_code.render(loops, TARGET, "portable")
    options = Options(cache_dir=cache, threads=2)
    with machine_code.load(sources, loops, made.program, made.plan, CPU, options) as model:
        found.append(run_native(model, made.program, given)[name])
    for result in found:
        assert np.abs(result - wanted).max() <= 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("shape", [(1000, 1000, 1000), (1024, 1024, 1024), (4096, 4096, 4096), (2048, 2048, 2048)])
@pytest.mark.parametrize("dot", [NARROW, BYTES], ids=["bfloat16", "int8"])
def test_rows_and_columns_of_a_pass_fit_the_first_cache(dot: object, shape: tuple[int, int, int]) -> None:
    assert dot in (NARROW, BYTES)
    chosen = NARROW if dot is NARROW else BYTES
    pair = chosen.instructions[0][0]
    (kernel,) = make_plan(matmul(chosen, pair, shape), TARGET).kernels
    (nest,) = kernel.leaves
    rows, columns = (n for _, n in nest.register)
    assert (nest.instruction, rows, columns) == (chosen.name, 32, 32)
    size = dtypes.by_name(pair[0]).bytes
    depth = nest.options(TileForm).step or shape[2]
    assert (rows + columns) * depth * size + 3 * 4 * rows * columns <= TARGET.nearest.capacity
    tile = {"o0": shape[0], "o1": shape[1], **dict(kernel.cut)}
    sums = 4 * tile["o0"] * tile["o1"] if nest.options(TileForm).step else 0
    assert tile["o1"] * depth * size + sums <= TARGET.local.capacity
    assert kernel.tiles >= TARGET.units


@pytest.mark.parametrize(
    ("inner", "packs"), [(1024, True), (2048, True), (4096, True), (768, False), (1056, False), (256, False)]
)
def test_rows_that_fall_on_few_sets_are_copied(inner: int, packs: bool) -> None:
    """A pass takes 8 lines of each row: of 64 sets 32 rows 2 KB apart fall on 16, rows 1.5 KB apart on all."""
    (kernel,) = make_plan(matmul(NARROW, PAIR, (256, 256, inner)), TARGET).kernels
    assert kernel.leaves[0].options(TileForm).packs is packs


def test_few_columns_are_not_worth_a_copy_of_the_rows() -> None:
    (kernel,) = make_plan(matmul(NARROW, PAIR, (256, 32, 1024)), TARGET).kernels
    assert kernel.leaves[0].instruction == "amx_bf16" and not kernel.leaves[0].options(TileForm).packs


@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", [(40, 72, 1024), (70, 50, 1000), (33, 65, 777)], ids=str)
def test_staged_rows_of_several_passes(shape: tuple[int, int, int], cache: Path) -> None:
    made = planned(matmul(NARROW, PAIR, shape, epilogue=True))
    assert made.plan.kernels[0].leaves[0].options(TileForm).step and "rows" in scratch_names(made)
    assert "sums" in hints(made, PREFETCH)
    check(made, cache, interpreted=shape[2] == 1000)


def test_a_step_asks_for_columns_and_the_next_rows() -> None:
    made = planned(matmul(NARROW, PAIR, (1024, 1024, 1024)))
    assert {"p1", "sums"} == hints(made, PREFETCH) and hints(made, PREFETCH_TILE) == {"p0"}


def test_lines_that_a_step_waits_for(tmp_path: Path) -> None:
    """Of the 64 lines that a step loads next to none are missing in simulated caches, whatever the rows' distance."""
    for shape, kind in (((256, 512, 1000), "bf16"), ((256, 512, 2048), "bf16"), ((256, 512, 1024), "int8")):
        _, (waited, moved, _) = counted(shape, kind, TARGET, tmp_path)
        assert waited < 5.0 and 32 <= moved < 50


@pytest.mark.parametrize(
    ("size", "outputs", "window", "stride", "pad", "rows"),
    [
        ((1, 14, 14, 32), 40, 3, 1, 1, 28),  # two rows of an image, a register each
        ((2, 9, 7, 40), 33, 3, 1, 1, 14),  # channels that do not fill a register
        ((1, 6, 17, 32), 32, 3, 1, 1, 32),  # no part of 17 is near 16: blocks end with the row
        ((1, 15, 15, 64), 48, 3, 2, 1, 16),
        ((1, 12, 20, 32), 32, 5, 1, 2, 32),
    ],
    ids=["pairs", "odd-channels", "prime", "stride", "five"],
)
def test_windows_read_one_copy_of_their_input(
    size: tuple[int, int, int, int], outputs: int, window: int, stride: int, pad: int, rows: int, cache: Path
) -> None:
    made = planned(conv(NARROW, PAIR, size, outputs, window, stride, pad))
    (kernel,) = made.plan.kernels
    assert dict(kernel.leaves[0].register)["o2"] == rows
    assert "window" in scratch_names(made) and "rows" not in scratch_names(made)
    done = [s for s in statements(made.loops.kernels[0].body) if isinstance(s, Instruction) and s.name == "copy_run"]
    assert len(done) == 1  # every place of the input once, not once for every place of the window
    check(made, cache, interpreted=False)


def test_windows_without_padding_are_read_in_place(cache: Path) -> None:
    made = planned(conv(NARROW, PAIR, (1, 10, 16, 32), 32, 3, 1, 0))
    assert scratch_names(made) == {"p0", "p1"}
    check(made, cache)


def test_points_two_apart_are_read_in_place(cache: Path) -> None:
    made = planned(conv(NARROW, PAIR, (1, 28, 28, 32), 64, 1, 2, 0))
    assert scratch_names(made) == {"p0", "p1"}
    check(made, cache, interpreted=False)


def test_one_configuration_serves_columns_that_are_left_over() -> None:
    made = planned(matmul(NARROW, PAIR, (64, 1000, 64)))
    done = [s for k in made.loops.kernels for s in statements(k.body) if isinstance(s, Instruction)]
    assert sum(s.name == "tile_configure" for s in done) == 1


def test_kernels_compile_for_sapphire_rapids(tmp_path: Path) -> None:
    for program in (matmul(NARROW, PAIR, (70, 50, 1000)), conv(NARROW, PAIR, (1, 14, 14, 40), 40, 3, 1, 1)):
        made = planned(program)
        text = assembly(machine_code.render(renderable(made.loops, TARGET), TARGET)["k0"], "sapphirerapids", tmp_path)
        assert "tdpbf16ps" in text and "tileloadd" in text


def test_a_register_is_never_read_beyond_its_rows() -> None:
    made = planned(conv(NARROW, PAIR, (1, 14, 14, 32), 40, 3, 1, 1))
    done = [s for s in statements(made.loops.kernels[0].body) if isinstance(s, Instruction) and s.name == "tile_load"]
    rows = {int(s.scalars[0].value) for s in done}  # type: ignore[attr-defined]
    assert rows <= {14, TILE_ROWS}
    assert all(int(s.scalars[2].value) * 2 % TILE_BYTES == 0 for s in done)  # type: ignore[attr-defined]


# --- what is multiplied in bfloat16 there


def product(shape: tuple[int, ...], weights: tuple[int, ...], element: object, reduce: tuple[int, ...]) -> Program:
    builder = Builder()
    x = Tensor("x", shape, dtypes.float32)
    w = builder.constant(numbers(dtypes.float32, weights, 1), name="w")
    made = element(builder, x, w)  # type: ignore[operator]
    return Program((x,), (made,), tuple(builder.computes), builder.constants)


def operand_types(program: Program, name: str = "emerald_rapids") -> set[str]:
    done = set_precision(program, machine(name), "bfloat16")
    sums = [c for c in done.computes if isinstance(c, Reduce)]
    return {t.dtype.name for c in sums for t in _read(c)}


def _read(compute: Reduce) -> list[Tensor]:
    from tilewright.ir.forms.compute import reads

    return list(reads(compute))


def convolution(channels: int, window: int, depthwise: bool = False, step: int = 1) -> Program:
    size = (1, 8 * step, 8 * step, channels)
    out = (1, 8 - window + 1 if step == 1 else 8, 8 - window + 1 if step == 1 else 8, channels if depthwise else 32)
    weights = (window, window, channels) if depthwise else (32, channels, window, window)

    def made(b: Builder, x: Tensor, w: Tensor) -> Tensor:
        def element(i: tuple, r: tuple) -> object:
            where = (i[0], i[1] * step + r[0], i[2] * step + r[1])
            if depthwise:
                return load(x, (*where, i[3])) * load(w, (r[0], r[1], i[3]))
            return load(x, (*where, r[2])) * load(w, (i[3], r[2], r[0], r[1]))

        sizes = (window, window) if depthwise else (window, window, channels)
        return b.reduce("y", out, sizes, element, "add")  # type: ignore[arg-type]

    return product(size, weights, made, ())


def test_sums_that_no_matrix_register_takes_stay_in_float32() -> None:
    assert operand_types(convolution(32, 3)) == {"bfloat16"}
    assert operand_types(convolution(3, 3)) == {"float32"}  # three elements of the 32 that a row has
    assert operand_types(convolution(3, 8, step=8)) == {"bfloat16"}  # patches: rows of eight lie side by side
    assert operand_types(convolution(32, 3, depthwise=True)) == {"float32"}
    assert operand_types(convolution(3, 3), "neoverse_n1") == {"bfloat16"}  # as everywhere without such registers


def test_a_plan_with_copied_rows_round_trips() -> None:
    plan = make_plan(matmul(NARROW, PAIR, (64, 64, 1024)), TARGET)
    assert plan.kernels[0].leaves[0].options(TileForm).packs
    assert type(plan).from_json(plan.to_json()) == plan
    assert plan.kernels[0].leaves[0].with_options(TileForm, packs=False) != plan.kernels[0].leaves[0]
