"""What kernels take on multiprocessors: blocks that share one add up where they keep it busy, and overlap where they
wait; the level that all share and device memory serve all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.backend.gpu.constants import EXPOSED, MEETING_CYCLES, MOST_RESIDENT
from tilewright.backend.terms import FoundBytes, KernelWork, Terms, hidden, level_terms
from tilewright.target import Target
from tilewright.tile_graph.algebra.propagate import Size
from tilewright.tile_graph.traffic.touch import least, most


def gpu_terms(works: Sequence[KernelWork], target: Target) -> Terms:
    """Kernels of one launch: one start, blocks of all of them at a time."""
    busy: Size = 0.0
    waiting: Size = 0.0
    blocks: Size = 0
    for work in works:
        own, alone = _unit_seconds(work, target)
        busy, waiting, blocks = busy + own, most(waiting, alone), blocks + work.tiles
    active = least(blocks, target.units)
    uneven = -(-blocks // target.units) * active / blocks  # of the time that even shares would take
    found = [FoundBytes(sum((w.found[p].read for w in works), 0.0), sum((w.found[p].written for w in works), 0.0))
             for p in range(len(target.levels))]  # fmt: skip
    levels = tuple(replace(term, seconds=term.seconds * uneven) for term in level_terms(found, target, active))
    barrier = dict(target.barriers).get("grid", target.kernel_cost)
    starts = max(work.starts for work in works)
    waits = starts * start_seconds(target) + sum(work.barriers for work in works) * barrier
    compute = most(busy, waiting)
    moving: Size = sum((level.seconds for level in levels), 0.0)
    return Terms(hidden(compute, moving, EXPOSED) + waits, compute, levels, waits)


def start_seconds(target: Target) -> float:
    """From a kernel's end to where the next computes."""
    return dict(target.barriers).get("dependent_launch", target.kernel_cost)


def _unit_seconds(work: KernelWork, target: Target) -> tuple[Size, Size]:
    """Seconds of the busiest multiprocessor in all runs, as it is kept busy, and as its blocks wait."""
    runs = max(1, work.starts)
    blocks = work.tiles * runs
    meeting = MEETING_CYCLES / target.clock
    busy: Size = 0.0
    alone: Size = -meeting
    resident = min(MOST_RESIDENT, target.resident_threads // work.threads)
    for leaf, times in work.leaves:
        busy = busy + leaf.busy * times / blocks
        alone = alone + (leaf.alone + meeting) * times / blocks
        resident = min(resident, leaf.resident or resident)
    alive = -(-work.tiles // target.units)
    turns = -(-alive // max(1, resident))
    return runs * alive * busy, runs * most(turns * alone, (alive - 1) * busy + alone)
