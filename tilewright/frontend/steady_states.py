"""States of loops that no step changes, as what the body reads of the graph around it: weights are constants then."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from tilewright.ir.forms.graph import Graph, Node

_T = TypeVar("_T")
_LEADING = 2  # inputs of a loop and of its body in front of the states


def without_steady_states(graph: Graph) -> Graph:
    """The Graph with such states taken out of its loops, those inside bodies too."""
    nodes = [made for node in graph.nodes for made in _lightened(_with_bodies(node))]
    return replace(graph, nodes=tuple(nodes))


def _with_bodies(node: Node) -> Node:
    attributes = {n: without_steady_states(a) if isinstance(a, Graph) else a for n, a in node.attributes.items()}
    return replace(node, attributes=attributes)


def _lightened(node: Node) -> list[Node]:
    """A node; of a loop what gives its steady states, and the loop with the other ones."""
    body = node.attributes.get("body")
    if node.op != "Loop" or node.domain or not isinstance(body, Graph):
        return [node]
    states = len(node.inputs) - _LEADING
    fits = len(body.inputs) == len(node.inputs) and len(body.outputs) == len(node.outputs) + 1 > states
    steady = [k for k in range(states) if _is_steady(node, body, k)] if fits else []
    if not steady:
        return [node]
    given = {k: node.inputs[_LEADING + k] for k in steady}
    named = [_same(node, given[k], body.inputs[_LEADING + k].name) for k in steady]
    handed = [_same(node, given[k], node.outputs[k]) for k in steady if node.outputs[k]]
    lighter = replace(
        body,
        inputs=_without(body.inputs, {_LEADING + k for k in steady}),
        outputs=_without(body.outputs, {1 + k for k in steady}),
        nodes=(*(n for n in named if n.inputs != n.outputs), *body.nodes),
    )
    rest = replace(
        node,
        name=node.name or next(o for o in node.outputs if o),  # what messages call it
        inputs=_without(node.inputs, {_LEADING + k for k in steady}),
        outputs=_without(node.outputs, set(steady)),
        attributes={**node.attributes, "body": lighter},
    )
    return [*handed, rest] if any(rest.outputs) else handed


def _is_steady(node: Node, body: Graph, state: int) -> bool:
    """Whether a step hands a state on as it was, and the body has no other value by the name it has outside."""
    given, inside = node.inputs[_LEADING + state], body.inputs[_LEADING + state].name
    same = {inside}
    for each in body.nodes:
        if each.op == "Identity" and not each.domain and not same.isdisjoint(each.inputs):
            same.update(each.outputs)
    made = {name for each in body.nodes for name in each.outputs}
    others = {value.name for value in body.inputs} - {inside} | body.constants.keys() | made
    return bool(given) and body.outputs[1 + state] in same and given not in others


def _same(node: Node, name: str, output: str) -> Node:
    return replace(node, op="Identity", name="", inputs=(name,), outputs=(output,), attributes={})


def _without(items: tuple[_T, ...], places: set[int]) -> tuple[_T, ...]:
    return tuple(item for k, item in enumerate(items) if k not in places)
