"""Other ways to run a planned kernel on a GPU, ranked by predicted time: tiles, how warps share a product, and packets
under way. A variant changes how a kernel runs, never what it computes or which nests share it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from tilewright.backend.gpu.boxes import block_of
from tilewright.backend.gpu.constants import WORTH_A_LOOK
from tilewright.backend.gpu.kernel.block import finished_leaves, plan_gpu_nest, shared_out
from tilewright.backend.gpu.kernel.tile import choose_gpu_tile
from tilewright.backend.gpu.matrix.cost import BlockedProduct, Fragments, layout_for, ranked
from tilewright.backend.gpu.matrix.plan import (
    comes_from_far,
    fitting_fragments,
    matrix_sizes,
    product_of,
    runs_of,
    steps_of,
    stored_at_once,
    ways_in,
)
from tilewright.backend.gpu.stream.form import register_form
from tilewright.backend.gpu.stream.plan import stream_choices
from tilewright.backend.protocol import Admits, Choice, KernelWriter
from tilewright.backend.variants import like
from tilewright.intrinsics.gpu_matrix import FORMS
from tilewright.ir.forms.tensor import Layout, Tensor
from tilewright.ir.meaning.instruct import WARP
from tilewright.tile_graph.algebra.context import NestContext
from tilewright.tile_graph.algebra.nest import Nest, data_cost
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.algebra.streams import Stream, stream_of
from tilewright.tile_graph.plan.form import Estimate, Leaf, Tile
from tilewright.tile_graph.plan.leaf_form import FragmentForm, ThreadForm

_WAYS = 3  # of warps to share a product, for each tile
_MOST_TILES = 100  # that are priced
_NEIGHBOURS = (-2, -1, 0, 1, 2)  # doublings of the chosen tile along an axis
_PACKETS = (1, 2, 4)  # of a map that a thread has under way


@dataclass(frozen=True)
class GpuVariants:
    """What a kernel's variants depend on: its nests, what it must store, and the layouts around it."""

    kernel: Tile
    nests: tuple[Nest, ...]
    stored: frozenset[Tensor]
    context: NestContext
    write: KernelWriter

    def best(self, count: int) -> list[Tile]:
        """Up to `count` kernels that differ from this one, by predicted time."""
        if self._is_bound:
            return []
        found: dict[Tile, float] = {}
        for made in self.all():
            bare = replace(made, estimate=Estimate())
            found[bare] = min(made.estimate.seconds, found.get(bare, made.estimate.seconds))
        found.pop(replace(self.kernel, estimate=Estimate()), None)
        order = sorted(found, key=lambda k: found[k])[:count]
        about = self.kernel.estimate
        return [replace(k, estimate=replace(about, seconds=round(found[k], 9))) for k in order]

    def ranked(self, admits: Admits) -> Iterator[Tile]:
        """Kernels that differ from this one, each made when it is asked for."""
        given = {replace(self.kernel, estimate=Estimate())}
        about = self.kernel.estimate
        for made in () if self._is_bound else self.all():
            bare = replace(made, estimate=Estimate())
            if bare not in given and admits(made.leaves):
                given.add(bare)
                yield replace(bare, estimate=replace(about, seconds=made.estimate.seconds))

    @property
    def _is_bound(self) -> bool:
        """Whether units meet inside it: how many there may be is not for a tile to say."""
        return any(isinstance(n, Tile) and (n.over == "steps" or n.runs != "order") for n in self.kernel.walk())

    def layouts(self, kernel: Tile) -> dict[Tensor, Layout]:
        """Constants stay as they are."""
        return {}

    def like(self, chosen: Tile, other: GpuVariants) -> Tile:
        """This kernel run as a variant of another that is equal but for its names."""
        return like(chosen, other.nests, self.kernel, self.nests)

    def all(self) -> Iterator[Tile]:
        """The kernel under every tile that is worth a look, each with its prediction; its own among them."""
        leaves = tuple(
            replace(plan_gpu_nest(nest, self.context), composed=own.composed)
            for nest, own in zip(self.nests, self.kernel.leaves, strict=True)
        )
        stream = stream_of(self.kernel, self.nests)
        if stream is not None and register_form(self.nests, leaves, stream) is not None:
            for found in stream_choices(self.nests, leaves, stream, {}, self.context.target):
                choice = Choice(found.tile, found.seconds, found.tiles, found.made.shared, found.block)
                yield self._made(leaves, choice, stream)
            return
        block = 0 if self.kernel.stream is None else self.kernel.stream.sizes[0][1]
        plain = tuple(replace(leaf, composed=()) for leaf in leaves)
        priced = [choose_gpu_tile(self.nests, plain, self.context, self.stored, sizes, stream, block)
                  for sizes in self._tiles(leaves[-1])]  # fmt: skip
        choices = sorted((c for c in priced if c is not None), key=lambda c: c.seconds)
        for tried in choices:
            if tried.seconds > WORTH_A_LOOK * choices[0].seconds:
                return
            part = block_of(self.nests, dict(tried.tile), stream, tried.block)
            if fitting_fragments(self.nests, leaves, part, tried.footprint, self.context) is None:
                continue
            made = self._made(leaves, tried, stream)
            yield made
            yield from self._other_ways(made, leaves, tried)
            yield from self._other_packets(made, leaves, tried, stream)

    def _tiles(self, leaf: Leaf) -> list[dict[str, int]]:
        """Sizes of tiles by the root's axes: those of products, or around the chosen one."""
        root = self.nests[-1]
        cut = dict(self.kernel.cut)
        beside = any(t in self.stored for n in self.nests[:-1] for t in n.stores)
        choices: list[list[int]] = []
        for number, axis in enumerate(root.axes):
            name, extent = f"o{number}", max(1, extent_of(axis.extent))
            own = cut.get(name, extent)
            if beside and name not in cut:
                choices.append([extent])  # what is stored beside the root is written once along it
            elif leaf.instruction in FORMS:
                choices.append(sorted({own, *matrix_sizes(root, leaf, axis)}))
            else:
                near = {own * 2**n if n >= 0 else own // 2**-n for n in _NEIGHBOURS}
                choices.append(sorted({min(extent, max(1, n)) for n in near}))
        found = [{f"o{i}": n for i, n in enumerate(sizes)} for sizes in product(*choices)]
        own_sizes = {f"o{i}": cut.get(f"o{i}", max(1, extent_of(a.extent))) for i, a in enumerate(root.axes)}
        found.sort(key=lambda sizes: sum(abs(n.bit_length() - own_sizes[a].bit_length()) for a, n in sizes.items()))
        return found[:_MOST_TILES]

    def _made(self, leaves: tuple[Leaf, ...], choice: Choice, stream: Stream | None) -> Tile:
        """The kernel as the planner writes it for this choice."""
        if not choice.block:
            stream = None
        finished, lanes = finished_leaves(self.nests, leaves, choice, stream, self.context)
        about = Estimate(round(choice.seconds, 9), choice.footprint)
        own = self.kernel
        made = self.write(own.over, own.level, self.nests, finished, self.stored, stream, choice, lanes, (), about)
        shared = shared_out(made, self.nests, finished, choice, stream, self.context)
        return replace(shared, name=self.kernel.name)

    def _other_ways(self, made: Tile, leaves: Sequence[Leaf], choice: Choice) -> Iterator[Tile]:
        """Warps that share the tile of a product otherwise."""
        if len(self.nests) > 1 or leaves[0].instruction not in FORMS:
            return
        (nest,), (leaf,), context = self.nests, leaves, self.context
        part = block_of(self.nests, dict(choice.tile), None, 0)
        work = BlockedProduct(
            *product_of(nest, leaf, part.boxes[nest], {}), part.blocks, ways_in(part, nest, leaf, self.nests, context),
            comes_from_far(context), runs_of(nest, leaf, context), stored_at_once(nest, leaf, context),
            data_cost(*nest.values), steps=steps_of(nest, leaf),
        )  # fmt: skip
        ways = ranked(context.target, leaf.instruction or "", work)
        for way, seconds in ways[1:_WAYS]:
            slower = choice.seconds * seconds / ways[0][1]
            yield replace(with_way(made, way), estimate=replace(made.estimate, seconds=slower))

    def _other_packets(
        self, made: Tile, leaves: tuple[Leaf, ...], choice: Choice, stream: Stream | None
    ) -> Iterator[Tile]:
        """More or fewer packets of the last map under way; the prediction hardly knows them apart."""
        root = leaves[-1]
        if root.lanes == 1 or self.nests[-1].monoid is not None or root.instruction is not None:
            return
        for count in _PACKETS:
            if count != root.options(ThreadForm).at_once:
                yield self._made((*leaves[:-1], root.with_options(ThreadForm, at_once=count)), choice, stream)


def with_way(kernel: Tile, way: Fragments) -> Tile:
    """A kernel of one product with its warps sharing it in this way."""
    form = FORMS[way.instruction]
    sides = (way.rows, way.columns)

    def changed(tile: Tile) -> Tile:
        body = tuple(
            changed(n) if isinstance(n, Tile)
            else replace(n, lanes=way.stored).with_options(
                FragmentForm, step=way.step, split=way.groups, instruction=way.instruction)
            if isinstance(n, Leaf) else n
            for n in tile.body
        )  # fmt: skip
        tile = replace(tile, body=body)
        if tile.over == "lanes":
            return replace(tile, count=WARP * way.warps)
        if tile.over == "warps":
            axes = tuple(replace(a, extent=size) for a, size in zip(tile.axes, sides, strict=True))
            return replace(tile, sizes=(("m", way.warp_rows), ("n", way.warp_columns)), axes=axes)
        if tile.over == "order" and tile.holds:
            held = tuple(replace(h, stages=way.stages, layout=layout_for(size, way.step, form))
                         for h, size in zip(tile.holds, sides, strict=True))  # fmt: skip
            return replace(tile, holds=held)
        return tile

    return changed(kernel)
