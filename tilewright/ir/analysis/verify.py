"""The grammar of the Graph and the Program, checked after every stage; `verify_loops` stands in verify_loops.py.

A violation is a bug of Tilewright: InternalError names the compute and what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

from tilewright.errors import InternalError
from tilewright.ir.analysis.verify_loops import check_types, verify_kernel, verify_loops
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import (
    Compute,
    Host,
    Map,
    Monoid,
    Program,
    Reduce,
    Region,
    Scan,
    Scatter,
    Sort,
    expressions,
    reads,
)
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import Axis, Const, Expr, Extent, Load, State, Symbol, Var, walk
from tilewright.ir.forms.graph import Graph
from tilewright.ir.forms.scalar import OPS
from tilewright.ir.forms.tensor import Layout, Tensor

__all__ = ["verify_graph", "verify_kernel", "verify_loops", "verify_program"]


def verify_graph(graph: Graph, outside: Iterable[str] = ()) -> None:
    """Every input of a node is known before it, every tensor is made once. `outside`: names a subgraph may read."""
    known = set(outside)
    made: set[str] = set()
    for name in (*(v.name for v in graph.inputs), *graph.constants):
        _once(made, name, f"graph {graph.name}")
    known |= made
    if graph.part is not None:
        known |= graph.part.sequences.keys() | graph.part.absent | graph.part.outside
    for node in graph.nodes:
        where = node.describe() if node.name or node.outputs else f"{node.op} node"
        for name in node.inputs:
            if name and name not in known:
                raise InternalError(f"{where}: input '{name}' is not computed before it")
        for value in node.attributes.values():
            if isinstance(value, Graph):
                verify_graph(value, known)
        if not any(node.outputs):
            raise InternalError(f"{where}: has no output")
        for name in node.outputs:
            if name:
                _once(made, name, where)
                known.add(name)
    for name in graph.outputs:
        if name not in known:
            raise InternalError(f"graph {graph.name}: output '{name}' is not computed")
    for name, value in graph.values.items():
        if name != value.name:
            raise InternalError(f"graph {graph.name}: value '{value.name}' is filed under '{name}'")
    for name, array in graph.constants.items():
        known_value = graph.values.get(name)
        if known_value is not None and not _same_shape(known_value.shape, array.shape):
            raise InternalError(f"graph {graph.name}: constant '{name}' is {list(array.shape)}, known as {known_value}")


def verify_program(program: Program, before: Program | None = None) -> None:
    """Computes that the Program `before` has too, which was verified, are looked at only for where they stand."""
    _ProgramCheck(() if before is None else before.computes).program(program)


def _once(names: set[str], name: str, where: str) -> None:
    if name in names:
        raise InternalError(f"{where}: the name '{name}' is used twice")
    names.add(name)


def _same_shape(a: tuple[Extent, ...], b: tuple[Extent, ...]) -> bool:
    return len(a) == len(b) and all(_same_extent(x, y) for x, y in zip(a, b, strict=True))


def _same_extent(a: Extent, b: Extent) -> bool:
    a = int(a.value) if isinstance(a, Const) else a
    b = int(b.value) if isinstance(b, Const) else b
    return a is b or (isinstance(a, int) and isinstance(b, int) and a == b)


class _ProgramCheck:
    """Walks a Program with what is known so far."""

    def __init__(self, checked: Iterable[Compute] = ()) -> None:
        self._checked = {id(compute) for compute in checked}
        self._known: set[Tensor] = set()
        self._names: set[str] = set()
        self._symbols: dict[str, Symbol] = {}
        self._steps: tuple[Axis, ...] = ()
        self._where = "program"

    def fail(self, what: str) -> InternalError:
        return InternalError(f"{self._where}: {what}")

    def program(self, program: Program) -> None:
        for tensor in program.inputs:
            self._define(tensor)
        for tensor, array in program.constants.items():
            self._define(tensor)
            if not _same_shape(tensor.shape, array.shape) or array.dtype != tensor.dtype.numpy:
                raise self.fail(f"constant {tensor!r} holds {array.dtype}{list(array.shape)}")
        for compute in program.computes:
            self._compute(compute)
        self._where = "program"
        for tensor in program.outputs:
            self._read(tensor)
        for tensor, layout in program.layouts.items():
            if tensor not in self._known:
                raise self.fail(f"layout of {tensor.name}, which is not a tensor of the program")
            self._layout(tensor, layout)
        maps = {c.output for c in program.computes if isinstance(c, Map)}
        for tensor in program.staged:
            if tensor not in maps or tensor in program.outputs:
                raise self.fail(f"staged {tensor.name} is not a map between other computes")
        for names, tensors in ((program.input_names, program.inputs), (program.output_names, program.outputs)):
            if names and len(names) != len(tensors):
                raise self.fail(f"{len(names)} names for {len(tensors)} tensors")

    # Tensors and extents

    def _define(self, tensor: Tensor) -> None:
        if tensor in self._known:
            raise self.fail(f"tensor {tensor.name} is computed twice")
        _once(self._names, tensor.name, self._where)
        self._shape(tensor.shape)
        self._known.add(tensor)

    def _read(self, tensor: Tensor) -> None:
        if tensor not in self._known:
            raise self.fail(f"reads {tensor.name}, which is not computed before")

    def _shape(self, shape: Iterable[Extent]) -> None:
        for extent in shape:
            if isinstance(extent, int):
                if extent < 0:
                    raise self.fail(f"extent {extent} is negative")
                continue
            for node in walk(extent):
                if isinstance(node, Load | Var | State):
                    raise self.fail(f"extent {extent!r} is not made of symbols alone")
            self._expr(extent, ())

    def _layout(self, tensor: Tensor, layout: Layout) -> None:
        for axis in range(tensor.rank):
            parts = sorted((p for p in layout.order if p.axis == axis), key=lambda p: -p.step)
            covers = bool(parts) and parts[0].size is None and parts[-1].step == 1
            for coarse, fine in pairwise(parts):
                covers = covers and fine.size is not None and fine.step * fine.size == coarse.step
            if not covers:
                raise self.fail(f"layout of {tensor.name} does not cover axis {axis}: {layout}")
        if any(not 0 <= p.axis < tensor.rank for p in layout.order):
            raise self.fail(f"layout of {tensor.name} names an axis it does not have: {layout}")

    # Expressions

    def _expr(self, root: Expr, axes: Iterable[Axis]) -> None:
        bound = {*axes, *self._steps}
        for node in walk(root):
            if isinstance(node, Var):
                if node.axis not in bound:
                    raise self.fail(f"axis {node.axis.name} is used but not bound")
            elif isinstance(node, Load):
                if not isinstance(node.source, Tensor):
                    raise self.fail(f"reads {node.source!r}, which is not a tensor")
                self._read(node.source)
            elif isinstance(node, State):
                raise self.fail(f"state {node.name} is used outside a monoid")
            elif isinstance(node, Symbol) and self._symbols.setdefault(node.name, node) is not node:
                raise self.fail(f"symbol {node.name} has two ranges")
            problem = check_types(node)
            if problem:
                raise self.fail(problem)

    def _typed(self, what: str, value: DType, wanted: DType) -> None:
        if value is not wanted:
            raise self.fail(f"{what} is {value.name}, expected {wanted.name}")

    # Computes

    def _compute(self, compute: Compute) -> None:
        label = ", ".join(t.name for t in compute.outputs)
        self._where = f"{type(compute).__name__} {label}" + (f" ({compute.origin})" if compute.origin else "")
        where = self._where
        for tensor in reads(compute):
            self._read(tensor)
        if id(compute) not in self._checked:
            self._parts(compute)
        self._where = where
        for tensor in compute.outputs:
            self._define(tensor)

    def _parts(self, compute: Compute) -> None:
        if isinstance(compute, Map | Reduce | Scatter | Sort):
            self._axes(compute)
        if isinstance(compute, Map):
            self._typed("value", compute.value.dtype, compute.output.dtype)
            self._axes_shape(compute.output, compute.axes)
        elif isinstance(compute, Reduce):
            self._reduce(compute)
        elif isinstance(compute, Scatter):
            self._scatter(compute)
        elif isinstance(compute, Sort):
            self._sort(compute)
        elif isinstance(compute, Scan):
            self._scan(compute)
        elif isinstance(compute, Region):
            self._region(compute)
        elif not isinstance(compute, Host):
            raise self.fail("is not a kind of compute")

    def _axes(self, compute: Map | Reduce | Scatter | Sort) -> None:
        axes = (*compute.axes, *(compute.reduce_axes if isinstance(compute, Reduce) else ()))
        if len(set(axes)) != len(axes):
            raise self.fail("an axis is bound twice")
        self._shape(a.extent for a in axes)
        for root in expressions(compute):
            self._expr(root, axes)

    def _axes_shape(self, tensor: Tensor, axes: tuple[Axis, ...]) -> None:
        if not _same_shape(tensor.shape, tuple(a.extent for a in axes)):
            raise self.fail(f"output {tensor!r} does not have the extents of its axes {list(axes)}")

    def _reduce(self, compute: Reduce) -> None:
        monoid = compute.monoid
        count = len(monoid.left)
        sides = (monoid.right, monoid.identity, monoid.combine, compute.elements)
        if not count or any(len(s) != count for s in sides):
            raise self.fail(f"the monoid has {count} states, but {[len(s) for s in sides]} parts")
        if len(monoid.final) != len(compute.outputs):
            raise self.fail(f"the monoid gives {len(monoid.final)} results for {len(compute.outputs)} outputs")
        for place, first in enumerate(monoid.left):
            for what, items in zip(("right", "identity", "combine", "element"), sides, strict=True):
                self._typed(f"{what} {place} of the monoid", items[place].dtype, first.dtype)
        for value, tensor in zip(monoid.final, compute.outputs, strict=True):
            self._typed("final of the monoid", value.dtype, tensor.dtype)
            self._axes_shape(tensor, compute.axes)
        self._monoid(monoid)

    def _monoid(self, monoid: Monoid) -> None:
        states = (*monoid.left, *monoid.right)
        if len(set(states)) != len(states):
            raise self.fail("the monoid names a state twice")
        for what, roots, allowed in (
            ("identity", monoid.identity, ()),
            ("combine", monoid.combine, states),
            ("final", monoid.final, monoid.left),
        ):
            for node in walk(*roots):
                if isinstance(node, Load | Var) or (isinstance(node, State) and node not in allowed):
                    raise self.fail(f"{what} of the monoid may not use {node!r}")
                problem = check_types(node)
                if problem:
                    raise self.fail(problem)

    def _scatter(self, compute: Scatter) -> None:
        self._typed("value", compute.value.dtype, compute.output.dtype)
        self._typed("initial value", compute.initial.dtype, compute.output.dtype)
        if not _same_shape(compute.initial.shape, compute.output.shape):
            raise self.fail(f"output {compute.output!r} has another shape than {compute.initial!r}")
        if len(compute.indices) != compute.output.rank:
            raise self.fail(f"{len(compute.indices)} indices for {compute.output.rank} axes")
        for index in compute.indices:
            self._typed("index", index.dtype, dtypes.index)
        row = OPS.get(compute.operator) if compute.operator is not None else None
        if compute.operator is not None and (row is None or row.arity != 2 or row.result != "same"):
            raise self.fail(f"operator {compute.operator} cannot combine")

    def _sort(self, compute: Sort) -> None:
        if compute.axis not in compute.axes:
            raise self.fail(f"sorts along {compute.axis.name}, which is not one of its axes")
        if len(compute.payloads) != len(compute.outputs):
            raise self.fail(f"{len(compute.payloads)} payloads for {len(compute.outputs)} outputs")
        place = compute.axes.index(compute.axis)
        for payload, tensor in zip(compute.payloads, compute.outputs, strict=True):
            self._typed("payload", payload.dtype, tensor.dtype)
            if tensor.rank != len(compute.axes):
                raise self.fail(f"output {tensor!r} does not have {len(compute.axes)} axes")
            for number, (extent, axis) in enumerate(zip(tensor.shape, compute.axes, strict=True)):
                kept, whole = extent, axis.extent
                if number != place and not _same_extent(kept, whole):
                    raise self.fail(f"output {tensor!r} does not have the extents of its axes {list(compute.axes)}")
                if number == place and isinstance(kept, int) and isinstance(whole, int) and kept > whole:
                    raise self.fail(f"output {tensor!r} keeps more than the {whole} that are sorted")

    def _scan(self, compute: Scan) -> None:
        where = self._where
        sides = (compute.initial, compute.following, compute.finals)
        if any(len(s) != len(compute.carry) for s in sides):
            raise self.fail(f"{len(compute.carry)} carried tensors, but {[len(s) for s in sides]} parts")
        self._shape((compute.axis.extent,))
        outer = set(self._known)
        for tensor in compute.carry:
            self._define(tensor)
        steps, self._steps = self._steps, (*self._steps, compute.axis)
        for part in compute.body:
            self._compute(part)
        self._where, self._steps = where, steps
        for initial, carry, following, final in zip(
            compute.initial, compute.carry, compute.following, compute.finals, strict=True
        ):
            self._read(following)
            for other in (initial, following, *((final,) if final is not None else ())):
                self._typed(f"{other.name} carried as {carry.name}", other.dtype, carry.dtype)
                if not _same_shape(other.shape, carry.shape):
                    raise self.fail(f"{other!r} is carried as {carry!r}")
        for inner, output in compute.stacked:
            self._read(inner)
            self._typed(f"stack of {inner.name}", output.dtype, inner.dtype)
            if not _same_shape(output.shape, (compute.axis.extent, *inner.shape)):
                raise self.fail(f"{output!r} stacks {inner!r} along {compute.axis!r}")
        self._known = outer  # what the body computes is not seen outside, but its names stay taken

    def _region(self, compute: Region) -> None:
        branches = {"if": 2, "loop": 1}.get(compute.kind)
        if branches != len(compute.branches):
            raise self.fail(f"a region of kind {compute.kind} with {len(compute.branches)} branches")
        self._typed("condition", compute.condition.dtype, dtypes.bool_)
        for branch in compute.branches:
            pairs: Mapping[str, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {
                "capture": (branch.inputs, compute.captures), "output": (branch.outputs, compute.outputs),
            }  # fmt: skip
            for what, (inner, outer) in pairs.items():
                if len(inner) != len(outer):
                    raise self.fail(f"a branch has {len(inner)} {what}s, the region {len(outer)}")
                for a, b in zip(inner, outer, strict=True):
                    self._typed(f"{what} {a.name}", a.dtype, b.dtype)
                    if a.rank != b.rank:
                        raise self.fail(f"{what} {a!r} stands for {b!r}")
            verify_program(branch)
        if compute.kind == "loop":
            carried = compute.captures[: len(compute.outputs)]
            if len(carried) != len(compute.outputs) or not carried or carried[0].dtype is not dtypes.bool_:
                raise self.fail("a loop carries its condition first, then a capture for every output")
