"""A batch in parts that go through a model one after the other: the Program of one part.

From the outputs back: a tensor is needed in blocks of one dimension, what its compute then reads is needed in blocks of
another, or whole. What all parts need whole they compute or take alike. Nothing passes between parts, and the Program
of the first has to be that of every other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from tilewright.errors import OptionError
from tilewright.ir.analysis.pieces import part_of
from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, expressions, reads
from tilewright.ir.forms.expr import Expr, Load, const, load, rewrite, substitute, var
from tilewright.ir.forms.mesh import WHOLE, AxisPart, Coordinates, Mesh, Place, Spread, slices
from tilewright.ir.forms.sharded import ShardedCompute
from tilewright.ir.forms.tensor import Tensor, extents
from tilewright.ir.text.text import program_text
from tilewright.tile_graph.sharding.strategies import Cut, strategy_of


@dataclass(frozen=True)
class Batches:
    """The Program of one part, how many there are, and by name of which dimension of inputs and outputs it has a block;
    inputs without one are every part's."""

    program: Program
    parts: int
    inputs: Mapping[str, int]
    outputs: Mapping[str, int]

    @property
    def blocks(self) -> Mapping[str, int]:
        """How many there are of each input and output that a part has one of, by name."""
        return dict.fromkeys((*self.inputs, *self.outputs), self.parts)


def in_parts(program: Program, parts: int) -> Batches:
    """A Program's batch in so many parts; it is the first dimension of the outputs along which they can be cut."""
    if parts == 1:
        return Batches(program, 1, {}, {})
    reasons: list[OptionError] = []
    for dim in range(min((t.rank for t in program.outputs), default=0)):
        try:
            return _Parts(program, parts, dim).run()
        except OptionError as error:
            reasons.append(error)
    nothing = OptionError(f"micro_batches={parts}: an output has no dimension to be cut along")
    raise reasons[0] if reasons else nothing


@dataclass
class _Parts:
    program: Program
    parts: int
    dim: int  # of the outputs
    mesh: Mesh = field(init=False)
    wanted: dict[Tensor, list[tuple[Spread, ...]]] = field(default_factory=dict)  # by reader, of which one will do
    whole: dict[Tensor, str] = field(default_factory=dict)  # what computes need all of, and one such
    spreads: dict[Tensor, Spread] = field(default_factory=dict)
    pieces: list[ShardedCompute] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.mesh = Mesh((("batch", self.parts),))

    def run(self) -> Batches:
        for tensor in self.program.outputs:
            size = extents(tensor)[self.dim]
            if size % self.parts:
                told = f"dimension {self.dim} of the output '{tensor.name}' has {size}, take a divisor of it"
                raise self._refused(told)
            self.wanted[tensor] = [(self._blocks(self.dim),)]
        for compute in reversed(self.program.computes):
            self._decide(compute)
        self._decide_given()
        return self._made()

    # --- which blocks, from the outputs back

    def _blocks(self, dim: int) -> Spread:
        return Spread((AxisPart(dim),))

    def _decide(self, compute: Compute) -> None:
        axes = compute.axes if isinstance(compute, Map | Reduce) else ()
        able: dict[Spread, Cut] = {self._blocks(dim): axis for dim, axis in enumerate(axes)}
        cut = able.get(self._agreed(compute.outputs[0]))
        strategy = strategy_of(compute, (cut,), self.mesh)
        if strategy is None or any(self._agreed(t) != strategy.gives for t in compute.outputs):
            strategy = strategy_of(compute, (None,), self.mesh)
            assert strategy is not None
        self.spreads.update(dict.fromkeys(compute.outputs, strategy.gives))
        for tensor in reads(compute):
            self.wanted.setdefault(tensor, []).append(strategy.needs[tensor])
            if all(spread.is_whole for spread in strategy.needs[tensor]):
                self.whole[tensor] = compute.outputs[0].name
        self.pieces.insert(0, strategy.piece(compute, {}))

    def _agreed(self, tensor: Tensor) -> Spread:
        """Blocks that every reader can do with; whole, where there are none."""
        wanted = self.wanted.get(tensor, [])
        for spread in wanted[0] if wanted else ():
            part = spread.parts[0]
            if part.dim is None or part.before or part.after or extents(tensor)[part.dim] % self.parts:
                continue
            if all(spread in others for others in wanted):
                return spread
        return Spread.whole(self.mesh)

    def _decide_given(self) -> None:
        for tensor in (*self.program.inputs, *self.program.constants):
            self.spreads[tensor] = self._agreed(tensor)
        if not any(self.spreads[t] != Spread((WHOLE,)) for t in self.program.inputs):
            needed = [f"'{self.whole[t]}' needs all of '{t.name}'" for t in self.program.inputs if t in self.whole]
            raise self._refused(needed[0] if needed else "no output depends on an input")

    # --- the Program of a part

    def _made(self) -> Batches:
        """That of the first part, which is that of all others."""
        first = self._part((0,))
        for at in self.mesh.coordinates[1:]:
            self._compare(first, self._part(at))
        named = self.spreads
        inputs = {t.name: named[t].parts[0].dim for t in self.program.inputs}
        return Batches(
            first, self.parts, {name: dim for name, dim in inputs.items() if dim is not None},
            {t.name: self.dim for t in self.program.outputs},
        )  # fmt: skip

    def _part(self, at: Coordinates) -> Program:
        places = {t: spread.place(extents(t), self.mesh, at) for t, spread in self.spreads.items()}
        own = {t: Tensor(t.name, tuple(n for _, n in place), t.dtype) for t, place in places.items()}
        held: dict[Tensor, tuple[Tensor, Place]] = {t: (own[t], place) for t, place in places.items()}
        computes: list[Compute] = []
        for piece in self.pieces:
            if isinstance(piece.compute, Map | Reduce):
                computes.append(part_of(piece, self.mesh, at, tuple(own[t] for t in piece.compute.outputs), held))
                continue
            cut = [t for t in reads(piece.compute) if not self.spreads[t].is_whole]
            if cut:
                raise self._refused(f"'{piece.compute.outputs[0].name}' needs all of '{cut[0].name}'")
            own.update({t: t for t in (*piece.compute.outputs, *reads(piece.compute))})
            computes.append(piece.compute)
        constants = {own[t]: np.ascontiguousarray(array[slices(places[t])]) if not self.spreads[t].is_whole else array
                     for t, array in self.program.constants.items()}  # fmt: skip
        inputs, outputs = tuple(own[t] for t in self.program.inputs), tuple(own[t] for t in self.program.outputs)
        return replace(self.program, inputs=inputs, outputs=outputs, computes=tuple(computes), constants=constants)

    def _compare(self, first: Program, other: Program) -> None:
        for tensor, _ in _other_constants(first, other):
            raise self._refused(f"the constant '{tensor.name}' is another one for every part")
        for compute, its in zip(first.computes, other.computes, strict=True):
            if _text(compute) != _text(its):
                raise self._refused(f"'{compute.outputs[0].name}' is not the same for every part")

    def _refused(self, reason: str) -> OptionError:
        return OptionError(f"micro_batches={self.parts}: {reason}")


def are_same(one: Program, other: Program) -> bool:
    """Whether two Programs do the same, in the same words but for how they name constants and the only place along an
    axis, and for copies that change nothing."""
    ports = [(p.input_names, p.output_names, len(p.constants)) for p in (one, other)]
    if ports[0] != ports[1] or any(True for _ in _other_constants(one, other)):
        return False
    return _words(one, {}) == _words(other, dict(zip(other.constants, one.constants, strict=True)))


def _words(program: Program, same: dict[Tensor, Tensor]) -> list[str]:
    """What a Program says, of tensors that are the `same` as others what these are called; so are its copies."""
    found: list[str] = []
    for compute in program.computes:
        plain = _plain(compute, same)
        source = _copied(plain)
        if source is not None:
            same[plain.outputs[0]] = source
        else:
            found += [_text(plain), *(same.get(t, t).name for t in reads(plain))]
    return [*found, *(same.get(t, t).name for t in program.outputs)]


def _other_constants(one: Program, other: Program) -> Iterator[tuple[Tensor, Tensor]]:
    """Constants in the same place that have other elements."""
    pairs = zip(one.constants.items(), other.constants.items(), strict=True)
    for (tensor, array), (its, another) in pairs:
        if array is not another and not np.array_equal(array, another, equal_nan=array.dtype.kind in "fc"):
            yield tensor, its


def _plain(compute: Compute, same: Mapping[Tensor, Tensor]) -> Compute:
    """The same with 0 for every axis of one element, of what is copied instead of the copies."""
    if not isinstance(compute, Map | Reduce):
        return compute
    axes = (*compute.axes, *(compute.reduce_axes if isinstance(compute, Reduce) else ()))
    only = {axis: 0 for axis in axes if axis.extent == 1}

    def original(node: Expr) -> Expr | None:
        return load(same[node.source], node.args) if isinstance(node, Load) and node.source in same else None

    values = tuple(simplify(rewrite(substitute(value, only), original)) for value in expressions(compute))
    return replace(compute, value=values[0]) if isinstance(compute, Map) else replace(compute, elements=values)


def _copied(compute: Compute) -> Tensor | None:
    """The tensor that a Map gives as it is."""
    if not isinstance(compute, Map) or not isinstance(compute.value, Load):
        return None
    source, places = compute.value.source, [const(0) if a.extent == 1 else var(a) for a in compute.axes]
    is_whole = isinstance(source, Tensor) and source.shape == compute.output.shape
    return source if is_whole and list(compute.value.args) == places else None


def _text(compute: Compute) -> str:
    return program_text(Program(tuple(reads(compute)), compute.outputs, (compute,), {}))
