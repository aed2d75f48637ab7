"""Which maps vanish into what reads them: none whose elements a sum would then compute again and again."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

from tests.cpu_stages import Step, model_of
from tilewright import ops
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.compute import Program
from tilewright.schedule.fuse import fuse_registers
from tilewright.target import machine
from tilewright.transform.clean.fold import fold_constants

SHAPES = {"x": (6, 8, 16), "scale": (16,), "w": (16, 24)}
LINKS = 12
CONSTANTS = {
    "five": np.array([2, 3, 2, 4, 16]),
    "three": np.array([4, 12, 16]),
    "four": np.array([5, 6, 8, 16]),
    "zero": np.array([0]),
    "two": np.array([2]),
    "six": np.array([6]),
}
WINDOWS: list[Step] = [
    ("Reshape", ("moved", "five"), "cut", {}),
    ("Transpose", ("cut",), "turned", {"perm": [0, 2, 1, 3, 4]}),
    ("Reshape", ("turned", "three"), "windows", {}),
    ("MatMul", ("windows", "w"), "y", {}),
]


def program_of(steps: list[Step], shape: tuple[int, ...]) -> Program:
    return fold_constants(ops.lower(load(model_of(steps, SHAPES, {"y": shape}, CONSTANTS), {})))


def made(steps: list[Step]) -> Program:
    """Windows of 3 x 4 positions cut out of an image, and multiplied by a weight of 24 columns."""
    return program_of([*steps, *WINDOWS], (4, 12, 24))


def kept(program: Program) -> set[str]:
    fused = fuse_registers(program.computes, frozenset(program.outputs), machine("neoverse_n1"))
    inside = set(fused.inlined) | {m.output for chain in fused.epilogues.values() for m in chain}
    return {t.name for c in program.computes for t in c.outputs if t not in inside}


def test_moved_data_is_addressed_where_it_lies() -> None:
    program = made([("Identity", ("x",), "moved", {})])
    assert kept(program) == {"y"}


@pytest.mark.parametrize("operator", ["Mul", "Sub", "Pow"])
def test_a_formula_behind_views_is_computed_once(operator: str) -> None:
    """The last view is stored, with the formula in it, in the order in which the sum reads it."""
    program = made([(operator, ("x", "scale"), "moved", {})])
    assert kept(program) == {"windows", "y"}


def test_a_roll_is_stored_once_in_the_order_of_the_windows() -> None:
    """Two parts of an image in another order: a sum that chose between them at every step would be slow."""
    roll: list[Step] = [
        ("Slice", ("x", "two", "six", "zero"), "end", {}),
        ("Slice", ("x", "zero", "two", "zero"), "start", {}),
        ("Concat", ("end", "start"), "moved", {"axis": 0}),
    ]
    assert kept(made(roll)) == {"windows", "y"}


def test_a_view_that_repeats_is_not_what_is_stored() -> None:
    """Behind a view with many more elements than the formula has, it is the formula's result that is kept."""
    steps: list[Step] = [
        ("Mul", ("x", "scale"), "scaled", {}),
        ("Expand", ("scaled", "four"), "many", {}),
        ("MatMul", ("many", "w"), "y", {}),
    ]
    assert kept(program_of(steps, (5, 6, 8, 24))) == {"scaled", "y"}


def test_places_of_places_are_stored_on_the_way() -> None:
    """Each of them reads the one before at two places: all of them composed would read the first at 4,096."""
    steps: list[Step] = [("Cast", ("scale",), "p0", {"to": TensorProto.INT64})]
    steps += [("Gather", (f"p{k}", f"p{k}"), f"p{k + 1}", {}) for k in range(LINKS)]
    program = program_of([*steps, ("Cast", (f"p{LINKS}",), "y", {"to": TensorProto.FLOAT})], (16,))
    assert len(kept(program)) > LINKS // 2
