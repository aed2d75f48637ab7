"""Single convolution layers of well-known networks on this machine's GPU, beside cuDNN by PyTorch.

Channels are last in what both are given and give; PyTorch also runs with channels first, cuDNN choosing by measuring,
and the faster counts. Layers go through sets of arrays that do not fit the L2 cache together. Ours are compiled
beforehand, several at a time. Errors are relative, against PyTorch in float64.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from math import prod
from multiprocessing import get_context
from statistics import geometric_mean
from typing import Any

import numpy as np

import tilewright
from tilewright.errors import TilewrightError
from tilewright.options import Options
from tilewright.target import machine

Timed = Callable[[Callable[[int], Any], int], float]

_BEYOND_L2 = 256 << 20
_MOST_SETS = 32
_CALLS = 10
_COMPILING = 12  # processes


@dataclass(frozen=True)
class Layer:
    """A convolution: channels in and out, the image, the window and how it moves."""

    family: str
    channels: tuple[int, int]
    size: tuple[int, ...]
    window: int
    stride: int = 1
    padding: int | None = None  # None: as much as keeps the size at stride 1
    dilation: int = 1
    groups: int = 1
    transposed: bool = False
    name: str = field(init=False)

    def __post_init__(self) -> None:
        notes = [f"{word} {n}" for word, n, usual in (("stride", self.stride, 1), ("dilation", self.dilation, 1),
                                                      ("groups", self.groups, 1)) if n != usual]  # fmt: skip
        turned = ["transposed"] if self.transposed else []
        image, window = "x".join(map(str, self.size)), "x".join([str(self.window)] * len(self.size))
        text = f"{self.channels[0]} to {self.channels[1]} at {image} by {window}"
        object.__setattr__(self, "name", ", ".join((text, *notes, *turned)))

    @property
    def pad(self) -> int:
        return self.dilation * (self.window - 1) // 2 if self.padding is None else self.padding

    @property
    def weights(self) -> tuple[int, ...]:
        own, other = self.channels if self.transposed else self.channels[::-1]
        return own, other // self.groups, *[self.window] * len(self.size)

    @property
    def result(self) -> tuple[int, ...]:
        reach = self.dilation * (self.window - 1) + 1
        if self.transposed:
            return tuple((n - 1) * self.stride - 2 * self.pad + reach for n in self.size)
        return tuple((n + 2 * self.pad - reach) // self.stride + 1 for n in self.size)


def _layers(family: str, *rows: tuple[Any, ...], **same: Any) -> tuple[Layer, ...]:
    """Rows of channels in, channels out, the image's side, the window, and the stride where it is not 1."""
    found = []
    for c, o, side, window, *stride in rows:
        size = side if isinstance(side, tuple) else (side, side)
        found.append(Layer(family, (c, o), size, window, *stride, **same))
    return tuple(found)


LAYERS: tuple[Layer, ...] = (
    *_layers("first", (3, 64, 224, 7, 2), (3, 32, 299, 3, 2), (3, 64, 224, 3), (3, 96, 224, 4, 4), (4, 320, 64, 3)),
    *_layers("resnet", (64, 64, 56, 3), (128, 128, 28, 3), (256, 256, 14, 3), (512, 512, 7, 3), (128, 128, 56, 3, 2),
             (256, 256, 28, 3, 2), (512, 512, 14, 3, 2), (256, 64, 56, 1), (64, 256, 56, 1), (512, 1024, 28, 1, 2),
             (1024, 256, 14, 1), (512, 2048, 7, 1)),
    *_layers("vgg", (64, 64, 224, 3), (128, 256, 56, 3), (256, 512, 28, 3), (512, 512, 28, 3),
             (512, 512, 14, 3)),
    *_layers("inception", (48, 64, 35, 5), (64, 96, 35, 3), (288, 384, 35, 3, 2), (80, 192, 73, 3), (448, 384, 8, 3)),
    *_layers("unet", (320, 320, 64, 3), (640, 640, 32, 3), (1280, 1280, 16, 3), (960, 320, 64, 3), (320, 320, 64, 3, 2),
             (32, 32, 256, 3)),
    *_layers("efficientnet", (32, 16, 112, 1), (96, 24, 56, 1), (240, 40, 28, 1), (320, 1280, 7, 1)),
    *_layers("depthwise", (96, 96, 56, 7), groups=96),
    *_layers("depthwise", (144, 144, 56, 3), (144, 144, 56, 3, 2), groups=144),
    *_layers("depthwise", (672, 672, 14, 5), groups=672),
    *_layers("grouped", (256, 256, 56, 3), (512, 512, 28, 3), (1024, 1024, 14, 3), (2048, 2048, 7, 3), groups=64),
    *_layers("grouped", (64, 128, 28, 3), groups=4),
    *_layers("dilated", (256, 256, 65, 3), padding=12, dilation=12),
    *_layers("dilated", (64, 64, 40, 3), dilation=2),
    *_layers("dilated", (512, 512, 33, 3), dilation=2),
    *_layers("transposed", (64, 48, 20, 4, 2), (256, 128, 32, 4, 2), padding=1, transposed=True),
    *_layers("transposed", (512, 256, 16, 2, 2), (48, 32, 40, 3, 3), padding=0, transposed=True),
    *_layers("line", (80, 384, (3000,), 3), (384, 384, (3000,), 3, 2)),
    *_layers("volume", (32, 64, (16, 56, 56), 3, 2), (64, 64, (8, 28, 28), 3)),
    *_layers("odd", (13, 37, (37, 41), 3), (37, 29, (37, 41), 5), (100, 60, (19, 23), 3, 3)),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    name: str
    family: str
    batch: int
    microseconds: float = 0.0
    torch: float = 0.0
    predicted: float = 0.0
    kernels: int = 0
    error: float = 0.0
    torch_error: float = 0.0
    refused: str = ""


def measured(timed: Timed, precision: str, batch: int, only: Sequence[str] = ()) -> list[Row]:
    """All layers, or those whose family or name has one of some texts in it."""
    layers = [x for x in LAYERS if not only or any(text in f"{x.family} {x.name}" for text in only)]
    machine("cuda", cache_dir=Options().cache_dir)  # its rates are measured while nobody else is at work
    with ProcessPoolExecutor(min(_COMPILING, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        list(pool.map(prepare, layers, [precision] * len(layers), [batch] * len(layers)))
    rows: list[Row] = []
    print(f"{'layer':52} {'us':>8} {'cuDNN':>8} {'ratio':>6} {'predicted':>9}  error (cuDNN)")
    for layer in layers:
        row = layer_row(layer, precision, batch, timed)
        rows.append(row)
        print(f"{layer.family + ' ' + row.name:52.52} {row.refused}" if row.refused else
              f"{layer.family + ' ' + row.name:52.52} {row.microseconds:8.2f} {row.torch:8.2f} "
              f"{row.torch / row.microseconds:6.2f} {row.predicted:9.2f}  {row.error:.1e} ({row.torch_error:.1e})"
              f"{'' if row.kernels == 1 else f'  {row.kernels} kernels'}", flush=True)  # fmt: skip
    show(rows)
    return rows


def show(rows: Sequence[Row]) -> None:
    for family in dict.fromkeys(row.family for row in rows):
        print(told(family, [row for row in rows if row.family == family]))
    print(told("all", rows))


def told(name: str, rows: Sequence[Row]) -> str:
    ratios = [row.torch / row.microseconds for row in rows if row.microseconds]
    if not ratios:
        return f"{name}: none ran"
    mean = f"{geometric_mean(ratios):.2f} of cuDNN's speed, geometric mean of {len(ratios)}"
    return f"{name}: {mean}; at least {min(ratios):.2f}"


def prepare(layer: Layer, precision: str, batch: int) -> None:
    """Its machine code is in the cache then; what is refused is refused again where it is told."""
    try:
        compiled(layer, precision, batch)
    except TilewrightError:
        return


def compiled(layer: Layer, precision: str, batch: int) -> tilewright.Model:
    own = precision if precision in ("tf32",) else None  # 16 bits are what the model says already
    return tilewright.compile(layer_model(layer, precision, batch), target="cuda", precision=own)


def layer_model(layer: Layer, precision: str, batch: int) -> Any:
    """Channels last on both sides; weights and biases as constants."""
    from onnx import TensorProto, helper, numpy_helper

    kinds = {"float16": (TensorProto.FLOAT16, np.float16)}
    kind, dtype = kinds.get(precision, (TensorProto.FLOAT, np.float32))
    dimensions = len(layer.size)
    weight, bias = parameters(layer)
    attributes = {"strides": [layer.stride] * dimensions, "pads": [layer.pad] * 2 * dimensions,
                  "dilations": [layer.dilation] * dimensions, "group": layer.groups}  # fmt: skip
    first = [0, dimensions + 1, *range(1, dimensions + 1)]
    last = [0, *range(2, dimensions + 2), 1]
    nodes = [
        helper.make_node("Transpose", ["x"], ["images"], perm=first),
        helper.make_node("ConvTranspose" if layer.transposed else "Conv", ["images", "w", "b"], ["y"], **attributes),
        helper.make_node("Transpose", ["y"], ["o"], perm=last),
    ]
    shapes = {"x": [batch, *layer.size, layer.channels[0]], "o": [batch, *layer.result, layer.channels[1]]}
    ports = {name: helper.make_tensor_value_info(name, kind, shape) for name, shape in shapes.items()}
    constants = [numpy_helper.from_array(a.astype(dtype), name) for name, a in (("w", weight), ("b", bias))]
    graph = helper.make_graph(nodes, "layer", [ports["x"]], [ports["o"]], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def parameters(layer: Layer) -> tuple[np.ndarray, np.ndarray]:
    """Seeded, and so large that results are about as large as what they are made of."""
    rng = np.random.default_rng(len(layer.name))
    summed = layer.channels[0] // layer.groups * layer.window ** len(layer.size)
    weight = rng.standard_normal(layer.weights) / np.sqrt(summed)
    return weight.astype(np.float32), rng.standard_normal(layer.channels[1]).astype(np.float32)


def layer_row(layer: Layer, precision: str, batch: int, timed: Timed) -> Row:
    import torch

    kind = torch.float16 if precision == "float16" else torch.float32
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    moved = (prod(layer.size) * layer.channels[0] + prod(layer.result) * layer.channels[1]) * batch * kind.itemsize
    sets = max(2, min(_MOST_SETS, _BEYOND_L2 // moved + 1))
    given = [torch.randn(batch, *layer.size, layer.channels[0], device="cuda").to(kind) for _ in range(sets)]
    results = [torch.full((batch, *layer.result, layer.channels[1]), float("nan"), device="cuda", dtype=kind)
               for _ in range(sets)]  # fmt: skip
    try:
        model = compiled(layer, precision, batch)
        model.run_into([given[0]], [results[0]])
        torch.cuda.synchronize()
        ours = timed(lambda i: model.run_into([given[i % sets]], [results[i % sets]]), max(sets, _CALLS))
    except TilewrightError as failed:
        return Row(layer.name, layer.family, batch, refused=str(failed).splitlines()[0])
    weight, bias = (torch.from_numpy(a).cuda().to(kind) for a in parameters(layer))
    wanted = _by_torch(layer, given[0].double(), weight.double(), bias.double())
    theirs = [
        timed(lambda i, x=x, w=w: _layer(layer, x[i % sets], w, bias), max(sets, _CALLS))  # type: ignore[misc]
        for x, w in _ways(layer, given, weight)
    ]
    torch_error = _relative(_by_torch(layer, given[0], weight, bias), wanted)
    predicted = sum(kernel.estimate.seconds for kernel in model.artifact.plan.kernels) * 1e6
    return Row(layer.name, layer.family, batch, ours, min(theirs), predicted, len(model.artifact.plan.kernels),
               _relative(results[0], wanted), torch_error)  # fmt: skip


def _ways(layer: Layer, given: Sequence[Any], weight: Any) -> list[tuple[list[Any], Any]]:
    """Images and weights with channels last in memory, and with channels first."""
    import torch

    dimensions = len(layer.size)
    order = (0, dimensions + 1, *range(1, dimensions + 1))
    seen = [x.permute(order) for x in given]
    first = [x.contiguous() for x in seen], weight
    formats = {2: torch.channels_last, 3: torch.channels_last_3d}
    if dimensions not in formats:
        return [first]
    return [(seen, weight.contiguous(memory_format=formats[dimensions])), first]


def _layer(layer: Layer, x: Any, weight: Any, bias: Any) -> Any:
    from torch.nn import functional

    name = f"conv{'_transpose' if layer.transposed else ''}{len(layer.size)}d"
    ways = {"stride": layer.stride, "padding": layer.pad, "dilation": layer.dilation, "groups": layer.groups}
    return getattr(functional, name)(x, weight, bias, **ways)


def _by_torch(layer: Layer, x: Any, weight: Any, bias: Any) -> Any:
    dimensions = len(layer.size)
    found = _layer(layer, x.permute(0, dimensions + 1, *range(1, dimensions + 1)), weight, bias)
    return found.permute(0, *range(2, dimensions + 2), 1)


def _relative(found: Any, wanted: Any) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())
