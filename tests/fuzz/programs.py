"""Random Programs from a seed: maps with odd index maps, reductions, contractions, windows, in several types.

A tensor is *exact* when rounding cannot have touched it: only such tensors are compared, ranked or turned into
integers, because there a rounding error would become an error of one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import numpy as np

from tilewright.ir.analysis.simplify import simplify
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Monoid, Program
from tilewright.ir.forms.dtypes import DType
from tilewright.ir.forms.expr import Expr, ExprLike, all_of, cast, const, le, load, lt, maximum, op, select, state
from tilewright.ir.forms.tensor import Tensor
from tilewright.ir.meaning.folding import without_dead
from tilewright.ops.builder import Builder, reindex

EXTENTS = (1, 2, 3, 4, 5, 7, 8, 11, 13, 16, 17)
MOST_ELEMENTS = 3000
MOST_WORK = 60_000


@dataclass
class Writer:
    """Writes one random Program."""

    seed: int
    rng: np.random.Generator = field(init=False)
    b: Builder = field(default_factory=Builder)
    inputs: list[Tensor] = field(default_factory=list)
    floats: list[Tensor] = field(default_factory=list)
    integers: list[Tensor] = field(default_factory=list)
    bools: list[Tensor] = field(default_factory=list)
    exact: set[Tensor] = field(default_factory=set)
    dtype: DType = dtypes.float32

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng([self.seed, 77])

    def program(self) -> Program:
        self.dtype = self.pick([dtypes.float32] * 7 + [dtypes.float64, dtypes.float16])
        for number in range(int(self.rng.integers(1, 4))):
            self.add_input(f"x{number}", self.shape(), self.dtype)
        if self.rng.random() < 0.3:
            self.add_input("n", self.shape(2), self.pick([dtypes.int64, dtypes.int32, dtypes.int8]))
        for _ in range(int(self.rng.integers(3, 9))):
            self.step()
        results = self.results()
        program = Program(tuple(self.inputs), tuple(results), tuple(self.b.computes), self.b.constants)
        return without_dead(program)

    def step(self) -> None:
        kinds = [self.unary, self.unary, self.binary, self.binary, self.move, self.move, self.reduce, self.reduce,
                 self.contract, self.contract, self.window, self.softmax, self.compare, self.whole_numbers,
                 self.largest, self.join, self.followed]  # fmt: skip
        self.pick(kinds)()

    def results(self) -> list[Tensor]:
        """The last tensor and perhaps an earlier one; never an input or a constant."""
        made = [t for c in self.b.computes for t in c.outputs]
        if not made:
            self.unary()
            made = [t for c in self.b.computes for t in c.outputs]
        found = [made[-1]]
        if len(made) > 2 and self.rng.random() < 0.4:
            found.append(made[int(self.rng.integers(0, len(made) - 1))])
        return found

    # leaves

    def add_input(self, name: str, shape: tuple[int, ...], dtype: DType) -> None:
        tensor = Tensor(self.b.unique(name), shape, dtype)
        self.inputs.append(tensor)
        self.exact.add(tensor)
        self.add(tensor)

    def add(self, tensor: Tensor) -> None:
        if tensor in self.b.constants:
            return
        (
            self.floats if tensor.dtype.is_float else self.bools if tensor.dtype is dtypes.bool_ else self.integers
        ).append(tensor)

    def shape(self, most: int = 4) -> tuple[int, ...]:
        while True:
            shape = tuple(int(self.rng.choice(EXTENTS)) for _ in range(int(self.rng.integers(1, most + 1))))
            if prod(shape) <= MOST_ELEMENTS:
                return shape

    def pick(self, values: list):
        return values[int(self.rng.integers(len(values)))]

    def float_tensor(self) -> Tensor:
        """Recent ones more often: long chains."""
        return self.floats[-1] if self.rng.random() < 0.5 else self.pick(self.floats)

    def weights(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        values = self.rng.standard_normal(shape) / max(1, prod(shape[1:])) ** 0.5
        return self.b.constant(values.astype(dtype.numpy), "w")

    # elementwise

    def unary(self) -> None:
        x = self.float_tensor()
        kind = self.pick(["exp", "tanh", "sigmoid", "erf", "abs", "neg", "relu", "root", "sin", "floor", "scale"])
        if kind == "floor" and x not in self.exact:
            kind = "tanh"
        shape = dims(x)

        def value(*i: Expr) -> Expr:
            v = self.b.read(x, i)
            if kind == "exp":
                return op("exp", op("min", v, 3.0))
            if kind == "relu":
                return maximum(v, 0.0)
            if kind == "root":
                return op("sqrt", op("abs", v))
            if kind == "scale":
                return v * 0.5 + 1.0
            return op(kind, v)

        made = self.b.map("u", shape, value)
        if x in self.exact and kind in ("abs", "neg", "relu", "floor"):
            self.exact.add(made)
        self.add(made)

    def binary(self) -> None:
        x = self.float_tensor()
        y = self.partner(x)
        shape = tuple(np.broadcast_shapes(dims(x), dims(y)))
        kind = self.pick(["add", "sub", "mul", "max", "min"])
        made = self.b.map("b", shape, lambda *i: op(kind, self.b.read(x, i), self.b.read(y, i)))
        if {x, y} <= self.exact and kind in ("max", "min"):
            self.exact.add(made)
        self.add(made)

    def partner(self, x: Tensor) -> Tensor:
        """Something that broadcasts with `x`, or a constant made to."""
        fitting = [y for y in self.floats if y.dtype is x.dtype and fits(dims(x), dims(y))]
        if fitting and self.rng.random() < 0.8:
            return self.pick(fitting)
        shape = tuple(n if self.rng.random() < 0.7 else 1 for n in dims(x))
        return self.weights(shape[int(self.rng.integers(0, len(shape))) :], x.dtype)

    def compare(self) -> None:
        exact = [t for t in self.floats if t in self.exact]
        x = self.pick(exact)
        condition = self.b.map("c", dims(x), lambda *i: lt(self.b.read(x, i), 0.25))
        self.exact.add(condition)
        self.add(condition)
        y = self.float_tensor()
        if dims(y) == dims(x):
            chosen = self.b.map(
                "s", dims(x), lambda *i: select(self.b.read(condition, i), self.b.read(y, i), const(-1.0, y.dtype))
            )
            self.add(chosen)

    def whole_numbers(self) -> None:
        if not self.integers:
            x = self.pick([t for t in self.floats if t in self.exact])
            whole = self.b.map("i", dims(x), lambda *i: cast(op("floor", self.b.read(x, i) * 4.0), dtypes.int32))
            self.exact.add(whole)
            self.add(whole)
            return
        n = self.pick(self.integers)
        kind = self.pick(["shift", "mod", "float", "product"])

        def value(*i: Expr) -> Expr:
            v = self.b.read(n, i)
            if kind == "shift":
                return v // 3 + 1
            if kind == "mod":
                return v % 5
            if kind == "product":
                return op("max", v, const(-3, n.dtype)) * v
            return cast(v, self.dtype) * 0.125

        made = self.b.map("i", dims(n), value)
        self.exact.add(made)
        self.add(made)

    # moving data

    def move(self) -> None:
        x = self.pick(self.floats + self.bools) if self.rng.random() < 0.2 else self.float_tensor()
        shape = dims(x)
        kind = self.pick(["transpose", "reshape", "slice", "pad", "repeat", "reverse"])
        order = [int(a) for a in self.rng.permutation(len(shape))]
        if kind == "transpose":
            made = self.b.map("t", [shape[a] for a in order],
                              lambda *i: load(x, [i[order.index(a)] for a in range(len(shape))]))  # fmt: skip
        elif kind == "reshape":
            target = self.factors(prod(shape))
            made = self.b.map("r", target, lambda *i: load(x, reindex(shape, target, i)))
        elif kind == "slice":
            steps = [int(self.rng.integers(1, 3)) for _ in shape]
            starts = [int(self.rng.integers(0, max(1, n // 2))) for n in shape]
            sizes = [-(-(n - s) // d) for n, s, d in zip(shape, starts, steps, strict=True)]
            made = self.b.map(
                "l", sizes, lambda *i: load(x, [e * d + s for e, d, s in zip(i, steps, starts, strict=True)])
            )
        elif kind == "pad":
            made = self.padded(x)
        elif kind == "repeat":
            if prod(shape) * 2 > MOST_ELEMENTS:
                return
            made = self.b.map("p", [shape[0] * 2, *shape[1:]], lambda *i: load(x, [i[0] % shape[0], *i[1:]]))
        else:
            made = self.b.map("v", shape, lambda *i: load(x, [n - 1 - e for n, e in zip(shape, i, strict=True)]))
        if x in self.exact:
            self.exact.add(made)
        self.add(made)

    def padded(self, x: Tensor) -> Tensor:
        shape = dims(x)
        before = [int(self.rng.integers(0, 3)) for _ in shape]
        after = [int(self.rng.integers(0, 3)) for _ in shape]
        sizes = [n + a + c for n, a, c in zip(shape, before, after, strict=True)]

        def value(*i: Expr) -> Expr:
            at = [e - s for e, s in zip(i, before, strict=True)]
            inside = all_of([c for e, n in zip(at, shape, strict=True) for c in (le(0, e), lt(e, n))])
            fill = const(0, x.dtype)
            return select(inside, load(x, at), fill)

        return self.b.map("p", sizes, value)

    def factors(self, size: int) -> tuple[int, ...]:
        found = []
        rest = size
        while rest > 1 and len(found) < 3:
            choices = [n for n in range(2, rest + 1) if rest % n == 0]
            found.append(self.pick(choices))
            rest //= found[-1]
        return tuple([*found, rest] if rest > 1 or not found else found)

    def join(self) -> None:
        """Two tensors behind each other along the first axis."""
        x = self.float_tensor()
        mates = [y for y in self.floats if y.dtype is x.dtype and dims(y)[1:] == dims(x)[1:] and y.rank == x.rank]
        y = self.pick(mates)
        first = dims(x)[0]
        shape = (first + dims(y)[0], *dims(x)[1:])
        if prod(shape) > MOST_ELEMENTS:
            return
        made = self.b.map(
            "j", shape, lambda i, *rest: select(lt(i, first), load(x, [i, *rest]), load(y, [i - first, *rest]))
        )
        if {x, y} <= self.exact:
            self.exact.add(made)
        self.add(made)

    # reductions

    def reduce(self) -> None:
        x = self.float_tensor()
        if self.bools and self.rng.random() < 0.15:
            x = self.pick(self.bools)
        shape = dims(x)
        over = [a for a in range(len(shape)) if self.rng.random() < 0.5] or [int(self.rng.integers(len(shape)))]
        kept = [a for a in range(len(shape)) if a not in over]
        kind = self.pick(["and", "or"] if x.dtype is dtypes.bool_ else ["add", "add", "max", "min", "square"])
        wide = dtypes.accumulator(x.dtype) if kind in ("add", "square") else x.dtype

        def element(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Expr:
            at: list[ExprLike] = [0] * len(shape)
            for axis, e in zip(kept, i, strict=True):
                at[axis] = e
            for axis, e in zip(over, r, strict=True):
                at[axis] = e
            v = cast(load(x, at), wide)
            return v * v if kind == "square" else v

        total = self.b.reduce(
            "d",
            [shape[a] for a in kept] or [1],
            [shape[a] for a in over],
            lambda i, r: element(i if kept else (), r),
            "add" if kind == "square" else kind,
        )
        count = prod(shape[a] for a in over)
        if kind in ("add", "square"):
            made = self.b.map("m", dims(total), lambda *i: cast(load(total, i) * (1.0 / count), x.dtype))
        else:
            made = total
            if x in self.exact:
                self.exact.add(made)
        self.add(made)

    def largest(self) -> None:
        """ArgMax and the maximum together: a reduction over a pair."""
        x = self.pick([t for t in self.floats if t in self.exact])
        shape = dims(x)
        if shape[-1] == 1:
            return
        left = (state("a0", x.dtype), state("a1", dtypes.int64))
        right = (state("b0", x.dtype), state("b1", dtypes.int64))
        # of equal values the one that comes first, in whatever order they are combined
        better = op("or", op("lt", left[0], right[0]),
                    op("and", op("eq", left[0], right[0]), op("lt", right[1], left[1])))  # fmt: skip
        start = (const(float("-inf"), x.dtype), const(np.iinfo(np.int64).max, dtypes.int64))
        monoid = Monoid(left, right, start,
                        (select(better, right[0], left[0]), select(better, right[1], left[1])), left)  # fmt: skip

        def pair(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> tuple[Expr, ...]:
            return load(x, [*(i if len(shape) > 1 else ()), r[0]]), cast(r[0], dtypes.int64)

        value, place = self.b.reduce_tuple(("v", "a"), shape[:-1] or (1,), shape[-1:], pair, monoid)
        for made in (value, place):
            self.exact.add(made)
            self.add(made)

    def softmax(self) -> None:
        x = self.float_tensor()
        shape = dims(x)
        row, last = shape[:-1] or (1,), shape[-1]

        def at(i: tuple[Expr, ...]) -> tuple[Expr, ...]:
            return i if len(shape) > 1 else ()

        top = self.b.reduce("top", row, (last,), lambda i, r: load(x, [*at(i), r[0]]), "max")
        up = self.b.map("up", shape, lambda *i: op("exp", load(x, i) - load(top, i[:-1] or (0,))))
        wide = dtypes.accumulator(x.dtype)
        total = self.b.reduce("sum", row, (last,), lambda i, r: cast(load(up, [*at(i), r[0]]), wide), "add")
        made = self.b.map("soft", shape, lambda *i: load(up, i) / cast(load(total, i[:-1] or (0,)), x.dtype))
        self.add(made)

    def followed(self) -> None:
        """A reduction whose elements depend on another reduction along the same axis: what streaming is about."""
        x = self.float_tensor()
        if x.rank < 2 or x.dtype is dtypes.float16:
            return
        *lead, last = dims(x)
        middle = self.pick([5, 7, 13, 16, 19])
        w = self.weights((last, middle), x.dtype)
        if prod(lead) * last * middle > MOST_WORK:
            return
        s = self.b.reduce(
            "s", (*lead, middle), (last,), lambda i, r: load(x, [*i[:-1], r[0]]) * load(w, [r[0], i[-1]]), "add"
        )
        first = self.pick(["max", "min", "add", "size"])

        def under(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Expr:
            v = load(s, [*i, r[0]])
            return op("abs", v) if first == "size" else v

        m = self.b.reduce("m", lead, (middle,), under, "max" if first == "size" else first)
        second = self.pick(["add", "add", "max", "min"])
        kind = self.pick(
            ["exp", "quotient", "sine", "product"] if second == "add" else ["difference", "half", "product"]
        )
        if kind == "quotient" and first != "size":
            kind = "exp" if first == "max" else "sine"
        if kind == "exp" and first != "max":
            kind = "product"

        def element(v: Expr, top: Expr) -> Expr:
            return {
                "exp": lambda: op("exp", v - top),
                "quotient": lambda: v / top,
                "sine": lambda: op("sin", v - top),
                "product": lambda: v * top,
                "difference": lambda: v - top,
                "half": lambda: (v + top) * 0.5,
            }[kind]()

        between = self.b.map("e", (*lead, middle), lambda *i: element(load(s, i), load(m, i[:-1])))
        if second == "add" and self.rng.random() < 0.7:
            columns = self.pick([1, 3, 8, 11])
            u = self.weights((middle, columns), x.dtype)

            def weighed(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Expr:
                return load(between, [*i[:-1], r[0]]) * load(u, [r[0], i[-1]])

            made = self.b.reduce("o", (*lead, columns), (middle,), weighed, "add")
        else:
            made = self.b.reduce("o", lead, (middle,), lambda i, r: load(between, [*i, r[0]]), second)
        self.add(self.b.map("f", dims(made), lambda *i: op("tanh", load(made, i))))

    def contract(self) -> None:
        """A batched product with weights or with another tensor."""
        x = self.float_tensor()
        if x.rank < 2:
            return
        *batch, rows, inner = dims(x)
        mates = [y for y in self.floats if y.dtype is x.dtype and y.rank == x.rank and dims(y)[:-2] == tuple(batch)
                 and inner in dims(y)[-2:]]  # fmt: skip
        flip = False
        if mates and self.rng.random() < 0.5:
            y = self.pick(mates)
            flip = dims(y)[-2] != inner
            columns = dims(y)[-2] if flip else dims(y)[-1]
        else:
            columns = int(self.rng.choice(EXTENTS))
            y = self.weights((*batch, inner, columns) if self.rng.random() < 0.5 else (inner, columns), x.dtype)
        if prod(batch) * rows * inner * columns > MOST_WORK:
            return
        wide = dtypes.accumulator(x.dtype)

        def element(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Expr:
            *place, row, column = i
            other = (column, r[0]) if flip else (r[0], column)
            lead = place if y.rank == x.rank else []
            return cast(load(x, [*place, row, r[0]]), wide) * cast(load(y, [*lead, *other]), wide)

        total = self.b.reduce("g", (*batch, rows, columns), (inner,), element, "add")
        self.add(self.b.map("h", dims(total), lambda *i: cast(load(total, i) * inner**-0.5, x.dtype)))

    def window(self) -> None:
        """A convolution over the last axes of whatever there is: strides, pads, groups."""
        x = self.float_tensor()
        if x.rank < 2:
            return
        *lead, channels, length = dims(x)
        lead = lead[-1:] if len(lead) > 1 else lead
        if x.rank > 3:
            return
        kernel = int(self.rng.integers(1, 4))
        stride = int(self.rng.integers(1, 3))
        pad = int(self.rng.integers(0, kernel))
        out = (length + 2 * pad - kernel) // stride + 1
        if out < 1:
            return
        depthwise = self.rng.random() < 0.4
        outputs = channels if depthwise else int(self.rng.choice(EXTENTS))
        w = self.weights((outputs, 1 if depthwise else channels, kernel), x.dtype)
        if prod(lead) * outputs * out * kernel * channels > MOST_WORK:
            return
        wide = dtypes.accumulator(x.dtype)

        def element(i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Expr:
            *place, c, o = i
            channel = c if depthwise else r[0]
            at = simplify(o * stride + r[1] - pad)
            inside = all_of([le(0, at), lt(at, length)]) if pad else None
            v = cast(load(x, [*place, channel, at]), wide)
            if inside is not None:
                v = select(inside, v, const(0, wide))
            return v * cast(load(w, [c, 0 if depthwise else r[0], r[1]]), wide)

        total = self.b.reduce("w", (*lead, outputs, out), (1 if depthwise else channels, kernel), element, "add")
        self.add(self.b.map("y", dims(total), lambda *i: maximum(cast(load(total, i), x.dtype), -1.0)))


def dims(tensor: Tensor) -> tuple[int, ...]:
    return tuple(int(n) for n in tensor.shape)  # type: ignore[arg-type]


def fits(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    try:
        return prod(np.broadcast_shapes(first, second)) <= MOST_ELEMENTS
    except ValueError:
        return False


def random_program(seed: int) -> Program:
    return Writer(seed).program()


def random_arrays(program: Program, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([seed, 5])
    arrays = {}
    for t in program.inputs:
        if t.dtype.is_float:
            arrays[t.name] = rng.standard_normal(dims(t)).astype(t.dtype.numpy)
        else:
            arrays[t.name] = rng.integers(-9, 10, dims(t)).astype(t.dtype.numpy)
    return arrays
