"""Checks that a stage kept the model's meaning: every form runs on the same random inputs, held to the first Program.

The first Program is evaluated in float64. Programs and Loops run under the interpreter, machine code as it is. A model
too large to interpret whole is looked at in sampled elements of its outputs, and its Loops through their machine code.

Machine code may flush denormals, and then an element is right that is near the exact one or near the one that the
interpreter finds when it flushes, too: a logarithm or a quotient shows what was flushed at full size. Results apart by
less than the smallest normal number of their type are the same: one of them was flushed, or may have been on the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from tilewright.errors import InternalError
from tilewright.intrinsics import cpu, gpu
from tilewright.ir.forms import dtypes
from tilewright.ir.forms.compute import Compute, Program, Reduce, Region, Scan
from tilewright.ir.forms.graph import Graph, Room
from tilewright.ir.forms.loops import LoopProgram
from tilewright.ir.forms.tensor import Layout, Tensor, elements
from tilewright.ir.meaning.instruct import INSTRUCTIONS
from tilewright.ir.meaning.interpret import Sampler, evaluate
from tilewright.ir.meaning.interpret_loops import LoopFault, run_loops
from tilewright.ir.meaning.values import SMALLEST
from tilewright.runtime.emulator import EmulationFault
from tilewright.tile_graph.plan.form import Plan

SMALL = 2e8  # element operations that the interpreter does in seconds
SAMPLES = 64  # elements of an output, where a model is not small
TOLERANCE = 1e-4  # of an output's largest value: a deep model in float32 stays well within it
NARROW_TOLERANCE = 5e-2  # the same where values are rounded to 8 or 16 bits: the last bit may fall either way
_SMALLEST = {dtype.numpy: smallest for dtype, smallest in SMALLEST.items()}
_NARROW = (dtypes.bfloat16, dtypes.float16, dtypes.int8, dtypes.uint8)

Arrays = dict[str, np.ndarray]
Points = tuple[np.ndarray, ...]


class Verifier:
    """Remembers what the first Program gives; `check` compares what a stage made with it."""

    def __init__(self, seed: int = 0, flush: bool = True) -> None:
        self._seed = seed
        self._flush = flush  # whether machine code may take denormals as zeros
        self._program: Program | None = None
        self._plan: Plan | None = None
        self._inputs: Arrays = {}
        self._points: list[Points] = []
        self._expected: list[np.ndarray] = []
        self._is_small = True
        self._tolerance = TOLERANCE
        self._rooms: tuple[Room, ...] = ()

    def check(self, stage: str, result: Any) -> None:
        if isinstance(result, Graph):
            self._rooms = () if result.part is None else result.part.rooms
        if isinstance(result, Program) and any(isinstance(c, Region) for c in result.computes):
            return  # random inputs may never end it: its parts are looked at one by one
        if isinstance(result, Program):
            if self._program is None:
                self._begin(result)
            else:
                self._continue(stage, result)
            self._program = result
        elif isinstance(result, Plan):
            self._plan = result
        elif isinstance(result, LoopProgram):
            if self._is_small and self._program is not None and self._plan is not None:
                self._compare(stage, self._program, self._of_loops(stage, result, self._program, self._plan))
        elif stage == "machine" and self._program is not None:
            self._compare(stage, self._program, self._of_code(stage, result, self._program), self._flush)

    def _begin(self, program: Program) -> None:
        rng = np.random.default_rng(self._seed)
        self._inputs = {t.name: _random(rng, t) for t in program.inputs}
        self._is_small = work(program.computes) <= SMALL
        shapes = [_shape(t) for t in program.outputs]
        if self._rooms:  # sizes that a run tells: what lies behind them is nobody's
            numbers = [int(rng.integers(room.low, room.high, endpoint=True)) for room in self._rooms]
            told = program.inputs[-1]
            self._inputs[told.name] = np.array(numbers, told.dtype.numpy)
            shapes = [tuple(form.at(numbers) for form in forms) for forms in program.ends]
        self._points = [_points(rng, shape, self._is_small) for shape in shapes]
        self._expected = self._of_program(program, wide=True)

    def _continue(self, stage: str, program: Program) -> None:
        """A later Program; one that rounds where the one before did not is held to it loosely, and then the measure."""
        rounds = any(t.dtype in _NARROW for c in _all_computes(program.computes) for t in c.outputs)
        found = self._of_program(program, wide=False)
        if rounds:
            self._tolerance = NARROW_TOLERANCE
        self._compare(stage, program, found)
        if rounds:
            self._expected = found

    def _of_program(self, program: Program, wide: bool, flush: bool = False) -> list[np.ndarray]:
        # by position: a stage may rename tensors, never reorder the model's inputs and outputs
        given = {t.name: a for t, a in zip(program.inputs, self._inputs.values(), strict=True)}
        if self._is_small:
            whole = evaluate(program, given, wide=wide, flush=flush)
            return self._sampled([whole[t.name] for t in program.outputs])
        sampler = Sampler(program, given, wide=wide, flush=flush)
        return [sampler.at(t, points) for t, points in zip(program.outputs, self._points, strict=True)]

    def _of_loops(self, stage: str, loops: LoopProgram, program: Program, plan: Plan) -> list[np.ndarray]:
        layouts = dict(plan.layouts)
        tensors: Arrays = {}
        for tensor, array in program.constants.items():
            layout = layouts.get(tensor.name) or Layout.natural(tensor.rank)
            tensors[tensor.name] = layout.pack(np.asarray(array).reshape(_shape(tensor)))
        for tensor, array in zip(program.inputs, self._inputs.values(), strict=True):
            tensors[tensor.name] = array.copy()
        try:
            run_loops(loops, tensors, instructions={**INSTRUCTIONS, **gpu.MEANINGS, **cpu.MEANINGS})
        except LoopFault as fault:
            raise InternalError(f"stage '{stage}' made Loops that break a rule: {fault}") from fault
        return self._sampled([tensors[t.name].reshape(_shape(t)) for t in program.outputs])

    def _of_code(self, stage: str, runner: Any, program: Program) -> list[np.ndarray]:
        outputs = [np.zeros(_shape(t), t.dtype.numpy) for t in program.outputs]
        try:
            runner.run([a.copy() for a in self._inputs.values()], outputs)
        except EmulationFault as fault:
            raise InternalError(f"stage '{stage}' made code that breaks a rule: {fault}") from fault
        return self._sampled(outputs)

    def _sampled(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        return [np.asarray(a[points]) for a, points in zip(arrays, self._points, strict=True)]

    def _compare(self, stage: str, program: Program, found: list[np.ndarray], flush: bool = False) -> None:
        wrong = [difference(got, right, flush) for got, right in zip(found, self._expected, strict=True)]
        if flush and any(w.size and w.max() > self._tolerance for w in wrong):
            others = self._of_program(program, wide=True, flush=True)
            again = [difference(got, right, flush) for got, right in zip(found, others, strict=True)]
            wrong = [np.minimum(w, a) for w, a in zip(wrong, again, strict=True)]
        rows = zip(program.outputs, found, self._expected, self._points, wrong, strict=True)
        for tensor, got, expected, points, apart in rows:
            if apart.size and apart.max() > self._tolerance:
                worst = int(apart.argmax())
                place = [int(p.reshape(-1)[worst]) for p in points]
                raise InternalError(
                    f"stage '{stage}' changed the meaning of the model: {tensor.name}{place} is "
                    f"{got.reshape(-1)[worst]:.6g}, and was {expected.reshape(-1)[worst]:.6g} before "
                    f"({int((apart > self._tolerance).sum())} of {apart.size} elements differ)"
                )


def difference(got: np.ndarray, expected: np.ndarray, flush: bool = False) -> np.ndarray:
    """How far elements are apart, in units of the largest expected one; infinite where only one is a number. With
    `flush`, those apart by less than the smallest normal number are not."""
    if expected.dtype.kind in "iu" and expected.dtype.itemsize == 1:  # quantised: in units of the type's range
        return np.abs(got.astype(np.float64) - expected.astype(np.float64)) / 255
    if expected.dtype.kind not in "fV":
        return np.asarray(got != expected, np.float64)
    a, b = got.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(b)
    scale = float(np.abs(b[finite]).max(initial=0.0)) or 1.0
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        if flush:
            same |= np.abs(a - b) < _SMALLEST.get(got.dtype, 0.0)
        apart = np.where(same, 0.0, np.abs(a - b) / scale)
    return np.where(np.isnan(apart), np.inf, apart)


def _all_computes(computes: tuple[Compute, ...]) -> Iterator[Compute]:
    for compute in computes:
        yield compute
        if isinstance(compute, Scan):
            yield from compute.body


def work(computes: tuple[Compute, ...]) -> float:
    """Element operations of computes, for a guess at how long the interpreter takes."""
    total = 0.0
    for compute in computes:
        if isinstance(compute, Scan):
            total += work(compute.body) * _extent(compute.axis.extent)
            continue
        points = prod(_extent(e) for e in compute.outputs[0].shape) if compute.outputs else 0
        if isinstance(compute, Reduce):
            points *= prod(_extent(a.extent) for a in compute.reduce_axes)
        total += points
    return total


def _extent(extent: Any) -> int:
    return extent if isinstance(extent, int) else 1


def _shape(tensor: Tensor) -> tuple[int, ...]:
    elements(tensor.shape)  # refuses a symbolic shape
    return tuple(int(e) for e in tensor.shape)  # type: ignore[arg-type]


def _random(rng: np.random.Generator, tensor: Tensor) -> np.ndarray:
    """Normal floats; whole numbers 0 or 1, in range for indices and masks alike."""
    shape = _shape(tensor)
    values = rng.standard_normal(shape) if tensor.dtype.is_float else rng.integers(0, 2, shape)
    return np.asarray(values).astype(tensor.dtype.numpy)


def _points(rng: np.random.Generator, shape: tuple[int, ...], everything: bool) -> Points:
    """Index arrays of the elements to look at: all, or both corners and some between."""
    size = prod(shape)
    if everything or size <= SAMPLES:
        flat = np.arange(size)
    else:
        flat = np.unique(np.concatenate([[0, size - 1], rng.choice(size, SAMPLES - 2, replace=False)]))
    return np.unravel_index(flat, shape) if shape else ()


__all__ = ["Verifier", "difference", "work"]
