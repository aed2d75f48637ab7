"""What planning has found out about nests, kept while one model is compiled: stages that meet the same nest, and
layers that are alike, share the work.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from tilewright.ir.analysis.simplify import Linear
from tilewright.ir.forms.expr import Axis
from tilewright.ir.forms.tensor import Layout
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import Known, extent_of
from tilewright.tile_graph.algebra.rows import Rows
from tilewright.tile_graph.plan.form import Leaf

_MOST_BYTES = 64 << 20  # of arrays with an entry a candidate


@dataclass
class Tiles:
    """Candidate tiles and what was found out about nests on parts of them, for all groups that cut nests alike."""

    sizes: dict[Hashable, Any] = field(default_factory=dict)  # of a root's tiles
    boxes: Known = field(default_factory=Known)
    seconds: dict[Hashable, Any] = field(default_factory=dict)  # of a contraction on its part of a tile
    contractions: dict[Hashable, Rows] = field(default_factory=dict)  # the same by tile, for batches that overlap
    arithmetic: dict[Hashable, Any] = field(default_factory=dict)  # the same of any nest, epilogue included
    prefetched: dict[Hashable, Any] = field(default_factory=dict)  # of its weights that are asked for early
    moved: dict[Hashable, Any] = field(default_factory=dict)  # bytes it reads of a tensor
    read: dict[Hashable, Any] = field(default_factory=dict)  # seconds that those take
    stored: dict[Hashable, Any] = field(default_factory=dict)  # bytes it writes of one, and what it loses by that
    grids: dict[Hashable, Any] = field(default_factory=dict)  # how many tiles there are of a size, and for whom
    _origins: dict[tuple[int, int], Axis] = field(default_factory=dict)

    def origins(self, root: Nest) -> tuple[Axis, ...]:
        """Where tiles begin along the axes of a root; the same for all roots of a shape."""
        keys = [(i, extent_of(a.extent)) for i, a in enumerate(root.axes)]
        return tuple([self._origins.setdefault(key, Axis(f"origin_{key[0]}", key[1])) for key in keys])

    def block(self, extent: int) -> Axis:
        """Where blocks of a streamed axis begin."""
        return self._origins.setdefault((-1, extent), Axis("block", extent))


@dataclass
class Memo:
    """Decisions for one target, by signature: nests that differ in names alone have the same."""

    plans: dict[Hashable, Leaf] = field(default_factory=dict)
    choices: dict[Hashable, Any] = field(default_factory=dict)
    replanned: dict[Hashable, Any] = field(default_factory=dict)  # kernels with leaves planned again for their tiles
    inner: dict[Hashable, Any] = field(default_factory=dict)  # and with tiles inside those
    suited: dict[Hashable, list[Leaf]] = field(default_factory=dict)  # leaves for a nest's part of a tile
    tensors: dict[Hashable, int] = field(default_factory=dict)  # numbers that stand for facts of tensors in keys
    alone: dict[Hashable, Any] = field(default_factory=dict)  # the same of nests by themselves, by plan
    ahead: dict[Hashable, Any] = field(default_factory=dict)  # what the nests of a kernel ask for early and keep near
    free: dict[Hashable, dict[Axis, list[Axis]]] = field(default_factory=dict)  # axes that may be walked as one
    runs: dict[Hashable, dict[Axis, tuple[Axis, ...]]] = field(default_factory=dict)  # axes that are
    facts: dict[Hashable, Any] = field(default_factory=dict)
    offsets: dict[Hashable, Linear] = field(default_factory=dict)  # of what lies at indices of a tensor, in storage
    strides: dict[Hashable, int | None] = field(default_factory=dict)  # between neighbours that a nest reads
    steps: dict[Hashable, tuple[float, ...]] = field(default_factory=dict)  # seconds of a Scan's kernels
    streamable: dict[Hashable, bool] = field(default_factory=dict)  # whether nests can be streamed as one kernel
    splits: dict[Hashable, int | None] = field(default_factory=dict)  # elements of a part of a product's sum
    tiles: Tiles = field(default_factory=Tiles)
    layouts: dict[Layout, Layout] = field(default_factory=dict)

    def layout(self, layout: Layout) -> Layout:
        """The one layout that is equal: those are compared fast."""
        return self.layouts.setdefault(layout, layout)

    def trim(self) -> None:
        """Forgets what is known of tiles where it is much; between two groups, when nobody has its arrays."""
        boxes = self.tiles.boxes
        if boxes.held > _MOST_BYTES:
            self.tiles = Tiles(boxes=Known(forms=boxes.forms, numbers=boxes.numbers))
