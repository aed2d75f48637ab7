"""Contractions of dequantised operands as integer contractions, by algebra on the Program.

A factor s·(q - z) of 8-bit q, whose scale s and zero point z do not change along the sum, takes its scale out of it:
    sum (a - za)·(b - zb)  =  sum a·b  -  za · sum (b - zb)  -  zb · sum a
The first sum is what the hardware multiplies in 8 bits. Sums over constants are folded with the rest of them. Where
a condition guards a read (padding), every sum has the same condition, so that all of it stays exact.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import numpy as np

from tilewright.ir.analysis.products import is_zero
from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bounds import static
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, Scan, plain_monoid
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import (
    Axis,
    Const,
    Expr,
    Load,
    all_of,
    axes_of,
    cast,
    const,
    eq,
    is_op,
    load,
    loads,
    maximum,
    minimum,
    mul,
    select,
    substitute,
    var,
)
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.values import evaluate_exprs, grid
from tilewright.target import Target
from tilewright.transform.quantise.quantised import BYTES, SHIFT, Forms, Quantised, QuantisedProduct, quantiser
from tilewright.transform.storage import Encoding, all_computes, change_storage, names_of, unique_name


@dataclass(frozen=True)
class IntegerForm:
    """What the target's byte instructions take on the left; on the right they take int8, where constants go."""

    left: DType = dtypes.int8
    has_lanes: bool = False  # whether every lane can sum bytes of its own


def form_of(target: Target) -> IntegerForm:
    """VNNI multiplies unsigned by signed bytes alone; Arm's dot product, and AMX too, signed by signed."""
    unsigned = {"avx_vnni", "avx512_vnni"}.intersection(target.features)
    return IntegerForm(dtypes.uint8 if unsigned else dtypes.int8, bool(unsigned) or "asimddp" in target.features)


def use_integers(program: Program, form: IntegerForm) -> Program:
    """The Program with every contraction of quantised operands in integers."""
    program = _without_requantising(program)
    forms = Forms(program)
    found = {p.compute.outputs[0]: p for c in all_computes(program) if (p := forms.product(c)) is not None}
    if not found:
        return program
    changed, renamed = change_storage(program, _encodings(found.values(), form, forms.constants), frozenset())
    made: list[Compute] = [*forms.made]
    taken = names_of(replace(changed, computes=(*made, *changed.computes)))
    for compute in changed.computes:
        made.extend(_written(compute, found, renamed, taken, forms.constants, form))
    return replace(changed, computes=tuple(made))


def _without_requantising(program: Program) -> Program:
    """Values quantised as they were before are the bytes they came from: what moves them moves bytes."""
    forms = Forms(program)

    def new(compute: Compute) -> Compute:
        if isinstance(compute, Scan):
            return replace(compute, body=tuple(map(new, compute.body)))
        if not isinstance(compute, Map) or compute.output.dtype not in BYTES:
            return compute
        taken = quantiser(compute.value)
        form = None if taken is None else forms.quantised(taken[0])
        if taken is None or form is None or form.read.dtype is not compute.output.dtype:
            return compute
        if form.scale is not taken[1] or not isinstance(form.zero, Const) or form.zero.value != taken[2]:
            return compute
        if form.read.source in forms.constants:
            return compute  # folded as it is
        outside = const(form.zero.value, compute.output.dtype)
        value = select(all_of(form.conditions), form.read, outside) if form.conditions else form.read
        return replace(compute, value=value)

    return program.with_computes(tuple(map(new, program.computes)))


def _written(
    compute: Compute, found: Mapping[Tensor, QuantisedProduct], renamed: Mapping[Tensor, Tensor], taken: set[str],
    known: Mapping[Tensor, np.ndarray], form: IntegerForm,
) -> list[Compute]:  # fmt: skip
    if isinstance(compute, Scan):
        body = tuple(made for part in compute.body for made in _written(part, found, renamed, taken, known, form))
        return [replace(compute, body=body)]
    product = found.get(compute.outputs[0]) if compute.outputs else None
    return [compute] if product is None else _Writer(product, renamed, taken, known, form).computes()


def _encodings(
    found: Iterable[QuantisedProduct], form: IntegerForm, constants: Collection[Tensor]
) -> dict[Tensor, Encoding]:
    """Computed bytes that the instructions want in the other of their two readings."""
    wishes: dict[Tensor, set[DType]] = {}
    for product in found:
        for side, dtype in ((product.left, form.left), (product.right, dtypes.int8)):
            if side.read.source not in constants:
                wishes.setdefault(side.read.source, set()).add(dtype)
    wanted: dict[Tensor, Encoding] = {}
    for tensor, wished in wishes.items():
        # read on both sides: signed, which every form takes on the right
        chosen = dtypes.int8 if dtypes.int8 in wished else dtypes.uint8
        if tensor.dtype is not chosen:
            wanted[tensor] = shifted_bytes(chosen, tensor.dtype)
    return wanted


def shifted_bytes(dtype: DType, own: DType) -> Encoding:
    """uint8 kept as int8 128 below, or the other way round."""
    step = -SHIFT if dtype is dtypes.int8 else SHIFT

    def encode(x: Expr) -> Expr:
        if is_op(x, "cast") and x.args[0].dtype is dtypes.float32:
            # a whole number that was brought into the range of its type: float32 subtracts it exactly
            return cast(x.args[0] + const(step, dtypes.float32), dtype)
        return cast(cast(x, dtypes.int32) + const(step, dtypes.int32), dtype)

    def decode(x: Expr) -> Expr:
        return cast(cast(x, dtypes.int32) - const(step, dtypes.int32), own)

    return Encoding(dtype, encode, decode)


# --- writing


@dataclass
class _Writer:
    """The computes of one integer contraction: its sums, and the map that puts them together."""

    product: QuantisedProduct
    renamed: Mapping[Tensor, Tensor]
    taken: set[str]
    constants: Mapping[Tensor, np.ndarray]
    form: IntegerForm

    def computes(self) -> list[Compute]:
        reduce = self.product.compute
        left, right = self._stored(self.product.left), self._stored(self.product.right)
        conditions = tuple(dict.fromkeys((*left.conditions, *right.conditions)))
        zero = const(0, dtypes.int32)
        a, b = cast(left.read, dtypes.int32), cast(right.read, dtypes.int32)
        guarded = select(all_of(conditions), a, zero) if conditions else a
        made: list[Compute] = []
        terms: tuple[Axis, ...] = ()
        weights = b
        if self._is_split(right):
            terms = (Axis("term", 2),)
            made.append(self._halves(right, terms[0]))
            weights = cast(load(made[0].outputs[0], [var(terms[0]), *right.read.indices]), dtypes.int32)
        made.append(self._sum("products", reduce.axes, mul(guarded, weights), (*reduce.reduce_axes, *terms)))
        total: Expr = load(made[-1].outputs[0], [var(x) for x in reduce.axes])
        for factor, value, name in (
            (left.zero, simplify(b - right.zero), "right"),
            (right.zero, a, "left"),
        ):
            if is_zero(factor) or (terms and factor is right.zero):
                continue
            compute, at = self._correction(f"{name}_sum", factor, value, conditions)
            made.append(compute)
            term: Expr = load(compute.outputs[0], at)
            total = total + term if isinstance(factor, Const) else total - factor * term
        made.append(Map(reduce.outputs[0], reduce.axes, self._scaled(total, left, right, made), reduce.origin))
        return made

    def _is_split(self, right: Quantised) -> bool:
        """Whether weights less their zero point are taken as sums of two bytes.

        That spares the sum over the other operand, which is as large as the result where every channel has a window of
        its own; elsewhere many outputs share it.
        """
        reduce = self.product.compute
        own = axes_of(*right.read.indices)
        if is_zero(right.zero) or not isinstance(right.zero, Const) or not self.form.has_lanes:
            return False
        shared = [a for a in reduce.axes if a in own]
        if right.read.source not in self.constants or len(shared) != 1 or len(reduce.reduce_axes) != 2:
            return False
        if shared[0] not in axes_of(*self.product.left.read.indices):
            return False
        return int(self.constants[right.read.source].max(initial=0)) - int(right.zero.value) < 127 + SHIFT

    def _halves(self, right: Quantised, term: Axis) -> Map:
        axes = [Axis(f"i{n}", extent) for n, extent in enumerate(right.read.source.shape)]
        whole = cast(load(right.read.source, [var(a) for a in axes]), dtypes.int32) - right.zero
        first = maximum(minimum(whole, const(127, dtypes.int32)), const(-127, dtypes.int32))
        value = select(eq(var(term), 0), first, whole - first)
        return Map(self._tensor("terms", (term, *axes), dtypes.int8), (term, *axes), simplify(cast(value, dtypes.int8)))

    def _stored(self, side: Quantised) -> Quantised:
        new = self.renamed.get(side.read.source)
        if new is None:
            return side
        step = -SHIFT if new.dtype is dtypes.int8 else SHIFT
        zero = simplify(side.zero + const(step, dtypes.int32))
        read = load(new, side.read.indices)
        return replace(side, read=read, zero=zero)

    def _scaled(self, total: Expr, left: Quantised, right: Quantised, made: list[Compute]) -> Expr:
        reduce = self.product.compute
        if reduce.elements[0].dtype is dtypes.int32:
            return total
        scale: Expr = const(1.0, dtypes.float32)
        for side in (left, right):
            if side.scale is not None:
                scale = mul(scale, side.scale)
        scale = simplify(scale)
        if is_op(scale, "mul") and all(n.source in self.constants for n in loads(scale)):
            # one number an output, folded
            axes = axes_of(scale)
            made.append(self._tensor_of("scale", axes, scale))
            scale = load(made[-1].outputs[0], [var(x) for x in axes])
        return simplify(cast(total, dtypes.float32) * scale)

    def _tensor_of(self, hint: str, axes: Sequence[Axis], value: Expr) -> Map:
        own = [Axis(a.name, a.extent) for a in axes]
        moved = substitute(value, {a: var(b) for a, b in zip(axes, own, strict=True)})
        return Map(self._tensor(hint, own, value.dtype), tuple(own), moved, self.product.compute.origin)

    def _tensor(self, hint: str, axes: Sequence[Axis], dtype: DType) -> Tensor:
        name = unique_name(f"{self.product.compute.outputs[0].name}_{hint}", self.taken)
        return Tensor(name, tuple(a.extent for a in axes), dtype)

    def _sum(self, hint: str, axes: Sequence[Axis], element: Expr, kept: Sequence[Axis] | None = None) -> Reduce:
        """A sum over the contraction's own axes, at fresh ones."""
        reduce = self.product.compute
        summed = tuple(kept if kept is not None else reduce.reduce_axes)
        fresh = {a: Axis(a.name, a.extent) for a in (*axes, *summed)}
        moved = simplify(substitute(element, {a: var(b) for a, b in fresh.items()}))
        outer = tuple(fresh[a] for a in axes)
        output = self._tensor(hint, outer, dtypes.int32)
        inner = tuple(fresh[a] for a in summed)
        return Reduce((output,), outer, inner, (moved,), plain_monoid("add", dtypes.int32), reduce.origin)

    def _correction(
        self, hint: str, factor: Expr, value: Expr, conditions: tuple[Expr, ...]
    ) -> tuple[Compute, list[Expr]]:
        """The sum of one operand, taken off as often as a constant zero point says, and its place at an output.

        Along an axis on which only conditions depend, all outputs that lie wholly inside have equal sums: they share
        a place, and the result stays small.
        """
        reduce = self.product.compute
        term = mul(value, simplify(const(0, dtypes.int32) - factor)) if isinstance(factor, Const) else value
        element = select(all_of(conditions), term, const(0, dtypes.int32)) if conditions else term
        used = axes_of(element)
        axes = [a for a in reduce.axes if a in used]
        classes = {a: c for a in axes if a not in axes_of(term) and (c := _classes(a, reduce, conditions))}
        shared = {a: Axis(a.name, c.count) for a, c in classes.items()}
        element = substitute(element, {a: classes[a].position(var(b)) for a, b in shared.items()})
        # the axes of the operand last: they are read along the vector
        axes.sort(key=lambda a: a not in shared)
        own = [shared.get(a, a) for a in axes]
        compute = self._sum(hint, own, element)
        return compute, [classes[a].place(var(a)) if a in classes else var(a) for a in axes]


@dataclass(frozen=True)
class _Classes:
    """Positions 0 to extent - 1 of which all between the first `low` and the last `high` are alike."""

    extent: int
    low: int
    high: int

    @property
    def count(self) -> int:
        return self.low + 1 + self.high

    def place(self, position: Expr) -> Expr:
        """The class of a position."""
        last = self.extent - 1 - self.high
        return simplify(minimum(position, self.low) + maximum(position - last, 0))

    def position(self, place: Expr) -> Expr:
        """A position of the class."""
        return simplify(place + maximum(minimum(place - self.low, 1), 0) * (self.extent - self.count))


def _classes(axis: Axis, reduce: Reduce, conditions: Sequence[Expr]) -> _Classes | None:
    """Groups positions along an output axis by which elements of the sum count there; None where that is not known."""
    extent = static(axis.extent)
    mine = [c for c in conditions if axis in axes_of(c)]
    if extent is None or extent < 4 or any(c.reads for c in mine):
        return None
    inner = [a for a in reduce.reduce_axes if any(a in axes_of(c) for c in mine)]
    if any(a is not axis and a not in inner for c in mine for a in axes_of(c)):
        return None  # it depends on several output axes at once
    dims = tuple((a, range(int(static(a.extent) or 0))) for a in (axis, *inner))
    if prod(len(r) for _, r in dims) > 1 << 22:
        return None
    values = grid(dims)

    def leaf(node: Expr) -> np.ndarray:
        return values[node.axis]  # type: ignore[attr-defined]

    def read(node: Load, indices: tuple[np.ndarray, ...]) -> np.ndarray:
        raise AssertionError("conditions that read were turned away")

    truth = evaluate_exprs([all_of(mine)], leaf, read)[0]
    rows = np.broadcast_to(truth, [len(r) for _, r in dims]).reshape(extent, -1)
    starts = [0, *(int(i) + 1 for i in np.flatnonzero((rows[1:] != rows[:-1]).any(axis=1))), extent]
    length, start = max((b - a, -a) for a, b in pairwise(starts))
    return _Classes(extent, -start, extent - length + start)
