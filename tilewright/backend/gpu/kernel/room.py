"""Shared memory that a block takes, known before it is lowered: tiles that nests hand to each other, and what each nest
needs for itself meanwhile. Placed as the arena of the lowered kernel is (shared_arena.py), so that what a planner finds
room for has room.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Generic, TypeVar

from tilewright.backend.gpu.kernel.shared_arena import ArenaRegion, place, whole_lines
from tilewright.backend.gpu.threads.contract import spread
from tilewright.ir.analysis.products import factors
from tilewright.ir.forms.tensor import Tensor
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import Box
from tilewright.tile_graph.plan.form import Leaf
from tilewright.tile_graph.plan.leaf_form import ThreadForm

Place = TypeVar("Place", bound=Hashable)


@dataclass
class RoomHazards(Generic[Place]):
    """What was touched since the last barrier; tells when the next nest must wait."""

    read: set[Place] = field(default_factory=set)
    written: set[Place] = field(default_factory=set)
    has_own: bool = False  # shared memory that a nest needed for itself, which the next one is to have

    def meets(self, reads: set[Place], writes: set[Place], has_own: bool = False) -> bool:
        return bool(self.written & (reads | writes) or self.read & writes or (self.has_own and has_own))

    def add(self, reads: set[Place], writes: set[Place], has_own: bool) -> None:
        self.read |= reads
        self.written |= writes
        self.has_own |= has_own

    def clear(self) -> None:
        self.read.clear()
        self.written.clear()
        self.has_own = False


def unordered(nests: Sequence[Nest]) -> list[list[int]]:
    """The numbers of nests between two barriers of a block: none of them reads or writes what another writes."""
    since: RoomHazards[Tensor] = RoomHazards()
    runs: list[list[int]] = [[]]
    for number, nest in enumerate(nests):
        reads, writes = set(nest.reads()), set(nest.stores)
        if since.meets(reads, writes):
            since.clear()
            runs.append([])
        since.add(reads, writes, has_own=False)
        runs[-1].append(number)
    return runs


def block_bytes(
    nests: Sequence[Nest], held: Mapping[Tensor, int], own: Mapping[Nest, int], at_once: bool = False,
    unshared: Container[Nest] = (),
) -> int:  # fmt: skip
    """Of a block whose nests hold tensors of so many bytes, and need so many each for themselves; what `unshared` ones
    need, nobody waits for. `at_once`: all of it is held from the first nest to the last, as what a loop walks is."""
    phase = last = 0
    since: RoomHazards[Tensor] = RoomHazards()
    live: dict[Tensor, tuple[int, int]] = {}
    regions: list[ArenaRegion] = []
    for nest in nests:
        reads, writes = set(nest.reads()), set(nest.stores)
        mine = own.get(nest, 0)
        is_waited_for = mine > 0 and nest not in unshared
        if since.meets(reads, writes, is_waited_for):
            since.clear()
            phase = last + 1
        # with memory of its own a nest has barriers inside: what follows may be a phase later, what came before is not
        last = phase
        for tensor in (t for t in (*reads, *writes) if t in held):
            live[tensor] = (live.get(tensor, (phase, phase))[0], phase)
        if mine:
            regions.append(ArenaRegion(whole_lines(mine), phase, phase))
        since.add(reads, writes, is_waited_for)
    for tensor, size in held.items():
        first, end = (0, last) if at_once else live.get(tensor, (0, last))
        regions.append(ArenaRegion(whole_lines(size), first, end))
    return place(regions)[1]


def own_bytes(nest: Nest, leaf: Leaf, box: Box, threads: int, warp: int) -> int:
    """Of a leaf that threads run by themselves, as it is finished for a box: operands in steps, and shares of several
    warps that meet."""
    total = 0
    options = leaf.options(ThreadForm)
    if options.step:
        register = {nest.named(a): n for a, n in leaf.register}
        order = [nest.named(a) for a in leaf.order if a[0] == "o"]
        sizes = {a: -(-int(r.size) // register.get(a, 1)) * register.get(a, 1)
                 for a, r in zip(nest.axes, box, strict=True)}  # fmt: skip
        for factor in factors(nest.elements[0], nest.axes, nest.reduce_axes):
            if factor.reductions:
                line = [sizes[a] for a in order if a in factor.outputs]
                if line:
                    line[-1] += max(1, spread(line, options.split, warp))
                total += whole_lines(options.at_once * options.step * prod(line) * factor.value.dtype.bytes)
    if options.split > warp and nest.monoid is not None:
        total += sum(whole_lines(threads // warp * state.dtype.bytes) for state in nest.monoid.left)
    return total
