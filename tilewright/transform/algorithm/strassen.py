"""Large products with weights by Strassen's algorithm, chosen by predicted time.

Rows, sums and columns are each cut in two, and of the eight products of quadrants seven do: data and weights are
summed first, products last. Both sums of activations are Maps, the products are a batched contraction, weights are
summed here. In float32 against float64 the relative error (norm of the difference by norm of the result) of one layer
of 256 to 3072 inputs is 3e-7 to 1.4e-6, where the direct sum has 2e-7 to 1e-6.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from tilewright.ir import dtypes
from tilewright.ir.bounds import fixed
from tilewright.ir.compute import Compute, Map, Program, Reduce, factors, plain_monoid
from tilewright.ir.expr import Axis, Const, Expr, Load, Var, add, const, eq, load, lt, select, sub, var
from tilewright.ir.folding import without_dead
from tilewright.ir.simplify import simplify
from tilewright.ir.tensor import Layout, Tensor
from tilewright.transform.algorithm.winograd import Predict
from tilewright.transform.layout import split_constants

Signs = dict[tuple[int, int], int]

# The terms of every product, by quadrant, and those of every quadrant of the result, by product. Of all forms this
# one, Strassen's own, has the fewest terms; those that share more sums round more often.
DATA: tuple[Signs, ...] = (
    {(0, 0): 1, (1, 1): 1}, {(1, 0): 1, (1, 1): 1}, {(0, 0): 1}, {(1, 1): 1},
    {(0, 0): 1, (0, 1): 1}, {(1, 0): 1, (0, 0): -1}, {(0, 1): 1, (1, 1): -1},
)  # fmt: skip
WEIGHTS: tuple[Signs, ...] = (
    {(0, 0): 1, (1, 1): 1}, {(0, 0): 1}, {(0, 1): 1, (1, 1): -1}, {(1, 0): 1, (0, 0): -1},
    {(1, 1): 1}, {(0, 0): 1, (0, 1): 1}, {(1, 0): 1, (1, 1): 1},
)  # fmt: skip
RESULT: dict[tuple[int, int], dict[int, int]] = {
    (0, 0): {0: 1, 3: 1, 4: -1, 6: 1},
    (0, 1): {2: 1, 4: 1},
    (1, 0): {1: 1, 3: 1},
    (1, 1): {0: 1, 1: -1, 2: 1, 5: 1},
}
PRODUCTS = len(DATA)

_WORTH = 0.96  # more kernels, more memory, and an error that grows a little: a smaller gain is not worth them
# What is saved an element that the sums move: a product of fewer sums or columns does not pay anywhere.
_LEAST_DEPTH = 90
_LEAST_ROWS = 32  # of which half fill a register tile a few times


# --- recognition


@dataclass(frozen=True)
class Product:
    """A sum of products of data and weights found in a Reduce: no axis but the summed ones is in both."""

    reduce: Reduce
    data: Load
    weight: Load
    rows: tuple[Axis, ...]
    sums: tuple[Axis, ...]
    columns: tuple[Axis, ...]


def find_product(compute: Compute, constants: Mapping[Tensor, object]) -> Product | None:
    """The product a Reduce computes when both operands are read as they lie, the weights being constant; else None."""
    both = factors(compute)
    if not both or not isinstance(compute, Reduce) or compute.outputs[0].dtype is not dtypes.float32:
        return None
    for data, weight in (both, both[::-1]):
        if isinstance(data, Load) and isinstance(weight, Load) and weight.source in constants:
            return _product(compute, data, weight)
    return None


def _product(compute: Reduce, data: Load, weight: Load) -> Product | None:
    read, kept = _axes_read(data), _axes_read(weight)
    if read is None or kept is None or data.dtype is not dtypes.float32 or weight.dtype is not dtypes.float32:
        return None
    rows = tuple(a for a in compute.axes if a in read)
    columns = tuple(a for a in compute.axes if a in kept)
    everything = {*compute.axes, *compute.reduce_axes}
    if not rows or not columns or set(rows) & set(columns) or any(not isinstance(a.extent, int) for a in everything):
        return None
    if set(read) != everything - set(columns) or set(kept) != everything - set(rows):
        return None
    return Product(compute, data, weight, rows, compute.reduce_axes, columns)


def _axes_read(node: Load) -> list[Axis] | None:
    """The axes of a read that names each of them once, and constants besides."""
    found = [i.axis for i in node.indices if isinstance(i, Var)]
    if len(set(found)) != len(found) or any(not isinstance(i, Var | Const) for i in node.indices):
        return None
    return found


# --- the rewrite


class Strassen:
    """One product as seven of half its size: `computes` gives what it gave, reading `weights`.

    `known` holds the sums of data that other products made: what reads the same in the same way shares them.
    """

    def __init__(self, found: Product, names: set[str], known: dict[Hashable, Tensor]) -> None:
        self.found = found
        self.names = names
        self.output = found.reduce.outputs[0]
        groups = (found.rows, found.sums, found.columns)
        self.sizes = {a: fixed(a.extent) for group in groups for a in group}
        self.row, self.sum, self.column = (max(group, key=self.sizes.__getitem__) for group in groups)
        for axis in (self.row, self.sum, self.column):
            self.sizes[axis] = -(-self.sizes[axis] // 2)
        self.weights = self._tensor("weights", found.sums, found.columns)
        self.products = self._tensor("products", found.rows, found.columns)
        self.computes: list[Compute] = []
        key = self._data_key()
        if key not in known:
            known[key] = self._tensor("sums", found.rows, found.sums)
            self.computes.append(self._summed(known[key]))
        self.summed = known[key]
        self.computes += [self._multiplied(), self._result()]

    @property
    def layouts(self) -> dict[Tensor, Layout]:
        """A row's seven parts side by side: a whole product apart they would meet in the same sets of a cache."""
        count = len(self.found.rows) + 1
        order = {t: (*range(1, count), 0, *range(count, t.rank)) for t in (self.summed, self.products)}
        return {t: Layout.permuted(o) for t, o in order.items()}

    @property
    def staged(self) -> bool:
        """Whether the sums stay in memory: made for a tile of rows, they would have the weights read again for each
        of them, which are more."""
        columns, rows = (prod(self.sizes[a] for a in group) for group in (self.found.columns, self.found.rows))
        return columns >= rows

    def _data_key(self) -> Hashable:
        """How the data is read and cut: by which of its dimensions are rows and which are summed over."""
        place = {a: (kind, n) for kind in ("rows", "sums") for n, a in enumerate(getattr(self.found, kind))}
        data = self.found.data
        read = tuple(place[i.axis] if isinstance(i, Var) else i for i in data.indices)
        return data.source, read, place[self.row], place[self.sum]

    def _fresh(self, *groups: Sequence[Axis]) -> tuple[Axis, dict[Axis, Axis]]:
        """An axis of products, and axes of half the size in the place of those that are cut."""
        return Axis("p", PRODUCTS), {a: Axis(a.name, self.sizes[a]) for group in groups for a in group}

    def _summed(self, tensor: Tensor) -> Map:
        number, own = self._fresh(self.found.rows, self.found.sums)
        cases = [_signed([(self._quadrant(own, *at), sign) for at, sign in terms.items()]) for terms in DATA]
        return Map(tensor, (number, *own.values()), _case(var(number), cases), self.found.reduce.origin)

    def _quadrant(self, own: Mapping[Axis, Axis], i: int, j: int) -> Expr:
        """Rows by turns, so that both are at hand wherever a tile begins; sums by halves, which vectors run along."""
        data = self.found.data
        places: dict[Axis, Expr] = {a: var(b) for a, b in own.items()}
        places[self.row] = simplify(places[self.row] * 2 + i)
        places[self.sum] = simplify(places[self.sum] + j * self.sizes[self.sum])
        value: Expr = load(data.source, [places[x.axis] if isinstance(x, Var) else x for x in data.indices])
        for axis, half in ((self.row, i), (self.sum, j)):
            if half and fixed(axis.extent) % 2:
                value = select(lt(places[axis], fixed(axis.extent)), value, const(0, value.dtype))
        return value

    def _multiplied(self) -> Reduce:
        found = self.found
        number, own = self._fresh(found.rows, found.sums, found.columns)
        rows, sums, columns = ([var(own[a]) for a in group] for group in (found.rows, found.sums, found.columns))
        element = load(self.summed, (var(number), *rows, *sums)) * load(self.weights, (var(number), *sums, *columns))
        axes = (number, *(own[a] for a in (*found.rows, *found.columns)))
        inner = tuple(own[a] for a in found.sums)
        monoid = plain_monoid("add", dtypes.float32)
        return Reduce((self.products,), axes, inner, (element,), monoid, found.reduce.origin)

    def _result(self) -> Map:
        """The product's own result: each element finds its quadrant, columns by halves as their sums are."""
        found = self.found
        halves: list[Expr] = []
        for j in range(2):
            places: dict[Axis, Expr] = {a: var(a) for a in found.reduce.axes}
            places[self.row] = places[self.row] // 2
            places[self.column] = places[self.column] - j * self.sizes[self.column]
            here = [simplify(places[a]) for a in (*found.rows, *found.columns)]
            cases = [
                _signed([(load(self.products, (const(n), *here)), sign) for n, sign in RESULT[i, j].items()])
                for i in range(2)
            ]
            halves.append(_case(simplify(var(self.row) % 2), cases))
        value = select(lt(var(self.column), self.sizes[self.column]), *halves)
        return Map(self.output, found.reduce.axes, value, found.reduce.origin)

    def transformed(self, weights: np.ndarray) -> np.ndarray:
        """The sums of weights; of two float32 numbers float32 gives the exact sum rounded once."""
        order = (*self.found.sums, *self.found.columns)
        indices = self.found.weight.indices
        given = [i.axis for i in indices if isinstance(i, Var)]
        kept = weights[tuple(int(i.value) if isinstance(i, Const) else slice(None) for i in indices)]
        whole = kept.transpose([given.index(a) for a in order])
        places = order.index(self.sum), order.index(self.column)
        parts: dict[tuple[int, int], np.ndarray] = {}
        for i, j in RESULT:
            cut = [slice(None)] * len(order)
            for place, axis, half in zip(places, (self.sum, self.column), (i, j), strict=True):
                cut[place] = slice(half * self.sizes[axis], (half + 1) * self.sizes[axis])
            part = whole[tuple(cut)]
            missing = [(0, self.sizes[a] - n) for a, n in zip(order, part.shape, strict=True)]
            parts[i, j] = np.pad(part, missing) if any(n for _, n in missing) else part
        result = np.empty(tuple(int(e) for e in self.weights.shape), np.float32)  # type: ignore[arg-type]
        for total, terms in zip(result, WEIGHTS, strict=True):
            first, *others = terms.items()
            np.copyto(total, parts[first[0]])
            for at, sign in others:
                (np.add if sign > 0 else np.subtract)(total, parts[at], out=total)
        return result

    def _tensor(self, label: str, *groups: Sequence[Axis]) -> Tensor:
        name = f"{self.output.name}_strassen_{label}"
        while name in self.names:
            name += "_"
        self.names.add(name)
        return Tensor(name, (PRODUCTS, *(self.sizes[a] for group in groups for a in group)), dtypes.float32)


def _signed(terms: Sequence[tuple[Expr, int]]) -> Expr:
    """The sum of terms, of which the first is positive."""
    (total, _), *others = terms
    for value, sign in others:
        total = add(total, value) if sign > 0 else sub(total, value)
    return total


def _case(at: Expr, cases: Sequence[Expr]) -> Expr:
    result = cases[-1]
    for number in reversed(range(len(cases) - 1)):
        result = select(eq(at, number), cases[number], result)
    return result


# --- the choice


def choose_products(program: Program, predict: Predict) -> Program:
    """The Program with every product rewritten whose seven parts are predicted to pay."""
    given = program
    program = split_constants(program)  # as it will be: gates of a recurrence are an axis of their own then
    names = {t.name for t in program.tensors()}
    known: dict[Hashable, Tensor] = {}
    chosen: dict[Hashable, Seconds | None] = {}
    counts: Counter[Seconds] = Counter()
    computes: list[Compute] = []
    staged = dict.fromkeys(program.staged)
    constants, layouts = dict(program.constants), dict(program.layouts)
    for compute in program.computes:
        found = find_product(compute, program.constants)
        if found is None:
            computes.append(compute)
            continue
        key = _shape_of(found, program)
        if key not in chosen:
            chosen[key] = worth(found, program, predict)
        seconds = chosen[key]
        if seconds is None:
            computes.append(compute)
            continue
        counts[seconds] += 1
        fast = Strassen(found, names, known)
        computes.extend(fast.computes)
        layouts.update(fast.layouts)
        constants[fast.weights] = fast.transformed(program.constants[found.weight.source])
        if fast.staged:
            staged[fast.summed] = None
    if not counts:
        return given
    remarks = (*program.remarks, *(_remark(seconds, count) for seconds, count in counts.items()))
    return without_dead(replace(program, computes=tuple(computes), constants=constants, layouts=layouts,
                                staged=tuple(staged), remarks=remarks))  # fmt: skip


@dataclass(frozen=True)
class Seconds:
    """The times predicted for a product of rows by sums by columns, as seven and as it is."""

    shape: tuple[int, int, int]
    seven: float
    direct: float


def _remark(seconds: Seconds, count: int) -> str:
    shape = " x ".join(map(str, seconds.shape))
    what = f"{count} products {shape}" if count > 1 else f"a product {shape}"
    times = f"{1e3 * seconds.seven:.2f} ms predicted against {1e3 * seconds.direct:.2f} ms"
    return f"{what} by Strassen's algorithm: {times}"


def worth(found: Product, program: Program, predict: Predict) -> Seconds | None:
    """The times of a product that its seven parts are predicted to make faster; None where they are not."""
    rows, sums, columns = (prod(fixed(a.extent) for a in group) for group in (found.rows, found.sums, found.columns))
    if rows < _LEAST_ROWS or sums * columns < _LEAST_DEPTH * (sums + columns):
        return None
    fast = Strassen(found, set(), {})
    direct = predict(_alone(found, [found.reduce], program))
    own = _alone(found, fast.computes, program)
    zeros = np.broadcast_to(np.float32(0), tuple(int(e) for e in fast.weights.shape))  # type: ignore[arg-type]
    own = replace(own, constants={**own.constants, fast.weights: zeros}, layouts={**own.layouts, **fast.layouts},
                  staged=(fast.summed,) if fast.staged else ())  # fmt: skip
    seven = predict(own)
    return Seconds((rows, sums, columns), seven, direct) if seven < _WORTH * direct else None


def _alone(found: Product, computes: Sequence[Compute], program: Program) -> Program:
    """A Program of one product, its data and result stored as they will be: what is summed, and columns, innermost.

    It keeps the constants of all others: that they are read in between decides where its own come from."""
    data, result = found.data.source, found.reduce.outputs[0]
    layouts = {}
    if data not in program.inputs and data not in program.constants:
        inner = [d for d, i in enumerate(found.data.indices) if isinstance(i, Var) and i.axis in found.sums]
        layouts[data] = Layout.permuted((*(d for d in range(data.rank) if d not in inner), *inner))
    if result not in program.outputs:
        last = [d for d, a in enumerate(found.reduce.axes) if a in found.columns]
        layouts[result] = Layout.permuted((*(d for d in range(result.rank) if d not in last), *last))
    return Program((data,), (result,), tuple(computes), program.constants, layouts)


def _shape_of(found: Product, program: Program) -> Hashable:
    """Products of one shape are decided once."""
    axes = {a: n for n, a in enumerate((*found.reduce.axes, *found.reduce.reduce_axes))}
    reads = tuple(
        tuple(axes[i.axis] if isinstance(i, Var) else -1 for i in node.indices) for node in (found.data, found.weight)
    )
    kept = found.data.source in program.inputs, found.reduce.outputs[0] in program.outputs
    return tuple(a.extent for a in axes), reads, kept
