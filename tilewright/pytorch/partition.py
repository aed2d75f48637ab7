"""An fx graph with its covered parts compiled, and the rest left to PyTorch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from tilewright.errors import UnsupportedError
from tilewright.frontend.torch import Parts, is_branch, is_check, make_graph, uncovered, why_uncovered
from tilewright.pytorch.calls import Build, TensorCall

Run = Callable[[Sequence[Any]], Sequence[Any]]
Constants = Mapping[fx.Node, np.ndarray]


class _Support(OperatorSupportBase):
    def __init__(self, refused: set[fx.Node]) -> None:
        self._refused = refused

    def is_node_supported(self, submodules: Mapping[str, torch.nn.Module], node: fx.Node) -> bool:
        return node.op == "call_function" and node not in self._refused


def compile_parts(
    module: fx.GraphModule, constants: Constants, build: Build, tell: Callable[[Mapping[str, Sequence[fx.Node]]], None]
) -> Run:
    """A function of what the placeholders of `module` stand for. `constants` are the values of some of them, which are
    compiled in. `tell` hears what is left to PyTorch."""
    nodes = [n for n in module.graph.nodes if n.op not in ("placeholder", "output")]
    missing = uncovered(nodes)
    if not missing:
        try:
            return _whole(module, constants, build)
        except UnsupportedError:
            missing = _alone(nodes, build)
    tell(missing)
    refused = {n for found in missing.values() for n in found} | {n for n in nodes if is_branch(n)}
    # what takes one result of a call that is left out has nothing to stand on
    refused |= {n for n in nodes if n.target is operator.getitem and n.args[0] in refused}
    return _mixed(module, constants, refused, build)


def _alone(nodes: Sequence[fx.Node], build: Build) -> dict[str, list[fx.Node]]:
    """Calls that have a row but no machine code: each is tried by itself."""
    found: dict[str, list[fx.Node]] = {}
    seen: dict[Any, str | None] = {}
    for node in nodes:
        if node.op == "get_attr" or is_check(node) or is_branch(node) or node.target is operator.getitem:
            continue
        key = (str(node.target), *(str(n.meta.get("val")) for n in node.all_input_nodes), str(node.kwargs))
        if key not in seen:
            seen[key] = _why_no_code(node, build)
        reason = seen[key]
        if reason is not None:
            found.setdefault(reason, []).append(node)
    return found


def _why_no_code(node: fx.Node, build: Build) -> str | None:
    parts = [u for u in node.users if u.target is operator.getitem and why_uncovered(u) is None]
    outputs = parts or ([node] if isinstance(node.meta.get("val"), torch.Tensor) else [])
    inputs = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    try:
        build(make_graph(Parts([node, *parts], inputs, outputs, {})))
    except UnsupportedError as error:
        return str(error)
    return None


def _outputs(module: fx.GraphModule) -> list[Any]:
    return list(next(n for n in module.graph.nodes if n.op == "output").args[0])


def _whole(module: fx.GraphModule, constants: Constants, build: Build) -> Run:
    """All of it as one model."""
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    nodes = [n for n in module.graph.nodes if n.op not in ("placeholder", "output")]
    returned = _outputs(module)
    results = list(dict.fromkeys(n for n in returned if isinstance(n, fx.Node) and n not in placeholders))
    inputs = [n for n in placeholders if n.users.keys() - {_output(module)} and n not in constants]
    if not results:
        return lambda args: [args[placeholders.index(n)] if isinstance(n, fx.Node) else n for n in returned]
    used = {n: array for n, array in constants.items() if n.users}
    compiled = TensorCall(build(make_graph(Parts(nodes, inputs, results, used))))
    places = [placeholders.index(n) for n in inputs]
    if returned == results:
        return lambda args: compiled([args[p] for p in places])

    def call(args: Sequence[Any]) -> list[Any]:
        found = dict(zip(results, compiled([args[p] for p in places]), strict=True))
        given = dict(zip(placeholders, args, strict=True))
        return [found.get(n, given.get(n)) if isinstance(n, fx.Node) else n for n in returned]

    return call


def _output(module: fx.GraphModule) -> fx.Node:
    return next(n for n in module.graph.nodes if n.op == "output")


class _Part(torch.nn.Module):
    """A compiled part in the place of the nodes it stands for."""

    def __init__(self, call: TensorCall, places: Sequence[int], single: bool) -> None:
        super().__init__()
        self.call, self.places, self.single = call, places, single

    def forward(self, *args: Any) -> Any:
        results = self.call([args[p] for p in self.places])
        return results[0] if self.single else results


def _mixed(module: fx.GraphModule, constants: Constants, refused: set[fx.Node], build: Build) -> Run:
    values = {n.name: array for n, array in constants.items()}
    partitioner = CapabilityBasedPartitioner(module, _Support(refused), allows_single_node_partition=True)
    fused = partitioner.fuse_partitions(partitioner.propose_partitions())
    for node in list(fused.graph.nodes):
        if node.op == "call_module":
            part = fused.get_submodule(str(node.target))
            assert isinstance(part, fx.GraphModule)
            compiled = _part(node, part, values, build)
            if compiled is not None:
                fused.set_submodule(str(node.target), compiled)
        elif node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default  # what we return is contiguous, whatever PyTorch expects
    fused.recompile()
    return lambda args: fused(*args)


def _part(call: fx.Node, part: fx.GraphModule, values: Mapping[str, np.ndarray], build: Build) -> _Part | None:
    """One part compiled; None where it is not worth it, or has no code after all, and PyTorch keeps it."""
    placeholders = [n for n in part.graph.nodes if n.op == "placeholder"]
    nodes = [n for n in part.graph.nodes if n.op not in ("placeholder", "output")]
    if all(_moves_only(n) for n in nodes):
        return None
    returned = next(n for n in part.graph.nodes if n.op == "output").args[0]
    single = isinstance(returned, fx.Node)
    results = [returned] if single else list(returned)
    constants = {}
    for own, outer in zip(placeholders, call.args, strict=True):
        assert isinstance(outer, fx.Node)
        own.meta.setdefault("val", outer.meta.get("val"))
        if outer.name in values:
            constants[own] = values[outer.name]
    if len(set(results)) != len(results) or any(n in placeholders for n in results):
        return None
    inputs = [n for n in placeholders if n not in constants]
    try:
        model = build(make_graph(Parts(nodes, inputs, results, constants)))
    except UnsupportedError:
        return None
    return _Part(TensorCall(model), [placeholders.index(n) for n in inputs], single)


_MOVES = ("aten.view", "aten.reshape", "aten.permute", "aten.transpose", "aten.t", "aten.expand", "aten.unsqueeze",
          "aten.squeeze", "aten.slice", "aten.select", "aten.clone", "aten.alias", "aten.detach", "aten._unsafe_view",
          "aten.full", "aten.arange", "aten.scalar_tensor", "aten.split_with_sizes", "aten.unbind")  # fmt: skip


def _moves_only(node: fx.Node) -> bool:
    """Views, which cost PyTorch nothing and would cost us a copy."""
    return node.target is operator.getitem or str(node.target).rpartition(".")[0] in _MOVES
