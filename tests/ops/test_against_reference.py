"""Operators at extreme values against ONNX's reference evaluator; every difference has a reason (docs/onnx.md)."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tests.ops.running import interpret_model
from tilewright import TilewrightError

# By the name of a case why ours is another answer than the reference's; docs/onnx.md has the same as a table.
EXPLAINED = {
    r"Cast float\w+ to u?int(32|64)": "out of range the nearest number, of NaN 0; the reference asks the processor",
    r"Softsign float\w+ special": "1 and -1 of infinities, its limits; the reference divides infinity by infinity",
    r"ReduceMean int32 of nothing.*": "0, as every division of integers by 0; the reference makes an integer of NaN",
    r"Pow uint8 extremes": "0 where the power is beyond 32 bits; the reference wraps around",
    r"ReduceSumSquare int32 .*": "of the type of its input, as the operator says; the reference gives int64",
    r"Gelu float16 usual": "computed in float32 and rounded once; the reference rounds at every step",
    r"(Erf|Gelu) float64 .*": "computed in float64; the reference's erf is one of float32",
    r"(HardSwish|LeakyRelu|HardSigmoid) float64 .*": "its constants are float64; the reference's are float32",
}
_OF_THE_PROCESSOR = "Cast"  # some processors do as we do

TYPES = {"float32": np.float32, "float64": np.float64, "float16": np.float16, "int8": np.int8, "uint8": np.uint8,
         "int16": np.int16, "int32": np.int32, "int64": np.int64, "uint32": np.uint32, "uint64": np.uint64,
         "bool": np.bool_}  # fmt: skip
FLOATS = ("float32", "float64", "float16")
TOLERANCE = {"float32": 4e-6, "float64": 1e-12, "float16": 2e-3}
UNARY = ["Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Cos", "Cosh", "Erf", "Exp", "Floor",
         "HardSwish", "IsNaN", "IsInf", "Log", "Mish", "Neg", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin",
         "Sinh", "Softplus", "Softsign", "Sqrt", "Tan", "Tanh", "Identity", "Gelu", "Elu", "Celu", "Selu", "LeakyRelu",
         "HardSigmoid", "ThresholdedRelu", "Softmax", "LogSoftmax"]  # fmt: skip
BINARY = ["Add", "Sub", "Mul", "Div", "Max", "Min", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Pow"]
REDUCTIONS = ["ReduceSum", "ReduceMean", "ReduceProd", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2", "ReduceLogSum",
              "ReduceLogSumExp", "ReduceSumSquare"]  # fmt: skip


class Case(NamedTuple):
    name: str
    op: str
    inputs: tuple[np.ndarray, ...]
    attributes: Mapping[str, Any] = MappingProxyType({})
    constants: tuple[np.ndarray, ...] = ()


def floats(dtype: str) -> dict[str, np.ndarray]:
    info = np.finfo(TYPES[dtype])
    with np.errstate(over="ignore"):
        return {
            "special": np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1], TYPES[dtype]),
            "huge": np.array([info.max, -info.max, info.max / 2, -info.max / 3], TYPES[dtype]),
            "tiny": np.array([info.tiny, -info.tiny, info.eps, -info.eps, info.tiny * 4], TYPES[dtype]),
            "usual": np.linspace(-5, 5, 21).astype(TYPES[dtype]),
        }


def whole(dtype: str) -> np.ndarray:
    info = np.iinfo(TYPES[dtype])
    return np.array([info.min, info.max, 0, 1, 2, 7, info.max - 1, info.min + 1], TYPES[dtype])


def cases() -> Iterator[Case]:
    for dtype in FLOATS:
        for kind, x in floats(dtype).items():
            for op in UNARY:
                rows = x.reshape(1, -1) if op in ("Softmax", "LogSoftmax") else x
                yield Case(f"{op} {dtype} {kind}", op, (rows,))
            for op in BINARY:
                yield Case(f"{op} {dtype} {kind}", op, (np.repeat(x, len(x)), np.tile(x, len(x))))
    for dtype in ("int8", "uint8", "int32", "int64"):
        x = whole(dtype)
        a, b = np.repeat(x, len(x)), np.tile(x, len(x))
        for op in (*BINARY, "Mod"):
            if op in ("Div", "Mod"):
                yield Case(f"{op} {dtype} extremes", op, (a[b != 0], b[b != 0]))
                yield Case(f"{op} {dtype} by zero", op, (a[b == 0], b[b == 0]))
            else:
                yield Case(f"{op} {dtype} extremes", op, (a, b))
    for dtype in ("float32", "float16", "int32"):
        made = floats(dtype) if dtype in FLOATS else {"extremes": whole(dtype)}
        for op in REDUCTIONS:
            for keep in (0, 1):
                more = {"keepdims": keep}
                yield Case(f"{op} {dtype} of nothing, keepdims {keep}", op, (np.zeros((2, 0), TYPES[dtype]),), more,
                           (np.array([1]),))  # fmt: skip
                for kind, x in made.items():
                    yield Case(f"{op} {dtype} {kind}, keepdims {keep}", op, (np.stack([x, x[::-1]]),), more,
                               (np.array([1]),))  # fmt: skip
    for source in TYPES:
        x = np.concatenate(list(floats(source).values())) if source in FLOATS else (
            np.array([False, True]) if source == "bool" else whole(source))  # fmt: skip
        for goal, kind in TYPES.items():
            to = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
            yield Case(f"Cast {source} to {goal}", "Cast", (x,), {"to": to})


def model_of_case(case: Case) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    inputs = {f"x{k}": a for k, a in enumerate(case.inputs)}
    fixed = {f"c{k}": a for k, a in enumerate(case.constants)}
    kinds = {n: helper.np_dtype_to_tensor_dtype(a.dtype) for n, a in inputs.items()}
    ports = [helper.make_tensor_value_info(n, kinds[n], a.shape) for n, a in inputs.items()]
    node = helper.make_node(case.op, [*inputs, *fixed], ["y"], **case.attributes)
    arrays = [numpy_helper.from_array(a, n) for n, a in fixed.items()]
    graph = helper.make_graph([node], "graph", ports, [onnx.ValueInfoProto(name="y")], arrays)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10), inputs


def same(ours: np.ndarray, theirs: np.ndarray) -> bool:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    if ours.dtype.kind != "f":
        return bool(np.array_equal(ours, theirs))
    a, b = ours.astype(np.longdouble), theirs.astype(np.longdouble)
    alike = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        near = np.abs(a - b) <= TOLERANCE[ours.dtype.name] * np.abs(b) + np.finfo(ours.dtype).tiny
    return bool(np.all(alike | near))


def differences(chosen: list[Case]) -> tuple[dict[str, str], int]:
    """Of each case that differs both answers, and how many were compared: the reference lacks some types."""
    found, compared = {}, 0
    for case in chosen:
        model, inputs = model_of_case(case)
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            try:
                theirs = np.asarray(ReferenceEvaluator(model).run(None, inputs)[0])
            except (TypeError, ValueError, RuntimeError, NotImplementedError):
                continue
            try:
                ours = interpret_model(model, inputs)["y"]
            except TilewrightError as error:
                found[case.name] = str(error)
                continue
        compared += 1
        if not same(ours, theirs):
            found[case.name] = f"ours {ours.ravel()[:12]}, theirs {theirs.ravel()[:12]}"
    return found, compared


def unexplained(found: dict[str, str]) -> dict[str, str]:
    return {name: text for name, text in found.items() if not any(re.fullmatch(r, name) for r in EXPLAINED)}


def test_extreme_values_against_the_reference() -> None:
    found, compared = differences(list(cases()))
    assert compared >= 600
    assert unexplained(found) == {}
    needed = [r for r in EXPLAINED if not r.startswith(_OF_THE_PROCESSOR)]
    assert [r for r in needed if not any(re.fullmatch(r, name) for name in found)] == []
