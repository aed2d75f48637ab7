"""Running sums, and largest or smallest numbers so far, in blocks: no step waits for the one before.

What is combined inside each block, and what all blocks before it give, are reductions like any other: computed side by
side, for more arithmetic by some times the root of the steps, and connected with their neighbours. Whether that pays is
predicted: machines with many units, or a costly launch, lose more by waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isqrt

import numpy as np

from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, Scan, neutral, plain_monoid
from tilewright.ir.forms.expr import Axis, Expr, Extent, Load, Op, load, loads, lt, minimum, op, select, substitute, var
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.folding import without_dead
from tilewright.transform.reductions.neighbours import alone
from tilewright.transform.storage import names_of, unique_name

Predict = Callable[[Program], float]

_OPERATORS = ("add", "max", "min")  # products of a part may overflow where those of all do not
_FEWEST = 16  # steps
_WORTH = 0.9  # of the time as it stands: less gain is within the model's error


def choose_prefixes(program: Program, predict: Predict) -> Program:
    """The Program with such Scans in blocks, where that is predicted to pay."""
    taken = names_of(program)
    computes: list[Compute] = []
    remarks: list[str] = []
    for compute in program.computes:
        found = _found(compute, program) if isinstance(compute, Scan) else None
        if found is None or not _pays(found, program, predict):
            computes.append(compute)
            continue
        computes.extend(found.computes(taken))
        remarks.append(f"{compute.origin or compute.outputs[0].name}: {found.count} steps in {found.blocks} blocks "
                       "beside each other, since each combines one number more")  # fmt: skip
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

    @property
    def count(self) -> int:
        return _extent(self.scan.axis)

    @property
    def size(self) -> int:
        return isqrt(self.count - 1) + 1

    @property
    def blocks(self) -> int:
        return -(-self.count // self.size)

    def computes(self, taken: set[str]) -> list[Compute]:
        """What each block gives, what is combined inside of each up to every step, and both with all blocks before."""
        (_, output), origin = self.scan.stacked[0], self.scan.origin
        parts = self._of_blocks(Tensor(self._name("blocks", taken), (self.blocks, *self._rest), output.dtype))
        inside = self._inside(Tensor(self._name("inside", taken), (self.blocks, self.size, *self._rest), output.dtype))
        before = Tensor(self._name("before", taken), (self.blocks, *self._rest), output.dtype)
        block, earlier, rest = Axis("block", self.blocks), Axis("earlier", self.blocks), self._axes()
        here = tuple(var(a) for a in rest)
        value = select(lt(var(earlier), var(block)), load(parts.outputs[0], (var(earlier), *here)), self._nothing)
        all_before = self._reduce(before, (block, *rest), earlier, value)
        step, rest = Axis("t", self.count), self._axes()
        here = tuple(var(a) for a in rest)
        place = self._turned(var(step))
        both = op(self.operator, load(before, (place // self.size, *here)),
                  load(inside.outputs[0], (place // self.size, place % self.size, *here)))  # fmt: skip
        if self.start is not None:
            both = op(self.operator, load(self.start, here), both)
        return [parts, inside, all_before, Map(output, (step, *rest), simplify(both), origin)]

    @property
    def _rest(self) -> tuple[Extent, ...]:
        return self.step.output.shape

    @property
    def _nothing(self) -> Expr:
        return neutral(self.operator, self.step.output.dtype)

    def _axes(self) -> tuple[Axis, ...]:
        return tuple(Axis(a.name, a.extent) for a in self.step.axes)

    def _turned(self, place: Expr) -> Expr:
        """The index of a place in the order of the steps, and the other way round."""
        return self.count - 1 - place if self.scan.reverse else place

    def _of_blocks(self, output: Tensor) -> Reduce:
        block, inner, rest = Axis("block", self.blocks), Axis("inner", self.size), self._axes()
        return self._reduce(output, (block, *rest), inner, self._at(var(block) * self.size + var(inner), rest))

    def _inside(self, output: Tensor) -> Reduce:
        block, last, inner, rest = (Axis("block", self.blocks), Axis("last", self.size), Axis("inner", self.size),
                                    self._axes())  # fmt: skip
        counts = lt(var(inner), var(last) if self.exclusive else var(last) + 1)
        value = select(counts, self._at(var(block) * self.size + var(inner), rest), self._nothing)
        return self._reduce(output, (block, last, *rest), inner, value)

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


def _found(scan: Scan, program: Program) -> PrefixScan | None:
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
    return PrefixScan(scan, step, value.op.name, others[0], start, exclusive)


def _own(carry: Tensor, compute: Map) -> Load:
    return load(carry, tuple(var(a) for a in compute.axes))


def _extent(axis: Axis) -> int:
    return axis.extent if isinstance(axis.extent, int) else 0
