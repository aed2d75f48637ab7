"""Sorting without a Sort: a bitonic network, one step of a Scan after the other, each a Map that compares every element
with one other. What is sorted can be searched and summed up by key, so that scatters need not compare all with all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Map, Scan, neutral
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import Axis, Expr, cast, const, eq, le, load, lt, maximum, minimum, op, select, var
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import Builder, Shape, clamp, dims

MOST_EXCHANGES = 1 << 34  # comparisons of a network: some seconds
_SHIFT = 1 << 32  # a key of 32 bits stands above the place it came from


def network_work(rows: int, count: int) -> int:
    """Comparisons that sorting takes."""
    levels = _levels(count)
    return rows * (1 << levels) * levels * (levels + 1) // 2


def _levels(count: int) -> int:
    return max(count - 1, 0).bit_length()


def sorted_pairs(b: Builder, hint: str, rows: Shape, count: int, key: Callable[..., Expr]) -> Tensor:
    """[rows, places]: `key(*row, place)`, of 32 bits, and the place in one number, in order; behind them, up to a power
    of two, the largest number there is."""
    room = 1 << _levels(count)
    last = const(dtypes.int64.limits[1], dtypes.int64)

    def pair(*i: Expr) -> Expr:
        found = cast(key(*i[:-1], clamp(i[-1], count)), dtypes.int64) * _SHIFT + cast(i[-1], dtypes.int64)
        return found if room == count else select(lt(i[-1], count), found, last)

    pairs = b.map(f"{hint}_pairs", (*rows, room), pair)
    distances, sizes = [], []
    for level in range(1, _levels(count) + 1):
        for below in range(level - 1, -1, -1):
            distances.append(1 << below)
            sizes.append(1 << level)
    if not distances:
        return pairs

    def exchange(carry: Tensor, step: Expr, i: tuple[Expr, ...]) -> Expr:
        distance, size = (load(table, (step,)) for table in tables)
        other = clamp(op("bitxor", i[-1], distance), room)
        mine, its = load(carry, i), load(carry, (*i[:-1], other))
        rises = eq(op("bitand", i[-1], size), 0)
        small, large = minimum(mine, its), maximum(mine, its)
        return select(lt(i[-1], other), select(rises, small, large), select(rises, large, small))

    tables = [b.constant(np.array(values, np.int64), name) for values, name in ((distances, "apart"), (sizes, "runs"))]
    return _steps(b, f"{hint}_sorted", pairs, len(distances), exchange)


def _steps(
    b: Builder, hint: str, start: Tensor, count: int, following: Callable[[Tensor, Expr, tuple[Expr, ...]], Expr]
) -> Tensor:
    """A tensor after so many steps, each an element of the tensor before and of the step."""
    axis = Axis("t", count)
    carry = b.tensor(f"{hint}_before", dims(start), start.dtype)
    after: Map = b.map_compute(f"{hint}_after", dims(start), lambda *i: following(carry, var(axis), i))
    final = b.tensor(hint, dims(start), start.dtype)
    b.emit(Scan(axis, (start,), (carry,), (after,), (after.output,), (final,), (), origin=b.origin))
    return final


def order(b: Builder, hint: str, rows: Shape, count: int, key: Callable[..., Expr], dtype: DType) -> Tensor:
    """[rows, places]: the places in order of their keys, equal ones as they come; int32."""
    if dtype is not dtypes.int64:
        pairs = sorted_pairs(b, hint, rows, count, key)
        return b.map(f"{hint}_order", (*rows, count), lambda *i: _place(load(pairs, i)))
    # by the lower half of the keys first, then by the upper one: what is equal there stays in order
    low = order(b, f"{hint}_low", rows, count, lambda *i: cast(
        op("bitxor", cast(key(*i), dtypes.int32), dtypes.int32.limits[0]), dtypes.int32), dtypes.int32)  # fmt: skip

    def upper(*i: Expr) -> Expr:
        place = clamp(cast(load(low, i), dtypes.index), count)
        return cast(op("shr", key(*i[:-1], place), 32), dtypes.int32)

    high = order(b, f"{hint}_high", rows, count, upper, dtypes.int32)
    return b.map(f"{hint}_order", (*rows, count), lambda *i: load(
        low, (*i[:-1], clamp(cast(load(high, i), dtypes.index), count))))  # fmt: skip


def _place(pair: Expr) -> Expr:
    return cast(op("bitand", pair, _SHIFT - 1), dtypes.int32)


def last_of_each(b: Builder, pairs: Tensor, extent: int) -> Tensor:
    """[rows, key]: where the last pair with the key stands, or -1; int32. Found by halving, a step of a Scan each."""
    rows, room = dims(pairs)[:-1], dims(pairs)[-1]
    steps = [1 << level for level in range(_levels(room), -1, -1)]
    table = b.constant(np.array(steps, np.int32), "halves")
    start = b.map("none_before", (*rows, extent), lambda *i: const(0, dtypes.int32))

    def beyond(carry: Tensor, step: Expr, i: tuple[Expr, ...]) -> Expr:
        # so many pairs are known to be of this key or a smaller one
        more = load(carry, i) + load(table, (step,))
        pair = load(pairs, (*i[:-1], clamp(cast(more, dtypes.index) - 1, room)))
        fits = op("and", le(more, const(room, dtypes.int32)), lt(pair, cast(i[-1] + 1, dtypes.int64) * _SHIFT))
        return select(fits, more, load(carry, i))

    upto = _steps(b, "upto_key", start, len(steps), beyond)

    def found(*i: Expr) -> Expr:
        at = load(upto, i) - 1
        pair = load(pairs, (*i[:-1], clamp(cast(at, dtypes.index), room)))
        same = le(cast(i[-1], dtypes.int64) * _SHIFT, pair)  # it is below the next key's already
        return select(op("and", le(const(0, dtypes.int32), at), same), at, const(-1, dtypes.int32))

    return b.map("last_of_key", (*rows, extent), found)


def writers(b: Builder, pairs: Tensor, extent: int) -> Tensor:
    """[rows, key]: which place is the last with the key, or -1; int32."""
    last, room = last_of_each(b, pairs, extent), dims(pairs)[-1]
    return b.map("writer", dims(last), lambda *i: select(
        le(const(0, dtypes.int32), load(last, i)),
        _place(load(pairs, (*i[:-1], clamp(cast(load(last, i), dtypes.index), room)))), const(-1, dtypes.int32),
    ))  # fmt: skip


def combined(
    b: Builder, pairs: Tensor, count: int, extent: int, rest: Shape, value: Callable[..., Expr], operator: str
) -> Tensor:
    """[rows, key, rest]: `value(*row, place, *rest)` of all places with the key, combined; the neutral element where
    there are none. Runs of equal keys are combined over distances that double."""
    rows, room = dims(pairs)[:-1], dims(pairs)[-1]
    depth = len(rows)

    def at(i: tuple[Expr, ...]) -> Expr:
        place = clamp(cast(_place(load(pairs, i[: depth + 1])), dtypes.index), count)
        return value(*i[:depth], place, *i[depth + 1 :])

    def key(row: Sequence[Expr], place: Expr) -> Expr:
        return op("shr", load(pairs, (*row, place)), 32)

    first = b.map("in_order", (*rows, room, *rest), lambda *i: at(i))
    steps = [1 << level for level in range(_levels(room))]
    if steps:
        table = b.constant(np.array(steps, np.int64), "doubles")

        def joined(carry: Tensor, step: Expr, i: tuple[Expr, ...]) -> Expr:
            before = i[depth] - load(table, (step,))
            near = clamp(before, room)
            same = op("and", le(0, before), eq(key(i[:depth], near), key(i[:depth], i[depth])))
            mine = load(carry, i)
            return select(same, op(operator, load(carry, (*i[:depth], near, *i[depth + 1 :])), mine), mine)

        first = _steps(b, "run", first, len(steps), joined)
    last = last_of_each(b, pairs, extent)
    nothing = neutral(operator, first.dtype)

    def total(*i: Expr) -> Expr:
        where = load(last, i[: depth + 1])
        taken = load(first, (*i[:depth], clamp(cast(where, dtypes.index), room), *i[depth + 1 :]))
        return select(le(const(0, dtypes.int32), where), taken, nothing)

    return b.map("total", (*rows, extent, *rest), total)


def running(b: Builder, hint: str, start: Tensor, operator: str, backwards: bool = False) -> Tensor:
    """[places]: every element combined with all before it, or behind it, over distances that double."""
    (count,) = dims(start)
    steps = [1 << level for level in range(_levels(count))]
    if not steps:
        return start
    table = b.constant(np.array(steps, np.int64), "doubles")
    nothing = neutral(operator, start.dtype)

    def joined(carry: Tensor, step: Expr, i: tuple[Expr, ...]) -> Expr:
        distance = load(table, (step,))
        other = i[0] + distance if backwards else i[0] - distance
        is_there = lt(other, count) if backwards else le(0, other)
        return op(operator, load(carry, i), select(is_there, load(carry, (clamp(other, count),)), nothing))

    return _steps(b, hint, start, len(steps), joined)


def sorts(b: Builder, comparisons: int, rows: int, count: int, places: int = 0) -> bool:
    """Whether to sort `rows` of `count`, and search there for `places` in each, and not to compare all with all. A step
    of a network takes a few times one comparison."""
    exchanges = network_work(rows, count) + rows * places * (_levels(count) + 1)
    if comparisons <= max(8 * exchanges, 1 << 20):
        return False
    if exchanges > MOST_EXCHANGES:
        raise b.unsupported(f"it would take {exchanges} comparisons; {MOST_EXCHANGES} are supported")
    return True
