"""How near a model's products come to the multiply-add rate: python -m bench.products --models bert_base.

Every kernel of the model runs in its place, between bursts of multiply-adds in registers, which touch no memory: its
operations a second over those of the bursts beside it, in the same milliseconds, whatever the clock is. Another burst
counts the instructions that a core takes. Where a thread that shares the core takes half of them, multiply-adds in
registers run on as fast, and a product, which has as many other instructions, cannot: such rounds are told apart.

    python -m bench.products --models bert_base,bert_384                  on all threads, by the clock
    python -m bench.products --models bert_base --clock cpu --seconds 60  one thread's processor time: a busy machine
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.peak import chain_count
from bench.plan_times import harness_source
from bench.support import add_zoo_options, chosen_models, export_folder, exported, table
from tilewright.backend import renderable
from tilewright.backend.cpu.machine_code import model_image
from tilewright.compiler.pipeline import Artifact, build
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.compute import all_computes
from tilewright.options import Options
from tilewright.runtime import (
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
from tilewright.runtime.weights import weight_pieces
from tilewright.target import Target, machine
from tilewright.target.instruction_sets import LINE_BYTES
from tilewright.tile_graph.algebra.context import is_contraction
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.traffic.held import plan_nests

Times = Callable[[], NDArray[np.float64]]  # seconds of every stage of one run
Arrays = Sequence[NDArray[np.uint8]]

_BURST_SECONDS = 60e-6  # beside some 20 us in which a core lowers its clock for wide vectors
_INSTRUCTIONS = 8  # independent ones, more than a core takes a cycle
_OWN_CORE = 0.85  # of the most instructions for a multiply-add that any round has: below it another thread took some


@dataclass(frozen=True)
class Work:
    """A kernel by its products, the largest first, and their multiply-adds."""

    text: str
    multiply_adds: int


def burst_source(target: Target, multiply_adds: int, instructions: int) -> dict[str, str]:
    """A kernel that only multiplies and adds, on most of the registers, and one of plain instructions; their turns."""
    form = "(void *const *buffers, const int64_t *extents, int64_t tile, char *scratch)"
    head = f"#include <stdint.h>\nvoid {{}}{form} {{{{\n"
    chains = range(chain_count(target.vector_registers))
    declared = "".join(f"    vec a{i} = (vec){{0}} + {i + 1}.0f;\n" for i in chains)
    step = "".join(f"        a{i} += a{i} * m;\n" for i in chains)
    total = " + ".join(f"a{i}" for i in chains)
    wide = f"typedef float vec __attribute__((vector_size({target.vector_bytes})));\n"
    adds = f"""{wide}{head.format("multiply_adds")}    vec m = (vec){{0}} + 1e-9f * (float)(tile + 1);
{declared}    for (int64_t i = 0; i < {multiply_adds}; i++) {{
{step}    }}
    *(vec *)scratch = {total};
}}
"""
    places = range(_INSTRUCTIONS)
    counters = "".join(f"    uint64_t x{i} = {i};\n" for i in places)
    counted = "".join(f'        x{i} += 3; __asm__ volatile("" : "+r"(x{i}));\n' for i in places) * 8
    plain = f"""{head.format("instructions")}{counters}    for (int64_t i = 0; i < {instructions}; i++) {{
{counted}    }}
    *(uint64_t *)scratch = {" + ".join(f"x{i}" for i in places)};
}}
"""
    return {"multiply_adds": adds, "instructions": plain}


def with_bursts(image: ModelImage, target: Target, threads: int) -> tuple[ModelImage, float]:
    """The model with bursts before every kernel and after the last, and the multiply-adds of one of them."""
    each = target.lanes(4) * chain_count(target.vector_registers)
    turns = int(_BURST_SECONDS * target.fma_rate / each)
    cycles = _BURST_SECONDS * (target.clock or target.fma_rate / (2 * target.lanes(4)))
    kernels = dict(image.kernels) | burst_source(target, turns, int(cycles / (2 * _INSTRUCTIONS)))
    room = max(target.vector_bytes, LINE_BYTES)
    bursts = [KernelStage(name, threads, (), room, balance="static") for name in ("instructions", "multiply_adds")]
    stages = [s for stage in image.stages for s in (*bursts, replace(stage, barrier_before=True))]
    return replace(image, kernels=kernels, stages=(*stages, *bursts)), float(threads * turns * each)


@contextmanager
def by_the_clock(image: ModelImage, inputs: Arrays, outputs: Arrays, threads: int, options: Options) -> Iterator[Times]:
    """On the product's own workers."""
    found, compiler = this_machine(), find_compiler(options.compiler)
    flags, cache = for_kernels(compiler, found), Cache(options.cache_dir)
    with tempfile.TemporaryDirectory(prefix="tilewright-products-") as folder:
        built = build_image(image, compiler, flags, found, cache, jobs=threads, weights_cache=Cache(Path(folder)))
        with CpuModel(built, threads) as model:
            yield lambda: np.asarray(model.profile(inputs, outputs) * 1e-9, np.float64)


@contextmanager
def by_processor_time(image: ModelImage, inputs: Arrays, outputs: Arrays, options: Options) -> Iterator[Times]:
    """Of one thread, which does all tiles."""
    found, compiler, cache = this_machine(), find_compiler(options.compiler), Cache(options.cache_dir)
    sources = dict(image.kernels) | {"harness": harness_source(list(image.kernels))}
    objects = compile_objects(sources, compiler, for_kernels(compiler, found), found, cache, jobs=1)
    run = ctypes.CDLL(str(link(objects, compiler, cache).resolve())).bench_run
    run.restype = ctypes.c_int64
    numbers = {name: number for number, name in enumerate(image.kernels)}
    weights = aligned_copy(b"".join(weight_pieces(image.weights)))
    arena = aligned_copy(bytes(image.arena_bytes))
    room = aligned_copy(bytes(max(s.scratch_bytes for s in image.stages) + LINE_BYTES))
    starts = {"weight": weights.ctypes.data, "arena": arena.ctypes.data}

    def address(space: str, value: int) -> int:
        given = {"input": inputs, "output": outputs}.get(space)
        return given[value].ctypes.data if given is not None else starts[space] + value

    calls = []
    for stage in image.stages:
        buffers = (ctypes.c_void_p * max(1, len(stage.buffers)))(*(address(b.space, b.value) for b in stage.buffers))
        calls.append((ctypes.c_int64(numbers[stage.kernel]), buffers, ctypes.c_void_p(room.ctypes.data),
                      ctypes.c_int64(0), ctypes.c_int64(stage.tiles)))  # fmt: skip
    yield lambda: np.array([run(*call) for call in calls]) * 1e-9


def works(made: Artifact) -> list[Work | None]:
    """What every call multiplies; None where it has no product."""
    assert made.program is not None and made.plan is not None
    computes = all_computes(made.program)
    by_kernel: dict[str, Work | None] = {}
    for kernel in made.plan.kernels:
        products = sorted((n for n in plan_nests(kernel, computes) if _is_product(n)), key=_points, reverse=True)
        text = " + ".join(dict.fromkeys(_shape(n) for n in products))
        by_kernel[kernel.name] = Work(text, sum(map(_points, products))) if products else None
    return [by_kernel[kernel.name] for kernel, steps in made.plan.launches() if steps is None]


def _is_product(nest: Nest) -> bool:
    """Of two tensors: a sum of squares is none."""
    summed = {n.source for n in nest.element_loads if any(axis in n.axes for axis in nest.reduce_axes)}
    return is_contraction(nest) and len(summed) > 1


def _points(nest: Nest) -> int:
    return prod(extent_of(a.extent) for a in (*nest.axes, *nest.reduce_axes))


def _shape(nest: Nest) -> str:
    sizes = [extent_of(a.extent) for a in nest.axes if extent_of(a.extent) > 1]
    return "x".join(map(str, sizes)) + " over " + "x".join(str(extent_of(a.extent)) for a in nest.reduce_axes)


def shares(seconds: NDArray[np.float64], burst: float, multiply_adds: Sequence[int]) -> tuple[NDArray[np.float64], ...]:
    """Of a run, kernel by kernel: the part of the multiply-add rate beside it, instructions a multiply-add there, that
    rate, and seconds."""
    instructions, rates, kernels = 1 / seconds[0::3], burst / seconds[1::3], seconds[2::3]
    rate = (rates[:-1] + rates[1:]) / 2
    free = np.minimum(instructions[:-1] / rates[:-1], instructions[1:] / rates[1:])
    return np.array(multiply_adds) / kernels / rate, free, rate, kernels


def measure(made: Artifact, target: Target, options: argparse.Namespace) -> str:
    assert made.program is not None and made.plan is not None and made.loops is not None
    threads = 1 if options.clock == "cpu" else options.threads
    plain = model_image(made.sources, renderable(made.loops, target), made.program, made.plan)
    image, burst = with_bursts(plain, target, threads)
    rng = np.random.default_rng(0)
    inputs = [_random(rng, p.shape, p.dtype.numpy) for p in made.inputs]
    outputs = [np.zeros(size, np.uint8) for size in image.output_bytes]
    found = works(made)
    chosen = Options.from_environment()
    way = by_processor_time(image, inputs, outputs, chosen) if options.clock == "cpu" else by_the_clock(
        image, inputs, outputs, threads, chosen)  # fmt: skip
    rounds: list[tuple[NDArray[np.float64], ...]] = []
    with way as times:
        times()
        end = time.perf_counter() + options.seconds
        while len(rounds) < 3 or time.perf_counter() < end:
            rounds.append(shares(times(), burst, [work.multiply_adds if work else 0 for work in found]))
    return report(found, [np.array(column) for column in zip(*rounds, strict=True)], threads)


def _random(rng: np.random.Generator, shape: Sequence[int], dtype: np.dtype[np.generic]) -> NDArray[np.uint8]:
    whole = np.dtype(dtype).kind in "iub"
    values = rng.integers(0, 2, shape) if whole else rng.standard_normal(shape)
    return np.ascontiguousarray(values.astype(dtype))


def report(found: Sequence[Work | None], columns: Sequence[NDArray[np.float64]], threads: int) -> str:
    """A line a kind of kernel: medians of all its calls in all rounds, and of those with a core of their own."""
    share, free, rate, kernels = columns
    own = free >= _OWN_CORE * np.quantile(free, 0.99)
    rows = []
    by_text: dict[str, list[int]] = {}
    for place, work in enumerate(found):
        by_text.setdefault(work.text if work else "no product", []).append(place)
    for text, places in sorted(by_text.items(), key=lambda item: -float(np.median(kernels, 0)[item[1]].sum())):
        here = np.zeros_like(own)
        here[:, places] = True
        took = 1e3 * float(np.median(kernels, 0)[places].sum())
        cells = [text, str(len(places)), f"{took:.2f}"]
        if text != "no product":
            alone = share[here & own]
            cells += [f"{np.median(share[here]):.2f}", f"{np.median(alone):.2f}" if len(alone) else "-"]
        rows.append([*cells, *[""] * (5 - len(cells))])
    products = sum(work.multiply_adds for work in found if work)
    times = kernels.sum(1)
    whole = np.median(products / times / np.median(rate, 1))
    lines = table(("products of a kernel", "calls", "ms", "of the rate", "of it on a core of its own"), rows)
    about = f"{len(share)} rounds, {threads} threads, {2e-9 * np.median(rate):.0f} GFLOP/s of multiply-adds"
    about += f"; on a core of its own in {np.mean(own):.0%}. All kernels together: {whole:.2f} of the rate"
    return "\n".join([*lines, "", about])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.products", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_zoo_options(parser, "products", batch=True, results=False)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall",
                        help="wall: on all threads; cpu: processor time of one, for a busy machine")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=20.0, help="per model (default: %(default)s)")
    arguments = parser.parse_args()
    options = Options.from_environment()
    target = machine("cpu", cache_dir=options.cache_dir, compiler=options.compiler)
    names = chosen_models(parser, arguments)
    with export_folder(arguments) as (_, folder):
        paths: Mapping[str, Path] = exported(names, arguments.size, folder, lambda _: None, arguments.batch)
        for name, path in paths.items():
            made = build(load(path, {}), target, options.override(stop_after="source"))
            print(f"\n{name}\n\n{measure(made, target, arguments)}", flush=True)


if __name__ == "__main__":
    main()
