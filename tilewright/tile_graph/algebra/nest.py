"""Nests, the nodes of the tile graph: a reduction or map with the maps composed into it before and after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tilewright.ir.analysis.simplify import join_divisions, linear, simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Compute, Map, Monoid, Reduce
from tilewright.ir.forms.expr import (
    Axis,
    Const,
    Expr,
    Load,
    Op,
    Var,
    axes_of,
    flattened,
    is_op,
    load,
    loads,
    replace_nodes,
    rewrite,
    substitute,
    var,
    walk,
)
from tilewright.ir.forms.tensor import Tensor
from tilewright.tile_graph.algebra.outline import Outline, outline
from tilewright.tile_graph.algebra.unswitch import positions, unswitched


@dataclass(frozen=True, eq=False)
class Nest:
    """stores[i][axes] = values[i], where values may read `accumulated` tensors at `axes`: the reduction's results."""

    stores: tuple[Tensor, ...]
    axes: tuple[Axis, ...]
    reduce_axes: tuple[Axis, ...]
    elements: tuple[Expr, ...]
    monoid: Monoid | None
    accumulated: tuple[Tensor, ...]
    values: tuple[Expr, ...]
    core: str
    epilogue: tuple[str, ...] = ()
    initial: tuple[Expr, ...] = ()  # what the accumulators start from; empty: the monoid's identity

    @property
    def tensor(self) -> Tensor:
        return self.stores[0]

    @cached_property
    def place(self) -> tuple[Expr, ...]:
        """The indices at which it stores."""
        return tuple(var(a) for a in self.axes)

    @cached_property
    def unswitched(self) -> dict[Axis, int]:
        """Axes whose choices a register block decides, with the positions it has along them; reductions have none."""
        return unswitched(self.axes, *self.values) if self.monoid is None else {}

    @cached_property
    def outline(self) -> Outline:
        expressions = (self.elements, self.values, self.initial)
        return outline(self.axes, self.reduce_axes, self.monoid, expressions, (self.accumulated, self.stores))

    @cached_property
    def block_counts(self) -> tuple[int, int, int]:
        """Operations, reads and checks of one block of the axes written out, what is common counted once. Where an
        axis is cut between two formulas, every block has one of them."""
        values = positions(self.unswitched, *self.values)
        found = [n for n in walk(*values) if isinstance(n, Op) and n.op.name == "select" and _cuts(n.args[0])]
        if not found:
            return _counts(values)
        ends = [n for n in found if n.args[0] is found[0].args[0]]
        sides = [[replace_nodes(v, {n: n.args[side] for n in ends}) for v in values] for side in (1, 2)]
        first, second = (_counts(side) for side in sides)
        return (first[0] + second[0]) // 2, (first[1] + second[1]) // 2, (first[2] + second[2]) // 2

    def axis_names(self) -> dict[Axis, str]:
        names = {a: f"o{i}" for i, a in enumerate(self.axes)}
        names.update({a: f"r{i}" for i, a in enumerate(self.reduce_axes)})
        return names

    def named(self, name: str) -> Axis:
        return (self.axes if name[0] == "o" else self.reduce_axes)[int(name[1:])]

    def loads(self) -> list[Load]:
        """Reads from outside the nest."""
        return self._loads

    @cached_property
    def _loads(self) -> list[Load]:
        own = set(self.accumulated)
        return [n for n in loads(*self.elements, *self.values, *self.initial) if n.source not in own]

    @cached_property
    def sample(self) -> list[Load]:
        """Reads that stand for all: of a block written out one a tensor, since the others lie beside it."""
        found = loads(*(self.elements or self.values))
        return list({n.source: n for n in found}.values()) if self.unswitched else found

    def reads(self) -> list[Tensor]:
        return self._reads

    @cached_property
    def _reads(self) -> list[Tensor]:
        return list(dict.fromkeys(n.source for n in self._loads))

    @cached_property
    def is_contraction(self) -> bool:
        if self.monoid is None or self.monoid.operator != "add" or len(loads(self.elements[0])) < 2:
            return False
        return len(loads(without_ends(self.elements[0], self.reduce_axes))) >= 2

    @cached_property
    def element_loads(self) -> list[Load]:
        """Reads of what is summed up, in every step."""
        return loads(*self.elements)

    @cached_property
    def divisors(self) -> dict[Axis, set[int]]:
        """The n of axis // n that what is summed up is read at."""
        found: dict[Axis, set[int]] = {}
        for part in walk(*(index for node in self.element_loads for index in node.indices)):
            if is_op(part, "floordiv") and isinstance(part.args[0], Var) and isinstance(part.args[1], Const):
                found.setdefault(part.args[0].axis, set()).add(int(part.args[1].value))
        return found

    @cached_property
    def value_loads(self) -> list[Load]:
        """Reads of what is stored, those of the sum among them."""
        return loads(*self.values)

    @cached_property
    def value_cost(self) -> int:
        """Operations on data for every value stored."""
        return data_cost(*self.values)

    @cached_property
    def reach(self) -> dict[Tensor, tuple[list[Expr], ...]]:
        """By dimension of every tensor read the outermost of its indices: neighbours' reads share most of them, and
        what the others cover lies between these."""
        indices: dict[Tensor, tuple[dict[Expr, None], ...]] = {}
        for node in self._loads:
            seen = indices.setdefault(node.source, tuple({} for _ in node.indices))
            for known, index in zip(seen, node.indices, strict=True):
                known[simplify(index)] = None
        return {tensor: tuple(_outermost(known) for known in dims) for tensor, dims in indices.items()}

    @cached_property
    def tables(self) -> Mapping[Tensor, Sequence[Load]]:
        """Tensors read at places that are data, and the reads."""
        found = {n.source: [m for m in self._loads if m.source is n.source] for n in self._loads if _is_looked_up(n)}
        return {t: nodes for t, nodes in found.items() if all(_is_looked_up(n) for n in nodes)}

    @cached_property
    def alternatives(self) -> frozenset[Tensor]:
        """Tensors of which one read or another is made, as a condition says, and never several."""
        found = Counter(n.source for n in self._loads)
        several = [t for t, count in found.items() if count > 1]
        chosen = [n for n in walk(*self.elements, *self.values) if is_op(n, "select")] if several else []
        return frozenset(
            t for t in several
            if all(any(m.source is t for m in loads(n.args[1])) and any(m.source is t for m in loads(n.args[2]))
                   for n in chosen) and len(chosen) == found[t] - 1
        )  # fmt: skip

    @cached_property
    def paths(self) -> Mapping[Tensor, Sequence[tuple[tuple[Axis, ...], tuple[Axis | None, ...]]]]:
        """Of each read of a tensor the axes that move it, and by dimension the axis along which neighbours are one
        apart."""
        found: dict[Tensor, list[tuple[tuple[Axis, ...], tuple[Axis | None, ...]]]] = {}
        for node in self._loads:
            terms = [linear(simplify(index)).terms for index in node.indices]
            runs = tuple(
                next((t.axis for t, step in each.items() if isinstance(t, Var) and step == 1), None) for each in terms
            )
            found.setdefault(node.source, []).append((tuple(axes_of(*node.indices)), runs))
        return found

    @cached_property
    def plain(self) -> frozenset[Tensor]:
        """Tensors with one read, each dimension at an axis of its own or at one place: a box of them is all read."""
        found = set()
        for tensor in self.paths:
            indices = [i for n in self._loads if n.source is tensor for i in n.indices if not isinstance(i, Const)]
            once = len(self.paths[tensor]) == 1 and len(set(indices)) == len(indices)
            if once and all(isinstance(i, Var) for i in indices):
                found.add(tensor)
        return frozenset(found)

    @cached_property
    def stepped(self) -> Mapping[Tensor, frozenset[int]]:
        """Dimensions of what is read along which only a Scan's step moves: one place at a time."""
        own = {*self.axes, *self.reduce_axes}
        found: dict[Tensor, frozenset[int]] = {}
        for tensor in self.reads():
            nodes = [n for n in self._loads if n.source is tensor]
            met = [set(axes_of(*(n.indices[d] for n in nodes))) for d in range(tensor.rank)]
            found[tensor] = frozenset(d for d, axes in enumerate(met) if axes and not axes & own)
        return found

    @cached_property
    def is_stepped(self) -> bool:
        """Whether something is read so."""
        return any(self.stepped.values())


def _cuts(condition: Expr) -> bool:
    """Whether a condition holds up to some place along an axis: loops are cut there."""
    return is_op(condition, "lt") and isinstance(condition.args[0], Var) and isinstance(condition.args[1], Const)


def _counts(values: Sequence[Expr]) -> tuple[int, int, int]:
    checks = sum(1 for n in walk(*values) if isinstance(n, Op) and n.op.name == "select")
    return data_cost(*values), len(loads(*values)), checks


def _is_looked_up(node: Load) -> bool:
    return any(i.reads for i in node.indices)


def period(nest: Nest, axis: Axis) -> int | None:
    """n where operands are read at axis // n, as in grouped convolutions: blocks that stay between multiples of n
    see one group alone. None where there is no such n, or several."""
    found = nest.divisors.get(axis, ())
    if len(found) != 1 or not isinstance(axis.extent, int):
        return None
    (size,) = found
    return size if 1 < size < axis.extent and axis.extent % size == 0 else None


def without_ends(element: Expr, axes: Sequence[Axis]) -> Expr:
    """An element of a reduction without the conditions that it is not behind a place which the run tells, along an axis
    that is reduced: loops that end there fulfil them."""

    def is_end(part: Expr) -> bool:
        if not is_op(part, "lt") or not isinstance(part.args[0], Var):
            return False
        return part.args[0].axis in axes and bool(part.args[1].reads) and not part.args[1].axes

    def rule(node: Expr) -> Expr | None:
        chosen = is_op(node, "select") and isinstance(node.args[2], Const)
        return node.args[1] if chosen and all(map(is_end, flattened(node.args[0], "and"))) else None

    return rewrite(element, rule)


def reduced_below(nest: Nest, axis: Axis) -> Expr | None:
    """The place along a reduction axis from which on nothing is added, where that is one for all that a nest reduces:
    elements behind it are the neutral one."""
    if nest.monoid is None:
        return None
    found = {_neutral_behind(e, axis, n) for e, n in zip(nest.elements, nest.monoid.identity, strict=True)}
    return found.pop() if len(found) == 1 else None


def _neutral_behind(element: Expr, axis: Axis, neutral: Expr) -> Expr | None:
    """The place along an axis from which on an element is the neutral one."""
    if is_op(element, "mul") and isinstance(neutral, Const) and neutral.value == 0:
        found = {_neutral_behind(factor, axis, neutral) for factor in element.args}
        return found.pop() if len(found) == 1 else None
    if not is_op(element, "select") or element.args[2] is not neutral:
        return None
    limits = [p.args[1] for p in flattened(element.args[0], "and") if is_op(p, "lt") and p.args[0] is var(axis)]
    return next((limit for limit in limits if not limit.axes), None)


def moves(node: Load, axis: Axis) -> bool:
    """Whether neighbours along an axis read different elements; axis // n is the same for all within a block."""
    return any(_moves(index, axis) for index in node.indices)


def is_window(nest: Nest, vector: Axis | None) -> bool:
    """Whether all that a sum of products reads moves along the vector, as windows over every channel by itself do."""
    return nest.is_contraction and vector in nest.axes and all(moves(n, vector) for n in nest.element_loads)


def shares_a_read(nest: Nest, axis: Axis) -> bool:
    """Whether some operand does not depend on the axis, so that a row of the tile reuses it."""
    return any(not moves(n, axis) for n in nest.element_loads)


def _moves(index: Expr, axis: Axis) -> bool:
    if axis not in axes_of(index):
        return False
    if isinstance(index, Op) and index.op.name == "floordiv" and index.args[0] is var(axis):
        return False
    return isinstance(index, Var) or not isinstance(index, Op) or any(_moves(a, axis) for a in index.args)


def inline(root: Expr, maps: Mapping[Tensor, Map]) -> Expr:
    """Replace reads of the given maps by what they compute, all the way down: from the reader to what it reads, so that
    each map is written out once for the indices it is read at, however long the chain behind it is."""
    composed: dict[Load, Expr] = {}
    found: dict[Load, Expr] = {}  # what a read stands for, with reads of maps still in it
    indirect: set[Load] = set()  # reads for which that has some inside indices

    def is_indirect(node: Load) -> bool:
        return any(n.source in maps for n in loads(*node.indices))

    def opened(value: Expr) -> list[Load]:
        """Reads of maps that are not composed, those inside indices alone where there are some: they decide where
        others read."""
        reads = [n for n in loads(value) if n.source in maps and n not in composed]
        return [n for n in reads if not is_indirect(n)] or reads

    def read(value: Expr) -> Expr:
        return rewrite(value, lambda n: composed.get(n) if isinstance(n, Load) else None)

    stack: list[Load] = []
    whole = root
    while waiting := opened(whole):
        stack.extend(waiting)
        while stack:
            node = stack[-1]
            if node in composed:
                stack.pop()
                continue
            if node not in found:
                made = maps[node.source]
                found[node] = substitute(made.value, dict(zip(made.axes, node.indices, strict=True)))
                if any(n.source in maps and is_indirect(n) for n in loads(found[node])):
                    indirect.add(node)
            more = opened(found[node])
            if more:
                stack.extend(more)
                continue
            composed[node] = read(found[node])
            if node in indirect and opened(composed[node]):  # where an index was composed another read may begin
                found[node] = composed.pop(node)
                continue
            stack.pop()
        whole = read(whole)
    return whole


def _joined(root: Expr) -> Expr:
    """Reads at indices that one view took apart and another put together, as they were before: at i, not at
    i // 64 * 64 + i % 64, which streams and tiles could not be followed through."""

    def whole_index(index: Expr) -> Expr:
        if not is_op(index, "add"):
            return index
        total = linear(index)
        together = join_divisions(total)
        return index if together is total else together.expr()

    def rule(node: Expr) -> Expr | None:
        if not isinstance(node, Load):
            return None
        indices = [whole_index(i) for i in node.indices]
        return None if all(a is b for a, b in zip(indices, node.indices, strict=True)) else load(node.source, indices)

    return rewrite(root, rule)


def roots_of(nests: Sequence[Nest]) -> list[Nest]:
    """Nests that no other of the kernel reads: their tiles determine those of the others."""
    read = {t for n in nests for t in n.reads()}
    return [n for n in nests if not any(t in read for t in n.stores)] or [nests[-1]]


def build_nest(core: Compute, epilogue: Sequence[Map], maps: Mapping[Tensor, Map]) -> Nest:
    """The nest of a Map or Reduce with `epilogue` maps applied to its result and `maps` composed into its reads."""
    if isinstance(core, Map):
        value = _joined(simplify(inline(core.value, maps)))
        return Nest((core.output,), core.axes, (), (), None, (), (value,), core.output.name)
    if not isinstance(core, Reduce):
        raise TypeError(f"{type(core).__name__} has no nest")
    elements = tuple(_joined(simplify(inline(e, maps))) for e in core.elements)
    accumulated = core.outputs
    if not epilogue:
        values: tuple[Expr, ...] = tuple(load(t, [var(a) for a in core.axes]) for t in accumulated)
        return Nest(core.outputs, core.axes, core.reduce_axes, elements, core.monoid, accumulated, values,
                    accumulated[0].name)  # fmt: skip
    chain = {m.output: m for m in epilogue[:-1]}
    last = epilogue[-1]
    value = inline(last.value, {**maps, **chain})
    value = _joined(simplify(substitute(value, {a: var(b) for a, b in zip(last.axes, core.axes, strict=True)})))
    value = rewrite(value, lambda n: _here(n, accumulated, core.axes))
    return Nest((last.output,), core.axes, core.reduce_axes, elements, core.monoid, accumulated, (value,),
                accumulated[0].name, tuple(m.output.name for m in epilogue))  # fmt: skip


def _here(node: Expr, accumulated: tuple[Tensor, ...], axes: tuple[Axis, ...]) -> Expr | None:
    """Reads of the reduction's result are all spelled the same way: at the axes themselves."""
    return load(node.source, [var(a) for a in axes]) if isinstance(node, Load) and node.source in accumulated else None


# in slots of a multiply-add; measured on vectors of four, chains of dependent operations in fours
_HEAVY = {
    "exp": 25,
    "exp2": 26,
    "log": 41,
    "tanh": 27,
    "erf": 31,
    "sigmoid": 25,
    "sin": 68,
    "cos": 68,
    "pow": 200,
    "div": 12,
    "sqrt": 15,
    "rsqrt": 27,
    "fmod": 40,
}


def _outermost(indices: Iterable[Expr]) -> list[Expr]:
    """Of indices that differ by a constant the lowest and the highest."""
    groups: dict[Hashable, dict[int, Expr]] = {}
    for index in indices:
        value = linear(index)
        groups.setdefault(frozenset(value.terms.items()), {})[value.constant] = index
    return [group[place] for group in groups.values() for place in dict.fromkeys((min(group), max(group)))]


def op_cost(name: str) -> int:
    """In slots of a multiply-add."""
    return _HEAVY.get(name, 1)


def data_cost(*roots: Expr, along: Axis | None = None) -> int:
    """Weighted count of operations on data; index arithmetic and selects between loaded values are free. With `along`,
    of those alone that differ along an axis: the others are done before its loop."""
    found = [n for n in data_ops(*roots) if n.op.name != "select" and not _is_free_cast(n)]
    return sum(_HEAVY.get(n.op.name, 1) for n in found if along is None or along in n.axes)


def heavy(*roots: Expr) -> list[Op]:
    """Operations on floats that take many instructions."""
    return [n for n in walk(*roots) if isinstance(n, Op) and n.op.name in _HEAVY and n.dtype.name == "float32"]


def _is_free_cast(node: Op) -> bool:
    """Conversions cost nothing beside what they move, but for rounding: its result is worth keeping."""
    own, given = node.dtype, node.args[0].dtype
    rounds = (own.bits < given.bits and given.is_float) or dtypes.widens(own, given)
    return node.op.name == "cast" and not rounds


def data_ops(*roots: Expr) -> list[Op]:
    """Operations on data: those of indices and conditions are none."""
    nodes = list(walk(*roots))
    stack: list[Expr] = []
    for node in nodes:
        if isinstance(node, Load):
            stack.extend(node.args)
        elif is_op(node, "select"):
            stack.append(node.args[0])
    of_indices: set[Expr] = set()
    while stack:
        node = stack.pop()
        if node not in of_indices:
            of_indices.add(node)
            stack.extend(node.args)
    return [n for n in nodes if isinstance(n, Op) and n not in of_indices]


def is_view(compute: Compute) -> bool:
    """A map that only moves data."""
    return isinstance(compute, Map) and data_cost(compute.value) == 0


def is_identity_read(node: Load, axes: Sequence[Axis]) -> bool:
    """Whether a read takes the element at the axes themselves (index 0 along an axis of one element included)."""
    return len(node.indices) == len(axes) and all(
        (isinstance(i, Var) and i.axis is a) or (a.extent == 1 and isinstance(i, Const) and i.value == 0)
        for i, a in zip(node.indices, axes, strict=True)
    )


def held_inside(nests: Sequence[Nest], first: int, last: int, stored: Container[Tensor]) -> list[Nest]:
    """Nests of a kernel, from `first` up to `last`, whose results no other one reads, and that are not stored."""
    outside = {t for n in (*nests[:first], *nests[last:]) for t in n.reads()}
    inside = [n for n in nests[first:last] if n is not nests[-1]]
    return [n for n in inside if not any(t in outside or t in stored for t in n.stores)]
