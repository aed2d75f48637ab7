"""Dot-product and matrix instructions: planned, lowered, interpreted, and run as C, natively where they are there.

Those of other machines run in their portable spelling; for their own processor they are compiled and their loops read.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.instructions import peak_loops
from tests.cpu_stages import CPU, Lowered, run_native
from tests.plans import resized, with_kernels
from tilewright.backend import backend_for, renderable
from tilewright.backend.cpu import machine_code
from tilewright.errors import InternalError
from tilewright.intrinsics.cpu import CPU as TABLE
from tilewright.intrinsics.cpu import DOTS, Dot
from tilewright.ir.analysis.verify import verify_loops, verify_program
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.expr import Expr, all_of, cast, const, le, load, lt, maximum, select
from tilewright.ir.forms.loops import Instruction, statements
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.interpret import evaluate
from tilewright.ir.text.parse import parse_loops
from tilewright.ir.text.text import loops_text
from tilewright.lower.program import lower_program
from tilewright.ops.builder import Builder
from tilewright.options import Options
from tilewright.schedule.planner import make_plan
from tilewright.target import Target, machine
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.form import Plan
from tilewright.tile_graph.plan.leaf_form import TileForm

CASES = [(dot, row[0]) for dot in DOTS.values() for row in (*dot.instructions, *dot.moved)]
IDS = [f"{dot.name}-{pair[0]}" for dot, pair in CASES]
every_instruction = pytest.mark.parametrize(("dot", "pair"), CASES, ids=IDS)
Pair = tuple[str, str]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def target_of(dot: Dot, level1: int = 48 << 10) -> Target:
    """A machine that has this instruction and no other."""
    sizes = {"L1": level1, "L2": 2 << 20}
    base = machine("emerald_rapids" if dot.architecture == "x86_64" else "neoverse_n1")
    levels = tuple(dataclasses.replace(x, capacity=sizes.get(x.name, x.capacity)) for x in base.levels)
    return dataclasses.replace(
        base, architecture=dot.architecture, vector_bytes=dot.lanes * 4, vector_registers=32, features=dot.features,
        levels=levels, lane_multiply=dot.architecture == "aarch64", rates=(),
    )  # fmt: skip


def numbers(dtype: dtypes.DType, shape: tuple[int, ...], seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if dtype.is_float:
        return rng.standard_normal(shape).astype(dtype.numpy)
    info = np.iinfo(dtype.numpy)
    return rng.integers(info.min, info.max + 1, shape).astype(dtype.numpy)


def finished(b: Builder, total: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Scale, bias and a rectifier behind the sum."""
    bias = b.constant(numbers(dtypes.float32, shape[-1:], 7), name="bias")

    def value(*i: Expr) -> Expr:
        return maximum(cast(load(total, i), dtypes.float32) * 0.25 + b.read(bias, i), 0.0)

    return b.map("y", shape, value)


def matmul(dot: Dot, pair: Pair, shape: tuple[int, int, int], batch: int = 0, constant: bool = True,
           flipped: bool = False, epilogue: bool = False) -> Program:  # fmt: skip
    rows, columns, inner = shape
    a_type, b_type, wide = (dtypes.by_name(n) for n in (*pair, dot.accumulator))
    builder = Builder()
    leading = (batch,) if batch else ()
    a = Tensor("a", (*leading, rows, inner), a_type)
    b_shape = (columns, inner) if flipped else (inner, columns)
    if constant:
        b = builder.constant(numbers(b_type, b_shape, 1), name="b")
        inputs: tuple[Tensor, ...] = (a,)
    else:
        b = Tensor("b", (*leading, *b_shape), b_type)
        inputs = (a, b)

    def element(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Expr:
        at = (i[-1], r[0]) if flipped else (r[0], i[-1])
        right = load(b, at if constant else (*i[:-2], *at))
        return cast(load(a, (*i[:-1], r[0])), wide) * cast(right, wide)

    out = (*leading, rows, columns)
    total = builder.reduce("c", out, (inner,), element, "add")
    result = finished(builder, total, out) if epilogue else total
    return Program(inputs, (result,), tuple(builder.computes), builder.constants)


def conv(dot: Dot, pair: Pair, size: tuple[int, int, int, int], outputs: int, window: int, stride: int,
         pad: int) -> Program:  # fmt: skip
    """Channels last, padding by a condition."""
    n, h, w, c = size
    a_type, b_type, wide = (dtypes.by_name(x) for x in (*pair, dot.accumulator))
    builder = Builder()
    x = Tensor("x", size, a_type)
    weights = builder.constant(numbers(b_type, (outputs, c, window, window), 2), name="w")
    out = (n, (h + 2 * pad - window) // stride + 1, (w + 2 * pad - window) // stride + 1, outputs)

    def element(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Expr:
        row, column = i[1] * stride + r[0] - pad, i[2] * stride + r[1] - pad
        value: Expr = load(x, (i[0], row, column, r[2]))
        if pad:
            inside = all_of([le(0, row), lt(row, h), le(0, column), lt(column, w)])
            value = select(inside, value, const(0, a_type))
        return cast(value, wide) * cast(load(weights, (i[3], r[2], r[0], r[1])), wide)

    total = builder.reduce("c", out, (window, window, c), element, "add")
    result = finished(builder, total, out)
    return Program((x,), (result,), tuple(builder.computes), builder.constants)


def lowered(program: Program, target: Target) -> Lowered:
    verify_program(program)
    plan = make_plan(program, target)
    check_plan(plan, program)
    assert Plan.from_json(plan.to_json()) == plan
    loops = lower_program(program, plan, backend_for(target).lower_kernel)
    verify_loops(loops)
    return Lowered(program, plan, loops)


def check(made: Lowered, dot: Dot, pair: Pair, cache: Path, interpreted: bool = True) -> None:
    """The instruction was chosen; interpreter, portable C and, where it runs, native C all agree with the Program."""
    assert dot.name in {nest.instruction for kernel in made.plan.kernels for nest in kernel.leaves}
    used = {s.name for k in made.loops.kernels for s in statements(k.body) if isinstance(s, Instruction)}
    assert dot.instruction(*pair) in used
    given = {t.name: numbers(t.dtype, t.shape, 3) for t in made.program.inputs}  # type: ignore[arg-type]
    name = made.program.outputs[0].name
    wanted = evaluate(made.program, given)[name].astype(np.float64)
    results = [made.on_loops(given)[name]] if interpreted else []
    target = target_of(dot)
    dialects = ("portable", "c") if set(dot.features) <= set(CPU.features) else ("portable",)
    loops = renderable(made.loops, target)
    for dialect in dialects:
        sources = machine_code.render(loops, target, dialect)
        options = Options(cache_dir=cache, threads=2)
        with machine_code.load(sources, loops, made.program, made.plan, CPU, options) as model:
            results.append(run_native(model, made.program, given)[name])
    exact = made.program.outputs[0].dtype.is_int
    for found in results:
        worst = np.abs(found.astype(np.float64) - wanted).max()
        assert worst == 0 if exact else worst <= 1e-5 * np.abs(wanted).max()


SHAPES = [
    (5, 7, 9), (37, 20, 70),
    *(pytest.param(s, marks=pytest.mark.slow)
      for s in ((1, 35, 64), (70, 3, 130), (33, 33, 33), (50, 3, 64), (20, 70, 515))),
]  # fmt: skip


@pytest.mark.sample(6)
@every_instruction
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_odd_matrices(dot: Dot, pair: Pair, shape: tuple[int, int, int], cache: Path) -> None:
    program = matmul(dot, pair, shape, epilogue=shape[0] == 37)
    if dot.is_tile and shape[2] < dot.block // 4:
        assert make_plan(program, target_of(dot)).kernels[0].leaves[0].instruction is None
        return
    check(lowered(program, target_of(dot)), dot, pair, cache)


@pytest.mark.sample(12)
@every_instruction
@pytest.mark.parametrize("flipped", [pytest.param(False, marks=pytest.mark.slow), True], ids=["columns", "rows"])
def test_both_operands_computed_at_run_time(dot: Dot, pair: Pair, flipped: bool, cache: Path) -> None:
    program = matmul(dot, pair, (21, 19, 45), batch=2, constant=False, flipped=flipped)
    check(lowered(program, target_of(dot)), dot, pair, cache)


@pytest.mark.sample(12)
@every_instruction
@pytest.mark.parametrize(
    ("size", "outputs", "window", "stride", "pad"),
    [
        ((2, 4, 5, 20), 9, 3, 1, 1),
        pytest.param((1, 8, 8, 64), 33, 3, 2, 1, marks=pytest.mark.slow),
        pytest.param((1, 7, 7, 40), 20, 1, 1, 0, marks=pytest.mark.slow),
    ],
    ids=["padded", "stride", "point"],
)
def test_convolution(dot: Dot, pair: Pair, size: tuple[int, int, int, int], outputs: int, window: int, stride: int,
                     pad: int, cache: Path) -> None:  # fmt: skip
    check(lowered(conv(dot, pair, size, outputs, window, stride, pad), target_of(dot)), dot, pair, cache)


@pytest.mark.parametrize("name", ["amx_bf16", "amx_int8"])
def test_tiles_sum_a_long_reduction_in_parts(name: str, cache: Path) -> None:
    dot = DOTS[name]
    pair = dot.instructions[0][0]
    target = target_of(dot, level1=8 << 10)
    made = lowered(matmul(dot, pair, (20, 40, 700), epilogue=True), target)
    assert 0 < made.plan.kernels[0].leaves[0].options(TileForm).step < 700
    check(made, dot, pair, cache)


@pytest.mark.sample(6)
@every_instruction
def test_many_tiles(dot: Dot, pair: Pair, cache: Path) -> None:
    """Tiles at the edge are shorter, and their sizes are only known when they run."""
    program = matmul(dot, pair, (110, 70, 64))
    target = target_of(dot)
    plan = make_plan(program, target)
    kernel = plan.kernels[0]
    register = dict(kernel.leaves[0].register)
    cut = with_kernels(plan, [resized(kernel, program, {"o0": 2 * register["o0"], "o1": register["o1"]})])
    loops = lower_program(program, cut, backend_for(target).lower_kernel)
    verify_loops(loops)
    check(Lowered(program, cut, loops), dot, pair, cache, interpreted=False)


def test_the_instruction_with_most_real_work_is_chosen() -> None:
    every = tuple(f for dot in DOTS.values() if dot.architecture == "x86_64" for f in dot.features)
    target = dataclasses.replace(target_of(DOTS["amx_int8"]), features=every)

    def chosen(shape: tuple[int, int, int], name: str, pair: Pair) -> str | None:
        return make_plan(matmul(DOTS[name], pair, shape), target).kernels[0].leaves[0].instruction

    assert chosen((64, 64, 64), "amx_int8", ("uint8", "int8")) == "amx_int8"
    assert chosen((64, 64, 64), "amx_bf16", ("bfloat16", "bfloat16")) == "amx_bf16"
    assert chosen((1, 64, 64), "amx_int8", ("uint8", "int8")) == "vnni_int8"  # one row of sixteen is no tile
    assert chosen((1, 64, 64), "amx_bf16", ("bfloat16", "bfloat16")) == "vdp_bf16"
    slow = dataclasses.replace(target, rates=(("amx_int8", 1.0),))
    assert (
        make_plan(matmul(DOTS["amx_int8"], ("uint8", "int8"), (64, 64, 64)), slow).kernels[0].leaves[0].instruction
        == "vnni_int8"
    )


def test_a_machine_without_instructions_plans_as_before() -> None:
    target = dataclasses.replace(target_of(DOTS["amx_int8"]), features=())
    plan = make_plan(matmul(DOTS["amx_int8"], ("int8", "int8"), (8, 8, 64)), target)
    assert plan.kernels[0].leaves[0].instruction is None


def test_a_plan_that_asks_for_the_impossible_is_refused() -> None:
    dot = DOTS["amx_int8"]
    program = matmul(dot, ("int8", "int8"), (64, 64, 64))
    plan = make_plan(program, target_of(dot))
    kernel = plan.kernels[0]
    for changed, text in (({"form": TileForm("abacus")}, "no instruction 'abacus'"),
                          ({"register": (("o0", 64), ("o1", 64))}, "cannot keep a register tile")):  # fmt: skip
        nest = dataclasses.replace(kernel.leaves[0], **changed)  # type: ignore[arg-type]
        wrong = with_kernels(plan, [kernel.with_leaves({nest.tensor: nest})])
        with pytest.raises(InternalError, match=text):
            check_plan(wrong, program)


def test_loops_with_instructions_round_trip_as_text() -> None:
    dot = DOTS["amx_bf16"]
    made = lowered(matmul(dot, ("bfloat16", "bfloat16"), (20, 20, 64)), target_of(dot))
    text = loops_text(made.loops)
    assert "tile bfloat16" in text and loops_text(parse_loops(text)) == text


def test_every_row_is_spelled_in_both_dialects() -> None:
    for name, row in TABLE.items():
        assert {"c", "portable"} <= set(row.text), name


# --- texts for other processors


def assembly(source: str, processor: str, folder: Path) -> str:
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("ziglang is not installed")
    (folder / "kernel.c").write_text(source)
    command = [sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-linux-gnu", f"-mcpu={processor}", "-O3",
               "-std=gnu11", "-mprefer-vector-width=512", "-fno-sanitize=all", "-g0", "-w", "-S"]  # fmt: skip
    done = subprocess.run([*command, "kernel.c", "-o", "kernel.s"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return (folder / "kernel.s").read_text()


def innermost(text: str, mnemonic: str) -> list[str]:
    """The instructions of the loop that holds the mnemonic most densely."""
    lines = text.splitlines()
    labels = {m.group(1): i for i, line in enumerate(lines) if (m := re.match(r"^(\.L\w+):", line))}
    loops = []
    for i, line in enumerate(lines):
        jump = re.match(r"\s+j\w+\s+(\.L\w+)", line)
        if jump and labels.get(jump.group(1), i) < i:
            body = [x.strip() for x in lines[labels[jump.group(1)] : i + 1]]
            loops.append([x for x in body if x and x[0] not in ".#"])
    return max(loops, key=lambda body: sum(x.startswith(mnemonic) for x in body) / len(body))


MNEMONICS = {"vnni_int8": "vpdpbusd", "vdp_bf16": "vdpbf16ps", "amx_bf16": "tdpbf16ps", "amx_int8": "tdpbusd"}


@pytest.mark.parametrize("name", MNEMONICS)
def test_inner_loops_for_sapphire_rapids(name: str, tmp_path: Path) -> None:
    dot, mnemonic = DOTS[name], MNEMONICS[name]
    pair = dot.instructions[-1][0]
    made = lowered(matmul(dot, pair, (256, 192, 512)), target_of(dot))
    source = machine_code.render(renderable(made.loops, target_of(dot)), target_of(dot))["k0"]
    loop = innermost(assembly(source, "sapphirerapids", tmp_path), mnemonic)
    dots = sum(x.startswith(mnemonic) for x in loop)
    reads = sum("(%r" in x and not x.startswith(("lea", "prefetch")) for x in loop)
    assert not any("(%rsp)" in x or "(%rbp)" in x for x in loop)
    if dot.is_tile:
        assert (dots, reads) == (4, 4)
        # the columns of a step some steps ahead, line by line, and a share of the next rows
        assert sum(x.startswith("prefetcht0") for x in loop) in range(32, 45)
    else:
        rows, columns = (n for _, n in made.plan.kernels[0].leaves[0].register)
        assert dots == rows * columns // dot.lanes >= 20
        assert reads == rows + columns // dot.lanes  # every operand is read once


@pytest.mark.parametrize("name", ["vnni_int8"])
def test_rows_of_the_other_type_cost_one_row_more(name: str, tmp_path: Path) -> None:
    dot = DOTS[name]
    made = lowered(matmul(dot, ("int8", "int8"), (256, 192, 512)), target_of(dot))
    source = machine_code.render(renderable(made.loops, target_of(dot)), target_of(dot))["k0"]
    loop = innermost(assembly(source, "sapphirerapids", tmp_path), MNEMONICS[name])
    rows, columns = (n for _, n in made.plan.kernels[0].leaves[0].register)
    assert sum(x.startswith(MNEMONICS[name]) for x in loop) == (rows + 1) * columns // dot.lanes
    assert not any("(%rsp)" in x or "(%rbp)" in x for x in loop)


def test_dot_products_of_short_vectors_for_alder_lake(tmp_path: Path) -> None:
    dot = DOTS["vnni_int8_256"]
    target = dataclasses.replace(target_of(dot), vector_registers=16)
    made = lowered(matmul(dot, ("uint8", "int8"), (64, 64, 64)), target)
    text = assembly(machine_code.render(renderable(made.loops, target), target)["k0"], "alderlake", tmp_path)
    assert not any("(%rsp)" in x for x in innermost(text, "{vex}"))


SERVER = [(d, p) for d, p in CASES if d.architecture == "x86_64" and d.lanes == 16 and p in dict(d.instructions)]


@pytest.mark.parametrize(("dot", "pair"), SERVER, ids=[f"{dot.name}-{pair[0]}" for dot, pair in SERVER])
def test_peak_loops_hold_nothing_else(dot: Dot, pair: Pair, tmp_path: Path) -> None:
    loops = peak_loops(dot, pair, 2)
    verify_loops(loops)
    loops = renderable(loops, target_of(dot))
    text = assembly(machine_code.render(loops, target_of(dot))["peak"], "sapphirerapids", tmp_path)
    row = TABLE[dot.instruction(*pair) or ""]
    mnemonic = re.findall(r'asm__ volatile\("(\w+)|asm__\("(\w+)', row.text["c"] + row.prelude["c"])[-1]
    loop = innermost(text, "".join(mnemonic))
    assert sum(x.startswith("".join(mnemonic)) for x in loop) >= len(loop) - 3


def test_rounding_to_bfloat16_is_one_instruction_where_there_is_one(tmp_path: Path) -> None:
    builder = Builder()
    x = Tensor("x", (64, 256), dtypes.float32)
    y = builder.map("y", x.shape, lambda *i: cast(load(x, i), dtypes.bfloat16))
    target = target_of(DOTS["amx_bf16"])
    made = lowered(Program((x,), (y,), tuple(builder.computes), {}), target)
    text = assembly(machine_code.render(renderable(made.loops, target), target)["k0"], "sapphirerapids", tmp_path)
    loop = innermost(text, "vcvtneps2bf16")
    words = [x.split()[0] for x in loop if not x.endswith(":")]
    usual = words[: words.index("kortestw")]  # what follows is for denormal numbers alone
    assert {"vcvtneps2bf16", "vptestnmd", "vptestmd"} <= set(usual) and not {"vpsrld", "vpaddd", "vpmovdw"} & set(usual)
