"""Changes in place inside branches and loops: what a body changes becomes a result of it, written back behind the call.

PyTorch makes straight code functional itself. A body that changes a tensor from around it is lent a copy of that, and
gives the copy back when it has changed it; the code around it copies that into the tensor: straight code again.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from tilewright.errors import UnsupportedError
from tilewright.frontend.pytorch import own_operators  # noqa: F401  (which are registered)
from tilewright.frontend.pytorch.aliases import storages
from tilewright.frontend.pytorch.higher_order import bodies, is_control, is_loop, operands, returned

_higher = torch.ops.higher_order
_aten = torch.ops.aten
_own = torch.ops.tilewright
Roots = dict[fx.Node, frozenset[fx.Node]]


@dataclass(frozen=True)
class Mutation:
    """A call that changes a tensor, and what it became."""

    call: str
    place: str  # in the source
    target: str
    became: str

    def __str__(self) -> str:
        return f"{self.call} at {self.place} changes {self.target}: {self.became}"


def roots_of(graph: fx.Graph) -> Roots:
    """Of every node the nodes whose memory it may be, by what the operators declare: a view's are those of what it is
    a view of. Where an operator may give a view or a copy, it counts as a view: a copy too many changes no value."""
    found: Roots = {}
    for node in graph.nodes:
        own = frozenset([node])
        if node.op == "call_function" and node.target is operator.getitem:
            own = own if is_control(node.args[0]) else found[node.args[0]]
        elif isinstance(node.target, torch._ops.OpOverload):
            schema = node.target._schema
            if any(r.alias_info is not None for r in schema.returns):
                viewed = [n for a, n in _arguments(node) if a.alias_info is not None]
                own = frozenset().union(*(found[n] for n in viewed)) or own
        found[node] = own
    return found


def _arguments(node: fx.Node) -> Iterable[tuple[Any, fx.Node]]:
    """What a call's operator declares of an argument, and the nodes that are given for it."""
    assert isinstance(node.target, torch._ops.OpOverload)
    for place, declared in enumerate(node.target._schema.arguments):
        is_named = declared.kwarg_only or place >= len(node.args)
        value = node.kwargs.get(declared.name) if is_named else node.args[place]
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, fx.Node):
                yield declared, each


def changed_by(node: fx.Node) -> list[fx.Node]:
    """The arguments that a call changes in place."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return []
    return [n for declared, n in _arguments(node) if declared.alias_info is not None and declared.alias_info.is_write]


def make_bodies_functional(module: fx.GraphModule) -> tuple[Mutation, ...]:
    """Rewrites the bodies inside an exported module, inner ones first, so that none changes what it is given; tells of
    every change in the module."""
    told: list[Mutation] = []
    _check_none_is_lost(module)
    for node in list(module.graph.nodes):
        if not is_control(node):
            continue
        for body in bodies(node):
            told += make_bodies_functional(body)
        changed = changed_places(bodies(node))
        if changed:
            _check_apart(node, changed)
            if node.target is _higher.cond:
                _give_from_branches(module, node, changed)
            elif is_loop(node):
                _carry(module, node, changed)
            else:
                raise UnsupportedError(
                    f"{node.target} '{node.name}' changes a tensor from around it in place{_at(node)}; return it"
                )
    told += _told(module)
    module.graph.lint()
    module.recompile()
    return tuple(told)


def _check_none_is_lost(module: fx.GraphModule) -> None:
    """PyTorch drops a call inside a body whose results nobody uses, and with it what it changes."""
    named = {str(n.target).partition(".")[0] for n in module.graph.nodes if n.op == "get_attr"}
    for name, child in module.named_children():
        if isinstance(child, fx.GraphModule) and name not in named and changed_places([child]):
            raise UnsupportedError(
                f"'{name}', a branch or loop inside another, changes tensors in place and gives nothing that is used; "
                f"use what it gives"
            )


def changed_places(of: Sequence[fx.GraphModule]) -> list[int]:
    """Places of what bodies are given that some of them change."""
    found: set[int] = set()
    for body in of:
        placeholders = _placeholders(body)
        roots = roots_of(body.graph)
        for inner in body.graph.nodes:
            found.update(placeholders.index(r) for n in changed_by(inner) for r in roots[n] if r.op == "placeholder")
    return sorted(found)


def _check_apart(node: fx.Node, changed: Sequence[int]) -> None:
    """What a body changes may share its memory with nothing else that it is given."""
    given = operands(node)
    for k in changed:
        others = [x for j, x in enumerate(given) if j != k and isinstance(x, fx.Node)]
        if any(storages(x) & storages(given[k]) for x in others):
            raise UnsupportedError(
                f"{node.target} '{node.name}' changes '{given[k]}' in place and reads another tensor that shares its "
                f"memory{_at(node)}; use one of the two in it"
            )


def _placeholders(body: fx.GraphModule) -> list[fx.Node]:
    return [n for n in body.graph.nodes if n.op == "placeholder"]


def give_changed(body: fx.GraphModule, changed: Sequence[int], count: int = 0) -> None:
    """The body on copies of some operands, which are results behind the others; the first `count` are not."""
    graph = body.graph
    placeholders = _placeholders(body)
    first = next(n for n in graph.nodes if n.op != "placeholder")
    last = next(n for n in graph.nodes if n.op == "output")
    made = []
    for k in changed:
        given = placeholders[k]
        with graph.inserting_before(first):
            copy = _copy(graph, _own.lent.default, given)
        given.replace_all_uses_with(copy)
        copy.args = (given,)  # it too was a use
        if k >= count:
            with graph.inserting_before(last):
                # a tensor of its own: another result may be a view of what was lent
                made.append(_copy(graph, _own.given_back.default, copy))
    last.args = ((*returned(body), *made),)
    body.recompile()


def _copy(graph: fx.Graph, target: Any, node: fx.Node) -> fx.Node:
    copy = graph.call_function(target, (node,))
    copy.meta["val"] = node.meta["val"]
    return copy


def _give_from_branches(module: fx.GraphModule, node: fx.Node, changed: Sequence[int]) -> None:
    count = len(returned(bodies(node)[0]))
    for body in bodies(node):
        give_changed(body, changed)
    given = operands(node)
    _write_back(module, node, {count + k: given[place] for k, place in enumerate(changed)})


def carry_changed(condition: fx.GraphModule, body: fx.GraphModule, count: int, changed: Sequence[int]) -> list[int]:
    """A loop's bodies, of which the first `count` operands are carried, with those that they change carried behind
    these; gives their places."""
    give_changed(body, changed, count)
    moved = [k for k in changed if k >= count]
    for each in (condition, body):
        placeholders = _placeholders(each)
        order = [*placeholders[:count], *(placeholders[k] for k in moved)]
        order += [p for p in placeholders if p not in order]
        for before, after in pairwise(order):
            before.append(after)
        each.recompile()
    return moved


def _carry(module: fx.GraphModule, node: fx.Node, changed: Sequence[int]) -> None:
    """A loop's operands that its body changes are carried behind the others."""
    condition, body = bodies(node)
    carried, others = list(node.args[2]), list(node.args[3])  # type: ignore[arg-type]
    count = len(carried)
    if changed[0] < count or changed_places([condition]):
        raise UnsupportedError(
            f"{node.target} '{node.name}' changes in place what it carries, or in its condition{_at(node)}; "
            f"make a new tensor: x = x + 1 instead of x += 1"
        )
    carry_changed(condition, body, count, changed)
    moved = [others[place - count] for place in changed]
    left = [x for place, x in enumerate(others, count) if place not in changed]
    node.args = (node.args[0], node.args[1], (*carried, *moved), tuple(left))
    node.kwargs = {}
    _write_back(module, node, {count + k: x for k, x in enumerate(moved)})


def _write_back(module: fx.GraphModule, node: fx.Node, results: dict[int, fx.Node]) -> None:
    """Behind a call, its further results become the values of the tensors that they stand for."""
    before: fx.Node = max([node, *(u for u in node.users if u.target is operator.getitem)], key=_order(module))
    node.meta["val"] = (*node.meta["val"], *(x.meta["val"] for x in results.values()))
    for place, target in results.items():
        with module.graph.inserting_after(before):
            # under a name of its own: an exported graph does not know the names that its nodes have been given
            named = f"{node.name}_gives_{place}"
            result = module.graph.create_node("call_function", operator.getitem, (node, place), None, named)
        with module.graph.inserting_after(result):
            before = module.graph.call_function(_aten.copy_.default, (target, result))
        for each in (result, before):
            each.meta["val"] = target.meta["val"]
            each.meta["stack_trace"] = node.meta.get("stack_trace")
        before.meta["tells"] = f"given back by '{node.name}'"


def _order(module: fx.GraphModule) -> Any:
    places = {n: k for k, n in enumerate(module.graph.nodes)}
    return lambda n: places[n]


# what is told


def _told(module: fx.GraphModule) -> list[Mutation]:
    roots = roots_of(module.graph)
    found = []
    for node in module.graph.nodes:
        for target in changed_by(node):
            names = " or ".join(sorted(f"'{r.name}'" for r in roots[target]))
            is_view = target not in roots[target]
            is_given = any(r.op in ("placeholder", "get_attr") for r in roots[target])
            became = "its new value is written back" if is_given else "a new value of it"
            via = f", {node.meta['tells']}" if "tells" in node.meta else ""
            what = f"{'a view of ' if is_view else ''}{names}"
            found.append(Mutation(_short(node), source_of(node), what, became + via))
    return found


def _short(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.").partition(".")[0]


def source_of(node: fx.Node) -> str:
    """The last line of the source that made a call."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [(file, line) for file, line in lines if not file.startswith("<")]
    return f"{own[-1][0].rpartition('/')[2]}:{own[-1][1]}" if own else f"'{node.name}'"


def _at(node: fx.Node) -> str:
    where = source_of(node)
    return f" ({where})" if ":" in where else ""
