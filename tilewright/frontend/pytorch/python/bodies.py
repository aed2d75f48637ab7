"""Bodies of branches and loops as graphs of their own: which tensors from around them they use, and their calls.

A body is followed twice: first to see what it uses and gives, then as a function of these tensors. Those that share
memory are one operand, of which the body makes its views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.utils import reenter_make_fx
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    track_tensor,
    track_tensor_tree,
)
from torch.utils import _pytree as pytree

from tilewright.errors import UnsupportedError
from tilewright.frontend.pytorch.own_operators import copied
from tilewright.frontend.pytorch.python.values import Step, Values, is_data


class Traced:
    """A body followed once by itself: what it gave, and which tensors it used of those that are followed outside."""

    def __init__(self, step: Step, values: Values) -> None:
        given = [x for x in pytree.tree_leaves(values) if is_data(x)]

        def once(*_: torch.Tensor) -> Any:
            self.results = step(*values)
            return [x for x in pytree.tree_leaves(self.results) if is_data(x)]

        graph = reenter_make_fx(once)(*given)
        used = {n for n in graph.graph.nodes if n.op == "placeholder" and n.users}
        placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
        self.captured = [x for n, x in zip(placeholders, given, strict=True) if n in used]
        for node in graph.graph.nodes:
            if node.op == "get_attr" and isinstance(x := _attribute(graph, str(node.target)), torch.Tensor):
                self.captured.append(x)


def followed(body: Callable[..., Any], given: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The graph of a body. A number that it writes down is made in it: PyTorch lifts such out of the outermost graph
    alone."""
    module: fx.GraphModule = reenter_make_fx(body)(*given)
    graph = module.graph
    for node in list(graph.nodes):
        held = _attribute(module, str(node.target)) if node.op == "get_attr" else None
        if not isinstance(held, torch.Tensor) or _is_followed(held) or held.numel() != 1:
            continue
        with graph.inserting_before(node):
            made = graph.call_function(
                torch.ops.aten.full.default, (list(held.shape), held.item()),
                {"dtype": held.dtype, "device": held.device},
            )  # fmt: skip
        lifted = [n for n in node.users if n.target is torch.ops.aten.lift_fresh_copy.default]
        made.meta["val"] = (lifted[0] if lifted else node).meta.get("val")
        for each in (*lifted, node):
            each.replace_all_uses_with(made)
            graph.erase_node(each)
    for name in [k for k, _ in module.named_buffers(recurse=False) if not any(n.target == k for n in graph.nodes)]:
        delattr(module, name)
    module.recompile()
    return module


def check_sizes(values: Sequence[Any], where: str) -> None:
    for x in values:
        if is_data(x) and not all(isinstance(n, int) for n in x.shape):
            raise UnsupportedError(
                f"{where}: a branch or loop that a tensor decides uses a tensor whose size data tell; keep all "
                f"elements and mask them, as in torch.where(mask, x, 0)"
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
        self._views: list[tuple[int, torch.Tensor]] = []
        roots: list[torch.Tensor] = []
        for group in groups.values():
            root = group[0] if len(group) == 1 else _root(group)
            self._views += [(len(roots), x) for x in group if x is not root]
            roots.append(root)
        self.roots = tuple(roots)

    def track(self, given: Sequence[torch.Tensor]) -> None:
        """Inside a body: the tensors from around it are what it was given, or views of that."""
        tracer = _tracer()
        for root, own in zip(self.roots, given, strict=True):
            if root is not own:
                track_tensor(root, tracer.unwrap_proxy(own), constant=None, tracer=tracer)
        for place, view in self._views:
            made = given[place].as_strided(view.shape, view.stride(), view.storage_offset())
            track_tensor(view, tracer.unwrap_proxy(made), constant=None, tracer=tracer)


def _is_followed(x: torch.Tensor) -> bool:
    return isinstance(x, torch._subclasses.FakeTensor)


def _root(group: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor whose memory is that of all of them."""
    bases = [x._base for x in group if x._base is not None]
    for x in [*group, *bases]:
        is_all = x.storage_offset() == 0 and x.numel() * x.element_size() == x.untyped_storage().nbytes()
        if is_all and x.is_contiguous():
            return x
    x = group[0]
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def apart(results: Sequence[Any], given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Results of a body: a copy of what shares memory with what it was given, what is around it or another one."""
    seen = {x.untyped_storage()._cdata for x in given}
    found = []
    for x in results:
        memory = x.untyped_storage()._cdata
        is_own = memory not in seen and x.is_contiguous() and _has_proxy(x)
        seen.add(memory)
        found.append(x if is_own else copied(x))
    return found


def _has_proxy(x: torch.Tensor) -> bool:
    return isinstance(_tracer().unwrap_proxy(x), fx.Proxy)


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


class Containers:
    """Lists and dicts that a body can reach: followed once for all steps, it must leave them as they are."""

    def __init__(self, values: Values, where: str) -> None:
        self._kept = [(x, _contents(x)) for x in values if isinstance(x, list | dict | set)]
        self._where = where

    def check(self) -> None:
        for x, before in self._kept:
            now = _contents(x)
            if len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True)):
                x.clear()
                if isinstance(x, dict):
                    x.update(zip(before[::2], before[1::2], strict=True))
                else:
                    (x.extend if isinstance(x, list) else x.update)(before)
                raise UnsupportedError(
                    f"{self._where}: a {type(x).__name__} is changed where a tensor decides how often; write into a "
                    f"tensor that is made before, such as ys[t] = y"
                )


def _contents(x: Any) -> list[Any]:
    return [part for item in x.items() for part in item] if isinstance(x, dict) else list(x)
