"""What a row of a stream sees: places of the streamed axis behind the row's own change nothing, and are not walked.

    s[i, j] = select(j <= i + 4, score, -inf)     largest, sums and products over j end at i + 4

A nest whose value is one number behind a place that moves with the row is a curtain, where all that follows reads
scores through it alone, and that number adds nothing to any reduction: found by evaluating their elements with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tilewright.ir.analysis.simplify import linear, simplify
from tilewright.ir.forms.compute import Map, Monoid
from tilewright.ir.forms.expr import (
    Axis,
    Const,
    Expr,
    Load,
    Var,
    axes_of,
    cast,
    const,
    flattened,
    is_op,
    loads,
    replace_nodes,
    walk,
)
from tilewright.ir.meaning.values import evaluate_exprs
from tilewright.tile_graph.algebra.nest import Nest, inline
from tilewright.tile_graph.algebra.streams import Stream

ROW, STREAM = "row", "stream"
# No sum of products of 16-bit numbers that are scores comes near: what is larger than all scores of a row stays so.
_LOWEST = -1e30
_SAMPLES = (1.0, -2.5)  # in the place of what else an element reads


def seen_until(nests: Sequence[Nest], stream: Stream, roles: Mapping[Axis, str]) -> int | None:
    """Row i sees places up to i plus this; None where rows see all."""
    for nest in (n for n in nests if n in stream.wide):
        found = _curtain(nest.values[0], roles) if len(nest.stores) == 1 else None
        if found is None or found[0] < 0:  # every row sees the first place at least
            continue
        if _is_passed_by(nest, stream) or not _adds_nothing(nest, found[1], nests, stream):
            continue
        return found[0]
    return None


def conditions(value: Expr, roles: Mapping[Axis, str], until: int) -> Iterator[Expr]:
    """Those in an expression that say that a row sees a place."""
    return (node for node in walk(value) if _distance(node, roles) == until)


def _distance(condition: Expr, roles: Mapping[Axis, str]) -> int | None:
    """How far behind its own number a row sees by this condition; None where it says something else."""
    if not (is_op(condition, "le") or is_op(condition, "lt")):
        return None
    first, second = condition.args
    apart = linear(simplify(second - first)) if first.dtype.kind in "iu" and second.dtype == first.dtype else None
    if apart is None or len(apart.terms) != 2:
        return None
    found = {roles.get(term.axis): factor for term, factor in apart.terms.items() if isinstance(term, Var)}
    if found != {ROW: 1, STREAM: -1}:
        return None
    return apart.constant - (1 if is_op(condition, "lt") else 0)


def _curtain(value: Expr, roles: Mapping[Axis, str]) -> tuple[int, Expr] | None:
    """How far a row sees, and what it has behind that."""
    if is_op(value, "cast"):
        inner = _curtain(value.args[0], roles)
        return None if inner is None else (inner[0], cast(inner[1], value.dtype))
    if is_op(value, "add"):
        inside = [_curtain(part, roles) for part in value.args]
        lost = [x for x in inside if x is not None and isinstance(x[1], Const) and x[1].value == -np.inf]
        return lost[0] if lost else None  # whatever is added to it
    if not is_op(value, "select") or not isinstance(value.args[2], Const):
        return None
    seen = [_distance(part, roles) for part in flattened(value.args[0], "and")]
    known = [n for n in seen if n is not None]
    return (min(known), value.args[2]) if known else None


def _is_passed_by(nest: Nest, stream: Stream) -> bool:
    """Whether anything behind the nest reads what leads to it."""
    by_tensor = {t: n for n in stream.wide for t in n.stores}
    before: set[Nest] = set()
    stack = [nest]
    while stack:
        for tensor in stack.pop().reads():
            found = by_tensor.get(tensor)
            if found is not None and found not in before:
                before.add(found)
                stack.append(found)
    hidden = {t for n in before for t in n.stores}
    others = [n for n in (*stream.wide, *stream.reducers) if n is not nest and n not in before]
    return any(t in hidden for n in others for t in n.reads())


def _adds_nothing(nest: Nest, behind: Expr, nests: Sequence[Nest], stream: Stream) -> bool:
    """Whether what the nest has behind the rows leaves every reduction as it is."""
    maps = {n.tensor: Map(n.tensor, n.axes, n.values[0])
            for n in nests if n in stream.wide and n.monoid is None and n is not nest}  # fmt: skip
    for reducer in stream.reducers:
        monoid = reducer.monoid
        if monoid is None or len(reducer.elements) != 1:
            return False
        element = inline(reducer.elements[0], maps)
        for sample in _SAMPLES:
            given: dict[Expr, Expr] = {n: behind if n.source is nest.tensor else const(sample, n.dtype)
                                       for n in loads(element)}  # fmt: skip
            alone = replace_nodes(element, given)
            if axes_of(alone) or not _is_nothing(alone, monoid):
                return False
    return True


def _is_nothing(element: Expr, monoid: Monoid) -> bool:
    found, nothing = evaluate_exprs((element, monoid.identity[0]), _no_axis, _no_load)
    if monoid.operator == "max" and float(found) <= _LOWEST:
        return True
    return bool(found == nothing)


def _no_axis(node: Expr) -> np.ndarray:
    raise AssertionError(f"{node!r} is left of an element without axes")


def _no_load(node: Load, places: tuple[np.ndarray, ...]) -> np.ndarray:
    raise AssertionError(f"{node!r} is left of an element without loads")


