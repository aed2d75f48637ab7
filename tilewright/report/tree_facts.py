"""The tree of a kernel's tiles as plain data: levels inside levels, what each holds and how large its part is."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from tilewright.report.model_view import ModelView, bytes_of, origins
from tilewright.tile_graph.algebra.occurrences import base_name, unique_names
from tilewright.tile_graph.algebra.propagate import Box
from tilewright.tile_graph.plan.form import Hold, Leaf, Tile, UnitBarrier
from tilewright.tile_graph.traffic.held import boxes_of, plan_nests


def tree_facts(kernel: Tile, view: ModelView) -> dict[str, Any]:
    """A Tile with all below it; sizes of axes by name, each with the extent it is cut from."""
    whole = unique_names(view.trees[kernel.name])
    boxes = {nest.tensor.name: box for nest, box in boxes_of(whole, plan_nests(whole, view.by_name)).items()}
    return _tile(whole, {}, boxes, view)


def _tile(tile: Tile, around: Mapping[str, int], boxes: Mapping[str, Box], view: ModelView) -> dict[str, Any]:
    extents = {**around, **{a.name: a.extent for a in tile.axes}}
    return {
        "kind": "tile",
        "level": tile.level,
        "over": tile.over,
        "count": tile.count,
        "sizes": [{"axis": name, "size": size, "extent": extents[name],
                   "along": [f"{b.tensor}.{b.axis}" for a in tile.axes if a.name == name for b in a.binds]}
                  for name, size in tile.sizes],
        "parts": prod(-(-max(1, extents[name]) // size) for name, size in tile.sizes),
        "holds": [_hold(h, boxes, view) for h in tile.holds],
        "body": [_node(n, {**extents, **dict(tile.sizes)}, boxes, view) for n in tile.body],
    }  # fmt: skip


def _node(
    node: Tile | Leaf | UnitBarrier, around: Mapping[str, int], boxes: Mapping[str, Box], view: ModelView
) -> dict[str, Any]:
    if isinstance(node, UnitBarrier):
        return {"kind": "barrier", "text": f"barrier of all {node.scope}"}
    return _tile(node, around, boxes, view) if isinstance(node, Tile) else _leaf(node, boxes, view)


def _hold(hold: Hold, boxes: Mapping[str, Box], view: ModelView) -> dict[str, Any]:
    """A tensor that is held; of what a leaf computes, the bytes of one part, else the whole."""
    tensor = view.everything[base_name(hold.tensor)]
    part = _elements(boxes[hold.tensor]) * tensor.dtype.bytes if hold.tensor in boxes else bytes_of(tensor)
    return {"tensor": tensor.name, "mode": hold.mode, "axis": hold.axis, "fill": hold.fill, "issue": hold.issue,
            "bytes": part * hold.stages if hold.fill is None else part, "whole_bytes": bytes_of(tensor)}  # fmt: skip


def _leaf(leaf: Leaf, boxes: Mapping[str, Box], view: ModelView) -> dict[str, Any]:
    return {
        "kind": "leaf",
        "tensor": base_name(leaf.tensor),
        "part": leaf.part,
        "shape": [int(part.size) for part in boxes[leaf.tensor]],
        "core": leaf.core,
        "epilogue": list(leaf.epilogue),
        "composed": list(leaf.composed),
        "nodes": [] if leaf.part == "copy" else origins([view.by_name[n] for n in (leaf.core, *leaf.epilogue)]),
        "recomputed": origins([view.by_name[n] for n in leaf.composed]),
        "vector": leaf.vector,
        "lanes": leaf.lanes,
        "register": dict(leaf.register),
        "order": list(leaf.order),
        "instruction": leaf.instruction,
    }


def _elements(box: Box) -> int:
    return int(prod(part.size for part in box))
