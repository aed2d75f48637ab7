"""Running sums, and largest or smallest numbers so far, in blocks: no step waits for the one before.

What is combined inside each block, and what all blocks before it give, are reductions like any other: computed side by
side, for more arithmetic by some times the root of the steps, and connected with their neighbours. Whether that pays is
predicted: machines with many units, or a costly launch, lose more by waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isqrt
from typing import TypeVar

import numpy as np

from tilewright.ir.analysis.parts import even_part
from tilewright.ir.analysis.simplify import linear, simplify
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, Scan, neutral, plain_monoid
from tilewright.ir.forms.expr import (
    Axis,
    Expr,
    Extent,
    Load,
    Op,
    axes_of,
    const,
    load,
    loads,
    lt,
    minimum,
    op,
    select,
    substitute,
    var,
)
from tilewright.ir.forms.tensor import Tensor, elements
from tilewright.ir.meaning.folding import without_dead
from tilewright.transform.reductions.neighbours import alone
from tilewright.transform.storage import names_of, unique_name

Predict = Callable[[Program], float]
T = TypeVar("T")

_OPERATORS = ("add", "max", "min")  # products of a part may overflow where those of all do not
_FEWEST = 16  # steps
_WORTH = 0.9  # of the time as it stands: less gain is within the model's error


def choose_prefixes(program: Program, predict: Predict) -> Program:
    """The Program with such Scans in blocks, where that is predicted to pay."""
    taken = names_of(program)
    computes: list[Compute] = []
    remarks: list[str] = []
    makers: dict[Tensor, Map] = {}
    for compute in program.computes:
        found = _found(compute, program, makers) if isinstance(compute, Scan) else None
        if found is None or not _pays(found, program, predict):
            made: list[Compute] = [compute]
        else:
            made = found.computes(taken)
            remarks.append(f"{compute.origin or compute.outputs[0].name}: {found.count} steps in {found.blocks} blocks "
                           "beside each other, since each combines one number more")  # fmt: skip
        computes.extend(made)
        makers |= {c.output: c for c in made if isinstance(c, Map)}
    if not remarks:
        return program
    return without_dead(replace(program, computes=tuple(computes), remarks=(*program.remarks, *remarks)))


def _pays(prefix: PrefixScan, program: Program, predict: Predict) -> bool:
    steps, blocks = (predict(alone(c, program)) for c in ([prefix.scan], prefix.computes(set())))
    return blocks < _WORTH * steps


@dataclass(frozen=True)
class PrefixScan:
    """A Scan that combines one number more at every step: which, with what, and whether its own step counts."""

    scan: Scan
    step: Map
    operator: str
    given: Expr  # over the step's axes, at the Scan's step
    start: Tensor | None  # None: what changes nothing
    exclusive: bool
    order: tuple[int | None, ...]  # the step's axes, and None for the steps, as what is given lies in memory

    @property
    def count(self) -> int:
        return _extent(self.scan.axis)

    @property
    def size(self) -> int:
        return even_part(self.count, isqrt(self.count - 1) + 1)

    @property
    def blocks(self) -> int:
        return -(-self.count // self.size)

    def computes(self, taken: set[str]) -> list[Compute]:
        """What each block gives, what is combined inside of each up to every step, and both with all blocks before."""
        (_, output), origin = self.scan.stacked[0], self.scan.origin
        inside = self._inside(Tensor(self._name("inside", taken), self._around(self.blocks, self.size), output.dtype))
        parts = self._of_blocks(Tensor(self._name("blocks", taken), self._around(self.blocks), output.dtype), inside)
        before = Tensor(self._name("before", taken), self._around(self.blocks), output.dtype)
        block, earlier, rest = Axis("block", self.blocks), Axis("earlier", self.blocks), self._axes()
        value = select(lt(var(earlier), var(block)), self._read(parts.outputs[0], rest, var(earlier)), self._nothing)
        all_before = self._reduce(before, self._with(rest, block), earlier, value)
        step, rest = Axis("t", self.count), self._axes()
        place = self._turned(var(step))
        both = op(self.operator, self._read(before, rest, place // self.size),
                  self._read(inside.outputs[0], rest, place // self.size, place % self.size))  # fmt: skip
        if self.start is not None:
            both = op(self.operator, load(self.start, tuple(var(a) for a in rest)), both)
        return [inside, parts, all_before, Map(output, (step, *rest), simplify(both), origin)]

    def _around(self, *of_steps: Extent) -> tuple[Extent, ...]:
        """The shape of what there is of the steps, with the other extents around it as they lie in memory."""
        return self._ordered(self.step.output.shape, of_steps)

    def _with(self, rest: tuple[Axis, ...], *of_steps: Axis) -> tuple[Axis, ...]:
        return self._ordered(rest, of_steps)

    def _read(self, tensor: Tensor, rest: tuple[Axis, ...], *of_steps: Expr) -> Load:
        return load(tensor, self._ordered([var(a) for a in rest], of_steps))

    def _ordered(self, rest: Sequence[T], of_steps: Sequence[T]) -> tuple[T, ...]:
        return tuple(x for place in self.order for x in (of_steps if place is None else (rest[place],)))

    @property
    def _nothing(self) -> Expr:
        return neutral(self.operator, self.step.output.dtype)

    def _axes(self) -> tuple[Axis, ...]:
        return tuple(Axis(a.name, a.extent) for a in self.step.axes)

    def _turned(self, place: Expr) -> Expr:
        """The index of a place in the order of the steps, and the other way round."""
        return self.count - 1 - place if self.scan.reverse else place

    def _of_blocks(self, output: Tensor, inside: Reduce) -> Compute:
        """What the last step of each block has, unless it leaves its own out."""
        block, inner, rest = Axis("block", self.blocks), Axis("inner", self.size), self._axes()
        if not self.exclusive:
            last = self._read(inside.outputs[0], rest, var(block), const(self.size - 1))
            return Map(output, self._with(rest, block), last, self.scan.origin)
        value = self._at(var(block) * self.size + var(inner), rest)
        return self._reduce(output, self._with(rest, block), inner, value)

    def _inside(self, output: Tensor) -> Reduce:
        block, last, inner, rest = (Axis("block", self.blocks), Axis("last", self.size), Axis("inner", self.size),
                                    self._axes())  # fmt: skip
        counts = lt(var(inner), var(last) if self.exclusive else var(last) + 1)
        value = select(counts, self._at(var(block) * self.size + var(inner), rest), self._nothing)
        return self._reduce(output, self._with(rest, block, last), inner, value)

    def _at(self, place: Expr, rest: tuple[Axis, ...]) -> Expr:
        """What is given at a place of the order, which the last block may not have."""
        is_ragged = self.blocks * self.size != self.count
        clipped = minimum(place, self.count - 1) if is_ragged else place
        moved: dict[Axis, Expr] = {a: var(new) for a, new in zip(self.step.axes, rest, strict=True)}
        value = substitute(self.given, {**moved, self.scan.axis: self._turned(clipped)})
        return simplify(select(lt(place, self.count), value, self._nothing) if is_ragged else value)

    def _reduce(self, output: Tensor, axes: tuple[Axis, ...], over: Axis, value: Expr) -> Reduce:
        return Reduce((output,), axes, (over,), (simplify(value),), plain_monoid(self.operator, output.dtype),
                      self.scan.origin)  # fmt: skip

    def _name(self, suffix: str, taken: set[str]) -> str:
        return unique_name(f"{self.scan.stacked[0][1].name}_{suffix}", taken)


def _order(given: Expr, scan: Scan, axes: tuple[Axis, ...], makers: Mapping[Tensor, Map]) -> tuple[int | None, ...]:
    """The axes and the steps so that the largest tensor that is read is read as it lies."""
    read = max(loads(given), key=lambda n: elements(n.source.shape), default=None)
    maker = None if read is None else makers.get(read.source)
    if read is not None and maker is not None:
        own = dict(zip(maker.axes, read.indices, strict=True))
        return _order(simplify(substitute(maker.value, own)), scan, axes, makers)
    places = () if read is None else read.indices

    def stride(axis: Axis) -> tuple[int, int]:
        """Which index it moves, and how far: what moves none lies outside."""
        moved = max((n for n, index in enumerate(places) if axis in axes_of(index)), default=-1)
        return moved, -_coefficient(places[moved], axis) if moved >= 0 else 0

    steps: list[tuple[int | None, Axis]] = [(None, scan.axis), *enumerate(axes)]
    return tuple(place for place, axis in sorted(steps, key=lambda item: stride(item[1])))


def _coefficient(index: Expr, axis: Axis) -> int:
    while isinstance(index, Op) and index.op.name == "min":
        index = index.args[0]  # a last block may not have all steps
    return abs(linear(index).terms.get(var(axis), 0))


def _found(scan: Scan, program: Program, makers: Mapping[Tensor, Map]) -> PrefixScan | None:
    if len(scan.carry) != 1 or scan.finals != (None,) or len(scan.stacked) != 1 or _extent(scan.axis) < _FEWEST:
        return None
    maps = {c.output: c for c in scan.body if isinstance(c, Map)}
    (carry,), (following,), ((kept, _),) = scan.carry, scan.following, scan.stacked
    if len(maps) != len(scan.body) or following not in maps or {following, kept} != set(maps):
        return None
    exclusive = kept is not following
    if exclusive and maps[kept].value is not _own(carry, maps[kept]):
        return None
    step = maps[following]
    value = step.value
    if not isinstance(value, Op) or value.op.name not in _OPERATORS or value.dtype is not step.output.dtype:
        return None
    own = _own(carry, step)
    others = [a for a in value.args if a is not own]
    if len(others) != 1 or any(n.source in (carry, *maps) for n in loads(others[0])):
        return None
    (initial,) = scan.initial
    nothing = neutral(value.op.name, step.output.dtype).value
    begun = program.constants.get(initial)
    start = None if begun is not None and bool(np.all(np.asarray(begun) == nothing)) else initial
    order = _order(others[0], scan, step.axes, makers)
    return PrefixScan(scan, step, value.op.name, others[0], start, exclusive, order)


def _own(carry: Tensor, compute: Map) -> Load:
    return load(carry, tuple(var(a) for a in compute.axes))


def _extent(axis: Axis) -> int:
    return axis.extent if isinstance(axis.extent, int) else 0
