"""Random graphs of integer operators, on extreme values, against NumPy: everything wraps, and nothing stops."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import tilewright
from tilewright import Options

TYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
WAYS = [("cpu", "none"), ("cpu", "register"), ("cpu", "connected"), ("cuda-emulated", "connected")]
NODES = 7
SIZE = 37  # vectors, and a remainder


def truncated(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Division towards zero; 0 by zero."""
    wide = [0 if y == 0 else (abs(x) // abs(y)) * (1 if (x < 0) == (y < 0) else -1) for x, y in pairs(a, b)]
    return np.asarray([v & ((1 << a.dtype.itemsize * 8) - 1) for v in wide], np.uint64).astype(a.dtype)


def pairs(a: np.ndarray, b: np.ndarray) -> list[tuple[int, int]]:
    a, b = np.broadcast_arrays(a, b)
    return [(int(x), int(y)) for x, y in zip(a, b, strict=True)]


MEANINGS = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": truncated, "Mod": np.mod, "FMod": np.fmod,
    "Max": np.maximum, "Min": np.minimum, "Neg": np.negative, "Abs": np.abs, "Sign": np.sign,
    "Greater": lambda a, b, c, d: np.where(a > b, c, d), "LessOrEqual": lambda a, b, c, d: np.where(a <= b, c, d),
}  # fmt: skip


def extremes(dtype: np.dtype, rng: np.random.Generator, size: int) -> np.ndarray:
    limits = np.iinfo(dtype)
    special = [limits.min, limits.max, limits.min + 1, limits.max - 1, 0, 1, 2, 3, limits.max // 2 + 1]
    special += [-1, -2, -3] if limits.min < 0 else [limits.max // 3]
    chosen = np.asarray(special, dtype)[rng.integers(0, len(special), size)]
    whole = rng.integers(limits.min, limits.max, size, dtype, endpoint=True)
    return np.where(rng.integers(0, 3, size) == 0, whole, chosen).astype(dtype)


def random_graph(dtype: np.dtype, seed: int) -> tuple[onnx.ModelProto, list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    inputs = [extremes(dtype, rng, SIZE) for _ in range(3)]
    values = {f"x{i}": v for i, v in enumerate(inputs)}
    constants = {f"c{i}": extremes(dtype, rng, 1) for i in range(3)}
    constants["zero"] = np.zeros(1, dtype)
    nodes = []
    names = [n for n in MEANINGS if dtype.kind == "i" or n not in ("Neg", "Sign", "Abs")]
    with np.errstate(all="ignore"):
        for number in range(NODES):
            kind = names[rng.integers(len(names))]
            count = 4 if kind in ("Greater", "LessOrEqual") else 1 if kind in ("Neg", "Abs", "Sign") else 2
            # what came last is used more, so that operators follow each other
            own = list(values)[-3:] if rng.integers(4) else list(values)
            picked = [own[rng.integers(len(own))] if not i or rng.integers(3) else None for i in range(count)]
            picked = [p or list(constants)[rng.integers(len(constants))] for p in picked]
            if count == 2 and rng.integers(3) == 0:
                picked.reverse()
            result = f"n{number}"
            values[result] = MEANINGS[kind](*((values | constants)[p] for p in picked)).astype(dtype)
            if count == 4:
                nodes.append(helper.make_node(kind, picked[:2], [result + "_c"]))
                nodes.append(helper.make_node("Where", [result + "_c", *picked[2:]], [result]))
            else:
                extra = {"fmod": 1} if kind == "FMod" else {}
                nodes.append(helper.make_node("Mod" if extra else kind, picked, [result], **extra))
    number = helper.np_dtype_to_tensor_dtype(dtype)
    outputs = [f"n{NODES - 2}", f"n{NODES - 1}"]
    graph = helper.make_graph(
        nodes,
        "integers",
        [helper.make_tensor_value_info(f"x{i}", number, [SIZE]) for i in range(3)],
        [helper.make_tensor_value_info(o, number, list(values[o].shape)) for o in outputs],
        [onnx.numpy_helper.from_array(v, n) for n, v in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    return model, inputs, [values[o] for o in outputs]


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 8))])
def test_random_integer_graphs(dtype: str, seed: int, kernel_cache: Path) -> None:
    model, inputs, expected = random_graph(np.dtype(dtype), seed * 100 + TYPES.index(dtype))
    for target, schedule in WAYS:
        options = Options(target=target, schedule=schedule, cache_dir=kernel_cache, verify=schedule == "connected")
        compiled = tilewright.compile(model, options=options)
        for got, wanted in zip(compiled(*inputs), expected, strict=True):
            np.testing.assert_array_equal(got, wanted, f"{target} {schedule}")


def one(dtype: str, nodes: list[onnx.NodeProto], **constants: int) -> onnx.ModelProto:
    """A model of x and y to z."""
    number = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    kinds = {"Greater": onnx.TensorProto.BOOL}
    graph = helper.make_graph(
        nodes,
        "one",
        [helper.make_tensor_value_info(n, number, [SIZE]) for n in ("x", "y")],
        [helper.make_tensor_value_info("z", kinds.get(nodes[-1].op_type, number), [SIZE])],
        [onnx.numpy_helper.from_array(np.asarray(v, dtype), n) for n, v in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@pytest.mark.sample(8)
@pytest.mark.parametrize(("target", "schedule"), WAYS)
@pytest.mark.parametrize("dtype", [
    dtype if np.dtype(dtype).itemsize in (1, 8) else pytest.param(dtype, marks=pytest.mark.slow) for dtype in TYPES
])  # fmt: skip
def test_what_used_to_go_wrong(dtype: str, target: str, schedule: str, kernel_cache: Path) -> None:
    kind = np.dtype(dtype)
    x = extremes(kind, np.random.default_rng(1), SIZE)
    y = np.where(np.arange(SIZE) % 3 == 0, 0, extremes(kind, np.random.default_rng(2), SIZE)).astype(kind)
    if kind.kind == "i":
        x[1], y[1] = np.iinfo(kind).min, -1
    node = helper.make_node
    two, ten = np.asarray(2, kind), np.asarray(10, kind)
    with np.errstate(all="ignore"):
        cases = {
            "division by zero": ([node("Div", ["x", "y"], ["z"])], truncated(x, y)),
            "division by a constant zero": ([node("Div", ["x", "k"], ["z"])], np.zeros_like(x), {"k": 0}),
            "remainder by zero": ([node("Mod", ["x", "y"], ["z"])], np.mod(x, y)),
            "twice, halved": (
                [node("Mul", ["x", "k"], ["t"]), node("Div", ["t", "k"], ["z"])],
                truncated(x * two, np.broadcast_to(two, x.shape)),
                {"k": 2},
            ),
            "greater after adding": (
                [node("Add", ["x", "k"], ["t"]), node("Greater", ["t", "x"], ["z"])],
                x + ten > x,
                {"k": 10},
            ),
            "the larger after adding": (
                [node("Add", ["x", "k"], ["t"]), node("Max", ["t", "x"], ["z"])],
                np.maximum(x + ten, x),
                {"k": 10},
            ),
        }
        if kind.kind == "i":
            cases["absolute square"] = (
                [node("Mul", ["x", "x"], ["t"]), node("Abs", ["t"], ["z"])],
                np.abs(x * x),
            )
    for name, (nodes, expected, *constants) in cases.items():
        model = one(dtype, nodes, **(constants[0] if constants else {}))
        options = Options(target=target, schedule=schedule, cache_dir=kernel_cache)
        (got,) = tilewright.compile(model, options=options)(x, y)
        np.testing.assert_array_equal(got, expected, name)
