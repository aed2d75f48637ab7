"""Tensors that are one or two as the data have it: a flag beside what a branch or a loop gives tells whether that is
the tensor from before, and then a change of the one is written into the other.

    v = e[0]
    if test:                    # gives e and same_e: False from this side, True from the other
        e = e * 2
    v.add_(3)                   # changes the old e; behind it e.copy_(where(same_e, old_e, e))
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tilewright.frontend.pytorch import own_operators  # noqa: F401  (which are registered)
from tilewright.frontend.pytorch.higher_order import bodies, is_control, is_loop, operands, returned

_aten = torch.ops.aten
_copied = torch.ops.tilewright.copied.default


@dataclass(frozen=True, eq=False)
class SharedPair:
    """What a call gives, what it is unless the data make another tensor of it, and the copies by which it is that."""

    given: fx.Node
    before: fx.Node
    copies: frozenset[fx.Node]


def pair_of(call: fx.Node, copy: fx.Node) -> SharedPair | None:
    """The pair that a copy inside a call of a branch or loop makes, or a copy that a loop is given."""
    for node in _results(call):
        before, copies = _origin(node)
        if copy in copies and before is not None and _is_alike(node, before):
            return SharedPair(node, before, copies)
    return None


def write_behind(change: fx.Node, pair: SharedPair, is_of_given: bool) -> fx.Node:
    """Behind a change of one of the two the other is given its value, where they are one."""
    source, target = (pair.given, pair.before) if is_of_given else (pair.before, pair.given)
    graph = change.graph
    flag = _flag(pair.given)
    with graph.inserting_after(change):
        chosen = _call(graph, _aten.where.self, (flag, source, target), f"{target.name}_as_{change.name}")
    with graph.inserting_after(chosen):
        written = _call(graph, _aten.copy_.default, (target, chosen), f"{target.name}_by_{change.name}")
    for node in (chosen, written):
        node.meta["val"] = target.meta["val"]
        node.meta["stack_trace"] = change.meta.get("stack_trace")
    written.meta["tells"] = f"as '{change.name}' has it where the data make them one"
    return written


def _results(call: fx.Node) -> Iterator[fx.Node]:
    """What a call of control gives; of a copy, what the loops give that carry it."""
    if call.target is _copied:
        for user in call.users:
            yield from (r for r in _results(user) if is_loop(user) and operands(user)[r.args[1]] is call)  # type: ignore[index]
    elif is_control(call):
        yield from (u for u in call.users if u.target is operator.getitem)


def _is_alike(one: fx.Node, other: fx.Node) -> bool:
    a, b = one.meta["val"], other.meta["val"]
    return a.shape == b.shape and a.dtype == b.dtype


def _placeholders(body: fx.GraphModule) -> list[fx.Node]:
    return [n for n in body.graph.nodes if n.op == "placeholder"]


def _origin(node: object) -> tuple[fx.Node | None, frozenset[fx.Node]]:
    """The node of the same graph that a node may be a copy of, and the copies on the way; none of them where there are
    several such nodes, or none."""
    nothing: tuple[None, frozenset[fx.Node]] = (None, frozenset())
    if not isinstance(node, fx.Node):
        return nothing
    if node.target is _copied:
        source = node.args[0]
        return (source, frozenset([node])) if isinstance(source, fx.Node) else nothing
    if node.target is not operator.getitem or not is_control(node.args[0]):  # type: ignore[arg-type]
        return nothing
    call, place = node.args
    assert isinstance(call, fx.Node)
    found: set[fx.Node | None] = set()
    copies: frozenset[fx.Node] = frozenset()
    for body in bodies(call)[-1:] if is_loop(call) else bodies(call):
        source, inner = _origin(returned(body)[place])  # type: ignore[index]
        placeholders = _placeholders(body)
        if not inner:
            continue
        if source not in placeholders or (is_loop(call) and source is not placeholders[place]):  # type: ignore[index]
            return nothing
        found.add(operands(call)[placeholders.index(source)])
        copies |= inner
    if is_loop(call):  # what it begins with is a copy as well
        source, first = _origin(operands(call)[place])  # type: ignore[index]
        found, copies = {source}, copies | first
    return (found.pop(), copies) if len(found) == 1 else nothing


def _flag(node: object) -> fx.Node:
    """Whether a node is what it may be a copy of: a node of the same graph."""
    assert isinstance(node, fx.Node)
    _, copies = _origin(node)
    if not copies or node.target is _copied:
        return _constant(node.graph, bool(copies), node)
    call, place = node.args
    assert isinstance(call, fx.Node) and isinstance(place, int)
    known: dict[int, fx.Node] = call.meta.setdefault("flags", {})
    if place not in known:
        known[place] = _loop_flag(call, place) if is_loop(call) else _branch_flag(call, place)
    return known[place]


def _branch_flag(call: fx.Node, place: int) -> fx.Node:
    for body in bodies(call):
        value = returned(body)[place]
        _return_also(body, _flag(value) if isinstance(value, fx.Node) else _constant(body.graph, False, call))
    return _further_result(call, len(returned(bodies(call)[0])) - 1)


def _loop_flag(call: fx.Node, place: int) -> fx.Node:
    """It is carried: a step that makes another tensor clears it."""
    condition, body = bodies(call)
    carried: tuple[fx.Node, ...] = tuple(call.args[2])  # type: ignore[arg-type]
    made = []
    for each in (condition, body):
        with each.graph.inserting_after(_placeholders(each)[len(carried) - 1]):
            made.append(each.graph.placeholder(f"is_same_{place}"))
        made[-1].meta["val"] = _boolean(call)
    value = returned(body)[place]
    own = _flag(value)
    with body.graph.inserting_before(_last(body)):
        still = _call(body.graph, _aten.logical_and.default, (made[-1], own), f"is_still_{place}")
    still.meta["val"] = _boolean(call)
    _return_also(body, still)
    condition.recompile()
    with call.graph.inserting_before(call):
        first = _constant(call.graph, True, call, is_before=True)
    call.args = (call.args[0], call.args[1], (*carried, first), *call.args[3:])
    return _further_result(call, len(carried))


def _last(body: fx.GraphModule) -> fx.Node:
    return next(n for n in body.graph.nodes if n.op == "output")


def _return_also(body: fx.GraphModule, node: fx.Node) -> None:
    _last(body).args = ((*returned(body), node),)
    body.recompile()


def _further_result(call: fx.Node, place: int) -> fx.Node:
    call.meta["val"] = (*call.meta["val"], _boolean(call))
    with call.graph.inserting_after(call):
        made = _call(call.graph, operator.getitem, (call, place), f"{call.name}_is_same_{place}")
    made.meta["val"] = _boolean(call)
    return made


def _constant(graph: fx.Graph, value: bool, like: fx.Node, is_before: bool = False) -> fx.Node:
    with graph.inserting_before(like) if is_before else graph.inserting_after(like):
        made = _call(graph, _aten.full.default, ([], value), f"{like.name}_is_same", {"dtype": torch.bool})
    made.meta["val"] = _boolean(like)
    return made


def _call(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], name: str, named: dict[str, Any] | None = None
) -> fx.Node:
    """A call under a name of its own: an exported graph does not know the names that its nodes have been given."""
    return graph.create_node("call_function", target, args, named, name)


def _boolean(like: fx.Node) -> torch.Tensor:
    """What a flag is while there are no values."""
    known = like.meta["val"]
    some = known[0] if isinstance(known, tuple | list) else known
    with some.fake_mode:
        return torch.empty((), dtype=torch.bool)
