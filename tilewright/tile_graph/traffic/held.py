"""Bytes that a kernel of a Plan holds, with what is alive at the same time, and the nests of its leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from tilewright.intrinsics.gpu_matrix import FORMS
from tilewright.ir.forms.compute import Compute, Map
from tilewright.ir.forms.expr import Axis, var
from tilewright.ir.forms.tensor import Tensor
from tilewright.tile_graph.algebra.nest import Nest, build_nest, roots_of
from tilewright.tile_graph.algebra.occurrences import apart_nests, unique_names
from tilewright.tile_graph.algebra.parts import between_barriers
from tilewright.tile_graph.algebra.propagate import Box, Range, box_elements, extent_of, propagate, whole
from tilewright.tile_graph.algebra.streams import stream_of
from tilewright.tile_graph.plan.form import COPIES, Leaf, Tile, TileAxis
from tilewright.tile_graph.plan.leaf_form import FragmentForm
from tilewright.tile_graph.traffic.moving import footprint

_Part = tuple[int, Axis]  # elements of a part, and the axis that tells where it begins
_SUM_BYTES = 4  # of a sum on tensor cores


def plan_nests(tile: Tile, computes: Mapping[str, Compute]) -> list[Nest]:
    """The nests of a kernel's leaves; of what it holds at several places, each under a name of its own."""
    tile = unique_names(tile)
    leaves = tile.leaves
    made = [None if leaf.part == "copy" else leaf_nest(leaf, computes) for leaf in leaves]
    if any(nest is None or nest.tensor.name != leaf.tensor for nest, leaf in zip(made, leaves, strict=True)):
        return apart_nests(tile, made, computes)
    return [nest for nest in made if nest is not None]


def leaf_nest(leaf: Leaf, computes: Mapping[str, Compute]) -> Nest:
    epilogue = tuple(computes[name] for name in leaf.epilogue)
    return _nest(computes[leaf.core], epilogue, tuple(computes[name] for name in leaf.composed))


@lru_cache(maxsize=1024)  # every stage behind the Plan asks for the nests of all leaves
def _nest(core: Compute, epilogue: tuple[Compute, ...], composed: tuple[Compute, ...]) -> Nest:
    maps: dict[Tensor, Map] = {}
    for compute in composed:
        assert isinstance(compute, Map)
        maps[compute.output] = compute
    return build_nest(core, epilogue, maps)  # type: ignore[arg-type]


def held_bytes(kernel: Tile, nests: Sequence[Nest]) -> int:
    """The most bytes of intermediates alive at once in one tile of a kernel."""
    if any(t.over == "warps" and t.stream is not None for t in kernel.walk() if isinstance(t, Tile)):
        return _stream_rings(kernel)
    held = kernel.held
    stored = frozenset(t for n in nests if n.tensor.name not in held for t in n.stores)
    boxes = boxes_of(kernel, nests)
    more = staged_bytes(kernel, boxes)
    return int(footprint(nests, boxes, stored, stream_of(kernel, nests))) + more + ring_bytes(kernel)


def inner_bytes(kernel: Tile, nests: Sequence[Nest]) -> dict[str, int]:
    """The most bytes that Tiles inside a kernel hold at levels nearer than its own, of all that one part holds."""
    if all(t.level == kernel.level for t in kernel.walk() if isinstance(t, Tile)):
        return {}
    boxes = {n.tensor.name: (n, box) for n, box in boxes_of(kernel, nests).items()}
    most: dict[str, int] = {}

    def below(tile: Tile, around: Mapping[str, int], lanes: int, share: int) -> None:
        """`share`: the threads that each keep a part of what a tile holds: all of a block, where its warps keep it."""
        taken = dict(around)
        lanes = tile.count if tile.over == "lanes" else lanes
        share = lanes if tile.over == "warps" and tile.stream is not None else share
        for hold in tile.holds:
            if tile.level != kernel.level and hold.fill is None and hold.mode != "carry" and hold.tensor in boxes:
                nest, box = boxes[hold.tensor]
                size = int(sum(box_elements(box) * t.dtype.bytes for t in nest.stores))
                taken[tile.level] = taken.get(tile.level, 0) + -(-size * hold.stages // share)
        for level, size in taken.items():
            most[level] = max(most.get(level, 0), size)
        for node in tile.body:
            if isinstance(node, Tile):
                below(node, taken, lanes, share)

    below(kernel, {}, 1, 1)
    return most


def staged_bytes(kernel: Tile, boxes: Mapping[Nest, Box]) -> int:
    """What further stages add: the parts that are filled ahead."""
    ahead = {h.tensor: h.stages - 1 for t in kernel.walk() if isinstance(t, Tile) for h in t.holds if h.fill is None}
    return int(sum(ahead.get(n.tensor.name, 0) * box_elements(box) * t.dtype.bytes
                   for n, box in boxes.items() for t in n.stores))  # fmt: skip


def ring_bytes(kernel: Tile) -> int:
    """The most that the operands of a leaf in their stages, or the sums on their way out, take; one after the other."""
    most = 0
    for around in (t for t in kernel.walk() if isinstance(t, Tile)):
        for tile in (t for t in around.body if isinstance(t, Tile) and t.over == "warps"):
            (leaf,) = tile.leaves
            rows, columns = (a.extent for a in tile.axes)
            form = leaf.options(FragmentForm)
            width = FORMS[form.instruction].operand.bytes
            sums = rows * columns * _SUM_BYTES if leaf.lanes > 1 else 0
            most = max(most, around.holds[0].stages * form.step * width * (rows + columns), sums)
    return most


def _stream_rings(kernel: Tile) -> int:
    """Operands of a stream that warps keep in registers: rows once, blocks of the streamed axis in their stages."""
    (warps,) = (t for t in kernel.walk() if isinstance(t, Tile) and t.over == "warps")
    walked = warps.stream
    assert walked is not None
    rows, columns = (a.extent for a in warps.axes)
    total = 0
    for leaf in (x for x in walked.leaves if isinstance(x.form, FragmentForm)):
        form = leaf.options(FragmentForm)
        width = FORMS[form.instruction].operand.bytes
        stages = next(h.stages for h in walked.holds if h.fill in COPIES)
        if leaf.part == "whole":
            block = -(-dict(walked.sizes)[walked.sizes[0][0]] // 16) * 16
            total += width * form.step * (rows + stages * block)
        else:
            total += width * form.step * stages * columns
    return total


def boxes_of(kernel: Tile, nests: Sequence[Nest]) -> dict[Nest, Box]:
    """The part of every nest that the Tile which holds it covers, or else the innermost around it, wherever it
    begins."""
    by_name = {n.tensor.name: n for n in nests}
    groups = between_barriers(kernel, by_name)
    found: dict[Nest, Box] = {}

    def below(tile: Tile, sizes: Mapping[tuple[str, str], _Part]) -> None:
        bound = dict(sizes)
        axes = {**known, **{a.name: a for a in tile.axes}}
        known.update(axes)
        for name, size in tile.sizes if tile.over != "warps" else ():  # a block's warps share what it holds
            along = origins.setdefault(name, Axis(f"origin_{name}", axes[name].extent))
            bound.update({(b.tensor, b.axis): (size * b.scale, along) for b in axes[name].binds})
        boxes = {n: box for group in groups for n, box in _at(group, by_name, bound).items()}
        for node in tile.body:
            if isinstance(node, Tile):
                below(node, bound)
            elif isinstance(node, Leaf):
                nest = by_name[node.tensor]
                found.setdefault(nest, boxes[nest])
        for nest in (by_name[h.tensor] for h in tile.holds if h.mode == "store" and h.tensor in by_name):
            found[nest] = boxes[nest]  # computed in parts, where a Tile inside walks them

    known: dict[str, TileAxis] = {}
    origins: dict[str, Axis] = {}  # nests that run along one axis of the tree begin at the same place
    below(kernel, {})
    return found


def _at(nests: Sequence[Nest], by_name: Mapping[str, Nest], sizes: Mapping[tuple[str, str], _Part]) -> dict[Nest, Box]:
    def part(nest: Nest, name: str, axis: Axis) -> Range:
        extent = extent_of(axis.extent)
        size, origin = sizes.get((nest.tensor.name, name), (extent, axis))
        return whole(extent) if size >= extent else Range(var(origin), size, extent)

    roots = {r: tuple(part(r, f"o{i}", a) for i, a in enumerate(r.axes)) for r in roots_of(nests)}
    limits: dict[Nest, dict[Axis, Range]] = {}
    for tensor, name in sizes:
        nest = by_name[tensor]
        if name[0] == "r" and nest in nests:
            axis = nest.named(name)
            limits.setdefault(nest, {})[axis] = part(nest, name, axis)
    return propagate(nests, roots, limits)
