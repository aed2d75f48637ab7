"""Softmax, LogSoftmax and Hardmax as chains of primitive computes, so that fusion is the scheduler's choice."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.expr import Expr, cast, const, eq, op
from tilewright.ir.forms.graph import Node
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import Builder, dims
from tilewright.ops.reductions.reduction import arg_extreme, reduce_over
from tilewright.ops.registry import operator


def _outer(axes: Sequence[int], i: tuple[Expr, ...]) -> tuple[Expr, ...]:
    return tuple(v for a, v in enumerate(i) if a not in axes)


def _axes(b: Builder, node: Node, x: Tensor) -> list[int]:
    """One axis; before operator set 13 all from `axis` on, as if flattened."""
    if node.version and node.version < 13:
        return list(range(b.axis(node.attributes.get("axis", 1), x.rank), x.rank))
    return [b.axis(node.attributes.get("axis", -1), x.rank)]


def softmax_over(b: Builder, x: Tensor, axes: Sequence[int], logarithm: bool) -> Tensor:
    wide = dtypes.accumulator(x.dtype)
    top = reduce_over(b, "max", x, axes, False, "max", lambda v, *at: v)

    def centred(i: tuple[Expr, ...]) -> Expr:
        return cast(b.read(x, i), wide) - cast(b.read(top, _outer(axes, i)), wide)

    powers = b.map("exp", dims(x), lambda *i: op("exp", centred(i)))
    total = reduce_over(b, "sum", powers, axes, False, "add", lambda v, *at: v)
    if logarithm:
        return b.map("", dims(x), lambda *i: cast(centred(i) - op("log", b.read(total, _outer(axes, i))), x.dtype))
    # times the reciprocal: one division a sum instead of one an element
    one = const(1, wide)
    return b.map("", dims(x), lambda *i: cast(b.read(powers, i) * (one / b.read(total, _outer(axes, i))), x.dtype))


@operator("Softmax")
def softmax(b: Builder, node: Node, x: Tensor) -> Tensor:
    return softmax_over(b, x, _axes(b, node, x), logarithm=False)


@operator("LogSoftmax")
def log_softmax(b: Builder, node: Node, x: Tensor) -> Tensor:
    return softmax_over(b, x, _axes(b, node, x), logarithm=True)


@operator("Hardmax")
def hardmax(b: Builder, node: Node, x: Tensor) -> Tensor:
    axes = _axes(b, node, x)
    if len(axes) > 1:
        raise b.unsupported("Hardmax over several axes is not supported; convert the model to operator set 13")
    if 0 in dims(x):
        return x
    argument = Node(
        "ArgMax", node.name, node.inputs, node.outputs, {"axis": axes[0], "keepdims": 0}, version=node.version
    )
    best = arg_extreme(b, argument, x)
    return b.map("", dims(x), lambda *i: cast(eq(b.read(best, _outer(axes, i)), i[axes[0]]), x.dtype))
