"""Propagation (Welder, section 4): one output tile determines every other tile, by intervals on the index maps.

Sizes may be NumPy arrays: a whole batch of candidate tiles is propagated at once, origins staying symbolic.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from tilewright.ir.analysis.simplify import Linear, difference, linear, simplify
from tilewright.ir.forms import bounds
from tilewright.ir.forms.expr import Axis, Const, Expr, Op, Symbol, Var, const, is_op, maximum, minimum
from tilewright.ir.forms.tensor import Tensor
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.signature import signature

Size = Any  # int, or an integer array with an entry a candidate


@dataclass(slots=True)  # not frozen: many are made
class Range:
    """`size` consecutive indices from `low`, inside an axis of `extent`."""

    low: Expr
    size: Size
    extent: int

    @property
    def count(self) -> Expr:
        """How many of them lie inside the axis."""
        if self.size >= self.extent:
            return const(self.extent)
        return simplify(minimum(int(self.size), const(self.extent) - self.low))


Box = tuple[Range, ...]


def whole(extent: int) -> Range:
    return Range(const(0), extent, extent)


def extent_of(value: int | Expr) -> int:
    """The extent, or the most it can be."""
    return value if isinstance(value, int) else int(bounds.upper(value))


def index_range(index: Expr, box: Mapping[Axis, Range], extent: int, clip: bool = True) -> Range:
    """The range an index expression covers while each axis runs over its own range, clipped to [0, extent)."""
    if isinstance(index, Var) and index.axis in box:
        low, size = box[index.axis].low, box[index.axis].size
        return _clipped(low, size, extent) if clip else Range(low, size, extent)
    lowest, size = _range(index, box)
    if lowest is None:
        return whole(extent)
    return _clipped(lowest, size, extent) if clip else Range(lowest, size, extent)


def index_size(index: Expr, sizes: Mapping[Axis, Size], extent: int) -> Size:
    """The size of `index_range` where every axis begins at 0: numbers are enough, no origins are needed."""
    if isinstance(index, Var):
        size = sizes.get(index.axis, 1)
    else:
        low, size = _range_from_zero(index, sizes)
        if low is None:
            return extent
    return np.minimum(size, extent) if isinstance(size, np.ndarray) else min(size, extent)


def _range_from_zero(index: Expr, sizes: Mapping[Axis, Size]) -> tuple[int | None, Size]:
    """`_range` of axes that begin at 0; those without a size stand at one unknown place."""
    value = linear(index)
    low, size = value.constant, 1
    for term, coefficient in value.terms.items():
        term_low, term_size = _term_from_zero(term, sizes)
        if term_low is None or (coefficient < 0 and isinstance(term_size, np.ndarray)):
            return None, 0
        low += coefficient * (term_low if coefficient > 0 else term_low + int(term_size) - 1)
        size = size + abs(coefficient) * (term_size - 1)
    return low, size


def _term_from_zero(term: Expr, sizes: Mapping[Axis, Size]) -> tuple[int | None, Size]:
    if isinstance(term, Var):
        return 0, sizes.get(term.axis, 1)
    if not isinstance(term, Op):
        return (0, 1) if isinstance(term, Symbol) else (None, 0)
    if term.op.name in ("floordiv", "mod") and isinstance(term.args[1], Const):
        low, size = _range_from_zero(term.args[0], sizes)
        divisor = int(term.args[1].value)
        if low is None:
            return None, 0
        if term.op.name == "floordiv":
            return low // divisor, (size - 1 + (divisor - 1 if low % divisor else 0)) // divisor + 1
        if low % divisor == 0:
            return 0, np.minimum(size, divisor) if isinstance(size, np.ndarray) else min(size, divisor)
        return (low % divisor, 1) if not isinstance(size, np.ndarray) and size == 1 else (0, divisor)
    if term.op.name in ("min", "max"):
        clamped, limit = term.args if isinstance(term.args[1], Const) else reversed(term.args)
        low, size = _range_from_zero(clamped, sizes)
        if low is None:
            return None, 0
        if isinstance(limit, Const):  # never more values than the other side has
            return (min if term.op.name == "min" else max)(low, int(limit.value)), size
    lowest, highest = bounds.bounds(term)
    if not term.wraps and np.isfinite(lowest) and np.isfinite(highest):
        return int(lowest), int(highest - lowest) + 1
    return None, 0


def _clipped(low: Expr, size: Size, extent: int) -> Range:
    known = bounds.bounds(low)
    if isinstance(size, np.ndarray):
        return Range(low if known[0] >= 0 else simplify(maximum(low, 0)), np.minimum(size, extent), extent)
    if size >= extent:
        return whole(extent)
    if known[1] >= extent:  # a read that is guarded elsewhere may start beyond the end
        low = simplify(minimum(low, extent - size))
    if known[0] < 0:
        low = simplify(maximum(low, 0))
    return Range(low, size, extent)


def _range(index: Expr, box: Mapping[Axis, Range]) -> tuple[Expr | None, Size]:
    """(lowest value, number of values up to the highest), or (None, 0) when it depends on data."""
    value = linear(index)
    terms: dict[Expr, int] = {}
    constant = value.constant
    size: Size = 1
    for term, coefficient in value.terms.items():
        term_low, term_size = _term_range(term, box)
        if term_low is None:
            return None, 0
        size = size + abs(coefficient) * (term_size - 1)
        end = linear(term_low)
        constant += end.constant * coefficient
        if coefficient < 0:
            if isinstance(term_size, np.ndarray):
                return None, 0  # the origin would differ from candidate to candidate
            constant += (int(term_size) - 1) * coefficient  # an integer of NumPy's cannot be wrapped
        for part, count in end.terms.items():
            terms[part] = terms.get(part, 0) + count * coefficient
    return _sum(tuple([(t, c) for t, c in terms.items() if c]), constant), size


@lru_cache(maxsize=1 << 12)
def _sum(terms: tuple[tuple[Expr, int], ...], constant: int) -> Expr:
    """Where a range begins; tiles of all sizes begin alike."""
    return simplify(Linear(dict(terms), constant).expr())


@lru_cache(maxsize=1 << 12)
def _quotient(low: Expr, divisor: int) -> Expr:
    return simplify(low // divisor)


def _term_range(term: Expr, box: Mapping[Axis, Range]) -> tuple[Expr | None, Size]:
    if isinstance(term, Var):
        known = box.get(term.axis)
        return (known.low, known.size) if known is not None else (term, 1)
    if isinstance(term, Const | Symbol):
        return term, 1
    if not isinstance(term, Op):
        return None, 0
    if term.op.name in ("floordiv", "mod") and isinstance(term.args[1], Const):
        return _division_range(term, box)
    if term.op.name in ("min", "max"):
        parts = [_range(a, box) for a in term.args]
        if any(low is None for low, _ in parts):
            return None, 0
        fixed = [p for p in parts if isinstance(p[1], int) and p[1] == 1 and isinstance(p[0], Const)]
        if len(fixed) == 1:  # clamping against a constant: never more values than the other side has
            other = parts[1] if parts[0] is fixed[0] else parts[0]
            return simplify(term.rebuild((other[0], fixed[0][0]))), other[1]  # type: ignore[arg-type]
    low, high = bounds.bounds(term)
    if not term.wraps and np.isfinite(low) and np.isfinite(high):
        return const(int(low)), int(high - low) + 1
    return None, 0


def _division_range(term: Op, box: Mapping[Axis, Range]) -> tuple[Expr | None, Size]:
    low, size = _range(term.args[0], box)
    divisor = int(term.args[1].value)  # type: ignore[attr-defined]
    if low is None:
        return None, 0
    start = linear(low)
    aligned = start.constant % divisor == 0 and all(c % divisor == 0 for c in start.terms.values())
    if term.op.name == "floordiv":
        spill = 0 if aligned else divisor - 1
        return _quotient(low, divisor), (size - 1 + spill) // divisor + 1
    if aligned:
        return const(0), np.minimum(size, divisor) if isinstance(size, np.ndarray) else min(size, divisor)
    if not isinstance(size, np.ndarray) and size == 1:
        return simplify(low % divisor), 1
    return const(0), divisor


def merge(a: Box, b: Box) -> Box:
    """The bounding box of two boxes."""
    result = []
    for x, y in zip(a, b, strict=True):
        gap = difference(y.low, x.low)
        if gap is None:
            result.append(_merged_unclipped(x, y))
            continue
        low = x.low if gap >= 0 else y.low
        end_x, end_y = x.size + max(0, -gap), y.size + max(0, gap)
        both = np.maximum(end_x, end_y)
        size = both if isinstance(both, np.ndarray) and both.ndim else int(both)
        size = np.minimum(size, x.extent) if isinstance(size, np.ndarray) else min(size, x.extent)
        result.append(Range(low, size, x.extent))
    return tuple(result)


def _merged_unclipped(x: Range, y: Range) -> Range:
    """The union of ranges that differ by a constant but for the clipping of one of them, as neighbours' reads do."""
    first, second = unclipped(x), unclipped(y)
    gap = difference(second, first)
    if gap is None:
        return whole(x.extent)
    both = np.maximum(x.size + max(0, -gap), y.size + max(0, gap))
    size = both if isinstance(both, np.ndarray) and both.ndim else int(both)
    return _clipped(first if gap >= 0 else second, size, x.extent)


def unclipped(part: Range) -> Expr:
    """Where a range would begin if its axis had no ends."""
    low = part.low
    if is_op(low, "max") and isinstance(low.args[1], Const) and low.args[1].value == 0:
        low = low.args[0]
    if is_op(low, "min") and isinstance(low.args[1], Const) and not isinstance(part.size, np.ndarray):
        low = low.args[0] if low.args[1].value >= part.extent - part.size else low
    return low


@dataclass
class Known:
    """Results of this module by nest and box. Arrays that are equal are one, and so are boxes: they are told apart by
    what they are, not by what is in them."""

    found: dict[Hashable, Any] = field(default_factory=dict)
    arrays: dict[bytes, Size] = field(default_factory=dict)
    own: set[int] = field(default_factory=set)  # the arrays among these, by what they are
    boxes: dict[Hashable, Box] = field(default_factory=dict)
    counts: dict[int, Size] = field(default_factory=dict)
    sizes: dict[int, Hashable] = field(default_factory=dict)
    forms: dict[Hashable, int] = field(default_factory=dict)
    numbers: dict[Nest, int] = field(default_factory=dict)
    held: int = 0  # bytes of all arrays

    def size(self, size: Size) -> Size:
        """The one array that is equal."""
        if not isinstance(size, np.ndarray) or id(size) in self.own:
            return size
        found = self.arrays.setdefault(size.tobytes(), size)
        if found is size:
            self.own.add(id(size))
            self.held += size.nbytes
        return found

    def box(self, box: Box) -> Box:
        """The one box that is equal."""
        if id(box) in self.counts:
            return box
        parts = tuple([Range(p.low, self.size(p.size), p.extent) for p in box])
        key = tuple([(p.low, size_key(p.size), p.extent) for p in parts])
        found = self.boxes.setdefault(key, parts)
        if found is parts:
            self.counts[id(parts)] = box_elements(parts)
            self.sizes[id(parts)] = tuple([size for _, size, _ in key])
        return found

    def elements(self, box: Box) -> Size:
        """Elements of a box that is one of these."""
        return self.counts[id(box)]

    def number(self, nest: Nest) -> int:
        """The same for nests that compute the same on tensors of the same shapes, whatever those are called."""
        found = self.numbers.get(nest)
        if found is None:
            # nests of a Scan's step, which places depend on, are each its own
            form = nest if nest.outline.outside else signature([nest], lambda _: None)
            found = self.numbers[nest] = self.forms.setdefault(form, len(self.forms))
        return found


def size_key(size: Size) -> int:
    """A size that is `Known`'s, for a key."""
    return id(size) if isinstance(size, np.ndarray) else size


def reads_box(
    nest: Nest, own: Box, reduce_box: Mapping[Axis, Range], wanted: set[Tensor], known: Known | None = None,
    clip: bool = True,
) -> dict[Tensor, Box]:  # fmt: skip
    """What a nest reads of the wanted tensors while its own axes cover the box `own`."""
    if known is None:
        return _reads_box(nest, own, reduce_box, wanted, clip)
    limits = tuple([(nest.reduce_axes.index(a), r.low, size_key(known.size(r.size))) for a, r in reduce_box.items()])
    key = known.number(nest), id(own), clip, limits
    found = known.found.get(key)
    if found is None:
        boxes = _reads_box(nest, own, reduce_box, set(nest.reach), clip)
        found = known.found[key] = [known.box(box) for box in boxes.values()]
    return {t: box for t, box in zip(nest.reach, found, strict=True) if t in wanted}


def _reads_box(
    nest: Nest, own: Box, reduce_box: Mapping[Axis, Range], wanted: set[Tensor], clip: bool
) -> dict[Tensor, Box]:
    env = dict(zip(nest.axes, own, strict=True))
    env.update({a: reduce_box.get(a, whole(extent_of(a.extent))) for a in nest.reduce_axes})
    found: dict[Tensor, Box] = {}
    ranges: dict[tuple[Expr, int], Range] = {}  # several reads take the same places
    for tensor, dims in nest.reach.items():
        if tensor not in wanted:
            continue
        box = []
        for indices, extent in zip(dims, tensor.shape, strict=True):
            size = extent_of(extent)
            for index in indices:
                if (index, size) not in ranges:
                    ranges[index, size] = index_range(index, env, size, clip)
            part = ranges[indices[0], size]
            for other in indices[1:]:
                (part,) = merge((part,), (ranges[other, size],))
            box.append(part)
        found[tensor] = tuple(box)
    return found


def boxes_of_reads(nest: Nest, own: Box, reduce_box: Mapping[Axis, Range], tensor: Tensor) -> list[Box]:
    """What each read of a tensor takes by itself: slices of it that lie far apart have little between them."""
    env = dict(zip(nest.axes, own, strict=True))
    env.update({a: reduce_box.get(a, whole(extent_of(a.extent))) for a in nest.reduce_axes})
    sizes = [extent_of(extent) for extent in tensor.shape]
    distinct = dict.fromkeys(n.indices for n in nest.loads() if n.source is tensor)
    return [tuple(index_range(simplify(i), env, s) for i, s in zip(d, sizes, strict=True)) for d in distinct]


def propagate(
    nests: Sequence[Nest], roots: Box | Mapping[Nest, Box],
    reduce_boxes: Mapping[Nest, Mapping[Axis, Range]] | None = None, known: Known | None = None, clip: bool = True,
) -> dict[Nest, Box]:  # fmt: skip
    """The box of every nest of a connected group, from those of its roots; a single box is the last nest's. Unclipped,
    boxes may lie beyond the ends of an axis: how they move with a root's is then plain to see."""
    boxes: dict[Nest, Box] = dict(roots) if isinstance(roots, Mapping) else {nests[-1]: roots}
    if known is not None:
        boxes = {nest: known.box(box) for nest, box in boxes.items()}
    inside = {t for n in nests for t in n.stores}
    limits = reduce_boxes or {}
    needed: dict[Tensor, Box] = {}
    for nest in reversed(nests):
        if nest not in boxes:
            demands = [needed[t] for t in nest.stores if t in needed]
            box = demands[0] if demands else beside(nest, needed)
            if known is not None:
                box = known.box(box)
            for other in demands[1:]:
                box = _merged(box, other, known)
            boxes[nest] = box
        for tensor, box in reads_box(nest, boxes[nest], limits.get(nest, {}), inside, known, clip).items():
            needed[tensor] = _merged(needed[tensor], box, known) if tensor in needed else box
    return boxes


def _merged(a: Box, b: Box, known: Known | None) -> Box:
    if known is None:
        return merge(a, b)
    key = id(a), id(b)
    if key not in known.found:
        known.found[key] = known.box(merge(a, b))
    both: Box = known.found[key]
    return both


def beside(nest: Nest, needed: Mapping[Tensor, Box]) -> Box:
    """The box of a further root: along an axis that reads what the other roots need, that part of it; else all."""
    found = {a: whole(extent_of(a.extent)) for a in nest.axes}
    for node in nest.loads():
        for index, part in zip(node.indices, needed.get(node.source, ()), strict=False):
            if isinstance(index, Var) and index.axis in found and part.extent == extent_of(index.axis.extent):
                found[index.axis] = part
    return tuple(found.values())


def box_elements(box: Box) -> Size:
    total: Size = 1
    for part in box:
        total = total * part.size
    return total


def whole_blocks(nests: Sequence[Nest], boxes: Mapping[Nest, Box]) -> Any:
    """Whether inner nests begin and end at whole blocks of the axes they write out; in parts nothing is decided."""
    fits: Any = True
    for nest in nests[:-1]:
        for axis, part in zip(nest.axes, boxes[nest], strict=True):
            block = nest.unswitched.get(axis, 1)
            if block == 1:
                continue
            low = linear(part.low)
            aligned = low.constant % block == 0 and all(c % block == 0 for c in low.terms.values())
            fits = fits & ((part.size >= part.extent) | (aligned & (part.size % block == 0)))
    return fits
