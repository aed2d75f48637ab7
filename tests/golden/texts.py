"""Small models in every form as text, for a machine that is always the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import ModelProto

from tests.cpu_stages import model_of
from tilewright import ops
from tilewright.backend import backend_for, renderable
from tilewright.backend.cpu import machine_code
from tilewright.frontend.onnx.model import load
from tilewright.ir.text import text
from tilewright.lower.program import lower_program
from tilewright.schedule.planner import make_plan
from tilewright.target import Target
from tilewright.target.machine import MemoryLevel
from tilewright.transform.clean.fold import fold_constants
from tilewright.transform.layout.choose import choose_layouts

FOLDER = Path(__file__).resolve().parent

# Two cores with eight lanes: what is written must not depend on where the test runs.
MACHINE = Target(
    "cpu", "cpu", "x86_64", 2, 32, 16, 4e10,
    (MemoryLevel("registers", 512, 32, 4e11), MemoryLevel("L1", 32 << 10, 64, 1.2e11),
     MemoryLevel("L2", 512 << 10, 64, 4e10), MemoryLevel("DRAM", 1 << 40, 64, 1.2e10)), 0.5e-6,
)  # fmt: skip


def weights(*shape: int) -> np.ndarray:
    return (np.arange(np.prod(shape), dtype=np.float32).reshape(shape) % 5 - 2) / 4


MODELS: dict[str, ModelProto] = {
    # a product with weights, its bias and activation on the register tile, a tail of one column
    "dense": model_of([("MatMul", ["x", "w"], "p", {}), ("Add", ["p", "b"], "s", {}), ("Relu", ["s"], "y", {})],
                      {"x": (3, 4)}, {"y": (3, 9)}, {"w": weights(4, 9), "b": weights(9)}),
    # two reductions over rows that stay on chip
    "rows": model_of([("Softmax", ["x"], "y", {"axis": -1})], {"x": (4, 10)}, {"y": (4, 10)}),
    # a window with pads: checks outside the block, none inside
    "window": model_of([("Conv", ["x", "w"], "y", {"pads": [1, 1], "group": 8})],
                       {"x": (1, 8, 6)}, {"y": (1, 8, 6)}, {"w": weights(8, 1, 3)}),
}  # fmt: skip
SOURCES = ("dense",)


def texts(name: str) -> dict[str, str]:
    """File name -> what it holds."""
    lowered = ops.lower(load(MODELS[name], {}))
    program = choose_layouts(fold_constants(lowered), MACHINE)
    loops = lower_program(program, make_plan(program, MACHINE), backend_for(MACHINE).lower_kernel)
    found = {f"{name}.program.txt": text.program_text(program), f"{name}.loops.txt": text.loops_text(loops)}
    if name in SOURCES:
        sources = machine_code.render(renderable(loops, MACHINE), MACHINE)
        found |= {f"{name}.{kernel}.c": source for kernel, source in sources.items()}
    return found
