"""Modules of PyTorch to Graphs by torch.export: what is read, what comes out, and what the module changes in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import fx
from torch.utils import _pytree as pytree

from tilewright.errors import ModelError, UnsupportedError
from tilewright.frontend.higher_order import UncountedError
from tilewright.frontend.tensors import constant_of
from tilewright.frontend.torch import Parts, decompositions, make_graph
from tilewright.ir.graph import Graph


@dataclass(frozen=True)
class Place:
    """Where a tensor comes from or goes to: a leaf of the call's arguments, a result of the Graph, a tensor that the
    module holds, or a plain value."""

    kind: Literal["leaf", "result", "tensor", "value"]
    what: Any


@dataclass(frozen=True)
class Cut:
    """A functional module with a loop that data end, which no Graph has: a function of all its placeholders, that gives
    the results. `tensors` and `arrays` are of those whose values are known, by their place and as they stand there."""

    module: fx.GraphModule
    tensors: Mapping[int, torch.Tensor]
    arrays: Mapping[fx.Node, np.ndarray]
    inputs: tuple[int, ...]  # places of the others


@dataclass(frozen=True)
class Exported:
    """A module for arguments of certain shapes: a Graph, or what has to be cut into several."""

    graph: Graph | Cut
    inputs: tuple[Place, ...]  # of the Graph
    outputs: tuple[Place, ...]  # leaves of what the module returns
    structure: Any  # of what it returns
    changes: tuple[tuple[Place, int], ...]  # tensors that the module changes in place, and the results that they get
    constants: tuple[torch.Tensor, ...]  # parameters whose values are in the Graph


def export(module: torch.nn.Module, args: Sequence[Any], named: Mapping[str, Any]) -> Exported:
    """The module as it runs on arguments like these."""
    try:
        with torch.no_grad():
            given, by_name = _distinct(tuple(args), dict(named))
            program = torch.export.export(module, given, by_name, strict=False)
            program = program.run_decompositions(decompositions())
            program.graph.eliminate_dead_code()
    except (
        RuntimeError,
        TypeError,
        ValueError,
        AssertionError,
        NotImplementedError,
        AttributeError,
        KeyError,
    ) as error:
        # whatever the module's own code or the exporter raises
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"torch.export cannot follow {type(module).__name__}: {type(error).__name__}: {reason}"
        ) from error
    return _read(module, program)


def _distinct(args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """The same arguments, a tensor that is there twice as two: for the exporter they would be one input."""
    seen: set[int] = set()

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        again = id(leaf) in seen
        seen.add(id(leaf))
        return leaf.detach().clone() if again else leaf

    return pytree.tree_map(own, (args, named))


def _read(module: torch.nn.Module, program: torch.export.ExportedProgram) -> Exported:
    from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind

    signature = program.graph_signature
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    changed = {s.target for s in signature.output_specs if s.kind is OutputKind.BUFFER_MUTATION}
    leaf = 0
    places: dict[fx.Node, Place] = {}
    inputs: list[fx.Node] = []
    constants: dict[fx.Node, torch.Tensor] = {}
    for node, spec in zip(placeholders, signature.input_specs, strict=True):
        if spec.kind is InputKind.USER_INPUT:
            places[node] = Place("leaf", leaf)
            leaf += 1
            if node.users and not isinstance(spec.arg, ConstantArgument):
                inputs.append(node)
            continue
        if spec.kind in (InputKind.CUSTOM_OBJ, InputKind.TOKEN) or spec.target is None:
            raise UnsupportedError(f"the module holds '{spec.target or spec.arg.name}', which is no tensor")
        tensor = _held(module, program, spec.target)
        places[node] = Place("tensor", tensor)
        if not node.users:
            continue
        if spec.target in changed:
            inputs.append(node)
        else:
            constants[node] = tensor
    results: list[fx.Node] = []
    outputs: list[Place] = []
    changes: list[tuple[Place, int]] = []
    returned = next(n for n in program.graph.nodes if n.op == "output").args[0]
    for node, spec in zip(returned, signature.output_specs, strict=True):
        if spec.kind is OutputKind.USER_OUTPUT:
            if not isinstance(node, fx.Node):
                outputs.append(Place("value", node))
            elif node in places:
                outputs.append(places[node])  # the very tensor that went in
            else:
                outputs.append(Place("result", _place(results, node)))
        elif spec.kind is OutputKind.BUFFER_MUTATION:
            changes.append((Place("tensor", _held(module, program, spec.target or "")), _place(results, node)))
        elif spec.kind is OutputKind.USER_INPUT_MUTATION:
            source = next(n for n in placeholders if n.name == spec.target)
            changes.append((places[source], _place(results, node)))
        else:
            raise UnsupportedError(f"an output of kind {spec.kind.name.lower()} is not supported; export for inference")
    nodes = [n for n in program.graph.nodes if n.op not in ("placeholder", "output")]
    arrays = {node: constant_of(tensor, node.name) for node, tensor in constants.items()}
    graph: Graph | Cut
    try:
        graph = make_graph(Parts(nodes, inputs, results, arrays), type(module).__name__)
    except UncountedError:
        next(n for n in program.graph.nodes if n.op == "output").args = (tuple(results),)
        program.graph_module.recompile()
        tensors = {placeholders.index(n): tensor.detach() for n, tensor in constants.items()}
        graph = Cut(program.graph_module, tensors, arrays, tuple(placeholders.index(n) for n in inputs))
    return Exported(graph, tuple(places[n] for n in inputs), tuple(outputs), program.call_spec.out_spec,
                    tuple(changes), tuple(constants.values()))  # fmt: skip


def _held(module: torch.nn.Module, program: torch.export.ExportedProgram, name: str) -> torch.Tensor:
    """The module's own tensor of a name, or one that the exporter found in its code."""
    if name in program.state_dict or name in program.constants:
        path, _, last = name.rpartition(".")
        try:
            found = getattr(module.get_submodule(path), last, None)
        except AttributeError:
            found = None
        tensor = found if isinstance(found, torch.Tensor) else program.state_dict.get(name, program.constants.get(name))
        if isinstance(tensor, torch.Tensor):
            return tensor
    raise UnsupportedError(f"the module holds '{name}', which is no tensor")


def _place(results: list[fx.Node], node: fx.Node) -> int:
    if node not in results:
        results.append(node)
    return results.index(node)
