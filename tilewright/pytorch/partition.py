"""An fx graph with its covered parts compiled, and the rest left to PyTorch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from tilewright.errors import UnsupportedError
from tilewright.frontend.pytorch.aliases import laid_out, shared_outputs
from tilewright.frontend.pytorch.fx import FxParts, is_check, make_graph, uncovered, why_uncovered
from tilewright.frontend.pytorch.higher_order import is_control, is_loop, operands, returned
from tilewright.ir.forms.graph import Graph
from tilewright.pytorch.calls import Build, TensorCall

Run = Callable[[Sequence[Any]], Sequence[Any]]
Constants = Mapping[fx.Node, np.ndarray]
Tell = Callable[[Mapping[str, Sequence[fx.Node]]], None]


class _Support(OperatorSupportBase):
    def __init__(self, refused: set[fx.Node]) -> None:
        self._refused = refused

    def is_node_supported(self, submodules: Mapping[str, torch.nn.Module], node: fx.Node) -> bool:
        return node.op == "call_function" and node not in self._refused


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph in nodes of its own, for what changes it."""
    graph = fx.Graph()
    returned: Any = graph.graph_copy(module.graph, {}, return_output_node=True)
    value, output = returned
    graph.output(value).meta.update(output.meta)
    return fx.GraphModule(module, graph)


def compile_parts(module: fx.GraphModule, constants: Constants, build: Build, tell: Tell) -> Run:
    """A function of what the placeholders of `module` stand for, which is changed on the way. `constants` are the
    values of some of them, which are compiled in. `tell` hears what is left to PyTorch."""
    wanted = returned(module)
    views = shared_outputs(wanted)
    if not views:
        return _compiled(module, constants, build, tell)
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    bases = list(dict.fromkeys(views[n].base if n in views else n for n in wanted if isinstance(n, fx.Node)))
    own = {n: n.meta["val"] for n in bases if n not in placeholders and any(v.base is n for v in views.values())}
    _output(module).args = (tuple(bases),)
    module.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    run = _compiled(module, constants, build, tell)

    def call(args: Sequence[Any]) -> list[Any]:
        found = dict(zip(bases, run(args), strict=True))
        for node, like in own.items():
            found[node] = laid_out(found[node], like)
        return [views[n].of(found[views[n].base]) if n in views else found.get(n, n) for n in wanted]

    return call


def _compiled(module: fx.GraphModule, constants: Constants, build: Build, tell: Tell) -> Run:
    nodes = [n for n in module.graph.nodes if n.op not in ("placeholder", "output")]
    missing = uncovered(nodes)
    if not missing:
        try:
            return _whole(module, constants, build)
        except UnsupportedError:
            missing = _alone(nodes, build)
    if missing:
        tell(missing)
    refused = {n for found in missing.values() for n in found}
    # what takes one result of a call that is left out has nothing to stand on
    apart = refused | {n for n in nodes if is_control(n)}
    apart |= {n for n in nodes if n.target is operator.getitem and n.args[0] in apart}
    controls = {n.name for n in nodes if is_control(n) and n not in refused}
    return _mixed(module, constants, apart, controls, build)


def _alone(nodes: Sequence[fx.Node], build: Build) -> dict[str, list[fx.Node]]:
    """Calls that have a row but no machine code: each is tried by itself."""
    found: dict[str, list[fx.Node]] = {}
    seen: dict[Any, str | None] = {}
    for node in nodes:
        if node.op == "get_attr" or is_check(node) or is_control(node) or node.target is operator.getitem:
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
        build(make_graph(FxParts([node, *parts], inputs, outputs, {})))
    except UnsupportedError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class _Whole:
    """All of a module as one Graph: the places of what it takes among the placeholders, and what it gives."""

    graph: Graph
    places: list[int]
    results: list[fx.Node]


def _whole_graph(module: fx.GraphModule, constants: Constants) -> _Whole | None:
    """None where nothing is computed."""
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    nodes = [n for n in module.graph.nodes if n.op not in ("placeholder", "output")]
    results = list(dict.fromkeys(n for n in returned(module) if isinstance(n, fx.Node) and n not in placeholders))
    if not results:
        return None
    inputs = [n for n in placeholders if n.users.keys() - {_output(module)} and n not in constants]
    used = {n: array for n, array in constants.items() if n.users}
    graph = make_graph(FxParts(nodes, inputs, results, used))
    return _Whole(graph, [placeholders.index(n) for n in inputs], results)


def plain_graph(module: fx.GraphModule, constants: Constants) -> tuple[Graph, Sequence[int]]:
    """A module whose results are computed, each once and with memory of its own, as one Graph; an UnsupportedError
    where it is not."""
    found = None if shared_outputs(returned(module)) else _whole_graph(module, constants)
    if found is None or returned(module) != found.results:
        raise UnsupportedError("results are views, or not computed")
    return found.graph, found.places


def _whole(module: fx.GraphModule, constants: Constants, build: Build) -> Run:
    """All of it as one model."""
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    wanted = returned(module)
    whole = _whole_graph(module, constants)
    if whole is None:
        return lambda args: [args[placeholders.index(n)] if isinstance(n, fx.Node) else n for n in wanted]
    compiled, places, results = TensorCall(build(whole.graph)), whole.places, whole.results
    if wanted == results:
        return lambda args: compiled([args[p] for p in places])

    def call(args: Sequence[Any]) -> list[Any]:
        found = dict(zip(results, compiled([args[p] for p in places]), strict=True))
        given = dict(zip(placeholders, args, strict=True))
        return [found.get(n, given.get(n)) if isinstance(n, fx.Node) else n for n in wanted]

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


def _mixed(module: fx.GraphModule, constants: Constants, apart: set[fx.Node], controls: set[str], build: Build) -> Run:
    """Parts compiled one by one, with PyTorch in between. `apart` belong to no part; of these, `controls` are names of
    branches and loops, which are compiled by themselves."""
    values = {n.name: array for n, array in constants.items()}
    partitioner = CapabilityBasedPartitioner(module, _Support(apart), allows_single_node_partition=True)
    fused = partitioner.fuse_partitions(partitioner.propose_partitions())
    for node in list(fused.graph.nodes):
        if node.op == "call_module":
            part = fused.get_submodule(str(node.target))
            assert isinstance(part, fx.GraphModule)
            compiled = _part(node, part, values, build)
            if compiled is not None:
                fused.set_submodule(str(node.target), compiled)
        elif node.name in controls:
            _replace_control(fused, node, values, build)
        elif node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default  # what we return is contiguous, whatever PyTorch expects
    fused.graph.eliminate_dead_code()  # bodies that nothing names any more
    fused.recompile()
    return lambda args: fused(*args)


def _replace_control(fused: fx.GraphModule, node: fx.Node, values: Mapping[str, np.ndarray], build: Build) -> None:
    """A branch or a loop as a model of its own."""
    try:
        compiled = _control(node, values, build)
    except UnsupportedError:
        return
    inputs = operands(node) if is_loop(node) else [n for n in node.all_input_nodes if n.op != "get_attr"]
    name = f"tilewright_{node.name}"
    fused.add_submodule(name, compiled)
    with fused.graph.inserting_before(node):
        call = fused.graph.call_module(name, tuple(inputs))
    call.meta.update(node.meta)
    node.replace_all_uses_with(call)
    fused.graph.erase_node(node)


def _control(node: fx.Node, values: Mapping[str, np.ndarray], build: Build) -> torch.nn.Module:
    results = {u.args[1]: u for u in node.users if u.target is operator.getitem}
    inputs = operands(node) if is_loop(node) else [n for n in node.all_input_nodes if n.op != "get_attr"]
    constants = {n: values[n.name] for n in inputs if n.name in values}
    open_inputs = list(dict.fromkeys(n for n in inputs if n not in constants))
    made = make_graph(FxParts([node, *results.values()], open_inputs, list(results.values()), constants))
    return _Control(TensorCall(build(made)), [inputs.index(n) for n in open_inputs], list(results))


class _Control(torch.nn.Module):
    """A compiled branch or loop: a tuple whose `results` are there."""

    def __init__(self, call: TensorCall, places: Sequence[int], results: Sequence[Any]) -> None:
        super().__init__()
        self.call, self.places, self.results = call, places, results

    def forward(self, *args: Any) -> Any:
        return dict(zip(self.results, self.call([args[p] for p in self.places]), strict=True))


def _part(call: fx.Node, part: fx.GraphModule, values: Mapping[str, np.ndarray], build: Build) -> _Part | None:
    """One part compiled; None where it is not worth it, or has no code after all, and PyTorch keeps it."""
    placeholders = [n for n in part.graph.nodes if n.op == "placeholder"]
    nodes = [n for n in part.graph.nodes if n.op not in ("placeholder", "output")]
    if all(_moves_only(n) for n in nodes):
        return None
    single = isinstance(_output(part).args[0], fx.Node)
    results = returned(part)
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
        model = build(make_graph(FxParts(nodes, inputs, results, constants)))
    except UnsupportedError:
        return None
    return _Part(TensorCall(model), [placeholders.index(n) for n in inputs], single)


_MOVES = ("aten.view", "aten.reshape", "aten.permute", "aten.transpose", "aten.t", "aten.expand", "aten.unsqueeze",
          "aten.squeeze", "aten.slice", "aten.select", "aten.clone", "aten.alias", "aten.detach", "aten._unsafe_view",
          "aten.full", "aten.arange", "aten.scalar_tensor", "aten.split_with_sizes", "aten.unbind")  # fmt: skip


def _moves_only(node: fx.Node) -> bool:
    """Views, which cost PyTorch nothing and would cost us a copy."""
    return node.target is operator.getitem or str(node.target).rpartition(".")[0] in _MOVES
