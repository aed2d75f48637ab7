"""Quantised models and products with weights of few bits on this machine's GPU, beside our own float16; products of
8-bit floats beside PyTorch's.

A model of the zoo is quantised here: QuantizeLinear and DequantizeLinear around operands that meet weights (and
around what is added and pooled in networks of convolutions), weights in int8 with a scale a channel, activations in
uint8 by the ranges that the example gives them in float32. Products have weights that do not fit the L2 cache together.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import tilewright
from tilewright.errors import TilewrightError

MODELS = (("resnet50", 1), ("resnet50", 256), ("bert_384", 1))
# rows, summed, columns of products whose weights have 4 and 8 bits, in blocks of so many
PRODUCTS = tuple((rows, 4096, 11008) for rows in (1, 4, 16, 32, 64))
BLOCK = 32
FLOAT8 = ((4096, 4096, 4096), (4096, 128, 4096), (4096, 64, 4096))  # of 8-bit floats, rows and columns along the sum
BEYOND_L2 = 128 << 20  # bytes of the weights of several products, one after the other
_CONTRACTIONS = ("Conv", "Gemm", "MatMul")
_BESIDE_CONVOLUTIONS = ("Add", "MaxPool")

Timed = Callable[[Callable[[int], Any], int], float]


@dataclass(frozen=True)
class Row:
    name: str
    microseconds: float = 0.0
    float16: float = 0.0  # or what a peer takes
    error: float = 0.0  # against float16, or float64, relative
    predicted: float = 0.0
    kernels: int = 0
    refused: str = ""
    peer: str = "float16"
    wanted: str = "it"


def measured(timed: Timed, only: Sequence[str] = ()) -> list[Row]:
    rows = []
    names = [(f"{name} batch {batch}", lambda n=name, b=batch: model_row(n, b, timed)) for name, batch in MODELS]
    names += [(f"{bits} bits, {m} x {k} x {n}", lambda s=(m, k, n), w=bits: product_row(*s, w, timed))
              for m, k, n in PRODUCTS for bits in (4, 8)]  # fmt: skip
    names += [(f"float8, {m} x {k} x {n}", lambda s=(m, k, n): float8_row(*s, timed)) for m, k, n in FLOAT8]
    for name, row in names:
        if only and not any(text in name for text in only):
            continue
        try:
            found = row()
        except TilewrightError as failed:
            found = Row(name, refused=str(failed).splitlines()[0])
        rows.append(found)
        show(found)
    return rows


def show(row: Row) -> None:
    if row.refused:
        print(f"{row.name:28} {row.refused}", flush=True)
        return
    gain = row.float16 / row.microseconds
    print(f"{row.name:28} {row.microseconds:9.1f} us, {row.peer} {row.float16:9.1f}, {gain:5.2f} times as fast, "
          f"{row.error:.1e} from {row.wanted}, "
          f"predicted {row.predicted:.1f}, {row.kernels} kernels", flush=True)  # fmt: skip


# ---- models


def model_row(name: str, batch: int, timed: Timed) -> Row:
    import onnx
    import torch

    from bench import zoo

    module, inputs = zoo.build(name, "full")
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "model.onnx"
        zoo.export_module(module, inputs, path)
        plain = onnx.load(str(path))
    ranges = ranges_of(plain, inputs)
    if batch > 1:
        plain, inputs = at_batch(plain, batch), {k: np.repeat(a, batch, axis=0) for k, a in inputs.items()}
    models = [tilewright.compile(quantised(plain, ranges), target="cuda", precision="float16"),
              tilewright.compile(plain, target="cuda", precision="float16")]  # fmt: skip
    times, results = [], []
    for model in models:
        given = [torch.from_numpy(inputs[port.name]).cuda() for port in model.inputs]
        outputs = [torch.empty(p.shape, dtype=getattr(torch, p.dtype.name), device="cuda") for p in model.outputs]
        model.run_into(given, outputs)
        torch.cuda.synchronize()
        results.append([o.clone() for o in outputs])
        times.append(timed(lambda _, m=model, g=given, o=outputs: m.run_into(g, o), 10 if batch == 1 else 3))  # type: ignore[misc]
    error = max(relative(a, b) for a, b in zip(*results, strict=True))
    return Row(f"{name} batch {batch}", times[0], times[1], error, predicted(models[0]), kernels(models[0]))


def at_batch(model: Any, batch: int) -> Any:
    """The same graph for another number of examples; what it computes says no batch of its own."""
    import onnx

    made = onnx.ModelProto()
    made.CopyFrom(model)
    for port in (*made.graph.input, *made.graph.output):
        port.type.tensor_type.shape.dim[0].dim_value = batch
    del made.graph.value_info[:]
    return made


def quantised_operands(graph: Any) -> list[str]:
    """Tensors that are computed, or given, and multiplied with weights; in networks of convolutions what is added and
    pooled too."""
    constants = {w.name for w in graph.initializer} | {n.output[0] for n in graph.node if n.op_type == "Constant"}
    taken = _taken(graph)
    found: dict[str, None] = {}
    for node in graph.node:
        if node.op_type in taken and (node.op_type not in _CONTRACTIONS or constants.intersection(node.input[:2])):
            found.update((name, None) for name in node.input[:2] if name not in constants)
    return list(found)


def _taken(graph: Any) -> tuple[str, ...]:
    has_windows = any(n.op_type == "Conv" for n in graph.node)
    return (*_CONTRACTIONS, *_BESIDE_CONVOLUTIONS) if has_windows else _CONTRACTIONS


def ranges_of(model: Any, inputs: Mapping[str, np.ndarray]) -> dict[str, tuple[float, float]]:
    """The least and the largest element of everything that is to be quantised, in float32."""
    import onnx

    made = onnx.ModelProto()
    made.CopyFrom(model)
    names = quantised_operands(made.graph)
    found = {n: (float(a.min()), float(a.max())) for n, a in inputs.items() if n in names}
    del made.graph.output[:]
    rest = [n for n in names if n not in found]
    made.graph.output.extend(onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, None) for n in rest)
    results = tilewright.compile(made, target="cuda").run(dict(inputs))
    return found | {n: (float(results[n].min()), float(results[n].max())) for n in rest}


def quantised(model: Any, ranges: Mapping[str, tuple[float, float]]) -> Any:
    """The model with such operands in 8 bits."""
    import onnx
    from onnx import helper, numpy_helper

    made = onnx.ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    weights = {w.name: numpy_helper.to_array(w) for w in graph.initializer}
    operands, taken = set(quantised_operands(graph)), _taken(graph)
    nodes: list[Any] = []
    known: dict[str, np.ndarray] = {}
    ready: dict[str, str] = {}

    def keep(name: str, value: Any) -> str:
        known[name] = np.asarray(value)
        return name

    def activation(name: str) -> str:
        low, high = min(ranges[name][0], 0.0), max(ranges[name][1], 0.0)
        step = np.float32(max(high - low, 1e-6) / 255)
        given = [keep(f"{name}_s", step), keep(f"{name}_z", np.uint8(np.clip(np.round(-low / step), 0, 255)))]
        nodes.append(helper.make_node("QuantizeLinear", [name, *given], [f"{name}_q"]))
        nodes.append(helper.make_node("DequantizeLinear", [f"{name}_q", *given], [f"{name}_d"]))
        return f"{name}_d"

    def weight(name: str, axis: int) -> str:
        array = weights[name]
        across = tuple(a for a in range(array.ndim) if a != axis)
        step = (np.maximum(np.abs(array).max(axis=across, keepdims=True), 1e-8) / 127).astype(np.float32)
        codes = keep(f"{name}_q", np.clip(np.round(array / step), -127, 127).astype(np.int8))
        given = [keep(f"{name}_s", step.reshape(-1)), keep(f"{name}_z", np.zeros(step.size, np.int8))]
        nodes.append(helper.make_node("DequantizeLinear", [codes, *given], [f"{name}_d"], axis=axis))
        return f"{name}_d"

    for node in list(graph.node):
        meets = node.op_type in _BESIDE_CONVOLUTIONS or any(name in weights for name in node.input[:2])
        for place, name in enumerate(list(node.input[:2]) if node.op_type in taken and meets else ()):
            if name in operands:
                ready[name] = ready[name] if name in ready else activation(name)
            elif name in weights and node.op_type in _CONTRACTIONS and weights[name].ndim > 1:
                transposed = any(a.name == "transB" and a.i for a in node.attribute)
                axis = 0 if node.op_type == "Conv" or transposed else weights[name].ndim - 1
                ready[name] = ready[name] if name in ready else weight(name, axis)
            else:
                continue
            node.input[place] = ready[name]
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in known.items())
    return made


# ---- weights of few bits


def product_row(m: int, k: int, n: int, bits: int, timed: Timed) -> Row:
    """Of several products with weights of their own in one model, so that no cache has them."""
    import torch

    rng = np.random.default_rng(0)
    times, results, models, counts = [], [], [], []
    x = torch.from_numpy(rng.standard_normal((m, k)).astype(np.float16)).cuda()
    for own in (bits, 16):
        count = BEYOND_L2 // (k * n * own // 8) + 1
        weights = [codes_of(np.random.default_rng(i), k, n, bits) for i in range(count)]
        made = products_model(m, k, n, own, weights, bits)
        models.append(tilewright.compile(made, target="cuda", merging="off"))
        outputs = [torch.empty((m, n), dtype=torch.float16, device="cuda") for _ in range(count)]
        models[-1].run_into([x], outputs)
        torch.cuda.synchronize()
        results.append(outputs[0].clone())
        times.append(timed(lambda _, a=models[-1], o=outputs: a.run_into([x], o), 5) / count)  # type: ignore[misc]
        counts.append(count)
    name = f"{bits} bits, {m} x {k} x {n}"
    about = predicted(models[0]) / counts[0], kernels(models[0]) // counts[0]
    return Row(name, times[0], times[1], relative(*results), *about)


Codes = tuple[np.ndarray, np.ndarray]


def codes_of(rng: np.random.Generator, k: int, n: int, bits: int) -> Codes:
    """Codes by column and place, and a scale a block of them."""
    codes = rng.integers(0, 1 << bits, (n, k), dtype=np.uint8)
    return codes, ((0.5 + rng.random((n, k // BLOCK))) / (1 << bits) / np.sqrt(k)).astype(np.float16)


def products_model(m: int, k: int, n: int, own: int, weights: Sequence[Codes], bits: int) -> Any:
    """One operand by several weights: in so many bits of their own, or as the 16-bit numbers that they stand for."""
    from onnx import TensorProto, helper, numpy_helper

    nodes, known = [], {}
    for number, (codes, scales) in enumerate(weights):
        weight, scale, result = f"w{number}", f"s{number}", f"y{number}"
        if own == 16:
            wide = (codes.astype(np.float32) - (1 << (bits - 1))) * np.repeat(scales.astype(np.float32), BLOCK, axis=1)
            known[weight] = np.ascontiguousarray(wide.T.astype(np.float16))
            nodes.append(helper.make_node("MatMul", ["x", weight], [result]))
            continue
        pairs = codes[:, ::2] | codes[:, 1::2] << 4 if bits == 4 else codes
        known |= {weight: pairs.reshape(n, k // BLOCK, -1), scale: scales.reshape(-1)}
        nodes.append(helper.make_node("MatMulNBits", ["x", weight, scale], [result], domain="com.microsoft", K=k, N=n,
                                      bits=bits, block_size=BLOCK))  # fmt: skip
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT16, (m, k))
    ends = [helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT16, (m, n)) for i in range(len(weights))]
    initial = [numpy_helper.from_array(a, name) for name, a in known.items()]
    graph = helper.make_graph(nodes, "products", [given], ends, initial)
    sets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=sets, ir_version=10)


# ---- 8-bit floats


def float8_row(m: int, k: int, n: int, timed: Timed) -> Row:
    """Operands that lie on the device, with a scale each; PyTorch sums in float32 as well."""
    import torch

    kind = torch.float8_e4m3fn
    x, w = (torch.randn(rows, k, device="cuda").to(kind) for rows in (m, n))
    model = tilewright.compile(float8_model(m, k, n), target="cuda")
    found = torch.full((m, n), float("nan"), device="cuda", dtype=torch.float16)
    model.run_into([x, w], [found])
    torch.cuda.synchronize()
    scales = [torch.tensor(s, device="cuda") for s in _SCALES]
    wanted = (x.double() @ w.double().T) * (_SCALES[0] * _SCALES[1])
    ours = timed(lambda _: model.run_into([x, w], [found]), 6)
    theirs = timed(lambda _: torch._scaled_mm(x, w.t(), *scales, out_dtype=torch.float16, use_fast_accum=False), 6)
    return Row(f"float8, {m} x {k} x {n}", ours, theirs, relative(found, wanted), predicted(model), kernels(model),
               peer="_scaled_mm", wanted="float64")  # fmt: skip


_SCALES = (0.125, 0.25)


def float8_model(m: int, k: int, n: int) -> Any:
    """x wᵀ of 8-bit floats, scaled."""
    from onnx import TensorProto, helper, numpy_helper

    kind = TensorProto.FLOAT8E4M3FN
    known = [numpy_helper.from_array(np.array(s, np.float32), name) for s, name in zip(_SCALES, "st", strict=True)]
    nodes = [helper.make_node("DequantizeLinear", ["x", "s"], ["xd"]),
             helper.make_node("DequantizeLinear", ["w", "t"], ["wd"]),
             helper.make_node("Transpose", ["wd"], ["wt"], perm=[1, 0]),
             helper.make_node("MatMul", ["xd", "wt"], ["p"]),
             helper.make_node("Cast", ["p"], ["y"], to=TensorProto.FLOAT16)]  # fmt: skip
    ports = [helper.make_tensor_value_info(name, kind, (rows, k)) for name, rows in (("x", m), ("w", n))]
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT16, (m, n))
    graph = helper.make_graph(nodes, "float8", ports, [result], known)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


# ---- pieces


def relative(found: Any, wanted: Any) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def predicted(model: tilewright.Model) -> float:
    from tilewright.schedule.planner import plan_seconds

    return plan_seconds(model.artifact.plan, model.artifact.program) * 1e6


def kernels(model: tilewright.Model) -> int:
    return len(model.artifact.loops.calls)
