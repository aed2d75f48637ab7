"""Dot-product and matrix instructions of this machine: right against NumPy, and their share of the measured peak.

Needs NumPy and a C compiler alone: python -m bench.instructions [--seconds 50] [--cache DIR].
"""

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tilewright.backend import backend_for, renderable
from tilewright.backend.cpu import machine_code
from tilewright.backend.cpu.leaf.instructions import available
from tilewright.intrinsics.cpu import DOTS, TILE_BYTES, TILE_ROWS, TILES, Dot
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.expr import Axis, Expr, cast, const, load, var
from tilewright.ir.forms.loops import (
    Alloc,
    Buffer,
    Call,
    For,
    ForKind,
    Instruction,
    Kernel,
    LoopProgram,
    Memory,
    Operand,
    Stmt,
    Storage,
    Store,
)
from tilewright.ir.forms.tensor import Tensor
from tilewright.lower.program import lower_program
from tilewright.ops.builder import Builder
from tilewright.options import Options
from tilewright.runtime import CpuModel
from tilewright.schedule.planner import make_plan
from tilewright.target import Target, machine
from tilewright.tile_graph.plan.form import Plan, Tile

SHAPES = (
    (256, 256, 256), (1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096),
    (1000, 1000, 1000), (128, 768, 3072), (333, 77, 515), (1, 2048, 2048),
)  # fmt: skip
CHAINS = 12  # accumulators of the peak loop in vector registers: more than latency times pipes
ROUNDS = 200_000


# --- peak


def peak_loops(dot: Dot, pair: tuple[str, str], tiles: int) -> LoopProgram:
    """`tiles` runs of nothing but the instruction, on operands that stay in registers."""
    a = Buffer("a", (TILE_ROWS * TILE_BYTES,), dtypes.by_name(pair[0]), Memory.GLOBAL)
    b = Buffer("b", (TILE_ROWS * TILE_BYTES,), dtypes.by_name(pair[1]), Memory.GLOBAL)
    width = TILE_ROWS * dot.lanes if dot.is_tile else CHAINS * dot.lanes
    c = Buffer("c", (tiles, width), dtypes.by_name(dot.accumulator), Memory.GLOBAL)
    tile = Axis("tile", tiles)
    body = _tile_peak(dot, pair, a, b, c, tile) if dot.is_tile else _vector_peak(dot, pair, a, b, c, tile)
    kernel = Kernel("peak", (a, b, c), (For(tile, ForKind.PARALLEL, body),))
    tensors = (
        Storage("a", a.shape, a.dtype, "input", 0),  # type: ignore[arg-type]
        Storage("b", b.shape, b.dtype, "input", 1),  # type: ignore[arg-type]
        Storage("c", c.shape, c.dtype, "output", 0),  # type: ignore[arg-type]
    )
    return LoopProgram((kernel,), (Call("peak", ("a", "b", "c")),), tensors)


def _do(name: str, operands: tuple[Operand, ...], *scalars: int) -> Instruction:
    return Instruction(name, operands, tuple(const(s) for s in scalars))


def _tile_peak(dot: Dot, pair: tuple[str, str], a: Buffer, b: Buffer, c: Buffer, tile: Axis) -> tuple[Stmt, ...]:
    groups = dot.block // dot.group
    sums = [Buffer(f"t{i}", (TILE_ROWS, dot.lanes), c.dtype, Memory.TILE) for i in range(4)]
    rows = Buffer("t4", (TILE_ROWS, dot.block), a.dtype, Memory.TILE)
    columns = Buffer("t5", (TILE_ROWS, dot.block), b.dtype, Memory.TILE)
    start = (const(0), const(0))
    body: list[Stmt] = [_do("tile_zero", (Operand(s, start),), TILE_ROWS, dot.lanes) for s in sums]
    body.append(_do("tile_load", (Operand(rows, start), Operand(a, (const(0),))), TILE_ROWS, dot.block, dot.block))
    body.append(_do("tile_load", (Operand(columns, start), Operand(b, (const(0),))), groups, dot.block, dot.block))
    name = dot.instruction(*pair) or ""
    inner = tuple(
        _do(name, (Operand(s, start), Operand(rows, start), Operand(columns, start)), TILE_ROWS, dot.lanes, groups)
        for s in sums
    )
    body.append(For(Axis("n", ROUNDS // TILE_ROWS), ForKind.SERIAL, inner))
    to = Operand(c, (var(tile), const(0)))
    body.append(_do("tile_store", (to, Operand(sums[0], start)), TILE_ROWS, dot.lanes, dot.lanes))
    wrapped = tuple(body)
    for buffer in reversed([*sums, rows, columns]):
        wrapped = (Alloc(buffer, wrapped),)
    sizes = [(TILE_ROWS, TILE_BYTES)] * 5 + [(groups, TILE_BYTES)] * (TILES - 5)
    configure = _do("tile_configure", (), *(r for r, _ in sizes), *(n for _, n in sizes))
    return (configure, *wrapped, Instruction("tile_release", ()))


def _vector_peak(dot: Dot, pair: tuple[str, str], a: Buffer, b: Buffer, c: Buffer, tile: Axis) -> tuple[Stmt, ...]:
    acc = Buffer("acc", (CHAINS, dot.lanes), c.dtype, Memory.REGISTER)
    row = Buffer("row", (dot.block,), a.dtype, Memory.REGISTER)
    u, lane, k = Axis("u", CHAINS), Axis("lane", dot.lanes), Axis("k", dot.block)
    zero = Store(acc, (var(u), var(lane)), const(0, c.dtype))
    body: list[Stmt] = [For(u, ForKind.UNROLL, (For(lane, ForKind.VECTOR, (zero,)),))]
    by_lane = dot.row_groups > 1
    if by_lane:
        body.append(For(k, ForKind.VECTOR, (Store(row, (var(k),), load(a, (var(k),))),)))
    source = Operand(row if by_lane else a, (const(0),))
    operands = (Operand(acc, (var(u), const(0))), source, Operand(b, (const(0),)))
    one = _do(dot.instruction(*pair) or "", operands, *((0,) if by_lane else ()))
    body.append(For(Axis("n", ROUNDS), ForKind.SERIAL, (For(u, ForKind.UNROLL, (one,)),)))
    value = Store(c, (var(tile), var(u) * dot.lanes + var(lane)), load(acc, (var(u), var(lane))))
    body.append(For(u, ForKind.UNROLL, (For(lane, ForKind.VECTOR, (value,)),)))
    wrapped: tuple[Stmt, ...] = (Alloc(acc, tuple(body)),)
    return (Alloc(row, wrapped),) if by_lane else wrapped


def measure_peak(dot: Dot, pair: tuple[str, str], threads: int, target: Target, cache: Path) -> float:
    """Multiply-adds a second of `threads` cores."""
    loops = renderable(peak_loops(dot, pair, threads), target)
    empty = Program((), (), (), {})
    sources = machine_code.render(loops, target)
    options = Options(cache_dir=cache, threads=threads)
    plan = Plan("cpu", "none", Tile(target.main.name))
    with machine_code.load(sources, loops, empty, plan, target, options) as model:
        given = [np.zeros(TILE_ROWS * TILE_BYTES, dtypes.by_name(p).numpy) for p in pair]
        out = [np.zeros(t.shape, t.dtype.numpy) for t in loops.tensors if t.role == "output"]
        seconds = best_seconds(model, given, out, 0.25)
    per_round = 4 * TILE_ROWS * dot.lanes * dot.block if dot.is_tile else CHAINS * dot.lanes * dot.group
    return threads * per_round * (ROUNDS // TILE_ROWS if dot.is_tile else ROUNDS) / seconds


# --- contractions


def matmul(shape: tuple[int, int, int], pair: tuple[str, str], wide: str) -> tuple[Program, np.ndarray, np.ndarray]:
    """c = a @ b with constant b, and both operands."""
    rows, columns, inner = shape
    rng = np.random.default_rng(0)
    a_type, b_type, total = (dtypes.by_name(name) for name in (*pair, wide))

    def numbers(dtype: dtypes.DType, size: tuple[int, int]) -> np.ndarray:
        if dtype.is_int:
            info = np.iinfo(dtype.numpy)
            return rng.integers(info.min, info.max + 1, size).astype(dtype.numpy)
        return rng.standard_normal(size, np.float32).astype(dtype.numpy)

    builder = Builder()
    a = Tensor("a", (rows, inner), a_type)
    weights = numbers(b_type, (inner, columns))
    b = builder.constant(weights, name="b")

    def element(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Expr:
        return cast(load(a, (i[0], r[0])), total) * cast(load(b, (r[0], i[1])), total)

    c = builder.reduce("c", (rows, columns), (inner,), element, "add")
    return Program((a,), (c,), tuple(builder.computes), builder.constants), numbers(a_type, (rows, inner)), weights


def on_a_line(array: np.ndarray) -> np.ndarray:
    """The array where a cache line begins, as a model's own tensors do."""
    room = np.empty(array.nbytes + TILE_BYTES, np.uint8)
    start = -room.ctypes.data % TILE_BYTES
    placed = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    placed[...] = array
    return placed


def best_seconds(model: CpuModel, given: list[np.ndarray], out: list[np.ndarray], budget: float) -> float:
    """The fastest of the runs that fit the budget, two at least."""
    best, spent, runs = float("inf"), 0.0, 0
    while runs < 3 or spent < budget:
        start = time.perf_counter()
        model.run(given, out)
        took = time.perf_counter() - start
        best, spent, runs = min(best, took), spent + took, runs + 1
    return best


def wrong(found: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    """The largest error on sampled rows, relative to the largest number there; float64 holds integers exactly."""
    rows = np.unique(np.concatenate([np.random.default_rng(1).integers(0, len(a), 6), [0, len(a) - 1]]))
    wanted = a[rows].astype(np.float64) @ b.astype(np.float64)
    return float(np.abs(found[rows] - wanted).max() / np.abs(wanted).max())


def instructions(target: Target) -> Iterator[tuple[Dot, tuple[str, str]]]:
    for dot in available(target):
        for pair, _ in dot.instructions:
            yield dot, pair


def report(target: Target, cache: Path, seconds: float, threads: tuple[int, ...] = (1, 2)) -> int:
    """Prints a table; the number of wrong results."""
    deadline = time.monotonic() + seconds
    cases = list(instructions(target))
    if not cases:
        print(f"this {target.architecture} machine has none of {', '.join(DOTS)}")
        return 0
    failures = 0
    peaks: dict[tuple[str, tuple[str, str], int], float] = {}
    for dot, pair in cases:
        for count in threads:
            peaks[dot.name, pair, count] = measure_peak(dot, pair, count, target, cache)
        shown = ", ".join(f"{n} threads {peaks[dot.name, pair, n] / 1e9:.0f}" for n in threads)
        print(f"peak {dot.name} {'x'.join(pair)}: {shown} G multiply-adds/s", flush=True)
    for shape in SHAPES:
        for dot, pair in cases:
            if time.monotonic() > deadline:
                print("out of time; the rest is left out")
                return failures
            failures += _one(dot, pair, shape, target, cache, threads, peaks)
    return failures


def _one(dot: Dot, pair: tuple[str, str], shape: tuple[int, int, int], target: Target, cache: Path,
         threads: tuple[int, ...], peaks: dict[tuple[str, tuple[str, str], int], float]) -> int:  # fmt: skip
    only = dataclasses.replace(target, features=dot.features)
    program, a, b = matmul(shape, pair, dot.accumulator)
    a = on_a_line(a)
    plan = make_plan(program, only)
    nest = plan.kernels[0].leaves[0]
    loops = renderable(lower_program(program, plan, backend_for(only).lower_kernel), only)
    sources = machine_code.render(loops, only)
    texts = []
    error = 0.0
    for count in threads:
        with machine_code.load(sources, loops, program, plan, only, Options(cache_dir=cache, threads=count)) as model:
            out = on_a_line(np.zeros((shape[0], shape[1]), dtypes.by_name(dot.accumulator).numpy))
            taken = best_seconds(model, [a], [out], 0.15)
        error = max(error, wrong(out, a, b))
        rate = shape[0] * shape[1] * shape[2] / taken
        texts.append(f"{rate / 1e9:7.1f} ({100 * rate / peaks[dot.name, pair, count]:3.0f}%)")
    is_right = error == 0 if dtypes.by_name(dot.accumulator).is_int else error < 1e-5
    how = f"{dict(nest.register)} tile {dict(plan.kernels[0].cut)}{nest.form.text()}"
    print(f"{'x'.join(map(str, shape)):>15} {pair[0]:>8}: {'  '.join(texts)}  "
          f"{'right' if is_right else f'WRONG by {error:.2g}'}; {how}", flush=True)  # fmt: skip
    return 0 if is_right else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=50.0, help="stop after this long")
    parser.add_argument("--cache", type=Path, help="where compiled kernels are kept")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tilewright-") as folder:
        return 1 if report(machine("cpu"), given.cache or Path(folder), given.seconds) else 0


if __name__ == "__main__":
    raise SystemExit(main())
