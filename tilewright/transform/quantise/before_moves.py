"""Rounds to bytes where numbers are computed instead of behind what only moves them: transposes, reshapes, slices.

    q[r, c] = round(y[c // 64, r, c % 64])   =   z[c // 64, r, c % 64]   with   z[h, r, d] = round(y[h, r, d])

Then the kernel that computes y stores bytes, and whoever reads q reads them there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod

from tilewright.ir.forms.bounds import static
from tilewright.ir.forms.compute import Compute, Map, Program, reads
from tilewright.ir.forms.expr import Axis, Expr, Load, load, loads, replace_nodes, var
from tilewright.ir.forms.tensor import Tensor
from tilewright.transform.quantise.requantise import rounding
from tilewright.transform.storage import all_computes, names_of, unique_name


def round_before_moves(program: Program) -> Program:
    """The Program with such roundings before the moves that nothing else reads the results of."""
    maps = {c.output: c for c in program.computes if isinstance(c, Map)}
    readers = Counter(t for c in all_computes(program) for t in reads(c))
    readers.update(program.outputs)
    taken = names_of(program)
    found: dict[Tensor, list[Compute]] = {}
    left_out: set[Tensor] = set()
    for compute in program.computes:
        made: list[Compute] = []
        while isinstance(compute, Map) and (source := _moved(compute, maps, readers)) is not None:
            left_out.add(source.output)
            rounded, compute = _rounded_before(compute, source, taken)
            made.insert(0, compute)
            compute = rounded
        if made:
            assert isinstance(compute, Map)
            last = made[-1].outputs[0]
            found[last] = [compute, *made]
    if not found:
        return program
    computes = [new for c in program.computes if not left_out.intersection(c.outputs)
                for new in found.get(c.outputs[0], [c])]  # fmt: skip
    return replace(program, computes=tuple(computes))


def _moved(compute: Map, maps: dict[Tensor, Map], readers: Counter[Tensor]) -> Map | None:
    """What moves all that a rounding reads, where no fewer elements are rounded behind it."""
    value = loads(compute.value)
    if rounding(compute.value) is None or len(value) != 1:
        return None
    (read,) = value
    source = maps.get(read.source) if isinstance(read.source, Tensor) else None
    here = zip(read.indices, compute.axes, strict=False)
    if source is None or readers[source.output] != 1 or source.output.shape != compute.output.shape:
        return None
    if not all(index is var(axis) or static(axis.extent) == 1 for index, axis in here):
        return None
    origin = source.value
    if not isinstance(origin, Load) or not isinstance(origin.source, Tensor) or readers[origin.source] != 1:
        return None
    sizes = [_elements(t) for t in (origin.source, compute.output)]
    return source if sizes[0] is not None and sizes[0] == sizes[1] else None


def _elements(tensor: Tensor) -> int | None:
    sizes = [static(n) for n in tensor.shape]
    return None if None in sizes else prod(n for n in sizes if n is not None)


def _rounded_before(compute: Map, source: Map, taken: set[str]) -> tuple[Map, Map]:
    """The rounding of what is moved, and the move of the bytes."""
    origin = source.value
    assert isinstance(origin, Load) and isinstance(origin.source, Tensor)
    axes = tuple(Axis(f"i{n}", size) for n, size in enumerate(origin.source.shape))
    (read,) = loads(compute.value)
    whole: dict[Expr, Expr] = {read: load(origin.source, [var(a) for a in axes])}
    name = unique_name(f"{origin.source.name}_q", taken)
    rounded = Tensor(name, origin.source.shape, compute.output.dtype)
    moved = replace(source, output=compute.output, value=load(rounded, origin.indices))
    return Map(rounded, axes, replace_nodes(compute.value, whole), compute.origin), moved
