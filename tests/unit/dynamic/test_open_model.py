"""Models whose shapes a call decides: compiled for what they are given, found again, bounded, and never silent."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from math import inf
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import tilewright
from tilewright import InputError, Model, ModelError, OpenModel, OptionError, Options
from tilewright.calls import progress
from tilewright.cli.main import main
from tilewright.errors import UndecidedError
from tilewright.frontend.onnx.model import load
from tilewright.ops.lower import lower

F, I64 = TensorProto.FLOAT, TensorProto.INT64
Shape = list[int | str | None] | None


def model_of(nodes: list[onnx.NodeProto], inputs: dict[str, tuple[int, Shape]], outputs: dict[str, tuple[int, Shape]]):
    ports = [[helper.make_tensor_value_info(n, *about) for n, about in side.items()] for side in (inputs, outputs)]
    graph = helper.make_graph(nodes, "g", *ports)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def product() -> onnx.ModelProto:
    shapes = {"x": (F, ["b", 4]), "y": (F, [4, "n"]), "r": (F, ["n"])}
    nodes = [helper.make_node("MatMul", ["x", "y"], ["p"]), helper.make_node("Add", ["p", "r"], ["z"])]
    return model_of(nodes, shapes, {"z": (F, ["b", "n"])})


def reshape() -> onnx.ModelProto:
    return model_of(
        [helper.make_node("Reshape", ["x", "s"], ["z"])], {"x": (F, [2, 6]), "s": (I64, [2])}, {"z": (F, None)}
    )


def product_inputs(b: int, n: int) -> list[np.ndarray]:
    rng = np.random.default_rng(b * 100 + n)
    return [rng.standard_normal(s).astype(np.float32) for s in ((b, 4), (4, n), (n,))]


@pytest.fixture
def compile_it(kernel_cache: Path) -> Callable[..., OpenModel]:
    def run(model: object, **more: object) -> OpenModel:
        options = Options(cache_dir=kernel_cache, threads=1).override(**more)
        made = tilewright.compile(model, options=options)  # type: ignore[arg-type]
        assert isinstance(made, OpenModel)
        return made

    return run


def test_a_call_compiles_and_the_next_one_finds_it(compile_it: Callable[..., OpenModel]) -> None:
    model = compile_it(product())
    assert (
        repr(model)
        == "<tilewright.OpenModel (x: float32[b, 4], y: float32[4, n], r: float32[n]) -> (z: float32[b, n])>"
    )
    assert model.variants == () and model.compilations == 0
    for b, n in ((2, 3), (5, 3), (2, 3), (5, 3)):
        x, y, r = product_inputs(b, n)
        np.testing.assert_allclose(model(x, y, r)[0], x @ y + r, rtol=1e-5)
        np.testing.assert_allclose(model.run({"x": x, "y": y, "r": r})["z"], x @ y + r, rtol=1e-5)
        out = np.empty((b, n), np.float32)
        model.run_into([x, y, r], [out])
        np.testing.assert_allclose(out, x @ y + r, rtol=1e-5)
    assert model.compilations == 2
    assert [v.shapes["x"] for v in model.variants] == [(2, 4), (5, 4)]
    assert len(model.profile(x, y, r, repeat=1).calls) == len(model.calls)


def test_shapes_settle_a_part(compile_it: Callable[..., OpenModel], kernel_cache: Path) -> None:
    options = Options(cache_dir=kernel_cache, threads=1)
    part = tilewright.compile(product(), shapes={"n": 3}, options=options)
    assert [str(p) for p in part.inputs] == ["x: float32[b, 4]", "y: float32[4, 3]", "r: float32[3]"]
    with pytest.raises(InputError, match=r"input 'y' must have shape \(4, 3\), not \(4, 2\)"):
        part(*product_inputs(2, 2))
    whole = tilewright.compile(product(), shapes={"n": 3, "b": 2}, options=options)
    assert isinstance(whole, Model)


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        (((2, 4), (4, 3), (2,)), "dimension 'n' is 3 in input 'y' and 2 in input 'r'"),
        (((2, 5), (4, 3), (3,)), "input 'x' must have shape (b, 4), not (2, 5)"),
        (((2,), (4, 3), (3,)), "input 'x' must have shape (b, 4), not (2,)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    compile_it: Callable[..., OpenModel], shapes: tuple[tuple[int, ...], ...], text: str
) -> None:
    with pytest.raises(InputError) as caught:
        compile_it(product())(*(np.zeros(s, np.float32) for s in shapes))
    assert str(caught.value) == text


def test_wrong_arguments_are_refused_as_ever(compile_it: Callable[..., OpenModel]) -> None:
    model = compile_it(product())
    x, y, r = product_inputs(2, 3)
    with pytest.raises(InputError, match="input 'r' is missing"):
        model(x, y)
    with pytest.raises(InputError, match="did you mean 'x'"):
        model.run({"xx": x, "y": y, "r": r})
    with pytest.raises(InputError, match="must be float32, not float64"):
        model(x.astype(np.float64), y, r)


def test_nameless_dimensions_are_not_tied(compile_it: Callable[..., OpenModel]) -> None:
    model = compile_it(model_of([helper.make_node("Relu", ["x"], ["z"])], {"x": (F, ["?", "?"])}, {"z": (F, None)}))
    assert model(np.ones((3, 5), np.float32))[0].shape == (3, 5)
    rank_open = compile_it(model_of([helper.make_node("Neg", ["x"], ["z"])], {"x": (F, None)}, {"z": (F, None)}))
    for shape in ((), (4,), (2, 1, 3)):
        assert rank_open(np.ones(shape, np.float32))[0].shape == shape


def test_values_decide_shapes(compile_it: Callable[..., OpenModel]) -> None:
    model = compile_it(reshape())
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    for shape in ((3, 4), (4, -1), (3, 4), (1, 12)):
        np.testing.assert_array_equal(model(x, np.array(shape))[0], x.reshape(shape))
    assert [v.values["s"].tolist() for v in model.variants] == [[4, -1], [3, 4], [1, 12]]
    assert [p.name for p in model.prepare(x, np.array([3, 4])).inputs] == ["x"]  # type: ignore[attr-defined]
    with pytest.raises(ModelError, match=r"shape \[2, 6\] cannot become \[5, 4\]"):
        model(x, np.array([5, 4]))
    with pytest.raises(InputError, match="input 's' must be int64, not int32"):
        model(x, np.array([2, 6], np.int32))


def test_values_reach_through_what_is_computed(compile_it: Callable[..., OpenModel]) -> None:
    """The target shape is made of two inputs, one of them after arithmetic."""
    nodes = [
        helper.make_node("Mul", ["k", "k"], ["kk"]),
        helper.make_node("Concat", ["kk", "m"], ["s"], axis=0),
        helper.make_node("Expand", ["x", "s"], ["z"]),
    ]
    model = compile_it(model_of(nodes, {"x": (F, ["b"]), "k": (I64, [1]), "m": (I64, [1])}, {"z": (F, None)}))
    x = np.arange(3, dtype=np.float32)
    np.testing.assert_array_equal(model(x, np.array([2]), np.array([3]))[0], np.broadcast_to(x, (4, 3)))
    np.testing.assert_array_equal(model(x, np.array([1]), np.array([3]))[0], x[None])
    assert model.compilations == 2


def test_many_values_are_no_part_of_the_code(compile_it: Callable[..., OpenModel]) -> None:
    nodes = [helper.make_node("ReduceSum", ["s"], ["n"], keepdims=1), helper.make_node("ConstantOfShape", ["n"], ["z"])]
    model = compile_it(model_of(nodes, {"s": (I64, ["k"])}, {"z": (F, None)}))
    assert model(np.array([2, 3]))[0].shape == (5,)
    assert model(np.ones(300, np.int64))[0].shape == (300,)
    assert [list(v.values) for v in model.variants] == [["s"], []]


def test_who_decides_is_said() -> None:
    with pytest.raises(UndecidedError) as caught:
        lower(load(reshape()))
    assert caught.value.inputs == ("s",)


def test_variants_are_bounded_and_told(
    compile_it: Callable[..., OpenModel], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LONG", inf)
    model = compile_it(product(), variants=2)
    with caplog.at_level(logging.INFO, "tilewright"):
        for b in (1, 2, 1, 3, 4, 5):
            model(*product_inputs(b, 2))
    assert [v.shapes["x"][0] for v in model.variants] == [4, 5]
    levels = [(r.levelname, "dropped" in r.message) for r in caplog.records]
    assert levels == [("INFO", False), ("INFO", False), ("INFO", True), ("INFO", True), ("WARNING", True)]
    assert "compiled the model for x 5x4, y 4x2, r 2 in " in caplog.records[-1].message
    text = model.explain()
    assert text.startswith("the model: compiled at a call, 5 times so far; at most 2 are kept\n  x 4x4, y 4x2, r 2 (")
    assert "became 1 kernel" in text


def test_the_cache_on_disk_has_them_too(compile_it: Callable[..., OpenModel], tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(reshape().SerializeToString())
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    steps: list[str] = []
    for _ in range(2):
        steps.clear()
        model = compile_it(path, progress=steps.append)
        assert model(x, np.array([6, 2]))[0].shape == (6, 2)
    assert "plan" not in steps
    path.write_bytes(product().SerializeToString())
    with pytest.raises(ModelError, match="has changed since it was compiled; compile it again"):
        model(x, np.array([2, 6]))
    assert model(x, np.array([6, 2]))[0].shape == (6, 2)


def test_threads_at_once_compile_once(compile_it: Callable[..., OpenModel]) -> None:
    model = compile_it(product())
    wrong: list[str] = []
    together = threading.Barrier(8)

    def call(number: int) -> None:
        x, y, r = product_inputs(1 + number % 2, 7)
        together.wait()
        for _ in range(20):
            if not np.allclose(model(x, y, r)[0], x @ y + r, rtol=1e-4):
                wrong.append("a value")

    threads = [threading.Thread(target=call, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and model.compilations == 2


def test_what_needs_a_compiled_model_says_so(compile_it: Callable[..., OpenModel], tmp_path: Path) -> None:
    model = compile_it(product())
    for ask in (model.explain, model.random_inputs, lambda: model.artifact, lambda: model.calls):
        with pytest.raises(ModelError, match="input 'x' has a dynamic dimension 'b'; pass shapes="):
            ask()
    with pytest.raises(InputError, match="shapes depend on the values of 's', which cannot be random"):
        compile_it(reshape()).random_inputs()
    with pytest.raises(OptionError, match="nothing is compiled yet"):
        model.save(tmp_path / "saved")
    x, y, r = product_inputs(2, 3)
    model.prepare(x, y, r).save(tmp_path / "saved")
    np.testing.assert_allclose(tilewright.load(tmp_path / "saved")(x, y, r)[0], x @ y + r, rtol=1e-5)


def test_looking_inside_needs_shapes_at_once(kernel_cache: Path) -> None:
    with pytest.raises(ModelError, match="has a dynamic dimension 'b'"):
        tilewright.compile(product(), options=Options(cache_dir=kernel_cache, stop_after="plan"))


@pytest.mark.slow
def test_commands_take_such_models(
    tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(kernel_cache))
    (tmp_path / "m.onnx").write_bytes(reshape().SerializeToString())
    np.savez(tmp_path / "in.npz", x=np.zeros((2, 6), np.float32), s=np.array([4, 3]))
    given, out = ["--inputs", str(tmp_path / "in.npz")], tmp_path / "out.npz"
    assert main(["run", str(tmp_path / "m.onnx"), *given, "--outputs", str(out)]) == 0
    assert np.load(out)["z"].shape == (4, 3)
    assert main(["bench", str(tmp_path / "m.onnx"), *given, "--peers", "", "--rounds", "1", "--seconds", "0.01"]) == 0
    capsys.readouterr()
    assert main(["run", str(tmp_path / "m.onnx")]) == 2
    assert "decide shapes of this model (x: float32[2, 6], s: int64[2]): give --inputs" in capsys.readouterr().err
    assert main(["compile", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "d")]) == 2
    assert "decide shapes of this model" in capsys.readouterr().err
