"""The plans chosen for kernels beside 20 with the best predictions, and products beside themselves with one stage.

Plans are those that `tune` measures (backend/gpu/kernel/variants.py), for products, attention, softmax,
normalisations, sums and chains of maps, one kernel each; they are made, lowered and compiled by a process a core, here
or beforehand on a machine without a GPU. Kernels are launched by themselves, over sets of operands that do not fit the
L2 cache together; their answers are compared with those of the chosen plan.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from multiprocessing import get_context
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np

from tilewright.backend import backend_for
from tilewright.backend.gpu.kernel.shared_arena import place_shared
from tilewright.compiler.pipeline import Artifact, build
from tilewright.frontend.onnx.model import load
from tilewright.intrinsics.gpu_matrix import FORMS
from tilewright.lower.program import lower_program
from tilewright.options import Options
from tilewright.render.cuda import render_kernel
from tilewright.render.launch_shape import launch_shape
from tilewright.runtime import nvrtc
from tilewright.target import Target, machine
from tilewright.tile_graph.plan.form import Tile
from tilewright.tune.groups import find_groups

Shape = tuple[int, int, int, int, bool]
Timed = Callable[[Callable[[int], Any], int], float]

_PLANS = 20
_WITHIN = 1.1
_BEYOND_L2 = 256 << 20
_CALLS = 20
_AGREE = 2e-2  # of the answers' norm
# beside those that are timed against cuBLAS
_MORE: tuple[Shape, ...] = (
    (640, 1280, 640, 1, False), (2048, 512, 512, 1, False), (512, 512, 2048, 1, True), (256, 1024, 1024, 1, False),
    (96, 768, 768, 1, False), (768, 384, 1536, 1, True), (320, 640, 1920, 1, False), (577, 768, 768, 1, False),
    (1024, 256, 1024, 1, False), (512, 768, 3072, 1, False), (784, 384, 384, 1, False), (256, 512, 1024, 1, True),
)  # fmt: skip
# heads, rows, columns of attention; rows and their length of what works on rows
_ATTENTIONS = ((12, 384, 64), (12, 128, 64), (12, 197, 64), (768, 49, 32), (12, 1500, 64), (16, 1000, 80),
               (12, 4096, 64))  # fmt: skip
# rows, summed, columns, bits of the weights
_PACKED = tuple((rows, 4096, 11008, bits) for bits in (4, 8) for rows in (1, 16, 32))
_ROWS = (("softmax", 384, 3072), ("softmax", 4608, 384), ("norm", 384, 768), ("norm", 3136, 96), ("sum", 4096, 1024),
         ("chain", 384, 3072), ("chain", 4096, 4096))  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model of one kernel, by what it computes and how large it is."""

    kind: str
    sizes: tuple[int, ...]
    transposed: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind} {' x '.join(map(str, self.sizes))}{' transposed' if self.transposed else ''}"


@dataclass(frozen=True)
class Made:
    """One plan's kernel, ready to be launched."""

    code: bytes
    name: str
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    order: tuple[str, ...]  # arguments as the kernel takes them
    predicted: float
    plan: str


@dataclass(frozen=True)
class Plans:
    """A case with its chosen plan and others; of a product the best plan whose warps multiply by themselves, by number,
    and the same with one stage: four warps as one need two at least."""

    case: Case
    shapes: Mapping[str, tuple[tuple[int, ...], str]]  # of arguments, with their element types
    result: str
    made: tuple[Made, ...]
    staged: int
    single: Made | None


@dataclass(frozen=True)
class Judged:
    """What the chosen plan takes, the fastest of all tried, and one with stages beside itself with one stage."""

    name: str
    chosen: float
    best: float
    staged: float
    one_stage: float
    chosen_plan: str
    best_plan: str
    tried: tuple[tuple[str, float, float], ...]  # every plan, its prediction and its time


def cases(shapes: Sequence[Shape]) -> list[Case]:
    """Rows and attention first: products are enough for any count."""
    found = [Case(kind, sizes) for kind, *sizes in _ROWS for sizes in (tuple(sizes),)]
    found += [Case("attention", sizes) for sizes in _ATTENTIONS]
    found += [Case("packed", sizes) for sizes in _PACKED]
    return found + [
        Case("product", (m, k, n), turned) for m, k, n, count, turned in (*shapes, *_MORE)
        if count == 1 and m * k * n < 2 << 33
    ]  # fmt: skip


def made_plans(shapes: Sequence[Shape], count: int, target: Target, only: Sequence[str] = ()) -> list[Plans]:
    """Of so many cases that are one kernel each, or of those with such words in their names."""
    found: list[Plans] = []
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        every = [c for c in cases(shapes) if not only or any(text in c.name for text in only)]
        for plans in pool.map(plans_of, every, [target] * len(every)):
            if plans is not None:
                found.append(plans)
    return found[:count]


def measured(
    shapes: Sequence[Shape], count: int, timed: Timed, kept: Path | None = None, only: Sequence[str] = ()
) -> list[Judged]:
    """`kept` has plans that were made beforehand."""
    made = made_plans(shapes, count, machine("cuda"), only) if kept is None else pickle.loads(kept.read_bytes())
    rows = []
    print(f"{'kernel':32} {'chosen':>8} {'best':>8} {'ratio':>6} {'one stage':>9} {'plans':>5}  best plan")
    for plans in made[:count]:
        times = _times(plans, timed)
        others = times[: len(plans.made)]
        fastest = min(range(len(others)), key=lambda i: others[i])
        tried = tuple((p.plan, p.predicted, t) for p, t in zip(plans.made, others, strict=True))
        single = times[-1] if plans.single else 0.0
        row = Judged(plans.case.name, others[0], others[fastest], others[plans.staged], single, plans.made[0].plan,
                     plans.made[fastest].plan, tried)  # fmt: skip
        rows.append(row)
        print(f"{row.name:32} {row.chosen:8.2f} {row.best:8.2f} {row.chosen / row.best:6.2f} {row.one_stage:9.2f} "
              f"{len(tried):5}  {row.best_plan}", flush=True)  # fmt: skip
    near = sum(r.chosen <= _WITHIN * r.best for r in rows)
    slower = geometric_mean([r.one_stage / r.staged for r in rows if r.one_stage] or [1.0])
    print(f"{len(rows)} kernels: {near / len(rows):.0%} within 10% of the best of {_PLANS}; one stage takes "
          f"{slower:.2f} times as long in the geometric mean")  # fmt: skip
    return rows


def plans_of(case: Case, target: Target) -> Plans | None:
    """None where a case is not one kernel, or there are no other plans."""
    options = Options(target="cuda", stop_after="plan")
    artifact = build(load(model_of(case)), target, options)
    plan, program = artifact.plan, artifact.program
    assert plan is not None and program is not None
    if len(plan.kernels) > 1:
        return None
    (group,) = find_groups(program, plan, target)
    others = group.alternatives(_PLANS - 1)
    if not others:
        return None
    made = tuple(_made(artifact, kernel) for kernel in (group.own, *others))
    every = (group.own, *others)
    staged = next((i for i, k in enumerate(every) if case.kind == "product" and is_staged(k)), None)
    single = None if staged is None else _made(artifact, one_stage(every[staged]))
    shapes = {p.name: (p.shape, p.dtype.name) for p in (*artifact.inputs, *artifact.outputs)}
    shapes |= {t.name: (a.shape, t.dtype.name) for t, a in program.constants.items()}
    return Plans(case, shapes, artifact.outputs[0].name, made, staged or 0, single)


def is_staged(kernel: Tile) -> bool:
    """Whether its warps multiply by themselves, and copies of later parts are under way meanwhile."""
    form = FORMS.get(kernel.leaves[-1].instruction or "")
    holds = [h for t in kernel.walk() if isinstance(t, Tile) for h in t.holds]
    return form is not None and form.warps == 1 and any(h.stages > 1 for h in holds)


def one_stage(kernel: Tile) -> Tile:
    body = tuple(one_stage(n) if isinstance(n, Tile) else n for n in kernel.body)
    return replace(kernel, body=body, holds=tuple(replace(h, stages=1) for h in kernel.holds))


def model_of(case: Case) -> Any:
    from onnx import TensorProto, helper

    from bench.gpu import product_model
    from bench.gpu_quantised import codes_of, products_model

    if case.kind == "product":
        m, k, n = case.sizes
        return product_model((m, k, n, 1, case.transposed), "float16")
    if case.kind == "packed":
        m, k, n, bits = case.sizes
        return products_model(m, k, n, bits, [codes_of(np.random.default_rng(0), k, n, bits)], bits)
    shapes: dict[str, tuple[int, ...]]
    if case.kind == "attention":
        shapes = dict.fromkeys("qkvo", (1, *case.sizes))
        nodes = [helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
                 helper.make_node("MatMul", ["q", "kt"], ["s"]), helper.make_node("Softmax", ["s"], ["p"], axis=-1),
                 helper.make_node("MatMul", ["p", "v"], ["o"])]  # fmt: skip
    else:
        shapes = {"a": case.sizes, "o": case.sizes}
        if case.kind == "norm":
            shapes |= {"w": case.sizes[1:], "b": case.sizes[1:]}
            nodes = [helper.make_node("LayerNormalization", ["a", "w", "b"], ["o"], axis=-1)]
        elif case.kind == "sum":
            shapes["o"] = (case.sizes[0], 1)
            nodes = [helper.make_node("ReduceSumSquare", ["a"], ["o"], axes=[1])]
        elif case.kind == "softmax":
            nodes = [helper.make_node("Softmax", ["a"], ["o"], axis=-1)]
        else:
            shapes["b"] = case.sizes
            nodes = [helper.make_node("Tanh", ["a"], ["t"]), helper.make_node("Mul", ["t", "b"], ["o"])]
    ports = {n: helper.make_tensor_value_info(n, TensorProto.FLOAT16, list(s)) for n, s in shapes.items()}
    graph = helper.make_graph(nodes, case.kind, [p for n, p in ports.items() if n != "o"], [ports["o"]])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _made(artifact: Artifact, kernel: Tile) -> Made:
    assert artifact.plan is not None and artifact.program is not None
    plan = artifact.plan.with_kernels({kernel.name: kernel})
    loops = lower_program(artifact.program, plan, backend_for(artifact.target).lower_kernel)
    (made,) = loops.kernels
    shape, placed = launch_shape(made), place_shared(made)
    cubin = nvrtc.compile_to_cubin(render_kernel(made, placed.offsets))
    x, y, z = (int(str(e)) for e in shape.grid)
    return Made(cubin.code, made.name, (x, y, z), shape.threads, placed.bytes, tuple(loops.calls[0].arguments),
                kernel.estimate.seconds * 1e6, said_of(kernel))  # fmt: skip


def said_of(kernel: Tile) -> str:
    """What tells plans of a kernel apart, in few words."""
    parts = ["x".join(str(n) for _, n in kernel.cut) or "whole"]
    for tile in (t for t in kernel.walk() if isinstance(t, Tile)):
        if tile.over == "lanes":
            parts.append(f"{tile.count} threads")
        if tile.over == "warps":
            parts.append(f"warps {'x'.join(str(n) for _, n in tile.sizes)}")
        if any(h.stages > 1 for h in tile.holds):
            parts.append(f"{max(h.stages for h in tile.holds)} stages")
    leaf = kernel.leaves[-1]
    by = [] if leaf.instruction is None else [leaf.instruction]
    return ", ".join([*parts, *by, f"{leaf.lanes} lanes{leaf.form.text()}"])


def _times(plans: Plans, timed: Timed) -> list[float]:
    """Of every plan, the one with one stage last; infinite for one whose answers differ."""
    import ctypes

    import torch
    from cuda.bindings import driver

    def filled(dims: tuple[int, ...], dtype: str) -> Any:
        kind = getattr(torch, dtype)
        if not kind.is_floating_point:
            return torch.randint(0, 256, dims, device="cuda").to(kind)
        return torch.randn(dims, device="cuda").to(kind)

    size = sum(prod(dims) * getattr(torch, dtype).itemsize for dims, dtype in plans.shapes.values())
    sets = max(2, min(64, _BEYOND_L2 // size + 1))
    arrays = [{x: filled(*of) for x, of in plans.shapes.items()} for _ in range(sets)]
    found, wanted = [], None
    for plan in (*plans.made, *([plans.single] if plans.single else [])):
        _, module = driver.cuModuleLoadData(plan.code)
        _, function = driver.cuModuleGetFunction(module, plan.name.encode())
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.cuFuncSetAttribute(function, attribute, plan.shared_bytes)

        def call(i: int, plan: Made = plan, function: Any = function) -> None:
            own = arrays[i % sets]
            values = tuple(own[name].data_ptr() for name in plan.order)
            given = (values, (ctypes.c_void_p,) * len(values))
            stream = torch.cuda.current_stream().cuda_stream
            block = (plan.threads, 1, 1)
            (error,) = driver.cuLaunchKernel(function, *plan.grid, *block, plan.shared_bytes, stream, given, 0)
            if error:
                raise RuntimeError(f"{plan.name} {plan.plan}: {error}")

        arrays[0][plans.result].fill_(float("nan"))
        call(0)
        torch.cuda.synchronize()
        answer = arrays[0][plans.result].double()
        wanted = answer.clone() if wanted is None else wanted
        apart = float((answer - wanted).norm() / wanted.norm())
        if not apart <= _AGREE:
            print(f"{plans.case.name}, {plan.plan}: answers differ by {apart:.1e}", flush=True)
        found.append(timed(call, max(sets, _CALLS)) if apart <= _AGREE else float("inf"))
        driver.cuModuleUnload(module)
    return found
