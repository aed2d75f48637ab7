"""Other ways to run a planned kernel: its nest plans and tiles, ranked by predicted time or drawn at random.

A variant changes how a kernel runs, never what it computes or which nests share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from tilewright.backend.cpu.constants import ROUGH_TILES, TILES_A_CHOICE, VARIANT_CHOICES, WORTH_A_LOOK
from tilewright.backend.cpu.kernel.candidates import candidate_tiles, feasible_plans, priced_tiles, vector_penalty
from tilewright.backend.cpu.kernel.panels import constant_layouts
from tilewright.backend.cpu.kernel.tile import hold_level, windows
from tilewright.backend.protocol import Admits, Choice
from tilewright.backend.variants import like
from tilewright.ir.forms.compute import Program, all_computes, reads
from tilewright.ir.forms.tensor import Layout, Tensor
from tilewright.target import Target
from tilewright.tile_graph.algebra.context import NestContext
from tilewright.tile_graph.algebra.in_results import in_results
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.algebra.rolling import find_overlaps
from tilewright.tile_graph.check.windows import has_windows
from tilewright.tile_graph.plan.form import Leaf, Plan, Tile, cut_axes

_CHOICES_A_WAVE, _TAKEN_A_WAVE = 16, 4  # nest plans predicted before the best kernels so far are given
_GOLDEN = 0.618034  # its multiples spread evenly over an interval, however many there are


_T = TypeVar("_T")
Prefer = Callable[[Sequence[Tile]], Sequence[Tile]]  # some of them, the best first


@dataclass(frozen=True)
class _Ways:
    """Tiles of a kernel: what each is predicted to take, what it is, and whether it works after all."""

    seconds: Any
    choice: Callable[[int], Choice]
    works: Callable[[int], bool] = lambda _: True


@dataclass(frozen=True)
class CpuVariants:
    """What a kernel's variants depend on: its nests, what it must store, and the layouts around it."""

    kernel: Tile
    nests: tuple[Nest, ...]
    stored: frozenset[Tensor]
    context: NestContext
    fixed: frozenset[Tensor] = frozenset()  # constants that other kernels read, too: their layout stays

    def choices(self) -> list[tuple[Leaf, ...]]:
        """Plans of the nests, one nest changed at a time; the kernel's own first."""
        own = self.kernel.leaves
        found: dict[tuple[Leaf, ...], None] = {own: None}
        for position, nest in enumerate(self.nests):
            for plan in feasible_plans(nest, self.context):
                kept = replace(plan, composed=own[position].composed, part=own[position].part)
                found[(*own[:position], kept, *own[position + 1 :])] = None
        return list(found)

    def tiled(self, plans: tuple[Leaf, ...], most: int | None = None) -> list[Tile]:
        """The kernel under these nest plans with the tiles that fit, fastest prediction first."""
        if self.kernel.stream is not None:
            return [self._as_streamed(plans)]
        ways = self._ways(plans)
        order = (int(i) for i in np.argsort(ways.seconds, kind="stable") if np.isfinite(ways.seconds[i]))
        return [self._made(plans, ways.choice(i)) for i in islice((i for i in order if ways.works(i)), most)]

    def drawn(self, plans: tuple[Leaf, ...], rng: np.random.Generator) -> Tile | None:
        """The kernel under these nest plans with a random one of the tiles that fit."""
        if self.kernel.stream is not None:
            return self._as_streamed(plans)
        ways = self._ways(plans)
        fitting = rng.permutation(np.flatnonzero(np.isfinite(ways.seconds)))
        chosen = next((int(i) for i in fitting if ways.works(int(i))), None)
        return None if chosen is None else self._made(plans, ways.choice(chosen))

    def _ways(self, plans: tuple[Leaf, ...], most: int | None = None) -> _Ways:
        """The kernel's tiles under these nest plans, at most so many; under windows where it has them."""
        near = self.context.target.local.name
        if has_windows(self.kernel):
            found = windows(self.nests, plans, self.context, self.stored, find_overlaps(self.nests))
            seconds = found.seconds * vector_penalty(self.nests, plans, self.context)

            def moved(number: int) -> Choice:
                choice = found.choice(number, self.context)
                return replace(choice, seconds=float(seconds[number]), level=choice.level or near)

            return _Ways(seconds, moved, found.moving)
        tiles = candidate_tiles(self.nests, plans[-1], self.context.target.units, self._uncut())
        if most is not None:
            tiles = _thinned(tiles, most)
        priced, held = priced_tiles(self.nests, plans, self.context, self.stored, tiles)

        def cut(number: int) -> Choice:
            size = int(held[number])
            level = hold_level(size, self.context) or near
            return Choice(tiles[number], float(priced[number]), 0, size, level=level)

        return _Ways(priced, cut)

    def _uncut(self) -> frozenset[str]:
        """Where an intermediate is stored beside the root, only the axes the planner cut write each piece once."""
        if all(t not in self.stored for n in self.nests[:-1] for t in n.stores):
            return frozenset()
        cut = {name for name, _ in self.kernel.cut}
        return frozenset(name for name in self.nests[-1].axis_names().values() if name not in cut)

    def _made(self, plans: tuple[Leaf, ...], choice: Choice) -> Tile:
        return run_another_way(self.kernel, plans, choice, self.nests, self.context.layout)

    def _as_streamed(self, plans: tuple[Leaf, ...]) -> Tile:
        """With other leaves alone."""
        return self.kernel.with_leaves({leaf.tensor: leaf for leaf in plans})

    def best(self, count: int) -> list[Tile]:
        """Up to `count` kernels that differ from this one, by predicted time, few of them for the same nest plans."""
        pool = self.pool(lambda leaves: True, 4 * count)
        limit = WORTH_A_LOOK * pool[0].estimate.seconds if pool else 0.0
        return _spread([k for k in pool if k.estimate.seconds <= limit], count)

    def pool(self, admits: Admits, count: int) -> list[Tile]:
        """Kernels that differ from this one and whose leaves are admitted, some for each of the `count` nest plans that
        are predicted to be fastest, by predicted time."""
        if self.kernel.stream is not None:
            return []  # predictions do not tell plans of a stream apart
        own = _form(self.kernel)
        rough = {plans: self._least(plans) for plans in _thinned(self.choices(), VARIANT_CHOICES) if admits(plans)}
        made: list[Tile] = []
        for plans in sorted(rough, key=lambda p: rough[p])[:count]:
            made.extend(k for k in self.tiled(plans, TILES_A_CHOICE) if _form(k) != own)
        return sorted(made, key=lambda k: k.estimate.seconds)

    def ranked(self, admits: Admits, prefer: Prefer | None = None) -> Iterator[Tile]:
        """Kernels that differ from this one, each made when it is asked for: other tiles of its own nest plans, then
        other nest plans that are admitted, some more predicted each time before the best of all so far are given. Of
        the first of them it may be said which are to `prefer`."""
        choices = [c for c in self.choices() if admits(c)]
        if self.kernel.stream is not None:  # predictions do not tell its plans apart
            yield from (self._as_streamed(choices[i]) for i in _evenly(len(choices)) if i)
            return
        given = {_form(self.kernel)}
        pool: list[Tile] = []
        for begin in range(0, len(choices), _CHOICES_A_WAVE):
            wave = [choices[i] for i in _evenly(len(choices))[begin : begin + _CHOICES_A_WAVE]]
            rough = {plans: self._least(plans) for plans in wave}
            best = sorted(rough, key=lambda p: rough[p])[:_TAKEN_A_WAVE]
            own = [self.kernel.leaves] if not begin else []
            pool += [k for plans in (*own, *best) for k in self.tiled(plans, TILES_A_CHOICE)]
            pool.sort(key=lambda k: k.estimate.seconds)
            for kernel in prefer(pool) if prefer is not None and not begin else _spread(pool, _TAKEN_A_WAVE):
                pool.remove(kernel)
                if _form(kernel) not in given:
                    given.add(_form(kernel))
                    yield kernel
        yield from (k for k in pool if _form(k) not in given)

    def _least(self, plans: tuple[Leaf, ...]) -> float:
        """The fastest prediction over some of the tiles: enough to compare nest plans."""
        return float(np.min(self._ways(plans, ROUGH_TILES).seconds, initial=np.inf))

    def random(self, count: int, rng: np.random.Generator) -> list[Tile]:
        """Up to `count` different kernels, nest plans drawn first and then a tile: every choice as likely."""
        choices = self.choices()
        found: dict[tuple[object, ...], Tile] = {}
        for _ in range(20 * count):
            if len(found) == count:
                break
            drawn = self.drawn(choices[int(rng.integers(len(choices)))], rng)
            if drawn is not None:
                found.setdefault(_form(drawn), drawn)
        return list(found.values())

    def layouts(self, kernel: Tile) -> dict[Tensor, Layout]:
        """How constants are packed for this variant."""
        found: dict[Tensor, Layout] = {}
        for nest, plan in zip(self.nests, kernel.leaves, strict=True):
            found.update(constant_layouts(nest, plan, self.context))
        return {t: layout for t, layout in found.items() if t not in self.fixed}

    def like(self, chosen: Tile, other: CpuVariants) -> Tile:
        """This kernel run as a variant of another that is equal but for its names."""
        return like(chosen, other.nests, self.kernel, self.nests)


def in_one_tile(kernel: Tile) -> Tile:
    """A kernel without the tile inside its own that keeps some of its results nearer: its parts fill tiles of one size
    alone."""
    inside = [t for t in kernel.body if isinstance(t, Tile) and t.over == "order" and t.level != kernel.level]
    if not inside:
        return kernel
    return replace(kernel, body=kernel.leaves, holds=(*kernel.holds, *(h for t in inside for h in t.holds)))


def run_another_way(
    kernel: Tile, leaves: Sequence[Leaf], choice: Choice, nests: Sequence[Nest], layout: Callable[[Tensor], Layout]
) -> Tile:
    """A kernel with other leaves, another output tile by the root's axes, and windows that move on in it."""
    root = nests[-1]
    level = choice.level or kernel.level
    kernel = in_one_tile(kernel).with_leaves({leaf.tensor: leaf for leaf in leaves})
    extents = {f"o{i}": max(1, extent_of(a.extent)) for i, a in enumerate(root.axes)}
    cut, sizes = cut_axes(root.tensor.name, extents, dict(choice.tile))
    known = {a.name: a for a in kernel.axes}  # further results run along them, too
    axes = tuple(known.get(a.name, a) for a in cut)
    body = kernel.body
    if choice.step:
        (window,) = (n for n in body if isinstance(n, Tile))
        ((name, _),) = window.sizes
        if all(a.name != name for a in axes):
            axes = (*axes, known[name])
        body = (replace(window, level=level, sizes=((name, choice.step),)),)
    about = replace(kernel.estimate, seconds=round(choice.seconds, 9), footprint=choice.footprint)
    made = replace(kernel, level=level, body=body, axes=axes, sizes=sizes, estimate=about)
    return in_results(made, nests, layout)


def _form(kernel: Tile) -> tuple[object, ...]:
    """What tells ways to run a kernel apart."""
    return kernel.leaves, kernel.cut, tuple(t.sizes for t in kernel.walk() if isinstance(t, Tile) and t is not kernel)


def _thinned(items: Sequence[_T], most: int) -> list[_T]:
    """At most so many of the items, evenly over all of them, the first and the last kept."""
    count = min(most, len(items))
    return [items[i * (len(items) - 1) // max(1, count - 1)] for i in range(count)]


def _evenly(count: int) -> list[int]:
    """Numbers below so many, the first of them first, every beginning of them spread over all."""
    return sorted(range(count), key=lambda i: i * _GOLDEN % 1.0)


def _spread(ranked: Sequence[Tile], count: int) -> list[Tile]:
    """The first of each nest plan before the second of any: tiles of one plan are much alike."""
    seen: dict[tuple[Leaf, ...], int] = {}
    numbered: list[tuple[int, int]] = []
    for position, kernel in enumerate(ranked):
        turn = seen.get(kernel.leaves, 0)
        seen[kernel.leaves] = turn + 1
        numbered.append((turn, position))
    chosen = sorted(position for _, position in sorted(numbered)[:count])
    return [ranked[i] for i in chosen]


def variants_of(kernel: Tile, nests: Sequence[Nest], program: Program, plan: Plan, target: Target) -> CpuVariants:
    """The variants of one kernel of a plan; constants that other kernels read, too, keep the plan's layout."""
    layouts = dict(program.layouts)
    shared = shared_constants(program, plan)
    by_name = {t.name: t for t in program.constants}
    layouts.update({by_name[n]: layout for n, layout in plan.layouts if n in by_name and by_name[n] in shared})
    context = NestContext(target, lambda t: layouts.get(t) or Layout.natural(t.rank), program.constants)
    held = kernel.held
    stored = frozenset(t for nest in nests if nest.tensor.name not in held for t in nest.stores)
    return CpuVariants(kernel, tuple(nests), stored, context, shared)


def shared_constants(program: Program, plan: Plan) -> frozenset[Tensor]:
    """Constants that more than one kernel reads."""
    computes = all_computes(program)
    by_name = {t.name: t for t in program.constants}
    readers: dict[Tensor, set[str]] = {}
    for kernel in plan.kernels:
        inside = [name for leaf in kernel.leaves for name in (leaf.core, *leaf.epilogue, *leaf.composed)]
        for name in inside:
            # a leaf that copies is named after what it brings, a constant or an input
            copied = [by_name[name]] if name in by_name else []
            for tensor in reads(computes[name]) if name in computes else copied:
                if tensor in program.constants:
                    readers.setdefault(tensor, set()).add(kernel.name)
    return frozenset(t for t, kernels in readers.items() if len(kernels) > 1)
