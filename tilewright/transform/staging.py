"""Copies an operand of a contraction into a tensor of its own where its order or its padding would slow the sum down;
what pooling windows read likewise, where many of them hang over an end of a row.

The copy holds the padding as what changes no result (zeros in a sum), so that no conditions are left, and its layout
is free: the layout stage puts the summed axis innermost, the planner may pack it into panels like a constant. Done only
where the copy is predicted to cost less than what it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod

import numpy as np

from tilewright.ir.bounds import bounds, fixed, static
from tilewright.ir.compute import Compute, Map, Program, Reduce, reads
from tilewright.ir.expr import (
    Axis,
    Const,
    Expr,
    Load,
    Var,
    all_of,
    axes_of,
    cast,
    const,
    flattened,
    is_op,
    le,
    load,
    loads,
    lt,
    replace_nodes,
    select,
    substitute,
    var,
    walk,
)
from tilewright.ir.folding import without_dead
from tilewright.ir.simplify import Linear, linear, simplify
from tilewright.ir.tensor import Layout, Tensor
from tilewright.target import Target
from tilewright.transform.layout import is_depthwise, outputs_of_a_read, owned_axis, runs_along_rows

_PIPES = 2  # vector multiply-adds a cycle
_COPY_CYCLES = 1.0  # an element of a copy that turns, a square of registers at a time
_RUN_CYCLES = 0.6  # an element of a run that keeps its order
_BLOCK = 8  # positions of a row that one register tile takes
_SLOW = 8.0  # a block that must check every position, against one that checks nothing
_CHECKED = 6.0  # an element of a pooling window that must be checked by itself
_BROADCAST = 1.15  # scalars of a window fetched one by one, where a lane of a vector could be multiplied
_WELL_FILLED = 0.96  # of vectors along positions
_BROADCAST_CHECKED = 1.3  # the same with checks between them
_STRIDED = 1.4  # every step of the sum on another cache line, more of them than stay near; up to 2.5 on far rows
_PAGE = 4096
_NEAR_PAGES = 64  # whose addresses are translated at once
_FEW_CHANNELS = 7
_KERNELS = 3.0  # costs of a kernel that all workers share, for the copy
_LEAST_GAIN = 0.95
_ORDER_GAIN = 0.85  # predictions for vectors along different axes are less alike than their errors

Predict = Callable[[Program], float]


@dataclass(frozen=True)
class _Read:
    """One guarded read of a contraction: `node` in the element, the read inside it, and the conditions around it."""

    node: Expr
    read: Load
    conditions: tuple[Expr, ...]


@dataclass(frozen=True)
class _Dimension:
    """One axis of the copy: where the copy reads, and where the contraction then reads the copy."""

    axis: Axis
    place: Expr
    index: Expr


@dataclass(frozen=True)
class _Way:
    """A sum as it may be computed: from a copy or without one, in the order of the result or in one of its own."""

    compute: Reduce
    copy: Map | None
    constants: dict[Tensor, np.ndarray]
    layouts: dict[Tensor, Layout]
    result: Map | None = None  # that brings what the sum stores into the order of the result

    def alone(self) -> Program:
        """A Program of nothing else. It keeps the constants of all others: that they are read in between decides where
        its own come from."""
        computes = self.computes
        made = {t for c in computes for t in c.outputs}
        read = dict.fromkeys(t for c in computes for t in reads(c))
        inputs = tuple(t for t in read if t not in made and t not in self.constants)
        layouts = {t: layout for t, layout in self.layouts.items() if t in made}
        copies = () if self.copy is None else (self.copy.output,)
        return Program(inputs, computes[-1].outputs, computes, self.constants, layouts, staged=copies)

    @property
    def computes(self) -> tuple[Map | Reduce, ...]:
        return tuple(c for c in (self.copy, self.compute, self.result) if c is not None)


def stage_operands(program: Program, target: Target, predict: Predict | None = None, always: bool = False) -> Program:
    """Copies in front of the contractions that gain by them; none on a GPU, which stages in shared memory anyway.

    `predict` tells the time of a Program: it decides the order of copies of inputs for results that leave the model.
    `always`, for tests: of every operand that can be copied, whatever it costs.
    """
    if target.kind != "cpu":
        return program
    taken = {t.name for t in program.tensors()}
    staged: list[Tensor] = []
    constants, layouts = dict(program.constants), dict(program.layouts)
    computes: list[Compute] = []
    results: dict[Reduce, Map] = {}
    for compute in program.computes:
        if isinstance(compute, Reduce):
            for found in _candidates(compute, program):
                made = _copy(compute, found, taken)
                if made is None:
                    continue
                plain = _Way(compute, None, constants, layouts)
                pays = always or _pays(compute, found, made[0].axes, program, target)
                lanes = target.lanes(found.read.dtype.bytes)
                way = _chosen(*made, plain, found, program, lanes, predict, pays)
                compute, constants, layouts = way.compute, way.constants, way.layouts
                if way.copy is not None:
                    taken.add(way.copy.output.name)
                    computes.append(way.copy)
                    staged.append(way.copy.output)
                if way.result is not None:
                    results[compute] = way.result
        computes.append(compute)
        if isinstance(compute, Reduce) and compute in results:
            computes.append(results[compute])
    staging = replace(program, computes=tuple(computes), constants=constants, layouts=layouts)
    return without_dead(replace(staging, staged=(*program.staged, *staged)))


def _candidates(compute: Reduce, program: Program) -> list[_Read]:
    """Reads of activations in a sum of products or a pooling window, each with the conditions that guard it."""
    operands = loads(*compute.elements)
    if compute.monoid.operator is None or len(compute.elements) != 1 or len(operands) > 2:
        return []
    if len(operands) == 2 and compute.monoid.operator != "add":
        return []
    if not compute.axes or not compute.reduce_axes:  # a sum of everything reads nothing twice
        return []
    if any(static(a.extent) is None for a in (*compute.axes, *compute.reduce_axes)):
        return []
    found = []
    for read in operands:
        if read.source in program.constants or loads(*read.indices):
            continue
        guarded: Expr = read
        conditions: tuple[Expr, ...] = ()
        for node in walk(*compute.elements):
            if not is_op(node, "select") or not _is_neutral(node.args[2], compute):
                continue
            # the neutral element of a sum is zero in any type, others may not exist in a narrower one
            if (_unwidened(node.args[1]) if compute.monoid.operator == "add" else node.args[1]) is read:
                guarded, conditions = node, tuple(flattened(node.args[0], "and"))
        found.append(_Read(guarded, read, conditions))
    return found


def _is_neutral(node: Expr, compute: Reduce) -> bool:
    identity = compute.monoid.identity[0]
    return isinstance(node, Const) and isinstance(identity, Const) and node.value == identity.value


def _unwidened(node: Expr) -> Expr:
    """What is widened on the way into a sum of integers."""
    return node.args[0] if is_op(node, "cast") and node.args[0].dtype.bytes < node.dtype.bytes else node


def _copy(compute: Reduce, found: _Read, taken: set[str]) -> tuple[Map, Reduce] | None:
    """The copy and the contraction that reads it; None where it cannot be written."""
    dimensions = [_dimension(d, found, compute) for d in range(found.read.source.rank)]
    conditions = [_moved(c, found.read, dimensions) for c in found.conditions]
    known = [c for c in conditions if c is not None]
    if len(known) < len(conditions):
        return None
    source = found.read.source
    value: Expr = load(source, [d.place for d in dimensions])
    guard = simplify(all_of(known))
    if not (isinstance(guard, Const) and guard.value):
        identity = compute.monoid.identity[0]
        assert isinstance(identity, Const)
        value = select(guard, value, const(identity.value, source.dtype))
    name = f"{source.name}_staged"
    while name in taken:
        name += "_"
    output = Tensor(name, tuple(d.axis.extent for d in dimensions), source.dtype)
    copy = Map(output, tuple(d.axis for d in dimensions), value, compute.origin)
    moved = {found.node: cast(load(output, [d.index for d in dimensions]), found.node.dtype)}
    return copy, replace(compute, elements=(replace_nodes(compute.elements[0], moved),))


def _dimension(number: int, found: _Read, compute: Reduce) -> _Dimension:
    index = simplify(found.read.indices[number])
    extent = int(static(found.read.source.shape[number]) or 0)
    form = linear(index)
    name = f"s{number}"
    if not all(isinstance(t, Var) for t in form.terms) or not form.terms:
        axis = Axis(name, extent)
        return _Dimension(axis, var(axis), index)
    low, high = (int(b) for b in bounds(index))
    if len(form.terms) == 1:
        (term,) = form.terms
        (coefficient,) = form.terms.values()
        assert isinstance(term, Var)
        if coefficient > 1 and term.axis in compute.axes:  # only every so manyth element is wanted
            axis = Axis(name, term.axis.extent)
            return _Dimension(axis, simplify(var(axis) * coefficient + form.constant), term)
    axis = Axis(name, high - low + 1)
    return _Dimension(axis, simplify(var(axis) + low), simplify(index - low))


def _moved(condition: Expr, read: Load, dimensions: Sequence[_Dimension]) -> Expr | None:
    """A condition on an index of the read as one on the place that the copy reads; None when it is something else."""
    if not (is_op(condition, "le") or is_op(condition, "lt")):
        return None
    build = le if is_op(condition, "le") else lt
    gap = linear(simplify(condition.args[1])).plus(linear(simplify(condition.args[0])).scaled(-1))
    for index, dimension in zip(read.indices, dimensions, strict=True):
        form = linear(simplify(index))
        if not form.terms:
            continue
        if gap.terms == form.terms:
            return build(0, dimension.place + (gap.constant - form.constant))
        if gap.terms == form.scaled(-1).terms:
            return build(dimension.place, gap.constant + form.constant)
    return None


# --- the order of a copy


def _may_keep_order(copy: Map, compute: Reduce, program: Program) -> bool:
    """Whether the copy could stay in the order of an input for a result in that order: neighbours along the last axis
    of the result then read neighbours, and vectors along it need no turning on either side."""
    if len(loads(*compute.elements)) < 2 or compute.outputs[0] not in program.outputs:
        return False
    if not all(n.source in program.inputs for n in loads(copy.value)):
        return False
    (read,) = (n for n in loads(*compute.elements) if n.source is copy.output)
    along = var(compute.axes[-1])
    plain = [i for i in read.indices[:-1] if compute.axes[-1] in i.axes]
    return not plain and linear(simplify(read.indices[-1])).terms.get(along) == 1


def _chosen(
    copy: Map, reader: Reduce, plain: _Way, found: _Read, program: Program, lanes: int, predict: Predict | None,
    pays: bool,
) -> _Way:  # fmt: skip
    """The copy turned for sums over channels, where it `pays` by the rule; the copy as the input lies, or no copy at
    all, where that is predicted to be much faster. Where it does not pay by the rule, a prediction may still say so."""
    constants, layouts = dict(plain.constants), dict(plain.layouts)
    turned = _Way(_merged_window(reader, copy.output, constants, layouts), copy, constants, layouts)
    usual = turned if pays else plain
    if predict is None:
        return usual
    if not _may_keep_order(copy, reader, program):
        both = _turned_result(turned, program)
        if both is None:
            return usual
        return both if predict(both.alone()) < _ORDER_GAIN * predict(usual.alone()) else usual
    order = {**plain.layouts, copy.output: Layout.natural(copy.output.rank)}
    kept = _Way(reader, copy, plain.constants, order)
    others: tuple[_Way, ...] = ()
    if pays:
        # a single window over an end knows what it may read, and takes the time of a vector: rows must have many of
        # them; lanes of several windows ask each for itself, which is not predicted
        before, after, count = _ends(plain.compute, found)
        alone = max(before, after) <= 1 and (not count or count >= lanes * lanes)
        others = (kept, plain) if alone else (kept,)
    elif found.conditions and found.read.dtype.bytes > 1:
        others = (kept, turned)
    both = _turned_result(turned, program)
    others = others if both is None else (*others, both)
    best, seconds = usual, predict(usual.alone()) if others else 0.0
    for way in others:
        promised = predict(way.alone())
        gain = 1.0 if best is kept and way is plain else _ORDER_GAIN  # both along rows: their errors are alike
        if promised < gain * seconds or (way is kept and promised == seconds):  # nothing was turned
            best, seconds = way, promised
    return best


def _turned_result(turned: _Way, program: Program) -> _Way | None:
    """The sum of a turned copy with its result turned as well, and brought into the order of the model's output at the
    end: vectors along channels are full however short the rows of an image are."""
    (output,) = turned.compute.outputs
    if turned.copy is None or output not in program.outputs or output.rank < 2 or output in program.layouts:
        return None
    if not all(n.source in program.inputs for n in loads(turned.copy.value)):
        return None
    owned = owned_axis(turned.compute, replace(program, constants=turned.constants))
    if owned is None or owned == output.rank - 1 or any(static(e) is None for e in output.shape):
        return None
    inner = Tensor(f"{output.name}_turned", output.shape, output.dtype)
    axes = tuple(Axis(f"t{d}", e) for d, e in enumerate(output.shape))
    result = Map(output, axes, load(inner, [var(a) for a in axes]), turned.compute.origin)
    order = Layout.permuted((*(d for d in range(output.rank) if d != owned), owned))
    layouts = {**turned.layouts, inner: order}
    read = next(n for n in loads(*turned.compute.elements) if n.source is turned.copy.output)
    along = [d for d, i in enumerate(read.indices) if i is var(turned.compute.axes[owned])]
    if along and turned.copy.output not in layouts:  # nothing is shared: panels would be copied for nothing
        rank = read.source.rank
        layouts[read.source] = Layout.permuted((*(d for d in range(rank) if d != along[0]), along[0]))
    compute = replace(turned.compute, outputs=(inner,))
    return replace(turned, compute=compute, result=result, layouts=layouts)


# --- short sums


def _merged_window(
    compute: Reduce, copy: Tensor, constants: dict[Tensor, np.ndarray], layouts: dict[Tensor, Layout]
) -> Reduce:
    """Few channels and a window along the rows summed as one axis: channels innermost, it is one run of the copy."""
    if len(loads(*compute.elements)) < 2:
        return compute
    read, weight = sorted(loads(*compute.elements), key=lambda n: n.source is not copy)
    if weight.source not in constants or not all(isinstance(i, Var) for i in weight.indices):
        return compute
    places = [i.axis if isinstance(i, Var) else None for i in weight.indices]
    channel = next((i.axis for i in read.indices[:-1] if isinstance(i, Var) and i.axis in compute.reduce_axes), None)
    row = linear(read.indices[-1])
    taps = [t.axis for t, c in row.terms.items() if isinstance(t, Var) and c == 1 and t.axis in compute.reduce_axes]
    if channel is None or len(taps) != 1 or not {channel, taps[0]} <= set(places):
        return compute
    tap = taps[0]
    count, window = fixed(channel.extent), fixed(tap.extent)
    users = [i for i in read.indices if channel in axes_of(i) or tap in axes_of(i)]
    if len(users) != 2 or not 1 < count <= _FEW_CHANNELS or window < 2:
        return compute
    merged = Axis("window", count * window)
    now = {tap: var(merged) // count, channel: var(merged) % count}
    kept = [d for d, a in enumerate(places) if a is not channel and a is not tap]
    array = constants[weight.source].transpose([*kept, places.index(tap), places.index(channel)])
    shape = (*array.shape[:-2], count * window)
    packed = Tensor(f"{weight.source.name}_{copy.name}", shape, weight.source.dtype)
    constants[packed] = np.ascontiguousarray(array).reshape(shape)
    inner = list(read.indices).index(var(channel))
    layouts[copy] = Layout.permuted((*(d for d in range(copy.rank) if d != inner), inner))
    element = replace_nodes(compute.elements[0], {
        read: load(copy, [simplify(substitute(i, now)) for i in read.indices]),
        weight: load(packed, [*(weight.indices[d] for d in kept), var(merged)]),
    })  # fmt: skip
    reduced = tuple(a for a in compute.reduce_axes if a is not channel and a is not tap)
    return replace(compute, reduce_axes=(*reduced, merged), elements=(element,))


# --- what it costs and what it saves


def _pays(compute: Reduce, found: _Read, axes: Sequence[Axis], program: Program, target: Target) -> bool:
    """Cycles with the copy against cycles without, on one core."""
    if found.read.dtype.bytes == 1:
        return _few_bytes(compute, found.read, program)
    steps = prod(fixed(a.extent) for a in (*compute.axes, *compute.reduce_axes))
    lanes = target.lanes(found.read.dtype.bytes)
    ideal = steps / (lanes * _PIPES)
    kernel = _KERNELS * target.kernel_cost * target.fma_rate / (lanes * _PIPES)
    if len(loads(*compute.elements)) == 1:
        copying = prod(fixed(a.extent) for a in axes) * _RUN_CYCLES
        share = _hanging_over(compute, found) if found.read.source in program.inputs else 0.0
        return copying + kernel < _LEAST_GAIN * share * steps * _CHECKED
    if not any(n.source in program.constants for n in loads(*compute.elements)):
        if found.conditions or _follows_a_reduction(compute, found.read, program):
            return False
        return _is_strided(compute, found.read, target) and _panel_pays(found, ideal, kernel)
    # depthwise on an activation of ours: channels are innermost, and all lanes check alike
    by_channel = found.read.source not in program.inputs and is_depthwise(compute, program)
    along_rows = not by_channel and runs_along_rows(compute, found.read, outputs_of_a_read(compute, program), target)
    moves = not along_rows and _changes_order(compute, found.read, program)
    copied = prod(fixed(a.extent) for a in axes)
    copying = copied * (_COPY_CYCLES if moves else _RUN_CYCLES)
    inside, slow = _borders(compute, found)
    now = ideal * inside * (1.0 + (_SLOW - 1.0) * slow)
    if along_rows and found.conditions:  # every lane checks for itself
        now = ideal * _SLOW
    elif moves:
        uneven = target.lane_multiply and _ends_unevenly(found.read, compute, lanes)
        one_by_one = uneven or _overlaps(compute, found.read)
        now *= _BROADCAST_CHECKED if found.conditions else _BROADCAST if one_by_one else 1.0
        now *= _conflicts(compute, found.read, target)
    return ideal + copying + kernel < _LEAST_GAIN * now


def _hanging_over(compute: Reduce, found: _Read) -> float:
    """Of the windows along a row those that hang over an end of it: vectors along the row check every element there."""
    before, after, count = _ends(compute, found)
    return (before + after) / max(1, count)


def _ends(compute: Reduce, found: _Read) -> tuple[int, int, int]:
    """How many windows hang over the beginning of a row, over its end, and how many there are."""
    form = linear(simplify(found.read.indices[-1]))
    outputs = [(c, t.axis) for t, c in form.terms.items() if isinstance(t, Var) and t.axis in compute.axes]
    taps = [(c, t.axis) for t, c in form.terms.items() if isinstance(t, Var) and t.axis in compute.reduce_axes]
    if len(outputs) != 1 or len(taps) > 1 or not _is_guarded(form, found):
        return 0, 0, 0
    (step, output), size = outputs[0], int(static(found.read.source.shape[-1]) or 0)
    reach = sum(c * (fixed(a.extent) - 1) for c, a in taps)
    starts = [step * o + form.constant for o in range(fixed(output.extent))]
    return sum(s < 0 for s in starts), sum(s >= 0 and s + reach >= size for s in starts), len(starts)


def _few_bytes(compute: Reduce, read: Load, program: Program) -> bool:
    """Whether the sums of a dot product would be mostly empty, and fuller along a window and its few channels.

    Instructions that sum bytes copy their rows anyway, padding as zeros, so that nothing else speaks for a copy.
    """
    weights = [n for n in loads(*compute.elements) if n is not read]
    if len(weights) != 1 or weights[0].source not in program.constants:
        return False
    own = [i.axis for i in read.indices[:-1] if isinstance(i, Var) and i.axis in compute.reduce_axes]
    shared = {a for a in axes_of(*weights[0].indices) if a in compute.reduce_axes}
    return len(own) == 1 and 1 < fixed(own[0].extent) <= _FEW_CHANNELS and set(compute.reduce_axes) <= shared


def _follows_a_reduction(compute: Reduce, read: Load, program: Program) -> bool:
    """Whether the other operand comes from a reduction: joined or streamed with it, the sum runs in blocks that stay
    near, and a copy would stand between them."""
    producers = program.producers()
    waiting = [n.source for n in loads(*compute.elements) if n is not read]
    seen: set[Tensor] = set()
    while waiting:
        made = producers.get(waiting.pop())
        if made is None or made.outputs[0] in seen:
            continue
        if not isinstance(made, Map):
            return True
        seen.add(made.output)
        waiting.extend(reads(made))
    return False


def _is_strided(compute: Reduce, read: Load, target: Target) -> bool:
    """Whether an operand that runs along the vector is read by rows so far apart that the nearest cache loses them."""
    last = read.indices[-1]
    if not isinstance(last, Var) or last.axis is not compute.axes[-1]:
        return False
    nearest = target.levels[1]
    far: list[int] = []
    for number, index in enumerate(read.indices[:-1]):
        if isinstance(index, Var) and index.axis in compute.reduce_axes:
            inner = prod(int(static(e) or 0) for e in read.source.shape[number + 1 :])
            far.append(inner * read.dtype.bytes)
        elif any(a in compute.reduce_axes for a in axes_of(index)):
            return False
    if len(far) != 1 or len(compute.reduce_axes) != 1 or far[0] < 2 * nearest.transaction:
        return False
    # rows a power of two apart share a few sets of the cache; its other half holds rows of the other operand
    usable = nearest.capacity // max(1, gcd(far[0], _PAGE) // nearest.transaction) // 4
    rows = fixed(compute.reduce_axes[0].extent)
    return rows * nearest.transaction > usable and rows * far[0] > nearest.capacity // 2


def _conflicts(compute: Reduce, read: Load, target: Target) -> float:
    """How much longer a sum over channels takes whose planes share few sets of the cache, or lie on too many pages."""
    nearest = target.levels[1]
    for number, index in enumerate(read.indices[:-1]):
        if isinstance(index, Var) and index.axis in compute.reduce_axes:
            pitch = prod(int(static(e) or 0) for e in read.source.shape[number + 1 :]) * read.dtype.bytes
            planes = fixed(index.axis.extent)
            usable = nearest.capacity // max(1, gcd(pitch, _PAGE) // nearest.transaction) // 2
            if planes * nearest.transaction > usable or planes * min(pitch, _PAGE) > _NEAR_PAGES * _PAGE:
                return _STRIDED
    return 1.0


def _ends_unevenly(read: Load, compute: Reduce, lanes: int) -> bool:
    """Whether vectors along an image's positions, all of them one run, would be far from full: lanes are then along the
    weights, and positions are fetched one by one."""
    positions = [i.axis for i in read.indices if isinstance(i, Var) and i.axis in compute.axes]
    count = prod(fixed(a.extent) for a in positions)
    return len(positions) > 1 and count < _WELL_FILLED * lanes * -(-count // lanes)


def _panel_pays(found: _Read, ideal: float, kernel: float) -> bool:
    copied = prod(int(static(e) or 0) for e in found.read.source.shape)
    return ideal + copied * _RUN_CYCLES + kernel < _LEAST_GAIN * _STRIDED * ideal


def _changes_order(compute: Reduce, read: Load, program: Program) -> bool:
    """Whether the summed axis that weights share is not innermost, and the tensor's order is not ours to choose."""
    if read.source not in program.inputs:
        return False
    last = linear(simplify(read.indices[-1]))
    own = [t for t in last.terms if isinstance(t, Var) and t.axis in compute.reduce_axes]
    return not (len(own) == 1 and len(last.terms) == 1)


def _overlaps(compute: Reduce, read: Load) -> bool:
    """Whether neighbouring windows read the same elements."""
    for index in read.indices:
        terms = [(t.axis, c) for t, c in linear(simplify(index)).terms.items() if isinstance(t, Var)]
        strides = [c for a, c in terms if a in compute.axes]
        reach = [c * (fixed(a.extent) - 1) for a, c in terms if a in compute.reduce_axes]
        if strides and reach and max(reach) >= min(strides):
            return True
    return False


def _borders(compute: Reduce, found: _Read) -> tuple[float, float]:
    """Of all steps those not skipped along outer axes, and of all blocks of a row those that check every position."""
    inside, slow = 1.0, 0.0
    guarded = [i for i in found.read.indices if _is_guarded(linear(simplify(i)), found)]
    for index in guarded:
        form = linear(simplify(index))
        size = int(static(found.read.source.shape[found.read.indices.index(index)]) or 0)
        outputs = [(c, t.axis) for t, c in form.terms.items() if isinstance(t, Var) and t.axis in compute.axes]
        taps = [(c, t.axis) for t, c in form.terms.items() if isinstance(t, Var) and t.axis in compute.reduce_axes]
        if len(outputs) != 1 or len(taps) != 1:
            continue
        (stride, output), (dilation, tap) = outputs[0], taps[0]
        count, window = fixed(output.extent), fixed(tap.extent)
        starts = [k * dilation + form.constant for k in range(window)]
        if index is guarded[-1]:
            checks = [_checked_blocks(start, stride, count, size) for start in starts]
            slow = sum(checks) / max(1, len(checks))
        else:
            within = sum(0 <= start + stride * o < size for start in starts for o in range(count))
            inside = inside * within / max(1, count * window)
    return inside, slow


def _is_guarded(form: Linear, found: _Read) -> bool:
    axes = {a for c in found.conditions for a in axes_of(c)}
    return any(isinstance(t, Var) and t.axis in axes for t in form.terms)


def _checked_blocks(start: int, stride: int, count: int, size: int) -> float:
    """Of the blocks of a row, under one tap, those that hang over an end by more than one position but not wholly."""
    blocks = -(-count // _BLOCK)
    checked = 0
    for block in range(blocks):
        places = [start + stride * o for o in range(block * _BLOCK, min(count, (block + 1) * _BLOCK))]
        outside = sum(not 0 <= p < size for p in places)
        checked += 1 < outside < len(places)
    return checked / max(1, blocks)
