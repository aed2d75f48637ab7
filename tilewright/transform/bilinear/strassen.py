"""Large products with weights by Strassen's algorithm, chosen by predicted time.

Rows, sums and columns are each cut in two, and of the eight products of quadrants seven do: data and weights are
summed first, products last. Both sums of activations are Maps, the products are a batched contraction, weights are
summed here. In float32 against float64 the relative error (norm of the difference by norm of the result) of one layer
of 256 to 3072 inputs is 3e-7 to 1.4e-6, where the direct sum has 2e-7 to 1e-6. Two rows are added and taken apart
again: each has an error of the larger one's size, so that this is done only where the user asks for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.bounds import fixed
from tilewright.ir.forms.compute import Compute, Map, Program, Reduce, factors, plain_monoid, reads
from tilewright.ir.forms.expr import Axis, Const, Expr, Load, Var, add, const, eq, load, lt, select, sub, var
from tilewright.ir.forms.spilled import spilled
from tilewright.ir.forms.tensor import Layout, Tensor
from tilewright.ir.meaning.folding import without_dead
from tilewright.transform.bilinear.winograd import Predict
from tilewright.transform.layout.choose import split_constants

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

_WORTH = 0.95  # more kernels, more memory, and an error that grows a little: a smaller gain is not worth them
# What is saved an element that the sums move: a product of fewer sums or columns does not pay anywhere.
_LEAST_DEPTH = 125
_LEAST_ROWS = 32  # of which half fill a register tile a few times
_LEAST_SHARE = 0.03  # of all products' multiply-adds, that those of one shape make: less is not worth planning twice


# --- recognition


@dataclass(frozen=True)
class WeightedProduct:
    """A sum of products of data and weights found in a Reduce: no axis but the summed ones is in both."""

    reduce: Reduce
    data: Load
    weight: Load
    rows: tuple[Axis, ...]
    sums: tuple[Axis, ...]
    columns: tuple[Axis, ...]


def find_product(compute: Compute, constants: Mapping[Tensor, object]) -> WeightedProduct | None:
    """The product a Reduce computes when both operands are read as they lie, the weights being constant; else None."""
    both = factors(compute)
    if not both or not isinstance(compute, Reduce) or compute.outputs[0].dtype is not dtypes.float32:
        return None
    for data, weight in (both, both[::-1]):
        if isinstance(data, Load) and isinstance(weight, Load) and weight.source in constants:
            return _product(compute, data, weight)
    return None


def _product(compute: Reduce, data: Load, weight: Load) -> WeightedProduct | None:
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
    return WeightedProduct(compute, data, weight, rows, compute.reduce_axes, columns)


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

    def __init__(self, found: WeightedProduct, names: set[str], known: dict[Hashable, Tensor]) -> None:
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
    every = (find_product(c, program.constants) for c in program.computes)
    found = {p.reduce.outputs[0]: p for p in every if p is not None}
    decided = _decided(found, program, predict)
    if not decided:
        return given
    names = {t.name for t in program.tensors()}
    known: dict[Hashable, Tensor] = {}
    computes: list[Compute] = []
    staged = dict.fromkeys(program.staged)
    constants, layouts = dict(program.constants), dict(program.layouts)
    for compute in program.computes:
        if compute.outputs[0] not in decided:
            computes.append(compute)
            continue
        product = found[compute.outputs[0]]
        fast = Strassen(product, names, known)
        computes.extend(fast.computes)
        layouts.update(fast.layouts)
        constants[fast.weights] = spilled(fast.transformed(program.constants[product.weight.source]))
        if fast.staged:
            staged[fast.summed] = None
    counts = Counter(seconds for seconds in decided.values() if seconds is not None)
    remarks = (*program.remarks, *(_remark(seconds, count) for seconds, count in counts.items()))
    return without_dead(replace(program, computes=tuple(computes), constants=constants, layouts=layouts,
                                staged=tuple(staged), remarks=remarks))  # fmt: skip


@dataclass(frozen=True)
class Seconds:
    """The times predicted for products of rows by sums by columns, one or two in a chain, as seven and as they are."""

    shapes: tuple[tuple[int, ...], ...]
    seven: float
    direct: float


def _remark(seconds: Seconds, count: int) -> str:
    shapes = " and ".join(" x ".join(map(str, shape)) for shape in seconds.shapes)
    many, one = ("products", "a product") if len(seconds.shapes) == 1 else ("chains of products", "a chain of products")
    what = f"{count} {many} {shapes}" if count > 1 else f"{one} {shapes}"
    times = f"{1e3 * seconds.seven:.2f} ms predicted against {1e3 * seconds.direct:.2f} ms"
    return f"{what} by Strassen's algorithm: {times}"


def _decided(
    found: Mapping[Tensor, WeightedProduct], program: Program, predict: Predict
) -> dict[Tensor, Seconds | None]:
    """The products to be rewritten, by what they give, with the times that decided it (the last's, of a chain)."""
    chosen: dict[Hashable, Seconds | None] = {}

    def seconds(products: Sequence[WeightedProduct], between: Sequence[Compute]) -> Seconds | None:
        key = (*(_shape_of(p, program) for p in products), len(between))  # products of one shape are decided once
        if key not in chosen:
            chosen[key] = worth(products, between, program, predict)
        return chosen[key]

    work: Counter[Hashable] = Counter()
    for product in found.values():
        work[_shape_of(product, program)] += _multiply_adds(product)
    least = _LEAST_SHARE * work.total()
    found = {t: p for t, p in found.items() if work[_shape_of(p, program)] >= least}
    result: dict[Tensor, Seconds | None] = {}
    for tensor, product in found.items():
        alone = seconds([product], ())
        if alone is not None:
            result[tensor] = alone
    for first, between, last in _chains(found, program):
        if not {first, last} <= result.keys():
            both = seconds([found[first], found[last]], between)
            if both is not None:
                result[first], result[last] = None, both
    return result


def _multiply_adds(product: WeightedProduct) -> int:
    return prod(fixed(a.extent) for a in (*product.rows, *product.sums, *product.columns))


def _chains(
    found: Mapping[Tensor, WeightedProduct], program: Program
) -> Iterator[tuple[Tensor, tuple[Compute, ...], Tensor]]:
    """Products with nothing but Maps between them that nobody else reads: the sums behind the one are those in front
    of the other, and what lies between them need not be stored."""
    made = {t: c for c in program.computes for t in c.outputs}
    readers = Counter(t for c in program.computes for t in reads(c))
    for last, product in found.items():
        begins: dict[Tensor, None] = {}
        walked: dict[Tensor, Compute] = {}
        pending = [product.data.source]
        while pending:
            tensor = pending.pop()
            if tensor in walked or tensor in begins or tensor in program.constants:
                continue
            compute = made.get(tensor)
            if isinstance(compute, Map):
                walked[tensor] = compute
                pending += reads(compute)
            else:
                begins[tensor] = None
        first = next(iter(begins), None)
        if first is None or len(begins) != 1 or first not in found or {first, *walked} & {*program.outputs}:
            continue
        own = Counter(t for c in (*walked.values(), product.reduce) for t in reads(c))
        if all(readers[t] == own[t] for t in (first, *walked)):
            yield first, tuple(c for c in program.computes if c.outputs[0] in walked), last


def worth(
    products: Sequence[WeightedProduct], between: Sequence[Compute], program: Program, predict: Predict
) -> Seconds | None:
    """The times of products, with the Maps between them, that their seven parts are predicted to make faster; None
    where they are not."""
    shapes = tuple(
        tuple(prod(fixed(a.extent) for a in group) for group in (p.rows, p.sums, p.columns)) for p in products
    )
    for rows, sums, columns in shapes:
        if rows < _LEAST_ROWS or sums * columns < _LEAST_DEPTH * (sums + columns):
            return None
    known: dict[Hashable, Tensor] = {}
    fast = {p.reduce.outputs[0]: Strassen(p, set(), known) for p in products}
    order = (products[0].reduce, *between, *(p.reduce for p in products[1:]))
    direct = predict(_alone(products, order, program))
    own = _alone(products, [c for o in order for c in (fast[o.outputs[0]].computes if o.outputs[0] in fast else (o,))],
                 program)  # fmt: skip
    zeros = {f.weights: np.broadcast_to(np.float32(0), tuple(fixed(e) for e in f.weights.shape)) for f in fast.values()}
    layouts = {t: layout for f in fast.values() for t, layout in f.layouts.items()}
    own = replace(own, constants={**own.constants, **zeros}, layouts={**own.layouts, **layouts},
                  staged=tuple(f.summed for f in fast.values() if f.staged))  # fmt: skip
    seven = predict(own)
    return Seconds(shapes, seven, direct) if seven < _WORTH * direct else None


def _alone(products: Sequence[WeightedProduct], computes: Sequence[Compute], program: Program) -> Program:
    """A Program of some products, data and results stored as they will be: what is summed, and columns, innermost.

    It keeps the constants of all others: that they are read in between decides where its own come from."""
    first, last = products[0], products[-1]
    data, result = first.data.source, last.reduce.outputs[0]
    layouts = {}
    if data not in program.inputs and data not in program.constants:
        inner = [d for d, i in enumerate(first.data.indices) if isinstance(i, Var) and i.axis in first.sums]
        layouts[data] = Layout.permuted((*(d for d in range(data.rank) if d not in inner), *inner))
    for product in products:
        stored = product.reduce.outputs[0]
        if stored not in program.outputs:
            innermost = [d for d, a in enumerate(product.reduce.axes) if a in product.columns]
            layouts[stored] = Layout.permuted((*(d for d in range(stored.rank) if d not in innermost), *innermost))
    begun = first.reduce.outputs[0]
    between = [c.output for c in computes if isinstance(c, Map) and c.output.rank == begun.rank]
    for tensor in between:  # as the sum in front of them
        if first is not last and begun in layouts:
            layouts.setdefault(tensor, layouts[begun])
    return Program((data,), (result,), tuple(computes), program.constants, layouts)


def _shape_of(found: WeightedProduct, program: Program) -> Hashable:
    axes = {a: n for n, a in enumerate((*found.reduce.axes, *found.reduce.reduce_axes))}
    reads = tuple(
        tuple(axes[i.axis] if isinstance(i, Var) else -1 for i in node.indices) for node in (found.data, found.weight)
    )
    kept = found.data.source in program.inputs, found.reduce.outputs[0] in program.outputs
    return tuple(a.extent for a in axes), reads, kept
