"""What is measured: Programs by task, each task in the forms that stages before the planner can give it.

Zoo tasks are parts of the models: one to four kernels that follow each other, cut out with what they read as inputs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from bench.judge import outside
from bench.model_cases import kind_of, work
from tilewright.backend import backend_for
from tilewright.compiler.pipeline import build
from tilewright.errors import TilewrightError
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.compute import Compute, Program, Scan, all_computes, factors, reads
from tilewright.ir.forms.expr import axes_of, loads
from tilewright.ir.forms.graph import Graph
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.text.text import program_text
from tilewright.ops import lower
from tilewright.options import Options
from tilewright.schedule.planner import make_plan
from tilewright.target import Target
from tilewright.tile_graph.algebra.context import is_contraction
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.algebra.signature import signature
from tilewright.tile_graph.plan.form import Tile
from tilewright.tile_graph.traffic.held import plan_nests
from tilewright.transform.clean.fold import fold_constants
from tilewright.transform.layout.choose import choose_layouts
from tilewright.transform.precision.choose import set_precision

# Points of a task, the most of them a unit: shorter ones spend their time in the call, longer ones teach nothing more.
LEAST_WORK, MOST_WORK = 60_000, 25_000_000
_MOST_BYTES = 64 << 20  # of all that a task reads and writes
_LONGEST = 4  # kernels of a part of a model
WINOGRAD = "direct or Winograd"

# What stages before the planner decide: options, the number of the form that differs in one decision, and which.
# Without options, the model as it says itself.
_FORMS: tuple[tuple[Mapping[str, str] | None, int, str], ...] = (
    ({}, 0, ""),
    ({"convolution": "direct"}, 0, WINOGRAD),
    ({"convolution": "winograd"}, 1, WINOGRAD),
    ({"convolution": "direct", "merging": "off"}, 1, "merged"),
    ({"convolution": "direct", "merging": "off", "schedule": "register"}, 3, "split"),
    (None, 4, "staged"),
)


@dataclass(frozen=True)
class Form:
    """A Program of a task, and in which decision it differs from another of the task, by number."""

    program: Program
    beside: int = 0
    decision: str = ""


@dataclass(frozen=True)
class Task:
    name: str
    kind: str
    source: str
    forms: tuple[Form, ...]


def outside_task(number: int, target: Target, precision: str | None) -> Task | None:
    """The task of a number; None where it is too small or too large."""
    name, model = outside.model(number)
    graph = load(model)
    forms: dict[str, Form] = {}
    texts: list[str] = []
    for given, beside, decision in _FORMS:
        options = Options(target=_kind(target), precision=precision, stop_after="layout", **given or {})  # type: ignore[arg-type]
        program = build(graph, target, options).program if given is not None else _plain(graph, target, precision)
        assert program is not None
        program = replace(program, remarks=(), input_names=(), output_names=())
        texts.append(program_text(program))
        if texts[-1] in forms:
            continue
        other = list(forms).index(texts[beside]) if forms else 0
        if forms and _scans(forms[texts[beside]].program) != _scans(program):
            decision = "rolled"
        forms[texts[-1]] = Form(program, other, decision)
    plain, found = forms[texts[-1]].program, tuple(forms.values())
    if not fits(plain, target):
        return None
    kind = "scan" if any(_scans(form.program) for form in found) else kind_of_program(plain, target)
    return Task(f"outside {name}" + (f" {precision}" if precision else ""), kind, "outside", found)


def _plain(graph: Graph, target: Target, precision: str | None) -> Program:
    program = set_precision(lower(graph), target, precision)
    return choose_layouts(fold_constants(program, backend_for(target).least_rows), target)


def zoo_tasks(path: Path, target: Target, precision: str | None, count: int, seed: int) -> list[Task]:
    """Different parts of a model, drawn at random, each kind of kernel as likely as the others."""
    options = Options(target=_kind(target), precision=precision, effort="fast", stop_after="layout")
    program = build(load(path, {}), target, options).program
    assert program is not None
    by_kind: dict[str, list[Task]] = {}
    for name, part in parts(program, target):
        shown = f"{path.stem} {name}" + (f" {precision}" if precision else "")
        task = Task(shown, kind_of_program(part, target), "zoo", (Form(part),))
        by_kind.setdefault(task.kind, []).append(task)
    rng = np.random.default_rng([seed, len(path.stem), sum(path.stem.encode())])
    drawn = [[some[i] for i in rng.permutation(len(some))] for some in by_kind.values()]
    chosen = [some[turn] for turn in range(count) for some in drawn if turn < len(some)]
    return chosen[:count]


def parts(program: Program, target: Target) -> Iterator[tuple[str, Program]]:
    """Runs of kernels of which each reads from one before it, different ones: how many, and what the last gives."""
    plan = make_plan(program, target, "register", whole=False)
    computes = all_computes(program)
    kernels = [(k, plan_nests(k, computes)) for k, steps in plan.launches() if steps is None]
    known: set[Hashable] = set()
    for first in range(len(kernels)):
        for last in range(first + 1, min(first + _LONGEST, len(kernels)) + 1):
            chosen = kernels[first:last]
            if not _follow_each_other([nests for _, nests in chosen]):
                break
            nests = [n for _, some in chosen for n in some]
            if work(nests) > MOST_WORK * target.units:
                break
            key = signature(nests, lambda t: (program.layout(t), t in program.constants))
            if key in known:
                continue
            known.add(key)
            alone = cut_out(program, [kernel for kernel, _ in chosen])
            if fits(alone, target):
                yield f"{len(chosen)} to {chosen[-1][0].leaves[-1].tensor}", alone


def _follow_each_other(kernels: Sequence[Sequence[Nest]]) -> bool:
    made: set[Tensor] = set()
    for number, nests in enumerate(kernels):
        if number and not any(t in made for n in nests for t in n.reads()):
            return False
        made.update(t for n in nests for t in n.stores)
    return True


def cut_out(program: Program, kernels: Sequence[Tile]) -> Program:
    """The computes of some kernels alone: what they read becomes inputs, and what others read of them outputs."""
    names = {name for k in kernels for leaf in k.leaves for name in (leaf.core, *leaf.epilogue, *leaf.composed)}
    computes = all_computes(program)
    wanted = {computes[name] for name in names}
    ordered = tuple(c for c in program.computes if c in wanted)
    inside = {t for c in ordered for t in c.outputs}
    outer = dict.fromkeys(t for c in ordered for t in reads(c) if t not in inside)
    stored = {leaf.tensor for k in kernels for leaf in k.leaves}
    read = {t for c in program.computes if c not in wanted for t in reads(c)} | set(program.outputs)
    used = {t for c in ordered for t in reads(c)}
    outputs = tuple(t for c in ordered for t in c.outputs if t not in used or (t in read and t.name in stored))
    present = {*inside, *outer}
    return Program(
        tuple(t for t in outer if t not in program.constants), outputs, ordered,
        {t: program.constants[t] for t in outer if t in program.constants},
        {t: layout for t, layout in program.layouts.items() if t in present},
        staged=tuple(t for t in program.staged if t in inside),
    )  # fmt: skip


def fits(program: Program, target: Target) -> bool:
    """Whether a task is worth its time, by points and bytes."""
    points = sum(prod(extent_of(a.extent) for a in (*c.axes, *getattr(c, "reduce_axes", ())))
                 for c in all_computes(program).values() if hasattr(c, "axes"))  # fmt: skip
    size = sum(prod(extent_of(e) for e in t.shape) * t.dtype.bytes for t in program.tensors())
    return LEAST_WORK <= points <= MOST_WORK * target.units and size <= _MOST_BYTES


def kind_of_program(program: Program, target: Target) -> str:
    """The class of a task: by what its largest nest is, or by what several make together."""
    if _scans(program):
        return "scan"
    computes = all_computes(program)
    plan = make_plan(program, target, "register", whole=False)
    nests = [n for k, _ in plan.launches() for n in plan_nests(k, computes)]
    products = [n for n in nests if _is_product(n, computes)]
    if len(products) > 1:
        between = nests[nests.index(products[0]) : nests.index(products[-1])]
        is_stream = any(n.monoid is not None and n not in products for n in between)
        return "stream" if is_stream else "chain"
    largest = max(products or nests, key=lambda n: work([n]))
    kind = kind_of(largest) if largest in products or largest.monoid is None else "reduction"
    if kind == "reduction" and _has_window(largest):
        return "window"
    return {"contraction": "product", "depthwise convolution": "depthwise"}.get(kind, kind)


def _is_product(nest: Nest, computes: Mapping[str, Compute]) -> bool:
    """Of two different things: a sum of squares is a reduction."""
    multiplied = factors(computes[nest.core])
    return is_contraction(nest) and len(multiplied) == 2 and multiplied[0] != multiplied[1]


def _has_window(nest: Nest) -> bool:
    sums = set(nest.reduce_axes)
    indices = [set(axes_of(i)) for n in loads(*nest.elements) for i in n.indices]
    return any(len(axes) > 1 and axes & sums for axes in indices)


def _scans(program: Program) -> int:
    return sum(isinstance(c, Scan) for c in program.computes)


def _kind(target: Target) -> str:
    return "cuda" if target.kind == "gpu" else "cpu"


def told(error: TilewrightError) -> str:
    return str(error).splitlines()[0][:160]


def random_array(rng: np.random.Generator, dtype: Any, shape: Sequence[int]) -> np.ndarray:
    """Small normal floats, and integers 0 or 1, in range for indices and masks alike."""
    values = 0.1 * rng.standard_normal(shape) if dtype.is_float else rng.integers(0, 2, shape)
    return np.ascontiguousarray(np.asarray(values).astype(dtype.numpy))
