"""A name of its own for every place where a kernel holds a tensor: Leaves that occur again and copies are nests apart.

A Leaf that occurs under two Holds of its tensor is computed twice, and each reader is served by the nearest of them. A
Hold that is filled by a copy is a nest too, which reads the next Hold farther away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilewright.ir.forms.compute import Compute, reads
from tilewright.ir.forms.expr import Axis, Expr, Load, load, rewrite, var
from tilewright.ir.forms.tensor import Tensor
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.plan.form import COPIED, Bind, Hold, Leaf, Tile, TileAxis, UnitBarrier

_MARK = "@"  # between a tensor's name and the number of the place
_Path = tuple[int, ...]  # of a Tile: its place in each body around it


def is_copied(tile: Tile, hold: Hold) -> bool:
    """Whether a leaf copies what a Tile holds; operands of warps come without one, as their own leaf says."""
    leaves = (n for n in tile.walk() if isinstance(n, Leaf))
    return hold.fill == COPIED and any(n.part == "copy" and n.tensor == hold.tensor for n in leaves)


def base_name(name: str) -> str:
    return name.partition(_MARK)[0]


@dataclass
class _Homes:
    """Where each tensor that a kernel's leaves store is held: by paths, `None` outside of the kernel."""

    found: dict[str, dict[_Path | None, None]] = field(default_factory=dict)

    def walk(self, tile: Tile, path: _Path, around: Mapping[str, _Path]) -> None:
        inside = {**around, **{h.tensor: path for h in tile.holds if h.mode != "carry"
                               and (h.fill is None or is_copied(tile, h))}}  # fmt: skip
        for number, node in enumerate(tile.body):
            if isinstance(node, Tile):
                self.walk(node, (*path, number), inside)
            elif isinstance(node, Leaf):
                self.found.setdefault(node.tensor, {})[inside.get(node.tensor)] = None


def unique_names(kernel: Tile) -> Tile:
    """The kernel with a name of its own for each further place of what it holds at several, and for each copy."""
    leaves = [n for n in kernel.walk() if isinstance(n, Leaf)]
    names = [n.tensor for n in leaves if n.part in ("whole", "step")]
    if len(set(names)) == len(names) and not any(n.part == "copy" and _MARK not in n.tensor for n in leaves):
        return kernel
    homes = _Homes()
    homes.walk(kernel, (), {})
    copied = {n.tensor for n in leaves if n.part == "copy"}
    own: dict[tuple[str, _Path | None], str] = {}
    for tensor, places in homes.found.items():
        kept = tensor not in copied and (None in places or next(iter(places), None))
        number = 0
        for place in places:
            if place is None or (tensor not in copied and kept is not True and place == kept):
                continue
            number += 1
            own[tensor, place] = f"{tensor}{_MARK}{number}"
    return _renamed(kernel, (), {}, own)


def once(kernel: Tile) -> Tile:
    """The kernel with every leaf once and without copies: what it computes, however often."""
    if unique_names(kernel) is kernel:
        return kernel
    seen: set[str] = set()

    def below(tile: Tile) -> Tile:
        body: list[Tile | Leaf | UnitBarrier] = []
        again: set[str] = set()
        for node in tile.body:
            if isinstance(node, Leaf) and (node.part == "copy" or (node.part == "whole" and node.tensor in seen)):
                again.add(node.tensor)
                continue
            if isinstance(node, Leaf):
                seen.add(node.tensor)
            body.append(below(node) if isinstance(node, Tile) else node)
        holds = tuple(h for h in tile.holds if not is_copied(tile, h) and h.tensor not in again)
        return replace(tile, body=tuple(body), holds=holds)

    return below(kernel)


def _renamed(tile: Tile, path: _Path, scope: Mapping[str, str], own: Mapping[tuple[str, _Path | None], str]) -> Tile:
    inside = {**scope, **{h.tensor: own.get((h.tensor, path), h.tensor) for h in tile.holds if h.mode != "carry"}}
    holds = tuple(
        replace(h, tensor=inside[h.tensor], fill=None if is_copied(tile, h) else h.fill)
        if (h.tensor, path) in own and h.mode != "carry" else h
        for h in tile.holds
    )  # fmt: skip
    body = tuple(
        _renamed(n, (*path, number), inside, own) if isinstance(n, Tile)
        else replace(n, tensor=inside.get(n.tensor, n.tensor)) if isinstance(n, Leaf) else n
        for number, n in enumerate(tile.body)
    )  # fmt: skip
    made = replace(tile, holds=holds, body=body)
    stored = [n.tensor for n in made.walk() if isinstance(n, Leaf)]
    axes = tuple(replace(a, binds=tuple(_bound(a, stored))) for a in tile.axes)
    return replace(made, axes=axes)


def _bound(axis: TileAxis, stored: Sequence[str]) -> list[Bind]:
    """What an axis runs along: every occurrence below."""
    return [replace(b, tensor=name) for b in axis.binds
            for name in (dict.fromkeys(s for s in stored if base_name(s) == b.tensor) or (b.tensor,))]  # fmt: skip


def apart_nests(kernel: Tile, nests: Sequence[Nest | None], computes: Mapping[str, Compute]) -> list[Nest]:
    """The nests of a kernel that was told apart, from those of its leaves as the Program has them (None: a copy)."""
    return _Nests(computes).of(kernel, nests)


class _Nests:
    """Nests with what they store and read under the names of the nearest Holds."""

    def __init__(self, computes: Mapping[str, Compute]) -> None:
        self.computes = computes
        self.known: dict[str, Tensor] = {t.name: t for c in computes.values() for t in (*reads(c), *c.outputs)}

    def tensor(self, name: str) -> Tensor:
        if name not in self.known:
            base = self.known[base_name(name)]
            self.known[name] = Tensor(name, base.shape, base.dtype)
        return self.known[name]

    def of(self, kernel: Tile, nests: Sequence[Nest | None]) -> list[Nest]:
        given, found = iter(nests), []

        def below(tile: Tile, scope: Mapping[str, tuple[str, ...]]) -> None:
            inside = dict(scope)
            for hold in tile.holds:
                if hold.mode != "carry" and hold.fill is None:
                    base = base_name(hold.tensor)
                    for name in self._beside(base):
                        own = hold.tensor.replace(base, name, 1)
                        inside[name] = (*inside.get(name, (name,)), own)
            for node in tile.body:
                if isinstance(node, Tile):
                    below(node, inside)
                elif isinstance(node, Leaf) and node.part in ("whole", "step", "copy"):
                    nest = next(given)
                    found.append(self._copy(node, inside) if nest is None else self._moved(node, nest, inside))

        below(kernel, {})
        return found

    def _beside(self, name: str) -> list[str]:
        """All that a compute stores, by the first of it."""
        compute = self.computes.get(name)
        return [name] if compute is None else [t.name for t in compute.outputs]

    def _moved(self, leaf: Leaf, nest: Nest, scope: Mapping[str, tuple[str, ...]]) -> Nest:
        own = set(nest.accumulated)

        def rule(node: Expr) -> Expr | None:
            if not isinstance(node, Load) or node.source in own or not isinstance(node.source, Tensor):
                return None
            name = scope.get(node.source.name, (node.source.name,))[-1]
            return None if name == node.source.name else load(self.tensor(name), node.indices)

        mark = leaf.tensor[len(base_name(leaf.tensor)) :]
        return replace(
            nest,
            stores=tuple(self.tensor(t.name + mark) for t in nest.stores),
            elements=tuple(rewrite(e, rule) for e in nest.elements),
            values=tuple(rewrite(v, rule) for v in nest.values),
        )

    def _copy(self, leaf: Leaf, scope: Mapping[str, tuple[str, ...]]) -> Nest:
        target = self.tensor(leaf.tensor)
        places = scope[base_name(leaf.tensor)]
        source = self.tensor(places[places.index(leaf.tensor) - 1])
        axes = tuple(Axis(f"i{d}", e) for d, e in enumerate(target.shape))
        value = load(source, [var(a) for a in axes])
        return Nest((target,), axes, (), (), None, (), (value,), target.name)
