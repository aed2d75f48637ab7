"""What today's plans should take on a machine where older ones were measured: whole models beside other runtimes.

    python -m bench.expected --models DIR                 every model of bench/measured, on Emerald Rapids
    python -m bench.expected --models DIR --only bert_384,swin_t --kernels 10

DIR has the models as .onnx (python -m bench.zoo export --size full DIR). Nothing is run. Both plans are predicted by
the cost model of today: a model is expected to take what it was measured to take, by the ratio of the predictions.
"By plan" stops there. "At best" knows what the measurements show beyond the model: plans that read weights without
asking for them ahead waited for all of it, and those that ask are expected to wait for what the model says.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, prod
from pathlib import Path
from typing import Any

from bench.measurements import Kernels, Measured, read
from bench.predicted import STORED, SUFFIX
from bench.support import table
from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.compute import Program, all_computes, factors
from tilewright.options import Options
from tilewright.target import Target, machine
from tilewright.tile_graph.algebra.context import is_contraction
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.plan.form import Plan, Tile
from tilewright.tile_graph.plan.leaf_form import VectorForm
from tilewright.tile_graph.traffic.held import plan_nests
from tilewright.tune.kinds import kind_of

IN_THE_ZOO = {"vit_s": "vit_s32", "bert_128": "bert_base"}  # names there, where they are others
_MODELLED = 0.5  # of the time of weights that are not asked for ahead, what the model takes to be waited for


@dataclass(frozen=True)
class Part:
    """A kernel as it is predicted: its kind, its time, the floor of its multiply-adds, what it is."""

    kind: str
    milliseconds: float
    floor: float
    text: str


@dataclass(frozen=True)
class Expected:
    """One model: times as measured, predictions of the plans then and now."""

    name: str
    before: float
    peer: float
    then: Sequence[Part]  # empty where its kernels were not measured
    now: Sequence[Part]
    weights: float  # milliseconds, of what is asked for ahead now and was not then
    gflop: float

    @property
    def by_plan(self) -> float:
        if not self.then:
            return self.peer / self.before
        return self.peer / self.before * _total(self.then) / _total(self.now)

    @property
    def at_best(self) -> float:
        if not self.then:
            return self.by_plan
        waited = _total(self.then) + (1 - _MODELLED) * self.weights
        return self.peer / self.before * waited / _total(self.now)

    def cells(self) -> list[str]:
        shown = [self.before, self.peer, self.peer / self.before]
        predicted = f"{_total(self.then):.3g} to {_total(self.now):.3g}" if self.then else f"{_total(self.now):.3g}"
        return [self.name, *(f"{v:.3g}" for v in shown[:2]), f"{shown[2]:.2f}", predicted,
                f"{sum(p.floor for p in self.now):.3g}", f"{self.weights:.2g}", f"{self.by_plan:.2f}",
                f"{self.at_best:.2f}", f"{self.gflop / self.peer:.0f}"]  # fmt: skip


HEADER = ["model", "before, ms", "best peer, ms", "before, x", "predictions, ms", "floor, ms", "weights, ms",
          "by plan, x", "at best, x", "peer's GFLOP/s"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.expected", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, required=True, metavar="DIR", help="NAME.onnx of each model")
    parser.add_argument("--target", default="emerald_rapids", help="a machine with files in bench/measured")
    parser.add_argument("--only", help="comma-separated names of models")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="show those farthest above their floor")
    parser.add_argument("--contraction", default="auto", help="as the option of this name (default: %(default)s)")
    arguments = parser.parse_args()
    target = machine(arguments.target)
    times: Mapping[str, Any] = json.loads((STORED / f"{arguments.target}.models.json").read_text())
    kernels = {m.model: m for m in read(STORED / f"{arguments.target}{SUFFIX}")}
    chosen = arguments.only.split(",") if arguments.only else list(times)
    found = []
    for name in chosen:
        path = model_file(arguments.models, name)
        if name not in times or path is None:
            parser.error(f"no times or no model of {name!r}: --models needs {name}.onnx, one of {', '.join(times)}")
        print(f"planning {name}", file=sys.stderr, flush=True)
        found.append(expected(name, path, times[name], kernels.get(name), target, arguments.contraction))
    print(report(found, arguments.kernels))


def model_file(folder: Path, name: str) -> Path | None:
    paths = [folder / f"{each}.onnx" for each in (name, IN_THE_ZOO.get(name, name))]
    return next((path for path in paths if path.is_file()), None)


def expected(
    name: str, path: Path, times: Mapping[str, Any], measured: Measured | None, target: Target, contraction: str
) -> Expected:
    graph = load(path, {})
    made = build(graph, target, Options(stop_after="plan", contraction=contraction))
    assert made.program is not None and made.plan is not None
    plain = build(graph, target, Options(stop_after="program")).program
    assert plain is not None
    now = _parts(made.plan, made.program, {k.name: 1e3 * k.estimate.seconds for k in made.plan.kernels}, target)
    then: list[Part] = []
    if measured is not None:
        kernels = Kernels(measured)
        microseconds = kernels.microseconds(target)
        then = _parts(kernels.plan, kernels.program, {n: us / 1e3 for n, us in microseconds.items()}, target)
    before = times.get("flushed", times["tilewright"])
    peer = min(times["onnxruntime"], times["openvino"])
    far = target.units * target.beyond_local.bandwidth
    ahead = 1e3 * _asked_bytes(made.plan, made.program) / far
    return Expected(name, before, peer, then, now, ahead if then else 0.0, 2e-6 * _multiply_adds(plain))


def _parts(plan: Plan, program: Program, milliseconds: Mapping[str, float], target: Target) -> list[Part]:
    computes = all_computes(program)
    rate = target.units * target.fma_rate
    parts = []
    for kernel, steps in plan.launches():
        if steps is not None or kernel.name not in milliseconds:
            continue
        nests = plan_nests(kernel, computes)
        work = {n: _points(n) for n in nests if is_contraction(n)}
        kind = kind_of(max(work, key=work.__getitem__)) if work else kind_of(nests[-1])
        parts.append(Part(kind, milliseconds[kernel.name], 1e3 * sum(work.values()) / rate, _text(kernel, nests)))
    return parts


def _text(kernel: Tile, nests: Sequence[Nest]) -> str:
    """A kernel by its largest nest, its tile, and how many nests it has."""
    largest = max(range(len(nests)), key=lambda i: _points(nests[i]))
    nest, leaf = nests[largest], kernel.leaves[largest]
    sizes, sums = ("x".join(str(extent_of(a.extent)) for a in axes) for axes in (nest.axes, nest.reduce_axes))
    tile = " ".join(f"{a}:{n}" for a, n in kernel.cut) or "whole"
    register = " ".join(f"{a}:{n}" for a, n in leaf.register)
    asked = leaf.options(VectorForm).ahead
    ahead = f", {asked} ahead" if asked else ""
    others = f" and {len(nests) - 1} more" if len(nests) > 1 else ""
    return f"{kind_of(nest)} {sizes}{f' over {sums}' if sums else ''}{others}, tile {tile}, register {register}{ahead}"


def _points(nest: Nest) -> int:
    return prod(extent_of(a.extent) for a in (*nest.axes, *nest.reduce_axes))


def _asked_bytes(plan: Plan, program: Program) -> int:
    """Bytes of all weights that some product asks for ahead."""
    computes, found = all_computes(program), {}
    for kernel in plan.kernels:
        for nest, leaf in zip(plan_nests(kernel, computes), kernel.leaves, strict=True):
            asks = leaf.options(VectorForm).ahead
            weights = [n.source for n in nest.element_loads if n.source in program.constants] if asks else []
            found |= {t: prod(extent_of(e) for e in t.shape) * t.dtype.bytes for t in weights}
    return sum(found.values())


def _multiply_adds(program: Program) -> int:
    """Of all sums of products, as the model says them."""
    found = [c for c in all_computes(program).values() if factors(c)]
    return sum(prod(extent_of(a.extent) for a in (*c.axes, *c.reduce_axes)) for c in found)  # type: ignore[union-attr]


def _total(parts: Sequence[Part]) -> float:
    return sum(part.milliseconds for part in parts)


def report(found: Sequence[Expected], worst: int) -> str:
    counted = [e for e in found if e.name != "mmoe"]
    means = [
        exp(sum(log(value) for value in values) / len(values))
        for values in ([e.peer / e.before for e in counted], [e.by_plan for e in counted], [e.at_best for e in counted])
    ]
    lines = [*table(HEADER, [e.cells() for e in found]), ""]
    lines += [
        f"Geometric means without mmoe: {means[0]:.3f} before, {means[1]:.3f} by plan, {means[2]:.3f} at best.",
        "",
    ]
    kinds = list(dict.fromkeys(p.kind for e in found for p in (*e.then, *e.now)))
    rows = []
    for each in found:
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for side, parts in enumerate((each.then, each.now)):
            for part in parts:
                sums[part.kind][side] += part.milliseconds
        rows.append([each.name, *(f"{sums[k][0]:.3g} to {sums[k][1]:.3g}" if k in sums else "" for k in kinds)])
    lines += ["Predicted ms of kernels by the kind of their largest sum, then and now:", ""]
    lines += [*table(["model", *kinds], rows), ""]
    for each in found if worst else []:
        lines += [f"{each.name}, ms above the floor of the multiply-adds:", ""]
        lines += [*_farthest(each.now, worst), ""]
    return "\n".join(lines)


def _farthest(parts: Sequence[Part], count: int) -> list[str]:
    alike: dict[str, list[Part]] = defaultdict(list)
    for part in parts:
        alike[part.text].append(part)
    ranked = sorted(alike.items(), key=lambda item: -sum(p.milliseconds - p.floor for p in item[1]))
    return [
        f"{sum(p.milliseconds - p.floor for p in some):7.2f}  {len(some)} of {some[0].milliseconds:.3f}, floor"
        f" {some[0].floor:.3f}: {text}"
        for text, some in ranked[:count]
    ]


if __name__ == "__main__":
    main()
