"""Single-operator models for the kernel benchmark: the zoo's own shapes, squares, matrix-vector and random ones."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from bench.arithmetic import Contraction, Convolution, Recurrence, collect
from bench.operator_cases import Operator, operator_families

Problem = Contraction | Convolution | Operator
OPSET = 17
SQUARES = (512, 768, 1024, 1536, 2048)
VECTORS = ((1024, 1024), (4096, 1024), (1024, 4096), (4096, 4096))
# Where unusual sizes come from: primes, ones and powers of two, on either side of every vector width.
SIZES = (1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 32, 37, 61, 64, 67, 97, 127, 128, 131, 199, 251, 256, 257, 509, 512, 1021)
# Larger random problems teach nothing that the squares do not, and smaller ones measure the call.
LARGEST_OPERATIONS = 2_000_000_000
SMALLEST_OPERATIONS = 200_000


@dataclass(frozen=True)
class Case:
    """A problem, the group it is reported in, and how often each model of the zoo has it."""

    problem: Problem
    group: str
    origin: str

    @property
    def is_operator(self) -> bool:
        return isinstance(self.problem, Operator)

    def runs_on(self, runtime: str) -> bool:
        """Operators are compared by runtimes that read ONNX files."""
        return not self.is_operator or not runtime.startswith("torch")


def operator_cases() -> list[Case]:
    return [
        Case(problem, f"operators: {family}", "")
        for family, problems in operator_families().items()
        for problem in problems
    ]


def zoo_cases(paths: Mapping[str, Path]) -> list[Case]:
    """Every distinct contraction and convolution in the files, by model name; one shared by models is listed once."""
    origins: dict[Contraction | Convolution, dict[str, int]] = {}
    for name, path in paths.items():
        for problem in collect(path):
            if isinstance(problem, Recurrence):
                continue
            counts = origins.setdefault(problem, {})
            counts[name] = counts.get(name, 0) + 1
    return [
        Case(problem, group_of(problem), ", ".join(f"{name} x{count}" for name, count in counts.items()))
        for problem, counts in origins.items()
    ]


def group_of(problem: Contraction | Convolution) -> str:
    if isinstance(problem, Contraction):
        return "zoo contraction" if problem.is_weight else "zoo product of activations"
    if problem.is_depthwise:
        return "zoo depthwise convolution"
    return "zoo pointwise convolution" if problem.weight[2:] == (1, 1) else "zoo convolution"


def fixed_cases() -> list[Case]:
    squares = [Case(Contraction(1, size, size, size, True), "square", "") for size in SQUARES]
    vectors = [Case(Contraction(1, 1, n, k, True), "matrix-vector", "") for n, k in VECTORS]
    return squares + vectors


def random_cases(count: int, seed: int) -> list[Case]:
    """Half contractions, half convolutions; the same for the same seed, and a longer list begins with a shorter."""
    rng = np.random.default_rng(seed)
    cases: list[Case] = []
    while len(cases) < count:
        problem = _random_contraction(rng) if len(cases) % 2 == 0 else _random_convolution(rng)
        if SMALLEST_OPERATIONS <= problem.operations <= LARGEST_OPERATIONS:
            kind = "contraction" if isinstance(problem, Contraction) else "convolution"
            cases.append(Case(problem, f"random {kind}", f"seed {seed}"))
    return cases


def _random_contraction(rng: np.random.Generator) -> Contraction:
    rows, columns, inner = (int(rng.choice(SIZES)) for _ in range(3))
    form = rng.choice(["plain", "tall", "wide", "deep", "vector", "batched"])
    stretch = int(rng.integers(2, 40))
    if form == "vector":
        return Contraction(1, 1, columns * 4, inner * 4, True)
    if form == "batched":
        return Contraction(int(rng.integers(2, 17)), rows, columns, inner, False)
    rows, columns, inner = (
        size * stretch if form == name else size for name, size in (("tall", rows), ("wide", columns), ("deep", inner))
    )
    return Contraction(1, rows, columns, inner, True)


def _random_convolution(rng: np.random.Generator) -> Convolution:
    kernel = int(rng.choice([1, 1, 3, 3, 5, 7]))
    stride = int(rng.choice([1, 1, 2, 3]))
    dilation = int(rng.choice([1, 1, 1, 2])) if kernel > 1 else 1
    groups = int(rng.choice([1, 1, 1, 2, 4]))
    height, width = (int(rng.integers(dilation * (kernel - 1) + 1, 90)) for _ in range(2))
    inputs, outputs = (int(rng.choice(SIZES[:20])) * groups for _ in range(2))
    if rng.random() < 0.2:
        groups = outputs = inputs
    padding = dilation * (kernel // 2)
    return Convolution(
        (1, inputs, height, width),
        (outputs, inputs // groups, kernel, kernel),
        strides=(stride, stride),
        pads=(padding,) * 4,
        dilations=(dilation, dilation),
        groups=groups,
    )


def write_model(problem: Problem, path: Path) -> None:
    """The problem as an ONNX file of one node, its weights seeded."""
    if isinstance(problem, Operator):
        problem.write(path)
        return
    rng = np.random.default_rng(20)
    if isinstance(problem, Contraction):
        lead = (problem.batch,) if problem.batch > 1 else ()
        shapes = {"left": (*lead, problem.rows, problem.inner), "right": (*lead, problem.inner, problem.columns)}
        constant = "right" if problem.is_weight else None
        node = helper.make_node("MatMul", ["left", "right"], ["output"])
        result = (*lead, problem.rows, problem.columns)
    else:
        shapes = {"image": problem.image, "weight": problem.weight}
        constant = "weight"
        attributes: dict[str, Any] = {
            "kernel_shape": problem.weight[2:],
            "strides": problem.strides,
            "pads": problem.pads,
            "dilations": problem.dilations,
            "group": problem.groups,
        }
        name = "ConvTranspose" if problem.is_transposed else "Conv"
        node = helper.make_node(name, ["image", "weight"], ["output"], **attributes)
        result = problem.output
    inputs = [_value(name, shape) for name, shape in shapes.items() if name != constant]
    weights = [
        numpy_helper.from_array(rng.standard_normal(shape, dtype=np.float32), name)
        for name, shape in shapes.items()
        if name == constant
    ]
    graph = helper.make_graph([node], "kernel", inputs, [_value("output", result)], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8), str(path))


def _value(name: str, shape: Iterable[int]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape))


def load_torch(path: str) -> tuple[Any, dict[str, np.ndarray]]:
    """The one node of such a file as a torch module, for runtimes that cannot read ONNX."""
    import torch  # here, because only torch's own worker should load it

    graph = onnx.load(path).graph
    (node,) = graph.node
    weights = {tensor.name: torch.from_numpy(numpy_helper.to_array(tensor).copy()) for tensor in graph.initializer}
    attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    top, left, bottom, right = attributes.get("pads", (0, 0, 0, 0))
    if (top, left) != (bottom, right):
        raise ValueError("torch pads both sides of an axis alike")
    functional = torch.nn.functional

    class Kernel(torch.nn.Module):
        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            values = dict(zip((value.name for value in graph.input), inputs, strict=True)) | weights
            first, second = (values[name] for name in node.input)
            if node.op_type == "MatMul":
                return torch.matmul(first, second)
            strides, groups, dilations = (attributes[name] for name in ("strides", "group", "dilations"))
            if node.op_type == "Conv":
                return functional.conv2d(first, second, None, strides, (top, left), dilations, groups)
            return functional.conv_transpose2d(first, second, None, strides, (top, left), 0, groups, dilations)

    rng = np.random.default_rng(0)
    inputs = {
        value.name: rng.standard_normal([d.dim_value for d in value.type.tensor_type.shape.dim]).astype(np.float32)
        for value in graph.input
    }
    return Kernel().eval(), inputs
