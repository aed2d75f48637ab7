"""The decisions in which two Plans of a Program differ.

A decision that settles others hides them: kernels that are joined have tiles of their own, and another vector axis
brings another register tile. Two plans make a pair where one decision is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields

from tilewright.tile_graph.plan.form import Leaf, Plan, Tile
from tilewright.tile_graph.plan.leaf_form import LEAF_FORMS

# Fields of a Leaf and of its forms, and the decisions they are, those first that settle what comes after.
LEAF: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("instruction", ("instruction",)),
    ("vector axis", ("vector", "flat")),
    ("loop order", ("order",)),
    ("threads of a sum", ("split",)),
    ("register tile", ("register", "lanes", "unroll", "row_lanes", "together", "rolled", "anew", "packs")),
    ("passes of a sum", ("cut", "near_rows", "step")),
    ("in flight", ("at_once",)),
    ("prefetch", ("ahead", "soon")),
    ("composed", ("composed", "epilogue", "in_turn")),
)
_USUAL = {option.name: option.default for form in LEAF_FORMS.values() for option in fields(form)}


def differences(one: Plan, other: Plan) -> frozenset[str]:
    """Names of the decisions; empty where plans are the same but for predictions and layouts that follow."""
    mine, theirs = _kernels(one), _kernels(other)
    found: set[str] = set()
    if mine.keys() != theirs.keys():
        computed = [Counter(t for k in kernels for t in k) for kernels in (mine, theirs)]
        again = any(count > 1 for each in computed for count in each.values())
        found.add("joined" if computed[0] == computed[1] else "computed again" if again else "fused maps")
    for leaves in mine.keys() & theirs.keys():
        found |= _kernel_differences(mine[leaves], theirs[leaves])
    if not found and _shape(one.body) != _shape(other.body):
        found.add("launch")
    if not found and one.layouts != other.layouts:
        found.add("layout")
    return frozenset(found)


def _kernels(plan: Plan) -> dict[tuple[str, ...], Tile]:
    """By what their leaves store."""
    return {tuple(leaf.tensor for leaf in k.leaves): k for k in plan.kernels}


def _kernel_differences(one: Tile, other: Tile) -> set[str]:
    if (one.stream is None) != (other.stream is None):
        return {"streamed"}
    if _rolls(one) != _rolls(other):
        return {"rolled window"}
    if _levels(one) != _levels(other):
        return {"level"}
    found = {decision for pair in zip(one.leaves, other.leaves, strict=True) for decision in _leaf_differences(*pair)}
    if one.sizes != other.sizes or _inner_sizes(one) != _inner_sizes(other):
        found.add("tile size")
    if _handed_out(one) != _handed_out(other):
        found.add("threads")
    if _stages(one) != _stages(other):
        found.add("stages")
    return found


def _leaf_differences(one: Leaf, other: Leaf) -> Iterator[str]:
    """The first of a leaf that differs: what comes after it follows."""
    for decision, names in LEAF:
        if any(_said(one, name) != _said(other, name) for name in names):
            yield decision
            return


def _said(leaf: Leaf, name: str) -> object:
    """Of what its form has no option for: as usual."""
    return getattr(leaf, name) if hasattr(leaf, name) else getattr(leaf.form, name, _USUAL[name])


def _tiles(kernel: Tile) -> list[Tile]:
    return [n for n in kernel.walk() if isinstance(n, Tile) and n is not kernel]


def _rolls(kernel: Tile) -> bool:
    return any(h.mode == "rolling" for t in kernel.walk() if isinstance(t, Tile) for h in t.holds)


def _levels(kernel: Tile) -> list[tuple[str, str]]:
    """Levels of the Tiles inside that are walked in order, and those of what is handed out once."""
    return [(t.level, t.over) for t in _tiles(kernel)] if kernel.stream is None else []


def _inner_sizes(kernel: Tile) -> list[object]:
    return [t.sizes for t in _tiles(kernel) if t.over == "order"]


def _handed_out(kernel: Tile) -> list[object]:
    return [(t.over, t.count, t.sizes) for t in _tiles(kernel) if t.over in ("lanes", "warps")]


def _stages(kernel: Tile) -> list[int]:
    return [h.stages for t in kernel.walk() if isinstance(t, Tile) for h in t.holds]


def _shape(tile: Tile) -> object:
    """What runs together, and what waits for what."""
    inside = [_shape(n) if isinstance(n, Tile) and not n.is_kernel else getattr(n, "name", "") for n in tile.body]
    return tile.over, tile.runs, tile.scan, inside
