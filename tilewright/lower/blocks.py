"""Cuts a range into blocks of a fixed size plus what is left over, with static block sizes wherever they are known."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tilewright.ir.analysis.simplify import linear, simplify
from tilewright.ir.forms.bounds import static
from tilewright.ir.forms.expr import Expr, const
from tilewright.tile_graph.algebra.propagate import Range


class Remainder(Enum):
    """How a vector axis ends that is no multiple of a vector."""

    LANES = "lanes"  # in one partly filled vector
    PADDED = "padded"  # in a whole vector of which some lanes are not kept
    EARLIER = "earlier"  # in whole vectors that begin earlier, over elements of the block before
    BEFORE = "before"  # the same, over elements of the tile before where the last one is too short


@dataclass(frozen=True)
class BlockRun:
    """`trips` blocks of `size` elements from `base` (relative to the range); `lanes` of them share a vector. Only the
    first `kept` elements are inside the range, where not all are."""

    base: Expr
    trips: Expr
    size: int
    lanes: int
    kept: int | None = None


def pieces(extent: Range, block: int, lanes: int, way: Remainder = Remainder.LANES) -> list[BlockRun]:
    """Blocks that cover the range exactly; a vector axis ends in whole vectors, then one partly filled vector, or all
    of the rest in whole vectors where there is a way to."""
    count = extent.count
    known = static(count)
    if known is not None:
        return _static_pieces(known, block, lanes, way)
    full = simplify(count // block)
    result = [BlockRun(const(0), full, block, lanes)]
    base = simplify(full * block)
    tail = simplify(count % block)
    last = _last_remainder(extent, block)
    if last == 0:
        return result
    if last is not None:
        vectors = last // lanes * lanes
        present = simplify(tail // last)  # 1 on the last tile, else 0
        reach = extent.extent if way is Remainder.BEFORE else extent.extent % int(extent.size)
        whole = _in_whole_vectors(base, present, last, reach, lanes, way)
        if whole is not None:
            return [*result, whole]
        if vectors:
            result.append(BlockRun(base, present, vectors, lanes))
        if last - vectors:
            result.append(_partial(simplify(base + vectors), present, last - vectors, lanes))
        return result
    return [*result, *_halving(base, tail, block, lanes)]


def overlapping(extent: Range, block: int, lanes: int) -> list[BlockRun] | None:
    """Blocks, single vectors, and a last vector that begins earlier: for results that may be computed twice, and a
    count only known at run time. None where it is known, or a tile may have less than a vector."""
    size = int(extent.size)
    least = extent.extent % size or size
    if lanes == 1 or static(extent.count) is not None or least < lanes or not _is_on_grid(extent):
        return None
    full = simplify(extent.count // block)
    base = simplify(full * block)
    tail = simplify(extent.count % block)
    result = [BlockRun(const(0), full, block, lanes)]
    if block > lanes:
        result.append(BlockRun(base, simplify(tail // lanes), lanes, lanes))
    over = simplify((extent.count % lanes + (lanes - 1)) // lanes)  # 1 where vectors do not end with the tile
    return [*result, BlockRun(simplify(extent.count - lanes), over, lanes, lanes)]


def _halving(base: Expr, tail: Expr, block: int, lanes: int) -> list[BlockRun]:
    """A remainder only known at run time, in halves: each size at most once, single elements below a vector."""
    result = []
    size = 1
    while size * 2 < block:
        size *= 2
    while size >= 1:
        wide = lanes if size >= lanes else 1
        if size < lanes and lanes > 1:
            result.append(BlockRun(base, tail, 1, 1))  # fewer than a vector: one by one
            return result
        result.append(BlockRun(base, simplify(tail // size), size, wide))
        base = simplify(base + (tail // size) * size)
        tail = simplify(tail % size)
        size //= 2
    return result


def _static_pieces(count: int, block: int, lanes: int, way: Remainder) -> list[BlockRun]:
    result = []
    full, rest = divmod(count, block)
    vectors = rest // lanes * lanes
    if full:
        result.append(BlockRun(const(0), const(full), block, lanes))
    whole = _in_whole_vectors(const(full * block), const(1), rest, count, lanes, way)
    if whole is not None:
        return [*result, whole]
    if vectors:
        result.append(BlockRun(const(full * block), const(1), vectors, lanes))
    if rest - vectors:
        result.append(_partial(const(full * block + vectors), const(1), rest - vectors, lanes))
    return result


def _in_whole_vectors(base: Expr, trips: Expr, rest: int, count: int, lanes: int, way: Remainder) -> BlockRun | None:
    """The last `rest` of `count` elements, from `base` on; None where they fill vectors or must be taken by lanes."""
    size = -(-rest // lanes) * lanes
    if way is Remainder.LANES or rest == size:
        return None
    if way is Remainder.PADDED:
        return BlockRun(base, trips, size, lanes, rest)
    return BlockRun(simplify(base - (size - rest)), trips, size, lanes) if size <= count else None


def _partial(base: Expr, trips: Expr, size: int, lanes: int) -> BlockRun:
    return BlockRun(base, trips, size, size if lanes > 1 else 1)


def _last_remainder(extent: Range, block: int) -> int | None:
    """What the last tile leaves over, when all other tiles are whole multiples of the block."""
    size = int(extent.size)
    if not _is_on_grid(extent) or size % block:
        return None
    return (extent.extent % size) % block


def _is_on_grid(extent: Range) -> bool:
    """Whether tiles begin at multiples of their size: all but the last have all of it."""
    low, size = linear(extent.low), int(extent.size)
    return low.constant % size == 0 and all(c % size == 0 for c in low.terms.values())
