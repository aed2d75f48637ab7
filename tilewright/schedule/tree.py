"""Writes what the search chose as a tree of Tiles: a Tile a kernel, streams inside, main memory around them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilewright.backend.protocol import Choice, Inner, PersistentScan
from tilewright.ir.forms.compute import Program, all_computes
from tilewright.ir.forms.expr import Axis, var
from tilewright.ir.forms.tensor import Tensor
from tilewright.schedule.constants import JUST_BEFORE, UNHURRIED
from tilewright.target import Target
from tilewright.tile_graph.algebra.nest import Nest, held_inside, roots_of
from tilewright.tile_graph.algebra.propagate import Range, extent_of, propagate
from tilewright.tile_graph.algebra.rolling import find_overlaps
from tilewright.tile_graph.algebra.streams import Stream
from tilewright.tile_graph.plan.form import Bind, Estimate, Hold, Leaf, Tile, TileAxis, UnitBarrier, cut_axes
from tilewright.tile_graph.traffic.residence import reuse_distances

_STREAMED = "s"  # the axis that a stream walks


def kernel_tile(
    launch: str, level: str, nests: Sequence[Nest], leaves: Sequence[Leaf], stored: frozenset[Tensor],
    stream: Stream | None, choice: Choice, lanes: int, prefetched: Sequence[str], about: Estimate,
) -> Tile:  # fmt: skip
    """A kernel: its leaves in order, those of a stream or under a window inside a Tile of their own, and what is held
    at the kernel's level."""
    block = choice.block
    wide = stream.wide if stream is not None else {}
    held = [Hold(n.tensor.name) for n in nests if n not in wide and not any(t in stored for t in n.stores)]
    held += [Hold(name, fill="prefetch") for name in prefetched]
    body: tuple[Tile | Leaf, ...] = tuple(leaves)
    if stream is not None:
        body = _streamed(level, nests, leaves, stream, block)
    if lanes:
        body = (Tile(level, over="lanes", count=lanes, body=body),)
    root = nests[-1]
    extents = {f"o{i}": max(1, extent_of(a.extent)) for i, a in enumerate(root.axes)}
    axes, sizes = cut_axes(root.tensor.name, extents, dict(choice.tile))
    axes = _tied(axes, nests)
    if choice.inner is not None:
        inner = choice.inner
        walked, axes = _tiled_again(inner, leaves[inner.first : inner.last], axes, root, extents)
        near = {n.tensor.name for n in held_inside(nests, inner.first, inner.last, stored)}
        walked = replace(walked, holds=tuple(h for h in held if h.tensor in near))
        held = [h for h in held if h.tensor not in near]
        body = (*leaves[: inner.first], walked, *leaves[inner.last :])
    if choice.step:
        overlaps = find_overlaps(nests)
        name = f"t{overlaps[0].axis}"
        if name not in dict(sizes):
            (whole,), _ = cut_axes(root.tensor.name, extents, {f"o{overlaps[0].axis}": 1})
            axes = (*axes, whole)
        moving = {o.nest.tensor.name for o in overlaps}
        held = [Hold(h.tensor, "rolling", name) if h.tensor in moving else h for h in held]
        body = (Tile(level, ((name, choice.step),), "order", body, tuple(held)),)
        held = []
    return Tile(level, sizes, launch, body, tuple(held), axes, estimate=about)


def _tiled_again(
    inner: Inner, leaves: Sequence[Leaf], axes: Sequence[TileAxis], root: Nest, extents: Mapping[str, int]
) -> tuple[Tile, tuple[TileAxis, ...]]:
    """Leaves in parts of the kernel's tile, and the kernel's axes with those that only such parts cut."""
    along, sizes = cut_axes(root.tensor.name, extents, dict(inner.tile))
    known = {a.name for a in axes}
    return Tile(inner.level, sizes, "order", tuple(leaves)), (*axes, *(a for a in along if a.name not in known))


def with_steps_inside(kernel: Tile, scan: str, walked: PersistentScan) -> Tile:
    """A kernel of one step as one that walks all of them: what it keeps is copied first; units that read what others
    leave meet after each."""
    lanes = next((n for n in kernel.body if isinstance(n, Tile)), None)
    inside = kernel if lanes is None else lanes
    leaves = [replace(n, idle=None, alternate=False) for n in inside.body if isinstance(n, Leaf)]
    met = (UnitBarrier(kernel.over),) if walked.meets else ()
    steps = Tile(kernel.level, over="steps", scan=scan, body=(*leaves, *met))
    orders = {t: tuple(f"o{i}" for i in range(t.rank)) for t, _ in walked.kept}
    copies = [Leaf(t.name, t.name, part="copy", vector=orders[t][-1], lanes=lanes, order=orders[t])
              for t, lanes in walked.kept]  # fmt: skip
    holds = (*kernel.holds, *(Hold(t.name, fill="copy") for t in orders))
    body: tuple[Tile | Leaf | UnitBarrier, ...] = (*copies, steps)
    return replace(kernel, holds=holds, body=body if lanes is None else (replace(lanes, body=body),))


def _tied(axes: Sequence[TileAxis], nests: Sequence[Nest]) -> tuple[TileAxis, ...]:
    """The axes of the last nest's tiles with those of further roots that run along them."""
    root, further = nests[-1], roots_of(nests)[:-1]
    if not further:
        return tuple(axes)
    origins = {f"o{i}": Axis(f"origin_{i}", extent_of(a.extent)) for i, a in enumerate(root.axes)}
    box = tuple(Range(var(origins[f"o{i}"]), 1, extent_of(a.extent)) for i, a in enumerate(root.axes))
    boxes = propagate(nests, box)
    tied = []
    for axis in axes:
        origin = var(origins[axis.binds[0].axis])
        binds = [Bind(n.tensor.name, f"o{i}") for n in further for i, part in enumerate(boxes[n]) if part.low is origin]
        tied.append(replace(axis, binds=(*axis.binds, *binds)))
    return tuple(tied)


def _streamed(
    level: str, nests: Sequence[Nest], leaves: Sequence[Leaf], stream: Stream, block: int
) -> tuple[Tile | Leaf, ...]:
    """States begun, blocks of the axis walked, results ended: what does not take part stands before or after."""
    before: list[Leaf] = []
    inside: list[Leaf] = []
    after: list[Leaf] = []
    done: set[Tensor] = set()
    for nest, leaf in zip(nests, leaves, strict=True):
        if nest in stream.reducers:
            before.append(replace(leaf, part="start"))
            inside.append(replace(leaf, part="step"))
            after.append(replace(leaf, part="finish"))
            done.update(nest.stores)
        elif nest in stream.wide:
            inside.append(leaf)
        elif any(t in done for t in nest.reads()):
            after.append(leaf)
            done.update(nest.stores)
        else:
            before.append(leaf)
    members = {**stream.wide, **stream.reducers}
    binds = tuple(Bind(n.tensor.name, n.axis_names()[members[n]]) for n in nests if n in members)
    holds = (*(Hold(n.tensor.name) for n in nests if n in stream.wide),
             *(Hold(n.tensor.name, "carry", _STREAMED) for n in nests if n in stream.reducers))  # fmt: skip
    axis = TileAxis(_STREAMED, stream.extent, binds)
    walked = Tile(level, ((_STREAMED, block),), "order", tuple(inside), holds, (axis,))
    return (*before, walked, *after)


def in_tree(units: Sequence[Tile], program: Program, target: Target) -> Tile:
    """Main memory around all kernels, named in their order, with every intermediate that one leaves to another; those
    that stay in the outer cache until they are read for the last time are held there."""
    number = 0
    named: list[Tile] = []
    for unit in units:
        if unit.is_kernel:
            named.append(replace(unit, name=f"k{number}"))
            number += 1
            continue
        inner = tuple(replace(k, name=f"k{number + i}") for i, k in enumerate(unit.body) if isinstance(k, Tile))
        named.append(replace(unit, body=inner))
        number += len(inner)
    given = {t.name for t in program.outputs}
    computes = all_computes(program)
    kernels = [k for unit in named for k in unit.walk() if isinstance(k, Tile) and k.is_kernel]
    left = [n for k in kernels for leaf in k.leaves if leaf.tensor not in k.held and leaf.part != "copy"
            for n in (t.name for t in computes[leaf.tensor].outputs) if n not in given]  # fmt: skip
    distances = reuse_distances(named, computes)
    near = {n for n in left if n in distances and distances[n] <= target.shared_room}
    body: tuple[Tile | Leaf, ...] = tuple(_issued(named, target))
    if target.shared_cache is not None and near:
        main, outer = target.main.name, target.shared_cache.name
        body = tuple(replace(n, level=outer) if isinstance(n, Tile) and n.level == main else n for n in body)
        body = (Tile(outer, body=body, holds=tuple(Hold(n) for n in dict.fromkeys(left) if n in near)),)
    return Tile(target.main.name, body=body, holds=tuple(Hold(n) for n in dict.fromkeys(left) if n not in near))


def _issued(units: Sequence[Tile], target: Target) -> list[Tile]:
    """A kernel that computes for long before a Scan starts brings the Scan's weights near on the way."""
    result = list(units)
    unhurried = UNHURRIED * target.local.capacity / target.main.bandwidth
    taken: set[str] = set()
    for place, unit in enumerate(units):
        if unit.over != "steps" or not unit.holds:
            continue
        (kernel,) = (k for k in unit.body if isinstance(k, Tile))
        for before in reversed(units[max(0, place - JUST_BEFORE) : place]):
            if not before.is_kernel:
                break
            is_sum = any(axis.startswith("r") for axis in before.leaves[0].order) and before.stream is None
            # tiles in order and no more than a worker takes at a time: each part goes to the worker that needs it
            fits = before.tiles in (kernel.tiles, 2 * kernel.tiles)
            if is_sum and fits and before.estimate.seconds > unhurried and before.name not in taken:
                holds = tuple(replace(h, fill="prefetch", issue=before.name) for h in unit.holds)
                result[place] = replace(unit, holds=holds)
                taken.add(before.name)
                break
    return result
