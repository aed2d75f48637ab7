"""What runs on an emulated processor: contractions and models planned for the machines that have the instructions.

Every instruction of the table that x86 has, over aligned, ragged and tiny shapes, and plain vectors beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tests.unit.cpu.test_instructions import Pair, conv, matmul, numbers
from tilewright.backend import backend_for, renderable
from tilewright.backend.cpu import machine_code
from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.intrinsics.cpu import DOTS, Dot
from tilewright.ir.forms.compute import Program
from tilewright.ir.meaning.interpret import evaluate
from tilewright.lower.program import lower_program
from tilewright.options import Options
from tilewright.runtime import ModelImage
from tilewright.schedule.planner import make_plan
from tilewright.target import Target, machine
from tilewright.tile_graph.plan.form import Plan

EXACT, ROUNDED, A_STEP = 0.0, 1e-5, 1.0  # of sums of integers, of sums of floats, of quantised results
NARROWED = 1e-2  # of models whose layers round to bfloat16: a last bit that falls the other way


@dataclass(frozen=True)
class Case:
    """Kernels, and files of what goes in and what must come out."""

    name: str
    target: Target
    processor: str  # as compilers name it
    image: ModelImage
    inputs: tuple[np.ndarray, ...]
    wanted: tuple[np.ndarray, ...]
    tolerance: float
    instructions: tuple[str, ...]  # that the plan uses

    @property
    def needs_tiles(self) -> bool:
        return any(name.startswith("amx") for name in self.instructions)


def targets() -> dict[str, tuple[Target, str]]:
    """A server, whole and with less and less in it; a desktop with AVX2, and with that alone; one with NEON."""
    server = machine("emerald_rapids")
    plain = ("avx2", "fma", "avx512f")

    def only(*more: str) -> Target:
        return replace(server, features=(*plain, *more))

    desktop = machine("avx2_desktop")
    return {
        "amx": (server, "sapphirerapids"),
        "vnni": (only("avx512_vnni"), "cascadelake"),
        "bf16": (only("avx512_bf16"), "cooperlake"),
        "avx512": (only(), "skylake-avx512"),
        "avx_vnni": (desktop, "alderlake"),
        "avx2": (replace(desktop, features=("avx2", "fma")), "haswell"),
        "neon": (machine("neoverse_n1"), "neoverse_n1"),
    }


X86 = ("amx", "vnni", "bf16", "avx512", "avx_vnni", "avx2")
USED = {
    "amx": ("amx_bf16", "amx_int8"), "vnni": ("vnni_int8",), "bf16": ("vdp_bf16",), "avx_vnni": ("vnni_int8_256",),
    "neon": ("sdot_int8",),
}  # fmt: skip
SHAPES = (
    (64, 64, 128), (128, 96, 256),  # whole tiles
    (37, 20, 70), (33, 33, 33), (50, 3, 64), (20, 70, 515), (110, 70, 65), (17, 1000, 31), (40, 40, 1700),
)  # fmt: skip
WINDOWS = (((2, 4, 5, 20), 9, 3, 1, 1), ((1, 8, 8, 64), 33, 3, 2, 1), ((1, 7, 7, 40), 20, 1, 1, 0))


def every_case(kinds: Sequence[str] = X86, quick: bool = False) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Names, and what makes the case, for these kinds of `targets`; the interpreter's part of it takes a while."""
    machines = {kind: there for kind, there in targets().items() if kind in kinds}
    for kind in machines:
        for name in USED.get(kind, ()):
            dot = DOTS[name]
            for pair, *_ in (*dot.instructions, *dot.moved):
                exact = EXACT if dot.accumulator == "int32" else ROUNDED
                for what, program, tolerance in _contractions(dot, pair, exact, quick):
                    text = f"{name}-{pair[0]}-{what}"
                    yield text, partial(_made, text, program, *machines[kind], tolerance)
    for kind, machine_of in machines.items():
        for name, model, precision, tolerance in models():
            if not quick or name == "dense":
                yield f"{kind}-{name}", partial(_compiled, f"{kind}-{name}", model, precision, *machine_of, tolerance)


def _contractions(dot: Dot, pair: Pair, exact: float, quick: bool) -> Iterator[tuple[str, Program, float]]:
    for shape in SHAPES[:3] if quick else SHAPES:
        yield "x".join(map(str, shape)), matmul(dot, pair, shape), exact
    if quick:
        return
    small = (21, 19, 45)
    yield "both", matmul(dot, pair, small, batch=2, constant=False), exact
    yield "turned", matmul(dot, pair, small, batch=2, constant=False, flipped=True), exact
    yield "behind", matmul(dot, pair, (70, 50, 200), epilogue=True), ROUNDED
    for at, window in enumerate(WINDOWS):
        yield f"window{at}", conv(dot, pair, *window), ROUNDED


def _made(name: str, program: Program, target: Target, processor: str, tolerance: float) -> Case:
    plan = make_plan(program, target)
    loops = renderable(lower_program(program, plan, backend_for(target).lower_kernel), target)
    given = {t.name: numbers(t.dtype, t.shape, 3) for t in program.inputs}  # type: ignore[arg-type]
    sources = machine_code.render(loops, target)
    image = machine_code.model_image(sources, loops, program, plan, "keep")
    return _case(name, target, processor, image, program, plan, given, tolerance)


def _compiled(
    name: str, model: ModelProto, precision: str | None, target: Target, processor: str, tolerance: float
) -> Case:
    made = build(load(model, {}), target, Options(precision=precision, stop_after="source"))
    assert made.program is not None and made.plan is not None and made.loops is not None
    given = {p.name: _drawn(p) for p in model.graph.input}
    # the interpreter computes with denormals too
    image = machine_code.model_image(made.sources, renderable(made.loops, target), made.program, made.plan, "keep")
    return _case(name, target, processor, image, made.program, made.plan, given, tolerance)


def _case(name: str, target: Target, processor: str, image: ModelImage, program: Program, plan: Plan,
          given: dict[str, np.ndarray], tolerance: float) -> Case:  # fmt: skip
    found = evaluate(program, given)
    used = {n.instruction for k in plan.kernels for n in k.leaves if n.instruction}
    wanted = tuple(found[t.name] for t in program.outputs)
    return Case(name, target, processor, image, tuple(given.values()), wanted, tolerance, tuple(sorted(used)))


def _drawn(port: object) -> np.ndarray:
    shape = [d.dim_value for d in port.type.tensor_type.shape.dim]  # type: ignore[attr-defined]
    return np.random.default_rng(5).standard_normal(shape).astype(np.float32)


# --- models


def models() -> Iterator[tuple[str, ModelProto, str | None, float]]:
    """Name, model, precision, tolerance."""
    yield "dense", _dense(), None, ROUNDED
    yield "dense-bfloat16", _dense(), "bfloat16", NARROWED
    yield "windows", _windows(), None, ROUNDED
    yield "windows-bfloat16", _windows(), "bfloat16", NARROWED
    yield "rounded", _rounded(), None, EXACT
    yield "quantised", _quantised(), None, A_STEP
    yield "quantised-window", _quantised_window(), None, A_STEP


def _model(nodes: list, inputs: dict[str, tuple[int, ...]], outputs: dict[str, tuple[int, ...]],
           constants: dict[str, np.ndarray], kind: int = TensorProto.FLOAT) -> ModelProto:  # fmt: skip
    given = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()]
    results = [helper.make_tensor_value_info(n, kind, s) for n, s in outputs.items()]
    fixed = [numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items()]
    graph = helper.make_graph(nodes, "graph", given, results, fixed)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def _weights(*shape: int) -> np.ndarray:
    fan = int(np.prod(shape)) // max(shape[0], 1)
    return (np.random.default_rng(11).standard_normal(shape) / np.sqrt(max(fan, 1))).astype(np.float32)


def _dense() -> ModelProto:
    """Two layers, a softmax between them: 61 rows, 130 and 47 columns."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Add", ["a", "b"], ["s"]),
        helper.make_node("Softmax", ["s"], ["p"]), helper.make_node("Tanh", ["p"], ["t"]),
        helper.make_node("MatMul", ["t", "v"], ["y"]),
    ]  # fmt: skip
    fixed = {"w": _weights(96, 130), "b": _weights(130), "v": _weights(130, 47)}
    return _model(nodes, {"x": (61, 96)}, {"y": (61, 47)}, fixed)


def _rounded() -> ModelProto:
    """Numbers to bfloat16 and back: ties, denormals, the largest and infinity."""
    nodes = [
        helper.make_node("Mul", ["x", "z"], ["o"]), helper.make_node("Add", ["o", "s"], ["m"]),
        helper.make_node("Cast", ["m"], ["n"], to=TensorProto.BFLOAT16),
        helper.make_node("Cast", ["n"], ["y"], to=TensorProto.FLOAT),
    ]  # fmt: skip
    rng = np.random.default_rng(14)
    bits = rng.integers(0, 1 << 32, (40, 48), np.uint32) & 0xFFFFFF00 | 0x80
    special = [0x80000000, 0x00008000, 0x00018000, 0x807FFFFF, 0x00000001, 0x3F808000, 0x3F818000, 0x7F7FFFFF]
    bits[0, : len(special)] = special
    some = bits.view(np.float32)
    some[~np.isfinite(some)] = np.inf
    return _model(nodes, {"x": (40, 48)}, {"y": (40, 48)}, {"s": some, "z": np.zeros((1, 1), np.float32)})


def _windows() -> ModelProto:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]), helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("Conv", ["r", "v"], ["d"], pads=[1, 1, 1, 1], group=32),
        helper.make_node("Conv", ["d", "u"], ["y"], strides=[2, 2]),
    ]  # fmt: skip
    fixed = {"w": _weights(32, 16, 3, 3), "v": _weights(32, 1, 3, 3), "u": _weights(40, 32, 1, 1)}
    return _model(nodes, {"x": (1, 16, 13, 11)}, {"y": (1, 40, 7, 6)}, fixed)


def _quantised() -> ModelProto:
    rng = np.random.default_rng(12)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["e"]),
        helper.make_node("DequantizeLinear", ["w", "t"], ["d"]), helper.make_node("MatMul", ["e", "d"], ["m"]),
        helper.make_node("QuantizeLinear", ["m", "u", "z"], ["y"]),
    ]  # fmt: skip
    fixed = {"w": rng.integers(-127, 128, (100, 75)).astype(np.int8), "s": np.float32(0.03), "t": np.float32(0.01),
             "u": np.float32(0.1), "z": np.uint8(117)}  # fmt: skip
    return _model(nodes, {"x": (53, 100)}, {"y": (53, 75)}, fixed, TensorProto.UINT8)


def _quantised_window() -> ModelProto:
    rng = np.random.default_rng(13)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["e"]),
        helper.make_node("DequantizeLinear", ["w", "t"], ["d"]),
        helper.make_node("Conv", ["e", "d"], ["m"], pads=[1, 1, 1, 1]), helper.make_node("Relu", ["m"], ["r"]),
        helper.make_node("QuantizeLinear", ["r", "u", "z"], ["y"]),
    ]  # fmt: skip
    fixed = {"w": rng.integers(-127, 128, (40, 32, 3, 3)).astype(np.int8), "s": np.float32(0.03),
             "t": np.float32(0.01), "u": np.float32(0.2), "z": np.uint8(3)}  # fmt: skip
    return _model(nodes, {"x": (1, 32, 9, 7)}, {"y": (1, 40, 9, 7)}, fixed, TensorProto.UINT8)
