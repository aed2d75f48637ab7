"""Of a tensor that is read in part, that part alone is computed: of a classifier's last block, the token it looks at.

    y[50, 384] = ...; z[384] = y[0, o0]    becomes    y[1, 384] = ...; z[384] = y[0, o0]

Readers come before what they read, so that a part asked for at the end reaches as far up as reductions let it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.bounds import bounds, lower, static, upper
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, expressions, reads
from tilewright.ir.forms.expr import Axis, Expr, ExprLike, Extent, Load, add, load, loads, rewrite, sub, substitute, var
from tilewright.ir.forms.tensor import Tensor

Box = tuple[tuple[int, int], ...]  # of each axis, the first and the last index that is read

# An axis is cut where at least half of it goes: a little less of a tensor (the border that a stride leaves out) would
# cost remainders and alignment for nothing.
_PART = 2


def narrow(program: Program, least: int = 1) -> Program:
    """An equal Program whose tensors have little that nobody reads, but `least` elements of every axis: products of
    fewer rows than a matrix instruction has may be slower than those of some more."""
    found = _Narrowed(set(program.outputs), least)
    computes = [found.cut(compute) for compute in reversed(program.computes)]
    if not found.parts:
        return program
    return program.with_computes(tuple(found.redirected(compute) for compute in reversed(computes)))


@dataclass
class _Narrowed:
    whole: set[Tensor]  # what must stay as it is
    least: int
    read: dict[Tensor, Box] = field(default_factory=dict)
    parts: dict[Tensor, tuple[Tensor, tuple[int, ...]]] = field(default_factory=dict)  # and where they begin

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
        box = tuple(_read_of(index, extent) for index, extent in zip(node.args, node.source.shape, strict=True))
        known = self.read.get(node.source, box)
        self.read[node.source] = tuple((min(a, c), max(b, d)) for (a, b), (c, d) in zip(box, known, strict=True))

    def _narrowed(self, compute: Map | Reduce) -> Map | Reduce:
        boxes = [self.read.get(tensor) for tensor in compute.outputs]
        if any(box is None for box in boxes) or not self.whole.isdisjoint(compute.outputs):
            return compute
        ranges = [_widened(min(first for first, _ in sides), max(last for _, last in sides), axis.extent, self.least)
                  for axis, *sides in zip(compute.axes, *(b for b in boxes if b is not None), strict=True)]  # fmt: skip
        kept = [_kept(axis.extent, *side) for axis, side in zip(compute.axes, ranges, strict=True)]
        if not any(kept):
            return compute
        starts = tuple(side[0] if cut else 0 for cut, side in zip(kept, ranges, strict=True))
        axes = tuple(Axis(axis.name, side[1] - side[0] + 1) if cut else axis
                     for cut, axis, side in zip(kept, compute.axes, ranges, strict=True))  # fmt: skip
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
        return load(part, [simplify(sub(i, s)) if s else i for i, s in zip(node.args, starts, strict=True)])


def _moved(value: Expr, places: dict[Axis, ExprLike]) -> Expr:
    return simplify(substitute(value, places))


def _read_of(index: Expr, extent: Extent) -> tuple[int, int]:
    """What an index reaches of an axis. Behind a condition it may lie outside: then nothing is read."""
    first, last = bounds(index)
    most = int(upper(extent)) - 1
    return int(min(max(first, 0), most)), int(max(min(last, most), 0))


def _widened(first: int, last: int, extent: Extent, least: int) -> tuple[int, int]:
    """At least so many elements, of those there are for certain."""
    last = max(last, min(first + least, int(lower(extent))) - 1)
    return max(0, min(first, last - least + 1)), last


def _kept(extent: Extent, first: int, last: int) -> bool:
    """Whether an axis is cut to the part from `first` to `last`; one that varies may be shorter than it can be."""
    known = static(extent)
    least = lower(extent) if known is None else known
    return last < least and (last - first + 1) * _PART <= least
