"""The plans chosen for products beside 20 with the best predictions, and beside themselves with one stage.

Plans are made, lowered and compiled by a process a core; their kernels are launched by themselves, over sets of
operands that do not fit the L2 cache together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from statistics import geometric_mean
from typing import Any

from tilewright.backend import backend_for
from tilewright.backend.gpu.matrix_cost import Fragments, Product, layout_for, ranked
from tilewright.backend.gpu.matrix_plan import comes_from_far, matrix_sizes, runs_of, stored_at_once, ways_of
from tilewright.backend.gpu.shared_arena import place_shared
from tilewright.compiler import build
from tilewright.frontend.onnx import load
from tilewright.intrinsics.gpu_matrix import FORMS
from tilewright.ir.compute import all_computes
from tilewright.ir.tensor import Layout
from tilewright.lower.program import lower_program
from tilewright.options import Options
from tilewright.render.cuda import launch_shape, render_kernel
from tilewright.runtime import nvrtc
from tilewright.target import Target, machine
from tilewright.tile_graph.context import NestContext
from tilewright.tile_graph.held import plan_nests
from tilewright.tile_graph.nest import data_cost
from tilewright.tile_graph.plan import Tile

Shape = tuple[int, int, int, int, bool]
Timed = Callable[[Callable[[int], Any], int], float]

_PLANS = 20
_WITHIN = 1.1
_BEYOND_L2 = 256 << 20
_CALLS = 20
# beside those that are timed against cuBLAS
_MORE: tuple[Shape, ...] = (
    (640, 1280, 640, 1, False), (2048, 512, 512, 1, False), (512, 512, 2048, 1, True), (256, 1024, 1024, 1, False),
    (96, 768, 768, 1, False), (768, 384, 1536, 1, True), (320, 640, 1920, 1, False), (577, 768, 768, 1, False),
    (1024, 256, 1024, 1, False), (512, 768, 3072, 1, False), (784, 384, 384, 1, False), (256, 512, 1024, 1, True),
)  # fmt: skip


@dataclass(frozen=True)
class Made:
    """One plan's kernel, ready to be launched."""

    code: bytes
    name: str
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    order: tuple[str, ...]  # a, b and o as the kernel takes them
    predicted: float
    way: tuple[int, ...]


@dataclass(frozen=True)
class Judged:
    """A product: what its chosen plan takes, the fastest of all tried, and the chosen one with one stage."""

    shape: Shape
    chosen: float
    best: float
    best_way: tuple[int, ...]
    chosen_way: tuple[int, ...]
    one_stage: float
    tried: tuple[tuple[tuple[int, ...], float, float], ...]  # every way, its prediction and its time


def measured(shapes: Sequence[Shape], count: int, timed: Timed) -> list[Judged]:
    target = machine("cuda")
    plain = [s for s in (*shapes, *_MORE) if s[3] == 1 and s[0] * s[1] * s[2] < 2 << 33]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        made = [p for p in pool.map(plans_of, plain, [target] * len(plain)) if p is not None]
    rows = []
    print(f"{'product':26} {'chosen':>8} {'best':>8} {'ratio':>6} {'one stage':>9}  chosen way, best way")
    for shape, plans, single in made[:count]:
        times = _times(shape, [*plans, single], timed)
        fastest = min(range(len(plans)), key=lambda i: times[i])
        tried = tuple((p.way, p.predicted, t) for p, t in zip(plans, times, strict=False))
        row = Judged(shape, times[0], times[fastest], plans[fastest].way, plans[0].way, times[-1], tried)
        rows.append(row)
        print(f"{' x '.join(map(str, shape[:3])):26} {row.chosen:8.2f} {row.best:8.2f} {row.chosen / row.best:6.2f} "
              f"{row.one_stage:9.2f}  {row.chosen_way} {row.best_way}", flush=True)  # fmt: skip
    near = sum(r.chosen <= _WITHIN * r.best for r in rows)
    slower = geometric_mean(r.one_stage / r.chosen for r in rows)
    print(f"{len(rows)} products: {near / len(rows):.0%} within 10% of the best of {_PLANS}; one stage takes "
          f"{slower:.2f} times as long in the geometric mean")  # fmt: skip
    return rows


def plans_of(shape: Shape, target: Target) -> tuple[Shape, list[Made], Made] | None:
    """The chosen plan and others, and the chosen one with one stage; None where a product is not one kernel of tensor
    cores."""
    from bench.gpu import product_model

    artifact = build(load(product_model(shape, "float16")), target, Options(target="cuda", stop_after="plan"))
    plan, program = artifact.plan, artifact.program
    assert plan is not None and program is not None
    kernels = plan.kernels
    if len(kernels) > 1 or kernels[0].leaves[0].instruction is None or len(kernels[0].sizes) != 2:
        return None
    (kernel,) = kernels
    (leaf,) = kernel.leaves
    nests = plan_nests(kernel, all_computes(program))
    nest, context = nests[-1], NestContext(target, lambda t: Layout.natural(t.rank), program.constants)
    warps = next(t for t in kernel.walk() if isinstance(t, Tile) and t.over == "warps")
    holds = next(t.holds for t in kernel.walk() if isinstance(t, Tile) and t.holds)
    own = Fragments(warps.axes[0].extent, warps.axes[1].extent, warps.sizes[0][1], warps.sizes[1][1], leaf.step,
                    holds[0].stages, leaf.lanes, leaf.split)  # fmt: skip
    ways, runs = ways_of(nest, leaf, nests, context), runs_of(nest, leaf, context)
    stored = stored_at_once(nest, leaf, context)
    m, k, n = shape[:3]
    known: dict[Fragments, float] = {}
    for rows in matrix_sizes(nest, leaf, nest.axes[0]):
        for columns in matrix_sizes(nest, leaf, nest.axes[1]):
            blocks = -(-m // rows) * -(-n // columns)
            product = Product(rows, columns, 1, k, blocks, ways, comes_from_far(context), runs, stored,
                              data_cost(*nest.values))  # fmt: skip
            for way, seconds in ranked(target, leaf.instruction or "", product)[:3]:
                if (way.rows, way.columns) == (rows, columns):
                    known[way] = seconds
    order = [own, *(w for w in sorted(known, key=lambda w: known[w]) if w != own)][:_PLANS]
    made = [_made(artifact, w, known.get(w, kernel.estimate.seconds)) for w in order]
    return shape, made, _made(artifact, replace(own, stages=1), 0.0)


def _made(artifact: Any, way: Fragments, predicted: float) -> Made:
    packet = FORMS[artifact.plan.kernels[0].leaves[0].instruction].packet

    def changed(tile: Tile) -> Tile:
        body = tuple(changed(n) if isinstance(n, Tile) else replace(n, step=way.step, split=way.groups)
                     for n in tile.body)  # fmt: skip
        tile = replace(tile, body=body)
        sides = (way.rows, way.columns)
        if tile.over == "blocks":
            return replace(tile, sizes=tuple((name, size) for (name, _), size in zip(tile.sizes, sides, strict=True)))
        if tile.over == "lanes":
            return replace(tile, count=32 * way.warps)
        if tile.over == "warps":
            axes = tuple(replace(a, extent=size) for a, size in zip(tile.axes, sides, strict=True))
            return replace(tile, sizes=(("m", way.warp_rows), ("n", way.warp_columns)), axes=axes)
        held = tuple(replace(h, stages=way.stages, layout=layout_for(size, way.step, packet))
                     for h, size in zip(tile.holds, sides, strict=False))  # fmt: skip
        return replace(tile, holds=held) if tile.holds else tile

    plan = replace(artifact.plan, body=changed(artifact.plan.body))
    loops = lower_program(artifact.program, plan, backend_for(artifact.target).lower_kernel)
    (kernel,) = loops.kernels
    shape, placed = launch_shape(kernel), place_shared(kernel)
    cubin = nvrtc.compile_to_cubin(render_kernel(kernel, placed.offsets))
    x, y, z = (int(str(e)) for e in shape.grid)
    settings = (way.rows, way.columns, way.warp_rows, way.warp_columns, way.step, way.stages, way.groups)
    return Made(cubin.code, kernel.name, (x, y, z), shape.threads, placed.bytes, tuple(loops.calls[0].arguments),
                predicted * 1e6, settings)  # fmt: skip


def _times(shape: Shape, plans: Sequence[Made], timed: Timed) -> list[float]:
    import ctypes

    import torch
    from cuda.bindings import driver

    m, k, n, _, turned = shape
    sets = max(2, min(64, _BEYOND_L2 // (2 * (m * k + k * n + m * n)) + 1))
    shapes = {"a": (m, k), "b": (n, k) if turned else (k, n), "o": (m, n)}
    arrays = [{x: torch.randn(dims, device="cuda").half() for x, dims in shapes.items()} for _ in range(sets)]
    found = []
    for plan in plans:
        _, module = driver.cuModuleLoadData(plan.code)
        _, function = driver.cuModuleGetFunction(module, plan.name.encode())
        driver.cuFuncSetAttribute(
            function, driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, plan.shared_bytes
        )

        def call(i: int, plan: Made = plan, function: Any = function) -> None:
            own = arrays[i % sets]
            values = tuple(own[name].data_ptr() for name in plan.order)
            given = (values, (ctypes.c_void_p,) * len(values))
            stream = torch.cuda.current_stream().cuda_stream
            block = (plan.threads, 1, 1)
            (error,) = driver.cuLaunchKernel(function, *plan.grid, *block, plan.shared_bytes, stream, given, 0)
            if error:
                raise RuntimeError(f"{plan.name} {plan.way}: {error}")

        found.append(timed(call, max(sets, _CALLS)))
        driver.cuModuleUnload(module)
    return found
