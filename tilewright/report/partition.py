"""The nested partition of a Plan: parts inside parts, level by level, and the level at which every edge is connected.

Two nests of one part share what one passes to the other at that part's level; an edge is connected at the nearest
level at which both its ends are still in one part. Maps inside one nest meet in registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tilewright.ir.forms.compute import reads
from tilewright.report.model_view import ModelView
from tilewright.tile_graph.plan.form import IN_REGISTERS, Leaf, Tile


@dataclass(frozen=True)
class Edge:
    """A tensor from the nest that makes it to one that reads it, by what they store; both the same within a nest."""

    tensor: str
    maker: str
    reader: str
    level: str


class Edges:
    """Where what is computed meets who reads it; looked up kernel by kernel."""

    def __init__(self, view: ModelView, registers: str) -> None:
        self._view, self._registers = view, registers
        self._makers = {
            t.name: (kernel, leaf)
            for kernel in view.plan.kernels for leaf in kernel.leaves for name in (leaf.core, *leaf.epilogue)
            for t in view.by_name[name].outputs
        }  # fmt: skip

    def into(self, kernel: Tile) -> Iterator[Edge]:
        """All that end in a kernel, each once, in the order of its nests."""
        for leaf in kernel.leaves:
            yield from dict.fromkeys(self._into(kernel, leaf))

    def _into(self, kernel: Tile, leaf: Leaf) -> Iterator[Edge]:
        view = self._view
        inside = [view.by_name[name] for name in (*leaf.composed, leaf.core, *leaf.epilogue)]
        own = {t.name for compute in inside for t in compute.outputs}
        for compute in inside:
            for name in dict.fromkeys(t.name for t in reads(compute) if t.name in view.by_name):
                if name in own:
                    yield Edge(name, leaf.tensor, leaf.tensor, self._registers)
                elif name in self._makers:
                    maker, made = self._makers[name]
                    yield Edge(name, made.tensor, leaf.tensor, self._level(name, maker, kernel))

    def _level(self, tensor: str, maker: Tile, kernel: Tile) -> str:
        if maker is not kernel:
            return self._view.between.get(tensor, self._view.plan.body.level)
        return level_of(kernel, tensor, self._view, self._registers)


def level_of(kernel: Tile, tensor: str, view: ModelView, registers: str) -> str:
    """Where a result of a kernel is: at the nearest Tile that holds it, in registers of its threads, or in memory
    between kernels."""
    tiles = [n for n in kernel.walk() if isinstance(n, Tile)]
    found = (registers if h.layout == IN_REGISTERS else t.level for t in reversed(tiles) for h in t.holds
             if h.tensor == tensor and h.mode in ("store", "rolling"))  # fmt: skip
    return next(found, view.between.get(tensor, view.plan.body.level))


# --- the partition of a kernel, from the facts of its tree


def parts_of(tree: dict[str, Any]) -> dict[str, Any]:
    """A kernel's tree as parts: levels around what each holds together, tiles that only hand out left out."""
    return {"level": tree["level"], "parts": list(_inside(tree))}


def _inside(tile: dict[str, Any]) -> Iterator[Any]:
    """Names of nests, and parts that hold something of their own nearer than the one around them."""
    for node in tile["body"]:
        if node["kind"] == "leaf" and node["part"] in ("whole", "step"):
            yield node["tensor"]
        elif node["kind"] == "tile" and node["level"] != tile["level"] and any(not h["fill"] for h in node["holds"]):
            yield parts_of(node)
        elif node["kind"] == "tile":
            yield from _inside({**node, "level": tile["level"]})


def parts_text(part: dict[str, Any]) -> str:
    """Parts in brackets behind their levels: `L2[a L1[b c] d]`."""
    return f"{part['level']}[{' '.join(p if isinstance(p, str) else parts_text(p) for p in part['parts'])}]"
