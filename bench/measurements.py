"""Measured kernels as files: each model's Program, the Plan that was measured and the time of each kernel call, to
hold the cost model against them on any machine, without the models and without measuring.

A file is JSON lines, `.xz` where it is compressed. A line without a Program and a Plan (times, roots, tiles and
register tiles alone) needs the model itself, which is then planned anew.
"""

import json
import lzma
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.backend.cpu.kernel import tile as costs
from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.compute import Program, all_computes
from tilewright.ir.forms.tensor import Layout, Tensor
from tilewright.ir.text.text import program_text
from tilewright.options import Options
from tilewright.schedule.planner import make_plan
from tilewright.target import Target
from tilewright.tile_graph.algebra.context import NestContext
from tilewright.tile_graph.algebra.memo import Memo
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.algebra.signature import signature
from tilewright.tile_graph.algebra.streams import find_stream
from tilewright.tile_graph.plan.form import Plan, Tile
from tilewright.tile_graph.plan.leaf_form import VectorForm
from tilewright.tile_graph.traffic.held import plan_nests
from tilewright.tune.records import read_program


@dataclass(frozen=True)
class Call:
    """One kernel call of a run: what it took, and its plan in the words of a file of measurements."""

    number: int
    kernel: str
    microseconds: float
    shown: Mapping[str, Any]  # root, tile and nests; empty where the file gives the Plan


@dataclass(frozen=True)
class Measured:
    """The calls of one model; with the Program and the Plan, where the file has them."""

    model: str
    calls: tuple[Call, ...]
    program: str | None = None
    plan: Plan | None = None

    def to_json(self) -> str:
        record: dict[str, Any] = {"model": self.model}
        record["kernels"] = [
            {"call": c.number, "kernel": c.kernel, "measured_us": c.microseconds, **c.shown} for c in self.calls
        ]
        if self.program is not None and self.plan is not None:
            record |= {"program": self.program, "plan": json.loads(self.plan.to_json())}
        return json.dumps(record, separators=(",", ":"))


@dataclass(frozen=True)
class Predicted:
    """A measured call with its prediction, and whether the planner would choose this plan today."""

    model: str
    call: Call
    kernel: Tile
    nests: tuple[Nest, ...]
    microseconds: float  # predicted
    unchanged: bool

    @property
    def ratio(self) -> float:
        return self.call.microseconds / self.microseconds


def read(path: Path) -> list[Measured]:
    data = path.read_bytes()
    text = (lzma.decompress(data) if path.suffix == ".xz" else data).decode()
    return [_measured(json.loads(line)) for line in text.splitlines() if line.strip()]


def write(path: Path, measured: Iterable[Measured]) -> None:
    data = "".join(each.to_json() + "\n" for each in measured).encode()
    path.write_bytes(lzma.compress(data, preset=9) if path.suffix == ".xz" else data)


def _measured(record: Mapping[str, Any]) -> Measured:
    calls = []
    for each in record["kernels"]:
        shown = {name: each[name] for name in ("root", "tile", "nests") if name in each}
        calls.append(Call(each["call"], each["kernel"], each["measured_us"], shown))
    plan = Plan.from_json(json.dumps(record["plan"])) if "plan" in record else None
    return Measured(record["model"], tuple(calls), record.get("program"), plan)


def with_program(measured: Measured, model: Path, target: Target) -> Measured:
    """The measurements with the Program and the Plan of the model as it is planned today; calls of kernels that are
    planned otherwise than they were measured are left out."""
    artifact = build(load(model, {}), target, Options(stop_after="plan"))
    assert artifact.program is not None and artifact.plan is not None
    mine = {_key(shown(kernel)): kernel.name for kernel, steps in artifact.plan.launches() if steps is None}
    calls = [
        Call(c.number, mine[_key(c.shown)], c.microseconds, {})
        for c in measured.calls if c.shown and _key(c.shown) in mine
    ]  # fmt: skip
    return Measured(measured.model, tuple(calls), program_text(artifact.program), artifact.plan)


def shown(kernel: Tile) -> dict[str, Any]:
    """What a file of measurements says of a kernel's plan."""
    nests = [
        {"core": n.core, "vector": n.vector, "register": dict(n.register), "order": list(n.order),
         "cut": dict(n.options(VectorForm).cut), "instruction": n.instruction}
        for n in kernel.leaves
    ]  # fmt: skip
    return {"root": kernel.leaves[-1].tensor, "tile": dict(kernel.cut), "nests": nests}


def _key(plan: Mapping[str, Any]) -> str:
    return json.dumps({name: plan[name] for name in ("root", "tile", "nests")}, sort_keys=True)


class Kernels:
    """What was measured of a model, read once however often it is predicted."""

    def __init__(self, measured: Measured) -> None:
        if measured.program is None or measured.plan is None:
            raise ValueError(f"{measured.model}: neither Program nor Plan are known")
        self.measured, self.plan = measured, measured.plan
        self.program = read_program(measured.program)
        computes = all_computes(self.program)
        self.tiles = {k.name: k for k, steps in measured.plan.launches() if steps is None}
        self.calls = [c for c in measured.calls if c.kernel in self.tiles]
        names = dict.fromkeys(c.kernel for c in self.calls)
        self.nests = {name: tuple(plan_nests(self.tiles[name], computes)) for name in names}

    def microseconds(self, target: Target) -> dict[str, float]:
        """What each kernel is predicted to take; those that are the same but for names are asked for once."""
        context = _context(self.program, self.plan, target)
        known: dict[Hashable, float] = {}
        result = {}
        for name, nests in self.nests.items():
            kernel = self.tiles[name]
            stored = _stored(kernel, nests)

            def about(t: Tensor, stored: frozenset[Tensor] = stored) -> Hashable:
                return t in stored, t in context.constants, t in context.staged, context.layout(t)

            shapes = tuple(replace(leaf, tensor="", core=(), epilogue=()) for leaf in kernel.leaves)
            streamed = kernel.stream.sizes if kernel.stream is not None else None
            key = (signature(nests, about), shapes, kernel.cut, streamed)
            if key not in known:
                known[key] = _seconds(kernel, nests, context)
            result[name] = 1e6 * known[key]
        return result


def predict(measured: Measured, target: Target, today: bool = True) -> list[Predicted]:
    """Every call that was not part of a Scan, as the cost model predicts the plan it was measured with; with `today`
    also whether the planner would choose that plan again, which takes longest."""
    kernels = Kernels(measured)
    microseconds = kernels.microseconds(target)
    plan = make_plan(kernels.program, target, kernels.plan.schedule) if today else None
    chosen = {_key(shown(k)) for k in plan.kernels} if plan is not None else set()
    return [
        Predicted(measured.model, call, kernel, kernels.nests[call.kernel], microseconds[call.kernel],
                  _key(shown(kernel)) in chosen)
        for call in kernels.calls for kernel in (kernels.tiles[call.kernel],)
    ]  # fmt: skip


def _context(program: Program, plan: Plan, target: Target) -> NestContext:
    tensors: Sequence[Tensor] = [*program.constants, *program.inputs, *(t for c in program.computes for t in c.outputs)]
    by_name = {t.name: t for t in tensors}
    layouts = dict(program.layouts)
    layouts.update({by_name[name]: layout for name, layout in plan.layouts if name in by_name})
    asks = any(leaf.options(VectorForm).ahead for kernel in plan.kernels for leaf in kernel.leaves)
    return NestContext(target, lambda t: layouts.get(t) or Layout.natural(t.rank), program.constants,
                       frozenset(program.staged), Memo(), prefetches=asks)  # fmt: skip


def _stored(kernel: Tile, nests: Sequence[Nest]) -> frozenset[Tensor]:
    held = kernel.held
    return frozenset(t for nest in nests if nest.tensor.name not in held for t in nest.stores)


def _seconds(kernel: Tile, nests: Sequence[Nest], context: NestContext) -> float:
    tile = dict(kernel.cut)
    sizes = {
        axis: np.array([tile.get(f"o{i}", max(1, extent_of(axis.extent)))]) for i, axis in enumerate(nests[-1].axes)
    }
    stream = find_stream(nests) if kernel.stream is not None else None
    block = kernel.stream.sizes[0][1] if kernel.stream is not None else 0
    times = costs.predict(nests, kernel.leaves, context, _stored(kernel, nests), sizes, stream, block)
    return float(np.max(times.seconds))
