"""Copies that stand for views: what a branch, a loop or an index chosen by data gives is a tensor of its own, where
PyTorch's would share memory with another. That is right as long as nobody sees a change of the one in the other."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from tilewright.errors import UnsupportedError
from tilewright.frontend.pytorch import own_operators  # noqa: F401  (which are registered)
from tilewright.frontend.pytorch.higher_order import bodies, is_control, is_loop, operands, returned
from tilewright.frontend.pytorch.mutations import changed_by, roots_of, source_of

_own = torch.ops.tilewright
_COPIES = (_own.copied.default, _own.taken.default)


Path = tuple[int, ...]  # where a node stands: the place of what it is in, in each graph from the outermost on


@dataclass
class _Class:
    """Tensors that share memory, through bodies too: where they are changed and read, whether the caller sees them, and
    whether they outlive one step of a loop."""

    changes: list[tuple[Path, fx.Node]] = field(default_factory=list)
    reads: list[Path] = field(default_factory=list)
    is_seen: bool = False
    is_lasting: bool = False


class _Classes:
    def __init__(self) -> None:
        self._parents: dict[fx.Node, fx.Node] = {}

    def find(self, node: fx.Node) -> fx.Node:
        while (parent := self._parents.get(node, node)) is not node:
            node = parent
        return node

    def join(self, one: fx.Node, other: fx.Node) -> None:
        self._parents[self.find(one)] = self.find(other)


def check_copies(module: fx.GraphModule) -> None:
    """An error where a change in place would be seen in PyTorch through a view for which there is a copy."""
    walked = list(_walk(module, (), False))
    marks = [(path, n) for path, _, n in walked if n.target in _COPIES]
    if not marks:
        return
    joined = _Classes()
    for graph in {id(n.graph): n.graph for _, _, n in walked}.values():
        for node, roots in roots_of(graph).items():
            for root in roots:
                joined.join(node, root)
    for _, _, node in walked:
        _join_bodies(node, joined)
        if node.target is _own.lent.default:
            joined.join(node, node.args[0])  # type: ignore[arg-type]
    found: dict[fx.Node, _Class] = defaultdict(_Class)
    for path, in_loop, node in walked:
        own = found[joined.find(node)]
        own.is_seen |= node.op == "placeholder" and node.graph is module.graph
        own.is_lasting |= node.op == "placeholder" and in_loop
        for target in () if _gives_back(node) else changed_by(node):
            found[joined.find(target)].changes.append((path, node))
        is_final = node.op == "output" and node.graph is module.graph
        if is_final or not _hands_on(node):
            for source in node.all_input_nodes:
                found[joined.find(source)].reads.append(path)
    for path, mark in marks:
        own, shared = found[joined.find(mark)], found[joined.find(mark.args[0])]  # type: ignore[arg-type]
        if own is not shared:
            _check(path, own, shared, own.is_lasting)
            _check(path, shared, own, own.is_lasting)


def _check(mark: Path, one: _Class, other: _Class, is_lasting: bool) -> None:
    """Whether a change of the one behind the copy is followed by a read of the other."""
    for changed, node in one.changes:
        if not _follows(changed, mark, is_lasting):
            continue
        if other.is_seen or any(_follows(read, changed, is_lasting or other.is_lasting) for read in other.reads):
            raise UnsupportedError(
                f"{source_of(node)}: a tensor is changed in place that is a view of another, or not, as the data has "
                f"it: it comes out of a branch, a loop or an index that data decide; change a copy (.clone()), or "
                f"write x[i] = ... instead of changing x[i]"
            )


def _follows(one: Path, other: Path, is_lasting: bool) -> bool:
    """Whether a node may run after another: of what outlives a step, any that stands in the same loop."""
    return one > other or (is_lasting and one[0] == other[0] and len(one) > 1 and len(other) > 1)


def _gives_back(node: fx.Node) -> bool:
    """Whether a call gives a tensor the value that a body has made of it: that was changed inside, and counts there."""
    value = node.args[1] if node.target is torch.ops.aten.copy_.default else None
    if not isinstance(value, fx.Node) or value.target is not operator.getitem or not is_control(value.args[0]):  # type: ignore[arg-type]
        return False
    call, place = value.args
    made = returned(bodies(call)[-1])[place]  # type: ignore[arg-type,index]
    return isinstance(made, fx.Node) and made.target is _own.given_back.default


def _hands_on(node: fx.Node) -> bool:
    """Whether a node only hands tensors on: what is read there is read elsewhere."""
    return node.target in _COPIES or node.op == "output" or node.target is operator.getitem or is_control(node)


def _walk(module: fx.GraphModule, path: Path, in_loop: bool) -> Iterator[tuple[Path, bool, fx.Node]]:
    """All nodes, those of bodies too: where they stand, and whether in a loop."""
    for k, node in enumerate(module.graph.nodes):
        if is_control(node):
            for number, body in enumerate(bodies(node)):
                yield from _walk(body, (*path, k, number), in_loop or is_loop(node))
        yield (*path, k), in_loop, node


def _join_bodies(node: fx.Node, joined: _Classes) -> None:
    """What a body is given is what it is called with, and what it gives is what the call gives."""
    if not is_control(node):
        return
    results = {u.args[1]: u for u in node.users if u.target is operator.getitem}
    for number, body in enumerate(bodies(node)):
        placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
        for own, given in zip(placeholders, operands(node), strict=False):
            if isinstance(given, fx.Node):
                joined.join(own, given)
        if is_loop(node) and number == 0:
            continue  # the condition gives no tensor that goes on
        for k, given in enumerate(returned(body)):
            if isinstance(given, fx.Node):
                if k in results:
                    joined.join(given, results[k])
                if is_loop(node):
                    joined.join(given, placeholders[k])
