"""What a kernel takes on cores: arithmetic and movement hide each other but for a part, tiles are shared out evenly."""

from __future__ import annotations

from tilewright.backend.terms import Terms, Work, hidden, level_terms
from tilewright.target import Target
from tilewright.tile_graph.algebra.propagate import Size
from tilewright.tile_graph.traffic.touch import least

_EXPOSED = 0.5  # of what moves, or of the arithmetic beside it, that is not hidden
# Lines that prefetchers bring for nothing where a run ends, or do not bring in time where one begins.
_BEYOND_A_RUN = 2
_TILE = 60e-9  # seconds to start a tile: a call, a few divisions


def cpu_terms(work: Work, target: Target) -> Terms:
    tiles = work.tiles
    active = least(tiles, target.units)
    waves = -(-tiles // target.units) * active / tiles  # of the time that even shares would take
    compute = waves * sum((leaf.busy * times for leaf, times in work.leaves), 0.0) / active
    levels = level_terms(work.found, target, active, _BEYOND_A_RUN)
    moving: Size = sum((level.seconds for level in levels), 0.0)
    waits = work.starts * (target.kernel_cost + waves * tiles / active * _TILE) + work.barriers * target.kernel_cost
    return Terms(hidden(compute, moving, _EXPOSED) + waits, compute, levels, waits)
