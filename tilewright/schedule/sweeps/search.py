"""Which computes are one sweep, and in which parts: the outermost level of the partition, that of a host's memory.

As nearer levels do it: a group of computes is possible if one part of its results, with all it needs, fits the level;
what passes between groups goes through the level beyond. The order of computes is cut into sweeps by dynamic
programming. For every end of a sweep and every grid of parts one way back through the computes tells what a sweep from
any beginning would hold, bring and compute; the larger a sweep, the less is brought, and the more is computed twice in
halos. Seconds decide, of copies and of kernels together: copies go on while a part is computed, but how well they hide
is the host's affair, whose memory others use too, and what is not copied need not be hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf, prod

from tilewright.ir.analysis.pieces import place_bytes
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, expressions, reads
from tilewright.ir.forms.tensor import Tensor, extents
from tilewright.schedule.constants import HALVED
from tilewright.schedule.sweeps.grid import Grid, grains, grid_of, main_of
from tilewright.schedule.sweeps.reach import Places, Reach, both
from tilewright.target import Target
from tilewright.tile_graph.algebra.nest import data_cost
from tilewright.tile_graph.algebra.propagate import extent_of

_DIMENSIONS = 2  # that are cut at once
_BEYOND = 16  # times as many parts as will do: those of fewer rows or columns, whose halos are larger, are no better
_STARTED = 24  # ends of sweeps that are looked at, those that least passes


@dataclass(frozen=True)
class Chosen:
    """A sweep of the computes from `first` up to `end`."""

    first: int
    end: int
    grid: Grid


@dataclass(frozen=True)
class _Found:
    seconds: float
    sweeps: tuple[Chosen, ...]


@dataclass(frozen=True)
class _Way:
    """What a sweep takes for one of its parts, in bytes and seconds."""

    into: int
    back: int  # of all parts together
    held: int
    busy: float
    computes: int


@dataclass(frozen=True)
class PartRoom:
    """So many bytes for a part, with `slots` for what goes in and out of it: two where one is copied while the other
    is read or written. Where the level beyond is the same memory (`keeps`), what passes between sweeps counts too, and
    weights, which are then pages of a file, do not."""

    bytes: float
    slots: int
    keeps: bool


def choose_sweeps(program: Program, room: PartRoom, target: Target) -> tuple[Chosen, ...] | None:
    """The sweeps that are predicted to take least; None where there are none that fit."""
    if any(not isinstance(e, int) for t in program.tensors() for e in t.shape):
        return None
    return _Search(program, room, target).run() if program.computes else None


@dataclass
class _Search:
    program: Program
    room: PartRoom
    target: Target
    reach: Reach = field(default_factory=Reach)
    slots: dict[Compute, float] = field(default_factory=dict)  # by compute, of one element

    def __post_init__(self) -> None:
        self.computes = self.program.computes
        self.maker = {t: number for number, c in enumerate(self.computes) for t in c.outputs}
        self.last = {t: number for number, c in enumerate(self.computes) for t in reads(c)}
        self.last.update(dict.fromkeys(self.program.outputs, len(self.computes)))
        self.link = self.target.link or self.target.main.bandwidth * self.target.units

    def run(self) -> tuple[Chosen, ...] | None:
        ends = self._ends()
        best: dict[int, _Found] = {0: _Found(0.0, ())}
        for end in ends[1:]:
            for grid, ways in self._ways(end, [e for e in ends if e < end and e in best]):
                for first, way in ways.items():
                    seconds = best[first].seconds + self._seconds(way, grid)
                    if seconds < (best[end].seconds if end in best else inf):
                        best[end] = _Found(seconds, (*best[first].sweeps, Chosen(first, end, grid)))
        found = best.get(len(self.computes))
        return None if found is None else found.sweeps

    # --- where a sweep may end

    def _ends(self) -> list[int]:
        """Where less passes than one compute behind and no more than one before, the beginning among them."""
        count = len(self.computes)
        passing = [sum(t.most_bytes for t in self._roots(end, inner=True)) for end in range(count)] + [0]
        found = [n for n in range(1, count - 1) if passing[n - 1] >= passing[n] < passing[n + 1]]
        few = sorted(sorted(found, key=lambda n: passing[n])[:_STARTED])
        return [0, *few, count]

    def _roots(self, end: int, inner: bool = False) -> list[Tensor]:
        """What computes up to there leave for others, and for the caller."""
        alive = [t for t, number in self.maker.items() if number < end <= self.last.get(t, -1)]
        return [t for t in alive if not inner or t not in self.program.outputs]

    def _beyond(self, first: int, end: int) -> int:
        """What lies in the memory beyond while a sweep runs, the caller's apart."""
        if not self.room.keeps:
            return 0
        return sum(t.most_bytes for t in {*self._roots(first, inner=True), *self._roots(end, inner=True)})

    # --- grids

    def _ways(self, end: int, firsts: Sequence[int]) -> Iterator[tuple[Grid, dict[int, _Way]]]:
        """Grids of the results of a sweep that ends here, and what it takes from each beginning, where it fits."""
        roots = self._roots(end)
        if not roots or not firsts:
            return
        main = main_of(roots)
        grain = grains(main, (t for c in self.computes[:end] for t in c.outputs))
        shape = extents(main)
        enough = inf
        for grid in self._grids(end, shape, grain, firsts):
            if grid.cells > enough * _BEYOND:
                return
            ways = self._back(end, grid, firsts)
            fitting = {f: w for f, w in ways.items() if w.held + self._beyond(f, end) <= self.room.bytes}
            if fitting:
                enough = min(enough, grid.cells) if firsts[0] in fitting else enough
                yield grid, fitting

    def _grids(self, end: int, shape: Sequence[int], grain: Sequence[int], firsts: Sequence[int]) -> list[Grid]:
        """Parts along those dimensions by which a part becomes smaller, the fewest first."""
        ones = [1] * len(shape)
        near = firsts[-1:]
        uncut = self._back(end, grid_of(shape, ones, grain), near)
        sizes: dict[int, float] = {}
        apart: list[int] = []  # dimensions whose parts have nothing in common: samples
        for dim, extent in enumerate(shape):
            halved = [*ones[:dim], 2, *ones[dim + 1 :]]
            ways = self._back(end, grid_of(shape, halved, grain), near) if extent > 1 else {}
            for first, way in ways.items():
                sizes[dim] = way.held / max(1, uncut[first].held)
                apart += [dim] if way.into and 2 * way.into == uncut[first].into else []
        dims = sorted((d for d, part in sizes.items() if part < HALVED), key=lambda d: (round(sizes[d], 2), d))
        counts = [ones]
        front = list(ones)
        if apart and len(dims) > _DIMENSIONS:  # samples first: nothing is computed twice for them
            samples = apart[0]
            dims = [dim for dim in dims if dim != samples]
            counts += [[*ones[:samples], n, *ones[samples + 1 :]] for n in _numbers(shape[samples])]
            front[samples] = shape[samples]
        dims = dims[:_DIMENSIONS]
        for chosen in product(*(_numbers(shape[dim]) for dim in dims)):
            cut = dict(zip(dims, chosen, strict=True))
            counts.append([cut.get(dim, n) for dim, n in enumerate(front)])
        return sorted(dict.fromkeys(grid_of(shape, each, grain) for each in counts), key=lambda grid: grid.cells)

    # --- one way back

    def _back(self, end: int, grid: Grid, firsts: Sequence[int]) -> dict[int, _Way]:
        """What a part in the middle takes of a sweep that ends here, by where it begins."""
        found: Places = {}
        sizes: dict[Tensor, int] = {}
        roots: dict[int, list[Tensor]] = {}
        for root in self._roots(end):
            roots.setdefault(self.maker[root], []).append(root)
        ways: dict[int, _Way] = {}
        most = left = back = done = 0
        busy = 0.0
        for number in reversed(range(end)):
            compute = self.computes[number]
            for root in roots.get(number, ()):
                place = grid.place(root, grid.middle)
                if place is not None:
                    found[root] = both(found[root], place) if root in found else place
                    left += self.room.slots * place_bytes(found[root], root)
                back += root.most_bytes
            if self.reach.before(compute, found):
                sizes.update({t: place_bytes(found[t], t) for t in (*compute.outputs, *reads(compute))})
                most, busy, done = max(most, sum(sizes.values())), busy + self._busy(compute, found), done + 1
            for tensor in compute.outputs:
                sizes.pop(tensor, None)
            if number in firsts and done:
                into, weights = self._into(found, number)
                ways[number] = _Way(into, back, most + left + self.room.slots * into + weights, busy, done)
        return ways

    def _into(self, found: Places, first: int) -> tuple[int, int]:
        """Bytes that a part takes from the host, and of weights."""
        into = weights = 0
        for tensor, place in found.items():
            if self.maker.get(tensor, -1) >= first:
                continue
            if tensor in self.program.constants:
                weights += 0 if self.room.keeps else place_bytes(place, tensor)
            else:
                into += place_bytes(place, tensor)
        return into, weights

    # --- what is predicted

    def _busy(self, compute: Compute, found: Places) -> float:
        """Seconds of the device: arithmetic at the best rate of the type, or bytes from where neighbours' tiles are."""
        target = self.target
        moved = sum(place_bytes(found[t], t) for t in (*compute.outputs, *reads(compute)) if t in found)
        if compute not in self.slots:
            self.slots[compute] = _slots(compute, target)
        each = self.slots[compute] * prod(count for _, count in next(found[t] for t in compute.outputs if t in found))
        return max(each, moved / target.local.bandwidth) / target.units

    def _seconds(self, way: _Way, grid: Grid) -> float:
        into, back = grid.cells * way.into, way.back
        copied = (max(into, back) if self.target.link else into + back) / self.link
        computed = grid.cells * (way.busy + way.computes * self.target.kernel_cost)
        return copied + computed


def _slots(compute: Compute, target: Target) -> float:
    """Seconds of one unit for one element of the results."""
    if not isinstance(compute, Map | Reduce):
        return sum(t.most_bytes for t in reads(compute)) / target.fma_rate / max(1, compute.outputs[0].most_bytes)
    cost = max(1, data_cost(*expressions(compute)))
    if isinstance(compute, Map):
        return cost / target.fma_rate
    narrow = min((t.dtype for t in reads(compute)), key=lambda dtype: dtype.bytes, default=compute.outputs[0].dtype)
    rates = [rate for name, rate in target.rates if name.endswith(f"_{narrow.name}")]
    return cost * prod(extent_of(a.extent) for a in compute.reduce_axes) / max(target.fma_rate, *rates, 0.0)


def _numbers(extent: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12 and so on, as far as there are elements."""
    found = [n for k in range(extent.bit_length()) for n in (1 << k, 3 << k) if n <= extent]
    return sorted({*found, extent} if extent < 64 else found)
