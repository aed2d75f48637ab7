"""Measures many plans of one kernel side by side: all in one shared object, run in turn by the product's own workers.

Before each timed run a sweep empties the inner caches, then the kernel's activations are written again: a kernel in a
model finds what its producer left near, and its weights farther away.
"""

import ctypes
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.backend import backend_for, renderable
from tilewright.backend.cpu.machine_code import render
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Map, Program
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import Axis, load, var
from tilewright.ir.forms.loops import LoopProgram
from tilewright.ir.forms.tensor import Layout, Tensor, elements
from tilewright.lower.memory import scratch
from tilewright.lower.program import lower_program, replace_name
from tilewright.options import Options
from tilewright.runtime import (
    BufferRef,
    Cache,
    CpuModel,
    KernelStage,
    ModelImage,
    aligned_copy,
    compile_objects,
    find_compiler,
    for_kernels,
    link,
    this_machine,
)
from tilewright.runtime import build as build_image
from tilewright.schedule.planner import make_plan
from tilewright.target import Target
from tilewright.target.instruction_sets import LINE_BYTES
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.check.kernels import check_plan
from tilewright.tile_graph.plan.form import Plan, Tile


@dataclass(frozen=True)
class Ready:
    """One kernel's C source, plain data that crosses between processes, and what its buffers are."""

    name: str
    source: str
    tiles: int
    scratch_bytes: int
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """A kernel on its buffers."""

    ready: Ready
    refs: tuple[BufferRef, ...]


@dataclass(frozen=True)
class Prepared:
    """A plan of the measured kernel, lowered and rendered."""

    kernel: Tile
    layouts: tuple[tuple[str, Layout], ...]
    ready: Ready


@dataclass(frozen=True)
class Times:
    """Seconds of each plan: the least of all runs, and the median, which says how disturbed they were."""

    least: tuple[float, ...]
    median: tuple[float, ...]
    runs: int


def prepare(program: Program, plan: Plan, target: Target) -> Prepared:
    """The one kernel of a plan as C."""
    check_plan(plan, program)
    loops = lower_program(program, plan, backend_for(target).lower_kernel)
    return Prepared(plan.kernels[0], plan.layouts, _ready(loops, target))


def _ready(loops: LoopProgram, target: Target) -> Ready:
    loops = renderable(loops, target)
    (kernel,), (call,) = loops.kernels, loops.calls
    # named by what it is, so that equal kernels are compiled once
    (text,) = render(loops, target).values()
    name = f"k{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    named = LoopProgram((replace_name(kernel, name),), loops.calls, loops.tensors)
    (source,) = render(named, target).values()
    grid: Any = kernel.body[0]
    return Ready(name, source, int(grid.axis.extent), scratch(kernel)[1], call.arguments)


def copy_kernel(size: int, dtype: DType, target: Target) -> Ready:
    """y[i] = x[i] over a flat buffer, by our own compiler."""
    axis = Axis("i", size)
    source, result = Tensor("x", (size,), dtype), Tensor("y", (size,), dtype)
    program = Program((source,), (result,), (Map(result, (axis,), load(source, [var(axis)])),))
    return _ready(lower_program(program, make_plan(program, target, "none"), backend_for(target).lower_kernel), target)


def compile_ahead(readies: Sequence[Ready], options: Options) -> None:
    """Objects into the cache, one at a time: several processes do this side by side."""
    machine = this_machine()
    compiler = find_compiler(options.compiler)
    sources = {r.name: r.source for r in readies}
    compile_objects(sources, compiler, for_kernels(compiler, machine), machine, Cache(options.cache_dir), jobs=1)


class Bench:
    """One kernel's plans and all they need, in one shared object: a sweep of the caches, what rewrites the
    activations, and the plans themselves, each with its buffers."""

    def __init__(self, program: Program, plans: Sequence[Prepared], target: Target, options: Options) -> None:
        self.arena: dict[str, int] = {}
        self.arena_bytes = 0
        self.options = options
        self.threads = options.threads or os.cpu_count() or 1
        rng = np.random.default_rng(0)
        layouts = dict(program.layouts)
        sizes = {
            t.name: elements((layouts.get(t) or Layout.natural(t.rank)).storage_shape(t.shape))
            for t in (*program.inputs, *program.outputs)
        }
        for tensor in (*program.inputs, *program.outputs):
            self._reserve(tensor.name, sizes[tensor.name] * tensor.dtype.bytes)
        sweep_size = target.units * target.local.capacity // 4
        for name in ("sweep in", "sweep out"):
            self._reserve(name, 4 * sweep_size)
        sweep = copy_kernel(sweep_size, dtypes.float32, target)
        self.sweep = Step(sweep, (self._in_arena("sweep in"), self._in_arena("sweep out")))
        self.inputs: list[np.ndarray] = []
        self.fills: list[Step] = []
        self.rewrites: list[Step] = []
        for tensor in program.inputs:
            if not sizes[tensor.name]:
                continue
            copy = copy_kernel(sizes[tensor.name], tensor.dtype, target)
            self.inputs.append(_random(rng, sizes[tensor.name], tensor.dtype))
            place = self._in_arena(tensor.name)
            self.fills.append(Step(copy, (BufferRef("input", len(self.inputs) - 1), place)))
            self.rewrites.append(Step(copy, (place, place)))
        weights = _Weights(program)
        self.plans: list[Step] = []
        for plan in plans:
            packed = weights.add(plan)
            refs = (
                BufferRef("weight", packed[name]) if name in packed else self._in_arena(name)
                for name in plan.ready.arguments
            )
            self.plans.append(Step(plan.ready, tuple(refs)))
        self.weights = weights.data()

    def _reserve(self, name: str, size: int) -> None:
        self.arena[name] = self.arena_bytes
        self.arena_bytes += -(-max(size, 1) // 4096) * 4096 + LINE_BYTES * 3  # not all at the same place in the sets

    def _in_arena(self, name: str) -> BufferRef:
        return BufferRef("arena", self.arena[name])

    def sources(self) -> dict[str, str]:
        steps = (self.sweep, *self.fills, *self.plans)
        return {step.ready.name: step.ready.source for step in steps}

    def measure_wall(self, seconds: float, is_cold: bool, least_runs: int = 3, most_runs: int = 40) -> Times:
        """By the clock, on the product's own workers; all plans in turn, again and again, until the time is over."""
        steps = list(self.fills)
        timed = []
        # the first of a run meets other caches than the rest: a plan that is not counted goes before it
        for number, plan in enumerate((*self.plans[:1], *self.plans)):
            if is_cold:
                steps += [self.sweep, *self.rewrites]
            if number:
                timed.append(len(steps))
            steps.append(plan)
        stages = tuple(KernelStage(s.ready.name, s.ready.tiles, s.refs, s.ready.scratch_bytes) for s in steps)
        image = ModelImage(
            self.sources(), stages, tuple(a.nbytes for a in self.inputs), (), self.weights, self.arena_bytes, (0,)
        )
        machine = this_machine()
        compiler = find_compiler(self.options.compiler)
        flags = for_kernels(compiler, machine)
        cache = Cache(self.options.cache_dir)
        rows = []
        with tempfile.TemporaryDirectory(prefix="tilewright-plans-") as folder:
            built = build_image(
                image, compiler, flags, machine, cache, jobs=os.cpu_count() or 1, weights_cache=Cache(Path(folder))
            )
            with CpuModel(built, self.threads) as model:
                model.run(self.inputs, [])
                end = time.perf_counter() + seconds
                while len(rows) < least_runs or (len(rows) < most_runs and time.perf_counter() < end):
                    rows.append(model.profile(self.inputs, [])[timed] * 1e-9)
        return _times(rows)

    def measure_cpu(self, seconds: float, is_cold: bool, least_runs: int = 3, most_runs: int = 40) -> Times:
        """By the processor time of one thread, which does each worker's share in turn: for a machine that is busy.

        A plan's time is that of its longest share; where workers would balance, that of an even share.
        """
        machine = this_machine()
        compiler = find_compiler(self.options.compiler)
        cache = Cache(self.options.cache_dir)
        every = [self.sweep, *self.fills, *self.rewrites, *self.plans]
        sources = self.sources()
        harness = {"harness": harness_source(list(sources))}
        objects = compile_objects(
            sources | harness, compiler, for_kernels(compiler, machine), machine, cache, jobs=os.cpu_count() or 1
        )
        run = ctypes.CDLL(str(link(objects, compiler, cache).resolve())).bench_run
        run.restype = ctypes.c_int64
        numbers = {name: i for i, name in enumerate(sources)}
        arena, weights = aligned_copy(bytes(self.arena_bytes)), aligned_copy(self.weights)
        scratch = aligned_copy(bytes(max(s.ready.scratch_bytes for s in every) + LINE_BYTES))
        bases = {"arena": arena.ctypes.data, "weight": weights.ctypes.data}

        def prepared(step: Step) -> Callable[[int, int], int]:
            where = [
                self.inputs[r.value].ctypes.data if r.space == "input" else bases[r.space] + r.value for r in step.refs
            ]
            buffers = (ctypes.c_void_p * len(where))(*where)
            number, room = ctypes.c_int64(numbers[step.ready.name]), ctypes.c_void_p(scratch.ctypes.data)
            return lambda first, last: int(run(number, buffers, room, ctypes.c_int64(first), ctypes.c_int64(last)))

        sweep = prepared(self.sweep)
        rewrites = [(prepared(s), s.ready.tiles) for s in self.rewrites]
        plans = [(prepared(s), shares(s.ready.tiles, self.threads)) for s in self.plans]
        for step in self.fills:
            prepared(step)(0, step.ready.tiles)
        rows: list[list[float]] = []
        end = time.perf_counter() + seconds
        while len(rows) <= least_runs or (len(rows) <= most_runs and time.perf_counter() < end):
            row = []
            for call, parts in plans:
                spans = []
                for first, last in parts:
                    if is_cold:
                        sweep(0, self.sweep.ready.tiles)
                        for rewrite, tiles in rewrites:
                            rewrite(0, tiles)
                    spans.append(call(first, last) * 1e-9)
                # with many tiles, whoever is done takes more of them
                even = len(parts) > 1 and parts[-1][1] > DYNAMIC_TILES * self.threads
                row.append((sum(spans) / len(spans) if even else max(spans)) + MEETING_SECONDS * (len(parts) > 1))
            rows.append(row)
        return _times(rows[1:])


# The driver's rules, for times that are put together from one thread's shares.
DYNAMIC_TILES = 4
MEETING_SECONDS = 1.5e-6


def shares(tiles: int, workers: int) -> list[tuple[int, int]]:
    """First and last tile of each worker that has any."""
    edges = [0]
    for worker in range(workers):
        edges.append(edges[-1] + tiles // workers + (worker < tiles % workers))
    return [(a, b) for a, b in pairwise(edges) if b > a]


def harness_source(kernels: Sequence[str]) -> str:
    """Runs some tiles of a kernel and gives the nanoseconds of processor time they took."""
    form = "(void *const *buffers, const int64_t *extents, int64_t tile, char *scratch)"
    declared = "\n".join(f"void {name}{form};" for name in kernels)
    return f"""#define _GNU_SOURCE
#include <stdint.h>
#include <time.h>
{declared}
typedef void (*kernel){form};
static const kernel kernels[] = {{{", ".join(kernels)}}};
static const int64_t extents[1] = {{0}};
static int64_t now(void) {{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}}
__attribute__((visibility("default")))
int64_t bench_run(int64_t number, void *const *buffers, char *scratch, int64_t first, int64_t last) {{
    int64_t start = now();
    for (int64_t tile = first; tile < last; tile++) kernels[number](buffers, extents, tile, scratch);
    return now() - start;
}}
"""


def _times(rows: Sequence[Sequence[float]]) -> Times:
    table = np.array(rows)
    return Times(tuple(table.min(0).tolist()), tuple(np.median(table, 0).tolist()), len(rows))


class _Weights:
    """Constants one after the other, each layout of each once."""

    def __init__(self, program: Program) -> None:
        self.constants: Mapping[Tensor, np.ndarray] = program.constants
        self.places: dict[tuple[str, Layout], int] = {}
        self.pieces: list[bytes] = []
        self.size = 0

    def add(self, plan: Prepared) -> dict[str, int]:
        layouts = dict(plan.layouts)
        found: dict[str, int] = {}
        for tensor, array in self.constants.items():
            if tensor.name not in plan.ready.arguments:
                continue
            layout = layouts.get(tensor.name) or Layout.natural(tensor.rank)
            key = (tensor.name, layout)
            if key not in self.places:
                shape = tuple(extent_of(e) for e in tensor.shape)
                data = layout.pack(np.asarray(array).reshape(shape)).tobytes()
                data += bytes(-len(data) % LINE_BYTES)
                self.places[key] = self.size
                self.pieces.append(data)
                self.size += len(data)
            found[tensor.name] = self.places[key]
        return found

    def data(self) -> bytes:
        return b"".join(self.pieces)


def _random(rng: np.random.Generator, size: int, dtype: DType) -> np.ndarray:
    """Normal floats, and integers 0 or 1, in range for indices and masks alike."""
    values = rng.standard_normal(size) if dtype.is_float else rng.integers(0, 2, size)
    return np.asarray(values).astype(dtype.numpy)
