"""Whether a stream's nests can keep all they pass to each other in the registers of warps, each with rows of its own.

Every axis of the nests is one of: the rows, which warps share out; the streamed axis, walked in blocks; the columns of
what is summed up along it; or an axis of which a block has one place. Rows by the streamed axis and rows by columns are
fragments of tensor cores; what has rows alone is kept by each of the lanes that share a row of a fragment. The sums of
one product leave lanes with what they must have as rows' operand of the next. A map that nothing but the rows' operand
of a product reads is computed as that is brought.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewright.backend.gpu.constants import FUNCTION_SLOTS, LOAD_SLOTS
from tilewright.backend.gpu.matrix.sides import Sides, sides_of
from tilewright.backend.gpu.stream.visible import ROW, STREAM, seen_until
from tilewright.backend.gpu.threads.nest import quick_erf
from tilewright.intrinsics.gpu_matrix import FORMS
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.expr import Axis, Const, Expr, Load, Op, Var, loads
from tilewright.ir.forms.tensor import Tensor
from tilewright.tile_graph.algebra.nest import Nest, data_cost, data_ops, op_cost
from tilewright.tile_graph.algebra.propagate import extent_of
from tilewright.tile_graph.algebra.streams import Stream
from tilewright.tile_graph.plan.form import Leaf

COLUMN, SINGLE = "column", "single"
_MOST_SUMMED, _MOST_COLUMNS = 256, 256
_LEAST_ROWS = 16  # of one axis, where rows have several: those of a fragment


@dataclass(frozen=True)
class RegisterForm:
    """What every axis of a stream's nests is, and its products."""

    roles: Mapping[Axis, str]
    products: Mapping[Nest, Sides]  # columns along the streamed axis, or along the columns
    summed: int  # the most that a product with results along the streamed axis sums up
    columns: int
    work: int  # operations on an element along rows and the streamed axis, but for what is counted in `long`
    long: float  # slots of such an element for functions of many instructions but powers, and for what it reads
    read: int  # bytes of what such an element reads
    end: float  # slots of functions and reads of an element along rows and columns
    rows: int  # in all
    until: int | None  # row i sees places of the streamed axis up to i plus this; None: all
    is_apart: bool  # there are products along the streamed axis, and what is summed up by products is read after it

    def axes(self, nest: Nest, role: str) -> list[Axis]:
        return [a for a in nest.axes if self.roles.get(a) == role]


def register_form(nests: Sequence[Nest], leaves: Sequence[Leaf], stream: Stream) -> RegisterForm | None:
    """How a stream lies in registers; None where it cannot."""
    found = _Roles(nests, leaves, stream)
    if not found.start() or not found.spread() or not found.single():
        return None
    products: dict[Nest, Sides] = {}
    summed, columns, work = 1, 1, 0
    long, read, end = 0.0, 0, 0.0
    done: set[Tensor] = set()
    for nest, leaf in zip(nests, leaves, strict=True):
        kind = found.kind(nest)
        if found.is_operand(nest):
            continue
        kept = (*_KEPT, *_STORED) if nest is nests[-1] and kind == COLUMN else _KEPT
        if kind is None or nest.initial or any(t.dtype not in kept for t in nest.stores):
            return None
        if nest in stream.wide or nest in stream.reducers:
            if leaf.instruction in FORMS:
                sides = found.sides(nest)
                if sides is None:
                    return None
                products[nest] = sides
                if nest in stream.wide:
                    summed = max(summed, extent_of(nest.reduce_axes[0].extent))
                else:
                    columns = max(columns, extent_of(found.own(nest, COLUMN)[0].extent))
            elif not found.is_plain(nest, kind):
                return None
            done.update(nest.stores)
        elif nest.monoid is not None or not any(t in done for t in nest.reads()) or kind == STREAM:
            return None
        else:
            done.update(nest.stores)
        values = tuple(map(quick_erf, (*nest.values, *(() if nest in products else nest.elements))))
        if kind == STREAM or nest in stream.reducers:
            work += data_cost(*values) - sum(op_cost(n.op.name) for n in long_functions(*values)) + 1
        if kind == COLUMN:
            end += found.slots(nest, values, COLUMN)[0]
        else:  # what sums of rows become is done once a row
            each = values if kind == STREAM else () if nest in products else tuple(map(quick_erf, nest.elements))
            taken, moved = found.slots(nest, each, STREAM)
            long, read = long + taken, read + moved
    if not any(n in products for n in stream.reducers) or summed > _MOST_SUMMED or columns > _MOST_COLUMNS:
        return None
    inside = {t for n in (*stream.wide, *stream.reducers) for t in n.reads()}
    read_back = any(n.tensor in inside for n in products if n in stream.reducers)
    is_apart = any(n in products for n in stream.wide) and not read_back
    (row,) = found.own(nests[-1], ROW)
    until = seen_until(nests, stream, found.roles)
    return RegisterForm(found.roles, products, summed, columns, work, long, read, end,
                        extent_of(row.extent), until, is_apart)  # fmt: skip


def long_functions(*values: Expr) -> list[Op]:
    """Functions of many instructions; powers are one where streams take them, and quotients by a number a few."""
    few = ("exp", "exp2")
    return [n for n in data_ops(*values) if n.op.name in FUNCTION_SLOTS and n.op.name not in few
            and not (n.op.name == "div" and isinstance(n.args[1], Const))]  # fmt: skip


_KEPT = (dtypes.float32, dtypes.float16, dtypes.bfloat16)
_STORED = (dtypes.int8, dtypes.uint8)  # what the last nest may round its results to
_PLAIN = ("add", "max", "min", "mul")


class _Roles:
    """Works out what axes are, from the products outwards."""

    def __init__(self, nests: Sequence[Nest], leaves: Sequence[Leaf], stream: Stream) -> None:
        self.nests = nests
        self.leaves = dict(zip(nests, leaves, strict=True))
        self.stream = stream
        self.inside = {t: n for n in nests for t in n.stores}
        self.roles: dict[Axis, str] = {}

    def start(self) -> bool:
        """The streamed axis, and the rows and columns of the products along it."""
        walked = {**self.stream.wide, **self.stream.reducers}
        if not all(self._put(axis, STREAM) for axis in walked.values()):
            return False
        for nest, axis in self.stream.reducers.items():
            if self.leaves[nest].instruction not in FORMS:
                continue
            sides = sides_of(nest)
            if sides is None or nest.reduce_axes != (axis,):
                return False
            streamed = [self._reads_inside(side.value) for side in (sides.rows, sides.columns)]
            if sorted(streamed) != [False, True]:
                return False
            for side, is_rows in zip((sides.rows, sides.columns), streamed, strict=True):
                own = [a for a in side.axes if extent_of(a.extent) > 1]
                if not own or (len(own) > 1 and not is_rows) or not self._put(own[-1], ROW if is_rows else COLUMN):
                    return False
                # several rows of queries, say, for the same keys: a block has one place of all axes but the last
                others = own[:-1]
                if others and extent_of(own[-1].extent) < _LEAST_ROWS:
                    return False
                if not all(self._put(axis, SINGLE) for axis in others):
                    return False
        return bool(self.roles)

    def spread(self) -> bool:
        """The same through all reads; False where one is not along the axes themselves."""
        while True:
            before = len(self.roles)
            for nest in self.nests:
                for node in nest.loads():
                    if node.source in self.inside and not self._along(node):
                        return False
            if len(self.roles) == before:
                return True

    def single(self) -> bool:
        """Of the root's other axes a block has one place each, and every axis of all nests is known."""
        for axis in self.nests[-1].axes:
            self.roles.setdefault(axis, SINGLE)
        if not self.spread():
            return False
        return all(a in self.roles or extent_of(a.extent) == 1
                   for n in self.nests if not self.is_operand(n) for a in n.axes)  # fmt: skip

    def is_operand(self, nest: Nest) -> bool:
        """Whether a map of what is outside is the rows' operand of products along the streamed axis, and no more."""
        if nest.monoid is not None or nest in self.stream.wide or any(t in self.inside for t in nest.reads()):
            return False
        readers = [n for n in self.nests if nest.tensor in n.reads()]
        return bool(readers) and all(
            n in self.stream.wide and self.leaves[n].instruction in FORMS and len(self.own(n, STREAM)) == 1
            and (sides := sides_of(n, self.own(n, STREAM)[0])) is not None
            and not any(x.source is nest.tensor for x in loads(sides.columns.value, *n.values)) for n in readers
        )  # fmt: skip

    def _along(self, node: Load) -> bool:
        assert isinstance(node.source, Tensor)
        for axis, index in zip(self.inside[node.source].axes, node.indices, strict=True):
            if not isinstance(index, Var):
                if extent_of(axis.extent) > 1:
                    return False
                continue
            for known, other in ((axis, index.axis), (index.axis, axis)):
                role = self.roles.get(known)
                if role is not None and not self._put(other, role):
                    return False
        return True

    def _put(self, axis: Axis, role: str) -> bool:
        return self.roles.setdefault(axis, role) == role

    def _reads_inside(self, value: Expr) -> bool:
        return any(x.source in self.inside for x in loads(value))

    def own(self, nest: Nest, role: str) -> list[Axis]:
        return [a for a in nest.axes if self.roles.get(a) == role]

    def slots(self, nest: Nest, values: Sequence[Expr], role: str) -> tuple[float, int]:
        """Instructions of an element for long functions and reads from memory along an axis, and bytes of these: rows
        share what has none, in the cache and where a lane keeps two. Sums of its own a lane has."""
        taken, moved = float(sum(FUNCTION_SLOTS[n.op.name] for n in long_functions(*values))), 0
        for node in loads(*values):
            along = {self.roles.get(a) for a in node.axes}
            if node.source not in self.inside and node.source not in nest.accumulated and role in along:
                taken += LOAD_SLOTS if ROW in along else LOAD_SLOTS / 4
                moved += node.dtype.bytes if ROW in along else 0
        return taken, moved

    def kind(self, nest: Nest) -> str | None:
        """What a nest's results have beside rows: STREAM, COLUMN, or nothing (ROW); None: no rows, or more."""
        rows, columns, streamed = (len(self.own(nest, role)) for role in (ROW, COLUMN, STREAM))
        if rows != 1 or columns + streamed > 1:
            return None
        return STREAM if streamed else COLUMN if columns else ROW

    def sides(self, nest: Nest) -> Sides | None:
        """A product with its rows along the rows; operands that are not in registers come from outside."""
        kind = self.kind(nest)
        if kind == ROW or kind is None or len(nest.reduce_axes) != 1:
            return None
        if (kind == STREAM) != (nest in self.stream.wide):
            return None
        sides = sides_of(nest, self.own(nest, kind)[0])
        if sides is None or FORMS[sides.instruction].operand.bits != 16:
            return None
        for side, role in ((sides.rows, ROW), (sides.columns, kind)):
            own = [a for a in side.axes if extent_of(a.extent) > 1 and self.roles.get(a) != SINGLE]
            if own != self.own(nest, role):
                return None
        inside = [self.inside[x.source] for x in loads(sides.rows.value) if x.source in self.inside]
        from_registers = any(not self.is_operand(n) for n in inside)
        if self._reads_inside(sides.columns.value) or from_registers != (nest in self.stream.reducers):
            return None
        return sides

    def is_plain(self, nest: Nest, kind: str) -> bool:
        """Maps along the streamed axis, and reductions along it to rows alone."""
        if nest in self.stream.wide:
            return nest.monoid is None and kind == STREAM
        monoid = nest.monoid
        assert monoid is not None
        walks_it = nest.reduce_axes == (self.stream.reducers[nest],)
        return kind == ROW and walks_it and monoid.operator in _PLAIN and monoid.left[0].dtype in _KEPT
