"""Windows that move along an axis: of what neighbouring parts both need, the overlap is kept instead of computed again.

A Tile walks parts of an axis in order. A nest whose readers look beyond their own part (the taps of a convolution) is
computed only where the window is new; its last elements are copied to the front for the part that follows, and the
overlap of the first part is computed before the walk begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.ir import bounds
from tilewright.ir.expr import Axis, Const, Expr, Load, Var, const, maximum, minimum, substitute, var
from tilewright.ir.simplify import linear, simplify
from tilewright.tile_graph.nest import Nest, roots_of
from tilewright.tile_graph.propagate import Box, Range, extent_of, propagate, unclipped


@dataclass(frozen=True)
class Window:
    """The part of a nest's axis that the readers of one step need, and how it moves from step to step."""

    dim: int  # of the nest's axes
    low: Expr  # of the whole window; may lie outside the axis, where nothing is read
    size: int
    advance: int
    extent: int

    @property
    def overlap(self) -> int:
        return self.size - self.advance

    def of(self, box: Box, part: Range) -> Box:
        return tuple(part if d == self.dim else other for d, other in enumerate(box))

    def whole(self) -> Range:
        return Range(self.low, self.size, self.extent)

    def new(self) -> Range:
        """What this step adds: nothing where a last short step needs only what lies outside the axis."""
        return Range(self._inside(self.low + self.overlap), self.advance, self.extent)

    def first(self, loop: Axis) -> Range:
        """What the first step shares with the one before it, which there is not."""
        return Range(simplify(maximum(self.at_first(loop), 0)), self.overlap, self.extent)

    def at_first(self, loop: Axis) -> Expr:
        return simplify(substitute(self.low, {loop: const(0)}))

    def kept(self) -> Range:
        """What the next step needs again."""
        return Range(self._inside(self.low + self.advance), self.overlap, self.extent)

    def _inside(self, low: Expr) -> Expr:
        low = simplify(low)
        return low if bounds.upper(low) <= self.extent else simplify(minimum(low, self.extent))


def window_of(box: Box, loop: Axis) -> Window | None:
    """How a box moves with a loop; None where it does not, or not by whole steps along one axis alone."""
    found: Window | None = None
    for dim, part in enumerate(box):
        low = unclipped(part)
        advance = linear(low).terms.get(var(loop))
        if advance is None:
            continue
        if found is not None or advance < 1 or int(part.size) >= part.extent:
            return None
        found = Window(dim, low, int(part.size), advance, part.extent)
    if found is None or found.overlap < 0 or found.advance < found.overlap:
        return None
    # what lies before the axis is never new
    return found if bounds.lower(found.new().low) >= 0 and bounds.lower(found.kept().low) >= 0 else None


@dataclass(frozen=True)
class Overlap:
    """A nest whose readers share rows from one part of a root's axis to the next."""

    nest: Nest
    dim: int
    axis: int  # of the root
    scale: int  # rows of the nest a row of the root
    rows: int  # that neighbouring parts share


def find_overlap(nests: Sequence[Nest]) -> Overlap | None:
    """The one nest of a group that a window can move over, along the outermost axis of the root that makes it move."""
    root = nests[-1]
    inside = {t for n in nests for t in n.stores}
    moved = (i for n in nests for x in n.loads() if x.source in inside for i in x.indices)
    if all(isinstance(i, Var | Const) for i in moved) or len(roots_of(nests)) > 1:
        return None
    for number, axis in enumerate(root.axes):
        extent = extent_of(axis.extent)
        if extent < 2:
            continue
        found = _overlaps(nests, number, None)
        if not found:
            continue
        # computed once a row, the last of them must not leave another that overlaps
        last = found[0]
        if not _overlaps(nests, number, last):
            return last
    return None


def _overlaps(nests: Sequence[Nest], number: int, once: Overlap | None) -> list[Overlap]:
    """Nests that neighbouring rows of the root share parts of, the last first; with one that is computed once a row."""
    root = nests[-1]
    origin = Axis("origin", extent_of(root.axes[number].extent))
    box = tuple(
        Range(var(origin), 1, extent_of(a.extent)) if i == number else Range(var(Axis("at", 1)), 1, extent_of(a.extent))
        for i, a in enumerate(root.axes)
    )
    boxes = propagate(nests, box)
    if once is not None:
        part = boxes[once.nest][once.dim]
        one = Range(unclipped(part), once.scale, part.extent)
        new = tuple(one if d == once.dim else p for d, p in enumerate(boxes[once.nest]))
        boxes = propagate(nests, {root: box, once.nest: new})
    found = []
    for nest in reversed(nests[:-1]):
        for dim, part in enumerate(boxes[nest]):
            scale = linear(unclipped(part)).terms.get(var(origin))
            if scale is not None and scale > 0 and scale < int(part.size) < part.extent:
                found.append(Overlap(nest, dim, number, scale, int(part.size) - scale))
                break
    return found


def reads_of(nest: Nest, nests: Sequence[Nest]) -> list[Nest]:
    """The nests that lead to one, and it itself, in order."""
    wanted = {nest}
    for other in reversed(nests):
        if any(isinstance(x, Load) and x.source in other.stores for n in wanted for x in n.loads()):
            wanted.add(other)
    return [n for n in nests if n in wanted]
