"""Copies that stand for views: what a branch, a loop or an index chosen by data gives is a tensor of its own, where
PyTorch's would share memory with another. That is right as long as nobody sees a change of the one in the other; where
somebody does, it is written into both."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import takewhile

import torch
from torch import fx

from tilewright.errors import UnsupportedError
from tilewright.frontend.pytorch import own_operators  # noqa: F401  (which are registered)
from tilewright.frontend.pytorch.higher_order import bodies, is_control, is_loop, operands, returned
from tilewright.frontend.pytorch.mutations import changed_by, roots_of, source_of
from tilewright.frontend.pytorch.python.shared_by_data import pair_of, write_behind

_own = torch.ops.tilewright
_COPIES = (_own.copied.default, _own.taken.default, _own.one_of.default)
_LOANS = (_own.lent.default, _own.given_back.default)


Path = tuple[int, ...]  # where a node stands: the place of what it is in, in each graph from the outermost on


@dataclass(eq=False)
class _Class:
    """Tensors that share memory, through bodies too: where they are changed and read, whether the caller sees them, and
    the loops of which they outlive a step."""

    changes: list[tuple[Path, fx.Node]] = field(default_factory=list)
    reads: list[Path] = field(default_factory=list)
    is_seen: bool = False
    loops: set[Path] = field(default_factory=set)


class _Classes:
    def __init__(self) -> None:
        self._parents: dict[fx.Node, fx.Node] = {}

    def find(self, node: fx.Node) -> fx.Node:
        while (parent := self._parents.get(node, node)) is not node:
            node = parent
        return node

    def join(self, one: fx.Node, other: fx.Node) -> None:
        self._parents[self.find(one)] = self.find(other)


@dataclass(frozen=True)
class _Unseen:
    """A change that would be seen in PyTorch through a view for which there is a copy: of the copy, or of what it is a
    copy of."""

    path: Path
    copy: fx.Node
    changed: Path
    change: fx.Node
    is_of_copy: bool


def follow_copies(module: fx.GraphModule) -> None:
    """Where a change in place would be seen in PyTorch through a view for which there is a copy, it is written there
    too; an error where that cannot be."""
    written: set[tuple[fx.Node, fx.Node]] = set()  # copies, and changes that are in both of the two
    while (found := _unseen(module, written)) is not None:
        more = _write(module, found)
        if not more:
            raise UnsupportedError(
                f"{source_of(found.change)}: a tensor is changed in place that is a view of another, or not, as the "
                f"data has it: it comes out of a branch, a loop or an index that data decide; change a copy "
                f"(.clone()), or write x[i] = ... instead of changing x[i]"
            )
        written |= more


def _write(module: fx.GraphModule, found: _Unseen) -> set[tuple[fx.Node, fx.Node]]:
    """The change in both, if they are in one graph; nothing if not."""
    level = _common(found.path, found.changed)
    if level % 2 == 1 or level >= min(len(found.path), len(found.changed)):
        return set()
    is_step = False
    for k in range(0, level, 2):
        call = list(module.graph.nodes)[found.path[k]]
        module, is_step = bodies(call)[found.path[k + 1]], is_loop(call)
    nodes = list(module.graph.nodes)
    behind = nodes[found.changed[level]]
    pair = pair_of(nodes[found.path[level]], found.copy)
    if pair is None or nodes.index(pair.given) > found.changed[level]:
        return set()
    roots = roots_of(module.graph)
    other = pair.before if found.is_of_copy else pair.given
    if is_step and any(r.op == "placeholder" for r in roots[other]):
        return set()  # what a loop carries is not changed in place
    if behind is not found.change:
        # it is made inside a body, which must not read the other one behind it
        if any(roots[x] & roots[other] for x in operands(behind) if isinstance(x, fx.Node)):
            return set()
        given = [u for u in behind.users if u.target is operator.getitem]
        behind = max([behind, *given, *(u for g in given for u in g.users if _gives_back(u))], key=nodes.index)
    made = write_behind(behind, pair, found.is_of_copy)
    return {(copy, each) for copy in pair.copies for each in (found.change, made)}


def _unseen(module: fx.GraphModule, written: Set[tuple[fx.Node, fx.Node]]) -> _Unseen | None:
    """The first such change, but those that are written."""
    walked = list(_walk(module, (), None))
    marks = [(path, n, source) for path, _, n in walked for source in _sources(n)]
    loops = [path for path, _, n in walked if is_loop(n)]
    found: dict[frozenset[Path], Callable[[fx.Node], _Class]] = {}
    for path, mark, source in marks:
        # A loop that carries the copy on to where its source comes from has one of the two in each step: there, what
        # happens in one step counts. What lives longer is carried under another name, with a copy of its own.
        around = frozenset(loop for loop in loops if path[: len(loop)] == loop)
        for once in (frozenset[Path](), around):
            if once not in found:
                found[once] = _classes(module, walked, once)
            own, shared = found[once](mark), found[once](source)
            if own is not shared:
                break
        # a change of one of the tensors that this is a copy of is none of the others
        copies = [(at, found[once](m), found[once](s)) for at, m, s in marks if m is not mark]
        for one, other in ((own, shared), (shared, own)):
            for changed, node in one.changes:
                if (mark, node) in written:
                    continue
                together = [(a, b) for at, a, b in copies if not _excludes(changed, at, loops)]
                if any(_misses(path, one, changed, each) for each in _behind(other, one, together)):
                    return _Unseen(path, mark, changed, node, one is own)
    return None


def _sources(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node may be a copy of, if it is one."""
    if node.target not in _COPIES:
        return []
    found: list[fx.Node] = list(node.args[1] if node.target is _own.one_of.default else node.args[:1])  # type: ignore[arg-type]
    return found


def _excludes(one: Path, other: Path, loops: Sequence[Path]) -> bool:
    """Whether two nodes never run in one call: they are in the two branches of one that no loop repeats."""
    common = _common(one, other)
    is_apart = common % 2 == 1 and common < min(len(one), len(other))
    return is_apart and not any(one[: len(loop)] == loop for loop in loops if len(loop) <= common)


def _behind(first: _Class, without: _Class, copies: Sequence[tuple[_Class, _Class]]) -> list[_Class]:
    """A class, and all that are copies of it or that it is a copy of, through others but the one that is left out: what
    it misses, they miss."""
    found = [first]
    for each in found:
        near = [b if a is each else a for a, b in copies if each in (a, b)]
        found += dict.fromkeys(c for c in near if c is not without and c not in found)
    return found


def _classes(
    module: fx.GraphModule, walked: Sequence[tuple[Path, Path | None, fx.Node]], once: frozenset[Path]
) -> Callable[[fx.Node], _Class]:
    """The class of every node; of the loops `once` a single step is looked at."""
    joined = _joined([(path, n) for path, _, n in walked], once)
    found: dict[fx.Node, _Class] = defaultdict(_Class)
    for path, loop, node in walked:
        own = found[joined.find(node)]
        if node.op == "placeholder":
            own.is_seen |= node.graph is module.graph
            own.loops |= set() if loop is None or loop in once else {loop}
        changed = [joined.find(target) for target in changed_by(node)]
        for target in () if _gives_back(node) else changed:
            found[target].changes.append((path, node))
        is_final = node.op == "output" and node.graph is module.graph
        if is_final or not _hands_on(node):
            # what goes into a tensor that it comes from is read where that tensor is
            for source in {joined.find(n) for n in node.all_input_nodes}.difference(changed):
                found[source].reads.append(path)
    for path, _, node in walked:
        if path in once:
            _read_next(path, node, lambda n: found[joined.find(n)])
    return lambda node: found[joined.find(node)]


def _read_next(path: Path, loop: fx.Node, class_of: Callable[[fx.Node], _Class]) -> None:
    """Of a loop of which a single step is looked at: what its next step reads is read at the end of this one."""
    body = bodies(loop)[-1]
    placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
    ends = (*path, len(bodies(loop)) - 1, len(body.graph.nodes) - 1)
    for own, given in zip(placeholders, returned(body), strict=False):
        is_read = any(read[: len(path)] == path for read in class_of(own).reads)
        if is_read and isinstance(given, fx.Node):
            class_of(given).reads.append(ends)


def _joined(nodes: Sequence[tuple[Path, fx.Node]], once: frozenset[Path]) -> _Classes:
    """Nodes of all graphs that share memory: views, what bodies are lent and give back, what calls hand in and out."""
    joined = _Classes()
    for graph in {id(n.graph): n.graph for _, n in nodes}.values():
        for node, roots in roots_of(graph).items():
            for root in roots:
                joined.join(node, root)
    for path, node in nodes:
        _join_bodies(node, joined, path not in once)
        if node.target in _LOANS:
            joined.join(node, node.args[0])  # type: ignore[arg-type]
    return joined


def _misses(mark: Path, one: _Class, changed: Path, other: _Class) -> bool:
    """Whether a change of the one behind the copy is followed by a read of the other. In a later step a tensor is the
    one that it was if it outlives a step."""
    if not _follows(changed, mark, one.loops & other.loops):
        return False
    return other.is_seen or any(_follows(read, changed, other.loops) for read in other.reads)


def _common(one: Path, other: Path) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _follows(one: Path, other: Path, loops: set[Path]) -> bool:
    """Whether a node may run after another: in a later step of one of these loops, or further on in the same run. Of
    the two branches of a call one alone is run."""
    common = _common(one, other)
    if any(len(loop) <= common and one[: len(loop)] == loop for loop in loops):
        return True
    return common % 2 == 0 and one > other


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
    is_call = node.target in (*_COPIES, *_LOANS, operator.getitem) or is_control(node)
    return is_call or node.op == "output"


def _walk(module: fx.GraphModule, path: Path, loop: Path | None) -> Iterator[tuple[Path, Path | None, fx.Node]]:
    """All nodes, those of bodies too: where they stand, and the loop whose body that is."""
    for k, node in enumerate(module.graph.nodes):
        own = (*path, k)
        if is_control(node):
            for number, body in enumerate(bodies(node)):
                yield from _walk(body, (*own, number), own if is_loop(node) else None)
        yield own, loop, node


def _join_bodies(node: fx.Node, joined: _Classes, is_repeated: bool) -> None:
    """What a body is given is what it is called with, and what it gives is what the call gives; of a loop that is
    repeated also what its next step is given."""
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
                if is_loop(node) and is_repeated:
                    joined.join(given, placeholders[k])
