"""How far tensors are needed where a run tells the extents of the outputs, and loops that end there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import tilewright
from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.ir.analysis.live import needed
from tilewright.ir.forms.expr import loads
from tilewright.ir.forms.graph import Form, Graph, Part, Room
from tilewright.ir.forms.loops import For, ForKind, If
from tilewright.ir.text.parse import parse_program
from tilewright.ir.text.text import loops_text, program_text
from tilewright.ops.lower import lower
from tilewright.options import Options
from tilewright.target import machine

N = helper.make_node
OPEN = Form(0, (1,))


def graph(nodes: list[onnx.NodeProto], **constants: np.ndarray) -> Graph:
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 8]) for name in ("x", "y")]
    given = [numpy_helper.from_array(a, n) for n, a in constants.items()]
    model = helper.make_model(
        helper.make_graph(nodes, "g", ports[:1], [helper.make_empty_tensor_value_info("y")], given),
        opset_imports=[helper.make_opsetid("", 17)],
    )
    made = load(model, {"n": 64})
    return replace(made, part=Part(rooms=(Room(9, 64),), forms={"x": (OPEN, Form(8))}))


def ends(nodes: list[onnx.NodeProto], **constants: np.ndarray) -> dict[str, list[object]]:
    found = needed(lower(graph(nodes, **constants)))
    return {t.name: [None if e is None else set(e) for e in axes] for t, axes in found.items()}


def test_rows_are_needed_as_far_as_the_output_has_them() -> None:
    found = ends([N("Relu", ["x"], ["r"]), N("Neg", ["r"], ["y"])])
    assert found["r"] == [{OPEN}, None] and found["y"] == [{OPEN}, None]


def test_a_sum_over_rows_needs_those_that_there_are() -> None:
    found = ends([N("Relu", ["x"], ["r"]), N("ReduceSum", ["r", "a"], ["y"])], a=np.array([0]))
    assert found["r"] == [{OPEN}, None]


def test_rows_that_are_moved_are_counted_where_they_are() -> None:
    nodes = [N("Relu", ["x"], ["r"]), N("Slice", ["r", "two", "end"], ["y"])]
    assert ends(nodes, two=np.array([2]), end=np.array([1 << 40]))["r"] == [{OPEN}, None]
    flat = [N("Relu", ["x"], ["r"]), N("Reshape", ["r", "flat"], ["y"])]
    assert ends(flat, flat=np.array([-1]))["r"] == [{OPEN}, None]


def test_what_comes_behind_a_past_of_any_length_is_needed_as_far_as_there_is_of_it() -> None:
    ports = [helper.make_tensor_value_info(v, TensorProto.FLOAT, [n, 8]) for v, n in (("past", "before"), ("x", "n"))]
    nodes = [N("Relu", ["x"], ["r"]), N("Concat", ["past", "r"], ["c"], axis=0), N("Neg", ["c"], ["y"])]
    output = [helper.make_empty_tensor_value_info("y")]
    model = helper.make_model(helper.make_graph(nodes, "g", ports, output), opset_imports=[helper.make_opsetid("", 17)])
    past, new = Form(0, (1,)), Form(0, (0, 1))
    forms = {"past": (past, Form(8)), "x": (new, Form(8))}
    part = Part(rooms=(Room(5, 40), Room(9, 64)), forms=forms)
    program = lower(replace(load(model, {"before": 40, "n": 64}), part=part))
    found = {t.name: axes for t, axes in needed(program).items()}
    assert found["r"] == (frozenset({new, Form(1)}), None)  # an index is kept at 0 or more
    assert found["c"] == (frozenset({Form(0, (1, 1))}), None)


def test_what_data_choose_is_needed_whole() -> None:
    cast = N("Cast", ["x"], ["i"], to=TensorProto.INT64)
    assert ends([N("Relu", ["x"], ["r"]), cast, N("GatherElements", ["r", "i"], ["y"])])["r"] == [None, None]


def test_programs_say_how_far_outputs_go_as_text() -> None:
    program = lower(graph([N("Relu", ["x"], ["y"])]))
    text = program_text(program)
    assert "ends (0, 1) (8)" in text
    assert program_text(parse_program(text, {})) == text


def test_loops_end_with_what_a_run_needs() -> None:
    weight = np.ones((8, 32), np.float32)
    made = graph([N("MatMul", ["x", "w"], ["p"]), N("Relu", ["p"], ["y"])], w=weight)
    stopped = build(made, machine("neoverse_n1"), Options(stop_after="loops"))
    assert stopped.loops is not None
    assert "numbers[0]" in loops_text(stopped.loops)
    plain = build(replace(made, part=None), machine("neoverse_n1"), Options(stop_after="loops"))
    assert plain.loops is not None and "numbers" not in loops_text(plain.loops)


def test_blocks_of_a_gpu_of_which_nothing_is_needed_do_nothing() -> None:
    weight = np.ones((8, 32), np.float32)
    made = graph([N("MatMul", ["x", "w"], ["p"]), N("Softmax", ["p"], ["y"])], w=weight)
    made = replace(made, inputs=(replace(made.inputs[0], shape=(4096, 8)),),
                   part=Part(rooms=(Room(9, 4096),), forms={"x": (OPEN, Form(8))}))  # fmt: skip
    stopped = build(made, machine("h200"), Options(stop_after="loops"))
    assert stopped.loops is not None
    for kernel in stopped.loops.kernels:
        (blocks,) = kernel.body
        assert isinstance(blocks, For) and blocks.kind is ForKind.BLOCK
        (needed,) = blocks.body
        assert isinstance(needed, If) and blocks.axis in needed.condition.axes
        assert any(node.source.name == "numbers" for node in loads(needed.condition))


def test_a_gpu_leaves_out_what_lies_behind(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((8, 32)).astype(np.float32)
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", m]) for name, m in (("x", 8), ("y", 32))]
    nodes = [N("MatMul", ["x", "w"], ["p"]), N("Softmax", ["p"], ["y"], axis=0)]
    own = helper.make_graph(nodes, "g", ports[:1], ports[1:], [numpy_helper.from_array(weight, "w")])
    model = helper.make_model(own, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    options = Options(target="cuda-emulated", cache_dir=tmp_path)
    fast = tilewright.compile(model, dynamic={"n": (65, 300)}, options=options)
    for rows in (65, 131, 300):
        x = np.random.default_rng(rows).standard_normal((rows, 8)).astype(np.float32)
        wide = np.exp(x.astype(np.float64) @ weight)
        (found,) = fast(x)
        np.testing.assert_allclose(found, wide / wide.sum(0), rtol=1e-4, atol=1e-7)
