"""Long reductions with few results, cut into parts that all units share; a second reduction combines the parts.

Products on tensor cores are cut where their tiles are too few for all units, or would be too small to be fed. Sums of
very many numbers are cut whatever it costs: one running sum in float32 would lose what is added last.

How many parts there are depends on the shape and the machine's description, never on how many threads run: the order of
a sum, and with it every bit of the result, stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from math import inf, prod

from tilewright.ir.analysis.simplify import linear, simplify
from tilewright.ir.forms.compute import Compute, Monoid, Program, Reduce, reads
from tilewright.ir.forms.expr import Axis, Expr, Op, axes_of, load, loads, lt, minimum, select, substitute, var, walk
from tilewright.ir.forms.tensor import Tensor
from tilewright.target import Target
from tilewright.transform.precision.choose import contracted
from tilewright.transform.reductions.neighbours import alone, leading_to, outline
from tilewright.transform.storage import names_of, unique_name

Predict = Callable[[Program], float]
Known = dict[Hashable, int | None]  # elements of a part, by a product's form

_LEAST_LENGTH = 4096  # elements of a reduction below which a part has too little to do
_FEW_RESULTS = 4  # a unit, from which on results are shared out well enough by themselves
_FEW_BEHIND_SUMS = 256  # the same behind a sum of products, whose operands are used again in tiles of many results
_PARTS = (1, 2, 4, 8)  # a unit
_LEAST_PRODUCT = 512  # elements of the sum of a product on tensor cores
_STEP = 64  # a part is whole steps of the sum
_TILES = (128 * 128, 64 * 128, 32 * 64)  # results of a product that a unit may compute at once
_MOST_PARTS = 8  # of a product: more of them cost more to combine than they gain
_LONGEST_SUM = 1 << 14  # numbers that one register adds: the sum is then so much larger that each loses digits
_WORTH = 0.9  # of the time as it stands: less gain is within the model's error


def split_reductions(program: Program, target: Target, predict: Predict, known: Known | None = None) -> Program:
    """The Program with such reductions in two, where that is predicted to pay; `known` keeps what was found out about
    products, for the same target."""
    taken = names_of(program)
    around = _Around(program)
    computes: list[Compute] = []
    remarks: list[str] = []
    products: Known = {} if known is None else known
    for compute in program.computes:
        cut = _best(compute, around, target, predict) if isinstance(compute, Reduce) else None
        if cut is None and isinstance(compute, Reduce) and _runs_on_matrices(compute, target):
            cut = _best_product(compute, around, target, predict, products)
        if cut is None:
            computes.append(compute)
            continue
        computes.extend(cut.computes(taken))
        remarks.append(f"{compute.origin or compute.outputs[0].name}: reduced in {cut.parts} parts, then combined")
    if not remarks:
        return program
    return replace(program, computes=tuple(computes), remarks=(*program.remarks, *remarks))


@dataclass(frozen=True)
class Split:
    """A reduction, the axis that is cut, how many of its elements are a part, and axes around it every element of which
    has parts of its own."""

    reduce: Reduce
    axis: Axis
    size: int
    leads: bool = False  # parts lie one behind the other, rather than those of one result
    around: tuple[Axis, ...] = ()

    @property
    def parts(self) -> int:
        """Of one result."""
        return self._pieces * prod(_extent(a) for a in self.around)

    @property
    def _pieces(self) -> int:
        return -(-_extent(self.axis) // self.size)

    def _part_axes(self) -> tuple[Axis, ...]:
        return (*(Axis(a.name, a.extent) for a in self.around), Axis("part", self._pieces))

    def computes(self, taken: set[str]) -> tuple[Reduce, Reduce]:
        """The reduction of every part, and that of the parts."""
        whole, monoid = self.reduce, self.reduce.monoid
        parts, inside = self._part_axes(), Axis(self.axis.name, self.size)
        place = var(parts[-1]) * self.size + var(inside)
        length = _extent(self.axis)
        is_ragged = self._pieces * self.size != length
        at: dict[Axis, Expr] = {a: var(own) for a, own in zip(self.around, parts, strict=False)}
        at[self.axis] = minimum(place, length - 1) if is_ragged else simplify(place)
        elements = tuple(simplify(substitute(e, at)) for e in whole.elements)
        if is_ragged:
            elements = tuple(
                select(lt(place, length), e, nothing) for e, nothing in zip(elements, monoid.identity, strict=True)
            )
        shape = tuple(a.extent for a in whole.axes)
        stem = f"{whole.outputs[0].name}_parts"
        of_parts = tuple(a.extent for a in parts)
        whole_shape = (*of_parts, *shape) if self.leads else (*shape, *of_parts)
        partial = tuple(Tensor(unique_name(stem, taken), whole_shape, s.dtype) for s in monoid.left)
        states = Monoid(monoid.left, monoid.right, monoid.identity, monoid.combine, monoid.left)
        walked = tuple(inside if a is self.axis else a for a in whole.reduce_axes if a not in self.around)
        outer = (*parts, *whole.axes) if self.leads else (*whole.axes, *parts)
        first = Reduce(partial, outer, walked, elements, states, whole.origin)
        axes = tuple(Axis(a.name, a.extent) for a in whole.axes)
        last = self._part_axes()
        here, of_last = tuple(var(a) for a in axes), tuple(var(a) for a in last)
        index = (*of_last, *here) if self.leads else (*here, *of_last)
        found: tuple[Expr, ...] = tuple(load(t, index) for t in partial)
        return first, Reduce(whole.outputs, axes, last, found, monoid, whole.origin)


class _Around:
    """Who makes and who reads each tensor."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.made = program.producers()
        self.users = program.consumers()


def _best(reduce: Reduce, around: _Around, target: Target, predict: Predict) -> Split | None:
    program = around.program
    results = prod(_extent(a) for a in reduce.axes)
    length = prod(_extent(a) for a in reduce.reduce_axes)
    if length < _LEAST_LENGTH or not results:
        return None
    feeding = _feeding(reduce, around)
    few = (_FEW_BEHIND_SUMS if feeding else _FEW_RESULTS) * target.units
    needed = -(-length // (_LONGEST_SUM * _registers(target))) if _rounds(reduce.monoid) else 1
    if needed == 1 and (target.units < 2 or results >= few):
        return None
    best, limit = None, _WORTH * predict(alone((*feeding, reduce), program)) if needed == 1 else inf
    for parts in dict.fromkeys(max(2, needed, n * target.units // (1 if feeding else results)) for n in _PARTS):
        if length // parts < _LEAST_LENGTH // 32:
            break
        for split in _cuts(reduce, parts):
            seconds = predict(alone((*feeding, *split.computes(set())), program))
            if seconds < limit:
                best, limit = split, seconds
    return best


def _registers(target: Target) -> int:
    """That a unit sums one long reduction up in, at least."""
    return target.warp * target.schedulers if target.lanes_are_threads else target.lanes(4)


def _rounds(monoid: Monoid) -> bool:
    """Whether it adds numbers of at most 32 bits, which are rounded."""
    return any(s.dtype.is_float and s.dtype.bytes <= 4 and _adds(e)
               for s, e in zip(monoid.left, monoid.combine, strict=True))  # fmt: skip


def _adds(value: Expr) -> bool:
    return any(isinstance(node, Op) and node.op.name == "add" for node in walk(value))


def _runs_on_matrices(reduce: Reduce, target: Target) -> bool:
    operands = contracted(reduce)
    return operands is not None and target.rate(f"mma_{operands[0].dtype.name}") is not None


def _best_product(
    reduce: Reduce, around: _Around, target: Target, predict: Predict, known: Known
) -> Split | None:
    """Parts so that tiles of a good size are as many as units, where the sum can be cut into so many whole steps; none
    where that takes longer together with what leads to the product, which is not joined with parts of it."""
    program = around.program
    results = prod(_extent(a) for a in reduce.axes)
    axis = max(reduce.reduce_axes, key=_extent)
    steps = _extent(axis) // _STEP
    if _extent(axis) < _LEAST_PRODUCT or _extent(axis) % _STEP or not results:
        return None
    shares = [n for n in range(1, _MOST_PARTS + 1) if steps % n == 0]
    wanted = {max((n for n in shares if n * results <= target.units * tile), default=1) for tile in _TILES}
    tried = sorted(wanted - {1})
    if not tried:
        return None
    key = _form(reduce, program)
    if key not in known:
        known[key] = None
        limit = predict(alone((reduce,), program))  # combining mostly finds room in a kernel that reads the result
        for parts in tried:
            split = Split(reduce, axis, _extent(axis) // parts, leads=True)
            seconds = predict(alone(split.computes(set()), program))
            if seconds < limit:
                known[key], limit = split.size, seconds
    size = known[key]
    if size is None:
        return None
    split = Split(reduce, axis, size, leads=True)
    leading = leading_to(reduce, program, around.made)
    if not any(isinstance(c, Reduce) for c in leading[:-1]):
        return split
    key = size, outline(leading, program)
    if key not in known:
        ways = (split.computes(set()), (reduce,))
        cut, whole = (predict(alone((*leading[:-1], *last), program)) for last in ways)
        known[key] = size if cut < whole else None
    return split if known[key] is not None else None


def _form(reduce: Reduce, program: Program) -> Hashable:
    """What tells a product from another that is planned differently: its sizes, and how it reads what."""
    axes = (*reduce.axes, *reduce.reduce_axes)
    names = {a: var(Axis(f"axis{i}", a.extent)) for i, a in enumerate(axes)}
    read = tuple((n.source.shape, n.dtype.name, n.source in program.constants, program.layouts.get(n.source),
                  tuple(repr(substitute(i, names)) for i in n.indices)) for n in loads(*reduce.elements))  # fmt: skip
    return tuple(a.extent for a in axes), len(reduce.axes), read


def _feeding(reduce: Reduce, around: _Around) -> tuple[Reduce, ...]:
    """The sum of products whose results are read once, here: parts of the reduction may be computed with it."""
    read = [t for t in reads(reduce) if isinstance(around.made.get(t), Reduce)]
    if len(read) != 1 or len(around.users[read[0]]) != 1 or read[0] in around.program.outputs:
        return ()
    producer = around.made[read[0]]
    assert isinstance(producer, Reduce)
    return (producer,) if len(loads(*producer.elements)) == 2 else ()


def _cuts(reduce: Reduce, parts: int) -> list[Split]:
    """Ways to about so many parts: runs of the outermost axis, or, where that has too few elements, of one farther in
    for every element of those around it."""
    axis = _outermost(reduce)
    if parts <= _extent(axis):
        return [Split(reduce, axis, size) for size in _sizes(_extent(axis), parts)]
    around: list[Axis] = []
    for axis in sorted(reduce.reduce_axes, key=lambda a: _distance(a, reduce), reverse=True):
        pieces = -(-parts // prod(_extent(a) for a in around))
        if 1 < pieces <= _extent(axis):
            return [Split(reduce, axis, size, around=tuple(around)) for size in _sizes(_extent(axis), pieces)]
        around.append(axis)
    return []


def _sizes(length: int, parts: int) -> list[int]:
    """Elements of a part: an even share where one is near, so that no part is checked for its end; else so many parts
    with a shorter last one, or one part more."""
    for count in range(parts, min(length, parts + parts // 2) + 1):
        if length % count == 0:
            return [length // count]
    return [-(-length // parts), max(1, length // parts)]


def _outermost(reduce: Reduce) -> Axis:
    """The axis whose neighbours lie farthest apart in what is read: a part is then a run of memory. Of short ones, the
    longest."""
    long = [a for a in reduce.reduce_axes if _extent(a) >= 64]
    return max(long, key=lambda a: _distance(a, reduce)) if long else max(reduce.reduce_axes, key=_extent)


def _distance(axis: Axis, reduce: Reduce) -> int:
    """How far apart neighbours along it lie in what is read."""
    far = 0
    for node in loads(*reduce.elements):
        step = 1
        for index, extent in zip(reversed(node.indices), reversed(node.source.shape), strict=True):
            if axis in axes_of(index):
                far = max(far, step * abs(linear(index).terms.get(var(axis), 1)))
            step *= extent if isinstance(extent, int) else 1
    return far


def _extent(axis: Axis) -> int:
    return axis.extent if isinstance(axis.extent, int) else 0
