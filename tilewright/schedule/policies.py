"""Few plans of a kernel that are worth measuring, by orders of objectives instead of one price (AGMO, PACT 2020).

An objective counts something of a kernel as it is planned, less being better. In an order of them each keeps what is
near its best of what those before it left; one that is then far from its best of all is in conflict with those, and
dropped. Which orders are worth it for which dependences is looked up in a table that was made beforehand, of small
kernels: every plan that an order leads to was measured (`python -m bench.policies table`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import prod

from tilewright.ir.forms.expr import Axis, Load, axes_of, var
from tilewright.schedule.constants import CONFLICT, POLICY_PLANS
from tilewright.tile_graph.algebra.context import NestContext, stride
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.plan.form import Leaf, Tile


@dataclass(frozen=True)
class Policy:
    """Objectives, those first that count most, and the part of one's best that those after it may cost."""

    order: tuple[str, ...]
    slack: float


class PolicyKernels:
    """A kernel's plans, all of the same nests, and what each objective counts of them."""

    def __init__(self, plans: Sequence[Tile], nests: Sequence[Nest], context: NestContext) -> None:
        self.plans, self.nests, self.context = plans, nests, context
        self._counts: dict[str, list[float]] = {}

    def counts(self, objective: str) -> list[float]:
        if objective not in self._counts:
            self._counts[objective] = [COUNTS[objective](plan, self.nests, self.context) for plan in self.plans]
        return self._counts[objective]

    def preferred(self, policy: Policy) -> Tile:
        """What a policy leads to: the last objective has its best of what is left, and of equal plans it is what is
        predicted to be fastest."""
        left: Sequence[int] = range(len(self.plans))
        for number, objective in enumerate(policy.order, 1):
            counts = self.counts(objective)
            best = min(counts[i] for i in left)
            if best <= CONFLICT * min(counts):
                slack = policy.slack if number < len(policy.order) else 0.0
                left = [i for i in left if counts[i] <= (1 + slack) * best]
        seconds = self.counts("latency")
        return self.plans[min(left, key=lambda i: seconds[i])]


def policy_plans(kernels: PolicyKernels, policies: Sequence[Policy] | None = None) -> list[Tile]:
    """What the policies for these dependences lead to, each plan once, at most so many as are worth measuring beside
    the kernel's own."""
    found = map(kernels.preferred, policies_for(dependences(kernels.nests)) if policies is None else policies)
    return list(dict.fromkeys(found))[: POLICY_PLANS - 1]


def policies_for(key: str) -> Sequence[Policy]:
    """Of the row that says most like what is asked for."""
    table = _table()
    return table[max(table, key=lambda row: (alike(key, row), row))]


def alike(one: str, other: str) -> tuple[bool, int]:
    """How alike dependences are; what is carried counts before all else."""
    words = list(zip(one.split(), other.split(), strict=True))
    return words[0][0] == words[0][1], sum(a == b for a, b in words)


@cache
def _table() -> Mapping[str, Sequence[Policy]]:
    text = resources.files(__package__).joinpath("policies.json").read_text()
    rows = json.loads(text)["policies"]
    return {key: [Policy(tuple(order), slack) for *order, slack in row] for key, row in rows.items()}


def dependences(nests: Sequence[Nest]) -> str:
    """What is carried along axes of the nest with most points, how often what it reads is read again, whether windows
    overlap, and along how many of its reads the last axis of its result runs on."""
    nest = max(nests, key=_points)
    reads = nest.loads()
    shared = [n for n in reads if any(a not in n.axes and extent_of(a.extent) > 1 for a in nest.axes)]
    windows = any(len({a for a in axes_of(index) if extent_of(a.extent) > 1}) > 1 for n in reads for index in n.indices)
    last = nest.axes[-1] if nest.axes else None
    along = [n for n in reads if last is not None and n.indices and n.indices[-1] is var(last)]
    carried = "nothing" if nest.monoid is None else "sum" if nest.monoid.operator == "add" else "reduction"
    return " ".join((
        carried, f"shared-{min(2, len(shared))}", "windows" if windows else "points",
        "along-none" if not along else "along-all" if len(along) == len(reads) else "along-some",
    ))  # fmt: skip


def _points(nest: Nest) -> int:
    return prod(extent_of(a.extent) for a in (*nest.axes, *nest.reduce_axes))


# ---- what objectives count


def _strides(kernel: Tile, nests: Sequence[Nest], context: NestContext) -> float:
    """Accesses a point whose vectors gather or scatter, or that are of single elements, by share of the points."""
    return _weighted(kernel, nests, lambda leaf, nest: _scattered(leaf, nest, context))


def _scattered(leaf: Leaf, nest: Nest, context: NestContext) -> float:
    if leaf.vector is None or leaf.instruction is not None:
        return float(leaf.instruction is None) * (1 + len(nest.loads()))
    axis = nest.named(leaf.vector)
    across = sum(stride(n, axis, context) not in (0, 1) for n in nest.loads())
    stored = context.offset(nest.tensor, nest.place).terms.get(var(axis), 0)
    rare = prod(extent_of(a.extent) for a in nest.reduce_axes)
    return across + (0.0 if axis in nest.reduce_axes or stored == 1 else 1 / rare)


def _loads(kernel: Tile, nests: Sequence[Nest], context: NestContext) -> float:
    """Elements that come from beyond the registers, a point."""
    return _weighted(kernel, nests, lambda leaf, nest: sum(1 / _kept(n, leaf, nest) for n in nest.loads()))


def _kept(node: Load, leaf: Leaf, nest: Nest) -> int:
    """Points of a register tile that share what is read."""
    return prod(size for name, size in leaf.register if name.startswith("o") and nest.named(name) not in node.axes)


def _bytes(kernel: Tile, nests: Sequence[Nest], context: NestContext) -> float:
    """Bytes that a tile reads, holds and writes."""
    root = nests[-1]
    cut = dict(kernel.cut)
    sizes: dict[Axis, int] = {a: cut.get(f"o{i}", extent_of(a.extent)) for i, a in enumerate(root.axes)}
    places = [(root.tensor, root.axes), *((n.source, n.axes) for n in root.loads())]
    touched = sum(t.dtype.bytes * prod(sizes.get(a, extent_of(a.extent)) for a in axes) for t, axes in places)
    return float(touched + kernel.estimate.footprint)


def _idle(kernel: Tile, nests: Sequence[Nest], context: NestContext) -> float:
    """Turns of units, over those that would do if the last were full."""
    tiles, units = max(1, kernel.tiles), context.target.units
    return -(-tiles // units) * units / tiles


def _written_out(kernel: Tile, nests: Sequence[Nest], context: NestContext) -> float:
    """Instructions of all innermost bodies: what compiling takes, and room in the cache of instructions."""

    def body(leaf: Leaf, nest: Nest) -> int:
        steps = leaf.form.steps_written_out(lambda name: extent_of(nest.named(name).extent))
        return -(-prod(size for _, size in leaf.register) // leaf.lanes) * steps

    return float(sum(body(leaf, nest) for leaf, nest in zip(kernel.leaves, nests, strict=True)))


def _weighted(kernel: Tile, nests: Sequence[Nest], count: Callable[[Leaf, Nest], float]) -> float:
    points = [_points(nest) for nest in nests]
    counted = sum(p * count(leaf, nest) for p, leaf, nest in zip(points, kernel.leaves, nests, strict=True))
    return counted / max(1, sum(points))


COUNTS: Mapping[str, Callable[[Tile, Sequence[Nest], NestContext], float]] = {
    "latency": lambda kernel, nests, context: kernel.estimate.seconds,
    "stride": _strides,
    "reuse": _loads,
    "footprint": _bytes,
    "parallelism": _idle,
    "compile": _written_out,
}
