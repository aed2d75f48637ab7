"""Graph to Program: every node through its registered function, in order; what nobody reads is dropped at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tilewright.errors import BorderError, CutError, ModelError, UndecidedError, UnsupportedError
from tilewright.ir.forms.bounds import fixed
from tilewright.ir.forms.compute import Compute, Program, Region, Scan, expressions, reads
from tilewright.ir.forms.expr import Const, Expr, Load, Var, is_op
from tilewright.ir.forms.graph import ASKED, Form, Graph, Node, Part, item_name, read_by
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.folding import without_dead
from tilewright.ops.builder import Builder, dims
from tilewright.ops.extents import Recipes, lower_open
from tilewright.ops.movement.sequence import Sequence
from tilewright.ops.outside import ABSENT, OUTSIDE, OUTSIDE_OPERATORS, outside
from tilewright.ops.registry import FLAGS, find
from tilewright.ops.steps import control
from tilewright.ops.steps.control import Scope


def lower(graph: Graph, regions: bool = False) -> Program:
    """The tensor expressions of a Graph, shape computations and other constants already evaluated. With `regions` the
    target runs loops that data end, and branches."""
    if graph.part is not None and graph.part.rooms:
        return lower_open(graph, lower_with_recipes)[0]
    return _lowered(Builder(regions), graph)


def output_forms(graph: Graph) -> Mapping[str, tuple[Form, ...]]:
    """By name the extents of what a part gives, in its run-time numbers."""
    return lower_open(graph, lower_with_recipes)[1]


def lower_with_recipes(graph: Graph) -> Recipes:
    """The tensor expressions of a Graph that has no rooms, and how its constants are made."""
    b = Builder(keeps_recipes=True)
    program = _lowered(b, graph)
    return Recipes(program, b.constants, b.recipes)


def _lowered(b: Builder, graph: Graph) -> Program:
    part = graph.part or Part()
    inputs = []
    for value in graph.inputs:
        shape = b.checked_shape(value.shape, f"input '{value.name}'")  # type: ignore[arg-type]
        inputs.append(Tensor(b.unique(value.name), shape, value.dtype))
    names = {t: v.name for t, v in zip(inputs, graph.inputs, strict=True)}
    scope = _scope(part, {name: t for t, name in names.items()})
    b.answers(part.decided)
    asked: Tensor | None = None
    try:
        results = _lower_nodes(b, graph, scope, {})
    except UndecidedError as error:
        error.inputs, can_be_made = _deciding(b, error.tensor, names)
        error.tensor = error.tensor if can_be_made else None
        # a node that changes nothing gives its input by another name: the one that is read behind the cut is meant
        read = read_by(error.node) if isinstance(error.node, Node) else set()
        error.itself = next((name for name, value in scope.items() if value is error.tensor and name in read), "")
        error.scope = _told(b, scope)
        if not part.asks:
            raise
        asked = error.tensor  # type: ignore[assignment]
        results = [_named(b, scope, graph.constants, name) for name in graph.outputs]
    except CutError as error:
        error.scope = _told(b, scope)
        raise
    outputs, output_names = _outputs(b, graph, results, inputs, asked)
    for compute in b.computes:
        _check_reads(compute)
    program = Program(
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        computes=tuple(b.computes),
        constants=b.constants,
        input_names=tuple(v.name for v in graph.inputs),
        output_names=tuple(output_names),
    )
    return without_dead(program)


def _check_reads(compute: Compute) -> None:
    """No element beside a tensor is read: the last guard, behind the operators' own checks of shapes. Looked at are the
    plain indices outside of conditions."""
    inner = compute.body if isinstance(compute, Scan) else ()
    inner = tuple(c for p in compute.branches for c in p.computes) if isinstance(compute, Region) else inner
    for part in inner:
        _check_reads(part)
    waiting = list(expressions(compute))
    seen: set[Expr] = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        waiting += node.args[:1] if is_op(node, "select") else node.args
        for index, extent in zip(node.args, node.source.shape, strict=True) if isinstance(node, Load) else ():
            last = max(0, fixed(index.axis.extent) - 1) if isinstance(index, Var) else 0  # an empty axis reads nothing
            last = int(index.value) if isinstance(index, Const) else last
            if not 0 <= last < max(fixed(extent), 1):
                raise ModelError(f"{compute.origin} does not fit its inputs: it reads element {last} of an axis of "
                                 f"{extent}")  # fmt: skip


def _scope(part: Part, tensors: Mapping[str, Tensor]) -> Scope:
    """What the nodes of a part may read: tensors, sequences of them, and what is no tensor."""
    items = {item_name(name, k) for name, count in part.sequences.items() for k in range(count)}
    scope: Scope = {name: t for name, t in tensors.items() if name not in items}
    for name, count in part.sequences.items():
        scope[name] = Sequence(tuple(tensors[item_name(name, k)] for k in range(count)))
    scope.update(dict.fromkeys(part.absent, ABSENT))
    scope.update(dict.fromkeys(part.outside, OUTSIDE))
    return scope


def _told(b: Builder, scope: Scope) -> dict[str, Any]:
    """Of each value what is known while compiling: see `CutError`."""
    told: dict[str, Any] = {}
    for name, value in scope.items():
        if isinstance(value, Sequence):
            told[name] = len(value.items)
        elif value is ABSENT:
            told[name] = None
        elif value in b.constants:
            told[name] = b.constants[value]
    return told


def _lower_nodes(b: Builder, graph: Graph, scope: Scope, outer: Mapping[str, np.ndarray]) -> list[Tensor]:
    """Lower the nodes of a graph, or of a body inside one, into `scope`; gives the graph's outputs."""
    constants = {**outer, **graph.constants}
    for name in graph.constants:
        scope.pop(name, None)  # a body's own constant hides an outer tensor of the same name
    for node in _alive(graph):
        if graph.part is not None and node is not graph.nodes[0]:
            b.answers({})  # those given are for the first node, which nothing may need any more
        try:
            _lower_node(b, node, scope, constants)
        except CutError as error:
            error.node = node  # in the end the node of the whole graph, whatever is inside it
            raise
    return [_named(b, scope, constants, name) for name in graph.outputs]


def _alive(graph: Graph) -> list[Node]:
    """Nodes that an output depends on, in order."""
    wanted = set(graph.outputs)
    kept = []
    asks = graph.nodes[-1] if graph.part is not None and graph.part.asks else None
    for node in reversed(graph.nodes):
        if node is asks or not wanted.isdisjoint(o for o in node.outputs if o):
            kept.append(node)
            wanted |= read_by(node)
    return kept[::-1]


def _deciding(b: Builder, tensor: object, names: Mapping[Tensor, str]) -> tuple[tuple[str, ...], bool]:
    """The model's inputs that a tensor is made of, by name, and whether it is: not inside a loop's body."""
    makers = {**b.recipes, **{t: compute for compute in b.computes for t in compute.outputs}}
    seen: dict[object, None] = {}
    waiting = [tensor]
    while waiting:
        found = waiting.pop()
        if found not in seen:
            seen[found] = None
            waiting += reads(makers[found]) if found in makers else ()
    made = all(t in makers or t in names or t in b.constants for t in seen)
    return tuple(name for t, name in names.items() if t in seen), made


def _lower_node(b: Builder, node: Node, scope: Scope, constants: Mapping[str, np.ndarray]) -> None:
    b.enter(node)
    b.budget.spend(1, b.origin, "it is one node too many", "loops in loops and branches are written out; simplify them")
    entry = find(node.op, node.domain, node.version)
    is_control = node.op in control.NAMES and not node.domain
    if entry is None and (node.domain, node.op) in OUTSIDE_OPERATORS:
        raise outside(node.describe(), "it is about strings or images")
    if not node.domain:
        _check_flags(node)
    arguments = [_argument(b, scope, constants, name) if name else None for name in node.inputs]
    if entry is None and not is_control:
        raise UnsupportedError(
            f"{node.describe()}: operator {node.op} of operator set {node.domain or 'ai.onnx'} {node.version} is "
            f"not supported; replace it in the model by supported operators (tilewright.ops.supported() lists them)"
        )
    try:
        if entry is None or is_control:
            found: Any = control.lower_control(
                b, node, arguments, lambda body, bound: _lower_nodes(b, body, {**scope, **bound}, constants)
            )
        else:
            found = entry.lower(b, node, *arguments)
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, ArithmeticError) as error:
        # what operators do not check themselves: wrong ranks, list lengths, missing attributes or inputs
        raise ModelError(f"{node.describe()} does not fit its inputs or attributes: {_line(error)}") from error
    results = found if isinstance(found, tuple) else (found,)
    for name, tensor in zip(node.outputs, results, strict=False):
        if name and tensor is not None:
            scope[name] = tensor
    missing = [o for o in node.outputs if o and o not in scope]
    if missing:
        raise UnsupportedError(f"{node.describe()}: its output '{missing[0]}' is not supported; drop it from the model")


def _check_flags(node: Node) -> None:
    """Attributes that are yes or no: runtimes take other numbers for either."""
    for name in FLAGS.intersection(node.attributes):
        if node.attributes[name] not in (0, 1):
            raise ModelError(f"{node.describe()}: its attribute {name} is {node.attributes[name]!r}; it is 0 or 1")


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def _argument(b: Builder, scope: Scope, constants: Mapping[str, np.ndarray], name: str) -> Any:
    """What a node reads: None for an optional value that holds nothing."""
    if name not in scope and name in constants and constants[name].dtype.kind == "O":
        scope[name] = OUTSIDE
    found = _named(b, scope, constants, name)
    if found is OUTSIDE:
        raise outside(b.origin, f"'{name}' holds strings")
    return None if found is ABSENT else found


def _named(b: Builder, scope: Scope, constants: Mapping[str, np.ndarray], name: str) -> Any:
    """A tensor or a sequence of them."""
    if name not in scope:
        if name not in constants:
            raise ModelError(
                f"{b.origin or 'output'}: its input '{name}' is not defined by any node, input or initializer"
            )
        scope[name] = b.constant(constants[name], name=name)
    return scope[name]


def _outputs(
    b: Builder, graph: Graph, results: list[Any], inputs: list[Tensor], asked: Tensor | None
) -> tuple[list[Tensor], list[str]]:
    """Output tensors: each made by a compute of its own, so inputs, constants and repeats are copied."""
    outputs: list[Tensor] = []
    names: list[str] = []

    def add(name: str, tensor: Tensor) -> None:
        if tensor in inputs or tensor in b.constants or tensor in b.recipes or tensor in outputs:
            b.enter(Node("Identity", "", (name,), (name,)))
            # straight to the list: emit would fold the copy of a constant away
            copy = b.map_compute("output", dims(tensor), lambda *i, t=tensor: b.read(t, i))
            b.computes.append(copy)
            tensor = copy.output
        outputs.append(tensor)
        names.append(name)

    for name, value in zip(graph.outputs, results, strict=True):
        if graph.part is None and (isinstance(value, Sequence) or value is ABSENT):
            raise BorderError(f"output '{name}' is no tensor, but a sequence or an optional value")
        if isinstance(value, Sequence):
            for place, item in enumerate(value.items):
                add(item_name(name, place), item)
        elif value is not ABSENT:
            declared = graph.values.get(name)
            if declared is not None and declared.dtype is not value.dtype:
                raise ModelError(f"output '{name}' is declared as {declared.dtype.name}, but is {value.dtype.name}")
            add(name, value)
    if asked is not None:
        add(ASKED, asked)
    return outputs, names
