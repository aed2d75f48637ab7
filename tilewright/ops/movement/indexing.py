"""Operators whose indices are data: gathers and one-hot encoding."""

from __future__ import annotations

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.expr import Expr, cast, eq, load, lt, op, select
from tilewright.ir.forms.graph import Node
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import Builder, dims, expect, wrapped
from tilewright.ops.registry import operator


@operator("Gather")
def gather(b: Builder, node: Node, x: Tensor, indices: Tensor) -> Tensor:
    axis = b.axis(node.attributes.get("axis", 0), x.rank)
    shape = (*dims(x)[:axis], *dims(indices), *dims(x)[axis + 1 :])

    def element(*i: Expr) -> Expr:
        index = wrapped(b, indices, i[axis : axis + indices.rank], dims(x)[axis])
        return load(x, (*i[:axis], index, *i[axis + indices.rank :]))

    return b.map("", shape, element)


@operator("GatherElements", since=11)
def gather_elements(b: Builder, node: Node, x: Tensor, indices: Tensor) -> Tensor:
    axis = b.axis(node.attributes.get("axis", 0), x.rank)
    if indices.rank != x.rank or any(
        n > m for a, (n, m) in enumerate(zip(dims(indices), dims(x), strict=True)) if a != axis
    ):
        raise b.invalid(f"indices {list(dims(indices))} reach outside {list(dims(x))}")

    def element(*i: Expr) -> Expr:
        return load(x, (*i[:axis], wrapped(b, indices, i, dims(x)[axis]), *i[axis + 1 :]))

    return b.map("", dims(indices), element)


@operator("GatherND", since=11)
def gather_nd(b: Builder, node: Node, x: Tensor, indices: Tensor) -> Tensor:
    batch = int(node.attributes.get("batch_dims", 0))
    depth = dims(indices)[-1]
    outer = indices.rank - 1
    shape = (*dims(indices)[:-1], *dims(x)[batch + depth :])

    def element(*i: Expr) -> Expr:
        picked = [wrapped(b, indices, (*i[:outer], k), dims(x)[batch + k]) for k in range(depth)]
        return load(x, (*i[:batch], *picked, *i[outer:]))

    return b.map("", shape, element)


@operator("OneHot", since=9, constants=(1,))
def one_hot(b: Builder, node: Node, indices: Tensor, depth: Tensor, values: Tensor) -> Tensor:
    count = int(b.known(depth, "depth").reshape(-1)[0])
    if count < 0:
        raise b.invalid(f"its depth {count} has to be 0 or more")
    expect(b, "values", values, (2,))
    axis = b.axis(node.attributes.get("axis", -1), indices.rank + 1)
    shape = (*dims(indices)[:axis], count, *dims(indices)[axis:])

    def element(*i: Expr) -> Expr:
        index = cast(b.read(indices, (*i[:axis], *i[axis + 1 :])), dtypes.index)
        hit = eq(select(lt(index, 0), index + count, index), i[axis])
        return select(hit, load(values, (1,)), load(values, (0,)))

    return b.map("", shape, element)


@operator("ReverseSequence", since=10)
def reverse_sequence(b: Builder, node: Node, x: Tensor, lengths: Tensor) -> Tensor:
    batch, time = int(node.attributes.get("batch_axis", 1)), int(node.attributes.get("time_axis", 0))

    def element(*i: Expr) -> Expr:
        length = cast(b.read(lengths, (i[batch],)), dtypes.index)
        mirrored = op("max", length - i[time] - 1, 0)
        at = op("min", select(lt(i[time], length), mirrored, i[time]), dims(x)[time] - 1)
        return load(x, (*i[:time], at, *i[time + 1 :]))

    return b.map("", dims(x), element)
