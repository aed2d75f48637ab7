"""Convolution layers of ResNet-18 and YOLO-9000: the five plans that are predicted to be fastest, of all algorithms in
one ranking, measured beside the best of many (CNNOpt, PACT 2022).

    python -m bench.convolutions --plans 300            on one core of the machine at hand, in its processor time
    python -m bench.convolutions --machine h200         the ranking alone, for a description; nothing runs

A plan is an algorithm (the sum as it stands, with operands copied before it, or Winograd's) with a plan of every
kernel. Of the many, half are those that are predicted to be fastest and half are random, over all algorithms. The exit
status is 1 where the best of the five has less than 95% of the speed of the best of all, in the geometric mean.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from bench.judge.measure import one_core
from bench.judge.programs import Form, forms_of
from bench.support import table
from tilewright.backend.cpu.kernel.variants import CpuVariants
from tilewright.errors import InternalError
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.compute import Program
from tilewright.options import Options
from tilewright.schedule.planner import make_plan, plan_seconds
from tilewright.target import Target, machine
from tilewright.tile_graph.plan.form import Plan, Tile
from tilewright.tune.answers import answers, are_same
from tilewright.tune.groups import KernelGroup, find_groups, with_choices
from tilewright.tune.models import TrialBuilder, sat

_MEASURED = 5  # of the ranking
_MUST = 0.95
_SECONDS = 0.25  # of a sitting
_NEST_PLANS = 120  # of a kernel, some tiles each, that are ranked


@dataclass(frozen=True)
class Layer:
    """Channels in and out, pixels on a side, the window and by how much it moves."""

    network: str
    given: int
    made: int
    pixels: int
    window: int
    stride: int = 1

    @property
    def name(self) -> str:
        stride = f" by {self.stride}" if self.stride > 1 else ""
        size, window = f"{self.pixels}x{self.pixels}", f"{self.window}x{self.window}"
        return f"{self.network}: {self.given} to {self.made}, {size}, {window}{stride}"

    def model(self) -> ModelProto:
        rng = np.random.default_rng(0)
        weights = 0.1 * rng.standard_normal((self.made, self.given, self.window, self.window)).astype(np.float32)
        node = helper.make_node("Conv", ["x", "w"], ["y"], strides=[self.stride] * 2, pads=[self.window // 2] * 4)
        out = -(-self.pixels // self.stride)
        ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, channels, size, size])
                 for name, channels, size in (("x", self.given, self.pixels), ("y", self.made, out))]  # fmt: skip
        graph = helper.make_graph([node], "layer", ports[:1], ports[1:], [numpy_helper.from_array(weights, "w")])
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


LAYERS = (
    Layer("ResNet-18", 64, 64, 56, 3), Layer("ResNet-18", 64, 128, 56, 3, 2), Layer("ResNet-18", 128, 128, 28, 3),
    Layer("ResNet-18", 256, 256, 14, 3), Layer("ResNet-18", 512, 512, 7, 3),
    Layer("YOLO-9000", 32, 64, 272, 3), Layer("YOLO-9000", 128, 64, 136, 1), Layer("YOLO-9000", 128, 256, 68, 3),
    Layer("YOLO-9000", 256, 512, 34, 3), Layer("YOLO-9000", 512, 1024, 17, 3),
)  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    """A plan of one of a layer's forms: the planner's own, with one kernel run another way."""

    form: int
    program: Program
    own: Plan
    seconds: float  # predicted
    change: tuple[KernelGroup, Tile] | None = None

    @property
    def plan(self) -> Plan:
        return self.own if self.change is None else with_choices(self.program, self.own, [self.change])


def ranking(forms: Sequence[Form], target: Target) -> list[Candidate]:
    """Plans of all forms, what is predicted to be fastest first."""
    found = [candidate for number, form in enumerate(forms) for candidate in _of_form(number, form.program, target)]
    return sorted(found, key=lambda c: c.seconds)


def _of_form(number: int, program: Program, target: Target) -> Iterator[Candidate]:
    """The planner's own, and those in which the kernel that takes longest runs another way."""
    plan = make_plan(program, target)
    whole = plan_seconds(plan, program)
    yield Candidate(number, program, plan, whole)
    group = max(find_groups(program, plan, target), key=lambda g: g.own.estimate.seconds)
    for tile in _others(group):
        seconds = whole - group.own.estimate.seconds + tile.estimate.seconds
        yield Candidate(number, program, plan, seconds, (group, tile))


def _others(group: KernelGroup) -> Sequence[Tile]:
    variants = group.variants[0]
    if isinstance(variants, CpuVariants):
        return variants.pool(lambda leaves: True, _NEST_PLANS)
    return variants.best(_NEST_PLANS)


def drawn(ranked: Sequence[Candidate], count: int, rng: np.random.Generator) -> list[int]:
    """The first half of so many by rank, the others at random, by their places."""
    first = min(len(ranked), max(_MEASURED, count // 2))
    rest = rng.permutation(np.arange(first, len(ranked)))[: max(0, count - first)]
    return [*range(first), *map(int, rest)]


def measured(forms: Sequence[Form], ranked: Sequence[Candidate], places: Sequence[int], target: Target,
             options: Options) -> Iterator[tuple[int, float]]:  # fmt: skip
    """By place in the ranking, how long a plan takes over the planner's own; what is none, or wrong, is left out."""
    builders = [TrialBuilder(form.program, target, options) for form in forms]
    own = next(c for c in ranked if c.form == 0)
    with builders[0].built(own.own) as anchor:
        expected = answers(anchor.runner, forms[0].program)
        for place in places:
            builder = builders[ranked[place].form]
            try:
                with builder.built(ranked[place].plan) as made:
                    if are_same(builder.program, expected, answers(made.runner, builder.program), exact=False):
                        yield place, sat(builder.program, anchor, made, _SECONDS).whole.ratio.middle
            except InternalError as error:
                print(f"left out: {str(error)[:100]}", file=sys.stderr)


def compared(layer: Layer, count: int, target: Target, options: Options, known: dict[int, float]) -> list[str]:
    """A row: the best of five, and of all, and the place in the ranking that the best of all has."""
    forms = forms_of(load(layer.model()), target, None)
    ranked = ranking(forms, target)
    places = drawn(ranked, count, np.random.default_rng(0))
    known.update(measured(forms, ranked, [p for p in places if p not in known], target, options))
    best = min(known, key=lambda p: known[p])
    five = min((known[p] for p in range(_MEASURED) if p in known), default=float("inf"))
    return [layer.name, str(len(forms)), str(len(known)), f"{known[best] / five:.3f}", str(best),
            _said(forms[ranked[best].form]), _said(forms[ranked[0].form])]  # fmt: skip


_HEADER = ["layer", "algorithms", "measured", "speed of the best of five", "place of the best", "by", "the first by"]


def _said(form: Form) -> str:
    """An algorithm by the kernels' computes."""
    names = [compute.outputs[0].name for compute in form.program.computes]
    return f"{len(names)} computes" + (", copied" if form.program.staged else "")


def _told(layer: Layer, target: Target) -> list[list[str]]:
    """The first of a ranking, and what its plan says of capacity, split sums and the tail of the last tiles."""
    forms = forms_of(load(layer.model()), target, None)
    rows = []
    for place, one in enumerate(ranking(forms, target)[:_MEASURED]):
        kernel = max(one.plan.kernels, key=lambda k: k.estimate.seconds)
        tiles, units = max(1, kernel.tiles), target.units
        rows.append([layer.name if not place else "", _said(forms[one.form]), f"{1e6 * one.seconds:.1f}",
                     str(kernel.tiles), f"{tiles / (-(-tiles // units) * units):.2f}"])  # fmt: skip
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.convolutions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plans", type=int, default=300, help="of each layer, measured (default: %(default)s)")
    parser.add_argument("--layers", default=f"0-{len(LAYERS) - 1}", help="first and last, by number (default: all)")
    parser.add_argument("--machine", help="a description: its ranking alone")
    parser.add_argument("--out", type=Path, default=Path("convolutions.jsonl"), help="what was measured, added to")
    given = parser.parse_args()
    first, last = map(int, given.layers.split("-"))
    layers = LAYERS[first : last + 1]
    if given.machine is not None:
        rows = [row for layer in layers for row in _told(layer, machine(given.machine))]
        print("\n".join(table(["layer", "algorithm", "predicted us", "tiles", "units busy"], rows)))
        return 0
    options, target = Options.from_environment(target="cpu", threads=1), one_core(machine("cpu"))
    known = dict(map(json.loads, given.out.read_text().splitlines())) if given.out.exists() else {}
    rows = []
    for layer in layers:
        seen = {int(place): ratio for place, ratio in known.get(layer.name, {}).items()}
        rows.append(compared(layer, given.plans, target, options, seen))
        with given.out.open("a") as file:
            file.write(json.dumps([layer.name, seen]) + "\n")
        print("\t".join(rows[-1]), flush=True)
    speed = exp(sum(log(float(row[3])) for row in rows) / len(rows))
    print("\n".join(table(_HEADER, rows)))
    print(f"the best of {_MEASURED} has {speed:.3f} of the speed of the best of all; {_MUST} is asked for")
    return int(speed < _MUST)


if __name__ == "__main__":
    sys.exit(main())
