"""The CPU's stages one by one, and how to run what each of them gives: Programs, Loops and machine code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tilewright import ops
from tilewright.backend import backend_for, renderable
from tilewright.backend.cpu import machine_code
from tilewright.frontend.onnx.model import load
from tilewright.intrinsics.cpu import MEANINGS
from tilewright.ir.analysis.verify import verify_loops, verify_program
from tilewright.ir.forms.compute import Program
from tilewright.ir.forms.graph import Graph
from tilewright.ir.forms.loops import LoopProgram
from tilewright.ir.forms.tensor import Layout
from tilewright.ir.meaning.interpret import evaluate
from tilewright.ir.meaning.interpret_loops import run_loops
from tilewright.ir.text.parse import parse_program
from tilewright.ir.text.text import program_text
from tilewright.lower.program import lower_program
from tilewright.options import Options
from tilewright.runtime import CpuModel, this_machine
from tilewright.schedule.planner import make_plan
from tilewright.target import Target, machine
from tilewright.tile_graph.plan.form import Plan
from tilewright.transform.clean.fold import fold_constants
from tilewright.transform.layout.choose import choose_layouts
from tilewright.transform.layout.staging import stage_operands

CPU = machine("cpu")  # where kernels run; a test that looks at a plan names its machine
# With --machine it may be another processor, whose instructions are then spelled out.
DIALECT = "c" if set(CPU.features) <= this_machine().features else "portable"
Arrays = Mapping[str, np.ndarray]


def programs(model: ModelProto | Path | Graph, target: Target = CPU) -> dict[str, Program]:
    """The Program after each stage that gives one."""
    graph = model if isinstance(model, Graph) else load(model, {})
    lowered = ops.lower(graph)
    folded = fold_constants(lowered)
    staged = stage_operands(folded, target)
    made = {"program": lowered, "fold": folded, "staging": staged, "layout": choose_layouts(staged, target)}
    for program in made.values():
        verify_program(program)
    return made


def evaluated(program: Program, inputs: Arrays, wide: bool = False) -> dict[str, np.ndarray]:
    """The outputs by the model's names, as the interpreter computes them."""
    found = evaluate(program, inputs, wide=wide)
    return {n: found[t.name] for n, t in zip(output_names(program), program.outputs, strict=True)}


def read_back(program: Program) -> Program:
    """The Program that its dump gives; dumped again it is the same text."""
    text = program_text(program)
    again = parse_program(text, {t.name: a for t, a in program.constants.items()})
    assert program_text(again) == text
    return again


def input_names(program: Program) -> tuple[str, ...]:
    return program.input_names or tuple(t.name for t in program.inputs)


def output_names(program: Program) -> tuple[str, ...]:
    return program.output_names or tuple(t.name for t in program.outputs)


@dataclass(frozen=True)
class Lowered:
    """A Program with its Plan and Loops for a machine, which need not be the one that they run on."""

    program: Program
    plan: Plan
    loops: LoopProgram
    target: Target = CPU

    def on_loops(self, inputs: Arrays) -> dict[str, np.ndarray]:
        """The outputs as the interpreter of Loops computes them, every access checked."""
        layouts = dict(self.plan.layouts)
        tensors: dict[str, np.ndarray] = {}
        for tensor, array in self.program.constants.items():
            layout = layouts.get(tensor.name) or Layout.natural(tensor.rank)
            tensors[tensor.name] = layout.pack(np.asarray(array).reshape(tensor.shape))  # type: ignore[arg-type]
        for tensor, name in zip(self.program.inputs, input_names(self.program), strict=True):
            tensors[tensor.name] = np.ascontiguousarray(inputs[name])
        run_loops(self.loops, tensors, instructions=MEANINGS)
        found = zip(self.program.outputs, output_names(self.program), strict=True)
        return {name: tensors[t.name].reshape(t.shape) for t, name in found}  # type: ignore[arg-type]

    def compiled(self, cache: Path, threads: int = 2, denormals: str = "flush") -> CpuModel:
        # what is planned for another machine runs all the same, with its instructions spelled out
        loops = renderable(self.loops, self.target)
        sources = machine_code.render(loops, self.target, "c" if self.target == CPU else "portable")
        options = Options(cache_dir=cache, threads=threads, denormals=denormals)
        return machine_code.load(sources, loops, self.program, self.plan, CPU, options)

    def natively(
        self, inputs: Arrays, cache: Path, threads: int = 2, denormals: str = "flush"
    ) -> dict[str, np.ndarray]:
        return run_native(self.compiled(cache, threads, denormals), self.program, inputs)


def lowered(
    program: Program, schedule: str = "connected", streaming: str = "auto", plan: Plan | None = None,
    target: Target = CPU,
) -> Lowered:  # fmt: skip
    chosen = plan or make_plan(program, target, schedule, streaming)
    loops = lower_program(program, chosen, backend_for(target).lower_kernel)
    verify_loops(loops)
    return Lowered(program, chosen, loops, target)


def run_native(model: CpuModel, program: Program, inputs: Arrays) -> dict[str, np.ndarray]:
    outputs = [_poisoned(tuple(int(e) for e in t.shape), t.dtype.numpy) for t in program.outputs]
    model.run([np.ascontiguousarray(inputs[n]) for n in input_names(program)], outputs)
    return dict(zip(output_names(program), outputs, strict=True))


def _poisoned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:  # type: ignore[type-arg]
    """Full of what no result here is, so that an element nobody wrote is seen."""
    return np.frombuffer(b"\xa5" * (int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape).copy()


def error(found: np.ndarray, wanted: np.ndarray) -> float:
    """‖found - wanted‖ / ‖wanted‖."""
    return float(np.linalg.norm(found.astype(np.float64) - wanted) / np.linalg.norm(wanted))


def random_inputs(program: Program, seed: int = 0, scale: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: (scale * rng.standard_normal(t.shape)).astype(t.dtype.numpy)  # type: ignore[arg-type]
        for t, name in zip(program.inputs, input_names(program), strict=True)
    }


Step = tuple[str, Sequence[str], str, dict[str, object]]
Ports = Mapping[str, Sequence[int]]


def model_of(steps: Sequence[Step], inputs: Ports, outputs: Ports, constants: Arrays | None = None,
             types: Mapping[str, int] | None = None) -> ModelProto:  # fmt: skip
    """An ONNX model of (operator, inputs, output, attributes), float32 unless `types` says otherwise."""
    nodes = [helper.make_node(op, list(given), [out], name=f"{op}_{out}", **more) for op, given, out, more in steps]
    kinds = types or {}
    ports = [
        [helper.make_tensor_value_info(n, kinds.get(n, TensorProto.FLOAT), list(s)) for n, s in part.items()]
        for part in (inputs, outputs)
    ]
    fixed = [numpy_helper.from_array(a, n) for n, a in (constants or {}).items()]
    graph = helper.make_graph(nodes, "graph", *ports, fixed)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
