"""Saved models that run in parts: what was compiled is found again as it is, the rest is compiled when it is needed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import tilewright
from tilewright import ModelError, Options, StagedModel, ToolError
from tilewright.cli.main import main
from tilewright.ir.forms.graph import Graph
from tilewright.packages.directory import sums
from tilewright.packages.manifest import sealed

pytestmark = pytest.mark.host  # what is saved is for this computer
F, WHOLE = TensorProto.FLOAT, TensorProto.INT64
WEIGHTS = np.random.default_rng(0).standard_normal((60, 7)).astype(np.float32)
port = helper.make_tensor_value_info


def model_of(nodes: list, inputs: list, outputs: list, **constants: np.ndarray) -> ModelProto:
    kept = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    return helper.make_model(helper.make_graph(nodes, "g", inputs, outputs, initializer=kept))


def picking() -> ModelProto:
    """The sum of the rows of the weights where the input is not zero, and which these are."""
    nodes = [
        helper.make_node("NonZero", ["x"], ["i"]), helper.make_node("Squeeze", ["i", "zero"], ["k"]),
        helper.make_node("Gather", ["w", "k"], ["g"]), helper.make_node("ReduceSum", ["g", "zero"], ["y"], keepdims=0),
    ]  # fmt: skip
    outputs = [port("y", F, None), port("i", WHOLE, None)]
    return model_of(nodes, [port("x", F, [60])], outputs, w=WEIGHTS, zero=np.array([0]))


def first(count: int) -> np.ndarray:
    return (np.arange(60) < count).astype(np.float32)


def right(model: Any, count: int) -> None:
    total, places = model(first(count))
    np.testing.assert_allclose(total, WEIGHTS[:count].sum(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(places, np.arange(count)[None])


@pytest.fixture
def options(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Options:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(kernel_cache))
    return Options(cache_dir=kernel_cache, threads=2)


def saved(model: ModelProto, options: Options, folder: Path, *calls: tuple[Any, ...]) -> tuple[Any, Any]:
    made = tilewright.compile(model, options=options)
    for values in calls:
        made(*values)
    made.save(folder)
    return made, tilewright.load(folder)


def test_parts_are_found_again(options: Options, tmp_path: Path) -> None:
    made, loaded = saved(picking(), options, tmp_path / "saved", (first(3),), (first(20),))
    assert isinstance(loaded, StagedModel) and repr(loaded) == repr(made)
    for count in (3, 20, 17, 32):  # a part for 17 to 32
        right(loaded, count)
    assert loaded.compilations == 0
    right(loaded, 40)
    assert loaded.compilations == 1
    assert "part 2" in loaded.explain() and len(loaded.profile(first(20), repeat=1).calls) == len(loaded.calls)


def test_a_tool_that_fails_once_is_told_and_narrows_nothing(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tilewright.compile(picking(), options=options)
    assert isinstance(model, StagedModel)
    right(model, 3)
    tools = model._tools

    def fail(_: Graph) -> Any:
        raise ToolError("the disk is full")

    monkeypatch.setattr(model, "_tools", replace(tools, compile=fail))
    with pytest.raises(ToolError, match="the disk is full"):
        model(first(20))
    monkeypatch.setattr(model, "_tools", tools)
    compiled = model.compilations
    for count in (20, 17, 32):
        right(model, count)
    assert model.compilations == compiled + 1


def test_a_loaded_model_is_saved_with_what_it_compiled_since(options: Options, tmp_path: Path) -> None:
    _, loaded = saved(picking(), options, tmp_path / "saved")
    assert "then NonZero node 'i'" in loaded.explain()  # the first part, without a call
    right(loaded, 5)
    loaded.save(tmp_path / "again")
    shutil.rmtree(tmp_path / "saved")
    again = tilewright.load(tmp_path / "again", threads=1)
    right(again, 5)
    assert again.compilations == 0


def test_loops_sequences_and_strings(options: Options, tmp_path: Path) -> None:
    body = helper.make_graph(
        [helper.make_node("Add", ["s", "one"], ["t"]), helper.make_node("ReduceSum", ["t"], ["r"], keepdims=0),
         helper.make_node("Less", ["r", "limit"], ["more"])], "body",
        [port("i", WHOLE, []), port("c", TensorProto.BOOL, []), port("s", F, [2])],
        [port("more", TensorProto.BOOL, []), port("t", F, [2]), port("r", F, [])],
    )  # fmt: skip
    loop = model_of(
        [helper.make_node("Loop", ["", "go", "x"], ["y", "rows"], body=body)],
        [port("x", F, [2]), port("limit", F, [])], [port("y", F, [2]), port("rows", F, None)],
        one=np.ones(2, np.float32), go=np.array(True),
    )  # fmt: skip
    start, limit = np.zeros(2, np.float32), np.array(9, np.float32)
    assert "part 1: 0 kernel calls; then Loop node 'y'" in tilewright.compile(loop, options=options).explain()
    _, loaded = saved(loop, options, tmp_path / "loop", (start, limit))
    np.testing.assert_array_equal(loaded(start, limit)[0], [5, 5])
    np.testing.assert_array_equal(loaded(start, np.array(31, np.float32))[0], [16, 16])

    split = model_of(
        [helper.make_node("SplitToSequence", ["x"], ["s"], axis=0)], [port("x", F, [3, 2])],
        [helper.make_tensor_sequence_value_info("s", F, None)],
    )  # fmt: skip
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    _, loaded = saved(split, options, tmp_path / "split", (rows,))
    np.testing.assert_array_equal(np.concatenate(loaded(rows)[0]), rows)
    assert loaded.compilations == 0

    mark = helper.make_tensor("mark", TensorProto.STRING, [1], ["!é".encode()])
    node = helper.make_node("StringConcat", ["x", "mark"], ["y"])
    text = TensorProto.STRING
    graph = helper.make_graph([node], "g", [port("x", text, [2])], [port("y", text, [2])], initializer=[mark])
    _, loaded = saved(helper.make_model(graph), options, tmp_path / "text")
    assert loaded(np.array(["a", "b"], object))[0].tolist() == ["a!é", "b!é"]


def test_the_emulated_gpu_has_parts_too(options: Options, tmp_path: Path) -> None:
    nodes = [helper.make_node("NonZero", ["x"], ["i"])]
    small = model_of(nodes, [port("x", F, [4])], [port("i", WHOLE, None)])
    x = np.array([0, 1, 0, 2], np.float32)
    _, loaded = saved(small, options.override(target="cuda-emulated"), tmp_path / "saved", (x,))
    np.testing.assert_array_equal(loaded(x)[0], [[1, 3]])
    assert loaded.compilations == 0


def test_loading_needs_neither_compiler_nor_onnx(options: Options, tmp_path: Path) -> None:
    saved(picking(), options, tmp_path / "saved", (first(3),))
    script = """
import sys
import numpy as np
import tilewright
model = tilewright.load(sys.argv[1])
total, places = model((np.arange(60) < 3).astype(np.float32))
unused = ("onnx", "torch", "tilewright.ops.lower", "tilewright.schedule.planner")
print(places.tolist(), [m for m in unused if m in sys.modules])
"""
    environment = {"PATH": "", "PYTHONPATH": ":".join(sys.path), "TILEWRIGHT_CC": "/no/such/compiler"}
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "saved")], env=environment, capture_output=True, text=True
    )
    assert ran.stdout == "[[0, 1, 2]] []\n", ran.stderr


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["plan.json", "plan.data", "parts/0/manifest.json", "parts/0/libmodel.so"])
@pytest.mark.parametrize("damage", ["damaged", "missing"])
def test_a_damaged_file_is_named(options: Options, tmp_path: Path, name: str, damage: str) -> None:
    tilewright.compile(picking(), options=options).save(tmp_path / "saved")
    path = tmp_path / "saved" / name
    data = bytearray(path.read_bytes())
    path.unlink()
    if damage == "damaged":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    where = Path(name).name if name.endswith(".so") else name  # a part tells of its own files
    with pytest.raises(ModelError, match=f"the file {where} is {damage}") as e:
        tilewright.load(tmp_path / "saved")
    assert str(e.value).isprintable()


def test_a_manifest_of_another_format_is_refused(options: Options, tmp_path: Path) -> None:
    tilewright.compile(picking(), options=options).save(tmp_path / "saved")
    path = tmp_path / "saved" / "manifest.json"
    row = json.loads(path.read_text())
    path.write_text(json.dumps({**row, "format": 99}))
    with pytest.raises(ModelError, match="was saved in format 99 by Tilewright"):
        tilewright.load(tmp_path / "saved")
    path.write_text(json.dumps({**row, "parts": 7}))
    with pytest.raises(ModelError, match="its manifest is damaged"):
        tilewright.load(tmp_path / "saved")


def test_a_part_that_takes_another_shape_is_refused(options: Options, tmp_path: Path) -> None:
    """The sums are right: somebody wrote it so."""
    saved, first_calls = tmp_path / "saved", tilewright.compile(picking(), options=options)
    first_calls(first(3))
    first_calls.save(saved)
    plan = json.loads((saved / "plan.json").read_text())
    ((_, stage), *_) = plan["first"]["kept"]
    name, _ = stage["takes"]["map"][0]
    stage["takes"]["map"][0] = [name, {"tuple": []}]
    (saved / "plan.json").write_text(json.dumps(plan))
    row = json.loads((saved / "manifest.json").read_text())
    row.pop("manifest_sha256")
    row["files"] |= sums(saved, ["plan.json"])
    (saved / "manifest.json").write_text(sealed(row))
    with pytest.raises(ModelError, match="does not fit this version"):
        tilewright.load(saved)


def test_the_command_saves_models_that_inputs_decide(options: Options, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "m.onnx").write_bytes(picking().SerializeToString())
    np.savez(tmp_path / "in.npz", x=first(3))
    out, given = str(tmp_path / "saved"), ["--inputs", str(tmp_path / "in.npz")]
    assert main(["compile", str(tmp_path / "m.onnx"), "-o", out]) == 0
    assert "is compiled at a call, or here for --inputs" in capsys.readouterr().out
    assert len(list((tmp_path / "saved" / "parts").iterdir())) == 1
    assert main(["compile", str(tmp_path / "m.onnx"), "-o", out, *given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outputs"][0] == {"name": "y", "dtype": "float32", "shape": None}
    assert len(list((tmp_path / "saved" / "parts").iterdir())) == 2
    assert main(["run", out, *given]) == 0
    assert main(["explain", out]) == 0
    assert "part 2" not in capsys.readouterr().out
    assert main(["explain", out, *given]) == 0
    assert "part 2: 1 kernel calls" in capsys.readouterr().out
    open_file = tmp_path / "open.onnx"
    relu = model_of([helper.make_node("Relu", ["x"], ["y"])], [port("x", F, ["n"])], [port("y", F, None)])
    open_file.write_bytes(relu.SerializeToString())
    assert main(["compile", str(open_file), "-o", str(tmp_path / "open")]) == 2
    assert "give --shape NAME=SIZES, or --inputs IN.npz" in capsys.readouterr().err
    assert main(["compile", str(open_file), "-o", str(tmp_path / "open"), *given]) == 0
    assert tilewright.load(tmp_path / "open").inputs[0].shape == (60,)
