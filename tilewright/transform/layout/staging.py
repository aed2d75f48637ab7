"""Copies an operand of a contraction into a tensor of its own where its order or its padding would slow the sum down;
what pooling windows read likewise, where many of them hang over an end of a row.

The copy holds the padding as what changes no result (zeros in a sum), so that no conditions are left, and its layout
is free: the layout stage puts the summed axis innermost, the planner may pack it into panels like a constant. Done only
where the copy is predicted to cost less than what it saves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from tilewright.ir.analysis.simplify import linear, simplify
from tilewright.ir.forms.bounds import fixed, static
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, reads
from tilewright.ir.forms.expr import (
    Axis,
    Const,
    Expr,
    Var,
    all_of,
    axes_of,
    cast,
    const,
    load,
    loads,
    replace_nodes,
    select,
    substitute,
    var,
)
from tilewright.ir.forms.spilled import spilled
from tilewright.ir.forms.tensor import Layout, Tensor
from tilewright.ir.meaning.folding import without_dead
from tilewright.target import Target
from tilewright.transform.layout.channel_runs import runs_of_channels
from tilewright.transform.layout.choose import owned_axis
from tilewright.transform.layout.guarded_reads import dimension_of, guarded_reads, moved_condition
from tilewright.transform.layout.packed_groups import pack_groups
from tilewright.transform.layout.staging_cost import FEW_CHANNELS, GuardedRead, copy_pays, ends
from tilewright.transform.layout.whole_rows import whole_rows

_ORDER_GAIN = 0.85  # predictions for vectors along different axes are less alike than their errors

Predict = Callable[[Program], float]


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
    """Copies in front of the contractions that gain by them; where kernels copy tiles anyway, of what they would not
    find in packets.

    `predict` tells the time of a Program: it decides the order of copies of inputs for results that leave the model.
    `always`, for tests: of every operand that can be copied, whatever it costs.
    """
    if target.copies_tiles:
        if predict is None:
            return program
        runs = runs_of_channels(pack_groups(program, predict), target, predict)
        return whole_rows(runs, target, predict)
    taken = {t.name for t in program.tensors()}
    staged: list[Tensor] = []
    constants, layouts = dict(program.constants), dict(program.layouts)
    computes: list[Compute] = []
    results: dict[Reduce, Map] = {}
    for compute in program.computes:
        if isinstance(compute, Reduce):
            for found in guarded_reads(compute, program):
                made = _copy(compute, found, taken)
                if made is None:
                    continue
                plain = _Way(compute, None, constants, layouts)
                pays = always or copy_pays(compute, found, made[0].axes, program, target)
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


def _copy(compute: Reduce, found: GuardedRead, taken: set[str]) -> tuple[Map, Reduce] | None:
    """The copy and the contraction that reads it; None where it cannot be written."""
    dimensions = [dimension_of(d, found, compute) for d in range(found.read.source.rank)]
    conditions = [moved_condition(c, found.read, dimensions) for c in found.conditions]
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


# --- the order of a copy


def _may_keep_order(copy: Map, compute: Reduce, program: Program) -> bool:
    """Whether the copy could stay in the order of an input for a result in that order: neighbours along the last axis
    of the result then read neighbours, and vectors along it need no transposing on either side."""
    if len(loads(*compute.elements)) < 2 or compute.outputs[0] not in program.outputs:
        return False
    if not all(n.source in program.inputs for n in loads(copy.value)):
        return False
    (read,) = (n for n in loads(*compute.elements) if n.source is copy.output)
    along = var(compute.axes[-1])
    plain = [i for i in read.indices[:-1] if compute.axes[-1] in i.axes]
    return not plain and linear(simplify(read.indices[-1])).terms.get(along) == 1


def _chosen(
    copy: Map, reader: Reduce, plain: _Way, found: GuardedRead, program: Program, lanes: int, predict: Predict | None,
    pays: bool,
) -> _Way:  # fmt: skip
    """The copy transposed for sums over channels, where it `pays` by the rule; the copy as the input lies, or no copy
    at all, where that is predicted to be much faster. Where it does not pay by the rule, a prediction may still say
    so."""
    constants, layouts = dict(plain.constants), dict(plain.layouts)
    transposed = _Way(_merged_window(reader, copy.output, constants, layouts), copy, constants, layouts)
    usual = transposed if pays else plain
    if predict is None:
        return usual
    if not _may_keep_order(copy, reader, program):
        both = _transposed_result(transposed, program)
        if both is None:
            return usual
        return both if predict(both.alone()) < _ORDER_GAIN * predict(usual.alone()) else usual
    order = {**plain.layouts, copy.output: Layout.natural(copy.output.rank)}
    kept = _Way(reader, copy, plain.constants, order)
    others: tuple[_Way, ...] = ()
    if pays:
        # a single window over an end knows what it may read, and takes the time of a vector: rows must have many of
        # them; lanes of several windows ask each for itself, which is not predicted
        before, after, count = ends(plain.compute, found)
        alone = max(before, after) <= 1 and (not count or count >= lanes * lanes)
        others = (kept, plain) if alone else (kept,)
    elif found.conditions and found.read.dtype.bytes > 1:
        others = (kept, transposed)
    both = _transposed_result(transposed, program)
    others = others if both is None else (*others, both)
    best, seconds = usual, predict(usual.alone()) if others else 0.0
    for way in others:
        promised = predict(way.alone())
        gain = 1.0 if best is kept and way is plain else _ORDER_GAIN  # both along rows: their errors are alike
        if promised < gain * seconds or (way is kept and promised == seconds):  # nothing was transposed
            best, seconds = way, promised
    return best


def _transposed_result(transposed: _Way, program: Program) -> _Way | None:
    """The sum of a transposed copy with its result transposed as well, and brought into the order of the model's output
    at the end: vectors along channels are full however short the rows of an image are."""
    (output,) = transposed.compute.outputs
    if transposed.copy is None or output not in program.outputs or output.rank < 2 or output in program.layouts:
        return None
    if not all(n.source in program.inputs for n in loads(transposed.copy.value)):
        return None
    owned = owned_axis(transposed.compute, replace(program, constants=transposed.constants))
    if owned is None or owned == output.rank - 1 or any(static(e) is None for e in output.shape):
        return None
    inner = Tensor(f"{output.name}_turned", output.shape, output.dtype)
    axes = tuple(Axis(f"t{d}", e) for d, e in enumerate(output.shape))
    result = Map(output, axes, load(inner, [var(a) for a in axes]), transposed.compute.origin)
    order = Layout.permuted((*(d for d in range(output.rank) if d != owned), owned))
    layouts = {**transposed.layouts, inner: order}
    read = next(n for n in loads(*transposed.compute.elements) if n.source is transposed.copy.output)
    along = [d for d, i in enumerate(read.indices) if i is var(transposed.compute.axes[owned])]
    if along and transposed.copy.output not in layouts:  # nothing is shared: panels would be copied for nothing
        rank = read.source.rank
        layouts[read.source] = Layout.permuted((*(d for d in range(rank) if d != along[0]), along[0]))
    compute = replace(transposed.compute, outputs=(inner,))
    return replace(transposed, compute=compute, result=result, layouts=layouts)


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
    if len(users) != 2 or not 1 < count <= FEW_CHANNELS or window < 2:
        return compute
    merged = Axis("window", count * window)
    now = {tap: var(merged) // count, channel: var(merged) % count}
    kept = [d for d, a in enumerate(places) if a is not channel and a is not tap]
    array = constants[weight.source].transpose([*kept, places.index(tap), places.index(channel)])
    shape = (*array.shape[:-2], count * window)
    packed = Tensor(f"{weight.source.name}_{copy.name}", shape, weight.source.dtype)
    constants[packed] = spilled(np.ascontiguousarray(array).reshape(shape))
    inner = list(read.indices).index(var(channel))
    layouts[copy] = Layout.permuted((*(d for d in range(copy.rank) if d != inner), inner))
    element = replace_nodes(compute.elements[0], {
        read: load(copy, [simplify(substitute(i, now)) for i in read.indices]),
        weight: load(packed, [*(weight.indices[d] for d in kept), var(merged)]),
    })  # fmt: skip
    reduced = tuple(a for a in compute.reduce_axes if a is not channel and a is not tap)
    return replace(compute, reduce_axes=(*reduced, merged), elements=(element,))
