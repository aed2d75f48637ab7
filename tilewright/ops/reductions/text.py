"""TfIdfVectorizer: how often each n-gram of a list stands in a row of numbers."""

from __future__ import annotations

import numpy as np

from tilewright.ir.forms import dtypes
from tilewright.ir.forms.expr import Expr, all_of, cast, const, eq, le, load, lt, op, select
from tilewright.ir.forms.graph import Node
from tilewright.ir.forms.tensor import Tensor
from tilewright.ops.builder import Builder, clamp, dims
from tilewright.ops.registry import operator

MOST_COLUMNS = 1 << 24
_MODES = ("TF", "IDF", "TFIDF")


@operator("TfIdfVectorizer", since=9)
def tfidf_vectorizer(b: Builder, node: Node, x: Tensor) -> Tensor:
    attributes = node.attributes
    if "pool_int64s" not in attributes or not x.dtype.is_int:
        raise b.unsupported("words are not supported; give numbers and pool_int64s")
    mode = attributes.get("mode", "TF")
    if mode not in _MODES or x.rank not in (1, 2):
        raise b.invalid(f"mode '{mode}' of {list(dims(x))}; it is one of {', '.join(_MODES)}, of one or two axes")
    grams, lengths, columns = _grams(b, node)
    width, count = max(attributes["ngram_indexes"], default=-1) + 1, len(grams)
    if min(attributes["ngram_indexes"], default=0) < 0 or width > MOST_COLUMNS:
        raise b.invalid(f"ngram_indexes reach from {min(attributes['ngram_indexes'])} to {width - 1}; 0 to "
                        f"{MOST_COLUMNS - 1} are columns")  # fmt: skip
    rows, row = dims(x)[:-1], dims(x)[-1]
    skips = int(attributes.get("max_skip_count", 0)) + 1
    if count == 0 or row == 0:
        return b.map("", (*rows, width), lambda *i: const(0, dtypes.float32))
    table = b.constant(grams, "grams")
    sizes = b.constant(lengths, "lengths")

    def found(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Expr:
        gram, start, skip = i[-1], r[0], r[1]
        size = load(sizes, (gram,))
        # one number alone has nothing to skip
        conditions = [op("or", eq(skip, 0), lt(1, size)), lt(start + (size - 1) * (skip + 1), row)]
        for k in range(grams.shape[1]):
            at = clamp(start + (skip + 1) * k, row)
            same = eq(cast(load(x, (*i[:-1], at)), dtypes.int64), load(table, (gram, k)))
            conditions.append(op("or", le(size, k), same))
        return select(all_of(conditions), const(1, dtypes.int32), const(0, dtypes.int32))

    counts = b.reduce("counts", (*rows, count), (row, skips), found, "add")
    place = np.full(width, -1, np.int64)
    place[columns] = np.arange(count)
    where = b.constant(place, "where")
    weights = b.constant(_weights(b, node, width), "weights")

    def element(*i: Expr) -> Expr:
        at = load(where, (i[-1],))
        value = select(le(0, at), load(counts, (*i[:-1], clamp(at, count))), const(0, dtypes.int32))
        number = cast(op("min", value, 1) if mode == "IDF" else value, dtypes.float32)
        return number if mode == "TF" else number * load(weights, (i[-1],))

    return b.map("", (*rows, width), element)


def _weights(b: Builder, node: Node, width: int) -> np.ndarray:
    given = np.asarray(node.attributes.get("weights", ()), np.float32)
    if not given.size:
        return np.ones(width, np.float32)
    if given.size < width:
        raise b.invalid(f"it has {given.size} weights for {width} columns")
    return given[:width]


def _grams(b: Builder, node: Node) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The n-grams of the sizes asked for, filled up to the longest; their sizes; the column each is counted in."""
    pool, starts = list(node.attributes["pool_int64s"]), list(node.attributes["ngram_counts"])
    columns = list(node.attributes["ngram_indexes"])
    least, most = int(node.attributes["min_gram_length"]), int(node.attributes["max_gram_length"])
    found: list[list[int]] = []
    kept: list[int] = []
    number = 0
    for size, (start, end) in enumerate(zip(starts, [*starts[1:], len(pool)], strict=True), 1):
        if not 0 <= start <= end <= len(pool) or (end - start) % size:
            raise b.invalid(f"ngram_counts {starts} does not divide its {len(pool)} numbers")
        for at in range(start, end, size):
            if least <= size <= most:
                found.append(pool[at : at + size])
                kept.append(columns[number])
            number += 1
    longest = max(map(len, found), default=1)
    grams = np.zeros((len(found), longest), np.int64)
    for row, gram in enumerate(found):
        grams[row, : len(gram)] = gram
    return grams, np.asarray([len(g) for g in found], np.int64), np.asarray(kept, np.int64)
