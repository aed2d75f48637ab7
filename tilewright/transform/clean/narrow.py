"""Of a tensor that is read in part, that part alone is computed: of a classifier's last block, the token it looks at.

    y[50, 384] = ...; z[384] = y[0, o0]      becomes    y[1, 384] = ...; z[384] = y[0, o0]
    y[50, 384] = ...; z[384] = y[n - 1, o0]  becomes    y[1, 384] = ...; z[384] = y[0, o0]

In the second an input tells n: the last token of a text of any length. What y is computed from is read there.
Readers come before what they read, so that a part asked for at the end reaches as far up as reductions let it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tilewright.ir.analysis.simplify import linear, simplify
from tilewright.ir.forms.bounds import bounds, lower, static, upper
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, expressions, reads
from tilewright.ir.forms.expr import (
    Axis,
    Const,
    Expr,
    ExprLike,
    Extent,
    Load,
    Var,
    add,
    as_expr,
    const,
    load,
    loads,
    maximum,
    minimum,
    rewrite,
    sub,
    substitute,
    var,
    walk,
)
from tilewright.ir.forms.tensor import Tensor


@dataclass(frozen=True)
class _Side:
    """Of an axis, the first and the last index that is read, counted from where `base` is, which inputs tell."""

    first: int
    last: int
    base: Expr | None = None

    @property
    def size(self) -> int:
        return self.last - self.first + 1


Box = tuple[_Side, ...]

# An axis is cut where at least half of it goes: a little less of a tensor (the border that a stride leaves out) would
# cost remainders and alignment for nothing.
_PART = 2


def narrow(program: Program, least: int = 1) -> Program:
    """An equal Program whose tensors have little that nobody reads, but `least` elements of every axis: products of
    fewer rows than a matrix instruction has may be slower than those of some more."""
    found = _Narrowed(set(program.outputs), frozenset(program.inputs), least)
    computes = [found.cut(compute) for compute in reversed(program.computes)]
    if not found.parts:
        return program
    return program.with_computes(tuple(found.redirected(compute) for compute in reversed(computes)))


@dataclass
class _Narrowed:
    whole: set[Tensor]  # what must stay as it is
    inputs: frozenset[Tensor]
    least: int
    read: dict[Tensor, Box] = field(default_factory=dict)
    parts: dict[Tensor, tuple[Tensor, tuple[Expr, ...]]] = field(default_factory=dict)  # and where they begin

    def cut(self, compute: Compute) -> Compute:
        """The compute with no more axes than its readers need; what it reads is noted. It still reads whole tensors."""
        if not isinstance(compute, Map | Reduce):
            self.whole.update(reads(compute))
            return compute
        compute = self._narrowed(compute)
        for node in loads(*expressions(compute)):
            self._note(node)
        return compute

    def _note(self, node: Load) -> None:
        shape = node.source.shape
        box = tuple(self._read_of(index, extent) for index, extent in zip(node.args, shape, strict=True))
        known = self.read.get(node.source, box)
        self.read[node.source] = tuple(_both(a, b, extent) for a, b, extent in zip(box, known, shape, strict=True))

    def _read_of(self, index: Expr, extent: Extent) -> _Side:
        """What an index reaches of an axis. Behind a condition it may lie outside: then nothing is read."""
        total = linear(index)
        told = {term: n for term, n in total.terms.items() if self._is_told(term)}
        if told and static(extent) is not None:
            base = sum((term * n for term, n in told.items()), as_expr(const(0)))
            first, last = bounds(simplify(sub(index, base)))
            if last - first < int(upper(extent)):
                return _Side(int(first), int(last), simplify(base))
        first, last = bounds(index)
        most = int(upper(extent)) - 1
        return _Side(int(min(max(first, 0), most)), int(max(min(last, most), 0)))

    def _is_told(self, term: Expr) -> bool:
        """Whether inputs tell it, the same for all elements."""
        nodes = list(walk(term))
        read = [n for n in nodes if isinstance(n, Load)]
        is_known = all(n.source in self.inputs and all(isinstance(i, Const) for i in n.args) for n in read)
        return bool(read) and is_known and not any(isinstance(n, Var) for n in nodes)

    def _narrowed(self, compute: Map | Reduce) -> Map | Reduce:
        boxes = [self.read.get(tensor) for tensor in compute.outputs]
        if any(box is None for box in boxes) or not self.whole.isdisjoint(compute.outputs):
            return compute
        sides = []
        for axis, first, *rest in zip(compute.axes, *(b for b in boxes if b is not None), strict=True):
            for other in rest:
                first = _both(first, other, axis.extent)
            sides.append(_widened(first, axis.extent, self.least))
        kept = [_kept(axis.extent, side) for axis, side in zip(compute.axes, sides, strict=True)]
        if not any(kept):
            return compute
        starts = tuple(_start(axis.extent, side) if cut else const(0)
                       for cut, axis, side in zip(kept, compute.axes, sides, strict=True))  # fmt: skip
        axes = tuple(Axis(axis.name, side.size) if cut else axis
                     for cut, axis, side in zip(kept, compute.axes, sides, strict=True))  # fmt: skip
        moved: dict[Axis, ExprLike] = {old: add(var(new), start)
                                       for old, new, start in zip(compute.axes, axes, starts, strict=True)}  # fmt: skip
        shape = tuple(axis.extent for axis in axes)
        outputs = tuple(Tensor(tensor.name, shape, tensor.dtype) for tensor in compute.outputs)
        self.parts.update({old: (new, starts) for old, new in zip(compute.outputs, outputs, strict=True)})
        if isinstance(compute, Map):
            return replace(compute, output=outputs[0], axes=axes, value=_moved(compute.value, moved))
        elements = tuple(_moved(element, moved) for element in compute.elements)
        return replace(compute, outputs=outputs, axes=axes, elements=elements)

    def redirected(self, compute: Compute) -> Compute:
        """The compute reading the parts in place of the tensors they are parts of."""
        if not isinstance(compute, Map | Reduce) or self.parts.keys().isdisjoint(compute.sources):
            return compute
        if isinstance(compute, Map):
            return replace(compute, value=rewrite(compute.value, self._of_part))
        return replace(compute, elements=tuple(rewrite(element, self._of_part) for element in compute.elements))

    def _of_part(self, node: Expr) -> Expr | None:
        if not isinstance(node, Load) or node.source not in self.parts:
            return None
        part, starts = self.parts[node.source]
        return load(part, [i if _is_zero(s) else simplify(sub(i, s)) for i, s in zip(node.args, starts, strict=True)])


def _moved(value: Expr, places: dict[Axis, ExprLike]) -> Expr:
    return simplify(substitute(value, places))


def _both(one: _Side, other: _Side, extent: Extent) -> _Side:
    """As far as either reaches; the whole axis where they are not counted from one place."""
    if one.base != other.base:
        return _Side(0, int(upper(extent)) - 1)
    return _Side(min(one.first, other.first), max(one.last, other.last), one.base)


def _widened(side: _Side, extent: Extent, least: int) -> _Side:
    """At least so many elements, of those there are for certain."""
    if side.base is not None:  # those before it, which are there: often it is the last one
        return replace(side, first=min(side.first, side.last - min(least, int(lower(extent))) + 1))
    last = max(side.last, min(side.first + least, int(lower(extent))) - 1)
    return _Side(max(0, min(side.first, last - least + 1)), last)


def _kept(extent: Extent, side: _Side) -> bool:
    """Whether an axis is cut to a part; one that varies may be shorter than it can be."""
    known = static(extent)
    least = lower(extent) if known is None else known
    return (side.base is not None or side.last < least) and side.size * _PART <= least


def _start(extent: Extent, side: _Side) -> Expr:
    """Where a part begins. What inputs tell is kept inside the axis: behind a condition it may lie outside."""
    if side.base is None:
        return as_expr(const(side.first))
    most = int(upper(extent)) - side.size
    return simplify(minimum(maximum(side.base + side.first, 0), most))


def _is_zero(value: Expr) -> bool:
    return isinstance(value, Const) and value.value == 0
