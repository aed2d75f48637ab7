"""What a row is scaled by on its way into a product with constants is applied to the product's results instead.

sum over r of (x[i, r] * f[i] * g[r] + b[r]) * w[r, j] is f[i] * (sum over r of x[i, r] * (g w)[r, j]) + (b w)[j], with
g w and b w known before the model runs. The product no longer waits for f, the norm of the row say: both are summed up
in one pass over x, which need not be kept. Whether that pays is predicted, with all that leads to the product.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, plain_monoid
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import (
    Axis,
    Expr,
    Load,
    Op,
    Var,
    cast,
    const,
    flattened,
    is_op,
    load,
    loads,
    op,
    substitute,
    used_as_numbers,
    var,
)
from tilewright.ir.forms.spilled import spilled
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.folding import fold, without_dead
from tilewright.transform.reductions.digits import narrowed
from tilewright.transform.reductions.neighbours import alone, is_closed, leading_to, outline
from tilewright.transform.storage import names_of, unique_name

Predict = Callable[[Program], float]

_WORTH = 0.97  # of the time as it stands: less gain is within the model's error
_MOST_MAPS = 6  # one behind the other, whose values are written out


def scale_rows_late(program: Program, predict: Predict) -> Program:
    """The Program with such factors behind their products, where that is predicted to pay."""
    makers = program.producers()
    readers = program.consumers()
    taken = names_of(program)
    known: dict[Hashable, bool] = {}
    given = program
    for compute in given.computes:
        found = _found(compute, given.constants, makers) if isinstance(compute, Reduce) else None
        if found is None:
            continue
        assert isinstance(compute, Reduce)
        leading = leading_to(compute, given, makers)
        if not leading or not is_closed(leading, given, readers):
            continue
        form = outline(leading, given)
        if form not in known:
            known[form] = _pays(found, alone(leading, given), predict)
        if known[form]:
            program = found.applied(program, taken) or program
    return program


def _pays(late: _Late, part: Program, predict: Predict) -> bool:
    made = late.applied(part, names_of(part))
    return made is not None and predict(made) < _WORTH * predict(part)


@dataclass(frozen=True)
class _Term:
    """A product of what has no summed axis, of constants, and of one read along the summed axes, where there is one."""

    row: tuple[Expr, ...] = ()
    fixed: tuple[Expr, ...] = ()
    wide: Load | None = None

    def times(self, other: _Term) -> _Term | None:
        if self.wide is not None and other.wide is not None:
            return None
        return _Term((*self.row, *other.row), (*self.fixed, *other.fixed), self.wide or other.wide)


@dataclass(frozen=True)
class _Late:
    """A product with constants, its operand with rows scaled, and what that is made of, on the axes of the product."""

    reduce: Reduce
    weights: Load
    scaled: _Term
    added: tuple[_Term, ...]  # constants alone

    def applied(self, program: Program, taken: set[str]) -> Program | None:
        """The Program with rows scaled behind the product; None where its constants would lose digits by it."""
        constants = dict(program.constants)
        weights = self._scaled_weights(constants, taken)
        if weights is None or self.scaled.wide is None:
            return None
        (output,) = self.reduce.outputs
        total = Tensor(unique_name(f"{output.name}_unscaled", taken), output.shape, output.dtype)
        element = op("mul", self._widened(self.scaled.wide), self._widened(weights))
        axes = tuple(Axis(a.name, a.extent) for a in self.reduce.axes)
        here = {a: var(b) for a, b in zip(self.reduce.axes, axes, strict=True)}
        value = op("mul", load(total, self._results), self._product(self.scaled.row))
        if self.added:
            value = op("add", value, self._summed_constants(constants, taken))
        made = (replace(self.reduce, outputs=(total,), elements=(element,)),
                Map(output, axes, simplify(substitute(value, here)), self.reduce.origin))  # fmt: skip
        computes = [n for c in program.computes for n in (made if c is self.reduce else (c,))]
        remark = f"{self.reduce.origin or output.name}: its rows are scaled behind the product"
        return without_dead(replace(program, computes=tuple(computes), constants=constants,
                                    remarks=(*program.remarks, remark)))  # fmt: skip

    def _scaled_weights(self, constants: dict[Tensor, np.ndarray], taken: set[str]) -> Load | None:
        """The product's constant with the operand's constant factors in it."""
        if not self.scaled.fixed:
            return self.weights
        source = self.weights.source
        exact = Tensor(source.name, source.shape, self._wide)
        value = op("mul", self._widened(self.weights), self._product(self.scaled.fixed))
        found = fold(Map(exact, self._own_axes, substitute(value, self._own_places)), constants)[exact]
        summed = [n for n, i in enumerate(self.weights.indices) if i.axes[0] in self.reduce.reduce_axes]
        narrow = narrowed(found, source.dtype, tuple(summed))
        if narrow is None:
            return None
        made = Tensor(unique_name(f"{source.name}_scaled", taken), source.shape, source.dtype)
        constants[made] = spilled(narrow)
        return load(made, self.weights.indices)

    def _summed_constants(self, constants: dict[Tensor, np.ndarray], taken: set[str]) -> Load:
        """What the product makes of the constants that are added to its operand."""
        total: Expr = const(0, self._wide)
        for term in self.added:
            total = op("add", total, self._product(term.fixed))
        element = simplify(substitute(op("mul", total, self._widened(self.weights)), self._own_places))
        summed = {a for i, a in zip(self.weights.indices, self._own_axes, strict=True)
                  if i.axes[0] in self.reduce.reduce_axes}  # fmt: skip
        kept = tuple(a for a in self._own_axes if a not in summed)
        name = unique_name(f"{self.weights.source.name}_added", taken)
        made = Tensor(name, tuple(a.extent for a in kept), self._wide)
        over = tuple(a for a in self._own_axes if a in summed)
        constants.update(fold(Reduce((made,), kept, over, (element,), plain_monoid("add", self._wide)), constants))
        return load(made, [i for i in self.weights.indices if i.axes[0] not in self.reduce.reduce_axes])

    def _product(self, parts: Sequence[Expr]) -> Expr:
        value: Expr = const(1, self._wide)
        for part in parts:
            value = op("mul", value, self._widened(part))
        return simplify(value)

    def _widened(self, value: Expr) -> Expr:
        return cast(value, self._wide)

    @property
    def _wide(self) -> DType:
        return self.reduce.outputs[0].dtype

    @property
    def _results(self) -> list[Expr]:
        return [var(a) for a in self.reduce.axes]

    @cached_property
    def _own_axes(self) -> tuple[Axis, ...]:
        """One for each dimension of the constant, in the place of the product's."""
        return tuple(Axis(i.axes[0].name, i.axes[0].extent) for i in self.weights.indices)

    @property
    def _own_places(self) -> dict[Axis, Expr]:
        return {i.axes[0]: var(a) for i, a in zip(self.weights.indices, self._own_axes, strict=True)}


def _found(
    reduce: Reduce, constants: Mapping[Tensor, np.ndarray], makers: Mapping[Tensor, Compute]
) -> _Late | None:
    """A product of rows with constants, whose rows are scaled by something else; None for any other reduction."""
    if len(reduce.outputs) != 1 or reduce.monoid.operator != "add" or not _is_wide(reduce.outputs[0].dtype):
        return None
    parts = [_below_casts(p) for p in flattened(reduce.elements[0], "mul")]
    weights = [p for p in parts if isinstance(p, Load) and p.source in constants]
    rows = [p for p in parts if isinstance(p, Load) and isinstance(makers.get(p.source), Map)]
    if len(parts) != 2 or len(weights) != 1 or len(rows) != 1 or not _is_whole(weights[0]):
        return None
    if not weights[0].dtype.is_float or not rows[0].dtype.is_float:
        return None
    written = _Written(frozenset(reduce.reduce_axes), constants, makers, reduce.outputs[0].dtype)
    for maps in range(_MOST_MAPS, 0, -1):  # from as far before the product as there is one row scaled
        terms = written.terms(rows[0], maps) or []
        scaled = _one_scaled(terms, rows[0], weights[0], reduce)
        if scaled is not None:
            return _Late(reduce, weights[0], scaled, tuple(t for t in terms if t.wide is None))
    return None


def _one_scaled(terms: Sequence[_Term], rows: Load, weights: Load, reduce: Reduce) -> _Term | None:
    """The one term that is read along the rows, where all others are constants."""
    scaled = [t for t in terms if t.wide is not None]
    if len(scaled) != 1 or not scaled[0].row or any(t.row for t in terms if t.wide is None):
        return None
    wide, summed = scaled[0].wide, set(reduce.reduce_axes)
    if wide is None or wide.dtype.bits > rows.dtype.bits or not summed.issubset(weights.axes):
        return None
    return scaled[0] if all(summed.issuperset(f.axes) for t in terms for f in t.fixed) else None


def _is_wide(dtype: DType) -> bool:
    return dtype.is_float and dtype.bits >= 32


def _is_whole(read: Load) -> bool:
    """Whether every dimension is read along an axis of its own, from end to end."""
    axes = [i.axis for i in read.indices if isinstance(i, Var)]
    return len(set(axes)) == len(read.indices) and all(
        a.extent == extent for a, extent in zip(axes, read.source.shape, strict=True)
    )


def _below_casts(value: Expr) -> Expr:
    while is_op(value, "cast") and value.args[0].dtype.is_float and value.dtype.is_float:
        value = value.args[0]
    return value


@dataclass(frozen=True)
class _Written:
    """Values as sums of products, maps written out: rounding in between is left out, not added."""

    summed: frozenset[Axis]
    constants: Mapping[Tensor, np.ndarray]
    makers: Mapping[Tensor, Compute]
    wide: DType

    def terms(self, value: Expr, maps: int) -> list[_Term] | None:
        """None where a value along the summed axes is none of these."""
        if not value.dtype.is_float:
            return None
        if all(n.source in self.constants for n in loads(value)) and self._has_no_places(value):
            return [_Term(fixed=(value,))]
        if self.summed.isdisjoint(value.axes):
            return [_Term(row=(value,))]
        if isinstance(value, Load):
            return self._read(value, maps)
        if not isinstance(value, Op):
            return None
        name = value.op.name
        if name not in ("cast", "neg", "add", "sub", "mul", "div"):
            return None
        parts = [self.terms(a, maps) for a in value.args]
        if any(p is None for p in parts):
            return None
        given = [p for p in parts if p is not None]
        if name == "cast":
            return given[0]
        if name == "neg":
            return self._negated(given[0])
        if name in ("add", "sub"):
            return [*given[0], *(given[1] if name == "add" else self._negated(given[1]))]
        second = given[1] if name == "mul" else self._inverted(given[1])
        made = [a.times(b) for a in given[0] for b in second or ()]
        return None if second is None or any(t is None for t in made) else [t for t in made if t is not None]

    def _read(self, read: Load, maps: int) -> list[_Term]:
        """What a map computes, where that is one row scaled, and constants; else the read itself, which is also taken
        where there is nothing but more digits before it."""
        maker = self.makers.get(read.source)
        if not isinstance(maker, Map) or not maps:
            return [_Term(wide=read)]
        inner = self.terms(substitute(maker.value, dict(zip(maker.axes, read.indices, strict=True))), maps - 1) or []
        wide = [t.wide for t in inner if t.wide is not None]
        is_narrowed = len(wide) == 1 and inner == [_Term(wide=wide[0])] and wide[0].dtype.bits > read.dtype.bits
        return [_Term(wide=read)] if len(wide) != 1 or is_narrowed else inner

    def _negated(self, terms: Sequence[_Term]) -> list[_Term]:
        return [replace(t, fixed=(*t.fixed, const(-1, self.wide))) for t in terms]

    def _inverted(self, terms: Sequence[_Term]) -> list[_Term] | None:
        if len(terms) != 1 or terms[0].wide is not None:
            return None
        row, fixed = ([op("div", const(1, self.wide), cast(v, self.wide)) for v in values]
                      for values in (terms[0].row, terms[0].fixed))  # fmt: skip
        return [_Term(tuple(row), tuple(fixed))]

    def _has_no_places(self, value: Expr) -> bool:
        """Whether positions are used to read alone: a number of its own for each of them is no constant tensor's."""
        return not used_as_numbers([value])
