"""Where each tensor of a kernel is stored, and how its logical indices become positions in that storage."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from tilewright.ir.analysis.simplify import join_divisions, linear, simplify
from tilewright.ir.forms.expr import Expr, Load, as_expr, const, load, rewrite
from tilewright.ir.forms.loops import Buffer, Memory, Store
from tilewright.ir.forms.tensor import Layout, Tensor
from tilewright.tile_graph.algebra.propagate import extent_of


@dataclass(frozen=True)
class Place:
    """`buffer` holds the tensor in `layout`, starting at logical index `lows`, below the leading `prefix` indices."""

    buffer: Buffer
    layout: Layout
    lows: tuple[Expr, ...] = ()
    prefix: tuple[Expr, ...] = ()
    dropped: int = 0  # last dimensions of one element, which the buffer does not have
    flat: tuple[int, ...] = ()  # the extents that the buffer has as one
    is_own: bool = False  # one element, the only one that whoever reads it has

    def indices(self, logical: tuple[Expr, ...]) -> tuple[Expr, ...]:
        if self.is_own:
            return tuple(const(0) for _ in logical)
        if self.lows:
            logical = tuple(i - low for i, low in zip(logical, self.lows, strict=True))
        found = (*self.prefix, *(simplify(i) for i in self.layout.storage_indices(logical)))
        if self.flat:
            offset: Expr = const(0)
            for index, size in zip(found, self.flat, strict=True):
                offset = offset * size + index
            return (simplify(join_divisions(linear(simplify(offset))).expr()),)
        return found[: len(found) - self.dropped]


@dataclass
class Access:
    """The places of all tensors a kernel touches. A tensor may be written to several places, read from one."""

    read: dict[Tensor, Place] = field(default_factory=dict)
    write: dict[Tensor, list[Place]] = field(default_factory=dict)

    def put(self, tensor: Tensor, place: Place) -> None:
        self.read[tensor] = place
        self.write.setdefault(tensor, []).append(place)

    def lower(self, value: Expr) -> Expr:
        """The expression with every tensor read turned into a buffer read."""

        def rule(node: Expr) -> Expr | None:
            if isinstance(node, Load) and isinstance(node.source, Tensor):
                place = self.read[node.source]
                return load(place.buffer, place.indices(node.indices))
            return None

        return rewrite(value, rule)

    def stores(self, tensor: Tensor, logical: tuple[Expr, ...], value: Expr) -> tuple[Store, ...]:
        return tuple(Store(p.buffer, tuple(as_expr(i) for i in p.indices(logical)), value) for p in self.write[tensor])


def global_place(tensor: Tensor, layout: Layout, name: str, squeezed: bool = False) -> Place:
    """`squeezed`: neighbours in memory are neighbours of the last dimension, whatever of one element follows."""
    shape = layout.storage_shape(tensor.shape)
    dropped = 0
    while squeezed and len(shape) > 1 and shape[-1] == 1:
        shape, dropped = shape[:-1], dropped + 1
    return Place(Buffer(name, shape, tensor.dtype, Memory.GLOBAL), layout, dropped=dropped)


def flat_place(tensor: Tensor, layout: Layout, name: str) -> Place:
    """All dimensions as one: neighbours in memory are neighbours, at the end of a row too."""
    shape = tuple(extent_of(e) for e in layout.storage_shape(tensor.shape))
    return Place(Buffer(name, (prod(shape),), tensor.dtype, Memory.GLOBAL), layout, flat=shape)
