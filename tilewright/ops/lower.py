"""Graph to Program: every node through its registered function, in order; what nobody reads is dropped at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tilewright.errors import ModelError, UndecidedError, UnsupportedError
from tilewright.ir.compute import Program, reads
from tilewright.ir.folding import without_dead
from tilewright.ir.graph import Graph, Node
from tilewright.ir.tensor import Tensor
from tilewright.ops import control
from tilewright.ops.builder import Builder, dims
from tilewright.ops.control import Scope
from tilewright.ops.registry import find
from tilewright.ops.sequence import Sequence


def lower(graph: Graph) -> Program:
    """The tensor expressions of a Graph, shape computations and other constants already evaluated."""
    b = Builder()
    scope: Scope = {}
    inputs = []
    for value in graph.inputs:
        shape = b.checked_shape(value.shape, f"input '{value.name}'")  # type: ignore[arg-type]
        tensor = Tensor(b.unique(value.name), shape, value.dtype)
        scope[value.name] = tensor
        inputs.append(tensor)
    try:
        outputs = _outputs(b, graph, _lower_nodes(b, graph, scope, {}), inputs)
    except UndecidedError as error:
        names = {t: v.name for t, v in zip(inputs, graph.inputs, strict=True)}
        raise UndecidedError(str(error), error.tensor, _deciding(b, error.tensor, names)) from error
    program = Program(
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        computes=tuple(b.computes),
        constants=b.constants,
        input_names=tuple(v.name for v in graph.inputs),
        output_names=graph.outputs,
    )
    return without_dead(program)


def _lower_nodes(b: Builder, graph: Graph, scope: Scope, outer: Mapping[str, np.ndarray]) -> list[Tensor]:
    """Lower the nodes of a graph, or of a body inside one, into `scope`; gives the graph's outputs."""
    constants = {**outer, **graph.constants}
    for name in graph.constants:
        scope.pop(name, None)  # a body's own constant hides an outer tensor of the same name
    for node in _alive(graph):
        _lower_node(b, node, scope, constants)
    return [_named(b, scope, constants, name) for name in graph.outputs]


def _alive(graph: Graph) -> list[Node]:
    """Nodes that an output depends on, in order."""
    wanted = set(graph.outputs)
    kept = []
    for node in reversed(graph.nodes):
        if not wanted.isdisjoint(o for o in node.outputs if o):
            kept.append(node)
            wanted.update(node.inputs)
            wanted.update(*(_captured(g) for g in _branches(node)))
    return kept[::-1]


def _deciding(b: Builder, tensor: object, names: Mapping[Tensor, str]) -> tuple[str, ...]:
    """The model's inputs that a tensor is made of, by name."""
    makers = {t: compute for compute in b.computes for t in compute.outputs}
    seen: dict[object, None] = {}
    waiting = [tensor]
    while waiting:
        found = waiting.pop()
        if found not in seen:
            seen[found] = None
            waiting += reads(makers[found]) if found in makers else ()
    return tuple(name for t, name in names.items() if t in seen)


def _branches(node: Node) -> list[Graph]:
    return [v for v in node.attributes.values() if isinstance(v, Graph)]


def _captured(graph: Graph) -> set[str]:
    """Names a branch takes from the graph around it (and some of its own, which does no harm)."""
    names = set(graph.outputs)
    for node in graph.nodes:
        names.update(node.inputs)
        names.update(*(_captured(g) for g in _branches(node)))
    return names


def _lower_node(b: Builder, node: Node, scope: Scope, constants: Mapping[str, np.ndarray]) -> None:
    b.enter(node)
    arguments = [_named(b, scope, constants, name) if name else None for name in node.inputs]
    entry = find(node.op, node.domain, node.version)
    is_control = node.op in control.NAMES and not node.domain
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


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def _named(b: Builder, scope: Scope, constants: Mapping[str, np.ndarray], name: str) -> Any:
    """A tensor or a sequence of them."""
    if name not in scope:
        if name not in constants:
            raise ModelError(
                f"{b.origin or 'output'}: its input '{name}' is not defined by any node, input or initializer"
            )
        scope[name] = b.constant(constants[name], name=name)
    return scope[name]


def _outputs(b: Builder, graph: Graph, results: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Output tensors: each made by a compute of its own, so inputs, constants and repeats are copied."""
    outputs: list[Tensor] = []
    for name, tensor in zip(graph.outputs, results, strict=True):
        if isinstance(tensor, Sequence):
            raise UnsupportedError(f"output '{name}' is a sequence; only tensors are supported")
        declared = graph.values.get(name)
        if declared is not None and declared.dtype is not tensor.dtype:
            raise ModelError(f"output '{name}' is declared as {declared.dtype.name}, but is {tensor.dtype.name}")
        if tensor in inputs or tensor in b.constants or tensor in outputs:
            b.enter(Node("Identity", "", (name,), (name,)))
            # straight to the list: emit would fold the copy of a constant away
            copy = b.map_compute("output", dims(tensor), lambda *i, t=tensor: b.read(t, i))
            b.computes.append(copy)
            tensor = copy.output
        outputs.append(tensor)
    return outputs
