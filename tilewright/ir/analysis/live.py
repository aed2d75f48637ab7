"""How far tensors are needed where a run tells the extents of the outputs: from those back through all that is read.

A tensor has room for the most there can be; what lies beyond the elements of a run is nobody's, and need not be there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from tilewright.ir.analysis.simplify import linear, simplify
from tilewright.ir.forms.bounds import bounds
from tilewright.ir.forms.compute import Map, Program, Reduce, expressions, reads
from tilewright.ir.forms.expr import Axis, Const, Expr, Load, Op, Var, flattened, is_op
from tilewright.ir.forms.graph import Form
from tilewright.ir.forms.tensor import Tensor

Ends = frozenset[Form]  # as far as the furthest of them
Needs = Mapping[Tensor, tuple[Ends | None, ...]]  # of every axis: None where all of it is needed
_MOST_FORMS = 4  # of one axis: more are not kept apart


def needed(program: Program) -> Needs:
    """Of every tensor that computes store outside of Scans: how far each of its axes is needed."""
    if not program.ends:
        return {}
    found: dict[Tensor, list[Ends | None]] = {}
    for tensor, forms in zip(program.outputs, program.ends, strict=True):
        _join(found, tensor, [frozenset({f}) for f in forms])
    for compute in reversed(program.computes):
        if not isinstance(compute, Map | Reduce):
            for tensor in reads(compute):
                found[tensor] = [None] * tensor.rank
            continue
        for tensor, ends in _read(compute, found, program.inputs[-1]):
            _join(found, tensor, ends)
    made = {t for c in program.computes for t in c.outputs if isinstance(c, Map | Reduce)}
    return {
        t: tuple(_telling(e, n) for e, n in zip(ends, t.shape, strict=True)) for t, ends in found.items() if t in made
    }


def _join(found: dict[Tensor, list[Ends | None]], tensor: Tensor, ends: list[Ends | None]) -> None:
    before = found.get(tensor)
    found[tensor] = ends if before is None else [_union(a, b) for a, b in zip(before, ends, strict=True)]


def _union(one: Ends | None, other: Ends | None) -> Ends | None:
    if one is None or other is None or len(one | other) > _MOST_FORMS:
        return None
    return one | other


def _telling(ends: Ends | None, extent: object) -> Ends | None:
    """None where it is all of the axis, whatever the numbers."""
    if ends is None or any(not f.varies and isinstance(extent, int) and f.constant >= extent for f in ends):
        return None
    return ends


def _read(
    compute: Map | Reduce, found: Mapping[Tensor, list[Ends | None]], numbers: Tensor
) -> Iterator[tuple[Tensor, list[Ends | None]]]:
    """What a compute reads for as much of its result as is needed."""
    own: dict[Axis | Expr, Ends] = {}
    for place, axis in enumerate(compute.axes):
        ends: Ends | None = frozenset()
        for tensor in compute.outputs:
            ends = _union(ends, found[tensor][place]) if tensor in found else None
        if ends:
            own[axis] = ends
    seen: set[tuple[Expr, int]] = set()
    waiting: list[tuple[Expr, dict[Axis | Expr, Ends]]] = [(root, own) for root in expressions(compute)]
    kept = [own]  # alive, so that no other has the identity of one
    while waiting:
        node, inside = waiting.pop()
        if (node, id(inside)) in seen:
            continue
        seen.add((node, id(inside)))
        if isinstance(node, Load) and isinstance(node.source, Tensor):
            yield node.source, [_end(simplify(index), inside, numbers) for index in node.args]
        if is_op(node, "select"):
            condition, chosen, other = node.args
            narrower = {**inside, **_told(condition, numbers)}
            kept.append(narrower)
            waiting += [(condition, inside), (chosen, narrower), (other, inside)]
        else:
            waiting += [(argument, inside) for argument in node.args]


def _told(condition: Expr, numbers: Tensor) -> dict[Axis | Expr, Ends]:
    """Axes, and sums of them, that a condition keeps below a run-time number."""
    found: dict[Axis | Expr, Ends] = {}
    for part in flattened(condition, "and"):
        if is_op(part, "lt"):
            form = _form(part.args[1], numbers)
            if form is not None:
                place = simplify(part.args[0])
                found[place.axis if isinstance(place, Var) else place] = frozenset({form})
    return found


def _form(value: Expr, numbers: Tensor) -> Form | None:
    """The sum of multiples of run-time numbers that an expression is."""
    total = linear(simplify(value))
    factors: dict[int, int] = {}
    for term, coefficient in total.terms.items():
        place = _place(term, numbers)
        if place is None:
            return None
        factors[place] = factors.get(place, 0) + coefficient
    most = max(factors, default=-1) + 1
    return Form(total.constant, tuple(factors.get(k, 0) for k in range(most)))


def _place(term: Expr, numbers: Tensor) -> int | None:
    """Which number it is, kept in its room or not."""
    while isinstance(term, Op) and term.op.name in ("min", "max", "cast"):
        others = [a for a in term.args if not isinstance(a, Const)]
        if len(others) != 1:
            return None
        term = others[0]
    is_number = isinstance(term, Load) and term.source is numbers and isinstance(term.args[0], Const)
    return int(term.args[0].value) if is_number else None  # type: ignore[attr-defined]


def _end(index: Expr, inside: Mapping[Axis | Expr, Ends], numbers: Tensor) -> Ends | None:
    """One more than the largest value of an index."""
    if index in inside:
        return inside[index]
    if isinstance(index, Const):
        return frozenset({Form(int(index.value) + 1)})
    if isinstance(index, Var):
        return inside.get(index.axis) or _most(index)
    if isinstance(index, Op) and index.op.name in ("min", "max") and isinstance(index.args[1], Const):
        rest = _end(index.args[0], inside, numbers)
        limit = frozenset({Form(int(index.args[1].value) + 1)})
        if index.op.name == "min":
            return limit if rest is None else rest
        return _union(rest, limit)
    if is_op(index, "floordiv") and isinstance(index.args[1], Const):
        return _divided(_end(index.args[0], inside, numbers), int(index.args[1].value)) or _most(index)
    total = linear(index)
    if list(total.terms) == [index]:
        return _most(index)
    sums: Ends | None = frozenset({Form(total.constant + 1)})
    for term, coefficient in total.terms.items():
        number = _form(term, numbers)
        more: Ends | None
        if number is not None:  # one number in a run: what lies behind a past begins where that ends
            more = frozenset({_times(number, coefficient)})
        elif coefficient < 0:
            low = bounds(term)[0]
            more = None if math.isinf(low) else frozenset({Form(int(low) * coefficient)})
        else:
            ends = _end(term, inside, numbers)
            more = None if ends is None else frozenset(_scaled(f, coefficient) for f in ends)
        sums = None if sums is None or more is None else frozenset(_plus(a, b) for a in sums for b in more)
    return sums if sums is None or len(sums) <= _MOST_FORMS else None


def _most(index: Expr) -> Ends | None:
    high = bounds(index)[1]
    return None if math.isinf(high) else frozenset({Form(int(high) + 1)})


def _divided(ends: Ends | None, divisor: int) -> Ends | None:
    if ends is None or divisor < 1 or any(factor % divisor for f in ends for factor in f.factors):
        return None
    return frozenset(Form((f.constant - 1) // divisor + 1, tuple(n // divisor for n in f.factors)) for f in ends)


def _times(form: Form, coefficient: int) -> Form:
    return Form(form.constant * coefficient, tuple(n * coefficient for n in form.factors))


def _scaled(form: Form, coefficient: int) -> Form:
    """Of the largest value, which is one less."""
    return Form((form.constant - 1) * coefficient, tuple(n * coefficient for n in form.factors))


def _plus(one: Form, other: Form) -> Form:
    most = max(len(one.factors), len(other.factors))
    pairs = zip((*one.factors, *[0] * most), (*other.factors, *[0] * most), strict=False)
    return Form(one.constant + other.constant, tuple(a + b for a, b in list(pairs)[:most]))
