"""Windows that move along an axis: of what neighbouring parts both need, the overlap is kept instead of computed again.

A Tile walks parts of an axis in order. A nest whose readers look beyond their own part (the taps of a convolution) is
computed only where the window is new; its last elements are copied to the front for the part that follows, and the
overlap of the first part is computed before the walk begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewright.ir.analysis.simplify import linear, simplify
from tilewright.ir.forms import bounds
from tilewright.ir.forms.expr import Axis, Const, Expr, Load, Var, axes_of, const, maximum, minimum, substitute, var
from tilewright.tile_graph.algebra.memo import Tiles
from tilewright.tile_graph.algebra.nest import Nest, roots_of
from tilewright.tile_graph.algebra.propagate import Box, Known, Range, extent_of, propagate


@dataclass(frozen=True)
class RollingWindow:
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


def window_of(box: Box, loop: Axis) -> RollingWindow | None:
    """How an unclipped box moves with a loop; None where it does not, or not by whole steps along one axis alone."""
    found: RollingWindow | None = None
    for dim, part in enumerate(box):
        advance = linear(part.low).terms.get(var(loop))
        if advance is None:
            continue
        if found is not None or advance < 1 or int(part.size) >= part.extent:
            return None
        found = RollingWindow(dim, part.low, int(part.size), advance, part.extent)
    if found is None or found.overlap < 0 or found.advance < found.overlap:
        return None
    # what lies before the axis is never new
    return found if bounds.lower(found.new().low) >= 0 and bounds.lower(found.kept().low) >= 0 else None


def moving_boxes(
    nests: Sequence[Nest], roots: Mapping[Nest, Box], rolling: Sequence[Nest], loop: Axis
) -> tuple[dict[Nest, Box], dict[Nest, RollingWindow]]:
    """What every nest computes in one step of a loop, and the windows of those that compute only what is new; a nest
    that is to have one and cannot has none."""
    clipped, free = dict(roots), dict(roots)
    windows: dict[Nest, RollingWindow] = {}
    boxes, plain = propagate(nests, clipped), propagate(nests, free, clip=False)
    for nest in sorted(rolling, key=nests.index, reverse=True):
        window = window_of(_chosen(plain[nest], boxes[nest], loop), loop)
        if window is None:
            continue
        windows[nest] = window
        clipped[nest] = window.of(boxes[nest], window.new())
        free[nest] = window.of(boxes[nest], Range(simplify(window.low + window.overlap), window.advance, window.extent))
        boxes, plain = propagate(nests, clipped), propagate(nests, free, clip=False)
    return {n: clipped.get(n) or _inside(_chosen(plain[n], boxes[n], loop), loop) for n in nests}, windows


def _chosen(plain: Box, clipped: Box, loop: Axis) -> Box:
    """A box unclipped where it moves with the loop: clipped it would be moved back at the last step, and then reach
    before what windows still have."""
    return tuple(p if loop in axes_of(p.low) else c for p, c in zip(plain, clipped, strict=True))


def _inside(box: Box, loop: Axis) -> Box:
    """The box with what begins beyond the end of its axis as nothing at the end."""
    return tuple(
        Range(simplify(minimum(p.low, p.extent)), p.size, p.extent)
        if loop in axes_of(p.low) and bounds.upper(p.low) > p.extent else p for p in box
    )  # fmt: skip


@dataclass(frozen=True)
class Overlap:
    """A nest whose readers share rows from one part of a root's axis to the next."""

    nest: Nest
    dim: int
    axis: int  # of the root
    scale: int  # rows of the nest a row of the root
    rows: int  # that neighbouring parts share where a part is one element along all other axes, else at least

    def of(self, box: Box, part: Range) -> Box:
        """The nest's box with another part of its moving axis."""
        return tuple(part if d == self.dim else other for d, other in enumerate(box))


_MOST_WINDOWS = 4


_AT = Axis("at", 1)  # where tiles begin along axes that windows do not move along


def find_overlaps(nests: Sequence[Nest], tiles: Tiles | None = None) -> tuple[Overlap, ...]:
    """Nests of a group that windows can move over, the last first, along the outermost axis of the root that makes
    them move; none where not all that overlaps can be computed once. `tiles` is what is known already."""
    root = nests[-1]
    inside = {t for n in nests for t in n.stores}
    moved = (i for n in nests for x in n.loads() if x.source in inside for i in x.indices)
    if all(isinstance(i, Var | Const) for i in moved) or len(roots_of(nests)) > 1:
        return ()
    for number, axis in enumerate(root.axes):
        if extent_of(axis.extent) < 2:
            continue
        taken: list[Overlap] = []
        while len(taken) <= _MOST_WINDOWS:
            found = _overlaps(nests, number, taken, tiles or Tiles())
            if not found:
                break
            # computed once a row, the last of them may still leave others that overlap
            taken.append(found[0])
        if taken and not found:
            return tuple(taken)
    return ()


def _overlaps(nests: Sequence[Nest], number: int, once: Sequence[Overlap], tiles: Tiles) -> list[Overlap]:
    """Nests that neighbouring rows of the root share parts of, the last first; with some that are computed once."""
    root = nests[-1]
    origin = tiles.origins(root)[number]
    box = tuple(Range(var(origin if i == number else _AT), 1, extent_of(a.extent)) for i, a in enumerate(root.axes))
    fixed = {root: box}
    boxes = propagate(nests, fixed, known=tiles.boxes, clip=False)
    for other in once:
        part = boxes[other.nest][other.dim]
        new = Range(simplify(part.low + other.rows), other.scale, part.extent)
        fixed[other.nest] = other.of(boxes[other.nest], new)
        boxes = propagate(nests, fixed, known=tiles.boxes, clip=False)
    found = []
    for nest in reversed(nests[:-1]):
        if nest in fixed:
            continue
        for dim, part in enumerate(boxes[nest]):
            scale = linear(part.low).terms.get(var(origin))
            if scale is not None and scale > 0 and scale < int(part.size) < part.extent:
                found.append(Overlap(nest, dim, number, scale, int(part.size) - scale))
                break
    return found


def step_boxes(
    nests: Sequence[Nest], box: Box, overlaps: Sequence[Overlap], known: Known,
    limits: Mapping[Nest, Mapping[Axis, Range]] | None = None,
) -> tuple[dict[Nest, Box], dict[Nest, Box]]:  # fmt: skip
    """What every nest computes for a part of the root, and what is seen of it: a step of a window computes what is new
    of it, and sees all of it."""
    root = nests[-1]
    limits = limits or {}
    boxes = propagate(nests, box, limits, known)
    seen = dict(boxes)
    fixed = {root: box}
    for overlap in overlaps:
        window = boxes[overlap.nest]
        part = window[overlap.dim]
        added = Range(part.low, known.size(box[overlap.axis].size * overlap.scale), part.extent)
        fixed[overlap.nest] = overlap.of(window, added)
        boxes = propagate(nests, fixed, limits, known)
        seen = {**boxes, **{o.nest: seen[o.nest] for o in overlaps}, overlap.nest: window}
    return boxes, seen


def moves(nests: Sequence[Nest], sizes: Sequence[int], step: int, overlaps: Sequence[Overlap]) -> bool:
    """Whether every window moves on in tiles of these sizes that are walked in such steps: the windows that lowering
    makes, wherever a tile begins. What neighbouring parts share depends on all axes of the root that reach the moving
    one, so that sizes decide it."""
    root, moving = nests[-1], overlaps[0].axis
    box = []
    loop = Axis("step", -(-sizes[moving] // step))
    for number, (axis, size) in enumerate(zip(root.axes, sizes, strict=True)):
        extent = max(1, extent_of(axis.extent))
        low = var(Axis(f"tile_{number}", -(-extent // size))) * size if size < extent else const(0)
        if number == moving:
            low, size = low + var(loop) * step, step
        box.append(Range(simplify(low), size, extent))
    _, windows = moving_boxes(nests, {root: tuple(box)}, [o.nest for o in overlaps], loop)
    return len(windows) == len(overlaps)


def reads_of(nest: Nest, nests: Sequence[Nest]) -> list[Nest]:
    """The nests that lead to one, and it itself, in order."""
    wanted = {nest}
    for other in reversed(nests):
        if any(isinstance(x, Load) and x.source in other.stores for n in wanted for x in n.loads()):
            wanted.add(other)
    return [n for n in nests if n in wanted]
