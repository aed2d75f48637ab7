"""Kernels that walk the steps of a Scan themselves: their state in memory, two places in turn, units meet at barriers.

On a CPU a kernel is a stage of the team, which ends in a barrier: there such a kernel is as many kernels as it has
parts between barriers, with the steps around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.compute import Scan
from tilewright.ir.forms.expr import Axis, Expr, Load, const, load, rewrite, substitute, var
from tilewright.ir.forms.tensor import Tensor
from tilewright.lower.kernel import ScanView
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.plan.form import Leaf, Plan, Tile, UnitBarrier


def steps_inside(kernel: Tile) -> Tile | None:
    """The Tile of the steps that a kernel walks itself."""
    return next((n for n in kernel.walk() if isinstance(n, Tile) and n.over == "steps"), None)


def walked_inside(nests: Sequence[Nest], scan: Scan) -> tuple[list[Nest], ScanView]:
    """The nests of a persistent kernel: of what the step before left they read one place, and leave another."""
    assert isinstance(scan.axis.extent, int)
    step = Axis("step", scan.axis.extent)
    index: Expr = var(step) if not scan.reverse else simplify(const(scan.axis.extent - 1) - var(step))
    states = {c: Tensor(f"{c.name}@state", (2, *c.shape), c.dtype) for c in scan.carry}

    def rule(node: Expr) -> Expr | None:
        if not isinstance(node, Load) or node.source not in states:
            return None
        return load(states[node.source], [(var(step) + 1) % 2, *node.indices])

    def at_step(node: Expr) -> Expr:
        return simplify(rewrite(substitute(node, {scan.axis: index}), rule))

    made = [replace(n, elements=tuple(at_step(e) for e in n.elements), values=tuple(at_step(v) for v in n.values))
            for n in nests]  # fmt: skip
    ends = zip(scan.following, scan.carry, scan.finals, strict=True)
    taken = {following: (states[carry], final) for following, carry, final in ends}
    initial = dict(zip(scan.following, scan.initial, strict=True))
    view = ScanView(step, dict(scan.stacked), {f: state for f, (state, _) in taken.items()}, initial,
                    {f: final for f, (_, final) in taken.items() if final is not None}, index)  # fmt: skip
    return made, view


def in_stages(plan: Plan) -> Plan:
    """The plan with every kernel over cores that has barriers cut at them, steps that it walks around the parts."""
    if not any(isinstance(n, Tile) and _meets(n) for n in plan.body.walk()):
        return plan
    return replace(plan, body=_cut(plan.body))


def _meets(tile: Tile) -> bool:
    return any(isinstance(n, UnitBarrier) and n.scope == "cores" for n in tile.body)


def _cut(tile: Tile) -> Tile:
    body: list[Tile | Leaf | UnitBarrier] = []
    for node in tile.body:
        if not isinstance(node, Tile):
            body.append(node)
        elif node.is_kernel and any(isinstance(n, Tile) and _meets(n) for n in node.walk()):
            body.extend(_stages(node))
        else:
            body.append(node if node.is_kernel else _cut(node))
    return replace(tile, body=tuple(body))


def _stages(kernel: Tile) -> list[Tile]:
    numbers = iter(range(len(list(kernel.walk()))))

    def between(body: Sequence[Tile | Leaf | UnitBarrier]) -> list[Tile]:
        parts: list[list[Tile | Leaf | UnitBarrier]] = [[]]
        for node in body:
            if isinstance(node, UnitBarrier):
                parts.append([])
            else:
                parts[-1].append(node)
        return [_only(replace(kernel, name=f"{kernel.name}.{next(numbers)}", body=tuple(p))) for p in parts if p]

    result: list[Tile] = []
    loose: list[Tile | Leaf | UnitBarrier] = []
    for node in kernel.body:
        if isinstance(node, Tile) and node.over == "steps":
            result += between(loose)
            result.append(replace(node, body=tuple(between(node.body))))
            loose = []
        else:
            loose.append(node)
    return result + between(loose)


def _only(kernel: Tile) -> Tile:
    """The kernel with axes that run along its own leaves alone, and what these leave to each other."""
    own = {n.tensor for n in kernel.walk() if isinstance(n, Leaf)}
    axes = tuple(replace(a, binds=tuple(b for b in a.binds if b.tensor in own)) for a in kernel.axes)
    holds = tuple(h for h in kernel.holds if h.fill is not None or h.tensor in own)
    return replace(kernel, axes=axes, holds=holds)
