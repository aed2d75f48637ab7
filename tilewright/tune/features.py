"""What a learned correction is told of a kernel: whole numbers from its Plan's tree and from what the fold makes of it.

Whole numbers alone, so that every host sees the same: sizes and counts as they are, shares of the predicted time in
thousandths, bytes and time by their number of bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import prod

from tilewright.backend.seconds import price, whole_name
from tilewright.backend.terms import Terms
from tilewright.ir.forms.compute import Compute, Program, all_computes
from tilewright.target import Target
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.plan.form import Leaf, Plan, Tile
from tilewright.tile_graph.plan.leaf_form import LeafForm, Sizes, ThreadForm, VectorForm
from tilewright.tile_graph.traffic.held import plan_nests
from tilewright.tune.kinds import kind_of_nests, work

_LEVELS = 4  # that are told of, the farthest first
_PICOSECONDS = 1e12
_OPTIONS = {"unroll": "written out", "cut": "in passes", "ahead": "ahead", "row_lanes": "row lanes",
            "near_rows": "near rows", "soon": "soon", "together": "together", "in_turn": "in turn",
            "split": "threads a sum", "flat": "flat", "at_once": "at once", "step": "step",
            "rolled": "rolled"}  # fmt: skip


@dataclass(frozen=True)
class Told:
    """One kernel of a Plan: its class, what it is predicted to take, and its numbers by name."""

    kind: str
    seconds: float
    numbers: Mapping[str, int]


def features(program: Program, plan: Plan, target: Target) -> list[Told]:
    """Of every kernel of a Plan that shares no launch, as the fold prices it."""
    computes = all_computes(program)
    parts: dict[str, list[Terms]] = {}
    for name, terms in price(program, plan, target).kernels.items():
        parts.setdefault(whole_name(name), []).append(terms)
    return [_told(kernel, parts[kernel.name], computes, target) for kernel in plan.kernels]


def _told(kernel: Tile, parts: list[Terms], computes: Mapping[str, Compute], target: Target) -> Told:
    nests = plan_nests(kernel, computes)
    largest = max(range(len(nests)), key=lambda i: work([nests[i]]))
    seconds = float(sum(terms.seconds for terms in parts))
    numbers = {
        **_of_terms(parts, seconds),
        **_of_tree(kernel, target),
        **leaf_numbers(kernel.leaves[largest], nests[largest]),
        "points": bits(work(nests)),
        "largest": _thousandths(work([nests[largest]]), work(nests)),
    }
    return Told(kind_of_nests(nests, computes), seconds, numbers)


def _of_terms(parts: list[Terms], seconds: float) -> dict[str, int]:
    """Where the time goes; levels are counted from main memory, which all machines have."""
    found = {
        "time": bits(seconds * _PICOSECONDS),
        "compute": _thousandths(float(sum(p.compute for p in parts)), seconds),
        "waits": _thousandths(float(sum(p.waits for p in parts)), seconds),
    }
    for place in range(_LEVELS):
        levels = [p.by_level[-1 - place] for p in parts if len(p.by_level) > place]
        found[f"moved {place}"] = _thousandths(float(sum(level.seconds for level in levels)), seconds)
        found[f"read {place}"] = bits(float(sum(level.read for level in levels)))
        found[f"written {place}"] = bits(float(sum(level.written for level in levels)))
    return found


def _of_tree(kernel: Tile, target: Target) -> dict[str, int]:
    tiles = [t for t in kernel.walk() if isinstance(t, Tile)]
    extents = {axis.name: axis.extent for t in tiles for axis in t.axes}
    cut = [(extents.get(name, size), size) for name, size in kernel.sizes]
    trips = prod(-(-extent // size) for extent, size in cut)
    near = [target.place(cache) for cache in target.caches if cache.name == kernel.level]
    return {
        "trips": trips,
        "trips a unit": _thousandths(trips, target.units * -(-trips // target.units)),
        "tile": prod(size for _, size in cut),
        "innermost part": cut[-1][1] if cut else 0,
        "leaves": len(kernel.leaves),
        "tiles inside": len(tiles) - 1,
        "held": sum(len(t.holds) for t in tiles),
        "rolling": sum(h.mode == "rolling" for t in tiles for h in t.holds),
        "level": near[0] if near else 0,
        "is stream": int(kernel.stream is not None),
    }


def leaf_numbers(leaf: Leaf, nest: Nest) -> dict[str, int]:
    """How the nest runs that most of the points are of."""
    register = dict(leaf.register)
    outputs = [size for name, size in leaf.register if not name.startswith("r")]
    loops = [name for name in leaf.order if not name.startswith("r")]
    return {
        "lanes": leaf.lanes,
        "register": prod(outputs),
        "accumulators": -(-prod(outputs) // leaf.lanes),
        "along the vector": register.get(leaf.vector or "", 0),
        "across the vector": prod(outputs) // max(1, register.get(leaf.vector or "", 1)),
        "sums across lanes": int(leaf.vector is not None and leaf.vector.startswith("r")),
        "place of the vector": loops[::-1].index(leaf.vector) if leaf.vector in loops else -1,
        "loops": len(loops),
        "summed loops": len(leaf.order) - len(loops),
        **_USUAL,
        **_option_numbers(leaf.form),
        "instruction": int(leaf.instruction is not None),
        "applied after": len(leaf.epilogue),
        "computed again": len(leaf.composed),
        "reads": len(nest.reads()),
        "bytes an element": nest.tensor.dtype.bytes,
        "steps of the sum": bits(work([nest]) // max(1, prod(_extents(nest)))),
    }


def _option_numbers(form: LeafForm) -> dict[str, int]:
    """Of the options of a leaf's form, those that are told."""
    return {_OPTIONS[part.name]: _number(getattr(form, part.name)) for part in fields(form) if part.name in _OPTIONS}


def _number(option: int | tuple[str, ...] | Sizes) -> int:
    if isinstance(option, int):
        return int(option)
    sizes = [part[1] for part in option if isinstance(part, tuple)]
    return prod(sizes) if sizes else len(option)


_USUAL = {**_option_numbers(VectorForm()), **_option_numbers(ThreadForm()), "rolled": 0}


def _extents(nest: Nest) -> list[int]:
    return [a.extent for a in nest.axes if isinstance(a.extent, int)]


def bits(size: float) -> int:
    """The logarithm by the number of binary digits."""
    return int(size).bit_length()


def _thousandths(part: float, whole: float) -> int:
    return int(1000 * part / whole) if whole > 0 else 0
