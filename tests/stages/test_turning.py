"""Copies that turn, and copies made of parts: blocks turned in registers, ranges cut at conditions, at every width."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from tests.cpu_stages import Step, error, evaluated, lowered, model_of, programs, random_inputs
from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.loops import Alloc, For, ForKind, statements
from tilewright.options import Options
from tilewright.target import machine

Shape = tuple[int, ...]


def transposed(shape: Shape, order: Shape) -> ModelProto:
    """Turned, with an operand that is not turned beside it."""
    out = tuple(shape[a] for a in order)
    steps: list[Step] = [("Transpose", ["x"], "t", {"perm": list(order)}), ("Add", ["t", "z"], "y", {})]
    return model_of(steps, {"x": shape, "z": out}, {"y": out})


def joined(axis: int, *shapes: Shape, turn: Shape | None = None) -> ModelProto:
    out = list(shapes[0])
    out[axis] = sum(s[axis] for s in shapes)
    names = [f"x{i}" for i in range(len(shapes))]
    steps: list[Step] = [("Concat", names, "c", {"axis": axis})]
    steps.append(("Transpose", ["c"], "y", {"perm": list(turn)}) if turn else ("Relu", ["c"], "y", {}))
    return model_of(steps, dict(zip(names, shapes, strict=True)), {"y": [out[a] for a in turn] if turn else out})


def padded(shape: Shape, pads: Shape, turn: Shape) -> ModelProto:
    rank = len(shape)
    full = [n + pads[i] + pads[i + rank] for i, n in enumerate(shape)]
    steps: list[Step] = [("Pad", ["x", "pads"], "p", {}), ("Transpose", ["p"], "y", {"perm": list(turn)})]
    return model_of(steps, {"x": shape}, {"y": [full[a] for a in turn]}, {"pads": np.asarray(pads, np.int64)})


def tiled(shape: Shape, times: Shape) -> ModelProto:
    out = [n * t for n, t in zip(shape, times, strict=True)]
    steps: list[Step] = [("Tile", ["x", "times"], "y", {})]
    return model_of(steps, {"x": shape}, {"y": out}, {"times": np.asarray(times, np.int64)})


CASES = {
    "square": transposed((32, 32), (1, 0)),
    "odd": transposed((37, 53), (1, 0)),
    "one vector": transposed((17, 16), (1, 0)),
    "short": transposed((3, 41), (1, 0)),
    "channels last": transposed((2, 19, 7, 23), (0, 2, 3, 1)),
    "channels first": transposed((1, 7, 21, 18), (0, 3, 1, 2)),
    "reversed": transposed((17, 5, 33), (2, 1, 0)),
    "outer axes": transposed((5, 6, 19), (1, 0, 2)),
    "joined rows": joined(-1, (5, 33), (5, 1), (5, 18)),
    "joined columns": joined(0, (5, 33), (9, 33)),
    "joined and turned": joined(1, (1, 19, 6, 17), (1, 23, 6, 17), turn=(0, 2, 3, 1)),
    "joined along rows and turned": joined(2, (18, 3, 17), (18, 3, 5), turn=(2, 1, 0)),
    "padded and turned": padded((1, 18, 7, 20), (0, 0, 1, 2, 0, 0, 3, 1), (0, 2, 3, 1)),
    "padded along the vector": padded((1, 18, 7, 20), (0, 3, 0, 2, 0, 1, 0, 0), (0, 2, 3, 1)),
    "tiled": tiled((3, 5, 37), (2, 3, 3)),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CASES)
def test_every_form_agrees(name: str, kernel_cache: Path) -> None:
    program = programs(CASES[name])["layout"]
    inputs = random_inputs(program)
    wanted = evaluated(program, inputs, wide=True)["y"]
    made = lowered(program)
    assert error(made.on_loops(inputs)["y"], wanted) < 1e-7
    assert error(made.natively(inputs, kernel_cache)["y"], wanted) < 1e-7


@pytest.mark.sample(2)
@pytest.mark.parametrize("size", [*(pytest.param(n, marks=pytest.mark.slow) for n in (8, 32)), 16, 64])
def test_every_width(size: int, kernel_cache: Path) -> None:
    """What machines with wider vectors would run, compiled here."""
    target = replace(machine("cpu"), vector_bytes=size, lane_multiply=False)
    for name in ("odd", "one vector", "channels last", "reversed", "joined and turned", "padded along the vector"):
        model = CASES[name]
        artifact = build(load(model, {}), target, Options(cache_dir=kernel_cache, threads=1))
        assert artifact.program is not None
        inputs = random_inputs(artifact.program, seed=size)
        found = [np.full(p.shape, 7e7, np.float32) for p in artifact.outputs]
        artifact.runner.run([inputs[p.name] for p in artifact.inputs], found)
        assert error(found[0], evaluated(artifact.program, inputs, wide=True)["y"]) < 1e-7, name


@pytest.mark.parametrize("name", ["square", "odd", "channels last", "joined and turned", "padded and turned"])
def test_squares_are_turned_in_registers(name: str) -> None:
    """Two vector loops around a register square: rows in, columns out."""
    target = machine("avx2_desktop")
    loops = lowered(programs(CASES[name], target)["layout"], target=target).loops
    (kernel,) = loops.kernels
    squares = [s for s in statements(kernel.body) if isinstance(s, Alloc) and len(s.buffer.shape) == 2]
    assert squares
    for square in squares:
        vectors = [s for s in statements(square.body) if isinstance(s, For) and s.kind is ForKind.VECTOR]
        assert len(vectors) >= 2
