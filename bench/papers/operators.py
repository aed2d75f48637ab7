"""Single operators as plans: one file of a problem, loaded and planned."""

from __future__ import annotations

import tempfile
from pathlib import Path

from bench.kernel_cases import Problem, write_model
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.graph import Graph


def graph_of(problem: Problem) -> Graph:
    with tempfile.TemporaryDirectory(prefix="tilewright-bench-") as folder:
        path = Path(folder) / "operator.onnx"
        write_model(problem, path)
        return load(path)
