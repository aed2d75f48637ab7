"""Chooses the storage order of every intermediate tensor, so that producer and consumers vectorise along one axis.

A contraction with constants is fastest along the output axis its constants own (their panels are packed for it):
that axis goes innermost, and everything elementwise around it follows. Tensors read through merged axes (x // n,
x % n) are stored in the order that makes the merged axis one contiguous run.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

from tilewright.ir.analysis.simplify import join_divisions, linear, simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bounds import upper
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, Scan, expressions
from tilewright.ir.forms.expr import (
    Axis,
    Const,
    Expr,
    Load,
    Op,
    Var,
    axes_of,
    const,
    is_op,
    load,
    loads,
    rewrite,
    substitute,
    var,
    walk,
)
from tilewright.ir.forms.tensor import Layout, StorageAxis, Tensor
from tilewright.target import Target
from tilewright.transform.layout.runs import lone_elements, merge_reductions

_SIDE_BY_SIDE = 8  # rows of a register tile
_MOST_AXES = 5  # permutations of more axes are not searched


def choose_layouts(program: Program, target: Target) -> Program:
    program = split_constants(lone_elements(program))
    inner = _inner_axes(program, target)
    layouts = dict(program.layouts)
    fixed = {*program.inputs, *program.outputs, *program.constants, *_scan_tensors(program)}
    for compute in program.computes:
        for tensor in compute.outputs if isinstance(compute, Map | Reduce) else ():
            if tensor in fixed or tensor.rank < 2:
                continue
            axis = inner.get(tensor)
            if axis is not None and axis != tensor.rank - 1:
                order = [*(a for a in range(tensor.rank) if a != axis), axis]
                layouts[tensor] = Layout.permuted(tuple(order))
    layouts.update(_merged_reads(program, layouts, fixed))
    layouts.update(_rows_apart(program, layouts, fixed, target))
    program = replace(program, layouts=layouts)
    return merge_reductions(split_groups(program)) if not target.lanes_are_threads else program


def _scan_tensors(program: Program) -> set[Tensor]:
    """Tensors that cross a Scan's border keep their natural order: the step is their first axis."""
    found: set[Tensor] = set()
    for compute in program.computes:
        if isinstance(compute, Scan):
            found.update((*compute.initial, *compute.carry, *compute.outputs, *compute.following))
            found.update(t for t, _ in compute.stacked)
    return found


# --- the axis to vectorise


def _inner_axes(program: Program, target: Target) -> dict[Tensor, int]:
    """For each tensor the axis that should be contiguous, from contractions outwards, in both directions."""
    inner: dict[Tensor, int] = {}
    for compute in program.computes:
        if isinstance(compute, Reduce):
            inner.update(_along_the_sum(compute) if target.lanes_are_threads else {})
            axis = owned_axis(compute, program)
            if axis is not None and not _fills_rows_better(compute, program, target):
                inner[compute.outputs[0]] = axis
    for _ in range(2):
        for compute in program.computes:
            if isinstance(compute, Map | Reduce) and compute.outputs[0] not in inner:
                _follow(compute, inner)
        for compute in reversed(program.computes):
            if isinstance(compute, Map | Reduce) and compute.outputs[0] in inner:
                _lead(compute, inner, program)
    return inner


def _along_the_sum(compute: Reduce) -> dict[Tensor, int]:
    """Operands of 32 or 8 bits that a GPU's tensor cores multiply: they take lines along the sum alone."""
    found: dict[Tensor, int] = {}
    for node in loads(*compute.elements):
        if not dtypes.is_multiplied_narrow(node.dtype) or node.dtype.bits == 16:
            continue
        places = [(upper(t.axis.extent), n) for n, i in enumerate(node.indices) for t, c in linear(i).terms.items()
                  if c == 1 and isinstance(t, Var) and t.axis in compute.reduce_axes]  # fmt: skip
        if places:
            found[node.source] = max(places)[1]
    return found


def owned_axis(compute: Reduce, program: Program) -> int | None:
    """The output axis that indexes a constant operand of a contraction, the longest one; of blocks of weights that go
    with blocks of what they are multiplied by, one inside a block."""
    best: tuple[bool, int, int] | None = None
    if len(loads(*compute.elements)) < 2:
        return None
    for node in loads(*compute.elements):
        if node.source not in program.constants:
            continue
        others = {a for n in loads(*compute.elements) if n is not node for a in axes_of(*n.indices)}
        for index in node.indices:
            if isinstance(index, Var) and index.axis in compute.axes and isinstance(index.axis.extent, int):
                size, alone = index.axis.extent, index.axis not in others
                if size > 1 and (best is None or (alone, size) > best[:2]):
                    best = (alone, size, compute.axes.index(index.axis))
    return None if best is None else best[2]


def _fills_rows_better(compute: Reduce, program: Program, target: Target) -> bool:
    """Whether so few outputs share a read that vectors along its rows are fuller, where it comes row by row."""
    activations = [n for n in loads(*compute.elements) if n.source not in program.constants]
    if target.lanes_are_threads or len(activations) != 1:
        return False
    read = activations[0]
    kept = program.layouts.get(read.source)
    if kept is not None and kept.is_natural:  # a copy whose order was decided
        return True
    return (read.source in program.inputs or read.source in program.staged) and runs_along_rows(
        compute, read, outputs_of_a_read(compute, program), target
    )


def runs_along_rows(compute: Reduce, read: Load, outputs: float, target: Target) -> bool:
    """Whether a read of neighbours along an output axis is contiguous and longer than `outputs` that share a read."""
    lanes = target.lanes(read.dtype.bytes)
    along = [t.axis for t, c in linear(simplify(read.indices[-1])).terms.items() if isinstance(t, Var) and c == 1]
    rows = [upper(a.extent) for a in along if a in compute.axes]
    return outputs * 2 <= lanes and max(rows, default=0) >= lanes


def outputs_of_a_read(compute: Reduce, program: Program) -> float:
    """Outputs along the weights' own axis that share each read of an activation."""
    owned = owned_axis(compute, program)
    if owned is None:
        return 1.0
    if is_depthwise(compute, program):
        return 1.0
    return _group_size(compute, compute.axes[owned]) or upper(compute.axes[owned].extent)


def is_depthwise(compute: Reduce, program: Program) -> bool:
    """Whether every output along the weights' own axis reads a channel of its own."""
    owned = owned_axis(compute, program)
    return owned is not None and all(var(compute.axes[owned]) in n.indices for n in loads(*compute.elements))


def _follow(compute: Map | Reduce, inner: dict[Tensor, int]) -> None:
    """A result takes the contiguous axis of the largest tensor it reads, where that axis survives."""
    choices = []
    for node in loads(*expressions(compute)):
        if node.source in inner and node.source.rank:
            axes = axes_of(node.indices[inner[node.source]])  # one axis, though perhaps clamped or shifted
            if len(axes) == 1 and axes[0] in compute.axes:
                size = 1
                for extent in node.source.shape:
                    size *= extent if isinstance(extent, int) else 1
                choices.append((size, compute.axes.index(axes[0])))
    if choices:
        inner[compute.outputs[0]] = max(choices)[1]


def _lead(compute: Map | Reduce, inner: dict[Tensor, int], program: Program) -> None:
    """What an elementwise result reads should be contiguous along the same axis."""
    axis = compute.axes[inner[compute.outputs[0]]]
    if isinstance(compute, Reduce) and len(loads(*compute.elements)) > 1:
        _lead_operands(compute, inner, program)
        return
    for node in loads(*expressions(compute)):
        if node.source in inner or node.source in program.constants:
            continue
        for position, index in enumerate(node.indices):
            if axes_of(index) == [axis]:
                inner[node.source] = position


def _lead_operands(compute: Reduce, inner: dict[Tensor, int], program: Program) -> None:
    """What a contraction reads besides its constants should be contiguous along the longest axis both sum over."""
    operands = loads(*compute.elements)
    shared = {a for n in operands if n.source in program.constants for a in axes_of(*n.indices)}
    for node in operands:
        if node.source in inner or node.source in program.constants:
            continue
        places = [
            (upper(index.axis.extent), position)
            for position, index in ((p, _within_group(i)) for p, i in enumerate(node.indices))
            if isinstance(index, Var) and index.axis in compute.reduce_axes and index.axis in shared
        ]
        if places and max(places)[0] > 1:
            inner[node.source] = max(places)[1]


def _within_group(index: Expr) -> Expr:
    """r of an index (o // n)·m + r: which channel of its group is read; any other index as it is."""
    terms = linear(index).terms
    plain = [t for t in terms if isinstance(t, Var)]
    if len(plain) == 1 and len(terms) == 2 and all(t is plain[0] or is_op(t, "floordiv") for t in terms):
        return plain[0]
    return index


# --- merged axes


def _merged_reads(program: Program, layouts: dict[Tensor, Layout], fixed: set[Tensor]) -> dict[Tensor, Layout]:
    """Orders that turn reads like T[n // 64, s, n % 64] into one run along n."""
    maps = {c.output: c for c in program.computes if isinstance(c, Map)}
    found: dict[Tensor, Layout] = {}
    for compute in program.computes:
        if not isinstance(compute, Map) or not _is_merge(compute.value):
            continue
        node = compute.value
        assert isinstance(node, Load)
        source, indices = node.source, node.indices
        while source in maps and _is_single_read(maps[source].value):
            inner = maps[source]
            value = substitute(inner.value, dict(zip(inner.axes, indices, strict=True)))
            assert isinstance(value, Load)
            source, indices = value.source, tuple(simplify(i) for i in value.indices)
        if source in fixed or source in found or source in layouts or source.rank > _MOST_AXES:
            continue
        order = _contiguous_order(source, indices)
        if order is not None:
            found[source] = Layout.permuted(order)
    return {t: layout for t, layout in found.items() if not layout.is_natural}


def _is_single_read(value: Expr) -> bool:
    return isinstance(value, Load)


def _is_merge(value: Expr) -> bool:
    return isinstance(value, Load) and any(
        isinstance(n, Op) and n.op.name == "mod" for i in value.indices for n in (i, *linear(i).terms)
    )


def _contiguous_order(tensor: Tensor, indices: tuple[Expr, ...]) -> tuple[int, ...] | None:
    natural = tuple(range(tensor.rank))
    for order in sorted(permutations(natural), key=lambda p: sum(a != b for a, b in zip(p, natural, strict=True))):
        if order[-1] != tensor.rank - 1:
            continue
        layout = Layout.permuted(order)
        offset: Expr = const(0)
        for index, size in zip(layout.storage_indices(indices), layout.storage_shape(tensor.shape), strict=True):
            offset = offset * size + index
        if all(isinstance(t, Var) for t in join_divisions(linear(simplify(offset))).terms):
            return order
    return None


# --- rows that share sets


def _rows_apart(
    program: Program, layouts: dict[Tensor, Layout], fixed: set[Tensor], target: Target
) -> dict[Tensor, Layout]:
    """Rows a line longer where those that a product with constants reads side by side would fall on one set of the
    first cache and throw each other out."""
    if target.lanes_are_threads:
        return {}
    found: dict[Tensor, Layout] = {}
    for compute in program.computes:
        if not isinstance(compute, Reduce) or owned_axis(compute, program) is None:
            continue
        for node in loads(*compute.elements):
            if node.source.rank == 0:  # a number that says where something is read
                continue
            layout = layouts.get(node.source) or Layout.natural(node.source.rank)
            inner = layout.order[-1]
            index, extent = node.indices[inner.axis], node.source.shape[inner.axis]
            if node.source in fixed or inner != StorageAxis(inner.axis) or not isinstance(extent, int):
                continue
            along = isinstance(index, Var) and index.axis in compute.reduce_axes
            size = node.source.dtype.bytes
            if along and target.lines_held(extent * size) < _SIDE_BY_SIDE:
                found[node.source] = replace(layout, gap=target.nearest.transaction // size)
    return found


# --- constants indexed by several axes at once


def split_constants(program: Program) -> Program:
    """Reshape constants read at mixed-radix indices (W[g·H + j]) so that each axis has one of its own."""
    constants = dict(program.constants)
    made: dict[tuple[Tensor, tuple[int, ...]], Tensor] = {}

    def rule(node: Expr) -> Expr | None:
        if not isinstance(node, Load) or node.source not in program.constants:
            return None
        shape: list[int] = []
        indices: list[Expr] = []
        for index, extent in zip(node.indices, node.source.shape, strict=True):
            digits = digits_of(index, extent)
            if digits is None:
                shape.append(int(upper(extent)))
                indices.append(index)
            else:
                shape.extend(int(upper(d.extent)) for d in digits)
                indices.extend(var(d) for d in digits)
        if len(shape) == len(node.indices):
            return None
        key = (node.source, tuple(shape))
        if key not in made:
            made[key] = Tensor(f"{node.source.name}_as_{'x'.join(map(str, shape))}", tuple(shape), node.source.dtype)
            constants[made[key]] = program.constants[node.source].reshape(shape)
        return load(made[key], indices)

    computes = tuple(_rewrite_compute(c, rule) for c in program.computes)
    return replace(program, computes=computes, constants=constants)


def split_groups(program: Program) -> Program:
    """Weights read along an axis o that others read at o // n get an axis of groups: panels then end with a group."""
    constants = dict(program.constants)
    made: dict[tuple[Tensor, int, int], Tensor] = {}

    def split(compute: Compute) -> Compute:
        if not isinstance(compute, Reduce):
            return compute
        sizes = {a: n for a in compute.axes if (n := _group_size(compute, a)) is not None}
        if not sizes:
            return compute

        def rule(node: Expr) -> Expr | None:
            if not isinstance(node, Load) or node.source not in constants:
                return None
            for position, index in enumerate(node.indices):
                size = sizes.get(index.axis) if isinstance(index, Var) else None
                if size is None:
                    continue
                key = (node.source, position, size)
                if key not in made:
                    old = node.source.shape
                    shape = (*old[:position], int(upper(old[position])) // size, size, *old[position + 1 :])
                    made[key] = Tensor(f"{node.source.name}_by_{size}", shape, node.source.dtype)
                    constants[made[key]] = constants[node.source].reshape(shape)
                indices = (*node.indices[:position], index // size, index % size, *node.indices[position + 1 :])
                return load(made[key], indices)
            return None

        return replace(compute, elements=tuple(rewrite(e, rule) for e in compute.elements))

    computes = tuple(split(c) for c in program.computes)
    return replace(program, computes=computes, constants=constants)


def _group_size(compute: Reduce, axis: Axis) -> int | None:
    """n of the reads at axis // n; None where there are none, or several."""
    found = {
        int(part.args[1].value)
        for node in loads(*compute.elements)
        for index in node.indices
        for part in walk(index)
        if is_op(part, "floordiv") and part.args[0] is var(axis) and isinstance(part.args[1], Const)
    }
    extent = axis.extent
    if len(found) != 1 or not isinstance(extent, int):
        return None
    size = found.pop()
    return size if 1 < size < extent and extent % size == 0 else None


def digits_of(index: Expr, extent: object) -> list[Axis] | None:
    """The axes of a mixed-radix index, most significant first; None when it is not one."""
    total = linear(index)
    if total.constant or len(total.terms) < 2 or not all(isinstance(t, Var) for t in total.terms):
        return None
    terms = sorted(((c, t.axis) for t, c in total.terms.items()), key=lambda p: p[0])  # type: ignore[attr-defined]
    weight = 1
    for coefficient, axis in terms:
        if coefficient != weight or not isinstance(axis.extent, int):
            return None
        weight *= axis.extent
    return [axis for _, axis in reversed(terms)] if weight == extent else None


def _rewrite_compute(compute: Compute, rule: object) -> Compute:
    if isinstance(compute, Map):
        return replace(compute, value=rewrite(compute.value, rule))  # type: ignore[arg-type]
    if isinstance(compute, Reduce):
        return replace(compute, elements=tuple(rewrite(e, rule) for e in compute.elements))  # type: ignore[arg-type]
    if isinstance(compute, Scan):
        return replace(compute, body=tuple(_rewrite_compute(c, rule) for c in compute.body))
    return compute
