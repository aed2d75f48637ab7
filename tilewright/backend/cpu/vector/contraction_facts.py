"""The facts of a contraction that its cost depends on: how operands move with its loops, and the form of the loops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from tilewright.ir.analysis.simplify import linear, simplify
from tilewright.ir.forms.expr import Axis, Const, Expr, Load, Var, axes_of, is_op, loads, var, walk
from tilewright.target import Target
from tilewright.tile_graph.algebra.nest import Nest, data_cost, moves
from tilewright.tile_graph.algebra.propagate import Size, extent_of
from tilewright.tile_graph.plan.form import Leaf
from tilewright.tile_graph.plan.leaf_form import VectorForm


@dataclass(frozen=True)
class LoopForm:
    """How the loops of a contraction stand: its register tile, which block loop is inside, what a pass covers."""

    rows: Size
    vectors: Size
    row_inside: Size  # row blocks inside vector blocks: a panel of the vector operand stays, rows pass by
    cut: Size  # elements of the cut reduction axis a pass; its whole extent where nothing is cut


@dataclass(frozen=True)
class ReadFacts:
    node: Load
    by_vector: bool
    by_row: bool
    is_run: bool  # contiguous as the loops walk it: one stream for the prefetcher
    is_scattered: bool = False  # every step of the reduction reads another line: the sets of a cache fill unevenly
    row_step: int = 1  # positions of the window from a row to the next
    gathered: float = 0.0  # reads that a vector costs whose lanes are no neighbours in memory; 0 where they are
    row_bytes: int = 0  # from a row of the register tile to the next; 0 where it is not one number
    order: tuple[int, ...] = ()  # its axes as they lie in memory, the innermost first; empty where it is packed
    lines: float = 1.0  # that a vector of it lies on: more than one where windows have vectors begin anywhere

    @cached_property
    def dims(self) -> tuple[tuple[Expr, int], ...]:
        """Its indices with the extents of their axes."""
        source = self.node.source
        return tuple((simplify(i), extent_of(e)) for i, e in zip(self.node.indices, source.shape, strict=True))

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """All axes that it moves along."""
        return tuple(axes_of(*self.node.indices))

    @cached_property
    def is_plain(self) -> bool:
        """Whether each of its dimensions has an axis of its own: it spans no more than is read of it."""
        moving = [index for index, _ in self.dims if not isinstance(index, Const)]
        return all(isinstance(index, Var) for index in moving) and len(set(moving)) == len(moving)


@dataclass(frozen=True)
class ContractionFacts:
    """The facts of a contraction nest that do not depend on sizes."""

    nest: Nest
    target: Target
    vector: Axis | None
    row: Axis | None
    lanes: int
    by_lane: bool  # the broadcast operand is read as vectors and multiplied lane by lane
    window: Axis | None  # a reduction axis written out: neighbouring rows share its reads
    cut_axis: Axis | None
    operands: tuple[ReadFacts, ...]
    # what the factors of a product still compute at every step: operations, and whether rows and vectors each do
    factors: tuple[tuple[int, bool, bool], ...] = ()
    runs: Mapping[Axis, tuple[Axis, ...]] = field(default_factory=dict)  # what register tiles walk on to from an axis
    parts: tuple[int, ...] = ()  # what the vector axis is cut into where windows hang over its ends
    panel: int = 0  # vectors of a row of the panels that an operand lies in; 0 where none does, or may lie otherwise

    @cached_property
    def reduction(self) -> int:
        return prod(max(1, extent_of(a.extent)) for a in self.nest.reduce_axes)

    @cached_property
    def checks(self) -> int:
        """How often a register tile asks whether its window lies inside."""
        if not any(is_op(n, "select") for n in walk(*self.nest.elements)):
            return 0
        innermost = max((extent_of(a.extent) for a in self.nest.reduce_axes), default=1)
        return self.reduction // max(1, innermost if self.window is None else extent_of(self.window.extent))

    @cached_property
    def plain(self) -> list[Axis]:
        along = {b for around in self.runs.values() for b in around}
        return [a for a in self.nest.axes if a is not self.vector and a is not self.row and a not in along]

    @cached_property
    def guarded(self) -> tuple[set[Load], bool]:
        """Reads under conditions, and whether those differ along the vector: every lane then asks for itself."""
        selects = [n for n in walk(*self.nest.elements) if is_op(n, "select")]
        conditions = axes_of(*(n.args[0] for n in selects))
        return {read for n in selects for read in loads(*n.args[1:])}, self.vector in conditions


def form_of(plan: Leaf, facts: ContractionFacts) -> LoopForm:
    """The form a plan gives its nest."""
    nest = facts.nest
    register = {nest.named(a): n for a, n in plan.register}
    rows = register.get(facts.row, 1) if facts.row is not None else 1
    vectors = max(1, register.get(facts.vector, plan.lanes) // plan.lanes) if facts.vector is not None else 1
    order = [nest.named(a) for a in plan.order]
    inside = True
    if facts.row is not None and facts.vector in order:
        inside = order.index(facts.row) > order.index(facts.vector)
    passes = dict(plan.options(VectorForm).cut)
    cut = passes.get(nest.axis_names()[facts.cut_axis]) if facts.cut_axis is not None else None
    whole = extent_of(facts.cut_axis.extent) if facts.cut_axis is not None else 1
    return LoopForm(rows, vectors, inside, cut or whole)


def overlap(operand: ReadFacts, row: Axis | None, window: Axis) -> bool:
    """Whether steps along a window read what other rows read."""
    return any(row in axes and window in axes for axes in map(axes_of, operand.node.indices))


def factors_of(nest: Nest, vector: Axis | None, row: Axis | None) -> tuple[tuple[int, bool, bool], ...]:
    """Operations on the factors of a product that change with the reduction, by whether they change along the row and
    along the vector: such as a normalisation composed into the sum that reads it."""
    if len(nest.elements) != 1 or not is_op(nest.elements[0], "mul"):
        return ()
    found = []
    for factor in nest.elements[0].args:
        moving = [r for r in nest.reduce_axes if r in axes_of(factor)]
        ways = 1 + sum(is_op(n, "select") for n in walk(factor))  # of which a step takes one
        count = -(-data_cost(factor, along=moving[-1]) // ways) if moving else 0
        if count:
            axes = axes_of(factor)
            found.append((count, row in axes, vector in axes))
    return tuple(found)


def operands_of(
    nest: Nest, vector: Axis | None, row: Axis | None, is_run: Mapping[Load, bool], is_scattered: Mapping[Load, bool],
    gathered: Mapping[Load, float], row_bytes: Mapping[Load, int], order: Mapping[Load, tuple[int, ...]],
    target: Target,
) -> tuple[ReadFacts, ...]:  # fmt: skip
    found = []
    for node in nest.element_loads:
        by_row = row is not None and moves(node, row)
        step = max((abs(linear(i).terms.get(var(row), 0)) for i in node.indices), default=1) if row is not None else 1
        by_vector = vector is not None and moves(node, vector)
        anywhere = any(vector in met and any(r in met for r in nest.reduce_axes) for met in map(axes_of, node.indices))
        lines = 1 + (target.vector_bytes - node.source.dtype.bytes) / target.nearest.transaction if anywhere else 1.0
        found.append(ReadFacts(node, by_vector, by_row, is_run[node], is_scattered[node], max(1, step), gathered[node],
                               row_bytes.get(node, 0), order.get(node, ()), lines))  # fmt: skip
    return tuple(found)
