"""The ONNX frontend: binding of shapes, constants in all their places, functions, and errors that say what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tilewright import ops
from tilewright.errors import ModelError, OptionError, TilewrightError, UnsupportedError
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms import dtypes
from tilewright.ir.meaning.interpret import evaluate

FLOAT = TensorProto.FLOAT


def info(name: str, shape: list[int | str | None] | None = None, kind: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def model_of(
    nodes, inputs, outputs=("y",), initializers=(), version: int = 17, functions=(), domains=()
) -> onnx.ModelProto:
    outs = [info(o) for o in outputs]
    graph = helper.make_graph(list(nodes), "g", list(inputs), outs, list(initializers))
    imports = [helper.make_opsetid("", version), *(helper.make_opsetid(d, 1) for d in domains)]
    return helper.make_model(graph, opset_imports=imports, functions=list(functions), ir_version=9)


def add(a: str = "x", b: str = "z") -> onnx.NodeProto:
    return helper.make_node("Add", [a, b], ["y"], name="sum")


def outputs_of(model, inputs) -> dict[str, np.ndarray]:
    program = ops.lower(load(model))
    found = evaluate(program, inputs)
    return {n: found[t.name] for n, t in zip(program.output_names, program.outputs, strict=True)}


class TestReading:
    def test_path_bytes_and_proto_give_the_same(self, tmp_path: Path) -> None:
        model = model_of([add("x", "x")], [info("x", [2, 3])])
        path = tmp_path / "m.onnx"
        onnx.save(model, path)
        graphs = [load(path), load(str(path)), load(path.read_bytes()), load(model)]
        assert all(g == graphs[0] for g in graphs)
        assert graphs[0].inputs[0].shape == (2, 3) and graphs[0].inputs[0].dtype is dtypes.float32
        assert graphs[0].nodes[0].version == 17

    def test_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="does not exist"):
            load(tmp_path / "none.onnx")

    def test_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="is a folder"):
            load(tmp_path)

    @pytest.mark.parametrize("data", [b"", b"not a model at all", b"\x08\x07" * 5, bytes(range(256))])
    def test_other_bytes(self, data: bytes) -> None:
        with pytest.raises(ModelError, match="not an ONNX model"):
            load(data)

    def test_a_cut_file_is_an_error_of_one_line(self) -> None:
        weights = numpy_helper.from_array(np.arange(600, dtype=np.float32), "z")
        data = model_of([add()], [info("x", [600])], initializers=[weights]).SerializeToString()
        for cut in range(1, len(data), 97):
            with pytest.raises(TilewrightError) as error:
                load(data[:cut])
            assert "\n" not in str(error.value)

    def test_external_data(self, tmp_path: Path) -> None:
        weights = np.arange(300, dtype=np.float32)
        model = model_of([add()], [info("x", [300])], initializers=[numpy_helper.from_array(weights, "z")])
        path = tmp_path / "m.onnx"
        onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
        np.testing.assert_array_equal(load(path).constants["z"], weights)
        (tmp_path / "weights.bin").unlink()
        with pytest.raises(ModelError, match="external data"):
            load(path)


class TestConstants:
    def test_an_initializer_that_is_also_an_input_is_a_constant(self) -> None:
        weights = numpy_helper.from_array(np.ones(3, np.float32), "z")
        graph = load(model_of([add()], [info("x", [3]), info("z", [3])], initializers=[weights]))
        assert [v.name for v in graph.inputs] == ["x"]
        assert list(graph.constants) == ["z"]

    @pytest.mark.parametrize(
        ("attribute", "value", "expected"),
        [
            ("value_float", 2.5, np.float32(2.5)),
            ("value_floats", [1.0, 2.0, 3.0], np.asarray([1, 2, 3], np.float32)),
            ("value", numpy_helper.from_array(np.asarray([4, 5, 6], np.float32)), np.asarray([4, 5, 6], np.float32)),
        ],
    )
    def test_constant_nodes(self, attribute, value, expected) -> None:
        node = helper.make_node("Constant", [], ["z"], **{attribute: value})
        x = np.asarray([1, 2, 3], np.float32)
        found = outputs_of(model_of([node, add()], [info("x", [3])]), {"x": x})
        np.testing.assert_array_equal(found["y"], x + expected)

    def test_an_output_may_be_an_input_or_a_constant(self) -> None:
        weights = numpy_helper.from_array(np.asarray([7, 8], np.float32), "z")
        nodes = [helper.make_node("Identity", ["x"], ["a"]), helper.make_node("Identity", ["z"], ["b"])]
        model = model_of(nodes, [info("x", [2])], ["a", "b", "a"][:2], initializers=[weights])
        found = outputs_of(model, {"x": np.asarray([1, 2], np.float32)})
        np.testing.assert_array_equal(found["a"], [1, 2])
        np.testing.assert_array_equal(found["b"], [7, 8])


class TestShapes:
    def model(self) -> onnx.ModelProto:
        return model_of([add()], [info("x", ["batch", 3]), info("z", ["batch", 3])])

    def test_by_dimension(self) -> None:
        assert [v.shape for v in load(self.model(), {"batch": 5}).inputs] == [(5, 3), (5, 3)]

    def test_a_full_shape_binds_the_names_in_it(self) -> None:
        assert [v.shape for v in load(self.model(), {"x": (4, 3)}).inputs] == [(4, 3), (4, 3)]

    def test_unbound(self) -> None:
        with pytest.raises(ModelError) as error:
            load(self.model())
        assert str(error.value) == (
            "input 'x' has a dynamic dimension 'batch'; pass shapes={'x': [..., 3]} or shapes={'batch': ...}"
        )

    def test_unnamed(self) -> None:
        with pytest.raises(ModelError) as error:
            load(model_of([add("x", "x")], [info("x", [2, None])]))
        assert str(error.value) == "input 'x' has a dynamic dimension number 1; pass shapes={'x': [2, ...]}"

    def test_no_shape_at_all(self) -> None:
        with pytest.raises(ModelError, match="has no shape; pass shapes="):
            load(model_of([add("x", "x")], [info("x")]))
        assert load(model_of([add("x", "x")], [info("x")]), {"x": [2, 2]}).inputs[0].shape == (2, 2)

    @pytest.mark.parametrize(
        ("shapes", "text"),
        [
            ({"w": [1, 3]}, "shapes: the model has no input 'w'; it has 'x', 'z'"),
            ({"time": 3}, "shapes: the model has no dimension 'time'; it has 'batch'"),
            ({"x": [1, 2, 3]}, "shapes: input 'x' has 2 dimensions, not 3: [1, 2, 3]"),
            ({"x": [1, 3], "z": [2, 3]}, "shapes: dimension 'batch' is 1 and 2 at once"),
            ({"batch": -1}, "shapes: dimension 'batch' cannot be -1"),
        ],
    )
    def test_wrong(self, shapes, text: str) -> None:
        with pytest.raises(OptionError) as error:
            load(self.model(), shapes)
        assert str(error.value) == text


class TestOrder:
    """Nodes may stand before what they read, as tools leave them that do not see what bodies read."""

    def test_a_body_reads_what_is_made_later(self) -> None:
        branches = {
            f"{which}_branch": helper.make_graph([helper.make_node(op, ["late"], [op])], which, [], [info(op)])
            for which, op in (("then", "Neg"), ("else", "Abs"))
        }
        nodes = [helper.make_node("If", ["c"], ["y"], **branches), helper.make_node("Exp", ["x"], ["late"])]
        x = np.array([1, 2], np.float32)
        for condition, want in ((True, -np.exp(x)), (False, np.exp(x))):
            given = [numpy_helper.from_array(np.array(condition), "c")]
            found = outputs_of(model_of(nodes, [info("x", [2])], initializers=given), {"x": x})
            np.testing.assert_allclose(found["y"], want, rtol=1e-6)

    def test_what_is_in_order_stays_and_the_rest_moves_least(self) -> None:
        chain = [helper.make_node("Neg", [a], [b]) for a, b in ("xa", "ab", "bc", "cy")]
        for order, want in ((range(4), "abcy"), ((0, 2, 3, 1), "abcy"), ((3, 2, 1, 0), "abcy")):
            graph = load(model_of([chain[k] for k in order], [info("x", [2])]))
            assert "".join(node.outputs[0] for node in graph.nodes) == want

    def test_inside_a_body(self) -> None:
        body = [helper.make_node("Neg", ["a"], ["b"]), helper.make_node("Exp", ["x"], ["a"])]
        branch = helper.make_graph(body, "branch", [], [info("b")])
        nodes = [helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)]
        given = [numpy_helper.from_array(np.array(True), "c")]
        found = outputs_of(model_of(nodes, [info("x", [2])], initializers=given), {"x": np.zeros(2, np.float32)})
        np.testing.assert_array_equal(found["y"], [-1, -1])

    def test_a_circle(self) -> None:
        nodes = [helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Neg", ["a"], ["b"]), add("a", "b")]
        with pytest.raises(ModelError, match="its input 'b' is not defined before it"):
            load(model_of(nodes, [info("x", [1])]))


class TestInvalid:
    def test_undefined_name(self) -> None:
        with pytest.raises(ModelError, match="Add node 'sum': its input 'nowhere' is not defined before it"):
            load(model_of([add("x", "nowhere")], [info("x", [1])]))

    def test_defined_twice(self) -> None:
        with pytest.raises(ModelError, match="its output 'y' is defined twice"):
            load(model_of([add("x", "x"), add("x", "x")], [info("x", [1])]))

    def test_output_of_nothing(self) -> None:
        with pytest.raises(ModelError, match="output 'w' is not defined"):
            load(model_of([add("x", "x")], [info("x", [1])], ["w"]))

    def test_wrong_number_of_inputs(self) -> None:
        with pytest.raises(ModelError, match="Add node 'sum' is invalid"):
            load(model_of([helper.make_node("Add", ["x"], ["y"], name="sum")], [info("x", [1])]))

    def test_shapes_that_do_not_fit(self) -> None:
        graph = load(model_of([add()], [info("x", [2]), info("z", [3])]))
        with pytest.raises(ModelError) as error:
            ops.lower(graph)
        assert str(error.value) == "Add node 'sum': shapes [2], [3] do not broadcast"

    def test_attributes_that_do_not_fit(self) -> None:
        node = helper.make_node("Trilu", ["x"], ["y"], name="triangle")
        with pytest.raises(ModelError) as error:
            ops.lower(load(model_of([node], [info("x", [2])], version=14)))
        assert str(error.value).startswith("Trilu node 'triangle' does not fit its inputs or attributes: ")

    def test_strings(self) -> None:
        with pytest.raises(UnsupportedError, match="element type string"):
            load(model_of([add("x", "x")], [info("x", [2], TensorProto.STRING)]))


class TestFunctions:
    def test_local_functions_are_inlined(self) -> None:
        body = [helper.make_node("Mul", ["a", "a"], ["s"]), helper.make_node("Add", ["s", "a"], ["r"])]
        function = helper.make_function("own", "Twist", ["a"], ["r"], body, [helper.make_opsetid("", 17)])
        node = helper.make_node("Twist", ["x"], ["y"], domain="own")
        model = model_of([node], [info("x", [3])], functions=[function], domains=["own"])
        x = np.asarray([1, 2, 3], np.float32)
        np.testing.assert_array_equal(outputs_of(model, {"x": x})["y"], x * x + x)

    def test_an_operator_defined_by_others_is_written_out(self) -> None:
        assert ops.find("SoftmaxCrossEntropyLoss") is None
        node = helper.make_node("SoftmaxCrossEntropyLoss", ["x", "t"], ["y"], reduction="none")
        model = model_of([node], [info("x", [3, 5]), info("t", [3], TensorProto.INT64)], version=13)
        x = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
        t = np.asarray([1, 4, 0])
        expected = -np.log(np.exp(x) / np.exp(x).sum(1, keepdims=True))[np.arange(3), t]
        np.testing.assert_allclose(outputs_of(model, {"x": x, "t": t})["y"], expected, rtol=1e-5)


class TestControl:
    def branch(self, op: str, name: str) -> onnx.GraphProto:
        return helper.make_graph([helper.make_node(op, ["x"], [name])], name, [], [info(name)])

    def model(self, initializers=()) -> onnx.ModelProto:
        node = helper.make_node(
            "If", ["c"], ["y"], then_branch=self.branch("Neg", "t"), else_branch=self.branch("Abs", "e")
        )
        inputs = [info("x", [3]), info("c", [], TensorProto.BOOL)]
        return model_of([node], inputs, initializers=initializers)

    @pytest.mark.parametrize("truth", [True, False])
    def test_a_known_condition_leaves_one_branch(self, truth: bool) -> None:
        constant = numpy_helper.from_array(np.asarray(truth), "c")
        program = ops.lower(load(self.model([constant])))
        assert len(program.computes) == 1

    @pytest.mark.parametrize("truth", [True, False])
    def test_an_unknown_condition_selects(self, truth: bool) -> None:
        x = np.asarray([-1, 2, -3], np.float32)
        found = outputs_of(self.model(), {"x": x, "c": np.asarray(truth)})
        np.testing.assert_array_equal(found["y"], -x if truth else np.abs(x))


def test_dimensions_without_a_name_are_not_tied(add_model: Callable[..., onnx.ModelProto]) -> None:
    for name in ("?", ""):
        open_model = add_model(shape=(name, name))
        graph = load(open_model, {"x": [48, 192], "y": [48, 1]})
        assert [v.shape for v in graph.inputs] == [(48, 192), (48, 1)]
    with pytest.raises(ModelError, match="input 'x' has a dynamic dimension number 0; pass shapes="):
        load(add_model(shape=("?", "?")))
    with pytest.raises(OptionError, match="dimension 'n' is 48 and 192 at once"):
        load(add_model(shape=("n", "n")), {"x": [48, 192]})
