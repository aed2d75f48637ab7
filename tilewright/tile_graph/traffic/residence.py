"""Which intermediates between kernels stay in the cache that all units share: by the bytes that pass between a tensor's
being written and its last being read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tilewright.ir.forms.compute import Compute, Scan, reads
from tilewright.ir.forms.tensor import Tensor
from tilewright.tile_graph.plan.form import Leaf, Tile


def reuse_distances(units: Sequence[Tile], computes: Mapping[str, Compute]) -> dict[str, int]:
    """Of every tensor that one of these kernels (or steps of a Scan) leaves to another the bytes that are touched from
    the kernel that writes it to the last that reads it, each tensor once."""
    touched = [_touched(unit, computes) for unit in units]
    sizes = {t.name: _bytes(t) for tensors in touched for t in tensors}
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for number, tensors in enumerate(touched):
        for tensor in tensors:
            first.setdefault(tensor.name, number)
            last[tensor.name] = number
    found = {}
    for name in first:
        if name in computes and last[name] > first[name]:
            between = {t.name for tensors in touched[first[name] : last[name] + 1] for t in tensors}
            found[name] = sum(sizes[other] for other in between)
    return found


def _touched(unit: Tile, computes: Mapping[str, Compute]) -> set[Tensor]:
    """Tensors that kernels read from memory or write to it."""
    if unit.scan is not None:
        scan = computes[unit.scan]
        assert isinstance(scan, Scan)
        return {*reads(scan), *scan.outputs}
    leaves = [n for n in unit.walk() if isinstance(n, Leaf) and n.part != "copy"]
    inside = {*unit.held, *(name for leaf in leaves for name in leaf.composed)}
    made = {name for leaf in leaves for name in (leaf.core, *leaf.epilogue) if name != leaf.tensor}
    used: Iterable[Tensor] = (
        t for leaf in leaves for name in (leaf.core, *leaf.epilogue, *leaf.composed)
        for t in (*reads(computes[name]), *computes[name].outputs)
    )  # fmt: skip
    kept = {t for leaf in leaves if leaf.tensor not in inside for t in computes[leaf.tensor].outputs}
    near = inside | made
    return {t for t in used if t.name not in near} | kept


def _bytes(tensor: Tensor) -> int:
    return tensor.most_bytes
