"""The gradient of a loss as further computes of the same Program, from the last compute back to the first.

Whatever a Map or a sum reads has as its gradient another Map or sum, over the indices at which it is read
(`inverse.py`): no operator is known here, and what comes out is cut, fused and shared out as any compute is. What
several computes read adds up from the last reader to the first, so that each adds its own where it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from tilewright.errors import UnsupportedError
from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, plain_monoid, reads
from tilewright.ir.forms.expr import Axis, Expr, Load, const, eq, load, select, substitute, var
from tilewright.ir.forms.tensor import Tensor, extents
from tilewright.transform.gradient.inverse import Reading, readings
from tilewright.transform.gradient.scalars import adjoints


@dataclass(frozen=True)
class Gradients:
    """Computes behind those of a Program, and by tensor what the loss changes by; `beside` has for each of these
    computes the one of the Program whose gradient it is part of."""

    computes: tuple[Compute, ...]
    of: Mapping[Tensor, Tensor]
    beside: Mapping[Compute, Compute]


def gradients(program: Program, loss: Tensor, weights: Collection[Tensor], seed: float = 1.0) -> Gradients:
    """Of a loss, which is one number, by the weights: each times `seed`."""
    if loss.rank or not loss.dtype.is_float:
        raise UnsupportedError(f"the loss '{loss.name}' is no single number of floating point: it is {loss}")
    return _Backward(program, loss, weights, seed).run()


@dataclass
class _Backward:
    program: Program
    loss: Tensor
    weights: Collection[Tensor]
    seed: float
    of: dict[Tensor, Tensor] = field(default_factory=dict)
    computes: list[Compute] = field(default_factory=list)
    beside: dict[Compute, Compute] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = {tensor.name for tensor in self.program.tensors()}
        self.changing: set[Tensor] = set(self.weights)  # what some weight changes
        for compute in self.program.computes:
            if self.changing.intersection(reads(compute)):
                self.changing.update(t for t in compute.outputs if t.dtype.is_float)

    def run(self) -> Gradients:
        for compute in reversed(self.program.computes):
            if self.loss in compute.outputs:
                first = Map(self._new(self.loss), (), const(self.seed, self.loss.dtype), compute.origin)
                self._add(compute, first)
                self.of[self.loss] = first.output
            if any(tensor in self.of for tensor in compute.outputs):
                self._through(compute)
        return Gradients(tuple(self.computes), self.of, self.beside)

    def _through(self, compute: Compute) -> None:
        """Add to the gradients of all that a compute reads."""
        if not self.changing.intersection(reads(compute)):
            return
        for value, seed, domain in self._seeds(compute):
            for read, change in adjoints(value, seed).items():
                if read.source in self.changing:
                    self._contribute(compute, read, change, domain)

    def _seeds(self, compute: Compute) -> Iterator[tuple[Expr, Expr, tuple[Axis, ...]]]:
        """Expressions that a compute evaluates for all of some axes, and what a change of their values adds."""
        if isinstance(compute, Map):
            yield compute.value, self._changed(compute.output, compute.axes), compute.axes
            return
        operator = compute.monoid.operator if isinstance(compute, Reduce) else None
        if not isinstance(compute, Reduce) or operator not in ("add", "max", "min"):
            kind = f"{type(compute).__name__}{f' by {operator}' if operator else ''}".lower()
            raise UnsupportedError(f"{compute.origin or compute.outputs[0].name}: there is no gradient of a {kind}")
        (output,), (element,) = compute.outputs, compute.elements
        seed = self._changed(output, compute.axes)
        if operator != "add":
            seed = self._of_extreme(compute, output, element, seed)
        yield element, seed, (*compute.axes, *compute.reduce_axes)

    def _of_extreme(self, compute: Reduce, output: Tensor, element: Expr, seed: Expr) -> Expr:
        """Those that are the largest share what the largest has."""
        own = eq(element, load(output, map(var, compute.axes)))
        axes, summed = _renamed(compute.axes), _renamed(compute.reduce_axes)
        moved = dict(zip((*compute.axes, *compute.reduce_axes), map(var, (*axes, *summed)), strict=True))
        one = select(substitute(own, moved), const(1.0, output.dtype), const(0.0, output.dtype))
        many = self._new(output, "count")
        self._add(compute, Reduce((many,), axes, summed, (one,), plain_monoid("add", output.dtype), compute.origin))
        return select(own, seed / load(many, map(var, compute.axes)), const(0.0, output.dtype))

    def _changed(self, tensor: Tensor, axes: tuple[Axis, ...]) -> Expr:
        return load(self.of[tensor], map(var, axes))

    def _contribute(self, compute: Compute, read: Load, change: Expr, domain: tuple[Axis, ...]) -> None:
        tensor: Tensor = read.source
        place = readings(read.indices, extents(tensor), domain)
        value = _read_so(change, place)
        before = self.of.get(tensor)
        if place.left:
            part = self._new(tensor)
            self._add(compute, Reduce((part,), place.axes, place.left, (value,), plain_monoid("add", tensor.dtype),
                                      compute.origin))  # fmt: skip
            if before is None:
                self.of[tensor] = part
                return
            value = load(part, map(var, place.axes))
        if before is None and isinstance(value, Load) and value.indices == tuple(map(var, place.axes)):
            self.of[tensor] = value.source  # the same numbers: a sum's terms, for one, have the gradient of the sum
            return
        if before is not None:
            value = load(before, map(var, place.axes)) + value
        made = Map(self._new(tensor), place.axes, simplify(value), compute.origin)
        self._add(compute, made)
        self.of[tensor] = made.output

    def _add(self, compute: Compute, made: Compute) -> None:
        self.computes.append(made)
        self.beside[made] = compute

    def _new(self, tensor: Tensor, what: str = "gradient") -> Tensor:
        name, number = f"{tensor.name}_{what}", 1
        while name in self.names:
            number += 1
            name = f"{tensor.name}_{what}_{number}"
        self.names.add(name)
        return Tensor(name, tensor.shape, tensor.dtype)


def _read_so(change: Expr, place: Reading) -> Expr:
    """What is added, at the indices where an element is read."""
    value = simplify(substitute(change, place.values))
    return simplify(select(place.condition, value, const(0.0, value.dtype)))


def _renamed(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    return tuple(Axis(axis.name, axis.extent) for axis in axes)
