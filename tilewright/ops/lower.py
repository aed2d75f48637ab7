"""Graph to Program: every node through its registered function, in order; what nobody reads is dropped at the end."""

from __future__ import annotations

from tilewright.errors import ModelError, UnsupportedError
from tilewright.ir.compute import Program, reads
from tilewright.ir.graph import Graph, Node
from tilewright.ir.tensor import Tensor
from tilewright.ops.builder import Builder, dims
from tilewright.ops.registry import find


def lower(graph: Graph) -> Program:
    """The tensor expressions of a Graph, shape computations and other constants already evaluated."""
    b = Builder()
    scope: dict[str, Tensor] = {}
    inputs = []
    for value in graph.inputs:
        tensor = Tensor(b.unique(value.name), value.shape, value.dtype)
        scope[value.name] = tensor
        inputs.append(tensor)
    _lower_nodes(b, graph, scope)
    outputs = _outputs(b, graph, scope, inputs)
    program = Program(
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        computes=tuple(b.computes),
        constants=b.constants,
        input_names=tuple(v.name for v in graph.inputs),
        output_names=graph.outputs,
    )
    return without_dead(program)


def _lower_nodes(b: Builder, graph: Graph, scope: dict[str, Tensor]) -> None:
    """Lower the nodes of a graph (or of a branch that is always taken) into `scope`."""
    for node in _alive(graph):
        _lower_node(b, graph, node, scope)
    for name in graph.outputs:
        if name in graph.constants and name not in scope:
            scope[name] = b.constant(graph.constants[name], name=name)


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


def _branches(node: Node) -> list[Graph]:
    return [v for v in node.attributes.values() if isinstance(v, Graph)]


def _captured(graph: Graph) -> set[str]:
    """Names a branch takes from the graph around it (and some of its own, which does no harm)."""
    names = set(graph.outputs)
    for node in graph.nodes:
        names.update(node.inputs)
        names.update(*(_captured(g) for g in _branches(node)))
    return names


def _lower_node(b: Builder, graph: Graph, node: Node, scope: dict[str, Tensor]) -> None:
    b.enter(node)
    arguments = [_argument(b, graph, scope, name) for name in node.inputs]
    if node.op == "If" and not node.domain:
        results = _lower_if(b, node, arguments, scope)
    else:
        entry = find(node.op, node.domain, node.version)
        if entry is None:
            raise UnsupportedError(
                f"{node.describe()}: operator {node.op} of operator set {node.domain or 'ai.onnx'} {node.version} is "
                f"not supported; replace it in the model by supported operators (tilewright.ops.supported() lists them)"
            )
        found = entry.lower(b, node, *arguments)
        results = found if isinstance(found, tuple) else (found,)
    for name, tensor in zip(node.outputs, results, strict=False):
        if name and tensor is not None:
            scope[name] = tensor
    missing = [o for o in node.outputs if o and o not in scope]
    if missing:
        raise UnsupportedError(f"{node.describe()}: its output '{missing[0]}' is not supported; drop it from the model")


def _argument(b: Builder, graph: Graph, scope: dict[str, Tensor], name: str) -> Tensor | None:
    if not name:
        return None
    if name not in scope:
        if name not in graph.constants:
            raise ModelError(f"{b.origin}: its input '{name}' is not defined by any node, input or initializer")
        scope[name] = b.constant(graph.constants[name], name=name)
    return scope[name]


def _lower_if(
    b: Builder, node: Node, arguments: list[Tensor | None], scope: dict[str, Tensor]
) -> tuple[Tensor | None, ...]:
    """A branch that is chosen while compiling becomes part of the model."""
    condition = b.value(arguments[0])
    if condition is None:
        raise b.unsupported("a condition known only at run time is not supported; export without data-dependent control")
    branch = node.attributes["then_branch" if condition.all() else "else_branch"]
    inner = dict(scope)
    _lower_nodes(b, branch, inner)
    return tuple(inner.get(name) for name in branch.outputs)


def _outputs(b: Builder, graph: Graph, scope: dict[str, Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Output tensors: each made by a compute of its own, so inputs, constants and repeats are copied."""
    outputs: list[Tensor] = []
    for name in graph.outputs:
        if name not in scope:
            raise ModelError(f"output '{name}' is not defined by any node, input or initializer")
        tensor = scope[name]
        if tensor in inputs or tensor in b.constants or tensor in outputs:
            b.enter(Node("Identity", "", (name,), (name,)))
            # straight to the list: emit would fold the copy of a constant away
            copy = b.map_compute("output", dims(tensor), lambda *i, t=tensor: b.read(t, i))
            b.computes.append(copy)
            tensor = copy.output
        outputs.append(tensor)
    return outputs


def without_dead(program: Program) -> Program:
    """The same Program without computes and constants that no output depends on."""
    wanted = set(program.outputs)
    kept = []
    for compute in reversed(program.computes):
        if not wanted.isdisjoint(compute.outputs):
            kept.append(compute)
            wanted.update(reads(compute))
    return Program(
        inputs=program.inputs,
        outputs=program.outputs,
        computes=tuple(reversed(kept)),
        constants={t: a for t, a in program.constants.items() if t in wanted},
        layouts=program.layouts,
        input_names=program.input_names,
        output_names=program.output_names,
    )
