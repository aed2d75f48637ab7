"""Running a model as the operator tests do, on the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx

from tilewright import ops
from tilewright.frontend.onnx import model as frontend
from tilewright.ir.meaning.interpret import evaluate

RunModel = Callable[[onnx.ModelProto, Mapping[str, np.ndarray]], dict[str, np.ndarray]]


def interpret_model(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    graph = frontend.load(model, {name: array.shape for name, array in inputs.items()})
    program = ops.lower(graph)
    found = evaluate(program, inputs)
    return {name: found[t.name] for name, t in zip(program.output_names, program.outputs, strict=True)}
