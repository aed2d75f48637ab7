"""A block of positions whose accumulators live in registers, and the names of a kernel's buffers."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms.expr import Axis, Expr, substitute, var
from tilewright.ir.forms.loops import For, ForKind, Stmt
from tilewright.lower.nesting import unrolled
from tilewright.tile_graph.algebra.propagate import extent_of


@dataclass
class BufferNames:
    """Gives unique buffer names within a kernel, and so that no element of one spells as the name of another:
    renderers write the element 1 of `row` as row_1, so the second `row` is row1."""

    used: dict[str, int] = field(default_factory=dict)

    def fresh(self, stem: str) -> str:
        count = self.used.get(stem, 0)
        self.used[stem] = count + 1
        return stem if count == 0 else f"{stem}{count}"


@dataclass(frozen=True)
class RegisterBlock:
    """One register block: the value of every axis, the unrolled axes inside and the lane axis if it is vectorised."""

    env: dict[Axis, Expr]
    unrolled: tuple[Axis, ...]
    lane: Axis | None
    starts: dict[Axis, int] = field(default_factory=dict)  # unrolled axes that begin inside the accumulators
    walk: tuple[Axis, ...] = ()  # the unrolled axes in the order they are written out; empty: as they stand
    cut_lane: bool = False  # the last unrolled axis is a single lane of the accumulators' vectors

    def without(self, axis: Axis, first: bool) -> RegisterBlock:
        """The block less its first or last position along an unrolled axis."""
        shorter = Axis(axis.name, extent_of(axis.extent) - 1)
        start = 1 if first else 0
        moved = {axis: var(shorter) + start}
        env = {a: simplify(substitute(v, moved)) for a, v in self.env.items()}
        unrolled, walk = (tuple(shorter if a is axis else a for a in axes) for axes in (self.unrolled, self.walk))
        return RegisterBlock(env, unrolled, self.lane, {**self.starts, shorter: start}, walk, self.cut_lane)

    def around(self, *inner: Stmt) -> tuple[Stmt, ...]:
        body: tuple[Stmt, ...] = inner
        if self.lane is not None:
            body = (For(self.lane, ForKind.VECTOR, body),)
        return unrolled(self.walk or self.unrolled, body)

    @property
    def index(self) -> tuple[Expr, ...]:
        places = (var(a) + self.starts[a] if self.starts.get(a) else var(a) for a in self.unrolled)
        return (*places, *((var(self.lane),) if self.lane is not None else ()))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(extent_of(a.extent) for a in (*self.unrolled, *((self.lane,) if self.lane is not None else ())))
