"""Propagation: boxes hold every index that is read, by brute force; and ranges are cut into blocks without gaps."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from tests.cpu_stages import model_of, programs
from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Map, Reduce, plain_monoid
from tilewright.ir.forms.expr import Axis, Expr, const, load, loads, maximum, minimum, op, substitute, var
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.values import evaluate_exprs
from tilewright.lower.blocks import pieces
from tilewright.tile_graph.algebra.nest import Nest, build_nest
from tilewright.tile_graph.algebra.propagate import (
    Box,
    Range,
    index_range,
    index_size,
    merge,
    propagate,
    reads_box,
    whole,
)

F = dtypes.float32


def integer(node: Expr, values: dict[Axis, int]) -> int:
    fixed = substitute(node, {a: const(v) for a, v in values.items()})
    return int(evaluate_exprs((fixed,), _nothing, _nothing)[0])


def _nothing(*_: object) -> np.ndarray:
    raise AssertionError("an index depends on data")


def random_index(rng: np.random.Generator, axes: list[Axis], depth: int = 2) -> Expr:
    """Affine with divisions, remainders and clamps, as reshapes, windows and pads give."""
    node: Expr = const(int(rng.integers(-4, 12)))
    for axis in axes:
        if rng.random() < 0.7:
            node = node + var(axis) * int(rng.integers(-3, 7))
    if depth and rng.random() < 0.6:
        kind = rng.choice(["floordiv", "mod", "clamp", "sum"])
        if kind in ("floordiv", "mod"):
            divided = op(str(kind), random_index(rng, axes, depth - 1), const(int(rng.integers(1, 9))))
            node = divided * int(rng.integers(1, 4)) + int(rng.integers(0, 3))
        elif kind == "clamp":
            node = minimum(maximum(node, 0), int(rng.integers(3, 30)))
        else:
            node = node + random_index(rng, axes, depth - 1)
    return node


@pytest.mark.parametrize("seed", range(60))
def test_index_ranges_hold_every_value(seed: int) -> None:
    """For every origin of a tile: the values an index takes lie in its range, clipped to the tensor."""
    rng = np.random.default_rng(seed)
    axes = [Axis("a", int(rng.integers(2, 9))), Axis("b", int(rng.integers(2, 9)))]
    tile = Axis("tile", 4)
    sizes = [int(rng.integers(1, a.extent + 1)) for a in axes]
    lows: list[Expr] = [var(tile) * sizes[0] if rng.random() < 0.7 else const(0), const(int(rng.integers(0, 2)))]
    index = simplify(random_index(rng, axes))
    extent = int(rng.integers(5, 60))
    box = {a: Range(low, size, int(a.extent)) for a, low, size in zip(axes, lows, sizes, strict=True)}
    found = index_range(index, box, extent)
    assert found.extent == extent and 1 <= found.size <= extent
    for origin in range(4):
        at = {tile: origin}
        spans = []
        for axis, low, size in zip(axes, lows, sizes, strict=True):
            start = integer(low, at)
            spans.append(range(start, min(start + size, int(axis.extent))))
        start = integer(found.low, at)
        assert 0 <= start < extent
        for place in product(*spans):
            value = integer(index, dict(zip(axes, place, strict=True)))
            if 0 <= value < extent:
                assert start <= value < start + found.size, (seed, index, place)


@pytest.mark.parametrize("seed", range(20))
def test_batches_agree_with_single_candidates(seed: int) -> None:
    """Sizes as an array of candidates give, entry by entry, at least what one candidate alone gives."""
    rng = np.random.default_rng(seed)
    axes = [Axis("a", 12), Axis("b", 7)]
    origins = [Axis("oa", 12), Axis("ob", 7)]
    index = simplify(random_index(rng, axes, 1))
    candidates = np.array([[1, 1], [3, 2], [12, 7], [5, 7]])
    together = index_range(index, {a: Range(var(o), candidates[:, i], int(a.extent))
                                   for i, (a, o) in enumerate(zip(axes, origins, strict=True))}, 40)  # fmt: skip
    for number, sizes in enumerate(candidates):
        alone = index_range(index, {a: Range(var(o), int(s), int(a.extent))
                                    for a, o, s in zip(axes, origins, sizes, strict=True)}, 40)  # fmt: skip
        assert np.broadcast_to(together.size, 4)[number] >= alone.size


def test_merge_holds_both() -> None:
    tile = Axis("t", 5)
    a: Box = (Range(var(tile) * 4, 4, 20), Range(const(1), 2, 9))
    b: Box = (Range(var(tile) * 4 + 3, 5, 20), Range(const(4), 3, 9))
    low, column = merge(a, b)
    assert (integer(low.low, {tile: 2}), low.size) == (8, 8)
    assert (integer(column.low, {}), column.size) == (1, 6)
    apart = merge(a, (Range(var(Axis("other", 3)), 1, 20), whole(9)))
    assert apart[0].size == 20  # no known distance: all of it


@pytest.mark.parametrize(("stride", "kernel", "tile"), [(1, 3, 4), (2, 3, 5), (3, 2, 2), (2, 5, 11)])
def test_windows_over_a_producer(stride: int, kernel: int, tile: int) -> None:
    """A strided window over a map needs stride·(tile - 1) + kernel elements of it: a halo, not a multiple."""
    source = Tensor("x", (60,), F)
    middle, result = Tensor("y", (60,), F), Tensor("z", (20,), F)
    i, j, r = Axis("i", 60), Axis("j", 20), Axis("r", kernel)
    first = build_nest(Map(middle, (i,), load(source, [var(i)]) * 2.0), (), {})
    window = load(middle, [minimum(var(j) * stride + var(r), 59)])
    second = build_nest(Reduce((result,), (j,), (r,), (window,), plain_monoid("add", F)), (), {})
    origin = Axis("o", 20)
    boxes = propagate([first, second], (Range(var(origin), tile, 20),))
    assert boxes[first][0].size == min(60, stride * (tile - 1) + kernel)


def nests_of(program) -> list[Nest]:
    return [build_nest(c, (), {}) for c in program.computes if isinstance(c, Map | Reduce)]


CHAINS = {
    "attention": model_of(
        [("Transpose", ["k"], "t", {"perm": [1, 0]}), ("MatMul", ["q", "t"], "s", {}),
         ("Softmax", ["s"], "p", {"axis": -1}), ("MatMul", ["p", "v"], "o", {})],
        {"q": (9, 4), "k": (7, 4), "v": (7, 5)}, {"o": (9, 5)}),
    "convolutions": model_of(
        [("Conv", ["x", "w"], "y", {"pads": [1, 1, 1, 1]}), ("Relu", ["y"], "r", {}),
         ("MaxPool", ["r"], "p", {"kernel_shape": [2, 2], "strides": [2, 2]}),
         ("Conv", ["p", "u"], "o", {"strides": [2, 2], "pads": [1, 1, 1, 1]})],
        {"x": (1, 2, 9, 11)}, {"o": (1, 3, 2, 3)},
        {"w": np.ones((3, 2, 3, 3), np.float32), "u": np.ones((3, 3, 3, 3), np.float32)}),
    "reshapes": model_of(
        [("Mul", ["x", "x"], "y", {}), ("Reshape", ["y", "shape"], "z", {}),
         ("Transpose", ["z"], "t", {"perm": [2, 0, 1]}), ("Add", ["t", "t"], "o", {})],
        {"x": (6, 10)}, {"o": (5, 3, 4)}, {"shape": np.array([3, 4, 5])}),
}  # fmt: skip


@pytest.mark.parametrize("name", CHAINS)
def test_boxes_hold_all_that_is_read(name: str) -> None:
    """Every nest's box contains every element its readers touch, tile by tile, by running through the indices."""
    nests = nests_of(programs(CHAINS[name])["fold"])
    used = {t for n in nests for t in n.reads()} | {nests[-1].tensor}
    nests = [n for n in nests if n.tensor in used]
    producer = {t: n for n in nests for t in n.stores}
    root = nests[-1]
    rng = np.random.default_rng(0)
    for _ in range(4):
        sizes = [int(rng.integers(1, a.extent + 1)) for a in root.axes]
        starts = [Axis(f"start{i}", 8) for i in range(len(sizes))]
        box = tuple(
            Range(simplify(var(s) * n), n, int(a.extent)) for s, n, a in zip(starts, sizes, root.axes, strict=True)
        )
        boxes = propagate(nests, box)
        at = {s: int(rng.integers(0, -(-int(a.extent) // n))) for s, n, a in zip(starts, sizes, root.axes, strict=True)}
        for nest in nests:
            spans = [_span(r, at) for r in boxes[nest]]
            spans += [range(int(a.extent)) for a in nest.reduce_axes]
            places = list(product(*spans))
            for pick in rng.permutation(len(places))[:200]:
                values = dict(zip((*nest.axes, *nest.reduce_axes), places[pick], strict=True))
                for node in loads(*nest.elements, *nest.values):
                    if node.source not in producer or producer[node.source] is nest:
                        continue
                    for index, part in zip(node.indices, boxes[producer[node.source]], strict=True):
                        value = integer(index, values)
                        if 0 <= value < part.extent:  # a padded read is guarded by its select
                            assert value in _span(part, at), (nest.tensor.name, node)


def _span(part: Range, at: dict[Axis, int]) -> range:
    start = integer(part.low, at)
    return range(start, min(start + int(part.size), part.extent))


def test_a_reduction_over_a_block_reads_a_block() -> None:
    nests = nests_of(programs(CHAINS["attention"])["fold"])
    product_nest = nests[-1]
    (axis,) = product_nest.reduce_axes
    block = Axis("block", 4)
    box = tuple(whole(int(a.extent)) for a in product_nest.axes)
    sources = set(product_nest.reads())
    found = reads_box(product_nest, box, {axis: Range(simplify(var(block) * 2), 2, 7)}, sources)
    assert all(2 in {r.size for r in each} for each in found.values())


# --- blocks


@pytest.mark.parametrize("seed", range(200))
def test_pieces_cover_exactly(seed: int) -> None:
    """Every element of every tile once, in order, whole vectors first; sizes known when compiling."""
    rng = np.random.default_rng(seed)
    lanes = int(rng.choice([1, 2, 4, 8, 16]))
    block = lanes * int(rng.integers(1, 5))
    extent = int(rng.integers(1, 70))
    size = int(rng.integers(1, extent + 1))
    if rng.random() < 0.4:
        size = min(extent, max(block, size // block * block))
    tiles = -(-extent // size)
    tile = Axis("tile", tiles)
    low: Expr = const(0) if tiles == 1 else simplify(var(tile) * size)
    if rng.random() < 0.3:  # a range off the grid: a halo's
        low = simplify(maximum(low - 1, 0))
    part = Range(low, size, extent)
    cut = pieces(part, block, lanes)
    for number in range(tiles):
        at = {tile: number}
        count = min(size, extent - integer(low, at))
        covered: list[int] = []
        for piece in cut:
            assert piece.size >= 1 and piece.size % piece.lanes == 0
            assert piece.lanes in (1, lanes) or piece.size == piece.lanes < lanes  # partly filled: one vector
            base, trips = integer(piece.base, at), integer(piece.trips, at)
            for trip in range(trips):
                covered.extend(range(base + trip * piece.size, base + (trip + 1) * piece.size))
        assert covered == list(range(count)), (seed, extent, size, block, lanes)


@pytest.mark.parametrize("size", [1, 3, np.array([1, 2, 5, 12])])
def test_sizes_from_the_beginning(size: object) -> None:
    """Without origins, a size is that of the range; an index clamped at one place is one place."""
    i, j = Axis("i", 12), Axis("j", 9)
    forms = [var(i) * 3 + var(j), var(i) // 4 * 2 + 1, (var(i) + 2) % 5, minimum(var(i), 2) * 7 + minimum(var(j), 2),
             maximum(var(i) - 3, 0) // 2, 11 - var(i)]  # fmt: skip
    for index in map(simplify, forms):
        whole_range = index_range(index, {a: Range(const(0), n, 12) for a, n in ((i, size), (j, 1))}, 40)
        found = index_size(index, {i: size, j: 1}, 40)
        for number, along in enumerate(np.atleast_1d(size).tolist()):
            seen = [int(evaluated_at(index, {i: a, j: 0})) for a in range(along)]
            assert max(seen) - min(seen) + 1 <= np.broadcast_to(found, np.shape(np.atleast_1d(size)))[number]
        assert np.all(np.asarray(found) <= np.asarray(whole_range.size))
    clamped = simplify(minimum(var(i), 2) * 7 + minimum(var(j), 2) + 32)
    assert index_size(clamped, {i: 1, j: 1}, 49) == 1


def evaluated_at(index: Expr, places: dict[Axis, int]) -> int:
    found = simplify(substitute(index, {a: const(n) for a, n in places.items()}))
    return int(found.value)  # type: ignore[attr-defined]


def test_reads_through_views_that_undo_each_other_are_at_the_axes_themselves() -> None:
    """Rows in groups of eight, something added by place in the group, and as rows again: at i, not at its parts."""
    i, j, k, n = Axis("i", 4), Axis("j", 8), Axis("k", 32), Axis("n", 5)
    x, m = Tensor("x", (32, 5), F), Tensor("m", (8, 5), F)
    apart = Map(Tensor("apart", (4, 8, 5), F), (i, j, n), load(x, (var(i) * 8 + var(j), var(n))))
    added = Map(Tensor("added", (4, 8, 5), F), (i, j, n),
                load(apart.output, (var(i), var(j), var(n))) + load(m, (var(j), var(n))))  # fmt: skip
    again = Map(Tensor("again", (32, 5), F), (k, n), load(added.output, (var(k) // 8, var(k) % 8, var(n))))
    nest = build_nest(again, (), {apart.output: apart, added.output: added})
    assert {node.source: node.indices for node in nest.loads()} == {
        x: (var(k), var(n)), m: (simplify(var(k) % 8), var(n)),
    }  # fmt: skip
