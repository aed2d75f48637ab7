"""Copies what a convolution reads where it lies in no packets: channels innermost, as many of them as packets need.

    y[n, o, i, j] += x[n, c, 2 i + r, 2 j + s] w[o, c, r, s]    with 3 channels and 7 x 7 taps is
    y[n, o, i, j] += copy[n, 2 i + r, 8 j + t] packed[o, r, t]    with t = 4 s + c up to 32

Tensor cores take runs of the sum in packets of 16 bytes that begin at multiples of 16. Taps along a row and the
channels of each are one run of the copy; channels and taps that are not there have weights of zero. Images of three
channels, odd numbers of channels and inputs whose channels lie apart are read so, where copy and sum together are
predicted to take less time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tilewright.ir.analysis.products import factors
from tilewright.ir.analysis.simplify import linear, simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bounds import bounds, fixed, static
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce
from tilewright.ir.forms.expr import (
    Axis,
    Expr,
    Load,
    Var,
    all_of,
    axes_of,
    const,
    le,
    load,
    loads,
    lt,
    replace_nodes,
    select,
    var,
)
from tilewright.ir.forms.tensor import Layout, Tensor
from tilewright.ir.meaning.folding import without_dead
from tilewright.target import Target
from tilewright.transform.layout.guarded_reads import dimension_of, guarded_reads, moved_condition
from tilewright.transform.layout.staging_cost import GuardedRead

_GAIN = 0.9  # of the predicted time without the copy

Predict = Callable[[Program], float]


@dataclass(frozen=True)
class _Row:
    """The last dimension of a read: one tap beside output axes, the tap's neighbours being the row's."""

    tap: Axis | None  # that becomes one run with the channels
    steps: tuple[int, ...]  # elements of the row between neighbours along other axes
    scale: int  # elements of the source between neighbours of the copy's row
    start: Expr  # where in the copy's row a run begins
    low: int  # where in the source the copy's row begins
    length: int  # of it


@dataclass(frozen=True)
class _Copied:
    """A sum that reads a copy, the copy, and the weights as they lie for it."""

    copy: Map
    compute: Reduce
    weight: Tensor
    array: np.ndarray


def runs_of_channels(program: Program, target: Target, predict: Predict) -> Program:
    taken = {t.name for t in program.tensors()}
    constants, staged = dict(program.constants), list(program.staged)
    computes: list[Compute] = []
    for compute in program.computes:
        made = _chosen(compute, replace(program, constants=constants), target, predict, taken)
        if made is not None:
            taken.update((made.copy.output.name, made.weight.name))
            constants[made.weight] = made.array
            staged.append(made.copy.output)
            computes.append(made.copy)
            compute = made.compute
        computes.append(compute)
    return without_dead(replace(program, computes=tuple(computes), constants=constants, staged=tuple(staged)))


def _chosen(compute: Compute, program: Program, target: Target, predict: Predict, taken: set[str]) -> _Copied | None:
    if not isinstance(compute, Reduce) or not is_narrow(compute):
        return None
    for found in guarded_reads(compute, program):
        packet = target.lanes(found.read.dtype.bytes)
        made = _copied(compute, found, program, packet, taken)
        if made is None:
            continue
        given = found.read.source in program.inputs
        channels = fixed(found.read.source.shape[_channel(compute, found.read, program) or 0])
        if not given and channels % packet == 0:
            continue  # as its producer stores it
        plain = _alone((compute,), program, None if given else _channels_last(compute, found.read, program))
        constants = {**program.constants, made.weight: made.array}
        copied = _alone((made.copy, made.compute), replace(program, constants=constants), None)
        if predict(replace(copied, staged=(made.copy.output,))) < _GAIN * predict(plain):
            return made
    return None


def is_narrow(compute: Reduce) -> bool:
    """A sum of products that tensor cores may take."""
    if compute.monoid.operator != "add" or len(compute.elements) != 1:
        return False
    parts = factors(compute.elements[0], compute.axes, compute.reduce_axes)
    narrow = [any(dtypes.is_multiplied_narrow(n.dtype) for n in loads(f.value)) for f in parts]
    return len(parts) == 2 and all(narrow)


def _alone(computes: Sequence[Map | Reduce], program: Program, layout: tuple[Tensor, Layout] | None) -> Program:
    """A Program of nothing else, with the constants of all."""
    made = {t for c in computes for t in c.outputs}
    read = dict.fromkeys(n.source for c in computes for n in loads(*_expressions(c)))
    inputs = tuple(t for t in read if t not in made and t not in program.constants)
    return Program(inputs, computes[-1].outputs, tuple(computes), program.constants, {} if layout is None else
                   {layout[0]: layout[1]})  # fmt: skip


def _expressions(compute: Map | Reduce) -> tuple[Expr, ...]:
    return (compute.value,) if isinstance(compute, Map) else compute.elements


def _channels_last(compute: Reduce, read: Load, program: Program) -> tuple[Tensor, Layout] | None:
    channel = _channel(compute, read, program)
    if channel is None:
        return None
    order = (*(d for d in range(read.source.rank) if d != channel), channel)
    return read.source, Layout.permuted(order)


def _channel(compute: Reduce, read: Load, program: Program) -> int | None:
    """The dimension of channels: summed over by itself, as the weights are."""
    others = [n for n in loads(*compute.elements) if n is not read]
    weighed = {a for n in others if n.source in program.constants for a in axes_of(*n.indices)}
    for place, index in enumerate(read.indices[:-1]):
        if isinstance(index, Var) and index.axis in compute.reduce_axes and index.axis in weighed:
            rest = (*read.indices[:place], *read.indices[place + 1 :])
            if index.axis not in axes_of(*rest):
                return place
    return None


def _row(compute: Reduce, read: Load) -> _Row | None:
    index = simplify(read.indices[-1])
    form = linear(index)
    if not all(isinstance(t, Var) for t in form.terms):
        return None
    terms = {t.axis: c for t, c in form.terms.items() if isinstance(t, Var)}
    taps = [a for a, c in terms.items() if a in compute.reduce_axes]
    if any(c < 1 for c in terms.values()) or any(a in axes_of(*read.indices[:-1]) for a in taps):
        return None
    low, high = (int(b) for b in bounds(index))
    if len(terms) == 1 and not taps:  # of a stride without a window nothing between is wanted
        ((axis, step),) = terms.items()
        return _Row(None, (1,), step, var(axis), low, (high - low) // step + 1)
    tap = taps[0] if len(taps) == 1 and terms[taps[0]] == 1 else None
    start = simplify(index - low - (0 if tap is None else var(tap)))
    steps = tuple(c for a, c in terms.items() if a is not tap and a.extent != 1)
    return _Row(tap, steps, 1, start, low, high - low + 1)


def _copied(compute: Reduce, found: GuardedRead, program: Program, packet: int, taken: set[str]) -> _Copied | None:
    read = found.read
    channel, row = _channel(compute, read, program), _row(compute, read)
    weights = [n for n in loads(*compute.elements) if n is not read]
    if channel is None or row is None or len(weights) != 1 or weights[0].source not in program.constants:
        return None
    (weight,) = weights
    places = [i.axis if isinstance(i, Var) else None for i in weight.indices]
    own = read.indices[channel]
    assert isinstance(own, Var)
    summed = [own.axis] if row.tap is None else [row.tap, own.axis]
    if any(places.count(a) != 1 for a in summed) or any(axes_of(i) and not isinstance(i, Var) for i in weight.indices):
        return None
    count = fixed(read.source.shape[channel])
    if fixed(own.axis.extent) != count:
        return None
    taps = 1 if row.tap is None else fixed(row.tap.extent)
    filled = next(n for n in range(count, count + packet) if all(s * n % packet == 0 for s in row.steps))
    run = Axis("run", -(-taps * filled // packet) * packet)
    copy = _copy(compute, found, channel, row, filled, run, packet, taken)
    if copy is None:
        return None
    kept = [d for d, a in enumerate(places) if a not in summed]
    array = program.constants[weight.source].transpose([*kept, *(places.index(a) for a in summed)])
    array = array.reshape(*array.shape[: len(kept)], taps, count)
    array = np.pad(array, [*[(0, 0)] * (len(kept) + 1), (0, filled - count)]).reshape(*array.shape[: len(kept)], -1)
    array = np.pad(array, [*[(0, 0)] * len(kept), (0, fixed(run.extent) - taps * filled)])
    packed = Tensor(_unused(f"{weight.source.name}_run", taken), array.shape, weight.source.dtype)
    dimensions = [dimension_of(d, found, compute) for d in range(read.source.rank)]
    places_in_copy = [d.index for n, d in enumerate(dimensions[:-1]) if n != channel]
    moved = load(copy.output, [*places_in_copy, simplify(row.start * filled + var(run))])
    kept_value = found.node if found.node is read else found.node.args[1]
    element = replace_nodes(compute.elements[0], {
        found.node: replace_nodes(kept_value, {read: moved}),
        weight: load(packed, [*(weight.indices[d] for d in kept), var(run)]),
    })  # fmt: skip
    if any(a in axes_of(element) for a in summed):
        return None  # other conditions know them
    reduced = (*(a for a in compute.reduce_axes if a not in summed), run)
    return _Copied(copy, replace(compute, reduce_axes=reduced, elements=(element,)), packed,
                   np.ascontiguousarray(array))  # fmt: skip


def _copy(
    compute: Reduce, found: GuardedRead, channel: int, row: _Row, filled: int, run: Axis, packet: int, taken: set[str]
) -> Map | None:
    """Rows of runs; zeros where there is no channel, and no element of the source."""
    source = found.read.source
    dimensions = [dimension_of(d, found, compute) for d in range(source.rank)]
    last = row.length - (0 if row.tap is None else fixed(row.tap.extent) - 1)  # of the runs that begin in a row
    length = max(row.length * filled, (last - 1) * filled + fixed(run.extent))
    along = Axis("m", -(-length // packet) * packet)
    place = simplify(var(along) // filled * row.scale + row.low)
    own = simplify(var(along) % filled)
    there = [replace(d, place=own) if n == channel else d for n, d in enumerate(dimensions[:-1])]
    there.append(replace(dimensions[-1], place=place))
    conditions = [moved_condition(c, found.read, there) for c in found.conditions]
    known = [c for c in conditions if c is not None]
    if len(known) < len(conditions):
        return None
    for dimension, extent in zip(there, source.shape, strict=True):
        known += [le(0, dimension.place), lt(dimension.place, static(extent) or 0)]
    value: Expr = load(source, [d.place for d in there])
    guard = simplify(all_of([simplify(c) for c in known]))
    value = simplify(select(guard, value, const(0, source.dtype)))
    axes = (*(d.axis for n, d in enumerate(dimensions[:-1]) if n != channel), along)
    output = Tensor(_unused(f"{source.name}_runs", taken), tuple(a.extent for a in axes), source.dtype)
    return Map(output, axes, value, compute.origin)


def _unused(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name
