"""Random ONNX models with what ONNX's reference evaluator makes of them: mixed operators, broadcasting, tensors without
elements or without axes, every element type that the operators take."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

OPSET = 21
MOST_ELEMENTS = 4096
LARGEST = 1e3  # of a value that is computed with: beyond, differences say little
FLOATS = ("float32", "float64", "float16", "bfloat16")
WHOLE = ("int32", "int64", "int8", "uint8", "int16", "uint16", "uint32", "uint64")
EPSILON = {"float64": 2e-16, "float32": 1.2e-7, "float16": 1e-3, "bfloat16": 8e-3}
_FAULTS = (ArithmeticError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)

UNARY = (
    "Abs", "Neg", "Sigmoid", "Tanh", "Relu", "LeakyRelu", "Elu", "Selu", "Softplus", "Softsign", "HardSigmoid", "Erf",
    "Exp", "Sin", "Cos", "Atan", "Identity", "ThresholdedRelu", "Celu", "HardSwish", "Gelu", "Mish", "Sinh", "Asinh",
)  # fmt: skip
STEPPED = ("Floor", "Ceil", "Round", "Sign")  # rounding before them may change the answer
BINARY = ("Add", "Sub", "Mul", "Max", "Min")
COMPARING = ("Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual")
REDUCING = (
    "ReduceSum", "ReduceMax", "ReduceMin", "ReduceMean", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSumExp",
    "ReduceProd",
)  # fmt: skip


@dataclass(frozen=True)
class Made:
    """A value of the model: what it is for the given inputs, and how far rounding may have carried it."""

    name: str
    array: np.ndarray
    epsilon: float = 0.0  # of the least precise type it came through; 0: exact

    @property
    def kind(self) -> str:
        return str(self.array.dtype.name)

    @property
    def is_float(self) -> bool:
        return self.kind in FLOATS


@dataclass(frozen=True)
class Case:
    model: onnx.ModelProto
    inputs: dict[str, np.ndarray]
    outputs: tuple[Made, ...]
    scale: float  # of the largest value anywhere


class _Refused(Exception):
    """This operator does not fit the values that there are."""


class Maker:
    """Grows a model node by node, each evaluated as it is added."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: dict[str, np.ndarray] = {}
        self.constants: dict[str, np.ndarray] = {}
        self.values: list[Made] = []
        self.read: set[str] = set()

    def pick(self, choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def dtype(self, name: str) -> np.dtype[Any]:
        return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)

    def shape(self) -> tuple[int, ...]:
        extents = (1, 2, 3, 4, 5, 7, 8, 16, 17, 33) if not self.chance(0.08) else (0, 1, 2, 3)
        found = tuple(int(self.pick(extents)) for _ in range(self.pick((0, 1, 2, 2, 3, 3, 4))))
        return found if math.prod(found) <= MOST_ELEMENTS else tuple(min(n, 5) for n in found)

    def array(self, shape: tuple[int, ...], kind: str) -> np.ndarray:
        """Small multiples of a quarter, exact in every type, or small whole numbers."""
        if kind == "bool":
            return self.rng.integers(0, 2, shape).astype(bool)
        if kind in FLOATS:
            return (self.rng.integers(-8, 9, shape) / 4).astype(self.dtype(kind))
        return self.rng.integers(0 if kind[0] == "u" else -9, 10, shape).astype(kind)

    def given(self, shape: tuple[int, ...], kind: str) -> Made:
        """A new input or constant."""
        table = self.constants if self.chance(0.4) else self.inputs
        name = f"{'c' if table is self.constants else 'x'}{len(table)}"
        table[name] = self.array(shape, kind)
        made = Made(name, table[name])
        self.values.append(made)
        return made

    def constant(self, array: Any) -> Made:
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(array)
        return Made(name, self.constants[name])

    def given_places(self, places: Any) -> Made:
        """Indices, as data or as constants."""
        array = np.asarray(places, np.int64)
        if self.chance(0.5):
            return self.constant(array)
        name = f"x{len(self.inputs)}"
        self.inputs[name] = array
        return Made(name, array)

    def value(self, wanted: Callable[[Made], bool]) -> Made:
        fitting = [v for v in self.values if wanted(v)]
        if not fitting:
            raise _Refused
        # late ones more often: graphs that are deep
        return fitting[-1 - min(int(self.rng.geometric(0.3)) - 1, len(fitting) - 1)]

    def partner(self, x: Made, wanted: Callable[[Made], bool] | None = None) -> Made:
        """Something of the same type that broadcasts with `x`."""
        if self.chance(0.5):
            return self.value(lambda v: v.kind == x.kind and broadcasts(v, x) and (wanted is None or wanted(v)))
        shape = tuple(1 if self.chance(0.25) else n for n in x.array.shape)
        return self.given(shape[int(self.rng.integers(len(shape) + 1)) :], x.kind)

    def add(self, op: str, takes: list[Made], count: int = 1, exact: bool = False, **attributes: Any) -> list[Made]:
        """A node, kept where the reference evaluator gives small numbers for it."""
        names = [f"v{len(self.nodes)}_{k}" for k in range(count)]
        node = helper.make_node(op, [t.name for t in takes], names, **attributes)
        function = helper.make_function("f", "f", list(dict.fromkeys(t.name for t in takes)), names, [node],
                                        [helper.make_opsetid("", OPSET)])  # fmt: skip
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = ReferenceEvaluator(function).run(None, {t.name: t.array for t in takes}, {})
        except _FAULTS as error:
            raise _Refused from error
        results = []
        for name, array in zip(names, found, strict=True):
            array = np.asarray(array)
            if array.size > MOST_ELEMENTS or array.dtype.kind not in "fiubV" or array.dtype.name not in KNOWN:
                raise _Refused
            if array.dtype.name in FLOATS:
                real = array.astype(np.float64)
                if array.size and not (np.isfinite(real).all() and np.abs(real).max() <= LARGEST):
                    raise _Refused
            epsilon = max((t.epsilon for t in takes), default=0.0)
            if array.dtype.name in FLOATS and not exact:
                epsilon = max(epsilon, EPSILON[array.dtype.name])
            results.append(Made(name, array, epsilon))
        self.nodes.append(node)
        self.read.update(t.name for t in takes)
        self.values += results
        return results


KNOWN = frozenset((*FLOATS, *WHOLE, "bool"))


def broadcasts(a: Made, b: Made) -> bool:
    try:
        return math.prod(np.broadcast_shapes(a.array.shape, b.array.shape)) <= MOST_ELEMENTS
    except ValueError:
        return False


def _float(v: Made) -> bool:
    return v.is_float


def _exact(v: Made) -> bool:
    return v.epsilon == 0.0


def _axes(m: Maker, x: Made, least: int = 0) -> list[int]:
    rank = x.array.ndim
    found = [a for a in range(rank) if m.chance(0.5)]
    if len(found) < least:
        raise _Refused
    return [a - rank if m.chance(0.3) else a for a in found]


def unary(m: Maker) -> None:
    m.add(m.pick(UNARY), [m.value(_float)])


def stepped(m: Maker) -> None:
    m.add(m.pick(STEPPED), [m.value(lambda v: v.is_float and _exact(v))], exact=True)


def whole_unary(m: Maker) -> None:
    x = m.value(lambda v: v.kind in (*WHOLE, "bool"))
    m.add("Not" if x.kind == "bool" else m.pick(("Abs", "BitwiseNot", "Sign")), [x])


def binary(m: Maker) -> None:
    x = m.value(lambda v: v.kind != "bool")
    y, op = m.partner(x), m.pick(BINARY)
    # sums of few quarters need no rounding
    m.add(op, [x, y][:: m.pick((1, -1))], exact=_exact(x) and _exact(y) and op != "Mul" and x.kind == "float32")


def divided(m: Maker) -> None:
    x = m.value(lambda v: v.kind != "bool")
    shape = x.array.shape[int(m.rng.integers(x.array.ndim + 1)) :]
    by = m.constant(m.rng.integers(1, 6, shape).astype(x.array.dtype))
    op = "Div" if m.chance(0.5) or x.is_float else "Mod"
    m.add(op, [x, by])


def logical(m: Maker) -> None:
    x = m.value(lambda v: v.kind in (*WHOLE, "bool"))
    ops = ("And", "Or", "Xor") if x.kind == "bool" else ("BitwiseAnd", "BitwiseOr", "BitwiseXor")
    m.add(m.pick(ops), [x, m.partner(x)])


def compared(m: Maker) -> None:
    x = m.value(lambda v: _exact(v) and v.kind != "bool")
    m.add(m.pick(COMPARING), [x, m.partner(x, _exact)])


def chosen(m: Maker) -> None:
    condition = m.value(lambda v: v.kind == "bool")
    x = m.value(lambda v: broadcasts(v, condition))
    y = m.partner(x, lambda v: broadcasts(v, condition))
    m.add("Where", [condition, x, y], exact=True)


def converted(m: Maker) -> None:
    x = m.value(lambda v: not v.is_float or _exact(v))
    kind = m.pick((*FLOATS, "int32", "int64", "bool", *(() if x.is_float else WHOLE)))
    m.add("Cast", [x], to=helper.np_dtype_to_tensor_dtype(m.dtype(kind)))


def reduced(m: Maker) -> None:
    x = m.value(lambda v: v.is_float or v.kind in ("int32", "int64"))
    op = m.pick(REDUCING if x.is_float else REDUCING[:3])
    takes = [x] if m.chance(0.2) else [x, m.constant(np.array(_axes(m, x), np.int64))]
    m.add(op, takes, keepdims=int(m.chance(0.5)), noop_with_empty_axes=int(m.chance(0.3)))


def placed(m: Maker) -> None:
    x = m.value(lambda v: _exact(v) and v.array.ndim > 0 and v.kind in ("float32", "int32", "float64") and v.array.size)
    axis = int(m.rng.integers(x.array.ndim))
    m.add(m.pick(("ArgMax", "ArgMin")), [x], axis=axis, keepdims=int(m.chance(0.5)),
          select_last_index=int(m.chance(0.5)))  # fmt: skip


def summed(m: Maker) -> None:
    x = m.value(lambda v: v.array.ndim > 0 and v.kind in ("float32", "float64", "int32", "int64"))
    axis = m.constant(np.array(m.rng.integers(x.array.ndim), np.int64))
    m.add("CumSum", [x, axis], exclusive=int(m.chance(0.5)), reverse=int(m.chance(0.5)))


def reshaped(m: Maker) -> None:
    x = m.value(lambda v: v.array.size > 0)
    left, shape = x.array.size, []
    while left > 1 and len(shape) < 4:
        divisors = [d for d in range(1, left + 1) if left % d == 0]
        shape.append(int(m.pick(divisors)))
        left //= shape[-1]
    shape.append(left)
    m.add("Reshape", [x, m.constant(np.array(shape, np.int64))], exact=True)


def transposed(m: Maker) -> None:
    x = m.value(lambda v: v.array.ndim > 1)
    m.add("Transpose", [x], exact=True, perm=m.rng.permutation(x.array.ndim).tolist())


def with_axes(m: Maker) -> None:
    x = m.value(lambda v: v.array.ndim < 4)
    axes = sorted(set(m.rng.integers(0, x.array.ndim + 1, 1).tolist()))
    m.add("Unsqueeze", [x, m.constant(np.array(axes, np.int64))], exact=True)


def without_axes(m: Maker) -> None:
    x = m.value(lambda v: 1 in v.array.shape)
    axes = [a for a, n in enumerate(x.array.shape) if n == 1]
    m.add("Squeeze", [x, m.constant(np.array(axes[: m.pick((1, 4))], np.int64))], exact=True)


def sliced(m: Maker) -> None:
    x = m.value(lambda v: v.array.ndim > 0)
    axes = _axes(m, x, 1)
    starts = m.rng.integers(-9, 9, len(axes))
    ends = m.rng.integers(-9, 12, len(axes))
    steps = m.rng.choice([1, 1, 2, 3, -1, -2], len(axes))
    m.add("Slice", [x, *(m.constant(np.asarray(a, np.int64)) for a in (starts, ends, axes, steps))], exact=True)


def joined(m: Maker) -> None:
    x = m.value(lambda v: v.array.ndim > 0)
    axis = int(m.rng.integers(x.array.ndim))
    rest = [n for a, n in enumerate(x.array.shape) if a != axis]
    fits = [v for v in m.values if v.kind == x.kind and v.array.ndim == x.array.ndim
            and [n for a, n in enumerate(v.array.shape) if a != axis] == rest]  # fmt: skip
    shape = (*x.array.shape[:axis], int(m.pick((0, 1, 2, 5))), *x.array.shape[axis + 1 :])
    m.add("Concat", [x, m.pick(fits), m.given(shape, x.kind)], exact=True, axis=axis)


def split(m: Maker) -> None:
    x = m.value(lambda v: v.array.ndim > 0 and max(v.array.shape) > 1)
    axis = int(np.argmax(x.array.shape))
    extent = x.array.shape[axis]
    first = int(m.rng.integers(0, extent + 1))
    sizes = m.constant(np.array([first, extent - first], np.int64))
    m.add("Split", [x, sizes], 2, exact=True, axis=axis)


def expanded(m: Maker) -> None:
    x = m.value(lambda v: v.array.size <= 64)
    shape = [int(m.pick((n, 1))) if n != 1 else int(m.pick((1, 3, 4))) for n in x.array.shape]
    if m.chance(0.5):
        shape = [int(m.pick((1, 2, 3))), *shape]
    m.add("Expand", [x, m.constant(np.array(shape, np.int64))], exact=True)


def tiled(m: Maker) -> None:
    x = m.value(lambda v: v.array.size <= 256)
    m.add("Tile", [x, m.constant(m.rng.integers(0 if m.chance(0.05) else 1, 4, x.array.ndim))], exact=True)


def padded(m: Maker) -> None:
    x = m.value(lambda v: v.array.ndim > 0 and v.array.size and v.kind in ("float32", "float64", "int32", "int64"))
    mode = m.pick(("constant", "reflect", "edge", "wrap"))
    most = 3 if mode == "constant" else max(1, min(x.array.shape) - 1)
    pads = m.rng.integers(-1 if mode == "constant" and min(x.array.shape) > 2 else 0, most, 2 * x.array.ndim)
    m.add("Pad", [x, m.constant(pads.astype(np.int64))], exact=True, mode=mode)


def gathered(m: Maker) -> None:
    x = m.value(lambda v: v.array.ndim > 0 and v.array.size)
    axis = int(m.rng.integers(x.array.ndim))
    extent = x.array.shape[axis]
    if m.chance(0.3):
        places = m.rng.integers(-extent, extent, x.array.shape)
        m.add("GatherElements", [x, m.given_places(places)], exact=True, axis=axis)
        return
    places = m.rng.integers(-extent, extent, m.pick(((), (3,), (2, 2), (0,), (1, 5))))
    m.add("Gather", [x, m.given_places(places)], exact=True, axis=axis)


def scattered(m: Maker) -> None:
    x = m.value(lambda v: v.array.ndim > 0 and v.array.size and v.kind in ("float32", "int32", "int64", "float64"))
    axis = int(m.rng.integers(x.array.ndim))
    extent = x.array.shape[axis]
    shape = tuple(int(m.rng.integers(1, n + 1)) for n in x.array.shape)
    if m.chance(0.5):
        places = np.argsort(m.rng.random((*shape[:axis], extent, *shape[axis + 1 :])), axis)
        places = np.take(places, np.arange(min(shape[axis], extent)), axis)
        m.add("ScatterElements", [x, m.given_places(places), m.given(places.shape, x.kind)], exact=True, axis=axis)
        return
    places = m.rng.integers(0, extent, (m.pick((1, 3, 6)), 1))
    updates = m.given((len(places), *x.array.shape[1:]), x.kind)
    if x.array.shape[0] != extent:
        raise _Refused
    m.add("ScatterND", [x, m.given_places(places), updates], reduction=m.pick(("add", "max", "min")))


def multiplied(m: Maker) -> None:
    x = m.value(lambda v: v.array.ndim > 0 and v.kind in ("float32", "float64", "float16", "int32"))
    columns = int(m.pick((1, 3, 8, 17)))
    m.add("MatMul", [x, m.given((x.array.shape[-1], columns), x.kind)])


def affine(m: Maker) -> None:
    x = m.value(lambda v: v.array.ndim == 2 and v.kind in ("float32", "float64"))
    columns, across = int(m.pick((1, 4, 9))), m.chance(0.5)
    shape = (columns, x.array.shape[1]) if across else (x.array.shape[1], columns)
    m.add("Gemm", [x, m.given(shape, x.kind), m.given((columns,), x.kind)], transB=int(across), alpha=0.5, beta=2.0)


def _is_image(v: Made, least: int) -> bool:
    return v.array.ndim in (3, 4) and v.kind == "float32" and v.array.size > 0 and min(v.array.shape[2:]) >= least


def convolved(m: Maker) -> None:
    x = m.value(lambda v: _is_image(v, 1))
    groups = x.array.shape[1] if m.chance(0.3) else 1
    filters = groups * int(m.pick((1, 2, 3)))
    kernel = tuple(int(min(m.pick((1, 2, 3)), n)) for n in x.array.shape[2:])
    weights = m.constant(m.array((filters, x.array.shape[1] // groups, *kernel), "float32"))
    stride = [int(m.pick((1, 1, 2))) for _ in kernel]
    m.add("Conv", [x, weights], group=groups, strides=stride, pads=[int(k > 1) for k in kernel] * 2)


def pooled(m: Maker) -> None:
    x = m.value(lambda v: _is_image(v, 2))
    kernel = [2] * (x.array.ndim - 2)
    m.add(m.pick(("MaxPool", "AveragePool")), [x], kernel_shape=kernel, strides=[int(m.pick((1, 2))) for _ in kernel])


def normalised(m: Maker) -> None:
    x = m.value(lambda v: v.array.ndim > 0 and v.kind in ("float32", "float64", "float16"))
    axis = int(m.rng.integers(-x.array.ndim, x.array.ndim))
    op = m.pick(("Softmax", "LogSoftmax", "Hardmax", "LpNormalization"))
    if op == "Hardmax" and not _exact(x):
        raise _Refused
    m.add(op, [x], axis=axis)


def ranked(m: Maker) -> None:
    x = m.value(lambda v: v.array.ndim > 0 and _exact(v) and v.kind in ("float32", "int32", "int64", "float64"))
    axis = int(m.rng.integers(x.array.ndim))
    count = m.constant(np.array([int(m.rng.integers(0, x.array.shape[axis] + 1))], np.int64))
    m.add("TopK", [x, count], 2, exact=True, axis=axis, largest=int(m.chance(0.5)))


def counted(m: Maker) -> None:
    """The data decides the shape."""
    x = m.value(lambda v: _exact(v) and v.array.size > 0 < v.array.ndim and v.kind in ("float32", "int64", "bool"))
    m.add("NonZero", [x])


def cut(m: Maker) -> None:
    x = m.value(lambda v: v.array.ndim > 1 and v.kind in ("float32", "int64", "float64"))
    m.add("Trilu", [x], exact=True, upper=int(m.chance(0.5)))


STEPS = (
    unary, unary, unary, stepped, whole_unary, binary, binary, binary, divided, logical, compared, chosen, converted,
    reduced, reduced, placed, summed, reshaped, transposed, with_axes, without_axes, sliced, joined, split, expanded,
    tiled, padded, gathered, scattered, multiplied, multiplied, affine, convolved, pooled, normalised, ranked, cut,
)  # fmt: skip
RARE = (counted,)


def random_case(seed: int) -> Case:
    m = Maker(seed)
    kinds = ("float32",) * 8 + FLOATS + WHOLE + ("bool",)
    for _ in range(m.pick((1, 2, 3))):
        m.given(m.shape(), m.pick(kinds))
    wanted = int(m.pick((3, 6, 10, 16)))
    for _ in range(wanted * 6):
        if len(m.nodes) >= wanted:
            break
        try:
            (m.pick(RARE) if m.chance(0.02) else m.pick(STEPS))(m)
        except _Refused:
            continue
    made = [v for v in m.values if v.name.startswith("v")]
    outputs = tuple(v for v in made if v.name not in m.read or m.chance(0.15)) or tuple(m.values[:1])
    graph = helper.make_graph(
        m.nodes, f"random_{seed}", [_info(n, a) for n, a in m.inputs.items()],
        [helper.make_tensor_value_info(v.name, helper.np_dtype_to_tensor_dtype(v.array.dtype), None) for v in outputs],
        [numpy_helper.from_array(a, n) for n, a in m.constants.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    reals = [np.abs(v.array.astype(np.float64)).max() for v in m.values if v.is_float and v.array.size]
    return Case(model, m.inputs, outputs, float(max(reals, default=1.0)))


def _info(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
