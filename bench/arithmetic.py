"""Contractions and convolutions found in an ONNX file, with their shapes: what benchmarks count as arithmetic."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import helper

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Contraction:
    """A product of `batch` matrices, rows x inner by inner x columns; `is_weight` when the right one is constant."""

    batch: int
    rows: int
    columns: int
    inner: int
    is_weight: bool

    @property
    def operations(self) -> int:
        return 2 * self.batch * self.rows * self.columns * self.inner

    @property
    def data_elements(self) -> int:
        """Elements that must be read or written at least once."""
        matrix = self.rows * self.inner + self.inner * self.columns + self.rows * self.columns
        return self.batch * matrix

    def describe(self) -> str:
        batch = f"{self.batch} of " if self.batch > 1 else ""
        kind = "" if self.is_weight else ", two activations"
        return f"{batch}{self.rows}x{self.inner} by {self.inner}x{self.columns}{kind}"


@dataclass(frozen=True)
class Convolution:
    """A two-dimensional convolution with constant weights; `image` and `weight` are shapes as ONNX stores them."""

    image: Shape
    weight: Shape
    strides: Shape = (1, 1)
    pads: Shape = (0, 0, 0, 0)
    dilations: Shape = (1, 1)
    groups: int = 1
    is_transposed: bool = False

    @property
    def channels(self) -> int:
        """Output channels."""
        return self.weight[1] * self.groups if self.is_transposed else self.weight[0]

    @property
    def output(self) -> Shape:
        sizes = [self._output_size(axis) for axis in (0, 1)]
        return (self.image[0], self.channels, *sizes)

    def _output_size(self, axis: int) -> int:
        size, stride = self.image[2 + axis], self.strides[axis]
        reach = self.dilations[axis] * (self.weight[2 + axis] - 1) + 1
        padding = self.pads[axis] + self.pads[2 + axis]
        return (size - 1) * stride + reach - padding if self.is_transposed else (size + padding - reach) // stride + 1

    @property
    def operations(self) -> int:
        """Direct arithmetic, padding counted as if it were data."""
        if self.is_transposed:
            return 2 * math.prod(self.image) * self.weight[1] * math.prod(self.weight[2:])
        return 2 * math.prod(self.output) * math.prod(self.weight[1:])

    @property
    def data_elements(self) -> int:
        return math.prod(self.image) + math.prod(self.weight) + math.prod(self.output)

    @property
    def is_depthwise(self) -> bool:
        return self.groups > 1 and self.weight[1] == 1 and not self.is_transposed

    def describe(self) -> str:
        kind = "transposed " if self.is_transposed else "depthwise " if self.is_depthwise else ""
        size, kernel = ("x".join(map(str, shape)) for shape in (self.image[2:], self.weight[2:]))
        stride = f" /{self.strides[0]}" if self.strides != (1, 1) else ""
        dilation = f" dilated {self.dilations[0]}" if self.dilations != (1, 1) else ""
        groups = f" in {self.groups} groups" if self.groups > 1 and not self.is_depthwise else ""
        return f"{kind}{kernel}{stride}{dilation}{groups}, {self.image[1]} to {self.channels} on {size}"


@dataclass(frozen=True)
class Recurrence:
    """An LSTM, GRU or RNN layer: `weights` elements are multiplied once a step and batch entry."""

    steps: int
    batch: int
    weights: int

    @property
    def operations(self) -> int:
        return 2 * self.steps * self.batch * self.weights


Arithmetic = Contraction | Convolution | Recurrence


def collect(path: Path | str) -> list[Arithmetic]:
    """Every contraction, convolution and recurrence of the model, in order, repeated ones repeated."""
    # Reshape targets are constants computed by other nodes: without data propagation shapes behind them stay unknown.
    model = onnx.shape_inference.infer_shapes(onnx.load(str(path)), data_prop=True)
    graph = model.graph
    constants = {tensor.name for tensor in graph.initializer}
    shapes: dict[str, Shape] = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        shapes.setdefault(value.name, _shape_of(value))
    for node in graph.node:
        if node.op_type == "Constant" or (node.op_type in ("Transpose", "Identity") and node.input[0] in constants):
            constants.add(node.output[0])
    return list(_walk(graph, shapes, constants))


def total_operations(path: Path | str) -> int:
    return sum(each.operations for each in collect(path))


def _shape_of(value: onnx.ValueInfoProto) -> Shape:
    return tuple(dimension.dim_value for dimension in value.type.tensor_type.shape.dim)


def _walk(graph: onnx.GraphProto, shapes: Mapping[str, Shape], constants: set[str]) -> Iterator[Arithmetic]:
    for node in graph.node:
        if node.op_type not in ("MatMul", "Gemm", "Conv", "ConvTranspose", "LSTM", "GRU", "RNN"):
            continue
        operands = [shapes.get(name, ()) for name in node.input if name]
        for name, shape in zip(node.input, operands, strict=False):
            if not shape or 0 in shape:
                raise ValueError(f"{node.op_type} {node.name!r}: the shape of {name!r} is not known")
        attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        if node.op_type == "MatMul":
            yield _matmul(operands[0], operands[1], node.input[1] in constants)
        elif node.op_type == "Gemm":
            rows, inner = operands[0][::-1] if attributes.get("transA") else operands[0]
            columns = operands[1][0 if attributes.get("transB") else 1]
            yield Contraction(1, rows, columns, inner, node.input[1] in constants)
        elif node.op_type in ("Conv", "ConvTranspose"):
            yield _convolution(node, operands[0], operands[1], attributes)
        else:
            (steps, batch, _), weight, recurrent = operands[:3]
            yield Recurrence(steps, batch, math.prod(weight) + math.prod(recurrent))


def _matmul(left: Shape, right: Shape, is_weight: bool) -> Contraction:
    left = (1, *left) if len(left) == 1 else left
    right = (*right, 1) if len(right) == 1 else right
    if len(right) == 2:
        # One right matrix for all: the batch is nothing but more rows.
        return Contraction(1, math.prod(left[:-1]), right[1], left[-1], is_weight)
    batch = max(math.prod(left[:-2]), math.prod(right[:-2]))
    return Contraction(batch, left[-2], right[-1], left[-1], is_weight)


def _convolution(node: onnx.NodeProto, image: Shape, weight: Shape, attributes: Mapping[str, object]) -> Convolution:
    if len(image) != 4:
        raise ValueError(f"{node.op_type} {node.name!r}: only two-dimensional convolutions are counted")
    if attributes.get("auto_pad", b"NOTSET") != b"NOTSET":
        raise ValueError(f"{node.op_type} {node.name!r}: auto_pad is not counted; give pads")

    def numbers(name: str, default: Shape) -> Shape:
        given = attributes.get(name)
        return tuple(given) if isinstance(given, list) else default

    groups = attributes.get("group", 1)
    if not isinstance(groups, int):
        raise ValueError(f"{node.op_type} {node.name!r}: group must be an integer")
    return Convolution(
        image,
        weight,
        strides=numbers("strides", (1, 1)),
        pads=numbers("pads", (0, 0, 0, 0)),
        dilations=numbers("dilations", (1, 1)),
        groups=groups,
        is_transposed=node.op_type == "ConvTranspose",
    )
