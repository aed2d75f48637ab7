"""A factor of a contraction's narrow operand that the sum does not see is applied to the sum instead, in float32.

sum over r of float16(x[i, r] * c[i]) * y[r, j] becomes c[i] * (sum over r of float16(x[i, r]) * y[r, j]), where x never
exceeds 1 (exp(s - largest s)): rows of a softmax over thousands of places would be below float16's normal numbers, and
a sum along r can begin before c is known.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilewright.ir.analysis.normalised import Largest, at_most_one
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, reads
from tilewright.ir.forms.expr import (
    Axis,
    Expr,
    Load,
    Var,
    axes_of,
    cast,
    const,
    flattened,
    is_op,
    load,
    loads,
    op,
    replace_nodes,
    substitute,
    var,
)
from tilewright.ir.forms.tensor import Tensor
from tilewright.transform.storage import all_computes, names_of, unique_name


def apply_factors_late(program: Program) -> Program:
    makers = {t: c for c in program.computes for t in c.outputs}
    readers: dict[Tensor, list[Compute]] = {}
    for compute in all_computes(program):
        for tensor in set(reads(compute)):
            readers.setdefault(tensor, []).append(compute)
    taken = names_of(program)
    changed: dict[Compute, tuple[Compute, ...]] = {}
    for compute in program.computes:
        found = _late(compute, makers) if isinstance(compute, Reduce) else None
        if found is None or found.operand in program.outputs or readers[found.operand] != [compute]:
            continue
        assert isinstance(compute, Reduce)
        bare = Tensor(unique_name(f"{found.operand.name}_bare", taken), found.operand.shape, found.operand.dtype)
        (output,) = compute.outputs
        total = Tensor(unique_name(f"{output.name}_bare", taken), output.shape, output.dtype)
        made = found.maker
        changed[made] = (replace(made, output=bare, value=cast(found.rest, bare.dtype)),)
        element = replace_nodes(compute.elements[0], {found.read: load(bare, found.read.indices)})
        axes = tuple(Axis(a.name, a.extent) for a in compute.axes)
        here = {a: var(b) for a, b in zip(compute.axes, axes, strict=True)}
        scaled = op("mul", load(total, [var(a) for a in axes]), substitute(found.factor, here))
        changed[compute] = (replace(compute, outputs=(total,), elements=(element,)),
                            Map(output, axes, scaled, compute.origin))  # fmt: skip
    if not changed:
        return program
    return program.with_computes(tuple(new for c in program.computes for new in changed.get(c, (c,))))


@dataclass(frozen=True)
class _Late:
    operand: Tensor
    maker: Map
    read: Load
    rest: Expr  # of the operand, on its maker's axes
    factor: Expr  # on the axes of the sum's result


def _late(compute: Reduce, makers: dict[Tensor, Compute]) -> _Late | None:
    """The operand of a sum with a factor to take out of it; None where there is none."""
    if compute.monoid.operator != "add" or len(compute.outputs) != 1 or compute.outputs[0].dtype.bits != 32:
        return None
    for part in flattened(compute.elements[0], "mul"):
        read = part.args[0] if is_op(part, "cast") else part
        maker = makers.get(read.source) if isinstance(read, Load) and isinstance(read.source, Tensor) else None
        if not isinstance(maker, Map) or not is_op(maker.value, "cast") or maker.output.dtype.bits != 16:
            continue
        assert isinstance(read, Load)
        places = dict(zip(maker.axes, read.indices, strict=True))
        summed = {a for a, i in places.items() if set(axes_of(i)) & set(compute.reduce_axes)}
        if not summed or any(not isinstance(places[a], Var) for a in summed):
            continue
        split = _split(maker.value.args[0], summed)
        if split is not None and at_most_one(_inlined(split[0], makers), lambda t: _largest(t, makers)):
            return _Late(maker.output, maker, read, split[0], substitute(split[1], places))
    return None


def _split(value: Expr, summed: set[Axis]) -> tuple[Expr, Expr] | None:
    """value = rest * factor, the factor the same along the summed axes and read from memory."""
    if is_op(value, "div"):
        over, under = value.args
        is_late = loads(under) and not summed & set(axes_of(under))
        return (over, op("div", const(1, under.dtype), under)) if is_late else None
    parts = flattened(value, "mul") if is_op(value, "mul") else []
    late = [p for p in parts if not summed & set(axes_of(p)) and loads(p)]
    rest = [p for p in parts if p not in late]
    if len(late) != 1 or len(rest) != 1:
        return None
    return rest[0], late[0]


def _inlined(value: Expr, makers: dict[Tensor, Compute]) -> Expr:
    """What a map computes where a value reads it."""
    maker = makers.get(value.source) if isinstance(value, Load) and isinstance(value.source, Tensor) else None
    if not isinstance(maker, Map):
        return value
    assert isinstance(value, Load)
    return substitute(maker.value, dict(zip(maker.axes, value.indices, strict=True)))


def _largest(tensor: object, makers: dict[Tensor, Compute]) -> Largest | None:
    maker = makers.get(tensor) if isinstance(tensor, Tensor) else None
    if not isinstance(maker, Reduce) or maker.monoid.operator != "max":
        return None
    return Largest(maker.axes, maker.reduce_axes, maker.elements[0])
