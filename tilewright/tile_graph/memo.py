"""What planning has found out about nests, kept while one model is compiled: stages that meet the same nest, and
layers that are alike, share the work.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from tilewright.ir.expr import Axis
from tilewright.tile_graph.plan import Leaf


@dataclass
class Batch:
    """Candidate tiles of one root and what was found out about them: groups that end in the same nest share it."""

    root: Any
    axes: dict[Hashable, Axis] = field(default_factory=dict)  # that tiles begin at
    sizes: dict[Hashable, Any] = field(default_factory=dict)
    reads: dict[Hashable, Any] = field(default_factory=dict)
    seconds: dict[Hashable, Any] = field(default_factory=dict)


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
    last: Batch | None = None

    def batch(self, root: Any) -> Batch:
        """Of one root at a time: its groups are looked at one after the other, and arrays are large."""
        if self.last is None or self.last.root is not root:
            self.last = Batch(root)
        return self.last
