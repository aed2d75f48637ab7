"""Maps that move data: which axes a block is transposed between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tilewright.ir.forms.expr import Axis, Load
from tilewright.tile_graph.algebra.nest import Nest
from tilewright.tile_graph.algebra.propagate import extent_of

_TRANSPOSED = ("float32", "int32", "uint32")  # what fills the lanes of a vector of 32-bit elements
_LINE = 16  # such elements of a cache line: stored whole

_WIDE = 8  # lanes of the vectors that have masked moves

Stride = Callable[[Load, Axis], int | None]


def transposed_axis(nest: Nest, vector: Axis | None, lanes: int, stride: Stride) -> Axis | None:
    """The axis along which reads are contiguous that the vector axis finds scattered; None where there is none."""
    if nest.monoid is not None or nest.unswitched or vector not in nest.axes or vector is None or lanes < 2:
        return None
    # of a wide vector a part moves as well as the whole, and the lanes are those that hold the extent
    least = lanes if lanes < _WIDE else lanes // 2 + 1
    if extent_of(vector.extent) < least or any(t.dtype.name not in _TRANSPOSED for t in nest.stores):
        return None
    found: Counter[Axis] = Counter()
    for node in nest.value_loads:
        if node.dtype.name not in _TRANSPOSED or stride(node, vector) in (0, 1):
            continue
        found.update(
            a for a in nest.axes if a is not vector and extent_of(a.extent) >= least and stride(node, a) == 1
        )
    return found.most_common(1)[0][0] if found else None


def transposed_block(axis: Axis, vector: Axis, lanes: int) -> dict[Axis, int]:
    """Squares of one vector by one vector, as many along the stored axis as fill a line."""
    width = max(lanes, _LINE)
    while width > lanes and width > extent_of(vector.extent):
        width //= 2
    return {vector: width, axis: lanes}
