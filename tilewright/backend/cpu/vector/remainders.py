"""What a vector axis leaves over beyond whole vectors, computed in whole vectors: no loop of its own for a few lanes.

Panels are padded to whole vectors, so that lanes beyond the end may be read, and need only not be stored. Where
operands lie side by side in memory instead, the last block begins earlier: some results are computed, and stored,
twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tilewright.ir.analysis.simplify import Linear, join_divisions, linear, simplify
from tilewright.ir.forms.expr import Axis, Expr, Load, Var, loads, lt, replace_nodes, substitute, var
from tilewright.ir.forms.loops import Memory
from tilewright.ir.forms.tensor import Tensor
from tilewright.lower.access import Access
from tilewright.lower.blocks import Remainder
from tilewright.lower.register_block import RegisterBlock
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import Range, extent_of


@dataclass(frozen=True)
class AxisGroup:
    """A group of an axis read at axis // size and axis % size: lanes beyond its end are not the next one's first."""

    axis: Axis
    size: int
    number: Axis  # stands for axis // size
    place: Axis  # and for axis % size
    low: Expr  # where it begins

    @staticmethod
    def of(axis: Axis, size: int, low: Expr) -> AxisGroup:
        return AxisGroup(axis, size, Axis("group", extent_of(axis.extent) // size), Axis("place", size), low)

    def elements(self, elements: Sequence[Expr]) -> list[Expr]:
        now = {var(self.axis) // self.size: var(self.number), var(self.axis) % self.size: var(self.place)}
        return [replace_nodes(e, now) for e in elements]

    def places(self, at: Mapping[Axis, Expr]) -> dict[Axis, Expr]:
        """Where all axes are, from where the axis itself is."""
        here = {self.number: simplify(self.low // self.size), self.place: simplify(at[self.axis] - self.low)}
        return {**at, **here}


def are_whole_groups(extent: Range, size: int) -> bool:
    """Whether a range is several groups of this size from the beginning of one. What a window reaches over its tile's
    ends may begin inside of one: it is then read element by element, wherever each of them lies."""
    low = linear(extent.low)
    is_aligned = low.constant % size == 0 and all(c % size == 0 for c in low.terms.values())
    return is_aligned and int(extent.size) > size and int(extent.size) % size == 0 and extent.extent % size == 0


def remainder_form(elements: Sequence[Expr], places: Mapping[Axis, Expr], inside: Axis, access: Access) -> Remainder:
    """How a last block may end whose elements along `inside` are read at these places. Elements alone are asked: an
    epilogue sees only what is stored."""
    found = [_way(n, places, inside, access) for n in loads(*elements)]
    ways = {way for way in found if way is not None}
    return ways.pop() if len(ways) == 1 else Remainder.LANES


def _way(node: Load, places: Mapping[Axis, Expr], inside: Axis, access: Access) -> Remainder | None:
    """For one read; None where all lanes read the same."""
    assert isinstance(node.source, Tensor)
    place = access.read[node.source]
    indices = [simplify(i) for i in place.indices(tuple(substitute(i, places) for i in node.indices))]
    if not any(inside in i.axes for i in indices):
        return None
    if any(i.reads for i in node.indices):
        return Remainder.LANES
    *outer, last = indices
    step = linear(last)
    plain = all(isinstance(t, Var) or inside not in t.axes for t in step.terms) and step.terms.get(var(inside)) == 1
    is_panel = place.layout.order[-1].size is not None and not place.lows
    if is_panel and plain and not any(inside in i.axes for i in outer):
        return Remainder.PADDED if place.buffer.memory is Memory.GLOBAL else Remainder.LANES
    total = Linear({}, 0)
    for index, size in zip(indices, place.buffer.shape, strict=True):
        total = total.scaled(extent_of(size)).plus(linear(index))
    together = join_divisions(total)
    is_run = all(isinstance(t, Var) or inside not in t.axes for t in together.terms)
    is_run = is_run and together.terms.get(var(inside)) == 1  # whole vectors of what lies apart are read lane by lane
    return Remainder.EARLIER if is_run and not is_panel else Remainder.LANES


def is_everywhere(nest: Nest, access: Access) -> bool:
    """Whether all that a nest touches lies in memory for other tiles too, and none of it is this kernel's own: tiles
    may then compute a few results of each other, which are the same.

    Two workers store these, perhaps at the same time: a race in which every order gives the same bytes. Neither reads
    what the other stores: a kernel's results never lie in the memory of what it reads (a tensor is alive to the end of
    the kernel that reads it last), nothing is added to what is there (sums in passes and steps of a Scan are not taken
    this way), and vectors are stored whole, not by reading their neighbours. An element is summed up in the same order
    in whichever block it is. Whoever reads it finds the same before and after the second store."""
    if any(t in access.write for t in nest.reads()):
        return False
    own = {p.buffer for t in nest.stores for p in access.write[t]}
    if any(p.buffer in own for t, places in access.write.items() if t not in nest.stores for p in places):
        return False  # what lies within a result is in its place for this tile alone
    touched = [access.read[t] for t in nest.reads()] + [p for t in nest.stores for p in access.write[t]]
    return all(place.buffer.memory is Memory.GLOBAL and not place.lows for place in touched)


def reads_own_result(nest: Nest, access: Access) -> bool:
    """Whether a nest reads what lies where it stores: computed again, such an element would be another."""
    own = {p.buffer for t in nest.stores for p in access.write[t]}
    return any(access.read[t].buffer in own for t in nest.reads())


def kept_parts(block: RegisterBlock, across: Axis | None, kept: int) -> list[RegisterBlock]:
    """The blocks that store the first `kept` elements of a block along its vector axis: whole vectors, then lanes."""
    assert block.lane is not None
    lanes = extent_of(block.lane.extent)
    whole, rest = divmod(kept, lanes)
    result = []
    if whole and across is not None:
        result.append(_part(block, {across: (0, whole)}))
    if rest:
        moved = {} if across is None else {across: (whole, 1)}
        result.append(_part(block, {**moved, block.lane: (0, rest)}))
    return result


def whole_lanes(part: RegisterBlock, lanes: int) -> tuple[RegisterBlock, Expr | None]:
    """A part of a block with all lanes of its registers, and the condition under which a lane is one of the part's;
    None where all are."""
    cut = part.lane or (part.unrolled[-1] if part.cut_lane else None)
    if cut is None or cut.extent == lanes:
        return part, None
    lane = Axis(cut.name, lanes)
    env = {a: simplify(substitute(v, {cut: var(lane)})) for a, v in part.env.items()}
    unrolled = tuple(a for a in part.unrolled if a is not cut)
    return replace(part, env=env, unrolled=unrolled, lane=lane, cut_lane=False), lt(var(lane), cut.extent)


def _part(block: RegisterBlock, taken: Mapping[Axis, tuple[int, int]]) -> RegisterBlock:
    """The block's positions from a first one on along some of its axes, and so many; a single lane is no vector."""
    axes = {axis: Axis(axis.name, count) for axis, (_, count) in taken.items()}
    starts = {axes[axis]: first for axis, (first, _) in taken.items() if first}
    moved = {axis: var(axes[axis]) + first if first else var(axes[axis]) for axis, (first, _) in taken.items()}
    env = {a: simplify(substitute(v, moved)) for a, v in block.env.items()}
    unrolled = tuple(axes.get(a, a) for a in block.unrolled)
    lane = axes.get(block.lane, block.lane) if block.lane is not None else None
    single = lane is not None and lane.extent == 1
    if lane is not None and single:
        unrolled, lane = (*unrolled, lane), None
    return RegisterBlock(env, unrolled, lane, {**block.starts, **starts}, cut_lane=single)
