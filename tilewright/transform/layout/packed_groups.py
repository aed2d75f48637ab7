"""Convolutions in groups as products of matrices: some groups side by side, with zeros where they do not meet.

    y[n, o, i, j] += x[n, 4 (o // 4) + c, i + r, j + s] w[o, c, r, s]          with 64 groups of 4 channels is
    z[n, i, j, b, p] += x[n, 16 b + k, i + r, j + s] packed[b, p, k, r, s]     over 16 blocks b of 16 outputs p

Results of a block read the same channels, so tensor cores take them as columns; in types that threads multiply a block
is a group, whose results share what they read. Maps behind the sum that read nothing else of it run on blocks as well.
Done where it is predicted to take less time than sums by threads as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from tilewright.ir.analysis.products import factors
from tilewright.ir.analysis.simplify import linear, simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, reads
from tilewright.ir.forms.expr import (
    Axis,
    Const,
    Expr,
    Load,
    Var,
    axes_of,
    is_op,
    load,
    loads,
    replace_nodes,
    substitute,
    var,
)
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.folding import without_dead
from tilewright.transform.precision.choose import contracted
from tilewright.transform.storage import names_of, unique_name

_GAIN = 0.9  # of the predicted time of the sum as it is
_SUMMED = (16, 32, 64)  # channels of a block at least: a step of tensor cores, and more for longer runs

Predict = Callable[[Program], float]


@dataclass(frozen=True)
class _Grouped:
    """A sum in groups: `outputs` and `channels` of a group along the axes `own` and `summed`."""

    compute: Reduce
    images: Load
    weights: Load
    own: Axis
    summed: Axis
    outputs: int
    channels: int
    place: int  # of the channels in the images' dimensions

    @property
    def groups(self) -> int:
        assert isinstance(self.own.extent, int)
        return self.own.extent // self.outputs


@dataclass(frozen=True)
class _Packed:
    """The sum of blocks, the weights it reads, and its axes by those of the sum as it was."""

    compute: Reduce
    weight: Tensor
    array: np.ndarray
    size: int  # outputs of a block
    axes: tuple[Axis, ...]  # of the results: all others as they were, then the blocks and the outputs of one
    at: dict[Axis, Expr]


def pack_groups(program: Program, predict: Predict) -> Program:
    taken = names_of(program)
    constants = dict(program.constants)
    replaced: dict[Compute, list[Compute]] = {}
    for compute in program.computes:
        found = _grouped(compute, program) if compute not in replaced else None
        packed = None if found is None else _best(found, program, taken, predict)
        if found is None or packed is None:
            continue
        constants[packed.weight] = packed.array
        _replace_chain(found, packed, program, taken, replaced)
    if not replaced:
        return program
    computes = tuple(new for c in program.computes for new in replaced.get(c, [c]))
    return without_dead(replace(program, computes=computes, constants=constants))


def _grouped(compute: Compute, program: Program) -> _Grouped | None:
    operands = contracted(compute)
    if operands is None or not isinstance(compute, Reduce) or len(compute.outputs) != 1:
        return None
    if len(factors(compute.elements[0], compute.axes, compute.reduce_axes)) != 2:
        return None
    for weights, images in (operands, operands[::-1]):
        own = weights.indices[0]
        if weights.source not in program.constants or not isinstance(own, Var) or own.axis not in compute.axes:
            continue
        places = [n for n, i in enumerate(images.indices) if own.axis in axes_of(i)]
        if len(places) != 1 or any(own.axis in axes_of(i) for i in weights.indices[1:]):
            continue
        found = _channels(images.indices[places[0]], own.axis, compute)
        if found is not None and weights.indices[1] is var(found[0]):
            return _Grouped(compute, images, weights, own.axis, *found, places[0])
    return None


def _channels(index: Expr, own: Axis, compute: Reduce) -> tuple[Axis, int, int] | None:
    """Of an index (own // outputs) channels + summed: the axis that is summed over, outputs and channels of a group."""
    form = linear(simplify(index))
    plain = [t for t in form.terms if isinstance(t, Var)]
    divided = [t for t in form.terms if is_op(t, "floordiv")]
    if form.constant or len(form.terms) != 2 or len(plain) != 1 or len(divided) != 1 or form.terms[plain[0]] != 1:
        return None
    summed, group = plain[0].axis, divided[0]
    size = group.args[1]
    if group.args[0] is not var(own) or not isinstance(size, Const) or summed not in compute.reduce_axes:
        return None
    outputs, channels = int(size.value), form.terms[group]
    is_whole = isinstance(own.extent, int) and own.extent % outputs == 0 and summed.extent == channels
    return (summed, outputs, channels) if is_whole else None


def _best(found: _Grouped, program: Program, taken: set[str], predict: Predict) -> _Packed | None:
    """With as many groups in a block as are predicted to be fastest; None where the sum is better as it is."""
    most = _GAIN * predict(_alone(found.compute, program.constants))
    best = None
    narrow = dtypes.is_multiplied_narrow(found.images.dtype) and dtypes.is_multiplied_narrow(found.weights.dtype)
    for together in sorted({_together(found, least) for least in _SUMMED}) if narrow else (1,):
        packed = _packed(found, together, program, taken)
        constants = {**program.constants, packed.weight: packed.array}
        seconds = predict(_alone(packed.compute, constants))
        if seconds < most:
            best, most = packed, seconds
    return best


def _together(found: _Grouped, least: int) -> int:
    """The fewest groups that have so many channels and outputs together, and divide all of them."""
    counts = [n for n in range(1, found.groups + 1) if found.groups % n == 0]
    return next((n for n in counts if n * min(found.channels, found.outputs) >= least), found.groups)


def _packed(found: _Grouped, together: int, program: Program, taken: set[str]) -> _Packed:
    outputs, channels = found.outputs * together, found.channels * together
    block, column, summed = Axis("block", found.groups // together), Axis("column", outputs), Axis("k", channels)
    whole = program.constants[found.weights.source]
    array = np.zeros((found.groups // together, outputs, channels, *whole.shape[2:]), whole.dtype)
    by_group = whole.reshape(-1, together, found.outputs, *whole.shape[1:])
    for n in range(together):
        rows, columns = (slice(n * size, (n + 1) * size) for size in (found.outputs, found.channels))
        array[:, rows, columns] = by_group[:, n]
    weight = Tensor(unique_name(f"{found.weights.source.name}_packed", set(taken)), array.shape,
                    found.weights.source.dtype)  # fmt: skip
    compute = found.compute
    indices = list(found.images.indices)
    indices[found.place] = var(block) * channels + var(summed)
    element = replace_nodes(compute.elements[0], {
        found.images: load(found.images.source, indices),
        found.weights: load(weight, [var(block), var(column), var(summed), *found.weights.indices[2:]]),
    })  # fmt: skip
    others = tuple(a for a in compute.axes if a is not found.own)
    axes = (*others, block, column)
    output = Tensor(unique_name(f"{compute.outputs[0].name}_blocks", set(taken)), tuple(a.extent for a in axes),
                    compute.outputs[0].dtype)  # fmt: skip
    reduced = tuple(summed if a is found.summed else a for a in compute.reduce_axes)
    made = replace(compute, outputs=(output,), axes=axes, reduce_axes=reduced, elements=(element,))
    at: dict[Axis, Expr] = {**{a: var(a) for a in others}, found.own: simplify(var(block) * outputs + var(column))}
    return _Packed(made, weight, array, outputs, axes, at)


def _replace_chain(
    found: _Grouped, packed: _Packed, program: Program, taken: set[str], replaced: dict[Compute, list[Compute]]
) -> None:
    """The sum and the maps behind it on blocks, each in its place, and what others read of the last."""
    taken.update((packed.weight.name, packed.compute.outputs[0].name))
    consumers = program.consumers()
    last: Map | Reduce = found.compute
    made: Compute = packed.compute
    replaced[last] = [made]
    while True:
        tensor, blocks = last.outputs[0], made.outputs[0]
        users = consumers.get(tensor, ())
        following = users[0] if len(users) == 1 and tensor not in program.outputs else None
        if not isinstance(following, Map) or following in replaced or not _reads_in_place(following, tensor):
            break
        at = {a: packed.at[b] for a, b in zip(following.axes, found.compute.axes, strict=True)}
        places = [var(a) for a in packed.axes]
        value = substitute(following.value, at)
        value = replace_nodes(value, {n: load(blocks, places) for n in loads(value) if n.source is tensor})
        name = unique_name(f"{following.output.name}_blocks", taken)
        output = Tensor(name, blocks.shape, following.output.dtype)
        last, made = following, Map(output, packed.axes, simplify(value), following.origin)
        replaced[last] = [made]
    axes = tuple(Axis(a.name, a.extent) for a in last.axes)
    own = found.compute.axes.index(found.own)
    others = [var(a) for n, a in enumerate(axes) if n != own]
    whole = var(axes[own])
    view = load(made.outputs[0], [*others, whole // packed.size, whole % packed.size])
    replaced[last] = [made, Map(last.outputs[0], axes, view, last.origin)]


def _reads_in_place(following: Map, tensor: Tensor) -> bool:
    """Whether a map reads a tensor at its own place alone; along an axis of one place there is no other."""
    if len(following.axes) != tensor.rank:
        return False
    found = [n for n in loads(following.value) if n.source is tensor]
    return all(i is var(a) or a.extent == 1 for n in found for i, a in zip(n.indices, following.axes, strict=True))


def _alone(compute: Reduce, constants: Mapping[Tensor, np.ndarray]) -> Program:
    read = dict.fromkeys(reads(compute))
    kept = {t: constants[t] for t in read if t in constants}
    return Program(tuple(t for t in read if t not in kept), compute.outputs, (compute,), kept)
