"""Models that run in parts: results as long as the data says, branches and loops that the data decides, sequences,
optional values and strings at the border."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import tilewright
from tilewright import InputError, ModelError, Options, StagedModel, UnsupportedError

F, I64, B, S = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL, TensorProto.STRING
Ports = dict[str, Any]
N = helper.make_node


def value_info(name: str, about: Any) -> onnx.ValueInfoProto:
    if isinstance(about, onnx.TypeProto):
        return helper.make_value_info(name, about)
    return helper.make_tensor_value_info(name, *about)


def graph_of(nodes: list[onnx.NodeProto], inputs: Ports, outputs: Ports, **constants: Any) -> onnx.GraphProto:
    given = [onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items()]
    ports = [[value_info(n, about) for n, about in side.items()] for side in (inputs, outputs)]
    return helper.make_graph(nodes, "g", *ports, given)


def model_of(nodes: list[onnx.NodeProto], inputs: Ports, outputs: Ports, **constants: Any) -> onnx.ModelProto:
    graph = graph_of(nodes, inputs, outputs, **constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


@pytest.fixture
def compile_it(kernel_cache: Path) -> Callable[..., Any]:
    def run(model: onnx.ModelProto, **more: object) -> Any:
        return tilewright.compile(model, options=Options(cache_dir=kernel_cache, threads=1).override(**more))

    return run


def agree(model: Any, source: onnx.ModelProto, *inputs: Any) -> None:
    wanted = ReferenceEvaluator(source).run(None, dict(zip((p.name for p in source.graph.input), inputs, strict=True)))
    for got, want in zip(model(*inputs), wanted, strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize(
    "same", [N("Cast", ["n"], ["limit"], to=I64), N("Identity", ["n"], ["limit"])], ids=["Cast", "Identity"]
)
def test_a_number_by_another_name_decides(compile_it: Callable[..., Any], same: onnx.NodeProto) -> None:
    """A Cast to the type that is there already gives its input: the name before it is not known behind the cut."""
    nodes = [
        N("ReduceMax", ["x"], ["most"], keepdims=0),
        N("Cast", ["most"], ["whole"], to=I64),
        N("Add", ["whole", "one"], ["n"]),
        same,
        N("Range", ["zero", "limit", "one"], ["steps"]),
        N("Mul", ["steps", "steps"], ["y"]),
    ]
    source = model_of(nodes, {"x": (F, [5])}, {"y": (I64, [None])}, one=np.int64(1), zero=np.int64(0))
    model = compile_it(source)
    for most in (3, 7):
        agree(model, source, np.array([1, most, 0, 2, 1], np.float32))


def test_an_input_by_another_name_decides(compile_it: Callable[..., Any]) -> None:
    nodes = [
        N("Identity", ["n"], ["limit"]),
        N("Add", ["n", "one"], ["more"]),
        N("Range", ["zero", "limit", "one"], ["steps"]),
    ]
    source = model_of(
        nodes, {"n": (F, [])}, {"steps": (F, [None]), "more": (F, [])}, one=np.float32(1), zero=np.float32(0)
    )
    agree(compile_it(source), source, np.float32(4))


def test_what_the_data_counts(compile_it: Callable[..., Any]) -> None:
    nodes = [
        N("Relu", ["x"], ["r"]),
        N("NonZero", ["r"], ["places"]),
        N("Transpose", ["places"], ["t"]),
        N("GatherND", ["r", "t"], ["v"]),
        N("ReduceSum", ["v"], ["s"], keepdims=0),
    ]
    source = model_of(nodes, {"x": (F, [3, 5])}, {"t": (I64, None), "v": (F, None), "s": (F, None)})
    model = compile_it(source, fallback="error")
    assert isinstance(model, StagedModel)
    rng = np.random.default_rng(0)
    for _ in range(2):
        agree(model, source, rng.standard_normal((3, 5)).astype(np.float32))
    agree(model, source, -np.ones((3, 5), np.float32))
    counted = model.compilations
    agree(model, source, -np.ones((3, 5), np.float32))
    assert model.compilations == counted
    text = model.explain()
    assert text.startswith(f"the model: runs in parts; {counted} compiled so far, 2 in the last run\n  part 1: ")
    assert "then NonZero node 'places': how many elements it gives is known only at run time\n" in text
    assert len(model.profile(np.ones((3, 5), np.float32), repeat=1).calls) == len(model.calls)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("axis", "in_order"), [(None, 1), (0, 0), (1, 1)])
def test_unique(compile_it: Callable[..., Any], axis: int | None, in_order: int) -> None:
    about = {} if axis is None else {"axis": axis}
    node = N("Unique", ["x"], ["y", "i", "inverse", "counts"], sorted=in_order, **about)
    outputs = {"y": (F, None), "i": (I64, None), "inverse": (I64, None), "counts": (I64, None)}
    source = model_of([node], {"x": (F, [4, 3])}, outputs)
    model = compile_it(source, fallback="error")
    x = np.array([[1, 0, 1], [2, -1, 2], [1, 0, 1], [2, -1, 2]], np.float32)
    values = np.unique(x, True, True, True, axis=axis)
    if not in_order:
        order = np.argsort(values[1])
        inverse = np.argsort(order)[values[2].reshape(-1)]
        values = (np.take(values[0], order, axis or 0), values[1][order], inverse, values[3][order])
    for got, want in zip(model(x), values, strict=True):
        np.testing.assert_array_equal(got, np.reshape(want, got.shape))


@pytest.mark.parametrize("extent", [7, 5000])
def test_compress_of_run_time_data(compile_it: Callable[..., Any], extent: int) -> None:
    source = model_of([N("Compress", ["x", "c"], ["y"], axis=1)], {"x": (F, [2, extent]), "c": (B, [extent])},
                      {"y": (F, None)})  # fmt: skip
    rng = np.random.default_rng(extent)
    agree(compile_it(source), source, rng.standard_normal((2, extent)).astype(np.float32), rng.random(extent) > 0.9)


def test_boxes_that_overlap_are_dropped(compile_it: Callable[..., Any]) -> None:
    constants = {"most": np.array([3]), "overlap": np.array([0.4], np.float32), "least": np.array([0.2], np.float32)}
    source = model_of([N("NonMaxSuppression", ["boxes", "scores", *constants], ["y"])],
                      {"boxes": (F, [2, 9, 4]), "scores": (F, [2, 3, 9])}, {"y": (I64, None)}, **constants)  # fmt: skip
    model = compile_it(source, fallback="error")
    rng = np.random.default_rng(1)
    for _ in range(3):
        corner = rng.random((2, 9, 2)) * 4
        boxes = np.concatenate([corner, corner + 1 + rng.random((2, 9, 2))], -1).astype(np.float32)
        agree(model, source, boxes, rng.random((2, 3, 9)).astype(np.float32))


def branching() -> onnx.ModelProto:
    one = graph_of([N("Concat", ["x", "x"], ["a"], axis=0)], {}, {"a": (F, None)})
    other = graph_of([N("Neg", ["x"], ["b"])], {}, {"b": (F, None)})
    nodes = [
        N("ReduceSum", ["x"], ["s"], keepdims=0),
        N("Greater", ["s", "zero"], ["c"]),
        N("If", ["c"], ["y"], then_branch=one, else_branch=other),
        N("Mul", ["y", "y"], ["z"]),
    ]
    return model_of(nodes, {"x": (F, [300])}, {"z": (F, None)}, zero=np.float32(0))


def test_branches_of_different_shapes(compile_it: Callable[..., Any]) -> None:
    model = compile_it(branching())
    x = np.random.default_rng(2).random(300).astype(np.float32)
    for sign in (1, -1, 1, -1):
        agree(model, branching(), sign * x)
    assert model.compilations == 3  # the condition, and what follows each answer


def looping(*, stacks: bool, limited: bool) -> onnx.ModelProto:
    """Doubles while the sum is below a bound."""
    nodes = [
        N("Add", ["v", "v"], ["w"]),
        N("ReduceSum", ["w"], ["s"], keepdims=0),
        N("Less", ["s", "bound"], ["more"]),
    ]
    outputs = {"more": (B, []), "w": (F, [3])} | ({"s": (F, [])} if stacks else {})
    body = graph_of(nodes, {"k": (I64, []), "on": (B, []), "v": (F, [3])}, outputs)
    start = [N("ReduceMax", ["m"], ["count"], keepdims=0)] if limited else []
    loop = N("Loop", ["count" if limited else "", "", "x"], ["y", "sums"][: 1 + stacks], body=body)
    inputs = {"x": (F, [3]), "bound": (F, [])} | ({"m": (I64, [300])} if limited else {})
    return model_of([*start, loop], inputs, {"y": (F, [3])} | ({"sums": (F, None)} if stacks else {}))


@pytest.mark.parametrize(("stacks", "limited"), [(False, False), (True, True)])
def test_loops_that_the_data_ends(compile_it: Callable[..., Any], stacks: bool, limited: bool) -> None:
    model = compile_it(looping(stacks=stacks, limited=limited), fallback="error")
    for bound in (40, 4000):
        more = [np.arange(300) % 5] if limited else []
        results = model(np.ones(3, np.float32), np.array(bound, np.float32), *more)
        sums = [6 << k for k in range(20)]
        steps = next(k for k, total in enumerate(sums, 1) if total >= bound)
        steps = min(steps, 4) if limited else steps
        np.testing.assert_array_equal(results[0], np.full(3, 2.0**steps))
        if stacks:
            np.testing.assert_array_equal(results[1], sums[:steps])
    # what the data count rows of is not one model
    assert ("body of the loop or branch" if stacks else "in every step of Loop node 'y'") in model.explain()


def sequence_of(kind: int) -> onnx.TypeProto:
    return helper.make_sequence_type_proto(helper.make_tensor_type_proto(kind, None))


@pytest.mark.parametrize("target", ["cpu", "cuda-emulated"])
def test_a_loop_that_the_data_ends_inside_a_branch(compile_it: Callable[..., Any], target: str, tmp_path: Path) -> None:
    """Where the driver follows neither, both are followed from outside."""
    body = graph_of(
        [N("Add", ["a", "a"], ["b"]), N("ReduceMax", ["b"], ["m"], keepdims=0), N("Less", ["m", "limit"], ["go"])],
        {"i": (I64, []), "c": (B, []), "a": (F, [4])}, {"go": (B, []), "b": (F, [4])},
        limit=np.float32(100),
    )  # fmt: skip
    grown = graph_of([N("Loop", ["", "", "z"], ["t"], body=body)], {}, {"t": (F, [4])})
    plain = graph_of([N("Neg", ["z"], ["n"])], {}, {"n": (F, [4])})
    nodes = [
        N("Mul", ["x", "x"], ["z"]),
        N("ReduceSum", ["x"], ["s"], keepdims=0),
        N("Greater", ["s", "zero"], ["positive"]),
        N("If", ["positive"], ["r"], then_branch=grown, else_branch=plain),
        N("Add", ["r", "x"], ["y"]),
    ]
    source = model_of(nodes, {"x": (F, [4])}, {"y": (F, [4])}, zero=np.float32(0))
    model = compile_it(source, target=target)
    x = np.array([1, 2, 0.5, 3], np.float32)
    model.save(tmp_path / "saved")
    for each in (model, tilewright.load(tmp_path / "saved")):
        for given, doubled in ((x, 4), (-x, None), (x / 8, 10)):
            expected = (-(given**2) if doubled is None else given**2 * 2**doubled) + given
            np.testing.assert_allclose(each(given)[0], expected, rtol=1e-6)


def test_sequences_go_in_and_come_out(compile_it: Callable[..., Any]) -> None:
    nodes = [N("SequenceInsert", ["s", "x"], ["t"]), N("SequenceLength", ["t"], ["n"])]
    model = compile_it(model_of(nodes, {"s": sequence_of(F), "x": (F, [2])}, {"t": sequence_of(F), "n": (I64, [])}))
    assert repr(model) == (
        "<tilewright.StagedModel (s: sequence(float32[...]), x: float32[2]) -> (t: sequence(float32[...]), n: int64[])>"
    )
    x = np.ones(2, np.float32)
    for items in ([], [np.zeros(3, np.float32)], [np.zeros(3, np.float32), np.ones((1, 2), np.float32)]):
        found, length = model(items, x)
        assert length == len(items) + 1
        for got, want in zip(found, [*items, x], strict=True):
            np.testing.assert_array_equal(got, want)
    with pytest.raises(InputError, match="input 's' must be a list of arrays, not a ndarray"):
        model(x, x)
    with pytest.raises(InputError, match="input 's' must be float32, not float64"):
        model([np.zeros(3)], x)


def test_optional_values(compile_it: Callable[..., Any]) -> None:
    optional = helper.make_optional_type_proto(helper.make_tensor_type_proto(F, [2]))
    has = compile_it(model_of([N("OptionalHasElement", ["o"], ["y"])], {"o": optional}, {"y": (B, [])}))
    assert [bool(has(value)[0]) for value in (None, np.zeros(2, np.float32))] == [False, True]
    get = compile_it(model_of([N("OptionalGetElement", ["o"], ["y"])], {"o": optional}, {"y": (F, [2])}))
    np.testing.assert_array_equal(get(np.ones(2, np.float32))[0], [1, 1])
    with pytest.raises(ModelError, match="the optional value that it reads holds nothing"):
        get(None)


def strings() -> onnx.ModelProto:
    nodes = [
        N("StringConcat", ["a", "b"], ["c"]),
        N("Equal", ["c", "wanted"], ["e"]),
        N("Cast", ["e"], ["f"], to=F),
        N("Mul", ["f", "x"], ["y"]),
    ]
    return model_of(nodes, {"a": (S, [2]), "b": (S, [2]), "x": (F, [2])}, {"y": (F, [2]), "c": (S, [2])},
                    wanted=np.array(["ab", "xx"], dtype=object))  # fmt: skip


def test_strings_run_outside_and_it_is_said(compile_it: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    model = compile_it(strings())
    with caplog.at_level(logging.WARNING, "tilewright"):
        for _ in range(2):
            y, c = model(np.array(["a", "c"]), np.array(["b", "d"]), np.array([3, 4], np.float32))
    assert y.tolist() == [3, 0] and c.tolist() == ["ab", "cd"]
    said = [r.message for r in caplog.records if not r.message.startswith("compiled ")]
    assert said == [f"the model: {op} runs outside of native code, by ONNX's reference evaluator"
                    for op in ("StringConcat node 'c'", "Equal node 'e'")]  # fmt: skip
    assert "then StringConcat node 'c': it is about strings or images, for which there is no native" in model.explain()
    with pytest.raises(UnsupportedError, match="output 'c' has element type string, which is not supported"):
        compile_it(strings(), fallback="error")


def test_variants_of_a_part_are_bounded(compile_it: Callable[..., Any]) -> None:
    source = model_of([N("NonZero", ["x"], ["y"])], {"x": (F, [4])}, {"y": (I64, None)})
    model = compile_it(source, variants=2)
    for count in (1, 2, 3, 1):
        agree(model, source, (np.arange(4) < count).astype(np.float32))
    assert model.compilations == 5  # the count, three lengths, and the first of them again


def test_an_answer_that_leaves_nothing_to_compute_is_not_the_next_ones(compile_it: Callable[..., Any]) -> None:
    """Of no place all that follows is known; the node that asks next is then the first one that is needed."""
    nodes = [
        N("NonZero", ["x"], ["places"]),
        N("Transpose", ["places"], ["rows"]),
        N("GatherND", ["x", "rows"], ["y"]),
        N("NonZero", ["v"], ["others"]),
    ]
    source = model_of(nodes, {"x": (F, [5]), "v": (F, [4])}, {"y": (F, None), "others": (I64, None)})
    model = compile_it(source, fallback="error")
    for x in (np.zeros(5, np.float32), np.array([0, 2, 0, 3, 0], np.float32)):
        agree(model, source, x, np.array([1, 0, 2, 3], np.float32))


def test_what_is_known_before_a_cut_is_known_after_it(compile_it: Callable[..., Any]) -> None:
    """Constants that nodes make, and values that a loop's body captures, on both sides of a part's end."""
    body = graph_of([N("Add", ["v", "shifted"], ["w"]), N("ReduceSum", ["w"], ["s"], keepdims=0),
                     N("Less", ["s", "bound"], ["more"])], {"k": (I64, []), "on": (B, []), "v": (F, [2])},
                    {"more": (B, []), "w": (F, [2])})  # fmt: skip
    nodes = [
        N("Neg", ["one"], ["minus"]),
        N("Sub", ["x", "minus"], ["shifted"]),
        N("NonZero", ["x"], ["places"]),
        N("Loop", ["", "", "x"], ["y"], body=body),
        N("Mul", ["y", "minus"], ["z"]),
    ]
    source = model_of(nodes, {"x": (F, [2])}, {"z": (F, [2]), "places": (I64, None)}, one=np.ones(2, np.float32),
                      bound=np.float32(20))  # fmt: skip
    z, places = compile_it(source)(np.array([3, 0], np.float32))
    np.testing.assert_array_equal(z, [-19, -4])  # 3, 7, 11, 15 and 0, 1, 2, 3: then 19 + 4 is over the bound
    np.testing.assert_array_equal(places, [[0]])


def counted(nodes: list[onnx.NodeProto], outputs: Ports, **constants: Any) -> onnx.ModelProto:
    """What nodes make of the rows `y` of `x` that the data keeps."""
    first = N("Compress", ["x", "c"], ["y"], axis=0)
    return model_of([first, *nodes], {"x": (F, [20, 4]), "c": (B, [20])}, outputs, **constants)


def rows_kept(count: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(count)
    return rng.standard_normal((20, 4)).astype(np.float32), rng.permutation(20) < count


def test_ever_other_counts_are_compiled_for_a_few_times(compile_it: Callable[..., Any]) -> None:
    nodes = [N("ReduceMean", ["y", "none"], ["m"]), N("Mul", ["y", "m"], ["z"]), N("Size", ["z"], ["size"])]
    source = counted(nodes, {"z": (F, None), "size": (I64, None)}, none=np.array([0]))
    model = compile_it(source, fallback="error")
    for count in (5, *range(9, 21)):
        agree(model, source, *rows_kept(count))
    assert model.compilations == 4  # the count; five; up to 16, up to 20
    assert "kernel calls, for 17 to 20 at run time" in model.explain()


@pytest.mark.slow
def test_attention_over_what_is_kept(compile_it: Callable[..., Any]) -> None:
    nodes = [
        N("Transpose", ["y"], ["t"]),
        N("MatMul", ["y", "t"], ["p"]),
        N("Softmax", ["p"], ["s"]),
        N("MatMul", ["s", "y"], ["z"]),
    ]
    source = counted(nodes, {"z": (F, None), "t": (F, None)})
    model = compile_it(source, fallback="error")
    for _ in range(2):
        for count in (12, 0, 1, 2, *range(3, 21)):
            agree(model, source, *rows_kept(count))
        # the count; 12, 0, 1 and 2 by themselves; then up to 4, 8, 16 and 20
        assert model.compilations == 9


def test_where_counts_differ_in_more_than_a_number(
    compile_it: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    nodes = [N("Slice", ["y", "zero", "six"], ["z"])]
    source = counted(nodes, {"z": (F, None)}, zero=np.array([0]), six=np.array([6]))
    model = compile_it(source)
    with caplog.at_level(logging.INFO, "tilewright"):
        for count in (12, 5, 6, 7, 8):
            agree(model, source, *rows_kept(count))
    assert model.compilations == 4  # the count, 12; five and six, seven and eight
    assert "is not compiled for all numbers of elements from 5 to 8 at once: " in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cpu", "cuda-emulated"])
def test_two_counts_and_a_number_of_the_largest(compile_it: Callable[..., Any], target: str) -> None:
    nodes = [
        N("ReduceMax", ["y", "one"], ["m"], keepdims=0),
        N("Greater", ["m", "zero"], ["g"]),
        N("Compress", ["y", "g"], ["z"], axis=0),
        N("Cast", ["g"], ["gi"], to=I64),
        N("ReduceSum", ["gi"], ["k"]),
        N("TopK", ["m", "k"], ["top", "at"]),
        N("Concat", ["y", "z"], ["both"], axis=0),
        N("ReduceMean", ["both", "none"], ["mean"]),
    ]
    outputs = {"both": (F, None), "mean": (F, None), "top": (F, None), "at": (I64, None)}
    source = counted(nodes, outputs, one=np.array([1]), none=np.array([0]), zero=np.float32(0.9))
    model = compile_it(source, fallback="error", target=target)
    for count in (12, 1, 2, *range(4, 21)):
        agree(model, source, *rows_kept(count))
    assert model.compilations <= 40


@pytest.mark.slow
def test_a_loop_whose_values_grow(compile_it: Callable[..., Any]) -> None:
    """Each step adds a row, until there are enough."""
    nodes = [
        N("Concat", ["v", "x"], ["w"], axis=0),
        N("ReduceSum", ["w"], ["s"], keepdims=0),
        N("Less", ["s", "bound"], ["more"]),
    ]
    body = graph_of(nodes, {"k": (I64, []), "on": (B, []), "v": (F, None)}, {"more": (B, []), "w": (F, None)})
    loop = N("Loop", ["", "", "x"], ["y"], body=body)
    source = model_of([loop], {"x": (F, [1, 3]), "bound": (F, [])}, {"y": (F, None)})
    model = compile_it(source)
    (y,) = model(np.ones((1, 3), np.float32), np.float32(100))
    np.testing.assert_array_equal(y, np.ones((34, 3)))
    # the body: for 1 and 2 rows, then up to 4, 8, 16, 32 and 64
    assert "runs in parts; 7 compiled so far" in model.explain()
