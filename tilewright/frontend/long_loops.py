"""Loops of very many steps as loops of loops, for targets whose driver follows no loops: the inner ones become native
code in one piece, the outer one runs them step by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from tilewright.ir.forms.budget import MOST_IN_A_LOOP
from tilewright.ir.forms.graph import Graph, Node

_PIECE = 1 << 12  # steps of an inner loop
_OLDEST = 11  # version of ONNX's operators from which on those used here take what they are given as inputs
_MARK = "\x01"  # in names that are made here; no exporter writes it


def in_pieces(graph: Graph) -> Graph:
    """The Graph with such loops cut; what ends by its data, or is short enough, stays."""
    constants = dict(graph.constants)
    nodes: list[Node] = []
    for node in graph.nodes:
        count = _steps(node, graph.constants)
        nodes += [node] if count is None else _cut(node, count, constants)
    return graph if len(nodes) == len(graph.nodes) else replace(graph, nodes=tuple(nodes), constants=constants)


def _steps(node: Node, constants: Mapping[str, np.ndarray]) -> int | None:
    """The trip count of a loop that is long and makes all its steps; None of any other node."""
    if node.op != "Loop" or node.domain or node.version < _OLDEST or len(node.inputs) < 2:
        return None
    body, limit = node.attributes.get("body"), constants.get(node.inputs[0])
    if not isinstance(body, Graph) or limit is None or limit.size != 1 or limit.dtype.kind != "i":
        return None
    if node.inputs[1] and not _is_true(constants.get(node.inputs[1])):
        return None
    if len(body.inputs) != len(node.inputs) or len(body.outputs) != len(node.outputs) + 1 or not all(node.inputs[2:]):
        return None
    makers = {name: n for n in body.nodes for name in n.outputs}
    goes_on = body.outputs[0]
    while goes_on in makers and makers[goes_on].op == "Identity":
        goes_on = makers[goes_on].inputs[0]
    settled = goes_on == body.inputs[1].name or _is_true(body.constants.get(goes_on, constants.get(goes_on)))
    count = int(limit.reshape(()))
    return count if settled and count > MOST_IN_A_LOOP else None


def _is_true(value: np.ndarray | None) -> bool:
    return value is not None and value.dtype == np.bool_ and bool(value.all())


def _cut(node: Node, count: int, constants: dict[str, np.ndarray]) -> list[Node]:
    """The loop over pieces, what is left over, and their stacks one behind the other."""
    body: Graph = node.attributes["body"]
    node = replace(node, name=node.name or next(o for o in node.outputs if o))  # what messages call it
    whole, rest = divmod(count, _PIECE)
    base = f"{next(o for o in node.outputs if o)}{_MARK}"
    numbers: dict[str, int | list[int]] = {"piece": _PIECE, "pieces": whole, "rest": rest, "done": whole * _PIECE}
    numbers |= {"total": [whole * _PIECE], "two": [2], "end": [int(np.iinfo(np.int64).max)]}
    constants |= {base + name: np.array(number, np.int64) for name, number in numbers.items()}
    carried = len(node.inputs) - 2
    states = [f"{base}state{k}" for k in range(carried)]
    stacks = [f"{base}stack{k}" for k in range(len(node.outputs) - carried)]

    def plain(op: str, inputs: list[str], output: str, **attributes: object) -> Node:
        return replace(node, op=op, name="", inputs=tuple(inputs), outputs=(output,), attributes=attributes)

    def steps_from(first: str) -> Graph:
        """The body, whose steps are counted from a number on."""
        number = replace(body.inputs[0], name=f"{base}inner")
        counted = plain("Add", [first, number.name], body.inputs[0].name)
        return replace(body, inputs=(number, *body.inputs[1:]), nodes=(counted, *body.nodes))

    outer = [f"{base}number", f"{base}goes_on", *(f"{base}in{k}" for k in range(carried))]
    given = tuple(replace(value, name=name) for value, name in zip(body.inputs, outer, strict=True))
    made = [f"{base}out{k}" for k in range(len(node.outputs))]
    inner = replace(node, inputs=(f"{base}piece", "", *outer[2:]), outputs=tuple(made),
                    attributes={"body": steps_from(f"{base}first")})  # fmt: skip
    pieces = Graph(body.name, given, (f"{base}still", *made), (
        plain("Mul", [outer[0], f"{base}piece"], f"{base}first"), inner, plain("Identity", [outer[1]], f"{base}still"),
    ), {})  # fmt: skip
    nodes = [replace(node, inputs=(f"{base}pieces", "", *node.inputs[2:]), outputs=(*states, *stacks),
                     attributes={"body": pieces})]  # fmt: skip
    ends = [f"{base}end{k}" for k in range(len(stacks))]
    nodes.append(replace(node, inputs=(f"{base}rest", "", *states), outputs=(*node.outputs[:carried], *ends),
                         attributes={"body": steps_from(f"{base}done")}))  # fmt: skip
    for stack, end, result in zip(stacks, ends, node.outputs[carried:], strict=True):
        nodes += [
            plain("Shape", [stack], f"{stack}.shape"),
            plain("Slice", [f"{stack}.shape", f"{base}two", f"{base}end"], f"{stack}.row"),
            plain("Concat", [f"{base}total", f"{stack}.row"], f"{stack}.all", axis=0),
            plain("Reshape", [stack, f"{stack}.all"], f"{stack}.rows"),
            plain("Concat", [f"{stack}.rows", end], result or f"{stack}.unused", axis=0),
        ]
    return nodes
