"""Products of float32 operands as three products of their parts on tensor cores, where that is predicted to pay.

    y[i, j] += x[i, k] w[k, j]      is    y[i, j] += x_parts[p(t), i, k] w_parts[q(t), k, j]    over k and three terms t

Parts are tf32 numbers (ir/analysis/terms.py): together they have 22 to 24 bits of every factor, and the one term that
is left out is smaller than what float32 rounds. Parts of weights are made here, those of activations by a map in front.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from tilewright.ir.analysis.products import factors
from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.analysis.terms import PARTS, TERMS, part, part_of_first, part_of_second
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bounds import fixed
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, reads
from tilewright.ir.forms.expr import Axis, Expr, Load, cast, load, loads, replace_nodes, substitute, var
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.folding import fold, without_dead
from tilewright.target import Target
from tilewright.transform.precision.choose import contracted
from tilewright.transform.storage import names_of, unique_name

Predict = Callable[[Program], float]

_INSTRUCTION = "mma_tf32"
_LEAST_SIDE = 32  # rows and columns: with fewer, fragments of parts that are read twice are mostly empty
_LEAST_SUM = 144  # of shorter ones, as attention's, results take the time: kernels that keep them on chip read operands
_WORTH = 0.9  # of the predicted time of multiply-adds


def use_three_terms(program: Program, target: Target, predict: Predict) -> Program:
    """The Program with such products in three terms; as it is on machines without tensor cores for them."""
    if target.rate(_INSTRUCTION) is None:
        return program
    change = _Change(program, names_of(program))
    known: dict[Hashable, bool] = {}
    for compute in program.computes:
        operands = _operands(compute)
        if operands is not None and isinstance(compute, Reduce):
            form = _form(compute, program)
            if form not in known:
                known[form] = _pays(compute, operands, program, predict)
            if known[form]:
                compute = change.in_terms(compute, operands)
        change.computes.append(compute)
    return change.whole()


@dataclass
class _Change:
    """A Program on its way to another, the parts of a tensor being made once."""

    program: Program
    taken: set[str]

    def __post_init__(self) -> None:
        self.computes: list[Compute] = []
        self.constants = dict(self.program.constants)
        self.parts: dict[Tensor, Tensor] = {}
        self.remarks: list[str] = []

    def in_terms(self, compute: Reduce, operands: tuple[Load, Load]) -> Reduce:
        for tensor in dict.fromkeys(n.source for n in operands):
            assert isinstance(tensor, Tensor)
            if tensor not in self.parts:
                self._add_parts(tensor)
        self.remarks.append(f"{compute.origin or compute.outputs[0].name}: three products of parts on tensor cores")
        return _in_terms(compute, operands, self.parts)

    def _add_parts(self, tensor: Tensor) -> None:
        made = _parts_of(tensor, unique_name(f"{tensor.name}_parts", self.taken))
        self.parts[tensor] = made.output
        if tensor in self.program.constants:
            self.constants.update(fold(made, self.program.constants))
        else:
            self.computes.append(made)

    def whole(self) -> Program:
        if not self.parts:
            return self.program
        remarks = (*self.program.remarks, *self.remarks)
        return without_dead(replace(self.program, computes=tuple(self.computes), constants=self.constants,
                                    remarks=remarks))  # fmt: skip


def _operands(compute: Compute) -> tuple[Load, Load] | None:
    """Those of a product of float32 matrices, large enough to fill tensor cores."""
    operands = contracted(compute)
    if operands is None or any(n.dtype is not dtypes.float32 or not isinstance(n.source, Tensor) for n in operands):
        return None
    assert isinstance(compute, Reduce)
    if any(not isinstance(a.extent, int) for a in (*compute.axes, *compute.reduce_axes)):
        return None
    first, second = (set(f.outputs) for f in factors(compute.elements[0], compute.axes, compute.reduce_axes)
                     if loads(f.value))  # fmt: skip
    sides = [prod(_extent(a) for a in own) for own in (first - second, second - first)]
    length = prod(_extent(a) for a in compute.reduce_axes)
    return operands if min(sides) >= _LEAST_SIDE and length >= _LEAST_SUM else None


def _parts_of(tensor: Tensor, name: str) -> Map:
    axes = tuple(Axis(f"i{n}", extent) for n, extent in enumerate(tensor.shape))
    number = Axis("part", PARTS)
    value = part(load(tensor, [var(a) for a in axes]), var(number))
    return Map(Tensor(name, (PARTS, *tensor.shape), dtypes.tf32), (number, *axes), simplify(value))


def _in_terms(compute: Reduce, operands: tuple[Load, Load], parts: dict[Tensor, Tensor]) -> Reduce:
    term = Axis("term", TERMS)
    read: dict[Expr, Expr] = {
        node: cast(load(parts[node.source], [number, *node.indices]), dtypes.float32)
        for node, number in zip(operands, (part_of_first(term), part_of_second(term)), strict=True)
    }
    element = replace_nodes(compute.elements[0], read)
    return replace(compute, reduce_axes=(term, *compute.reduce_axes), elements=(element,))


def _pays(compute: Reduce, operands: tuple[Load, Load], program: Program, predict: Predict) -> bool:
    parts: dict[Tensor, Tensor] = {}
    before: list[Compute] = []
    constants = dict(program.constants)
    for tensor in dict.fromkeys(n.source for n in operands):
        assert isinstance(tensor, Tensor)
        made = _parts_of(tensor, f"{tensor.name}_parts")
        parts[tensor] = made.output
        if tensor in constants:
            constants[made.output] = np.broadcast_to(np.float32(0), [fixed(e) for e in made.output.shape])
        else:
            before.append(made)
    terms = _in_terms(compute, operands, parts)
    direct = predict(_alone((compute,), program.constants))
    return predict(_alone((*before, terms), constants)) < _WORTH * direct


def _alone(computes: tuple[Compute, ...], constants: Mapping[Tensor, np.ndarray]) -> Program:
    """A Program of nothing else."""
    made = {t for c in computes for t in c.outputs}
    read = dict.fromkeys(t for c in computes for t in reads(c) if t not in made)
    kept = {t: constants[t] for t in read if t in constants}
    return Program(tuple(t for t in read if t not in kept), computes[-1].outputs, computes, kept)


def _form(compute: Reduce, program: Program) -> Hashable:
    """What tells a product from another that is planned differently: its sizes, and how it reads what."""
    axes = (*compute.axes, *compute.reduce_axes)
    names = {a: var(Axis(f"axis{n}", a.extent)) for n, a in enumerate(axes)}
    read = tuple((n.source.shape, n.source in program.constants, tuple(repr(substitute(i, names)) for i in n.indices))
                 for n in loads(*compute.elements))  # fmt: skip
    return tuple(a.extent for a in axes), len(compute.axes), read


def _extent(axis: Axis) -> int:
    return axis.extent if isinstance(axis.extent, int) else 0
