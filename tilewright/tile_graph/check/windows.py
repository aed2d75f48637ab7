"""The grammar of windows: those that a plan says move do so, in parts of the sizes that it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.expr import Axis, var
from tilewright.tile_graph.algebra.nest import Nest, roots_of
from tilewright.tile_graph.algebra.parts import between_barriers, boxes_at
from tilewright.tile_graph.algebra.propagate import Range, whole
from tilewright.tile_graph.algebra.rolling import moving_boxes
from tilewright.tile_graph.plan.form import Leaf, Tile, TileAxis


def has_windows(kernel: Tile) -> bool:
    return any(h.mode == "rolling" for t in kernel.walk() if isinstance(t, Tile) for h in t.holds)


def check_windows(kernel: Tile, nests: Sequence[Nest]) -> None:
    """Raises ValueError where a window that a Tile holds does not move from part to part, as lowering would see it."""
    by_name = {n.tensor.name: n for n in nests}
    groups = between_barriers(kernel, by_name)
    roots = [root for group in groups for root in roots_of(group)]

    def below(tile: Tile, around: Mapping[str, Range], axes: Mapping[str, TileAxis]) -> None:
        ranges, known = dict(around), {**axes, **{a.name: a for a in tile.axes}}
        loop: Axis | None = None
        for name, size in tile.sizes if tile.over != "warps" else ():
            extent = max(1, known[name].extent)
            outer = ranges.get(name, whole(extent))
            loop = Axis(name, -(-int(outer.size) // size))
            low = outer.low + var(loop) * size if size < outer.size else outer.low
            ranges[name] = Range(simplify(low), size, extent) if size < extent else whole(extent)
        rolling = [by_name[h.tensor] for h in tile.holds if h.mode == "rolling"]
        if rolling:
            if not all(isinstance(n, Leaf) and n.part == "whole" for n in tile.body):
                raise ValueError(f"the step of a window over '{rolling[0].tensor.name}' is leaves alone")
            boxes, limits = boxes_at(groups, ranges, known)
            parts_of_roots = {r: boxes[r] for r in roots}
            moved = {} if loop is None or limits else moving_boxes(nests, parts_of_roots, rolling, loop)[1]
            for nest in rolling:
                if nest not in moved:
                    parts = " ".join(f"{name}:{size}" for name, size in tile.sizes)
                    raise ValueError(f"no window moves over '{nest.tensor.name}' in parts of [{parts}]")
        for node in tile.body:
            if isinstance(node, Tile):
                below(node, ranges, known)

    below(kernel, {}, {})
