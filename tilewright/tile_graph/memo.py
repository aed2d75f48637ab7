"""What planning has found out about nests, kept while one model is compiled: stages that meet the same nest, and
layers that are alike, share the work.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from tilewright.ir.expr import Axis
from tilewright.tile_graph.nest import Nest
from tilewright.tile_graph.plan import Leaf
from tilewright.tile_graph.propagate import extent_of


@dataclass
class Batch:
    """Candidate tiles of one root and what was found out about them: groups that end in the same nest share it."""

    root: Nest
    origins: tuple[Axis, ...]  # where tiles begin along the root's axes
    sizes: dict[Hashable, Any] = field(default_factory=dict)
    reads: dict[Hashable, Any] = field(default_factory=dict)
    unclipped: dict[Hashable, Any] = field(default_factory=dict)  # reads that may lie beyond the ends of an axis
    arithmetic: dict[Hashable, Any] = field(default_factory=dict)  # seconds of a nest on its part of a tile
    moved: dict[Hashable, Any] = field(default_factory=dict)  # bytes it reads of a tensor

    @classmethod
    def of(cls, root: Nest) -> Batch:
        return cls(root, tuple(Axis(f"origin_{i}", extent_of(a.extent)) for i, a in enumerate(root.axes)))


@dataclass
class Memo:
    """Decisions for one target, by signature: nests that differ in names alone have the same."""

    plans: dict[Hashable, Leaf] = field(default_factory=dict)
    choices: dict[Hashable, Any] = field(default_factory=dict)
    blocks: dict[Hashable, tuple[int, int, int]] = field(default_factory=dict)  # counts of what is written out
    free: dict[Hashable, dict[Axis, list[Axis]]] = field(default_factory=dict)  # axes that may be walked as one
    runs: dict[Hashable, dict[Axis, tuple[Axis, ...]]] = field(default_factory=dict)  # axes that are
    facts: dict[Hashable, Any] = field(default_factory=dict)
    steps: dict[Hashable, tuple[float, ...]] = field(default_factory=dict)  # seconds of a Scan's kernels
    splits: dict[Hashable, int | None] = field(default_factory=dict)  # elements of a part of a product's sum
    seconds: dict[Hashable, Any] = field(default_factory=dict)  # of a contraction on tiles
    last: Batch | None = None

    def batch(self, root: Nest) -> Batch:
        """Of one root at a time: its groups are looked at one after the other, and arrays are large."""
        if self.last is None or self.last.root is not root:
            self.last = Batch.of(root)
        return self.last
