"""MobileNet-V2 written with the `onnx` helpers and NumPy alone, so that a demonstration needs nothing else.

Weights are random but healthy: He initialisation, and batch norms whose statistics are those of a batch of
random images that is carried along at a low resolution while the graph is written.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

RESIDUAL_SCALE = 0.2
EPSILON = 1e-5
OPSET = 17
IR_VERSION = 8  # the first that goes with opset 17, read by every runtime that reads it

# Channel statistics of noise hardly depend on resolution; 96 still leaves 3x3 positions in the last stage.
CALIBRATION_RESOLUTION = 96
CALIBRATION_BATCH = 8

STEM_CHANNELS = 32
HEAD_CHANNELS = 1280


@dataclass(frozen=True)
class Stage:
    expansion: int
    channels: int
    blocks: int
    stride: int


STAGES = (
    Stage(1, 16, 1, 1),
    Stage(6, 24, 2, 2),
    Stage(6, 32, 3, 2),
    Stage(6, 64, 4, 2),
    Stage(6, 96, 3, 1),
    Stage(6, 160, 3, 2),
    Stage(6, 320, 1, 1),
)


@dataclass(frozen=True)
class Tensor:
    """A tensor of the graph by name, with its calibration values as (channel, image, row, column)."""

    name: str
    sample: np.ndarray

    @property
    def channels(self) -> int:
        return int(self.sample.shape[0])


@dataclass
class GraphWriter:
    rng: np.random.Generator
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)

    def constant(self, name: str, value: np.ndarray) -> str:
        self.initializers.append(numpy_helper.from_array(value.astype(np.float32), name))
        return name

    def node(self, operator: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(operator, inputs, [output], name=output, **attributes))
        return output

    def normal(self, shape: tuple[int, ...], *, mean: float = 0.0, std: float = 1.0) -> np.ndarray:
        return (mean + std * self.rng.standard_normal(shape)).astype(np.float32)

    def convolution(
        self, name: str, x: Tensor, outputs: int, *, kernel: int, stride: int = 1, is_depthwise: bool = False
    ) -> Tensor:
        fan_in = (1 if is_depthwise else x.channels) * kernel * kernel
        shape = (outputs, fan_in // (kernel * kernel), kernel, kernel)
        weight = self.normal(shape, std=(2.0 / fan_in) ** 0.5)
        output = self.node(
            "Conv",
            [x.name, self.constant(f"{name}.weight", weight)],
            name,
            kernel_shape=[kernel, kernel],
            strides=[stride, stride],
            pads=[kernel // 2] * 4,
            group=x.channels if is_depthwise else 1,
        )
        return Tensor(output, convolve(x.sample, weight, stride))

    def batch_norm(self, name: str, x: Tensor, *, scale: float | None = None) -> Tensor:
        mean = x.sample.mean(axis=(1, 2, 3))
        variance = x.sample.var(axis=(1, 2, 3))
        # Where so few values are alike, a variance near zero would blow up every other image.
        variance = np.maximum(variance, 0.05 * variance.mean())
        gamma = self.normal((x.channels,), mean=1.0, std=0.1)
        if scale is not None:
            gamma = np.full(x.channels, scale, np.float32)
        beta = self.normal((x.channels,), std=0.1)
        constants = {"scale": gamma, "bias": beta, "mean": mean, "variance": variance}
        inputs = [x.name, *(self.constant(f"{name}.{key}", value) for key, value in constants.items())]
        factor = gamma / np.sqrt(variance + EPSILON)
        sample = x.sample * _per_channel(factor) + _per_channel(beta - mean * factor)
        return Tensor(self.node("BatchNormalization", inputs, name, epsilon=EPSILON), sample)

    def relu6(self, name: str, x: Tensor) -> Tensor:
        return Tensor(self.node("Clip", [x.name, "zero", "six"], name), np.clip(x.sample, 0.0, 6.0))

    def convolution_norm_relu6(
        self, name: str, x: Tensor, outputs: int, *, kernel: int, stride: int = 1, is_depthwise: bool = False
    ) -> Tensor:
        x = self.convolution(f"{name}.conv", x, outputs, kernel=kernel, stride=stride, is_depthwise=is_depthwise)
        return self.relu6(f"{name}.relu6", self.batch_norm(f"{name}.norm", x))

    def inverted_residual(self, name: str, x: Tensor, outputs: int, stride: int, expansion: int) -> Tensor:
        is_residual = stride == 1 and x.channels == outputs
        hidden = x
        if expansion != 1:
            hidden = self.convolution_norm_relu6(f"{name}.expand", x, x.channels * expansion, kernel=1)
        hidden = self.convolution_norm_relu6(
            f"{name}.depthwise", hidden, hidden.channels, kernel=3, stride=stride, is_depthwise=True
        )
        branch = self.convolution(f"{name}.project.conv", hidden, outputs, kernel=1)
        scale = RESIDUAL_SCALE if is_residual else None
        branch = self.batch_norm(f"{name}.project.norm", branch, scale=scale)
        if not is_residual:
            return branch
        return Tensor(self.node("Add", [x.name, branch.name], f"{name}.add"), x.sample + branch.sample)


def build(
    path: Path | str | None = None,
    *,
    size: int = 224,
    width: float = 1.0,
    classes: int = 1000,
    seed: int = 0,
) -> onnx.ModelProto:
    """The network for one image of `size` x `size`, also written to `path` where one is given."""
    if size < 32:
        raise ValueError(f"the network halves its image five times: size must be at least 32, not {size}")
    if width <= 0 or classes < 1:
        raise ValueError("width and classes must be positive")
    writer = GraphWriter(np.random.default_rng(seed))
    writer.constant("zero", np.zeros(()))
    writer.constant("six", np.full((), 6.0))

    resolution = min(size, CALIBRATION_RESOLUTION)
    x = Tensor("image", writer.normal((3, CALIBRATION_BATCH, resolution, resolution)))
    x = writer.convolution_norm_relu6("stem", x, round_channels(STEM_CHANNELS * width), kernel=3, stride=2)
    block = 0
    for stage in STAGES:
        for index in range(stage.blocks):
            stride = stage.stride if index == 0 else 1
            outputs = round_channels(stage.channels * width)
            x = writer.inverted_residual(f"block{block}", x, outputs, stride, stage.expansion)
            block += 1
    head = max(HEAD_CHANNELS, round_channels(HEAD_CHANNELS * width))
    x = writer.convolution_norm_relu6("head", x, head, kernel=1)
    pooled = writer.node("GlobalAveragePool", [x.name], "pool")
    flat = writer.node("Flatten", [pooled], "features", axis=1)
    weight = writer.constant("classifier.weight", writer.normal((classes, head), std=(2.0 / head) ** 0.5))
    bias = writer.constant("classifier.bias", writer.normal((classes,), std=0.1))
    writer.node("Gemm", [flat, weight, bias], "logits", transB=1)

    graph = helper.make_graph(
        writer.nodes,
        "mobilenet_v2",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 3, size, size])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, classes])],
        writer.initializers,
    )
    opsets = [helper.make_opsetid("", OPSET)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="tilewright")
    if path is not None:
        onnx.save(model, str(path))
    return model


def round_channels(channels: float) -> int:
    """The nearest multiple of 8 that loses no more than a tenth, as the MobileNet papers scale widths."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


def convolve(x: np.ndarray, weight: np.ndarray, stride: int) -> np.ndarray:
    """Convolve (channel, image, row, column), half a kernel padded; depthwise if a weight has one input."""
    outputs, fan_in, kernel, _ = weight.shape
    channels, images, height, width = x.shape
    pad = kernel // 2
    padded = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    rows, columns = (height - 1) // stride + 1, (width - 1) // stride + 1
    is_depthwise = fan_in == 1 and channels == outputs
    result = np.zeros((outputs, images, rows, columns), np.float32)
    for row in range(kernel):
        for column in range(kernel):
            window = padded[:, :, row::stride, column::stride][:, :, :rows, :columns]
            tap = weight[:, :, row, column]
            if is_depthwise:
                result += _per_channel(tap[:, 0]) * window
            else:
                result += (tap @ window.reshape(channels, -1)).reshape(result.shape)
    return result


def _per_channel(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32)[:, None, None, None]
