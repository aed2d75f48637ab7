"""A canonical description of nests: equal for equal subgraphs, whatever their tensors and axes are called."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from tilewright.ir.expr import Axis, Const, Expr, Load, Op, State, Symbol, Var, walk
from tilewright.ir.tensor import Tensor
from tilewright.schedule.nest import Nest


def signature(nests: Sequence[Nest], about: Callable[[Tensor], Hashable]) -> Hashable:
    """`about` adds what else matters of a tensor: its layout, whether it is stored, whether it is constant."""
    tensors: dict[Tensor, int] = {}
    axes: dict[Axis, int] = {}
    parts: list[Hashable] = []

    def tensor_id(tensor: Tensor) -> int:
        if tensor not in tensors:
            tensors[tensor] = len(tensors)
            parts.append(("tensor", tensor.shape, tensor.dtype.name, about(tensor)))
        return tensors[tensor]

    def expr(root: Expr) -> Hashable:
        numbers: dict[int, int] = {}
        rows: list[Hashable] = []
        for node in walk(root):
            inner = tuple(numbers[id(a)] for a in node.args)
            numbers[id(node)] = len(rows)
            rows.append((_head(node, tensor_id, axes), node.dtype.name, inner))
        return tuple(rows)

    for nest in nests:
        for axis in (*nest.axes, *nest.reduce_axes):
            axes.setdefault(axis, len(axes))
        parts.append(
            (
                "nest",
                tuple((axes[a], a.extent) for a in nest.axes),
                tuple((axes[a], a.extent) for a in nest.reduce_axes),
            )
        )
        parts.append(tuple(expr(e) for e in nest.elements))
        parts.append(nest.monoid)
        parts.append(tuple(tensor_id(t) for t in nest.accumulated))
        parts.append(tuple(expr(e) for e in nest.values))
        parts.append(tuple(expr(e) for e in nest.initial))
        parts.append(tuple(tensor_id(t) for t in nest.stores))
    return tuple(parts)


def _head(node: Expr, tensor_id: Callable[[Tensor], int], axes: dict[Axis, int]) -> Hashable:
    if isinstance(node, Const):
        return ("const", repr(node.value))
    if isinstance(node, Var):
        return ("axis", axes.setdefault(node.axis, len(axes)))
    if isinstance(node, Symbol):
        return ("symbol", node.name, node.low, node.high)
    if isinstance(node, State):
        return ("state", node.name)
    if isinstance(node, Load):
        return ("load", tensor_id(node.source))
    assert isinstance(node, Op)
    return ("op", node.op.name)
