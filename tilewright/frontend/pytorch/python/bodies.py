"""Bodies of branches and loops as graphs of their own: which tensors from around them they use, and their calls.

A body is followed by itself, which tells what it uses and gives; its graph is then written anew as a function of these
tensors. Those that share memory are one operand, of which the body makes its views."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.utils import reenter_make_fx
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    track_tensor_tree,
)
from torch.utils import _pytree as pytree

from tilewright.errors import UnsupportedError
from tilewright.frontend.pytorch import own_operators  # noqa: F401  (which are registered)
from tilewright.frontend.pytorch.python.values import Step, Values, is_data, is_numeral

_aten = torch.ops.aten
_own = torch.ops.tilewright


@dataclass(frozen=True)
class Pick:
    """A tensor among what a body gives: a leaf of what a name has, or one that is never read."""

    name: int
    leaf: int
    like: torch.Tensor  # of the type and shape that all ways give
    is_blank: bool = False
    is_final: bool = False  # no change behind it is seen through it


class Traced:
    """A body followed by itself: what it gave, and which tensors it used of those that are followed outside."""

    def __init__(self, step: Step, values: Values, where: str) -> None:
        given = [x for x in pytree.tree_leaves(values) if is_data(x)]

        def once(*_: torch.Tensor) -> Any:
            self.results = step(*values)
            return [x for x in pytree.tree_leaves(self.results) if is_data(x)]

        try:
            self._module: fx.GraphModule = reenter_make_fx(once)(*given)
        except RuntimeError as error:  # checks of a size that data tell, which PyTorch adds behind the body
            if "is not tracked with proxy" in str(error):
                raise _of_sizes(where) from error
            raise
        nodes = self._module.graph.nodes
        placeholders = [n for n in nodes if n.op == "placeholder"]
        self._sources: dict[fx.Node, torch.Tensor] = {n: x for n, x in zip(placeholders, given, strict=True) if n.users}
        for node in nodes:
            if node.op == "get_attr" and isinstance(x := _attribute(self._module, str(node.target)), torch.Tensor):
                self._sources[node] = x
        self.captured = list({id(x): x for x in self._sources.values()}.values())

    def check_sizes(self, where: str) -> None:
        """An error where data tell the size of a tensor in it."""
        check_sizes([*self.captured, *(n.meta.get("val") for n in self._module.graph.nodes)], where)

    def body(self, leading: Sequence[torch.Tensor], operands: Operands, picks: Sequence[Pick]) -> fx.GraphModule:
        """Its graph as a function of these tensors and of the operands, which gives what is picked. A number that it
        writes down is made in it: PyTorch lifts such out of the outermost graph alone."""
        graph = fx.Graph()
        known: dict[int, fx.Node] = {}
        for k, x in enumerate((*leading, *operands.roots)):
            node = graph.placeholder(f"arg{k}_1")
            node.meta["val"] = x
            known[id(x)] = node
        for root, view in operands.views:
            if id(view) not in known and any(x is view for x in self.captured):
                known[id(view)] = _viewed(graph, known[id(root)], root, view)
        copies: dict[fx.Node, fx.Node] = {}
        for node in self._module.graph.nodes:
            source = self._sources.get(node)
            if source is not None and id(source) in known:
                copies[node] = known[id(source)]
            elif source is not None and not _is_followed(source) and source.numel() == 1:
                made = (list(source.shape), source.item())
                copies[node] = _called(
                    graph, _aten.full.default, made, source, dtype=source.dtype, device=source.device
                )
            elif node.target is _aten.lift_fresh_copy.default and copies[node.args[0]].target is _aten.full.default:
                copies[node] = copies[node.args[0]]
            elif node.op not in ("placeholder", "output"):
                copies[node] = graph.node_copy(node, copies.__getitem__)
        (returned,) = next(n for n in self._module.graph.nodes if n.op == "output").args
        found = self._picked(graph, [copies[n] for n in returned], picks, (*leading, *operands.roots))
        graph.output(found)
        return fx.GraphModule(self._module, graph)

    def _picked(
        self, graph: fx.Graph, returned: Sequence[fx.Node], picks: Sequence[Pick], given: Sequence[torch.Tensor]
    ) -> list[fx.Node]:
        """What is given: of what shares memory with what the body was given, what is around it or another result, a
        copy."""
        places: dict[tuple[int, int], fx.Node] = {}
        nodes = iter(returned)
        leaves = [pytree.tree_leaves(result) for result in self.results]
        for n, parts in enumerate(leaves):
            places |= {(n, k): next(nodes) for k, x in enumerate(parts) if is_data(x)}
        seen = {x.untyped_storage()._cdata for x in (*given, *self.captured)}
        found = []
        for pick in picks:
            value: Any = 0 if pick.is_blank else leaves[pick.name][pick.leaf]
            kind = {"dtype": pick.like.dtype, "device": pick.like.device}
            if not is_data(value):
                found.append(_called(graph, _aten.full.default, (list(pick.like.shape), value), pick.like, **kind))
                continue
            node = places[pick.name, pick.leaf]
            memory = value.untyped_storage()._cdata
            is_own = memory not in seen and value.is_contiguous() and node.op == "call_function"
            seen.add(memory)
            copy = _aten.clone.default if pick.is_final or is_numeral(value) else _own.copied.default
            node = node if is_own else _called(graph, copy, (node,), value)
            if value.dtype != pick.like.dtype:
                node = _called(graph, _aten._to_copy.default, (node,), pick.like, dtype=pick.like.dtype)
            found.append(node)
        return found


def _called(graph: fx.Graph, target: Any, args: tuple[Any, ...], like: torch.Tensor, **named: Any) -> fx.Node:
    """A call that gives a tensor like another one."""
    node = graph.call_function(target, args, named)
    with disable_proxy_modes_tracing():
        node.meta["val"] = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    return node


def check_sizes(values: Sequence[Any], where: str) -> None:
    for x in values:
        if is_data(x) and not all(isinstance(n, int) for n in x.shape):
            raise _of_sizes(where)


def _of_sizes(where: str) -> UnsupportedError:
    return UnsupportedError(
        f"{where}: a branch or loop that a tensor decides uses a tensor whose size data tell; keep all elements and "
        f"mask them, as in torch.where(mask, x, 0)"
    )


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


class Operands:
    """Tensors from around bodies, those that share memory as one: its root, of which the others are views."""

    def __init__(self, used: Sequence[Sequence[torch.Tensor]], carried: Sequence[torch.Tensor] = ()) -> None:
        inside = {id(x) for x in carried}
        tensors = list({id(x): x for each in used for x in each if id(x) not in inside}.values())
        groups: dict[int, list[torch.Tensor]] = {}
        for x in tensors:
            if _is_followed(x):
                groups.setdefault(x.untyped_storage()._cdata, []).append(x)
        self.views: list[tuple[torch.Tensor, torch.Tensor]] = []  # of a root, and how they lie in it
        roots: list[torch.Tensor] = []
        for group in groups.values():
            root = group[0] if len(group) == 1 else _root(group)
            self.views += [(root, x) for x in group if x is not root]
            roots.append(root)
        self.roots = tuple(roots)


def _is_followed(x: torch.Tensor) -> bool:
    return isinstance(x, torch._subclasses.FakeTensor)


def _root(group: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor of which all of them are views."""
    memory = group[0].untyped_storage()._cdata
    others = [x for x in _tracer().tensor_tracker if x.untyped_storage()._cdata == memory]
    known = [x for x in (*group, *others) if all(isinstance(n, int) for n in (*x.shape, *x.stride()))]
    for x in sorted(known, key=lambda x: -x.numel()):
        if all(y is x or view_steps(x, y) is not None for y in group):
            return x
    x = group[0]
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def view_steps(x: torch.Tensor, view: torch.Tensor) -> list[tuple[Any, tuple[Any, ...]]] | None:
    """The slices, selections and so on by which a tensor gives a view of its memory; None where there are none such."""
    left = int(view.storage_offset() - x.storage_offset())
    order = sorted(range(x.ndim), key=x.stride, reverse=True)
    if left < 0 or view.dtype != x.dtype or any(x.stride(d) < 1 for d in order):
        return None
    starts = [0] * x.ndim
    for d in order:
        starts[d], left = divmod(left, x.stride(d))
    sources: dict[int, int] = {}  # a dimension of the tensor to one of the view
    for k in (k for k in range(view.ndim) if view.shape[k] > 1):
        step = view.stride(k)
        fits = (d for d in order if d not in sources and step > 0 and step % x.stride(d) == 0)
        found = next((d for d in fits if starts[d] + (view.shape[k] - 1) * (step // x.stride(d)) < x.shape[d]), None)
        if found is None:
            return None
        sources[found] = k
    if left or any(starts[d] >= x.shape[d] for d in range(x.ndim)):
        return None
    steps: list[tuple[Any, tuple[Any, ...]]] = []
    for d in reversed(range(x.ndim)):
        if d not in sources:
            steps.append((_aten.select.int, (d, starts[d])))
            continue
        size, step = view.shape[sources[d]], view.stride(sources[d]) // x.stride(d)
        if (starts[d], size, step) != (0, x.shape[d], 1):
            steps.append((_aten.slice.Tensor, (d, starts[d], starts[d] + (size - 1) * step + 1, step)))
    kept = [sources[d] for d in sorted(sources)]
    if kept != sorted(kept):
        steps.append((_aten.permute.default, ([kept.index(k) for k in sorted(kept)],)))
    return steps + [(_aten.unsqueeze.default, (k,)) for k in range(view.ndim) if view.shape[k] == 1]


def _viewed(graph: fx.Graph, node: fx.Node, x: torch.Tensor, view: torch.Tensor) -> fx.Node:
    steps = view_steps(x, view)
    if steps is None:
        steps = [(_aten.as_strided.default, (list(view.shape), list(view.stride()), view.storage_offset()))]
    for target, args in steps:
        with disable_proxy_modes_tracing():
            x = target(x, *args)
        node = graph.call_function(target, (node, *args))
        node.meta["val"] = x
    return node


def _tracer() -> Any:
    """What follows the code right now."""
    mode = get_proxy_mode()
    assert mode is not None
    return mode.tracer


def emit(
    target: Any, graphs: Sequence[fx.GraphModule], before: Sequence[Any], after: Sequence[Any],
    like: Sequence[torch.Tensor],
) -> list[torch.Tensor]:  # fmt: skip
    """A call of a higher-order operator in the graph that is followed; what it gives is like these."""
    tracer = _tracer()
    for number, graph in enumerate(graphs):
        name = f"{target.name()}_{number}"
        count = 0
        while hasattr(tracer.root, f"{name}_{count}"):
            count += 1
        tracer.root.register_module(f"{name}_{count}", graph)
    args = pytree.tree_map(tracer.unwrap_proxy, (*before, *graphs, *after))
    proxy = tracer.create_proxy("call_function", target, args, {})
    with disable_proxy_modes_tracing():
        results = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in like]
    found: list[torch.Tensor] = track_tensor_tree(results, proxy, constant=None, tracer=tracer)
    return found


def write_back(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """What a body has changed gets its new value at once: PyTorch drops calls in bodies of which nothing is used."""
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)
