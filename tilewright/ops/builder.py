"""The Builder: operators say what an element is, it makes axes, names and computes, and folds constants on the way."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from tilewright.errors import InternalError, ModelError, UndecidedError, UnsupportedError
from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bounds import fixed
from tilewright.ir.forms.budget import CALLS_A_NODE, Budget
from tilewright.ir.forms.compute import Compute, Map, Monoid, Reduce, Scan, plain_monoid
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import (
    Axis,
    Const,
    Expr,
    ExprLike,
    as_expr,
    cast,
    const,
    load,
    maximum,
    minimum,
    op,
    select,
    var,
)
from tilewright.ir.forms.graph import Node
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.folding import fold, foldable, reads_only

Shape = tuple[int, ...]
MOST_OPERANDS = 64  # of one expression: operators that take any number of tensors combine more by parts
_SMALL = 64  # elements up to which equal constants are shared

# What one node may ask for. A file can name any number; beyond these nothing is made, not even a plan.
MOST_AXES = 32
MOST_ELEMENTS = 1 << 40  # of a tensor: there may never be more than a part of it
MOST_STORED = 1 << 36  # of one that memory has whole: more than any device has of bytes
MOST_KNOWN = 1 << 26  # of one that is computed while the model is read
MOST_STEPS = 1 << 48  # minutes on the fastest processors
# Constants that are made here of others: of a small model this much in all, of a large one this many times its own.
FOLDED_BYTES = 1 << 25
FOLDED_GROWTH = 8
# constants that contractions may want in these types instead of the numbers that they stand for
_MULTIPLIED_AS_THEY_ARE = (dtypes.int8, dtypes.uint8, dtypes.int4, dtypes.uint4, dtypes.float8e4m3fn)


class Builder:
    """Collects the computes and constants of a Program while its operators are lowered one by one."""

    def __init__(self, regions: bool = False, keeps_recipes: bool = False) -> None:
        """With `regions`, data may end loops and choose branches; without, all steps and both branches are computed. A
        Builder that keeps recipes sets computes of constants alone aside, whether they are worth folding or not."""
        self.regions = regions
        self.keeps_recipes = keeps_recipes
        self.recipes: dict[Tensor, Compute] = {}  # how constants are made, where that is kept
        self.computes: list[Compute] = []
        self.constants: dict[Tensor, np.ndarray] = {}
        self._shared: dict[tuple[Any, ...], Tensor] = {}
        self._names: set[str] = set()
        self._given_bytes = 0
        self._folded_bytes = 0
        self._node: Node | None = None
        self._base = ""
        self._asked = 0
        self._answers: Mapping[int, np.ndarray] = {}
        self._told: dict[Tensor, np.ndarray] = {}
        self.budget = Budget()

    # names and errors

    def enter(self, node: Node) -> None:
        """All that follows belongs to this node."""
        self._node = node
        self._base = next((o for o in node.outputs if o), node.name or node.op)

    @property
    def origin(self) -> str:
        return self._node.describe() if self._node is not None else ""

    def unique(self, text: str) -> str:
        """An identifier made of `text` that no other tensor has."""
        base = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_") or "value"
        base = f"v{base}" if base[0].isdigit() else base
        name, count = base, 1
        while name in self._names:
            count += 1
            name = f"{base}_{count}"
        self._names.add(name)
        return name

    def unsupported(self, what: str) -> UnsupportedError:
        return UnsupportedError(f"{self.origin}: {what}" if self.origin else what)

    def invalid(self, what: str) -> ModelError:
        return ModelError(f"{self.origin}: {what}" if self.origin else what)

    # tensors

    def tensor(self, hint: str, shape: Sequence[int], dtype: DType) -> Tensor:
        """A new tensor; the empty hint names it like the node's output."""
        name = self._base if not hint else f"{self._base}_{hint}"
        return Tensor(self.unique(name), self.checked_shape(shape), dtype)

    def checked_shape(self, shape: Sequence[int], what: str = "its result", whole: bool = False) -> Shape:
        """A shape that a tensor may have, one that memory has whole or not."""
        extents = tuple(int(s) for s in shape)
        if len(extents) > MOST_AXES:
            raise self.unsupported(f"{what} would have {len(extents)} axes; {MOST_AXES} are supported")
        if any(extent < 0 for extent in extents):
            raise self.invalid(f"{what} would have the shape {list(extents)}, and no extent can be negative")
        room = prod(max(extent, 1) for extent in extents)  # an axis of nothing does not make the others smaller
        most = MOST_STORED if whole else MOST_ELEMENTS
        if room > most:
            raise self.unsupported(
                f"{what} would have the shape {list(extents)}, {room} elements; {most} are supported"
            )
        return extents

    def constant(self, array: np.ndarray | np.generic, hint: str = "const", name: str | None = None) -> Tensor:
        array = np.asarray(array)
        dtype = dtypes.by_numpy(array.dtype)
        if dtype is None:
            raise self.unsupported(f"element type {array.dtype} of a constant is not supported")
        key = (dtype.name, array.shape, array.tobytes()) if array.size <= _SMALL else None
        if key is not None and key in self._shared:
            return self._shared[key]
        text = name if name is not None else f"{self._base}_{hint}"
        tensor = Tensor(self.unique(text), tuple(array.shape), dtype)
        self.constants[tensor] = np.ascontiguousarray(array).reshape(array.shape)
        self._given_bytes += 0 if name is None else array.nbytes
        if key is not None:
            self._shared[key] = tensor
        return tensor

    def filled(self, shape: Sequence[int], value: int | float, dtype: DType, hint: str) -> Tensor:
        """A constant that is the same everywhere."""
        return self.constant(np.full(self.checked_shape(shape, whole=True), value, dtype.numpy), hint)

    def value(self, tensor: Tensor | None) -> np.ndarray | None:
        """The elements of a tensor that is known while compiling."""
        if tensor is None:
            return None
        found = self.constants.get(tensor)
        return self._told.get(tensor) if found is None else found

    def known(self, tensor: Tensor, what: str) -> np.ndarray:
        """The elements of an input that has to be known; `what` says what it is."""
        return self.decided(
            tensor,
            f"its input '{what}' is computed at run time, but shapes must be known when compiling; "
            f"make it an initializer or bind it through shapes=",
        )

    def decided(self, tensor: Tensor, otherwise: str, most: int | None = None) -> np.ndarray:
        """The elements of a tensor that decides a shape: known, or computed by an earlier part of the model. One that
        counts what the data holds is `most` at the utmost."""
        found = self.value(tensor)
        if found is not None:
            return found
        number = self._asked
        self._asked += 1
        if number not in self._answers:
            raise UndecidedError(str(self.unsupported(otherwise)), tensor, number=number, most=most)
        answer = self._answers[number]
        if answer.shape != dims(tensor) or answer.dtype != tensor.dtype.numpy:
            raise InternalError(f"{self.origin}: an answer of {answer.dtype}{list(answer.shape)} about {tensor!r}")
        self._told[tensor] = answer
        return answer

    def answers(self, given: Mapping[int, np.ndarray]) -> None:
        """What is known of the tensors that the next node will ask for."""
        self._asked, self._answers = 0, given

    def integers(self, tensor: Tensor, what: str) -> list[int]:
        return [int(v) for v in self.known(tensor, what).ravel()]

    # computes

    def emit(self, compute: Compute) -> None:
        """Append a compute, or evaluate it at once when all it reads is constant."""
        if isinstance(compute, Reduce):
            steps = prod(fixed(a.extent) for a in (*compute.axes, *compute.reduce_axes))
            if steps > MOST_STEPS:
                raise self.unsupported(f"it would take {steps} steps to compute; {MOST_STEPS} are supported")
        if isinstance(compute, Scan) and fixed(compute.axis.extent) == 0:
            self._emit_no_steps(compute)
            return
        if isinstance(compute, Scan):
            calls = kernel_calls((compute,))
            self.budget.spend(
                -(-calls // CALLS_A_NODE), self.origin,
                f"its {fixed(compute.axis.extent)} steps take {calls} kernel calls",
                "run the model on parts of its input, and hand its state from one to the next",
            )  # fmt: skip
        is_recipe = self.keeps_recipes and reads_only(compute, self.constants.keys() | self.recipes.keys())
        if is_recipe:
            self.recipes.update(dict.fromkeys(compute.outputs, compute))
        if foldable(compute, self.constants) and self._worth_folding(compute):
            self.constants.update(fold(compute, self.constants))
        elif not is_recipe:
            self.computes.append(compute)

    def known_map(self, compute: Map, array: np.ndarray) -> Tensor:
        """The output of a Map of constants alone, whose elements are known."""
        if self.keeps_recipes:
            self.recipes[compute.output] = compute
        self.constants[compute.output] = array
        return compute.output

    def _emit_no_steps(self, scan: Scan) -> None:
        """What a Scan without steps gives: its states as they were, and nothing stacked."""
        for start, final in zip(scan.initial, scan.finals, strict=True):
            if final is not None:
                axes = _axes("i", dims(final))
                self.emit(Map(final, axes, load(start, [var(a) for a in axes]), self.origin))
        for _, stacked in scan.stacked:
            self.emit(Map(stacked, _axes("i", dims(stacked)), const(0, stacked.dtype), self.origin))

    def _worth_folding(self, compute: Compute) -> bool:
        """Whether there is room for what a chain of nodes makes of constants: each may double it."""
        size = sum(prod(dims(t)) * t.dtype.bytes for t in compute.outputs)
        if self._folded_bytes + size > FOLDED_BYTES + FOLDED_GROWTH * self._given_bytes:
            return False
        self._folded_bytes += size
        return True

    def map(self, hint: str, shape: Sequence[int], element: Callable[..., Expr]) -> Tensor:
        """A tensor whose element at the given axes is `element(*axes)`."""
        compute = self.map_compute(hint, shape, element)
        self.emit(compute)
        return compute.output

    def widened_map(
        self, x: Tensor, hint: str, element: Callable[..., Expr], shape: Sequence[int] | None = None
    ) -> Tensor:
        """`map` over the elements of `x`, or over a shape that they are unpacked to; of constant bytes it is left for
        later: contractions may want the bytes."""
        compute = self.map_compute(hint, dims(x) if shape is None else shape, element)
        if x.rank > 1 and x.dtype in _MULTIPLIED_AS_THEY_ARE and x in self.constants:
            self.computes.append(compute)
        else:
            self.emit(compute)
        return compute.output

    def map_compute(self, hint: str, shape: Sequence[int], element: Callable[..., Expr]) -> Map:
        axes = _axes("i", shape)
        value = simplify(element(*map(var, axes)))
        if 0 in shape:  # of no element it does not matter which
            value = const(0, value.dtype)
        return Map(self.tensor(hint, shape, value.dtype), axes, value, self.origin)

    def reduce(
        self,
        hint: str,
        shape: Sequence[int],
        reduce_shape: Sequence[int],
        element: Callable[[tuple[Expr, ...], tuple[Expr, ...]], Expr],
        operator: str,
    ) -> Tensor:
        """A plain reduction of `element(axes, reduce_axes)` over `reduce_shape`; over nothing, the neutral element."""
        compute = self.reduce_compute(hint, shape, reduce_shape, element, operator)
        if 0 in reduce_shape or 0 in shape:
            nothing = compute.monoid.identity[0]
            empty = Map(compute.outputs[0], compute.axes, nothing, self.origin)
            self.emit(empty)
            return empty.output
        self.emit(compute)
        return compute.outputs[0]

    def reduce_compute(
        self,
        hint: str,
        shape: Sequence[int],
        reduce_shape: Sequence[int],
        element: Callable[[tuple[Expr, ...], tuple[Expr, ...]], Expr],
        operator: str,
    ) -> Reduce:
        axes, (reduce_axes, at) = _axes("i", shape), _reduce_axes(reduce_shape)
        value = simplify(element(tuple(map(var, axes)), at))
        output = self.tensor(hint, shape, value.dtype)
        return Reduce((output,), axes, reduce_axes, (value,), plain_monoid(operator, value.dtype), self.origin)

    def reduce_tuple(
        self,
        hints: Sequence[str],
        shape: Sequence[int],
        reduce_shape: Sequence[int],
        elements: Callable[[tuple[Expr, ...], tuple[Expr, ...]], tuple[Expr, ...]],
        monoid: Monoid,
    ) -> tuple[Tensor, ...]:
        """A reduction over a tuple-valued monoid; one hint a result of its `final`."""
        axes, (reduce_axes, at) = _axes("i", shape), _reduce_axes(reduce_shape)
        values = tuple(simplify(e) for e in elements(tuple(map(var, axes)), at))
        outputs = tuple(self.tensor(h, shape, f.dtype) for h, f in zip(hints, monoid.final, strict=True))
        self.emit(Reduce(outputs, axes, reduce_axes, values, monoid, self.origin))
        return outputs

    def cast(self, hint: str, x: Tensor, dtype: DType) -> Tensor:
        """`x` in another element type; itself when it has it already."""
        if x.dtype is dtype:
            return x
        return self.map(hint, dims(x), lambda *i: cast(self.read(x, i), dtype))

    # reading

    def read(self, tensor: Tensor, indices: Sequence[ExprLike]) -> Expr:
        """An element by broadcasting: indices align at the right, axes of extent 1 are read at 0.

        A constant of one element is read as a literal, one whose recipe is kept by its name.
        """
        value = self.constants.get(tensor)
        if value is not None and value.size == 1 and tensor not in self.recipes:
            return literal(value.reshape(()), tensor.dtype)
        taken = tuple(indices)[len(indices) - tensor.rank :]
        return load(tensor, tuple(0 if n == 1 else i for n, i in zip(tensor.shape, taken, strict=True)))

    def wide(self, tensor: Tensor, indices: Sequence[ExprLike]) -> Expr:
        """`read`, in the type that sums are kept in."""
        return cast(self.read(tensor, indices), dtypes.accumulator(tensor.dtype))

    def broadcast(self, *tensors: Tensor) -> Shape:
        try:
            return tuple(int(n) for n in np.broadcast_shapes(*(dims(t) for t in tensors)))
        except ValueError:
            shapes = ", ".join(str(list(t.shape)) for t in tensors)
            raise self.invalid(f"shapes {shapes} do not broadcast") from None

    def axis(self, axis: int, rank: int) -> int:
        if not -rank <= axis < max(rank, 1):
            raise self.invalid(f"axis {axis} is outside a tensor of {rank} axes")
        return axis % rank if rank else 0


def _axes(prefix: str, shape: Sequence[int]) -> tuple[Axis, ...]:
    return tuple(Axis(f"{prefix}{n}", int(extent)) for n, extent in enumerate(shape))


def _reduce_axes(shape: Sequence[int]) -> tuple[tuple[Axis, ...], tuple[Expr, ...]]:
    """Reduction axes and where each is read: an extent of 1 needs no axis, so a 1x1 convolution is a plain product."""
    axes = _axes("r", shape)
    kept = tuple(a for a in axes if a.extent != 1) or axes[:1]
    return kept, tuple(var(a) if a in kept else const(0) for a in axes)


def dims(tensor: Tensor) -> Shape:
    """The shape of a tensor as integers."""
    return tuple(int(s) for s in tensor.shape)  # type: ignore[arg-type]


def kernel_calls(computes: Sequence[Compute]) -> int:
    """The most kernel calls that these computes become: one each, and of a Scan those of all its steps."""
    return sum(fixed(c.axis.extent) * kernel_calls(c.body) if isinstance(c, Scan) else 1 for c in computes)


def expect(b: Builder, what: str, tensor: Tensor | None, *shapes: Shape) -> None:
    """An input, where it is given, has one of these shapes: what is read beside a tensor is anybody's."""
    if tensor is not None and dims(tensor) not in shapes:
        wanted = " or ".join(str(list(s)) for s in shapes)
        raise b.invalid(f"its input '{what}' has the shape {list(dims(tensor))}; {wanted} is needed")


def literal(value: np.ndarray, dtype: DType) -> Const:
    """One known element; those of storage types are given by their bits."""
    return const(value.view(np.uint8).item() if dtype.is_storage else value.item(), dtype)


def distinct_axes(b: Builder, axes: Sequence[int], rank: int) -> list[int]:
    """Axes counted from the front, each named once."""
    found = [b.axis(int(a), rank) for a in axes]
    if len(set(found)) < len(found):
        raise b.invalid(f"axes {[int(a) for a in axes]} name an axis twice")
    return found


def one_of(count: int) -> float:
    """What each of so many counts for in their mean; the mean of none is no number."""
    return 1.0 / count if count else math.nan


def clamp(index: Expr, extent: int) -> Expr:
    """An index brought into [0, extent)."""
    return minimum(maximum(index, 0), max(extent - 1, 0))


def wrapped(b: Builder, indices: Tensor, at: Sequence[ExprLike], extent: int) -> Expr:
    """A data-dependent index: negative ones count from the end. One that is out of range is an error where it is known,
    and at run time the nearest that is in range."""
    if extent == 0 and 0 not in dims(indices):
        raise b.invalid("it takes elements of an axis that has none")
    known = b.value(indices)
    index = cast(b.read(indices, at), dtypes.index)
    if known is not None and known.size:
        known = known[..., at[-1]] if at and isinstance(at[-1], int) else known  # of places, one coordinate
        wrong = known[(known < -extent) | (known >= extent)] if known.dtype.kind == "i" else known[known >= extent]
        if wrong.size:
            raise b.invalid(f"index {int(wrong.flat[0])} is outside an axis of {extent}")
        if known.min() >= 0:
            return index
    return clamp(select(op("lt", index, 0), index + extent, index), extent)


def reindex(source: Sequence[int], target: Sequence[int], indices: Sequence[ExprLike]) -> list[Expr]:
    """Indices into `source` that name the same element as `indices` into `target`, a reshape of it.

    Axes are matched in the smallest groups of equal size, so that only real splits and merges need division.
    """
    result: list[Expr] = [const(0)] * len(source)
    if prod(source) == 0:
        return result
    outer = [(n, as_expr(i)) for n, i in zip(target, indices, strict=True) if n != 1]
    inner = [(n, place) for place, n in enumerate(source) if n != 1]
    while inner:
        left, right = [inner.pop(0)], [outer.pop(0)]
        while prod(n for n, _ in left) != prod(n for n, _ in right):
            if prod(n for n, _ in left) < prod(n for n, _ in right):
                left.append(inner.pop(0))
            else:
                right.append(outer.pop(0))
        flat: Expr = const(0)
        for extent, index in right:
            flat = flat * extent + index
        below = prod(n for n, _ in left)
        for extent, place in left:
            whole = below
            below //= extent
            result[place] = simplify((flat % whole) // below)
    return result
