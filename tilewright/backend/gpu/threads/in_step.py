"""Leaves of a block in step: the threads that share a sum along a row have the packets of that row which they have in
the maps around it. What a thread stores it reads again itself, and a sum that all of its threads know stays in their
registers, so that nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from tilewright.backend.gpu.threads.elementwise import PackedMap
from tilewright.backend.gpu.threads.nest import GpuNest
from tilewright.backend.gpu.threads.plan import MOST_THREADS
from tilewright.backend.gpu.threads.window import WindowSum
from tilewright.backend.gpu.threads.window_plan import is_window
from tilewright.ir.analysis.simplify import Linear, linear, simplify
from tilewright.ir.forms.expr import Axis, Expr, const, loads, substitute, var
from tilewright.ir.forms.tensor import Tensor
from tilewright.lower.access import Access
from tilewright.lower.register_block import BufferNames
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import Box, Size, box_elements, extent_of
from tilewright.tile_graph.plan.form import IN_REGISTERS, Leaf, Tile
from tilewright.tile_graph.plan.leaf_form import ThreadForm


@dataclass(frozen=True)
class Elements:
    """Which elements a leaf's threads have: the value of each axis of its nest, by the thread, its turn and the lane of
    a packet; how many threads, the first ones, have any."""

    at: Mapping[Axis, Expr]
    threads: int
    is_shared: bool  # a sum of which several threads know the result, and one stores it

    def place(self, nest: Nest) -> tuple[Linear, ...]:
        """Of what the nest stores."""
        return tuple(linear(self.at[a]) for a in nest.axes)

    def reads(self, nest: Nest, tensor: Tensor) -> list[tuple[Linear, ...]]:
        """Where they read a tensor."""
        found = [n for n in loads(*nest.elements, *nest.values, *nest.initial) if n.source is tensor]
        return [tuple(linear(simplify(substitute(i, self.at))) for i in n.indices) for n in found]


@dataclass
class BlockElements:
    """The elements of the leaves of one block, in turns and lanes that mean the same in all of them."""

    thread: Axis
    axes: dict[tuple[str, int], Axis] = field(default_factory=dict)

    def of(self, low: GpuNest) -> Elements | None:
        """None where threads take something else than positions in turn."""
        nest, leaf = low.nest, low.plan
        if low.warps is not None or low.options.step or low.first:
            return None
        if nest.monoid is None:
            return self._of_map(low) if leaf.vector is not None and not low.options.flat else None
        if is_window(leaf, nest):
            return self._of_window(low)
        if low.options.split == 1 or low.rounds > 1 or low.register or not low.along_reduction:
            return None
        lanes = leaf.lanes
        count = prod(int(r.size) for r in low.reduce_ranges.values()) // lanes
        lane, own_lane = self._axis("lane", lanes), Axis("lane", lanes)
        turn = self._turn(-(-count // low.options.split))
        along, _ = low.reduction_point(simplify(turn * low.options.split + low.taker()[1]), own_lane)
        at = {**low.thread_tile(const(0)).env, **_in_lanes(along, own_lane, lane)}
        return Elements(at, low.count * low.options.split, is_shared=True)

    def _of_map(self, low: GpuNest) -> Elements | None:
        if low.register:
            return None
        packed = PackedMap(low)
        env, _, _ = packed._spot(self._flat(low, packed.count))
        at = _in_lanes(env, packed.lane, self._axis("lane", low.plan.lanes))
        return Elements(at, min(low.threads, packed.count), is_shared=False)

    def _of_window(self, low: GpuNest) -> Elements | None:
        window = WindowSum(low)
        if window.outputs > 1:
            return None
        (env,), _, _ = window._spot(self._flat(low, window.count))
        at = _in_lanes(env, window.lane, self._axis("lane", low.plan.lanes))
        return Elements(at, min(low.threads, window.count), is_shared=False)

    def _flat(self, low: GpuNest, count: int) -> Expr:
        """The number of a position that a thread takes in a turn."""
        return simplify(var(self.thread) + self._turn(-(-count // low.threads)) * low.threads)

    def _turn(self, turns: int) -> Expr:
        return var(self._axis("turn", turns)) if turns > 1 else const(0)

    def _axis(self, name: str, extent: int) -> Axis:
        return self.axes.setdefault((name, extent), Axis(name, extent))


def _in_lanes(env: Mapping[Axis, Expr], own: Axis, lane: Axis) -> dict[Axis, Expr]:
    return {a: simplify(substitute(e, {own: var(lane)})) for a, e in env.items()}


def reads_own(writer: Nest, stored: Elements | None, reader: Nest, read: Elements | None, tensor: Tensor) -> bool:
    """Whether every thread that reads a tensor in a leaf stored there itself what it reads, in another."""
    if stored is None or read is None or stored.is_shared:
        return False
    return all(place == stored.place(writer) for place in read.reads(reader, tensor))


def knows(writer: Nest, stored: Elements | None, reader: Nest, read: Elements | None, tensor: Tensor) -> bool:
    """Whether every thread that reads the result of a sum in a leaf is one of those that shared it."""
    if stored is None or read is None or not stored.is_shared or read.threads > stored.threads:
        return False
    return all(place == stored.place(writer) for place in read.reads(reader, tensor))


def known_sums(
    nests: Sequence[Nest], leaves: Sequence[Leaf], boxes: Mapping[Nest, Box], threads: int, warp: int,
    stored: frozenset[Tensor],
) -> frozenset[str]:  # fmt: skip
    """The nests of a block whose results, which nobody else wants, stay in the registers of its threads."""
    block = BlockElements(Axis("thread", threads))
    found: list[Elements | None] = []
    for nest, leaf in zip(nests, leaves, strict=True):
        if not isinstance(leaf.form, ThreadForm) or threads % leaf.options(ThreadForm).split:
            return frozenset()
        low = GpuNest(nest, leaf, boxes[nest], {}, Access(), BufferNames(), block.thread, warp=warp)
        found.append(block.of(low))
    names = set[str]()
    for number, nest in enumerate(nests):
        readers = [i for i, other in enumerate(nests) if i != number and not set(nest.stores).isdisjoint(other.reads())]
        if readers and stored.isdisjoint(nest.stores) and all(
            knows(nest, found[number], nests[i], found[i], t) for i in readers for t in nest.stores
        ):
            names.add(nest.tensor.name)
    return frozenset(names)


def shares_in_step(
    nests: Sequence[Nest], leaves: Sequence[Leaf], boxes: Mapping[Nest, Box], lanes: Size, warp: int
) -> dict[Nest, Size]:  # fmt: skip
    """How many threads share each sum along rows (numbers or arrays) where the last map hands a row to so many, in
    packets of so many lanes; 0 where rows are not whole there. Nothing where there are no such sums."""
    root, last = nests[-1], leaves[-1]
    summed = [(n, x) for n, x in zip(nests, leaves, strict=True) if n.monoid is not None and not is_window(x, n)]
    shared = [(n, x) for n, x in summed if x.instruction is None and x.options(ThreadForm).split > 1]
    along = all(x.vector is not None and x.vector[0] == "r" and not x.options(ThreadForm).step for _, x in shared)
    if root.monoid is not None or last.vector is None or last.options(ThreadForm).flat or last.register or not along:
        return {}
    places: Size = 1
    for axis, part in zip(root.axes, boxes[root], strict=True):
        places = places * (-(-part.size // lanes) if axis is root.named(last.vector) else part.size)
    fits: Size = True
    found: dict[Nest, Size] = {}
    for nest, leaf in shared:
        rows = box_elements(boxes[nest])
        shares = places // np.maximum(rows, 1)
        length = prod(extent_of(a.extent) for a in nest.reduce_axes)
        alone = (rows == 1) & (shares > MOST_THREADS) & (length >= MOST_THREADS * lanes)
        whole = (length == shares * lanes) & (rows * shares <= MOST_THREADS)
        even = (shares % warp == 0) | ((shares < warp) & (shares & (shares - 1) == 0))
        fits = fits & (places % np.maximum(rows, 1) == 0) & (leaf.lanes % lanes == 0) & (alone | whole) & even
        found[nest] = np.where(alone, MOST_THREADS, shares)
    return {nest: np.where(fits & (shares > 1), shares, 0) for nest, shares in found.items()}


def in_step(nests: Sequence[Nest], leaves: Sequence[Leaf], boxes: Mapping[Nest, Box], warp: int) -> list[Leaf]:
    """The leaves with sums along rows shared by as many threads as the last map hands a row to, in its packets."""
    shares = shares_in_step(nests, leaves, boxes, leaves[-1].lanes, warp)
    return [
        replace(leaf.with_options(ThreadForm, split=int(shares[nest])), lanes=leaves[-1].lanes)
        if shares.get(nest) else leaf
        for nest, leaf in zip(nests, leaves, strict=True)
    ]  # fmt: skip


def with_known_sums(kernel: Tile, names: frozenset[str]) -> Tile:
    """The kernel with those sums in the registers of the threads that share them."""
    holds = tuple(replace(h, layout=IN_REGISTERS) if h.tensor in names else h for h in kernel.holds)
    return replace(kernel, holds=holds) if names else kernel


def with_stored_sums(kernel: Tile) -> Tile:
    """The kernel with all that it holds in shared memory, whoever its threads are."""
    holds = tuple(replace(h, layout=None) if h.layout == IN_REGISTERS else h for h in kernel.holds)
    return replace(kernel, holds=holds)
