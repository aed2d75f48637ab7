"""What planning a nest knows around it, and how its reads lie in storage."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from tilewright.ir.analysis.simplify import Linear, join_divisions, linear, simplify
from tilewright.ir.forms.expr import Axis, Const, Expr, Load, Var, axes_of, is_op, var
from tilewright.ir.forms.tensor import Layout, Tensor
from tilewright.target import Target
from tilewright.tile_graph.algebra.cached import Cached
from tilewright.tile_graph.algebra.memo import Memo
from tilewright.tile_graph.algebra.nest import Nest, moves
from tilewright.tile_graph.algebra.runs import axes_around, free_axes


@dataclass(frozen=True)
class NestContext:
    """What planning a nest needs to know around it."""

    target: Target
    layout: Callable[[Tensor], Layout]
    constants: frozenset[Tensor] | Mapping[Tensor, object]
    staged: frozenset[Tensor] = frozenset()  # copies whose order is still free
    memo: Memo = field(default_factory=Memo)
    cached: Mapping[Tensor, Cached] | None = None  # in the steps of a Scan: where its weights come from
    stepped: Mapping[Tensor, frozenset[int]] = field(default_factory=dict)  # what Scans read step by step
    kinds: dict[Nest, Hashable] | None = None  # `kind_of` nests, once all layouts are settled
    tiles_outer: bool = True  # whether kernels may keep intermediates in the outer cache; those of a Scan's step do not
    prefetches: bool = True  # whether products ask for weights before they need them; plans of older versions do not
    hurried: bool = False  # a plan is wanted soon: what is nearly as good is not looked at again

    @cached_property
    def weights(self) -> int:
        """Bytes of all constants: what one run of the model reads of them before it comes to the first again."""
        return sum(t.most_bytes for t in self.constants)

    @cached_property
    def weights_fit(self) -> tuple[bool, ...]:
        """All of a model's constants that a decision may depend on: what levels hold them, or with as much to spare."""
        sizes = (n for x in self.target.levels for n in (x.capacity // 2, x.capacity, x.capacity * x.shared_by // 2))
        return tuple(self.weights <= size for size in sizes)

    def with_layouts(self, layout: Callable[[Tensor], Layout]) -> NestContext:
        """The same where tensors lie otherwise."""
        made = replace(self, layout=layout, kinds={})
        made.__dict__.update(weights=self.weights, weights_fit=self.weights_fit)  # constants are the same
        return made

    def packable(self, tensor: Tensor) -> bool:
        """Whether whoever reads the tensor may say how it is packed."""
        return (tensor in self.constants or tensor in self.staged) and self.layout(tensor).is_natural

    def offset(self, tensor: Tensor, indices: tuple[Expr, ...]) -> Linear:
        """The flat position in storage of what lies at indices of a tensor."""
        key = tensor, self.layout(tensor), indices
        known = self.memo.offsets.get(key)
        if known is None:
            known = self.memo.offsets[key] = offset_of(*key)
        return known


def offset_of(tensor: Tensor, layout: Layout, indices: tuple[Expr, ...]) -> Linear:
    """The flat position of a read in storage."""
    offset = Linear({}, 0)
    for index, size in zip(layout.storage_indices(indices), layout.storage_shape(tensor.shape), strict=True):
        outer = offset.scaled(size) if isinstance(size, int) else linear(simplify(offset.expr() * size))
        offset = outer.plus(linear(simplify(index)))
    return offset


def stride(node: Load, axis: Axis, context: NestContext) -> int | None:
    """Elements of storage between neighbours along `axis`; None when it is not one number."""
    known, key = context.memo.strides, (node, axis, context.layout(node.source), context.packable(node.source))
    if key not in known:
        known[key] = _stride(node, axis, context)
    return known[key]


def _stride(node: Load, axis: Axis, context: NestContext) -> int | None:
    if context.packable(node.source) and packed_axis(node, axis) is not None:
        return 1
    total = join_divisions(context.offset(node.source, node.indices))
    step = 0
    for term, coefficient in total.terms.items():
        if isinstance(term, Var) and term.axis is axis:
            step += coefficient
        elif axis in axes_of(term) and moves(node, axis):
            inner = _inner_stride(term, axis, context.target.lanes(4))
            if inner is None:
                return None
            step += coefficient * inner
    return step


def _inner_stride(term: Expr, axis: Axis, lanes: int) -> int | None:
    """Of an index that is no sum: x % n and x // n look contiguous or constant to a vector that never crosses a
    multiple of n, and a bound that x is kept within to one on its near side, where ranges are cut."""
    if is_op(term, "mod") or is_op(term, "floordiv"):
        inner, size = term.args
        if not isinstance(size, Const) or int(size.value) < lanes:
            return None
        return linear(inner).terms.get(var(axis)) if is_op(term, "mod") else 0
    if is_op(term, "min") or is_op(term, "max"):
        moving = [a for a in term.args if axis in axes_of(a)]
        bounds = [a for a in term.args if isinstance(a, Const)]
        return linear(moving[0]).terms.get(var(axis)) if len(moving) == len(bounds) == 1 else None
    return None


def packed_axis(node: Load, axis: Axis) -> int | None:
    """The axis of a constant that is indexed by `axis` and by nothing else, and no other axis is."""
    plain = [d for d, i in enumerate(node.indices) if i is var(axis) or (is_op(i, "mod") and i.args[0] is var(axis))]
    used = [
        d
        for d, i in enumerate(node.indices)
        if axis in axes_of(i) and not (is_op(i, "floordiv") and i.args[0] is var(axis))
    ]
    return plain[0] if len(plain) == 1 and plain == used else None


def is_contraction(nest: Nest) -> bool:
    """A sum of products of at least two reads."""
    return nest.is_contraction


def layouts_around(nest: Nest, context: NestContext) -> tuple[tuple[Layout, bool], ...]:
    """All that facts of a contraction depend on beside the nest itself."""
    return tuple([(context.layout(t), t in context.staged) for t in (*nest.reads(), *nest.stores)])


def kind_of(nest: Nest, context: NestContext) -> Hashable:
    """The same for nests that cost the same on tiles of the same size."""
    known = {} if context.kinds is None else context.kinds
    found = known.get(nest)
    if found is None:
        weights = tuple([t in context.constants for t in nest.reads()])
        found = known[nest] = (context.memo.tiles.boxes.number(nest), layouts_around(nest, context), weights)
    return found


def walked_on(nest: Nest, vector: Axis | None, row: Axis | None, context: NestContext) -> dict[Axis, tuple[Axis, ...]]:
    """Axes that register tiles walk on to when they reach the end of the vector axis, or of the row axis."""
    if vector is None or vector not in nest.axes:
        return {}
    taken = (vector,) if row is None else (vector, row)
    memo, key = context.memo, (nest, taken)
    if key not in memo.free:
        memo.free[key] = {a: free for a in taken if (free := free_axes(nest, a, taken))}
    if not memo.free[key]:
        return {}
    layouts = (*key, layouts_around(nest, context))
    if layouts not in memo.runs:
        memo.runs[layouts] = _run_of_one(nest, memo.free[key], context)
    return memo.runs[layouts]


def _run_of_one(nest: Nest, free: Mapping[Axis, Sequence[Axis]], context: NestContext) -> dict[Axis, tuple[Axis, ...]]:
    offsets = [context.offset(n.source, n.indices) for n in nest.loads()]
    offsets += [context.offset(t, nest.place) for t in nest.stores]
    for axis in free:
        if any(context.packable(n.source) and moves(n, axis) for n in nest.loads()):
            continue  # packed in panels of the register tile
        around = axes_around(axis, free[axis], offsets)
        if around:
            return {axis: around}
    return {}
