"""Counters and tensors that steps of a Scan write part by part: carried no more, and the meaning is kept."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tests.cpu_stages import evaluated
from tilewright.frontend.onnx.model import load
from tilewright.ir.analysis.verify import verify_program
from tilewright.ir.forms.compute import Reduce, Scan
from tilewright.ops import lower
from tilewright.transform.recurrence.counted import without_counters

F, WHOLE, FLAG = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
N, port = helper.make_node, helper.make_tensor_value_info


def writing(extent: int, first: int, axis: int, reads: bool = False) -> ModelProto:
    """Five steps, each of which writes its sum into its place along an axis, counted from `first` on."""
    shape = [extent, 3] if axis == 0 else [3, extent]
    places = np.arange(extent).reshape((extent, 1) if axis == 0 else (1, extent))
    nodes = [N("Add", ["h", "x"], ["g"]), N("Equal", ["places", "n"], ["here"]),
             N("Unsqueeze", ["g", "other"], ["row"]), N("Where", ["here", "row", "table"], ["next"]),
             N("Add", ["n", "one"], ["m"]), N("Identity", ["on"], ["more"])]  # fmt: skip
    nodes += [N("ReduceSum", ["next"], ["s"], keepdims=0), N("Add", ["g", "s"], ["f"])] if reads else []
    body = helper.make_graph(
        nodes, "body",
        [port("k", WHOLE, []), port("on", FLAG, []), port("h", F, [3]), port("n", WHOLE, []), port("table", F, shape)],
        [port("more", FLAG, []), port("f" if reads else "g", F, [3]), port("m", WHOLE, []), port("next", F, shape)],
    )  # fmt: skip
    constants = {"places": places, "one": np.array(1), "begin": np.array(first), "five": np.array(5),
                 "other": np.array([axis]), "x0": np.zeros(3, np.float32)}  # fmt: skip
    graph = helper.make_graph(
        [N("Loop", ["five", "", "x0", "begin", "t"], ["y", "end", "u"], body=body)], "g",
        [port("x", F, [3]), port("t", F, shape)], [port("y", F, [3]), port("end", WHOLE, []), port("u", F, shape)],
        [numpy_helper.from_array(a, n) for n, a in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def both(model: ModelProto) -> tuple[Scan, list[np.ndarray], list[np.ndarray]]:
    program = lower(load(model, {}))
    changed = without_counters(program)
    verify_program(changed)
    (scan,) = (c for c in changed.computes if isinstance(c, Scan))
    rng = np.random.default_rng(0)
    given = {t.name: rng.random(tuple(map(int, t.shape))).astype(np.float32) for t in program.inputs}
    return scan, list(evaluated(program, given).values()), list(evaluated(changed, given).values())


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("extent", "first"), [(5, 0), (8, 0), (8, 2), (8, 3)])
def test_what_steps_write_is_stacked(extent: int, first: int, axis: int) -> None:
    scan, before, after = both(writing(extent, first, axis))
    assert len(scan.carry) == 1 and len(scan.stacked) == 1
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)


def test_sums_that_wait_for_no_step_are_taken_at_once() -> None:
    """Of a recurrence its input's part: a product over all steps in front of the Scan."""
    body = helper.make_graph(
        [N("Gather", ["x", "k"], ["now"]), N("MatMul", ["now", "w"], ["a"]), N("MatMul", ["h", "u"], ["b"]),
         N("Add", ["a", "b"], ["c"]), N("Tanh", ["c"], ["g"]), N("Identity", ["on"], ["more"])], "body",
        [port("k", WHOLE, []), port("on", FLAG, []), port("h", F, [2, 4])],
        [port("more", FLAG, []), port("g", F, [2, 4]), port("g", F, [2, 4])],
    )  # fmt: skip
    rng = np.random.default_rng(1)
    constants = {"w": rng.random((3, 4)).astype(np.float32), "u": rng.random((4, 4)).astype(np.float32),
                 "n": np.array(6), "h0": np.zeros((2, 4), np.float32)}  # fmt: skip
    graph = helper.make_graph([N("Loop", ["n", "", "h0"], ["y", "ys"], body=body)], "g", [port("x", F, [6, 2, 3])],
                              [port("y", F, [2, 4]), port("ys", F, [6, 2, 4])],
                              [numpy_helper.from_array(a, n) for n, a in constants.items()])  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    scan, before, after = both(model)
    assert sum(isinstance(c, Reduce) for c in scan.body) == 1
    for one, other in zip(before, after, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("model", [writing(8, 4, 0), writing(8, 0, 0, reads=True)])
def test_what_is_read_or_written_beside_the_tensor_stays_carried(model: ModelProto) -> None:
    scan, before, after = both(model)
    assert len(scan.carry) == 2 and not scan.stacked  # the counter is gone
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
