"""The text of every form: what `--dump` writes, what messages quote, and what `parse.py` reads back.

Same form, same text. Names that are not plain words are quoted; an axis or buffer whose name is already taken where it
stands gets a number. Constants' data are not in the text, only their shape, type and a digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

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
    plain_monoid,
)
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import Axis, Expr, Extent, State, Symbol, spelled, walk
from tilewright.ir.forms.graph import Form, Graph, Value
from tilewright.ir.forms.loops import (
    Alloc,
    Barrier,
    Buffer,
    Call,
    For,
    If,
    Instruction,
    Jump,
    Kernel,
    LoopProgram,
    Memory,
    Stmt,
    Storage,
    Store,
)
from tilewright.ir.forms.spelling import name_text
from tilewright.ir.forms.tensor import Layout, StorageAxis, Tensor

REDUCTIONS = {"add": "sum", "mul": "product", "min": "least", "max": "largest", "and": "all", "or": "any"}
_INDENT = "  "


def expr_text(root: Expr) -> str:
    return Printer().expr(root)


def graph_text(graph: Graph) -> str:
    return "\n".join(_graph_lines(graph)) + "\n"


def program_text(program: Program, numbers: bool = True) -> str:
    """Without `numbers` constants are told by name and shape alone: their digests take as long as reading them."""
    return "\n".join(Printer().program(program, numbers)) + "\n"


def _form_text(form: Form) -> str:
    return f"({', '.join(map(str, (form.constant, *form.factors)))})"


def loops_text(loops: LoopProgram) -> str:
    return "\n".join(Printer().loops(loops)) + "\n"


def kernel_text(kernel: Kernel) -> str:
    return "\n".join(Printer().kernel(kernel)) + "\n"


def digest(array: np.ndarray) -> str:
    """Twelve digits that tell arrays apart."""
    header = f"{array.dtype}{array.shape}".encode()
    return hashlib.sha256(header + np.ascontiguousarray(array).tobytes()).hexdigest()[:12]


class Printer:
    """Writes forms down; knows the names of the axes and buffers around."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}  # axes, buffers and states in scope
        self._taken: set[str] = set()
        self._monoids: dict[Monoid, str] = {}

    @contextmanager
    def scope(self, things: Iterable[Axis | Buffer]) -> Iterator[None]:
        """Name axes or buffers while the block runs."""
        before = dict(self._names), set(self._taken)
        for thing in things:
            self._give_name(thing)
        yield
        self._names, self._taken = before

    def _give_name(self, thing: Axis | Buffer) -> str:
        name, number = thing.name, 0
        while name in self._taken:
            number += 1
            name = f"{thing.name}_{number}"
        self._taken.add(name)
        self._names[id(thing)] = name_text(name)
        return self._names[id(thing)]

    def name(self, thing: Axis | Buffer | Tensor) -> str:
        if isinstance(thing, Tensor):
            return name_text(thing.name)
        return self._names.get(id(thing)) or self._give_name(thing)

    # Expressions

    def expr(self, root: Expr) -> str:
        return spelled(root, self.name)

    def exprs(self, roots: Iterable[Expr]) -> str:
        return ", ".join(self.expr(r) for r in roots)

    def extent(self, extent: Extent) -> str:
        return str(extent) if isinstance(extent, int) else self.expr(extent)

    def shape(self, shape: Iterable[Extent]) -> str:
        return f"[{', '.join(self.extent(e) for e in shape)}]"

    def axis(self, axis: Axis) -> str:
        return f"{self.name(axis)}:{self.extent(axis.extent)}"

    def axes(self, axes: Iterable[Axis]) -> str:
        return f"[{', '.join(self.axis(a) for a in axes)}]"

    def typed(self, tensor: Tensor) -> str:
        return f"{name_text(tensor.name)}: {tensor.dtype.name}{self.shape(tensor.shape)}"

    # The Program

    def program(self, program: Program, numbers: bool = True) -> list[str]:
        body = [line for compute in program.computes for line in self.compute(compute)]
        lines = ["program"]
        for item in symbols_of(program):
            lines.append(f"symbol {name_text(item.name)} {item.low} .. {item.high}")
        for place, tensor in enumerate(program.inputs):
            lines.append(f"input {self.typed(tensor)}{_alias(program.input_names, place)}")
        for tensor, array in program.constants.items():
            lines.append(f"constant {self.typed(tensor)} {json.dumps(digest(array) if numbers else '')}")
        for monoid, name in self._monoids.items():
            lines.extend(_monoid_lines(self, monoid, name))
        self._monoids = {}
        lines.extend(body)
        for tensor, layout in program.layouts.items():
            lines.append(f"layout {name_text(tensor.name)}: {layout_text(layout)}")
        lines.extend(f"staged {name_text(tensor.name)}" for tensor in program.staged)
        for place, tensor in enumerate(program.outputs):
            lines.append(f"output {name_text(tensor.name)}{_alias(program.output_names, place)}")
        for forms in program.ends:
            lines.append(f"ends {' '.join(_form_text(form) for form in forms)}".rstrip())
        lines.append("end")
        return lines

    def compute(self, compute: Compute) -> list[str]:
        if isinstance(compute, Scan):
            return self._scan(compute)
        if isinstance(compute, Region):
            return self._region(compute)
        if isinstance(compute, Host):
            outputs = ", ".join(self.typed(t) for t in compute.outputs)
            attributes = json.dumps(json.dumps(dict(compute.attributes), sort_keys=True))
            head = f"host {json.dumps(compute.function)}({_names(compute.inputs)}) give ({outputs}) {attributes}"
            return [head + _origin(compute.origin)]
        with self.scope(_axes(compute)):
            return [self._statement(compute) + _origin(compute.origin)]

    def _statement(self, compute: Map | Reduce | Scatter | Sort) -> str:
        if isinstance(compute, Map | Reduce):
            left = ", ".join(f"{name_text(t.name)}: {t.dtype.name}{self.axes(compute.axes)}" for t in compute.outputs)
            if isinstance(compute, Map):
                return f"{left} = {self.expr(compute.value)}"
            over = self.axes(compute.reduce_axes)
            operator = compute.monoid.operator
            if operator and compute.monoid == plain_monoid(operator, compute.monoid.left[0].dtype):
                return f"{left} = {REDUCTIONS[operator]}{over} {self.expr(compute.elements[0])}"
            name = self._monoids.setdefault(compute.monoid, f"m{len(self._monoids)}")
            return f"{left} = reduce {name} {over} ({self.exprs(compute.elements)})"
        if isinstance(compute, Scatter):
            how = f"put {compute.operator}" if compute.operator else "put"
            unique = " unique" if compute.unique else ""
            return (
                f"{self.typed(compute.output)} = scatter{self.axes(compute.axes)} {name_text(compute.initial.name)} "
                f"at ({self.exprs(compute.indices)}) {how} ({self.expr(compute.value)}){unique}"
            )
        down = " descending" if compute.descending else ""
        return (
            f"{', '.join(self.typed(t) for t in compute.outputs)} = sort{self.axes(compute.axes)} along "
            f"{self.name(compute.axis)} by ({self.expr(compute.key)}) give ({self.exprs(compute.payloads)}){down}"
        )

    def _scan(self, scan: Scan) -> list[str]:
        with self.scope((scan.axis,)):
            way = " reverse" if scan.reverse else ""
            lines = [f"scan[{self.axis(scan.axis)}]{way}{_origin(scan.origin)}"]
            for initial, carry, following, final in zip(
                scan.initial, scan.carry, scan.following, scan.finals, strict=True
            ):
                gives = f" give {self.typed(final)}" if final is not None else ""
                lines.append(
                    f"{_INDENT}carry {self.typed(carry)} = {name_text(initial.name)} then "
                    f"{name_text(following.name)}{gives}"
                )
            for inner, output in scan.stacked:
                lines.append(f"{_INDENT}stack {self.typed(output)} = {name_text(inner.name)}")
            lines.append(f"{_INDENT}do")
            lines.extend(2 * _INDENT + line for part in scan.body for line in self.compute(part))
        return [*lines, "end"]

    def _region(self, region: Region) -> list[str]:
        limit = "" if region.trip_limit is None else f" limit {region.trip_limit}"
        outputs = ", ".join(self.typed(t) for t in region.outputs)
        head = f"region {region.kind} {name_text(region.condition.name)} ({_names(region.captures)}) give ({outputs})"
        lines = [head + limit + _origin(region.origin)]
        for branch in region.branches:
            lines.extend(_INDENT + line for line in Printer().program(branch))
        return [*lines, "end"]

    # The Loops

    def loops(self, loops: LoopProgram) -> list[str]:
        lines = ["loops", *(_storage_line(s) for s in loops.tensors)]
        for kernel in loops.kernels:
            lines.extend(("", *self.kernel(kernel)))
        return [*lines, "", *(_call_line(c) for c in loops.calls), *(_jump_line(j) for j in loops.jumps)]

    def kernel(self, kernel: Kernel) -> list[str]:
        with self.scope((*kernel.params, *((kernel.step,) if kernel.step else ()))):
            symbols = "".join(f" symbol {name_text(s.name)} {s.low} .. {s.high}" for s in kernel.symbols)
            step = f" step {self.axis(kernel.step)}" if kernel.step else ""
            params = ", ".join(self.buffer(p) for p in kernel.params)
            lines = [f"kernel {name_text(kernel.name)}({params}){symbols}{step} {{"]
            lines.extend(self.body(kernel.body))
        return [*lines, "}"]

    def buffer(self, buffer: Buffer) -> str:
        memory = "" if buffer.memory is Memory.GLOBAL else f"{buffer.memory.value} "
        return f"{self.name(buffer)}: {memory}{buffer.dtype.name}{self.shape(buffer.shape)}"

    def body(self, body: Iterable[Stmt]) -> list[str]:
        return [_INDENT + line for stmt in body for line in self.stmt(stmt)]

    def stmt(self, stmt: Stmt) -> list[str]:
        if isinstance(stmt, For):
            extent = self.extent(stmt.axis.extent)
            with self.scope((stmt.axis,)):
                head = f"{stmt.kind.value} {self.name(stmt.axis)}:{extent} {{"
                return [head, *self.body(stmt.body), "}"]
        if isinstance(stmt, Alloc):
            with self.scope((stmt.buffer,)):
                return [f"alloc {self.buffer(stmt.buffer)} {{", *self.body(stmt.body), "}"]
        if isinstance(stmt, If):
            lines = [f"if {self.expr(stmt.condition)} {{", *self.body(stmt.then)]
            if stmt.otherwise:
                lines.extend(("} else {", *self.body(stmt.otherwise)))
            return [*lines, "}"]
        if isinstance(stmt, Store):
            return [f"{self.name(stmt.buffer)}[{self.exprs(stmt.indices)}] = {self.expr(stmt.value)}"]
        if isinstance(stmt, Barrier):
            return [f"barrier {stmt.scope.value}"]
        if isinstance(stmt, Instruction):
            operands = ", ".join(f"{self.name(o.buffer)}[{self.exprs(o.origin)}]" for o in stmt.operands)
            return [f"do {name_text(stmt.name)}({operands}; {self.exprs(stmt.scalars)})"]
        raise TypeError(f"no text for {type(stmt).__name__}")


def symbols_of(program: Program) -> list[Symbol]:
    """Symbols of a Program in order of appearance, those of its branches not counted."""
    roots: list[Extent] = [e for t in program.tensors() for e in t.shape]
    pending = list(reversed(program.computes))
    while pending:
        compute = pending.pop()
        roots.extend(expressions(compute))
        roots.extend(a.extent for a in _axes(compute))
        if isinstance(compute, Scan):
            roots.extend(e for t in compute.carry for e in t.shape)
            pending.extend(reversed(compute.body))
    nodes = walk(*(r for r in roots if isinstance(r, Expr)))
    return [n for n in nodes if isinstance(n, Symbol)]


def _axes(compute: Compute) -> tuple[Axis, ...]:
    if isinstance(compute, Reduce):
        return (*compute.axes, *compute.reduce_axes)
    if isinstance(compute, Map | Scatter | Sort):
        return compute.axes
    return (compute.axis,) if isinstance(compute, Scan) else ()


def layout_text(layout: Layout) -> str:
    parts = ", ".join(_storage_axis(s) for s in layout.order)
    return f"[{parts}] {layout.fill!r} {layout.swizzle}{f' gap {layout.gap}' if layout.gap else ''}"


def _storage_axis(part: StorageAxis) -> str:
    step = f"/{part.step}" if part.step != 1 else ""
    size = f"%{part.size}" if part.size is not None else ""
    return f"{part.axis}{step}{size}"


def _monoid_lines(printer: Printer, monoid: Monoid, name: str) -> list[str]:
    def states(items: tuple[State, ...]) -> str:
        return ", ".join(f"${name_text(s.name)}: {s.dtype.name}" for s in items)

    return [
        f"monoid {name} ({states(monoid.left)}; {states(monoid.right)})",
        *(
            f"{_INDENT}{label} ({printer.exprs(items)})"
            for label, items in (
                ("identity", monoid.identity), ("combine", monoid.combine), ("final", monoid.final),
            )
        ),
    ]  # fmt: skip


def _names(tensors: Iterable[Tensor]) -> str:
    return ", ".join(name_text(t.name) for t in tensors)


def _alias(names: Sequence[str], place: int) -> str:
    return f" = {json.dumps(names[place])}" if place < len(names) else ""


def _origin(origin: str) -> str:
    return f"  # {' '.join(origin.split())}" if origin.strip() else ""


def _storage_line(item: Storage) -> str:
    shape = ", ".join(map(str, item.shape))
    return f"tensor {name_text(item.name)}: {item.dtype.name}[{shape}] {item.role} {item.position}"


def _jump_line(jump: Jump) -> str:
    unless = "" if jump.condition is None else f" unless {name_text(jump.condition)}"
    passed = f" past {jump.passed}" if jump.passed else ""
    return f"jump {jump.at} to {jump.target}{passed}{unless}"


def _call_line(call: Call) -> str:
    arguments = ", ".join(name_text(a) for a in call.arguments)
    step = f" step {call.step}" if call.step else ""
    return f"call {name_text(call.kernel)}({arguments}){step}"


# The Graph, for reading alone


def _graph_lines(graph: Graph) -> list[str]:
    lines = [f"graph {name_text(graph.name)}"]
    lines.extend(f"input {_value_text(v)}" for v in graph.inputs)
    for name, array in graph.constants.items():
        dtype = dtypes.by_numpy(array.dtype)
        label = dtype.name if dtype is not None else str(array.dtype)
        lines.append(f"constant {name_text(name)}: {label}{list(array.shape)} {json.dumps(digest(array))}")
    for node in graph.nodes:
        outputs = ", ".join(_value_text(graph.values[n]) if n in graph.values else name_text(n) for n in node.outputs)
        label = f"{node.domain}.{node.op}" if node.domain else node.op
        title = f" {json.dumps(node.name)}" if node.name else ""
        lines.append(f"node {label}{title} ({', '.join(map(name_text, node.inputs))}) -> ({outputs})")
        for key in sorted(node.attributes):
            value = node.attributes[key]
            if isinstance(value, Graph):
                lines.append(f"{_INDENT}{key} =")
                lines.extend(2 * _INDENT + line for line in _graph_lines(value))
            else:
                lines.append(f"{_INDENT}{key} = {_attribute_text(value)}")
    lines.extend(f"output {name_text(n)}" for n in graph.outputs)
    return [*lines, "end"]


def _value_text(value: Value) -> str:
    return f"{name_text(value.name)}: {value.dtype.name}{Printer().shape(value.shape)}"


def _attribute_text(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)} {digest(value)}"
    if isinstance(value, DType):
        return value.name
    return repr(value)
