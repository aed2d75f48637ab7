"""ONNX's own operator cases as machine code: one case an operator in the quick run, all of them with --all.

The quick run puts some tens of cases side by side into one model: a model is linked and loaded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.cpu_stages import CPU, lowered, run_native
from tests.ops.backend_cases import Case, cases
from tests.ops.test_backend import compare
from tilewright import ops
from tilewright.errors import UnsupportedError
from tilewright.frontend.onnx import model as frontend
from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.graph import Graph, Node, Value
from tilewright.target import Target
from tilewright.transform.clean.fold import fold_constants
from tilewright.transform.layout.choose import choose_layouts
from tilewright.transform.layout.staging import stage_operands

BATCHES = 6
MOST_ELEMENTS = 5000


@cache
def representatives() -> tuple[str, ...]:
    """For every operator the largest of its cases that consist of it alone."""
    best: dict[str, tuple[int, str]] = {}
    for name, case in sorted(cases().items()):
        if len(case.model.graph.node) != 1 or not case.inputs:
            continue
        size = sum(a.size for a in (*case.inputs.values(), *case.outputs.values()))
        operator = case.model.graph.node[0].op_type
        if size <= MOST_ELEMENTS and size > best.get(operator, (0, ""))[0]:
            best[operator] = (size, name)
    return tuple(sorted(name for _, name in best.values()))


def graph_of(case: Case) -> Graph:
    return frontend.load(case.model, {n: a.shape for n, a in case.inputs.items()})


def program_of(graph: Graph, target: Target = CPU) -> Program:
    return choose_layouts(stage_operands(fold_constants(ops.lower(graph)), target), target)


def prefixed(graph: Graph, prefix: str) -> Graph:
    """The graph with `prefix` in front of every name, those in its branches included."""

    def own(name: str) -> str:
        return f"{prefix}.{name}" if name else ""

    def inner(value: object) -> object:
        return prefixed(value, prefix) if isinstance(value, Graph) else value

    nodes = [
        replace(
            n,
            inputs=tuple(map(own, n.inputs)),
            outputs=tuple(map(own, n.outputs)),
            attributes={k: inner(v) for k, v in n.attributes.items()},
        )
        for n in graph.nodes
    ]
    return Graph(
        graph.name,
        tuple(replace(v, name=own(v.name)) for v in graph.inputs),
        tuple(map(own, graph.outputs)),
        tuple(nodes),
        {own(n): a for n, a in graph.constants.items()},
        {own(n): replace(v, name=own(v.name)) for n, v in graph.values.items()},
    )


def side_by_side(graphs: Mapping[str, Graph]) -> Graph:
    """All graphs as one; every name gets its graph's name in front."""
    inputs: list[Value] = []
    outputs: list[str] = []
    nodes: list[Node] = []
    constants: dict[str, np.ndarray] = {}
    for prefix, graph in graphs.items():
        part = prefixed(graph, prefix)
        inputs += part.inputs
        outputs += part.outputs
        nodes += part.nodes
        constants |= part.constants
    return Graph("side by side", tuple(inputs), tuple(outputs), tuple(nodes), constants)


def native(graph: Graph, inputs: Mapping[str, np.ndarray], kernel_cache: Path) -> dict[str, np.ndarray]:
    program = program_of(graph)
    return run_native(lowered(program).compiled(kernel_cache), program, inputs)


def unsupported(graph: Graph, target: Target = CPU) -> str | None:
    """Why this graph has no machine code yet: it needs a kind of compute that is not compiled."""
    try:
        lowered(program_of(graph, target), target=target)
    except UnsupportedError as error:
        if "not compiled yet" not in str(error):
            raise
        return str(error).split(": ", 1)[1]
    return None


@pytest.mark.sample(2)
@pytest.mark.parametrize("batch", range(BATCHES))
def test_one_case_an_operator(batch: int, kernel_cache: Path) -> None:
    chosen = {name: cases()[name] for name in representatives()[batch::BATCHES]}
    graphs = {name: graph_of(case) for name, case in chosen.items()}
    graphs = {name: graph for name, graph in graphs.items() if unsupported(graph) is None}
    assert len(graphs) > 15
    given = {f"{name}.{n}": a for name in graphs for n, a in chosen[name].inputs.items()}
    found = native(side_by_side(graphs), given, kernel_cache)
    wrong = []
    for name in graphs:
        case = chosen[name]
        try:
            compare({n: found[f"{name}.{n}"] for n in case.outputs}, case.outputs, case.rtol, case.atol)
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.part(12)
@pytest.mark.parametrize("name", sorted(cases()))
def test_every_case(name: str, kernel_cache: Path) -> None:
    case = cases()[name]
    graph = graph_of(case)
    if reason := unsupported(graph):
        pytest.skip(reason)
    compare(native(graph, case.inputs, kernel_cache), case.outputs, case.rtol, case.atol)
