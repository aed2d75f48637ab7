"""A canonical description of nests: equal for equal subgraphs, whatever their tensors and axes are called."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from tilewright.ir.forms.expr import Axis
from tilewright.ir.forms.tensor import Tensor
from tilewright.tile_graph.algebra.nest import Nest


def signature(nests: Sequence[Nest], about: Callable[[Tensor], Hashable]) -> Hashable:
    """`about` adds what else matters of a tensor: its layout, whether it is stored, whether it is constant."""
    return signature_by(nests, lambda tensor: (tensor.shape, tensor.dtype.name, about(tensor)))


def signature_by(nests: Sequence[Nest], described: Callable[[Tensor], Hashable]) -> Hashable:
    """The same where all that matters of a tensor, its shape and type too, is said by `described`."""
    tensors: dict[Tensor, int] = {}
    axes: dict[Axis, int] = {}
    parts: list[Hashable] = []
    for nest in nests:
        outline = nest.outline
        for tensor in outline.tensors:
            if tensor not in tensors:
                tensors[tensor] = len(tensors)
                parts.append(described(tensor))
        read = tuple([tensors[t] for t in outline.tensors])
        outside = tuple([axes.setdefault(a, len(axes)) for a in outline.outside])
        parts.append((outline.key, read, outside))
    return tuple(parts)
