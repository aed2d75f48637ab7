"""Single operators of every kind at odd sizes: copies, reductions, windows, transposed and grouped convolutions.

Each is a model of one node that any ONNX runtime can read. What counts is time beside a peer, and beside the bytes that
have to move.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, shape_inference

OPSET = 17
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Operator:
    """One node: shapes of the float32 inputs, shapes or values of constant ones, in the node's order by name."""

    kind: str
    inputs: Mapping[str, Shape]
    constants: Mapping[str, Shape | np.ndarray] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    outputs: int = 1
    order: tuple[str, ...] = ()  # of the node's inputs, where constants do not come last

    def describe(self) -> str:
        shapes = ", ".join("x".join(map(str, shape)) or "scalar" for shape in self.inputs.values())
        weights = [s for s in self.constants.values() if isinstance(s, tuple)]
        by = f" by {'x'.join(map(str, weights[0]))}" if weights else ""
        values = [np.asarray(v).ravel().tolist() for v in self.constants.values() if isinstance(v, np.ndarray)]
        told = [f"{key} {_short(value)}" for key, value in self.attributes.items()]
        told += [_short(v) for v in values if len(v) <= 8]
        return f"{self.kind} {shapes}{by}" + (f" ({', '.join(told)})" if told else "")

    @property
    def operations(self) -> int:
        """Of convolutions the direct arithmetic; an operation an element moved for the rest."""
        weights = [s for s in self.constants.values() if isinstance(s, tuple)]
        if self.kind == "ConvTranspose":
            return 2 * math.prod(self.inputs["x"]) * math.prod(weights[0][1:])
        if self.kind == "Conv":
            return 2 * math.prod(self._output_shapes()[0]) * math.prod(weights[0][1:])
        return self.data_elements

    @property
    def data_elements(self) -> int:
        """Elements that must be read or written at least once, in units of four bytes."""
        values = self.constants.values()
        constants = sum(v.size if isinstance(v, np.ndarray) else math.prod(v) for v in values)
        given = sum(math.prod(shape) for shape in self.inputs.values())
        return given + constants + sum(math.prod(shape) for shape in self._output_shapes())

    def _output_shapes(self) -> list[Shape]:
        inferred = shape_inference.infer_shapes(self.model(), data_prop=True)
        return [tuple(d.dim_value for d in o.type.tensor_type.shape.dim) for o in inferred.graph.output]

    def model(self) -> onnx.ModelProto:
        rng = np.random.default_rng(20)
        arrays = {
            name: value if isinstance(value, np.ndarray) else rng.standard_normal(value, dtype=np.float32)
            for name, value in self.constants.items()
        }
        names = self.order or (*self.inputs, *self.constants)
        results = [f"output{i}" if i else "output" for i in range(self.outputs)]
        node = helper.make_node(self.kind, list(names), results, **self.attributes)
        graph = helper.make_graph(
            [node],
            "operator",
            [helper.make_tensor_value_info(n, TensorProto.FLOAT, list(s)) for n, s in self.inputs.items()],
            [onnx.ValueInfoProto(name=name) for name in results],
            [numpy_helper.from_array(array, name) for name, array in arrays.items()],
        )
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
        return shape_inference.infer_shapes(made, data_prop=True)

    def write(self, path: Path) -> None:
        onnx.save(self.model(), str(path))


def _short(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "x".join(f"{v:g}" if isinstance(v, float) else str(v) for v in value)
    return str(value)


def operator_families() -> dict[str, list[Operator]]:
    """By family; shapes odd and even, rows that start at multiples of a page included."""
    return {
        "transposed convolution": _transposed(),
        "copy": _copies(),
        "elementwise": _elementwise(),
        "reduction": _reductions(),
        "window": _windows(),
        "unusual convolution": _convolutions(),
    }


def _one(kind: str, shape: Shape, **attributes: Any) -> Operator:
    return Operator(kind, {"x": shape}, attributes=attributes)


def _with(kind: str, shape: Shape, *values: Any, **attributes: Any) -> Operator:
    constants = {f"c{i}": np.asarray(v, np.int64 if not isinstance(v, np.ndarray) else v.dtype)
                 for i, v in enumerate(values)}  # fmt: skip
    return Operator(kind, {"x": shape}, constants, attributes)


def _weighted(kind: str, shape: Shape, weight: Shape, **attributes: Any) -> Operator:
    return Operator(kind, {"x": shape}, {"w": weight}, {"kernel_shape": list(weight[2:]), **attributes})


def _transposed() -> list[Operator]:
    def case(shape: Shape, weight: Shape, **attributes: Any) -> Operator:
        return _weighted("ConvTranspose", shape, weight, **attributes)

    return [
        case((1, 512, 16, 16), (512, 256, 2, 2), strides=[2, 2]),
        case((1, 128, 64, 64), (128, 64, 2, 2), strides=[2, 2]),
        case((1, 64, 32, 32), (64, 32, 4, 4), strides=[2, 2], pads=[1, 1, 1, 1]),
        case((1, 64, 33, 29), (64, 48, 3, 3), strides=[2, 2], pads=[1, 1, 1, 1], output_padding=[1, 1]),
        case((1, 40, 57, 57), (40, 17, 3, 3), strides=[2, 2]),
        case((2, 24, 19, 23), (24, 20, 5, 5), strides=[3, 3], pads=[1, 2, 2, 1]),
        case((1, 32, 40, 40), (32, 32, 3, 3), pads=[1, 1, 1, 1]),
        case((1, 32, 31, 31), (32, 16, 3, 3), strides=[2, 2], dilations=[2, 2], pads=[2, 2, 2, 2]),
        case((1, 64, 28, 28), (64, 16, 4, 4), strides=[2, 2], pads=[1, 1, 1, 1], group=4),
        case((1, 96, 28, 28), (96, 1, 4, 4), strides=[2, 2], pads=[1, 1, 1, 1], group=96),
        case((1, 64, 30, 30), (64, 1, 3, 3), strides=[2, 2], group=64),
        case((1, 80, 400), (80, 40, 16), strides=[8], pads=[4, 4]),
        case((1, 64, 12, 12, 12), (64, 32, 2, 2, 2), strides=[2, 2, 2]),
        case((1, 16, 10, 11, 12), (16, 12, 3, 3, 3), strides=[2, 2, 2], pads=[1, 1, 1, 1, 1, 1]),
    ]


def _copies() -> list[Operator]:
    def concat(axis: int, *shapes: Shape) -> Operator:
        return Operator("Concat", {f"x{i}": s for i, s in enumerate(shapes)}, attributes={"axis": axis})

    def pad(shape: Shape, pads: Sequence[int], mode: str = "constant") -> Operator:
        return _with("Pad", shape, list(pads), mode=mode)

    def resize(shape: Shape, sizes: Sequence[int]) -> Operator:
        return Operator(
            "Resize", {"x": shape}, {"roi": np.zeros(0, np.float32), "scales": np.zeros(0, np.float32),
            "sizes": np.asarray(sizes, np.int64)},
            {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
        )  # fmt: skip

    return [
        concat(1, (1, 32, 256, 256), (1, 32, 256, 256)),
        concat(1, (1, 61, 57, 57), (1, 35, 57, 57)),
        concat(3, (1, 128, 128, 32), (1, 128, 128, 32)),
        concat(3, (1, 57, 57, 61), (1, 57, 57, 35)),
        concat(2, (1, 17, 33, 129), (1, 17, 40, 129), (1, 17, 3, 129)),
        concat(-1, (129, 1), (129, 700), (129, 3)),
        Operator("Split", {"x": (1, 96, 57, 57)}, {}, {"axis": 1}, outputs=3),
        Operator("Split", {"x": (197, 1152)}, {}, {"axis": 1}, outputs=3),
        Operator("Split", {"x": (56, 56, 96)}, {}, {"axis": 2}, outputs=2),
        _with("Slice", (1, 64, 113, 113), [0, 0, 1, 2], [1, 64, 113, 111], [0, 1, 2, 3]),
        _with("Slice", (1, 64, 112, 112), [0, 0], [112, 112], [2, 3], [2, 2]),
        _with("Slice", (1, 1000, 300), [7], [900], [1]),
        pad((1, 64, 56, 56), [0, 0, 1, 1, 0, 0, 1, 1]),
        pad((1, 31, 113, 117), [0, 0, 2, 3, 0, 0, 1, 2]),
        pad((1, 56, 56, 64), [0, 1, 1, 0, 0, 1, 1, 0]),
        pad((1, 32, 62, 62), [0, 0, 3, 3, 0, 0, 3, 3], "reflect"),
        _one("Transpose", (1024, 1024), perm=[1, 0]),
        _one("Transpose", (999, 1001), perm=[1, 0]),
        _one("Transpose", (2048, 3072), perm=[1, 0]),
        _one("Transpose", (63, 17), perm=[1, 0]),
        _one("Transpose", (12, 197, 64), perm=[1, 0, 2]),
        _one("Transpose", (12, 197, 64), perm=[0, 2, 1]),
        _one("Transpose", (64, 100, 33), perm=[2, 1, 0]),
        _one("Transpose", (1, 64, 56, 56), perm=[0, 2, 3, 1]),
        _one("Transpose", (1, 56, 56, 64), perm=[0, 3, 1, 2]),
        _one("Transpose", (1, 3, 224, 224), perm=[0, 2, 3, 1]),
        _one("Transpose", (1, 224, 224, 3), perm=[0, 3, 1, 2]),
        _one("Transpose", (1, 128, 12, 64), perm=[0, 2, 1, 3]),
        _one("Transpose", (2, 8, 37, 41), perm=[3, 1, 0, 2]),
        _one("Transpose", (1, 32, 256, 256), perm=[0, 2, 3, 1]),
        _one("DepthToSpace", (1, 64, 40, 40), blocksize=2),
        _one("SpaceToDepth", (1, 16, 80, 80), blocksize=2),
        resize((1, 32, 64, 64), [1, 32, 128, 128]),
        resize((1, 19, 33, 35), [1, 19, 99, 105]),
        resize((1, 16, 50, 50), [1, 16, 73, 81]),
        _with("Expand", (1, 96, 1, 1), [1, 96, 56, 56]),
        _with("Tile", (7, 33, 65), [1, 3, 2]),
        _with("Gather", (5000, 300), np.random.default_rng(3).integers(0, 5000, (128,)), axis=0),
        _with("Gather", (3000, 768), np.random.default_rng(3).integers(0, 3000, (4, 61)), axis=0),
        _with("Gather", (64, 500, 33), np.random.default_rng(3).integers(0, 500, (77,)), axis=1),
    ]


def _elementwise() -> list[Operator]:
    def two(kind: str, first: Shape, second: Shape) -> Operator:
        return Operator(kind, {"x": first, "y": second})

    return [
        two("Add", (1, 64, 56, 56), (1, 64, 56, 56)),
        two("Add", (1, 64, 56, 56), (1, 64, 1, 1)),
        two("Mul", (1, 96, 56, 56), (1, 96, 1, 1)),
        two("Add", (1, 197, 768), (768,)),
        two("Mul", (1, 56, 56, 61), (1, 56, 56, 1)),
        two("Sub", (513, 1), (1, 517)),
        two("Add", (64, 128, 128), (64, 128, 128)),
        two("Div", (33, 35, 37), (33, 35, 37)),
        two("Add", (7, 11), (7, 11)),
        _one("Relu", (1, 64, 112, 112)),
        _one("Sigmoid", (1, 96, 57, 57)),
        _one("Tanh", (128, 768)),
        _one("Erf", (128, 3072)),
        _one("Exp", (333, 777)),
        _one("Sqrt", (333, 777)),
        _one("Log", (333, 777)),
        _one("LeakyRelu", (1, 33, 71, 73), alpha=0.1),
        _one("HardSigmoid", (1, 33, 71, 73)),
        Operator("Clip", {"x": (1, 96, 57, 57)}, {"low": np.array(0, np.float32), "high": np.array(6, np.float32)}),
        Operator("BatchNormalization", {"x": (1, 67, 57, 57)},
                 {n: np.linspace(0.5, 1.5, 67, dtype=np.float32) for n in ("scale", "bias", "mean", "variance")}),
        Operator("Where", {"x": (1, 64, 57, 57), "y": (1, 64, 57, 57)},
                 {"mask": np.random.default_rng(3).random((1, 1, 57, 57)) < 0.5}, order=("mask", "x", "y")),
    ]  # fmt: skip


def _reductions() -> list[Operator]:
    def over(kind: str, shape: Shape, axes: Sequence[int], keep: int = 1) -> Operator:
        if kind == "ReduceSum":
            return _with(kind, shape, list(axes), keepdims=keep)
        return _one(kind, shape, axes=list(axes), keepdims=keep)

    norm = {"scale": (768,), "bias": (768,)}
    return [
        over("ReduceSum", (1000, 1000), [0]),
        over("ReduceSum", (1000, 1000), [1]),
        over("ReduceSum", (1000, 1000), [0, 1]),
        over("ReduceSum", (31, 57, 63), [1]),
        over("ReduceSum", (8, 512, 64), [1]),
        over("ReduceSum", (100000, 3), [0]),
        over("ReduceSum", (3, 100000), [1]),
        over("ReduceSum", (100000, 3), [1]),
        over("ReduceMean", (1, 64, 56, 56), [2, 3]),
        over("ReduceMean", (1, 1280, 7, 7), [2, 3]),
        over("ReduceMean", (1, 56, 56, 64), [1, 2]),
        over("ReduceMean", (128, 768), [1]),
        over("ReduceMax", (64, 1000, 33), [1]),
        over("ReduceMax", (64, 1000, 33), [2]),
        over("ReduceMax", (33, 64, 100), [0]),
        over("ReduceMax", (33, 64, 100), [0, 2]),
        over("ReduceMin", (5, 7, 11, 13), [1, 3]),
        over("ReduceL2", (257, 300), [1]),
        _one("ArgMax", (64, 1000), axis=1),
        _one("ArgMax", (64, 1000), axis=0),
        _one("ArgMax", (1, 21, 65, 65), axis=1),
        _one("Softmax", (12, 128, 128), axis=-1),
        _one("Softmax", (1, 1000), axis=-1),
        _one("Softmax", (64, 5003), axis=-1),
        _one("Softmax", (8732, 81), axis=-1),
        _one("Softmax", (1000, 1000), axis=-1),
        _one("Softmax", (1, 21, 65, 65), axis=1),
        _one("Softmax", (200, 7), axis=-1),
        _one("LogSoftmax", (64, 1000), axis=-1),
        Operator("LayerNormalization", {"x": (1, 128, 768)}, norm, {"axis": -1}),
        Operator("LayerNormalization", {"x": (197, 100)}, {"scale": (100,), "bias": (100,)}, {"axis": -1}),
        Operator("InstanceNormalization", {"x": (1, 32, 61, 61)}, {"scale": (32,), "bias": (32,)}),
        _with("CumSum", (64, 1000), np.asarray(1, np.int64)),
        _with("CumSum", (1000, 64), np.asarray(0, np.int64)),
    ]


def _windows() -> list[Operator]:
    return [
        _one("MaxPool", (1, 64, 112, 112), kernel_shape=[2, 2], strides=[2, 2]),
        _one("MaxPool", (1, 64, 112, 112), kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        _one("MaxPool", (1, 33, 57, 59), kernel_shape=[3, 3], strides=[2, 2]),
        _one("MaxPool", (1, 128, 14, 14), kernel_shape=[5, 5], pads=[2, 2, 2, 2]),
        _one("MaxPool", (1, 24, 5000), kernel_shape=[3], strides=[2]),
        _one("MaxPool", (1, 12, 20, 22, 24), kernel_shape=[2, 2, 2], strides=[2, 2, 2]),
        _one("AveragePool", (1, 64, 112, 112), kernel_shape=[2, 2], strides=[2, 2]),
        _one("AveragePool", (1, 64, 56, 56), kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        _one("AveragePool", (1, 96, 28, 28), kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        _one("AveragePool", (1, 37, 31, 29), kernel_shape=[7, 7]),
        _one("GlobalAveragePool", (1, 1280, 7, 7)),
        _one("GlobalAveragePool", (1, 61, 57, 57)),
        _one("GlobalMaxPool", (1, 61, 57, 57)),
    ]


def _convolutions() -> list[Operator]:
    def case(shape: Shape, weight: Shape, **attributes: Any) -> Operator:
        return _weighted("Conv", shape, weight, **attributes)

    near = [1, 1, 1, 1]
    return [
        case((1, 128, 56, 56), (128, 4, 3, 3), pads=near, group=32),
        case((1, 256, 28, 28), (256, 8, 3, 3), pads=near, group=32),
        case((1, 256, 56, 56), (256, 4, 3, 3), pads=near, group=64),
        case((1, 256, 28, 28), (256, 8, 3, 3), strides=[2, 2], pads=near, group=32),
        case((1, 60, 31, 33), (90, 2, 3, 3), pads=near, group=30),
        case((1, 64, 29, 29), (64, 2, 1, 1), group=32),
        case((1, 48, 30, 30), (96, 1, 3, 3), pads=near, group=48),
        case((1, 80, 1000), (80, 80, 3), pads=[1, 1]),
        case((1, 1, 16000), (64, 1, 80), strides=[16]),
        case((1, 256, 200), (256, 1, 31), pads=[15, 15], group=256),
        case((1, 32, 777), (48, 32, 5), dilations=[4], pads=[8, 8]),
        case((1, 16, 16, 24, 24), (32, 16, 3, 3, 3), pads=[1] * 6),
        case((1, 3, 16, 56, 56), (24, 3, 3, 5, 5), strides=[1, 2, 2], pads=[1, 2, 2, 1, 2, 2]),
        case((1, 64, 28, 28), (64, 64, 3, 3), dilations=[2, 2], pads=[2, 2, 2, 2]),
        case((1, 256, 33, 33), (64, 256, 3, 3), dilations=[12, 12], pads=[12] * 4),
        case((1, 96, 56, 56), (96, 1, 7, 7), pads=[3, 3, 3, 3], group=96),
        case((1, 61, 29, 31), (61, 1, 7, 7), pads=[3, 3, 3, 3], group=61),
        case((1, 32, 20, 100), (32, 32, 1, 31), pads=[0, 15, 0, 15]),
        case((1, 16, 40, 40), (16, 16, 11, 11), pads=[5, 5, 5, 5]),
        case((1, 48, 64, 64), (64, 48, 3, 3), strides=[3, 3]),
        case((4, 64, 28, 28), (64, 64, 3, 3), pads=near),
        case((4, 32, 28, 28), (64, 32, 1, 1)),
        case((4, 96, 14, 14), (96, 1, 3, 3), pads=near, group=96),
        case((4, 3, 64, 64), (24, 3, 5, 5), strides=[2, 2], pads=[2, 2, 2, 2]),
    ]
