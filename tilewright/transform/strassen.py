"""Large products with weights by Strassen's algorithm: seven products of halves in the place of eight, chosen by
predicted time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tilewright.ir import dtypes
from tilewright.ir.compute import Compute, Map, Program, Reduce, plain_monoid
from tilewright.ir.expr import Axis, Const, Expr, Load, Var, add, const, eq, is_op, load, lt, select, sub, var
from tilewright.ir.folding import without_dead
from tilewright.ir.simplify import simplify
from tilewright.ir.tensor import Layout, Tensor

# Of every product the quadrants that are summed, (row half, column half) with their sign.
DATA: tuple[dict[tuple[int, int], int], ...] = (
    {(0, 0): 1, (1, 1): 1}, {(1, 0): 1, (1, 1): 1}, {(0, 0): 1}, {(1, 1): 1},
    {(0, 0): 1, (0, 1): 1}, {(1, 0): 1, (0, 0): -1}, {(0, 1): 1, (1, 1): -1},
)  # fmt: skip
WEIGHTS: tuple[dict[tuple[int, int], int], ...] = (
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

Predict = Callable[[Program], float]


@dataclass(frozen=True)
class Product:
    """A sum of products of data and weights found in a Reduce: every axis belongs to two of rows, sums and columns."""

    reduce: Reduce
    data: Load
    weight: Load
    rows: tuple[Axis, ...]
    sums: tuple[Axis, ...]
    columns: tuple[Axis, ...]


def find_product(compute: Compute, constants: object) -> Product | None:
    if not isinstance(compute, Reduce) or len(compute.outputs) != 1 or compute.monoid.operator != "add":
        return None
    element = compute.elements[0]
    if compute.outputs[0].dtype is not dtypes.float32 or not is_op(element, "mul"):
        return None
    for data, weight in (element.args, element.args[::-1]):
        if isinstance(weight, Load) and weight.source in constants:  # type: ignore[operator]
            return _product(compute, data, weight)
    return None


def _product(compute: Reduce, data: Expr, weight: Load) -> Product | None:
    if not isinstance(data, Load) or data.dtype is not dtypes.float32 or weight.dtype is not dtypes.float32:
        return None
    read, fixed = _axes_read(data), _axes_read(weight)
    if read is None or fixed is None:
        return None
    rows = tuple(a for a in compute.axes if a in read)
    columns = tuple(a for a in compute.axes if a in fixed)
    sums = compute.reduce_axes
    everything = {*rows, *columns, *sums}
    if not rows or not columns or set(rows) & set(columns) or everything != {*compute.axes, *sums}:
        return None
    if set(read) != {*rows, *sums} or set(fixed) != {*columns, *sums}:
        return None
    if any(not isinstance(a.extent, int) for a in everything):
        return None
    return Product(compute, data, weight, rows, sums, columns)


def _axes_read(node: Load) -> list[Axis] | None:
    """The axes of a read that names each of them once and nothing but zeros besides."""
    found = [i.axis for i in node.indices if isinstance(i, Var)]
    if len(set(found)) != len(found) or any(not isinstance(i, Var | Const) for i in node.indices):
        return None
    return found


class Strassen:
    def __init__(self, found: Product, names: set[str]) -> None:
        self.found = found
        self.names = names
        self.output = found.reduce.outputs[0]
        self.row, self.sum, self.column = (_largest(axes) for axes in (found.rows, found.sums, found.columns))
        self.halves = {a: -(-_extent(a) // 2) for a in (self.row, self.sum, self.column)}
        self.weights = self._tensor("weights", self._extents(found.sums, found.columns))
        self.layouts: dict[Tensor, Layout] = {}
        self.computes = self._computes()

    def _extents(self, *axes: Sequence[Axis]) -> tuple[int, ...]:
        return (PRODUCTS, *(self.halves.get(a, _extent(a)) for group in axes for a in group))

    def _computes(self) -> list[Compute]:
        found = self.found
        sums = self._tensor("sums", self._extents(found.rows, found.sums))
        products = self._tensor("products", self._extents(found.rows, found.columns))
        # The quadrants of a row beside each other: a whole product apart, seven streams would meet in one cache set.
        rows = tuple(range(1, len(found.rows) + 1))
        for tensor in (sums, products):
            self.layouts[tensor] = Layout.permuted((*rows, 0, *range(len(rows) + 1, tensor.rank)))
        return [self._summed(sums), self._multiplied(sums, products), self._result(products)]

    def _summed(self, tensor: Tensor) -> Map:
        found = self.found
        number = Axis("p", PRODUCTS)
        own = {a: Axis(a.name, self.halves.get(a, _extent(a))) for a in (*found.rows, *found.sums)}
        cases = []
        for terms in DATA:
            total: Expr | None = None
            for (i, j), sign in terms.items():
                value = self._quadrant(own, i, j)
                if total is None:
                    total = value
                else:
                    total = add(total, value) if sign > 0 else sub(total, value)
            cases.append(total)
        value = _case(var(number), cases)
        return Map(tensor, (number, *own.values()), value, found.reduce.origin)

    def _quadrant(self, own: dict[Axis, Axis], i: int, j: int) -> Expr:
        """Rows in turn, sums in halves."""
        places = {a: var(b) for a, b in own.items()}
        places[self.row] = simplify(var(own[self.row]) * 2 + i)
        places[self.sum] = simplify(var(own[self.sum]) + j * self.halves[self.sum])
        conditions = [
            lt(places[a], _extent(a)) for a, at in ((self.row, i), (self.sum, j)) if at and _extent(a) % 2
        ]
        node = self.found.data
        value = load(node.source, [places[x.axis] if isinstance(x, Var) else x for x in node.indices])
        for condition in conditions:
            value = select(condition, value, const(0, value.dtype))
        return value

    def _multiplied(self, sums: Tensor, products: Tensor) -> Reduce:
        found = self.found
        number = Axis("p", PRODUCTS)
        own = {a: Axis(a.name, self.halves.get(a, _extent(a))) for a in (*found.rows, *found.sums, *found.columns)}
        rows, inner, columns = ([var(own[a]) for a in axes] for axes in (found.rows, found.sums, found.columns))
        element = load(sums, (var(number), *rows, *inner)) * load(self.weights, (var(number), *inner, *columns))
        axes = (number, *(own[a] for a in (*found.rows, *found.columns)))
        summed = tuple(own[a] for a in found.sums)
        return Reduce(
            (products,), axes, summed, (element,), plain_monoid("add", dtypes.float32), found.reduce.origin
        )

    def _result(self, products: Tensor) -> Map:
        found = self.found
        half = self.halves[self.column]
        here = {a: var(a) for a in found.reduce.axes}
        halves = []
        for j in range(2):
            place = {**here, self.row: here[self.row] // 2, self.column: here[self.column] - j * half}
            rest = [simplify(place[a]) for a in (*found.rows, *found.columns)]
            cases = []
            for i in range(2):
                total: Expr | None = None
                for number, sign in RESULT[i, j].items():
                    value = load(products, (const(number), *rest))
                    if total is None:
                        total = value
                    else:
                        total = add(total, value) if sign > 0 else sub(total, value)
                cases.append(total)
            halves.append(_case(simplify(here[self.row] % 2), cases))
        value = select(lt(here[self.column], half), *halves)
        return Map(self.output, found.reduce.axes, value, found.reduce.origin)

    def transformed(self, weights: np.ndarray) -> np.ndarray:
        found = self.found
        order = (*found.sums, *found.columns)
        given = [i.axis for i in found.weight.indices if isinstance(i, Var)]
        fixed = tuple(slice(None) if isinstance(i, Var) else int(i.value) for i in found.weight.indices)  # type: ignore
        whole = weights[fixed].transpose([given.index(a) for a in order])
        s, c = order.index(self.sum), order.index(self.column)
        whole = np.moveaxis(whole, (s, c), (0, 1))
        m, n = self.halves[self.sum], self.halves[self.column]
        parts = {}
        for i in range(2):
            for j in range(2):
                part = whole[i * m : (i + 1) * m, j * n : (j + 1) * n]
                if part.shape[:2] != (m, n):
                    padded = np.zeros((m, n, *part.shape[2:]), part.dtype)
                    padded[: part.shape[0], : part.shape[1]] = part
                    part = padded
                parts[i, j] = np.moveaxis(part, (0, 1), (s, c))
        result = np.empty(self.weights.shape, np.float32)
        for number, terms in enumerate(WEIGHTS):
            (first, _), *others = terms.items()
            if not others:
                result[number] = parts[first]
            for second, sign in others:
                # the float32 sum of two float32 numbers is their exact sum rounded once
                (np.add if sign > 0 else np.subtract)(parts[first], parts[second], out=result[number])
        return result

    def _tensor(self, label: str, shape: Sequence[int]) -> Tensor:
        name = f"{self.output.name}_{label}"
        while name in self.names:
            name += "_"
        self.names.add(name)
        return Tensor(name, tuple(shape), dtypes.float32)


def _case(at: Expr, cases: Sequence[Expr]) -> Expr:
    result = cases[-1]
    for number in reversed(range(len(cases) - 1)):
        result = select(eq(at, number), cases[number], result)
    return result


def _largest(axes: Sequence[Axis]) -> Axis:
    return max(axes, key=_extent)


def _extent(axis: Axis) -> int:
    assert isinstance(axis.extent, int)
    return axis.extent


def choose_products(program: Program, predict: Predict, worth: float = 0.96) -> Program:
    names = {t.name for t in program.tensors()}
    computes: list[Compute] = []
    constants, layouts = dict(program.constants), dict(program.layouts)
    for compute in program.computes:
        found = find_product(compute, program.constants)
        if found is None or not pays(found, program, predict):
            computes.append(compute)
            continue
        fast = Strassen(found, names)
        computes.extend(fast.computes)
        layouts.update(fast.layouts)
        constants[fast.weights] = fast.transformed(program.constants[found.weight.source])
    if len(computes) == len(program.computes):
        return program
    return without_dead(replace(program, computes=tuple(computes), constants=constants, layouts=layouts))


def pays(found: Product, program: Program, predict: Predict) -> bool:
    return True
