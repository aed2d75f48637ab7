"""Rows of a product's operands made as long as whole packets need, where they end in the middle of one.

    y[i, j] += x[i, k] w[k, j]    with 2949 k and 5921 j in float16 is
    y[i, j] += x_rows[i, k] w_rows[k, j]    over 2952 k, with x_rows: [8205, 2952] and w_rows: [2952, 5928]

Tensor cores' tiles come in packets of 16 bytes that begin at multiples of 16; rows of another length were brought
element by element. What is summed over ends with a step of the kernel where that adds little: kernels spend their time
on a check of every packet otherwise (on an H200, 8205 x 2949 x 5921 in float16 with 2952 of them: 761 us of 467
predicted; 4096 x 4100 x 4096 in three products of tf32: 2300 of 1340). Behind the ends lie zeros, in both operands
where the axis is summed over, so that what is added is zero whatever the numbers are. Weights are made longer here;
inputs are copied, by the map that changes their type where there is one, where copy and product together are predicted
to take less time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.analysis.terms import terms_of
from tilewright.ir.forms.bounds import fixed, static
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce
from tilewright.ir.forms.expr import (
    Axis,
    Expr,
    Load,
    Var,
    all_of,
    axes_of,
    const,
    is_op,
    load,
    loads,
    lt,
    minimum,
    replace_nodes,
    select,
    substitute,
    var,
    walk,
)
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.folding import without_dead
from tilewright.target import Target
from tilewright.transform.layout.channel_runs import is_narrow
from tilewright.transform.precision.choose import contracted
from tilewright.transform.storage import names_of, unique_name

_GAIN = 0.9  # of the predicted time without copies
_MOST = 4  # rows are made longer by a part of this at most
_STEPS = (128, 64, 32, 16)  # elements of a sum that kernels may walk at a time,
_PACKETS = (16, 8, 4, 2, 1)  # elements
_MOST_OF_STEP = 16  # which it ends with where that adds no larger part

Predict = Callable[[Program], float]


@dataclass(frozen=True)
class _Operand:
    """One of two, the axis along its rows, and how many elements make a packet."""

    read: Load
    along: Axis
    packet: int

    @property
    def is_cut(self) -> bool:
        more = -fixed(self.read.source.shape[-1]) % self.packet
        return 0 < more * _MOST <= fixed(self.read.source.shape[-1])


@dataclass(frozen=True)
class _Longer:
    """A product that reads longer rows, and what makes them."""

    compute: Reduce
    copies: tuple[Map, ...]
    constants: dict[Tensor, np.ndarray]
    is_free: bool  # what makes parts of numbers makes longer rows of them as well


def whole_rows(program: Program, target: Target, predict: Predict) -> Program:
    taken = names_of(program)
    made = _Made(program, taken)
    computes: list[Compute] = []
    staged: list[Tensor] = []
    for compute in program.computes:
        found = _longer(compute, target, made)
        if found is not None and _pays(compute, found, program, predict):
            made.keep(found)
            computes += [c for c in found.copies if c not in computes]
            staged += [c.output for c in found.copies if c.output not in staged]
            compute = found.compute
        computes.append(compute)
    if not made.kept:
        return program
    constants = {**program.constants, **made.constants}
    return without_dead(replace(program, computes=tuple(computes), constants=constants,
                                staged=(*program.staged, *staged)))  # fmt: skip


class _Made:
    """Longer forms of a Program's tensors, each made once: constants, and maps that copy."""

    def __init__(self, program: Program, taken: set[str]) -> None:
        self.program, self.taken = program, taken
        self.producers = program.producers()
        self.readers = program.consumers()
        self.forms: dict[tuple[Tensor, tuple[int, ...]], Map | tuple[Tensor, np.ndarray]] = {}
        self.constants: dict[Tensor, np.ndarray] = {}
        self.kept = 0

    def keep(self, found: _Longer) -> None:
        self.constants.update(found.constants)
        self.kept += 1

    def form(self, source: Tensor, shape: tuple[int, ...]) -> Map | tuple[Tensor, np.ndarray]:
        """The tensor in a larger shape, zeros behind its ends."""
        key = source, shape
        if key not in self.forms:
            output = Tensor(unique_name(f"{source.name}_rows", self.taken), shape, source.dtype)
            array = self.program.constants.get(source)
            if array is None:
                self.forms[key] = self._copy(source, output)
            else:
                ends = [(0, n - have) for n, have in zip(shape, array.shape, strict=True)]
                self.forms[key] = output, np.pad(array, ends)
        return self.forms[key]

    def _copy(self, source: Tensor, output: Tensor) -> Map:
        axes = tuple(Axis(f"i{n}", extent) for n, extent in enumerate(output.shape))
        producer = self.producers.get(source)
        places = [_within(a, fixed(n)) for a, n in zip(axes, source.shape, strict=True)]
        value: Expr = load(source, places)
        if isinstance(producer, Map) and len(self.readers.get(source, ())) == 1:
            value = substitute(producer.value, dict(zip(producer.axes, places, strict=True)))
        ends = [lt(var(a), fixed(n)) for a, n in zip(axes, source.shape, strict=True) if a.extent != n]
        value = simplify(select(all_of(ends), value, const(0, source.dtype)))
        return Map(output, axes, value, "" if producer is None else producer.origin)


def _within(axis: Axis, extent: int) -> Expr:
    """A place that is there, packet by packet: a thread may ask for what lies there before it knows whether it wants
    that (so nvcc does; maps took 1.7 times as long without)."""
    if axis.extent == extent:
        return var(axis)
    packet = next(n for n in _PACKETS if extent % n == 0)
    return simplify(minimum(var(axis) // packet, extent // packet - 1) * packet + var(axis) % packet)


def _longer(compute: Compute, target: Target, made: _Made) -> _Longer | None:
    """The product with rows of whole packets; None where they are, or cannot be made."""
    operands = contracted(compute)
    if operands is None or not isinstance(compute, Reduce) or not is_narrow(compute):
        return None
    found = [_operand(read, compute, target) for read in operands]
    parts = any(terms_of(a, loads(*compute.elements)) for a in compute.reduce_axes)
    if not parts and not any(o is not None and o.is_cut for o in found):
        return None
    if any(static(a.extent) is None for a in (*compute.axes, *compute.reduce_axes)):
        return None
    rows = [o for o in found if o is not None and o.is_cut]
    summed = [o for o in found if o is not None and o.along in compute.reduce_axes]
    sums = {o.along: o.packet for o in summed if o.is_cut or parts}
    longer = {a: Axis(a.name, _whole(fixed(a.extent), packet)) for a, packet in sums.items()}
    longer = {a: b for a, b in longer.items() if a.extent != b.extent}
    replaced: dict[Expr, Expr] = {}
    copies: list[Map] = []
    constants: dict[Tensor, np.ndarray] = {}
    for read in operands:
        shape = _shape(read, next((o for o in rows if o.read is read), None), longer)
        if shape == read.source.shape:
            continue
        if not isinstance(read.source, Tensor) or shape is None or not _may_be_copied(read.source, made):
            return None
        form = made.form(read.source, shape)
        output = form.output if isinstance(form, Map) else form[0]
        if isinstance(form, Map):
            copies.append(form)
        else:
            constants[output] = form[1]
        replaced[read] = load(output, read.indices)
    if not replaced:
        return None
    element = replace_nodes(compute.elements[0], replaced)
    if any(a in axes_of(n) for n in _conditions(compute) for a in longer):
        return None
    element = substitute(element, {a: var(b) for a, b in longer.items()})
    reduced = tuple(longer.get(a, a) for a in compute.reduce_axes)
    changed = replace(compute, reduce_axes=reduced, elements=(element,))
    return _Longer(changed, tuple(dict.fromkeys(copies)), constants, is_free=parts and not rows)


def _whole(extent: int, packet: int) -> int:
    steps = [-(-extent // step) * step for step in _STEPS if step > packet]
    return next((n for n in steps if (n - extent) * _MOST_OF_STEP <= extent), -(-extent // packet) * packet)


def _conditions(compute: Reduce) -> Iterator[Expr]:
    """What a sum's element knows of axes beside what it reads."""
    return (n.args[0] for n in walk(*compute.elements) if is_op(n, "select"))


def _operand(read: Load, compute: Reduce, target: Target) -> _Operand | None:
    """None of what is not read row by row, from end to end."""
    if not isinstance(read.source, Tensor) or read.source.rank < 2:
        return None
    last = read.indices[-1]
    if not isinstance(last, Var) or last.axis.extent != read.source.shape[-1]:
        return None
    if last.axis in axes_of(*read.indices[:-1]):
        return None
    return _Operand(read, last.axis, target.lanes(read.dtype.bytes))


def _shape(read: Load, cut: _Operand | None, longer: dict[Axis, Axis]) -> tuple[int, ...] | None:
    """The extents that it has to have; None where a longer axis is no dimension of it."""
    shape = [fixed(n) for n in read.source.shape]
    for axis, more in longer.items():
        places = [n for n, index in enumerate(read.indices) if axis in axes_of(index)]
        if len(places) != 1 or read.indices[places[0]] is not var(axis) or shape[places[0]] != axis.extent:
            return None
        shape[places[0]] = fixed(more.extent)
    if cut is not None:
        shape[-1] = -(-shape[-1] // cut.packet) * cut.packet
    return tuple(shape)


def _may_be_copied(source: Tensor, made: _Made) -> bool:
    """Constants, and what comes from inputs by maps alone: what follows a sum stays on chip with it, or is streamed,
    and a copy would stand between them."""
    waiting, seen = [source], {source}
    while waiting:
        tensor = waiting.pop()
        producer = made.producers.get(tensor)
        if producer is None:
            continue
        if not isinstance(producer, Map):
            return False
        more = {n.source for n in loads(producer.value) if isinstance(n.source, Tensor)} - seen
        seen |= more
        waiting += more
    return True


def _pays(compute: Compute, found: _Longer, program: Program, predict: Predict) -> bool:
    if found.is_free or not found.copies:
        return True
    assert isinstance(compute, Reduce)
    producers = program.producers()
    made = dict.fromkeys(producers.get(n.source) for n in loads(*compute.elements))
    plain = _alone((*(c for c in made if isinstance(c, Map)), compute), program.constants)
    longer = _alone((*found.copies, found.compute), {**program.constants, **found.constants})
    return predict(replace(longer, staged=tuple(c.output for c in found.copies))) < _GAIN * predict(plain)


def _alone(computes: tuple[Map | Reduce, ...], constants: Mapping[Tensor, np.ndarray]) -> Program:
    """A Program of nothing else, with the constants of all."""
    made = {t for c in computes for t in c.outputs}
    read = dict.fromkeys(n.source for c in computes
                         for n in loads(*((c.value,) if isinstance(c, Map) else c.elements)))  # fmt: skip
    inputs = tuple(t for t in read if t not in made and t not in constants)
    return Program(inputs, computes[-1].outputs, computes, constants)
