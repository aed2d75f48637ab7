"""Evaluation of scalar expressions on NumPy arrays, shared by the interpreters of the Program and of the Loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

import numpy as np

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import Axis, Const, Expr, Load, Op, walk

Dims = tuple[tuple[Axis, range], ...]  # the axes of a block and the part of each it covers, a dimension an axis


# The smallest normal number of the types whose smaller ones CPUs can flush; those of half precision stay.
SMALLEST = {dtypes.float32: 2.0**-126, dtypes.bfloat16: 2.0**-126, dtypes.float64: 2.0**-1022}
_MOVES = frozenset({"select", "cast", "bitcast"})  # operations that hand on what they are given


def flushed(value: np.ndarray, dtype: DType) -> np.ndarray:
    """Denormals of `dtype` as zeros of their sign, whatever type the values are computed in."""
    smallest = SMALLEST.get(dtype)
    if smallest is None:
        return value
    small = np.abs(value) < value.dtype.type(smallest)
    return np.where(small, np.copysign(value.dtype.type(0), value), value) if small.any() else value


def working_type(dtype: DType, wide: bool) -> np.dtype:
    return np.dtype(np.float64) if wide and dtype.is_float else dtype.numpy


def evaluate_exprs(
    roots: Sequence[Expr],
    leaf: Callable[[Expr], np.ndarray],
    read: Callable[[Load, tuple[np.ndarray, ...]], np.ndarray],
    wide: bool = False,
    flush: bool = False,
) -> list[np.ndarray]:
    """Values of expressions: `leaf` answers for axes, states and symbols, `read` for loads. Values broadcast.

    With `flush`, arithmetic takes denormal operands as zeros and gives zeros for denormal results.
    """
    nodes = list(walk(*roots))
    uses: dict[int, int] = {}
    for node in (*roots, *(a for n in nodes for a in n.args)):
        uses[id(node)] = uses.get(id(node), 0) + 1
    values: dict[int, np.ndarray] = {}
    with np.errstate(all="ignore"):
        for node in nodes:
            args = tuple(values[id(a)] for a in node.args)
            if isinstance(node, Const):
                # rounded to its own type first: a wide evaluation computes the same function
                values[id(node)] = _constant(node).astype(working_type(node.dtype, wide))
            elif isinstance(node, Op) and flush and node.op.name not in _MOVES:
                given = [flushed(a, n.dtype) for a, n in zip(args, node.args, strict=True)]
                values[id(node)] = flushed(apply_op(node, given, wide), node.dtype)
            elif isinstance(node, Op):
                values[id(node)] = apply_op(node, args, wide)
            elif isinstance(node, Load):
                values[id(node)] = np.asarray(read(node, args)).astype(working_type(node.dtype, wide), copy=False)
            else:
                values[id(node)] = leaf(node)
            for argument in node.args:
                uses[id(argument)] -= 1
                if not uses[id(argument)]:
                    del values[id(argument)]
    return [values[id(r)] for r in roots]


def _constant(node: Const) -> np.ndarray:
    if node.dtype.is_storage:  # given by its bits
        return np.asarray(node.value, np.uint8).view(node.dtype.numpy)
    return np.asarray(node.value, node.dtype.numpy)


def apply_op(node: Op, args: Sequence[np.ndarray], wide: bool = False) -> np.ndarray:
    """One row of the scalar table on arrays, rounded to the node's type."""
    target = working_type(node.dtype, wide)
    if node.op.name == "cast":
        return _cast(args[0], node.dtype, target)
    if node.op.name == "bitcast":
        exact = np.ascontiguousarray(args[0].astype(node.args[0].dtype.numpy, copy=False)).reshape(args[0].shape)
        return exact.view(node.dtype.numpy).astype(target, copy=False)
    if args[-1].dtype.itemsize == 2 and node.args[-1].dtype.is_float:
        first = 1 if node.op.name == "select" else 0
        args = [*args[:first], *(a.astype(np.float32) for a in args[first:])]
    return np.asarray(node.op.numpy(*args)).astype(target, copy=False)


def _cast(value: np.ndarray, dtype: DType, target: np.dtype) -> np.ndarray:
    if dtype.kind == "b":
        return np.asarray(value != 0)
    if dtype.is_int and value.dtype.kind not in "iub" and dtype is not dtypes.uint64:
        value = value.astype(np.int64)  # truncates; narrowing from there wraps the same way on every machine
    if dtype is dtypes.tf32 and target == dtype.numpy:
        return dtypes.as_tf32(value)
    return value.astype(target, copy=False)


def gather(array: np.ndarray, indices: tuple[np.ndarray, ...]) -> np.ndarray:
    """Elements at broadcasting indices, each clipped into range."""
    if array.size == 0:
        return np.zeros(np.broadcast_shapes(*(i.shape for i in indices)), array.dtype)
    flat: np.ndarray = np.asarray(0)
    for index, size in zip(indices, array.shape, strict=True):
        flat = flat * size + np.clip(index.astype(np.int64, copy=False), 0, size - 1)
    return np.ascontiguousarray(array).reshape(-1).take(flat)


def grid(dims: Dims) -> dict[Axis, np.ndarray]:
    """The values of each axis along its own dimension."""
    return {
        axis: np.arange(span.start, span.stop).reshape([-1 if i == place else 1 for i in range(len(dims))])
        for place, (axis, span) in enumerate(dims)
    }


def blocks(dims: Dims, limit: int) -> Iterator[Dims]:
    """Cut a block into parts of at most `limit` elements in row-major order, outer axes first."""
    if any(not r for _, r in dims):
        return
    sizes = [len(r) for _, r in dims]
    place = next((i for i, n in enumerate(sizes) if n > 1), None)
    if place is None or prod(sizes) <= limit:
        yield dims
        return
    axis, span = dims[place]
    chunk = max(1, limit // prod(sizes[place + 1 :]))
    for start in range(span.start, span.stop, chunk):
        part = (axis, range(start, min(start + chunk, span.stop)))
        yield from blocks((*dims[:place], part, *dims[place + 1 :]), limit)
