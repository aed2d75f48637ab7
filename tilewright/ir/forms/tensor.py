"""Tensors of a Program and the layouts they may be stored in.

A layout is a property of a tensor, never an expression: logical indices stay what the model says, and only
lowering turns them into positions in storage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import prod

import numpy as np

from tilewright.ir.forms.bounds import upper
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import Expr, ExprLike, Extent, as_expr


@dataclass(frozen=True, eq=False)
class Tensor:
    """A named value of a Program. Identity counts; names are unique within a Program."""

    name: str
    shape: tuple[Extent, ...]
    dtype: DType

    @property
    def rank(self) -> int:
        return len(self.shape)

    @cached_property
    def most_bytes(self) -> int:
        """Bytes of all elements, with the largest extents there can be."""
        return prod(e if isinstance(e, int) else int(upper(e)) for e in self.shape) * self.dtype.bytes

    def __repr__(self) -> str:
        return f"{self.name}: {self.dtype.name}{list(self.shape)}"


@dataclass(frozen=True)
class StorageAxis:
    """One axis of storage: the part of logical axis `axis` that counts in steps of `step`, `size` of them.

    The outermost part of an axis has size None: as many steps as the extent needs, rounded up (padding).
    """

    axis: int
    step: int = 1
    size: int | None = None


@dataclass(frozen=True)
class Layout:
    """Storage order of a tensor: outermost first; an axis may be split into several parts.

    `fill` is what padding holds. `swizzle` permutes the innermost axis by XOR with an outer position: (period)
    groups of elements, so that column accesses of a GPU's shared memory hit distinct banks. `gap` elements lie between
    the end of a row of the innermost axis and the next row; nobody reads or writes them.
    """

    order: tuple[StorageAxis, ...]
    fill: float = 0.0
    swizzle: int = 0
    gap: int = 0

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Kept: a layout is part of most keys under which planning finds what it knows."""
        return hash((self.order, self.fill, self.swizzle, self.gap))

    @staticmethod
    @cache
    def natural(rank: int) -> Layout:
        return Layout(tuple(StorageAxis(a) for a in range(rank)))

    @staticmethod
    def permuted(order: tuple[int, ...]) -> Layout:
        return Layout(tuple(StorageAxis(a) for a in order))

    @cached_property
    def is_natural(self) -> bool:
        return not self.swizzle and not self.gap and all(s == StorageAxis(i) for i, s in enumerate(self.order))

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor may lie so: it has these axes, and no part that is cut along one is longer than that."""
        cuts = {part.axis: part.step for part in self.order if part.size is None}
        whole = [e for e in tensor.shape if isinstance(e, int)]
        return sorted(cuts) == list(range(len(whole))) and all(step <= whole[axis] for axis, step in cuts.items())

    def storage_shape(self, shape: tuple[Extent, ...]) -> tuple[Extent, ...]:
        sizes: list[Extent] = []
        for part in self.order:
            extent = shape[part.axis]
            if part.size is not None:
                sizes.append(part.size)
            elif isinstance(extent, int):
                sizes.append(-(-extent // part.step))
            else:
                sizes.append(extent if part.step == 1 else (extent + (part.step - 1)) // part.step)
        return (*sizes[:-1], sizes[-1] + self.gap) if self.gap else tuple(sizes)

    def storage_indices(self, indices: tuple[ExprLike, ...]) -> tuple[Expr, ...]:
        """Where logical `indices` are in storage, an index a storage axis."""
        positions: list[Expr] = []
        for part in self.order:
            position = as_expr(indices[part.axis])
            if part.step != 1:
                position = position // part.step
            if part.size is not None:
                position = position % part.size
            positions.append(position)
        return tuple(positions)

    def pack(self, array: np.ndarray) -> np.ndarray:
        """The array in this layout, padding filled."""
        if self.gap:
            packed = replace(self, gap=0).pack(array)
            return np.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, self.gap)])
        shape = tuple(int(s) for s in self.storage_shape(array.shape))  # type: ignore[arg-type]
        if self.is_natural:
            return np.ascontiguousarray(array)
        padded = list(array.shape)
        splits: list[list[StorageAxis]] = [[] for _ in array.shape]
        for part in self.order:
            splits[part.axis].append(part)
        for axis, parts in enumerate(splits):
            outer = [p for p in parts if p.size is None]
            if len(outer) != 1:
                raise ValueError(f"axis {axis} needs exactly one outermost part in {self}")
            padded[axis] = outer[0].step * -(-array.shape[axis] // outer[0].step)
        full = array
        if tuple(padded) != array.shape:
            full = np.full(padded, self.fill, array.dtype)
            full[tuple(slice(0, n) for n in array.shape)] = array
        # split every axis, coarse to fine, then bring the parts into storage order
        fine_shape: list[int] = []
        place: dict[StorageAxis, int] = {}
        for axis, parts in enumerate(splits):
            for part in sorted(parts, key=lambda p: -p.step):
                place[part] = len(fine_shape)
                fine_shape.append(part.size if part.size is not None else padded[axis] // part.step)
        packed = full.reshape(fine_shape).transpose([place[p] for p in self.order])
        return np.ascontiguousarray(packed).reshape(shape)


def extents(tensor: Tensor) -> tuple[int, ...]:
    """The shape of a tensor that has no symbols in it."""
    if any(not isinstance(e, int) for e in tensor.shape):
        raise ValueError(f"shape {tensor.shape} is symbolic")
    return tensor.shape  # type: ignore[return-value]


def elements(shape: tuple[Extent, ...]) -> int:
    """Number of elements of a shape of integers."""
    if any(not isinstance(s, int) for s in shape):
        raise ValueError(f"shape {shape} is symbolic")
    return prod(shape)  # type: ignore[arg-type]
