"""What kernels take on multiprocessors: blocks that share one add up where they keep it busy, and overlap where they
wait; the level that all share and device memory serve all of them at once."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.backend.terms import Found, Terms, Work, hidden, level_terms
from tilewright.target import Target
from tilewright.tile_graph.plan.form import Tile

_EXPOSED = 0.3  # of what moves, or of the arithmetic beside it, that is not hidden
_MEETING = 100  # cycles from the last thread that ends a leaf to where all are at work in the next
_MOST_RESIDENT = 8  # blocks that share a multiprocessor, as their registers allow


def gpu_terms(works: Sequence[Work], target: Target) -> Terms:
    """Kernels of one launch: one start, blocks of all of them at a time."""
    per_unit, alone = 0.0, 0.0
    blocks = sum(work.kernel.tiles for work in works)
    for work in works:
        busy, waiting = _unit_seconds(work, target)
        per_unit, alone = per_unit + busy, max(alone, waiting)
    active = min(blocks, target.units)
    uneven = -(-blocks // target.units) * active / blocks
    found = [Found(sum(w.found[p].read for w in works), sum(w.found[p].written for w in works))
             for p in range(len(target.levels))]  # fmt: skip
    levels = level_terms(found, target, active)
    moving = sum(level.seconds for level in levels) * uneven
    starts = max(work.starts for work in works)
    barrier = dict(target.barriers).get("grid", target.kernel_cost)
    waits = starts * start_seconds(target) + sum(w.barriers for w in works) * barrier
    at_work = max(per_unit, alone)
    return Terms(hidden(at_work, moving, _EXPOSED) + waits, at_work, levels, waits)


def start_seconds(target: Target) -> float:
    """From a kernel's end to where the next computes."""
    return dict(target.barriers).get("dependent_launch", target.kernel_cost)


def _unit_seconds(work: Work, target: Target) -> tuple[float, float]:
    """Seconds of the busiest multiprocessor, as it is kept busy, and as its blocks wait."""
    blocks = work.kernel.tiles * work.starts if work.starts else work.kernel.tiles
    steps = max(1, work.starts)
    busy = sum(float(leaf.busy) * times for leaf, times in work.leaves) / blocks
    meeting = _MEETING / target.clock
    alone = sum((float(leaf.alone) + meeting) * times for leaf, times in work.leaves) / blocks - meeting
    (lanes,) = (n for n in work.kernel.body if isinstance(n, Tile) and n.over == "lanes")
    resident = min([_MOST_RESIDENT, target.resident_threads // lanes.count,
                    *(leaf.resident for leaf, _ in work.leaves if leaf.resident)])  # fmt: skip
    alive = -(-work.kernel.tiles // target.units)
    turns = -(-alive // max(1, resident))
    return steps * alive * busy, steps * max(turns * alone, (alive - 1) * busy + alone)
