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
from tilewright.backend import backend_for
from tilewright.compiler.pipeline import build
from tilewright.errors import TilewrightError
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.compute import Program, Scan, all_computes
from tilewright.ir.forms.graph import Graph
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.text.text import program_text
from tilewright.ops import lower
from tilewright.options import Options
from tilewright.schedule.planner import make_plan
from tilewright.target import Target
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.algebra.signature import signature
from tilewright.tile_graph.traffic.held import plan_nests
from tilewright.transform.clean.fold import fold_constants
from tilewright.transform.layout.choose import choose_layouts
from tilewright.transform.precision.choose import set_precision
from tilewright.tune.kinds import kind_of_nests, work
from tilewright.tune.parts import cut_out

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
    is_plain: bool = False  # as the model says itself


@dataclass(frozen=True)
class Task:
    name: str
    kind: str
    source: str
    forms: tuple[Form, ...]


def outside_task(number: int, target: Target, precision: str | None) -> Task | None:
    """The task of a number; None where it is too small or too large."""
    name, model = outside.model(number)
    found = forms_of(load(model), target, precision)
    plain = next(form.program for form in found if form.is_plain)
    if not fits(plain, target):
        return None
    kind = "scan" if any(_scans(form.program) for form in found) else kind_of_program(plain, target)
    return Task(f"outside {name}" + (f" {precision}" if precision else ""), kind, "outside", found)


def forms_of(graph: Graph, target: Target, precision: str | None) -> tuple[Form, ...]:
    """What stages before the planner can make of a model, different ones: as they choose, and in other ways."""
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
    forms[texts[-1]] = replace(forms[texts[-1]], is_plain=True)
    return tuple(forms.values())


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
    return kind_of_nests(nests, computes)


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
