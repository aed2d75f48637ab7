"""Where the rows of a contraction lie that matrix registers run: in place, in a copy of the tile's window, or staged.

A matrix register is read as rows an equal distance apart. Rows that lie so in memory are read in place. Rows that
windows of a padded input overlap in are read from one copy of that input, zeros around it, in which every element lies
once. All others are staged: a block of rows is copied register by register, zeros where nothing counts, into scratch
that stays in the first cache while the columns pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilewright.backend.cpu.dot.operands import Env, Setting, do, flat, row_env, step_along
from tilewright.backend.cpu.vector.nest import CpuNest
from tilewright.intrinsics.cpu import TILE_BYTES, TILE_ROWS
from tilewright.ir.analysis.simplify import Linear, linear, simplify
from tilewright.ir.forms.bounds import static
from tilewright.ir.forms.expr import (
    Axis,
    Const,
    Expr,
    Load,
    Var,
    all_of,
    axes_of,
    const,
    flattened,
    is_op,
    le,
    lt,
    minimum,
    select,
    substitute,
    var,
)
from tilewright.ir.forms.loops import Alloc, Buffer, For, ForKind, If, Memory, Operand, Stmt, Store
from tilewright.ir.forms.tensor import Tensor
from tilewright.lower.blocks import BlockRun, pieces
from tilewright.lower.nesting import serial, trip_count
from tilewright.target.instruction_sets import WAY_BYTES
from tilewright.tile_graph.algebra.propagate import Range, extent_of

_LANES = TILE_BYTES // 4  # elements stored at a time that are computed, not copied
_CROWDED = WAY_BYTES // 2  # bytes: rows a multiple of this apart fall on two sets


@dataclass(frozen=True, eq=False)
class Steps:
    """Blocks of the innermost reduction that one pass over the tile multiplies: `count` of them from `first` on."""

    first: Expr
    count: Expr
    most: int


class TileRows:
    """Rows in place: whole blocks of k are contiguous, and rows of a register an equal distance apart."""

    in_place = True

    def __init__(self, nest: CpuNest, setting: Setting, unit: int) -> None:
        self.nest = nest
        self.setting = setting
        self.unit = unit  # rows in steps of which registers begin and end
        self.stride = 0  # elements between rows

    @property
    def height(self) -> int:
        """Rows of one register in a whole block."""
        return self.unit if self.unit > 1 else TILE_ROWS

    def heights(self, rows: int) -> list[int]:
        """Rows of each register of a block."""
        return [min(self.height, rows - done) for done in range(0, rows, self.height)]

    def blocks(self) -> list[BlockRun]:
        """Blocks of rows; none ends inside a unit."""
        extent, size, unit = self.setting.height, self.setting.size, self.unit
        if unit == 1:
            return pieces(extent, size, 1)
        part = Range(simplify(extent.low // unit), int(extent.size) // unit, extent.extent // unit)
        found = pieces(part, max(1, size // unit), 1)
        return [BlockRun(simplify(p.base * unit), p.trips, p.size * unit, 1) for p in found]

    def around(self, body: Sequence[Stmt]) -> tuple[Stmt, ...]:
        return tuple(body)

    def fill(self) -> tuple[Stmt, ...]:
        """What is copied once a tile."""
        return ()

    def stage(self, env: Env, row: Expr, rows: int, steps: Steps) -> tuple[Stmt, ...]:
        """What is copied for every block of rows."""
        return ()

    def at(self, env: Env, row: Expr, number: int, outer: Env, k: Expr, step: Expr) -> Operand:
        """The `number`th register of the block of rows from `row` on; `step` counts blocks of k within the pass."""
        node = self.read(env, simplify(row + number * self.height), outer, k)
        assert isinstance(node, Load)
        return Operand(node.source, node.indices)

    def ahead(self, env: Env, row: Expr, outer: Env, k: Expr) -> Operand | None:
        """Where a row comes from, for a hint; None where that is not one place."""
        node = self.read(env, row, outer, k)
        return Operand(node.source, node.indices) if isinstance(node, Load) else None

    def read(self, env: Env, row: Expr, outer: Env, k: Expr) -> Expr:
        at = {**env, **row_env(self.nest, self.setting, row), **outer, self.setting.inner: k}
        return simplify(self.nest.access.lower(substitute(self.setting.found.a, at)))


class _Window(TileRows):
    """One copy of all that the tile's windows reach over, zeros where that is outside of the tensor."""

    in_place = False

    def __init__(self, nest: CpuNest, setting: Setting, unit: int, shape: _Reach) -> None:
        super().__init__(nest, setting, unit)
        self.reach = shape
        size = setting.found.a.dtype.bytes
        line = TILE_BYTES // size
        self.pitch = -(-setting.padded // line) * line
        if self.pitch * size % _CROWDED == 0:
            self.pitch += line
        self.buffer = Buffer(nest.names.fresh("window"), (*shape.sizes, self.pitch), setting.found.a.dtype,
                             Memory.SCRATCH)  # fmt: skip
        last = setting.rows[-1] if setting.rows else None
        below = 1
        for number in reversed(range(len(shape.sizes))):
            index = linear(shape.indices[number])
            self.stride += index.terms.get(var(last), 0) * below * self.pitch if last is not None else 0
            below *= shape.sizes[number]

    def around(self, body: Sequence[Stmt]) -> tuple[Stmt, ...]:
        return (Alloc(self.buffer, tuple(body)),)

    def fill(self) -> tuple[Stmt, ...]:
        reach, extent = self.reach, extent_of(self.setting.inner.extent)
        loops = [Axis(f"at{number}", size) for number, size in enumerate(reach.sizes)]
        places = [simplify(low + var(loop)) for low, loop in zip(reach.lows, loops, strict=True)]
        inside = [c for p, n in zip(places, reach.extents, strict=True) for c in (le(0, p), lt(p, n))]
        check = simplify(all_of(inside))
        indices = list(places)
        indices.insert(reach.inner, const(0))
        source = self.nest.access.read[reach.source]
        origin = Operand(source.buffer, source.indices(tuple(indices)))
        to = Operand(self.buffer, (*(var(loop) for loop in loops), const(0)))
        body: tuple[Stmt, ...] = (do("copy_run", (to, origin), extent),)
        if not (isinstance(check, Const) and check.value):
            body = (If(check, body, (do("clear_run", (to,), extent),)),)
        if self.setting.padded > extent:
            rest = Operand(self.buffer, (*(var(loop) for loop in loops), const(extent)))
            body = (*body, do("clear_run", (rest,), self.setting.padded - extent))
        return serial(loops, body)

    def at(self, env: Env, row: Expr, number: int, outer: Env, k: Expr, step: Expr) -> Operand:
        here = {**env, **row_env(self.nest, self.setting, simplify(row + number * self.height)), **outer}
        reach = self.reach
        places = [substitute(index, here) - low for index, low in zip(reach.indices, reach.lows, strict=True)]
        return Operand(self.buffer, (*(simplify(p) for p in places), k))

    def ahead(self, env: Env, row: Expr, outer: Env, k: Expr) -> Operand | None:
        return None  # it was written just before


class _Staged(TileRows):
    """A block of rows, register by register: (register, step of the pass, row, element)."""

    in_place = False

    def __init__(self, nest: CpuNest, setting: Setting, most: int, contiguous: bool) -> None:
        super().__init__(nest, setting, 1)
        self.contiguous = contiguous
        self.stride = TILE_BYTES // setting.found.a.dtype.bytes
        self.outer_sizes = tuple(extent_of(a.extent) for a in setting.windows)
        registers = -(-setting.size // TILE_ROWS)
        shape = (registers, most, TILE_ROWS, self.stride)
        self.buffer = Buffer(nest.names.fresh("rows"), shape, setting.found.a.dtype, Memory.SCRATCH)

    def around(self, body: Sequence[Stmt]) -> tuple[Stmt, ...]:
        return (Alloc(self.buffer, tuple(body)),)

    def at(self, env: Env, row: Expr, number: int, outer: Env, k: Expr, step: Expr) -> Operand:
        return Operand(self.buffer, (const(number), step, const(0), const(0)))

    def ahead(self, env: Env, row: Expr, outer: Env, k: Expr) -> Operand | None:
        return super().ahead(env, row, outer, k) if self.contiguous and not self.setting.found.conditions else None

    def stage(self, env: Env, row: Expr, rows: int, steps: Steps) -> tuple[Stmt, ...]:
        result: list[Stmt] = []
        for number, height in enumerate(self.heights(rows)):
            line = Axis("row", height)
            loops = [Axis(a.name, n) for a, n in zip(self.setting.windows, self.outer_sizes, strict=True)]
            outer: Env = {a: var(loop) for a, loop in zip(self.setting.windows, loops, strict=True)}
            before: Expr = const(0)
            for loop, size in zip(loops, self.outer_sizes, strict=True):
                before = before * size + var(loop)
            here = simplify(row + number * TILE_ROWS + var(line))
            at = {**env, **row_env(self.nest, self.setting, here), **outer}
            run = self._run(at, number, var(line), simplify(before * self.setting.steps), steps)
            result.extend(serial((line, *loops), run))
        return tuple(result)

    def _run(self, at: Env, number: int, line: Expr, before: Expr, steps: Steps) -> tuple[Stmt, ...]:
        """The steps of one row; the last of the reduction may be less than a block."""
        setting = self.setting
        block, extent = setting.block, extent_of(setting.inner.extent)
        full, rest = divmod(extent, block)
        whole = simplify(minimum(steps.count, const(full) - steps.first)) if rest else steps.count
        conditions = setting.found.conditions
        alike = [c for c in conditions if setting.inner not in axes_of(c)]
        is_copied = self.contiguous and len(alike) == len(conditions)

        def put(step: Expr, size: int) -> tuple[Stmt, ...]:
            place = (const(number), simplify(before + step), line)
            first = simplify((steps.first + step) * block)
            body: list[Stmt] = []
            if is_copied:
                source = self.nest.access.lower(substitute(setting.found.a, {**at, setting.inner: first}))
                assert isinstance(source, Load)
                to = Operand(self.buffer, (*place, const(0)))
                body.append(do("copy_run", (to, Operand(source.source, source.indices)), size))
            else:
                body.extend(self._computed(at, place, first, size))
            if size < block:
                body.append(do("clear_run", (Operand(self.buffer, (*place, const(size))),), block - size))
            return tuple(body)

        loop = Axis("step", trip_count(whole))
        body: tuple[Stmt, ...] = (For(loop, ForKind.SERIAL, put(var(loop), block)),) if static(whole) != 0 else ()
        if rest:
            last = put(simplify(const(full) - steps.first), rest)
            reached = simplify(lt(const(full), steps.first + steps.count))
            body = (*body, *(last if isinstance(reached, Const) and reached.value else (If(reached, last),)))
        check = simplify(self.nest.access.lower(all_of(substitute(c, at) for c in alike)))
        if not is_copied or (isinstance(check, Const) and check.value):
            return body
        none = Axis("step", trip_count(steps.count))
        zero = Operand(self.buffer, (const(number), simplify(before + var(none)), line, const(0)))
        return (If(check, body, (For(none, ForKind.SERIAL, (do("clear_run", (zero,), block),)),)),)

    def _computed(self, at: Env, place: tuple[Expr, ...], first: Expr, size: int) -> list[Stmt]:
        """Elements that are no plain run of memory."""
        found, inner = self.setting.found, self.setting.inner
        value = found.a
        if found.conditions:
            value = select(all_of(found.conditions), value, const(0, value.dtype))

        def store(k: Expr) -> Store:
            lowered = simplify(self.nest.access.lower(substitute(value, {**at, inner: simplify(first + k)})))
            return Store(self.buffer, (*place, simplify(k)), lowered)

        result: list[Stmt] = []
        vectors = size // _LANES
        if vectors:
            block, lane = Axis("k_block", vectors), Axis("k_lane", _LANES)
            result.append(For(block, ForKind.SERIAL, (
                For(lane, ForKind.VECTOR, (store(var(block) * _LANES + var(lane)),)),)))  # fmt: skip
        if size - vectors * _LANES:
            rest = Axis("k", size - vectors * _LANES)
            result.append(For(rest, ForKind.SERIAL, (store(var(rest) + vectors * _LANES),)))
        return result


@dataclass(frozen=True, eq=False)
class _Reach:
    """A tensor's dimensions but the summed one: what a tile's windows reach over in them."""

    source: Tensor
    inner: int  # the summed dimension
    indices: tuple[Expr, ...]
    lows: tuple[Expr, ...]
    sizes: tuple[int, ...]
    extents: tuple[int, ...]


def tile_rows(nest: CpuNest, setting: Setting, most: int, is_packed: bool) -> TileRows:
    """How the rows of this nest are read. `most` blocks of k come in one pass over the tile; `is_packed`: rows that
    could be read in place are staged all the same."""
    contiguous = _is_contiguous(nest, setting)
    is_aligned = extent_of(setting.inner.extent) == setting.padded
    in_place = contiguous and is_aligned and not setting.found.conditions
    if in_place and not is_packed:
        step = _row_step(nest, setting)
        if step is not None:
            return _in_place(nest, setting, 1, step)
        parted, unit = _by_image_rows(nest, setting)
        step = _row_step(nest, replace(parted, rows=parted.rows[-1:]))
        if step is not None:
            return _in_place(nest, parted, unit, step)
    reach = _reach(nest, setting) if setting.windows and contiguous else None
    if reach is not None:
        parted, unit = _by_image_rows(nest, setting)
        return _Window(nest, parted, unit, reach)
    return _Staged(nest, setting, most, contiguous)


def _in_place(nest: CpuNest, setting: Setting, unit: int, step: int) -> TileRows:
    rows = TileRows(nest, setting, unit)
    rows.stride = step
    return rows


def _by_image_rows(nest: CpuNest, setting: Setting) -> tuple[Setting, int]:
    """Registers that never reach over the end of the last row axis: they divide it, or blocks are cut there."""
    if len(setting.rows) < 2:
        return setting, 1
    last = setting.rows[-1]
    unit = setting.size // -(-setting.size // TILE_ROWS)
    if extent_of(last.extent) % unit == 0:
        return setting, unit
    return replace(setting, rows=(last,), height=nest.ranges[last]), 1


def _offset(nest: CpuNest, setting: Setting) -> tuple[Linear, Axis, Axis] | None:
    """Where element k of a row is; None when it is not one read."""
    k, row = Axis("k", extent_of(setting.inner.extent)), Axis("row", max(1, setting.height.extent))
    at: Env = {a: var(Axis(a.name, extent_of(a.extent))) for a in (*nest.nest.axes, *setting.windows)}
    at = {**at, **row_env(nest, setting, var(row)), setting.inner: var(k)}
    node = simplify(nest.access.lower(substitute(setting.found.a, at)))
    if not isinstance(node, Load) or any(i.reads for i in node.indices):
        return None
    return flat(node), k, row


def _is_contiguous(nest: CpuNest, setting: Setting) -> bool:
    found = _offset(nest, setting)
    return found is not None and step_along(found[0], found[1]) == 1


def _row_step(nest: CpuNest, setting: Setting) -> int | None:
    found = _offset(nest, setting)
    return None if found is None else step_along(found[0], found[2])


def _reach(nest: CpuNest, setting: Setting) -> _Reach | None:
    """What the windows of a tile reach over, where conditions say no more than that it is inside of the tensor."""
    read = setting.found.a
    if not isinstance(read, Load):
        return None
    forms = [linear(simplify(i)) for i in read.indices]
    inner = [d for d, form in enumerate(forms) if var(setting.inner) in form.terms]
    if len(inner) != 1 or forms[inner[0]].terms != {var(setting.inner): 1} or forms[inner[0]].constant:
        return None
    extents = [extent_of(e) for e in read.source.shape]
    allowed: list[Linear] = []
    for form, extent in zip(forms, extents, strict=True):
        allowed += [form, Linear({}, extent - 1).plus(form.scaled(-1))]
    for condition in (p for c in setting.found.conditions for p in flattened(c, "and")):
        if not any(_difference(condition, form) for form in allowed):
            return None
    kept = [d for d in range(len(forms)) if d != inner[0]]
    lows: list[Expr] = []
    sizes: list[int] = []
    for form in (forms[d] for d in kept):
        low: Expr = const(form.constant)
        size = 1
        for term, factor in form.terms.items():
            if not isinstance(term, Var) or factor < 0:
                return None
            along = nest.ranges[term.axis]
            low = low + along.low * factor
            size += factor * (min(int(along.size), along.extent) - 1)
        lows.append(simplify(low))
        sizes.append(size)
    indices = tuple(simplify(read.indices[d]) for d in kept)
    return _Reach(read.source, inner[0], indices, tuple(lows), tuple(sizes), tuple(extents[d] for d in kept))


def _difference(condition: Expr, form: Linear) -> bool:
    """Whether a condition says that a sum is not negative."""
    if not is_op(condition, "le") and not is_op(condition, "lt"):
        return False
    left, right = (linear(simplify(side)) for side in condition.args)
    found = right.plus(left.scaled(-1)).plus(Linear({}, 0 if is_op(condition, "le") else -1))
    return found.constant == form.constant and found.terms == form.terms
