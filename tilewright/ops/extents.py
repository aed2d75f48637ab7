"""One Program for every value of numbers that only a run tells: the Graph is lowered for some of the values, and where
the Programs differ, in a number alone, stands what the run says. Tensors have room for the most there can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilewright.errors import CutError, TilewrightError, UndecidedError, UnevenError
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bounds import bounds, fixed
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, Scan, Scatter, Sort, factors
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import (
    Axis,
    Const,
    Expr,
    Load,
    Op,
    State,
    Var,
    all_of,
    cast,
    const,
    load,
    lt,
    maximum,
    minimum,
    op,
    select,
    var,
)
from tilewright.ir.forms.graph import NUMBERS, Form, Graph, Part, Room, Value, filled
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import literal

_MOST_ELEMENTS = 1 << 12  # of a constant whose elements follow from run-time numbers
_MOST_WHOLE = 1 << 24  # so far every whole number is one of float32


@dataclass(frozen=True)
class Recipes:
    """A Program, the constants that were known while it was made, and computes of constants alone: by what these make,
    which need not be among the constants."""

    program: Program
    constants: Mapping[Tensor, np.ndarray]
    makers: Mapping[Tensor, Compute]


Lower = Callable[[Graph], Recipes]
Shapes = dict[str, tuple[Form, ...]]


def lower_open(graph: Graph, lower: Lower) -> tuple[Program, Shapes]:
    """The Program for all run-time numbers of the part, and the extents of its outputs by name."""
    part = graph.part or Part()
    samples = sample_numbers(part.rooms)
    found: list[Recipes | CutError] = []
    for numbers in samples:
        try:
            found.append(lower(settled(graph, numbers)))
        except CutError as error:
            found.append(error)
        except UnevenError:
            raise
        except TilewrightError as error:
            raise UnevenError(f"with {_spelled(numbers)}, {error}") from error
    cuts = [f for f in found if isinstance(f, CutError)]
    if cuts:
        raise _same_cut(cuts, samples) if len(cuts) == len(found) else UnevenError("some values alone need a cut")
    return _Merger(part.rooms, samples, [f for f in found if isinstance(f, Recipes)]).program()


def settled(graph: Graph, numbers: Sequence[int]) -> Graph:
    """The Graph for these values of its run-time numbers."""
    part = graph.part or Part()
    inputs = tuple(
        Value(v.name, v.dtype, tuple(f.at(numbers) for f in part.forms[v.name])) if v.name in part.forms else v
        for v in graph.inputs
    )
    forms = part.forms
    constants = {n: filled(a, forms[n], numbers) if n in forms else a for n, a in graph.constants.items()}
    for name, extents in part.begins.items():
        constants[name] = constants[name][tuple(slice(f.at(numbers)) for f in extents)]
    decided = {k: filled(a, forms[k], numbers) if k in forms else a for k, a in part.decided.items()}
    known = replace(part, decided=decided, rooms=(), forms={}, begins={})
    return replace(graph, inputs=inputs, constants=constants, part=known)


def sample_numbers(rooms: Sequence[Room]) -> list[tuple[int, ...]]:
    """Every number at its most, each at its least and inside while the others are at their most, all at their least. A
    function of one number that bends one way and lies on a line at both ends and inside is that line; one that mixes
    two numbers differs where both change."""
    highest = tuple(r.high for r in rooms)
    found = [highest]
    for place, room in enumerate(rooms):
        for number in (room.low, max(room.high - 1, room.low), (room.low + room.high) // 2):
            found.append((*highest[:place], number, *highest[place + 1 :]))
    found.append(tuple(r.low for r in rooms))
    return list(dict.fromkeys(found))


def _spelled(numbers: Sequence[int]) -> str:
    return " and ".join(map(str, numbers)) + " at run time"


def form_of(values: Sequence[int], samples: Sequence[Sequence[int]]) -> Form:
    """The form that has these values at the samples, the first of which has every number at its most."""
    if all(v == values[0] for v in values):
        return Form(int(values[0]))
    first = samples[0]
    slopes = []
    for place in range(len(first)):
        alone = next((k for k, s in enumerate(samples) if _differ(s, first) == [place]), None)
        step = 0 if alone is None else samples[alone][place] - first[place]
        slope, rest = divmod(values[alone] - values[0], step) if alone is not None else (0, 0)
        if rest:
            raise UnevenError("a number does not follow from the others by a sum of multiples")
        slopes.append(int(slope))
    form = Form(int(values[0]) - sum(f * n for f, n in zip(slopes, first, strict=True)), tuple(slopes))
    if any(form.at(s) != v for s, v in zip(samples, values, strict=True)):
        raise UnevenError("a number does not follow from the others by a sum of multiples")
    return form


def _differ(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [k for k, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]


def _same_cut(cuts: list[CutError], samples: list[tuple[int, ...]]) -> CutError:
    """One cut for all: what is known of values before it either is the same, or has a form, or is left to the run."""
    first = cuts[0]
    for other in cuts[1:]:
        alike = type(other) is type(first) and other.node is first.node and other.scope.keys() == first.scope.keys()
        if alike and isinstance(first, UndecidedError) and isinstance(other, UndecidedError):
            asked = (first.number, first.itself, first.most is None, first.tensor is None)
            alike = asked == (other.number, other.itself, other.most is None, other.tensor is None)
        if not alike:
            raise UnevenError("other values need another cut")
    for name, value in list(first.scope.items()):
        values = [c.scope[name] for c in cuts]
        if not isinstance(value, np.ndarray):
            if any(v != value for v in values):
                raise UnevenError(f"'{name}' holds another number of tensors")
            continue
        if any(not isinstance(v, np.ndarray) for v in values):
            raise UnevenError(f"'{name}' is known for some values alone")
        if all(are_equal(v, value) for v in values):
            continue
        try:
            first.forms[name] = element_forms(values, samples)
        except UnevenError:
            del first.scope[name]  # the run makes it
    return first


def are_equal(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def element_forms(arrays: Sequence[np.ndarray], samples: Sequence[Sequence[int]]) -> tuple[Form, ...]:
    shape, dtype = arrays[0].shape, arrays[0].dtype
    is_whole = dtype.kind in "iu" or (dtype.kind == "f" and all((np.abs(a) < _MOST_WHOLE).all() and (a % 1 == 0).all()
                                                                for a in arrays))  # fmt: skip
    if any(a.shape != shape for a in arrays) or not is_whole or arrays[0].size > _MOST_ELEMENTS:
        raise UnevenError("a constant follows from run-time numbers in another way than number by number")
    columns = [[int(v) for v in a.ravel().tolist()] for a in arrays]
    return tuple(form_of(values, samples) for values in zip(*columns, strict=True))


class _Merger:
    """Goes over the Programs of all samples at once; the first is the one with the most of everything."""

    def __init__(self, rooms: Sequence[Room], samples: list[tuple[int, ...]], found: list[Recipes]) -> None:
        self._rooms = rooms
        self._samples = samples
        self._found = found
        self._programs = programs = [f.program for f in found]
        self._taken = {t.name for t in programs[0].tensors()} | {n for c in programs[0].computes for n in _inner(c)}
        for recipe in found[0].makers.values():
            self._taken.update([*(t.name for t in recipe.outputs), *_inner(recipe)])
        self._numbers = Tensor(self._fresh("numbers"), (len(rooms),), dtypes.int64)
        self._tensors: dict[tuple[Tensor, ...], Tensor] = {}
        self._forms: dict[Tensor, tuple[Form, ...]] = {}
        self._constants: dict[Tensor, np.ndarray] = {}
        # by the axis of the first sample: those of all; the one with room, and its extent at run time
        self._axes: dict[Axis, tuple[Axis, ...]] = {}
        self._made: dict[Axis, tuple[Axis, Form]] = {}
        self._merged: dict[tuple[Expr, ...], Expr] = {}
        self._computes: list[Compute] = []

    def program(self) -> tuple[Program, Shapes]:
        first = self._programs[0]
        self._expect([(p.input_names, p.output_names, len(p.computes)) for p in self._programs])
        inputs = [self._tensor(t) for t in zip(*(p.inputs for p in self._programs), strict=True)]
        for computes in zip(*(p.computes for p in self._programs), strict=True):
            self._computes.append(self._compute(computes))
        outputs = [self._known(t) for t in zip(*(p.outputs for p in self._programs), strict=True)]
        merged = Program(
            inputs=(*inputs, self._numbers),
            outputs=tuple(outputs),
            computes=tuple(self._computes),
            constants=self._constants,
            input_names=(*first.input_names, NUMBERS),
            output_names=first.output_names,
            ends=tuple(self._forms[t] for t in outputs),
        )
        return merged, {n: self._forms[t] for n, t in zip(first.output_names, outputs, strict=True)}

    def _expect(self, facts: Sequence[Any]) -> None:
        if any(f != facts[0] for f in facts):
            raise UnevenError("the operators do something else for other values")

    # tensors and axes

    def _tensor(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """A new tensor with room for what it is in any sample."""
        self._expect([(t.rank, t.dtype.name) for t in tensors])
        forms = tuple(form_of(extents, self._samples) for extents in zip(*(t.shape for t in tensors), strict=True))
        made = Tensor(tensors[0].name, tuple(f.most(self._rooms) for f in forms), tensors[0].dtype)
        self._tensors[tensors] = made
        self._forms[made] = forms
        return made

    def _known(self, tensors: tuple[Tensor, ...]) -> Tensor:
        found = self._tensors.get(tensors)
        if found is not None:
            return found
        arrays = [f.constants.get(t) for f, t in zip(self._found, tensors, strict=True)]
        made = None if any(a is None for a in arrays) else self._constant(tensors, arrays)  # type: ignore[arg-type]
        return made or self._unfolded(tensors)

    def _constant(self, tensors: tuple[Tensor, ...], arrays: list[np.ndarray]) -> Tensor | None:
        """One constant for all, or one whose elements follow from the numbers; None where they do not."""
        if all(is_begin(a, arrays[0]) for a in arrays):
            made = self._tensor(tensors)
            if arrays[0].shape == made.shape:
                self._constants[made] = arrays[0]
                return made
            del self._tensors[tensors]
        try:
            forms = element_forms(arrays, self._samples)
        except UnevenError:
            return None
        return self._computed(tensors, forms)

    def _unfolded(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """What has other elements for other values: computed, when it runs, as it was made of other constants."""
        makers = tuple(f.makers.get(t) for f, t in zip(self._found, tensors, strict=True))
        if any(m is None for m in makers):
            raise UnevenError("a constant follows from run-time numbers in a way that no operator tells")
        self._expect([m.outputs.index(t) for m, t in zip(makers, tensors, strict=True) if m is not None])
        self._computes.append(self._compute(makers))
        return self._tensors[tensors]

    def _computed(self, tensors: tuple[Tensor, ...], forms: Sequence[Form]) -> Tensor:
        """A constant whose elements follow from the numbers: computed, when it runs."""
        made = self._tensor(tensors)
        axes = tuple(Axis(f"i{k}", extent) for k, extent in enumerate(made.shape))
        at = tuple(map(var, axes))
        shape = tuple(a.extent for a in axes)
        value = load(self._array([f.constant for f in forms], shape, f"{made.name}_fixed"), at) + const(0)
        for place in range(len(self._rooms)):
            slopes = [f.factors[place] if place < len(f.factors) else 0 for f in forms]
            if any(slopes):
                value = value + load(self._array(slopes, shape, f"{made.name}_factor"), at) * self._number(place)
        self._computes.append(Map(made, axes, cast(value, made.dtype)))
        return made

    def _array(self, values: Sequence[int], shape: Sequence[Any], name: str) -> Tensor:
        made = Tensor(self._fresh(name), tuple(shape), dtypes.int64)
        self._constants[made] = np.array(values, np.int64).reshape(shape)
        return made

    def _own_axes(self, axes: Sequence[tuple[Axis, ...]]) -> tuple[Axis, ...]:
        self._expect([len(a) for a in axes])
        made = []
        for alike in zip(*axes, strict=True):
            form = form_of([fixed(a.extent) for a in alike], self._samples)
            axis = Axis(alike[0].name, form.most(self._rooms))
            self._axes[alike[0]] = alike
            self._made[alike[0]] = axis, form
            made.append(axis)
        return tuple(made)

    # run-time numbers

    def _number(self, place: int) -> Expr:
        """One of the numbers, within its room whatever a caller gives."""
        room = self._rooms[place]
        return minimum(maximum(cast(load(self._numbers, (place,)), dtypes.index), room.low), room.high)

    def _value(self, form: Form) -> Expr:
        value: Expr = const(form.constant)
        for place, factor in enumerate(form.factors):
            if factor:
                value = value + self._number(place) * factor
        return value

    def _literal(self, values: Sequence[int | float | bool], dtype: DType) -> Expr:
        """What stands for a literal that differs: a whole number, or one over one."""
        if dtype.is_int:
            return cast(self._value(form_of([int(v) for v in values], self._samples)), dtype)
        if not dtype.is_float:
            raise UnevenError("a literal differs")
        if all(float(v).is_integer() for v in values):
            return cast(self._value(form_of([int(v) for v in values], self._samples)), dtype)
        if any(not v or not np.isfinite(v) for v in values):
            raise UnevenError("a literal differs")
        counts = [round(1.0 / v) for v in values]
        if any(n < 1 or dtype.numpy.type(1.0 / n) != dtype.numpy.type(v) for n, v in zip(counts, values, strict=True)):
            raise UnevenError("a literal differs")
        below = cast(self._value(form_of(counts, self._samples)), dtype)
        return op("div", const(1.0, dtype), below)

    def _one_element(self, sources: Sequence[Tensor]) -> Expr | None:
        """Constants of one element as a literal, or as what stands for one; None where nothing does."""
        arrays = [f.constants.get(t) for f, t in zip(self._found, sources, strict=True)]
        known = [literal(a.reshape(()), sources[0].dtype) for a in arrays if a is not None and a.size == 1]
        if len(known) < len(arrays):
            return None
        if all(k is known[0] for k in known):
            return known[0]
        try:
            return self._literal([k.value for k in known], known[0].dtype)
        except UnevenError:
            return None

    # expressions

    def _expr(self, roots: tuple[Expr, ...]) -> Expr:
        stack = [roots]
        while stack:
            nodes = stack[-1]
            if nodes in self._merged:
                stack.pop()
                continue
            self._expect([(type(n), n.dtype.name, len(n.args)) for n in nodes])
            below = list(zip(*(n.args for n in nodes), strict=True))
            waiting = [b for b in below if b not in self._merged]
            if waiting:
                stack.extend(waiting)
                continue
            self._merged[nodes] = self._node(nodes, tuple(self._merged[b] for b in below))
            stack.pop()
        return self._merged[roots]

    def _node(self, nodes: tuple[Expr, ...], args: tuple[Expr, ...]) -> Expr:
        first = nodes[0]
        if isinstance(first, Const):
            values = [n.value for n in nodes]  # type: ignore[attr-defined]
            same = all(n is first for n in nodes)
            return first if same else self._literal(values, first.dtype)
        if isinstance(first, Var):
            if self._axes.get(first.axis) != tuple(n.axis for n in nodes):  # type: ignore[attr-defined]
                raise UnevenError("the operators use other axes for other values")
            return var(self._made[first.axis][0])
        if isinstance(first, Load):
            one = self._one_element([n.source for n in nodes])  # type: ignore[attr-defined]
            if one is not None:
                return one
            source = self._known(tuple(n.source for n in nodes))  # type: ignore[attr-defined]
            return load(source, [
                made if self._is_inside(index, made, form) else _inside(made, fixed(n))
                for index, made, n, form in zip(first.args, args, source.shape, self._forms[source], strict=True)
            ])  # fmt: skip
        if isinstance(first, Op):
            self._expect([n.op.name for n in nodes])  # type: ignore[attr-defined]
            return first.rebuild(args)
        if isinstance(first, State):
            self._expect([n.name for n in nodes])  # type: ignore[attr-defined]
            return first
        raise UnevenError("an extent is a symbol")

    def _is_inside(self, index: Expr, made: Expr, form: Form) -> bool:
        """Whether an index has nothing to do with what the run tells: it is inside where its conditions say so."""
        return not form.varies and not made.reads and not any(self._made[a][1].varies for a in index.axes)

    def _exprs(self, rows: Sequence[tuple[Expr, ...]]) -> tuple[Expr, ...]:
        self._expect([len(r) for r in rows])
        return tuple(self._expr(nodes) for nodes in zip(*rows, strict=True))

    # computes

    def _compute(self, computes: tuple[Any, ...]) -> Compute:
        self._expect([type(c) for c in computes])
        self._expect([len(c.outputs) for c in computes])
        first = computes[0]
        if isinstance(first, Map):
            axes = self._own_axes([c.axes for c in computes])
            value = self._expr(tuple(c.value for c in computes))
            return Map(self._tensor(tuple(c.output for c in computes)), axes, value, first.origin)
        if isinstance(first, Reduce):
            return self._reduce(computes)
        if isinstance(first, Scan):
            return self._scan(computes)
        if isinstance(first, Sort):
            axes = self._own_axes([c.axes for c in computes])
            self._expect([(c.axes.index(c.axis), c.descending) for c in computes])
            axis, form = self._made[first.axis]
            if form.varies:
                raise UnevenError("it sorts a number of elements that the run tells")
            (key,) = self._exprs([(c.key,) for c in computes])
            payloads = self._exprs([c.payloads for c in computes])
            outputs = tuple(self._tensor(t) for t in zip(*(c.outputs for c in computes), strict=True))
            return Sort(outputs, axes, axis, key, payloads, first.descending, first.origin)
        if isinstance(first, Scatter):
            axes = self._own_axes([c.axes for c in computes])
            self._expect([(c.operator, c.unique) for c in computes])
            if any(self._made[a][1].varies for a in first.axes):
                raise UnevenError("it scatters a number of elements that the run tells")
            initial = self._known(tuple(c.initial for c in computes))
            indices = self._exprs([c.indices for c in computes])
            value = self._expr(tuple(c.value for c in computes))
            output = self._tensor(tuple(c.output for c in computes))
            return replace(first, output=output, initial=initial, axes=axes, indices=indices, value=value)
        raise UnevenError("branches are compiled for known numbers alone")

    def _reduce(self, computes: tuple[Reduce, ...]) -> Reduce:
        first = computes[0]
        axes = self._own_axes([c.axes for c in computes])
        reduce_axes = self._own_axes([c.reduce_axes for c in computes])
        elements = self._exprs([c.elements for c in computes])
        rows = [(*c.monoid.identity, *c.monoid.combine, *c.monoid.final) for c in computes]
        if self._exprs(rows) != rows[0]:
            raise UnevenError("a reduction combines in another way for other values")
        made = [self._made[axis] for axis in first.reduce_axes]
        open_ends = [lt(var(axis), self._value(form)) for axis, form in made if form.varies]
        outputs = tuple(self._tensor(t) for t in zip(*(c.outputs for c in computes), strict=True))
        merged = Reduce(outputs, axes, reduce_axes, elements, first.monoid, first.origin)
        return replace(merged, elements=_masked(merged, all_of(open_ends))) if open_ends else merged

    def _scan(self, computes: tuple[Scan, ...]) -> Scan:
        """Steps behind the last one leave the carried values as they are, where that matters: in a Scan that begins
        with them, or whose last values are asked for."""
        first = computes[0]
        self._expect([(c.reverse, tuple(f is None for f in c.finals), len(c.body), len(c.stacked)) for c in computes])
        (axis,) = self._own_axes([(c.axis,) for c in computes])
        form = self._made[first.axis][1]
        initial = tuple(self._known(t) for t in zip(*(c.initial for c in computes), strict=True))
        carry = tuple(self._tensor(t) for t in zip(*(c.carry for c in computes), strict=True))
        body = [self._compute(b) for b in zip(*(c.body for c in computes), strict=True)]
        following = [self._known(t) for t in zip(*(c.following for c in computes), strict=True)]
        if form.varies and (first.reverse or any(f is not None for f in first.finals)):
            for place, (before, after) in enumerate(zip(carry, following, strict=True)):
                axes = tuple(Axis(f"i{k}", n) for k, n in enumerate(after.shape))
                at = tuple(map(var, axes))
                kept = Tensor(self._fresh(f"{after.name}_kept"), after.shape, after.dtype)
                value = select(lt(var(axis), self._value(form)), load(after, at), load(before, at))
                body.append(Map(kept, axes, value, first.origin))
                following[place] = kept
        finals = [None if f[0] is None else self._tensor(f) for f in zip(*(c.finals for c in computes), strict=True)]
        stacked = tuple(
            (self._known(tuple(s[0] for s in pair)), self._tensor(tuple(s[1] for s in pair)))
            for pair in zip(*(c.stacked for c in computes), strict=True)
        )
        return replace(first, axis=axis, initial=initial, carry=carry, body=tuple(body), following=tuple(following),
                       finals=tuple(finals), stacked=stacked)  # fmt: skip

    def _fresh(self, name: str) -> str:
        label = next(n for n in (f"{name}{k or ''}" for k in range(len(self._taken) + 1)) if n not in self._taken)
        self._taken.add(label)
        return label


def _inner(compute: Compute) -> list[str]:
    """Names of tensors inside a Scan."""
    if not isinstance(compute, Scan):
        return []
    found = [t.name for t in compute.carry]
    for part in compute.body:
        found += [*(t.name for t in part.outputs), *_inner(part)]
    return found


def _inside(index: Expr, extent: int) -> Expr:
    """An index that stays in the tensor: where there is more room than elements, what is read does not matter."""
    low, high = bounds(index)
    if low >= 0 and high < extent:
        return index
    return minimum(maximum(index, 0), max(extent - 1, 0))


def is_begin(part: np.ndarray, whole: np.ndarray) -> bool:
    """Whether a constant is the begin, along every axis, of a larger one."""
    begin = whole[tuple(slice(n) for n in part.shape)]
    return are_equal(np.ascontiguousarray(begin), np.ascontiguousarray(part))


def _masked(reduce: Reduce, inside: Expr) -> tuple[Expr, ...]:
    """The elements, and neutral ones where there are none: products of zeros, which kernels for products take."""
    pair = factors(reduce)
    if pair:
        one, other = (select(inside, f, const(0, f.dtype)) for f in pair)
        return (op("mul", one, other),)
    identity: Mapping[int, Expr] = dict(enumerate(reduce.monoid.identity))
    return tuple(select(inside, e, identity[k]) for k, e in enumerate(reduce.elements))
