"""Steps of a loop that change a few elements of what it carries: these are written where they are, not all anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import numpy as np

from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.bounds import static
from tilewright.ir.forms.compute import Compute, Map, Program, Region, Scatter
from tilewright.ir.forms.expr import Axis, Const, Expr, Load, Var, flattened, is_op, load, rewrite, substitute, var
from tilewright.ir.forms.tensor import Tensor

# Bytes from which on a state is not written anew at every step: below, another kernel costs more than that.
_LARGE = 1 << 14


def update_in_place(program: Program) -> Program:
    """The Program with such steps as Scatters, in its loops and those inside them."""
    return replace(program, computes=tuple(map(_changed, program.computes)))


def _changed(compute: Compute) -> Compute:
    if not isinstance(compute, Region):
        return compute
    branches = tuple(map(update_in_place, compute.branches))
    if compute.kind == "loop":
        branches = tuple(map(_with_updates, branches))
    return replace(compute, branches=branches)


def _with_updates(body: Program) -> Program:
    states = dict(zip(body.outputs, body.inputs, strict=False))
    makers = {c.output: c for c in body.computes if isinstance(c, Map)}
    computes: list[Compute] = []
    for compute in body.computes:
        state = states.get(compute.output) if isinstance(compute, Map) else None
        found = None
        if state is not None and isinstance(compute, Map):
            found = _update(compute, state, makers, body.constants)
        computes += (compute,) if found is None else found
    return replace(body, computes=tuple(computes))


def _update(
    compute: Map, state: Tensor, makers: Mapping[Tensor, Map], constants: Mapping[Tensor, np.ndarray]
) -> tuple[Map, Scatter] | None:
    """What is written and where, of a Map that gives its state but for elements at places that the step tells."""
    if _bytes(state) < _LARGE:
        return None
    places = places_written(compute, state, makers, constants)
    if places is None:
        return None
    written = compute.value.args[1]
    left = tuple(a for a in compute.axes if a not in places)
    fresh = {a: Axis(a.name, a.extent) for a in left}
    moved = {a: var(b) for a, b in fresh.items()}
    rows = Tensor(f"{compute.output.name}_rows", tuple(a.extent for a in left), state.dtype)
    made = Map(rows, left, written, compute.origin)
    indices = tuple(places[a] if a in places else moved[a] for a in compute.axes)
    kept = tuple(fresh.values())
    put = Scatter(compute.output, state, kept, indices, load(rows, tuple(map(var, kept))), None, True, compute.origin)
    return made, put


def places_written(
    compute: Map, state: Tensor, makers: Mapping[Tensor, Map], constants: Mapping[Tensor, np.ndarray],
    inside: bool = False,
) -> dict[Axis, Expr] | None:  # fmt: skip
    """Of a Map that gives its state but for elements at places that a step tells: the axes and the places along them.
    None of any other. `inside` a Scan numbers may be followed to the step itself."""
    value = compute.value
    if not is_op(value, "select") or value.args[2] is not load(state, tuple(map(var, compute.axes))):
        return None
    places: dict[Axis, Expr] = {}
    for part in flattened(_resolved(value.args[0], makers, constants, inside), "and"):
        place = _place(part, set(compute.axes))
        if place is None or place[0] in places:
            return None
        places[place[0]] = place[1]
    return places if places and not any(a in places for a in value.args[1].axes) else None


def _place(condition: Expr, own: set[Axis]) -> tuple[Axis, Expr] | None:
    """Of a comparison of an axis with a number of the step: the axis and the number."""
    if not is_op(condition, "eq"):
        return None
    for one, other in (condition.args, condition.args[::-1]):
        if isinstance(one, Var) and one.axis in own and own.isdisjoint(other.axes):
            return one.axis, other
    return None


def _resolved(
    root: Expr, makers: Mapping[Tensor, Map], constants: Mapping[Tensor, np.ndarray], inside: bool
) -> Expr:
    """An expression with Maps of axes in the place of what they give, and counting constants as the axis they count."""

    def rule(node: Expr) -> Expr | None:
        if not isinstance(node, Load):
            return None
        if isinstance(node.source, Tensor) and node.source in constants:
            return _counted(node, constants[node.source])
        maker = makers.get(node.source) if isinstance(node.source, Tensor) and (node.axes or inside) else None
        if maker is None:
            return None
        return resolved(substitute(maker.value, dict(zip(maker.axes, node.args, strict=True))))

    def resolved(expression: Expr) -> Expr:
        return rewrite(expression, rule)

    return simplify(resolved(root))


def _counted(node: Load, array: np.ndarray) -> Expr | None:
    """An element of a constant that counts along one axis, as the index along it."""
    long = [k for k, n in enumerate(array.shape) if n > 1]
    if len(long) != 1 or array.dtype.kind != "i" or not np.array_equal(array.reshape(-1), np.arange(array.size)):
        return None
    others = [i for k, i in enumerate(node.args) if k != long[0]]
    return node.args[long[0]] if all(isinstance(i, Const) for i in others) else None


def _bytes(tensor: Tensor) -> int:
    return prod(static(extent) or 0 for extent in tensor.shape) * tensor.dtype.bytes
