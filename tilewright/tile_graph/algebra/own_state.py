"""Steps of a Scan that tiles walk without waiting for each other: each reads of the state what it left itself."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.ir.forms.compute import Scan
from tilewright.ir.forms.expr import Axis, Var, axes_of, var
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import Box, Range, extent_of, propagate, reads_box, whole


def own_axes(nests: Sequence[Nest], scan: Scan) -> frozenset[str]:
    """The axes of the last nest along which the nests of a step may be cut so that every tile reads, of what the step
    before left, its own part alone."""
    origins = {f"o{i}": Axis(f"origin_{i}", extent_of(a.extent)) for i, a in enumerate(nests[-1].axes)}
    cut = {name for name, origin in origins.items() if extent_of(origin.extent) > 1}
    while cut:
        box = tuple(_place(origin) if name in cut else whole(extent_of(origin.extent))
                    for name, origin in origins.items())  # fmt: skip
        shared = _shared(nests, scan, box)
        if not shared:
            break
        along = {name for name in cut if any(origins[name] in axes_of(have.low, want.low) for have, want in shared)}
        cut = cut - along if along else set()
    return frozenset(cut)


def _place(origin: Axis) -> Range:
    return Range(var(origin), 1, extent_of(origin.extent))


def _shared(nests: Sequence[Nest], scan: Scan, box: Box) -> list[tuple[Range, Range]]:
    """What a tile leaves of the state and what it reads of it, where that is more, axis by axis."""
    boxes = propagate(nests, box)
    made = {t: n for n in nests for t in n.stores}
    following = dict(zip(scan.carry, scan.following, strict=True))
    found: list[tuple[Range, Range]] = []
    for nest in nests:
        for tensor, read in reads_box(nest, boxes[nest], {}, set(following)).items():
            left = boxes[made[following[tensor]]]
            for have, want in zip(left, read, strict=True):
                is_whole = have.size >= have.extent
                is_own = have.size == 1 and want.size == 1 and isinstance(have.low, Var) and want.low is have.low
                if not is_whole and not is_own:
                    found.append((have, want))
    return found
