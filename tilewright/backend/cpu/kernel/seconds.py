"""What a kernel takes on cores: arithmetic and movement hide each other but for a part, tiles are shared out evenly."""

from __future__ import annotations

from tilewright.backend.cpu.constants import BEYOND_A_RUN, EXPOSED, TILE_SECONDS
from tilewright.backend.terms import KernelWork, Terms, hidden, level_terms
from tilewright.target import Target
from tilewright.tile_graph.algebra.propagate import Size
from tilewright.tile_graph.traffic.touch import least


def cpu_terms(work: KernelWork, target: Target) -> Terms:
    tiles = work.tiles
    active = least(tiles, target.units)
    waves = -(-tiles // target.units) * active / tiles  # of the time that even shares would take
    compute = waves * sum((leaf.busy * times for leaf, times in work.leaves), 0.0) / active
    levels = level_terms(work.found, target, active, BEYOND_A_RUN)
    moving: Size = sum((level.seconds for level in levels), 0.0)
    starting = target.kernel_cost + waves * tiles / active * TILE_SECONDS
    waits = work.starts * starting + work.barriers * target.kernel_cost
    return Terms(hidden(compute, moving, EXPOSED) + waits, compute, levels, waits)
