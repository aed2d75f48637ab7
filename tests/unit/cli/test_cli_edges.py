"""The command line at its edges: what is mistyped, hostile or left open is answered in one line, or works."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import GraphProto, ModelProto, TensorProto, helper

import tilewright
from tilewright import OptionError, Options
from tilewright.calls.arguments import checked_shapes
from tilewright.cli import common
from tilewright.cli.main import main

Capture = pytest.CaptureFixture[str]
OPEN = ("batch", 3)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, kernel_cache: Path) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(kernel_cache))


@pytest.fixture
def open_file(tmp_path: Path, add_model: Callable[..., ModelProto]) -> Path:
    path = tmp_path / "open.onnx"
    path.write_bytes(add_model(shape=OPEN).SerializeToString())
    return path


def error_of(capsys: Capture, *arguments: str) -> str:
    assert main(list(arguments)) == 2
    *progress, message = capsys.readouterr().err.splitlines(keepends=True)
    assert all(line.startswith("compiling ") for line in progress)
    return message.removeprefix("tilewright: error: ").removesuffix("\n")


def test_an_unknown_stage_to_override(add_file: Path, capsys: Capture) -> None:
    message = error_of(capsys, "run", str(add_file), "--override", "foo=x")
    assert message.startswith("no stage 'foo' to override: choose one of graph, program,")


def test_dump_onto_a_file(add_file: Path, capsys: Capture) -> None:
    message = error_of(capsys, "run", str(add_file), "--dump", str(add_file), "--stop-after", "program")
    assert message == f"cannot write to {add_file}: File exists; dump takes a folder"


def test_a_negative_seed(add_file: Path, capsys: Capture) -> None:
    message = error_of(capsys, "run", str(add_file), "--seed", "-1")
    assert message == "seed cannot be -1: it is a whole number, 0 or more"


def test_a_dimension_by_name(open_file: Path, capsys: Capture) -> None:
    assert main(["run", str(open_file), "--shape", "batch=2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outputs"][0]["shape"] == [2, 3]


def test_inputs_settle_shapes(open_file: Path, tmp_path: Path, capsys: Capture) -> None:
    np.savez(tmp_path / "in.npz", x=np.ones((5, 3), np.float32), y=np.ones((5, 3), np.float32))
    assert main(["run", str(open_file), "--inputs", str(tmp_path / "in.npz"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outputs"][0]["shape"] == [5, 3]


def test_json_of_a_stopped_compilation(add_file: Path, capsys: Capture) -> None:
    assert main(["run", str(add_file), "--json", "--stop-after", "program"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["stopped_after"], shown["dump"]) == ("program", None)


def test_success_is_told(add_file: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["run", str(add_file), "--verify", "--dump", str(tmp_path / "stages")]) == 0
    shown = capsys.readouterr().out
    assert "every stage gives what the interpreter gives" in shown
    assert f"wrote every form of the model to {tmp_path / 'stages'}" in shown


@pytest.mark.parametrize("action", ["show", "clear"])
def test_a_cache_that_cannot_be_used(
    action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    folder = tmp_path / "cache" / "ab"
    folder.mkdir(parents=True)
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse) if action == "show" else monkeypatch.setattr("shutil.rmtree", refuse)
    message = error_of(capsys, "cache", action)
    assert message.startswith(f"the cache in {tmp_path / 'cache'} cannot be used (Permission denied)")


def hostile(tmp_path: Path, name: str) -> Path:
    ports = [helper.make_tensor_value_info(n, 1, [2]) for n in ("x", name)]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], [name])], "g", ports[:1], ports[1:])
    path = tmp_path / "named.onnx"
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(made.SerializeToString())
    return path


@pytest.mark.parametrize("command", ["run", "explain"])
def test_names_do_not_command_the_terminal(command: str, tmp_path: Path, capsys: Capture) -> None:
    path = hostile(tmp_path, "\x1b[2J\x1b]0;title\x07\x9b31m")
    assert main([command, str(path)]) == 0
    shown = capsys.readouterr()
    assert not set(shown.out + shown.err) & set("\x1b\x07\x9b")
    assert command == "explain" or "\\x1b[2J" in shown.out


def test_printable_keeps_text() -> None:
    assert common.printable("café 日本\nnext\x1b[0m\x00") == "café 日本\nnext\\x1b[0m\\x00"


@pytest.mark.sample(2)
@pytest.mark.parametrize("command", ["run", "explain"])
def test_any_name_in_an_ascii_terminal(command: str, tmp_path: Path, kernel_cache: Path) -> None:
    environment = {
        **os.environ,
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": "ascii",
    }
    environment |= {"TILEWRIGHT_CACHE": str(kernel_cache)}
    dump = ["--dump", str(tmp_path / "stages")]
    done = subprocess.run(
        [sys.executable, "-m", "tilewright", command, str(hostile(tmp_path, "größe_日本")), *dump],
        capture_output=True, env=environment, check=False, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode("utf-8", "replace")


def test_options_take_text_for_paths() -> None:
    options = Options(dump="d", cache_dir="x", overrides=[("plan", "p.json")])  # type: ignore[arg-type]
    assert (options.dump, options.cache_dir) == (Path("d"), Path("x"))
    assert options.overrides == (("plan", Path("p.json")),)
    for wrong in ({"dump": 3}, {"cache_dir": 3}, {"overrides": "plan=p"}, {"overrides": [("plan",)]}):
        with pytest.raises(OptionError, match=f"{next(iter(wrong))} cannot be"):
            Options(**wrong)  # type: ignore[arg-type]


def test_too_many_threads() -> None:
    with pytest.raises(OptionError, match="threads cannot be 1000000: it is at most 1024"):
        Options(threads=10**6)


def test_shapes_of_numpy_numbers() -> None:
    given = {"b": np.int64(2), "x": np.array([1, 2]), "y": [np.int32(3)], "z": ()}
    assert checked_shapes(given) == {"b": 2, "x": (1, 2), "y": (3,), "z": ()}  # type: ignore[arg-type]
    for wrong in (2.5, "2", None, [1.5], -1, [-1], True):
        with pytest.raises(OptionError, match="the shape of 'b' must be a number or a tuple of them"):
            checked_shapes({"b": wrong})  # type: ignore[dict-item]


def test_what_messages_name_is_there() -> None:
    script = "import tilewright; assert 'Conv' in tilewright.ops.supported()"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[3])
    assert "For example:" in (tilewright.compile.__doc__ or "")


# ---- names, shapes and outputs of any kind

HOSTILE = "in\x1b[31m\n"


def test_what_a_model_prints_commands_no_terminal(kernel_cache: Path) -> None:
    open_model = one_node("Relu", HOSTILE, ["b\x1b[2J"], "out\x1b[2J")
    model = tilewright.compile(open_model, options=Options(cache_dir=kernel_cache))
    x = np.ones(2, np.float32)
    model(x)
    texts = [repr(model), model.explain(), str(model.variants[0]), repr(model.prepare(x)), model.prepare(x).explain()]
    staged = tilewright.compile(
        one_node("NonZero", HOSTILE, [3], "out\x1b[2J"), options=Options(cache_dir=kernel_cache)
    )
    texts += [repr(staged), staged.explain()]
    assert not any("\x1b" in text for text in texts)
    for call in (lambda: staged(np.ones(4, np.float32)), lambda: model(), lambda: model.prepare(x)(y=x)):
        with pytest.raises(tilewright.InputError) as error:
            call()
        assert str(error.value).isprintable()


def test_long_names_are_cut_in_messages(kernel_cache: Path) -> None:
    model = tilewright.compile(one_node("Relu", "n" * 10_000, [2], "y"), options=Options(cache_dir=kernel_cache))
    with pytest.raises(
        tilewright.InputError, match=r"^input 'nnn.*nnn \.\.\. nnn.*' must have shape \(2,\), not \(3,\)$"
    ):
        model(np.ones(3, np.float32))


@pytest.mark.parametrize(
    "model, what", [(None, "a NoneType"), (dict, "the class dict"), (GraphProto(), "a GraphProto")]
)
def test_what_is_no_model_is_told_so(model: object, what: str) -> None:
    with pytest.raises(OptionError, match=f"^a model is a path, bytes, an onnx.ModelProto, or a .*, not {what}$"):
        tilewright.compile(model)  # type: ignore[call-overload]


def test_a_model_is_read_again_from_anywhere(
    open_file: Path, tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(open_file.parent)
    model = tilewright.compile(open_file.name, options=Options(cache_dir=kernel_cache))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    x = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(model(x, x)[0], 2 * x)


def test_models_are_copied_as_they_are_and_never_pickled(add_file: Path, open_file: Path, kernel_cache: Path) -> None:
    for path in (add_file, open_file):
        model = tilewright.compile(path, options=Options(cache_dir=kernel_cache))
        assert copy.deepcopy({"model": model})["model"] is model and copy.copy(model) is model
        with pytest.raises(OptionError, match=r"not pickled: model.save\(DIR\), and tilewright.load\(DIR\)"):
            pickle.dumps(model)


def test_the_command_line_names_its_own_options(open_file: Path, tmp_path: Path, capsys: Capture) -> None:
    takes = "x: float32[batch, 3], y: float32[batch, 3]"
    message = f"the inputs decide shapes of this model ({takes}): give --shape NAME=SIZES, or --inputs IN.npz"
    assert error_of(capsys, "run", str(open_file)) == message
    assert error_of(capsys, "explain", str(open_file)) == message
    staged = tmp_path / "staged.onnx"
    staged.write_bytes(one_node("NonZero", "x", [3], "y").SerializeToString())
    message = "the inputs decide what this model computes (x: float32[3]): give --inputs IN.npz"
    assert error_of(capsys, "run", str(staged)) == message
    (tmp_path / "text.npz").write_text("hello")
    message = f"{tmp_path / 'text.npz'} cannot be read as an .npz file: it is none"
    assert error_of(capsys, "run", str(staged), "--inputs", str(tmp_path / "text.npz")) == message


def test_sequences_and_strings_are_shown_and_written(tmp_path: Path, capsys: Capture) -> None:
    values = np.array([[1, 2], [3, 4]], np.float32)
    np.savez(tmp_path / "in.npz", x=values)
    nodes = [
        helper.make_node("SplitToSequence", ["x"], ["s"], axis=0),
        helper.make_node("Cast", ["x"], ["t"], to=TensorProto.STRING),
    ]
    outputs = [
        helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, None),
        helper.make_tensor_value_info("t", TensorProto.STRING, [2, 2]),
    ]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 2])], outputs)
    (tmp_path / "m.onnx").write_bytes(helper.make_model(graph).SerializeToString())
    given = [str(tmp_path / "m.onnx"), "--inputs", str(tmp_path / "in.npz"), "--outputs", str(tmp_path / "out.npz")]
    assert main(["run", *given]) == 0
    assert "s[1]" in capsys.readouterr().out
    found = np.load(tmp_path / "out.npz", allow_pickle=False)
    np.testing.assert_array_equal(np.concatenate([found["s[0]"], found["s[1]"]]), values)
    assert [float(text) for text in found["t"].ravel()] == [1, 2, 3, 4]


def one_node(op: str, name: str, shape: list, output: str) -> ModelProto:
    node = helper.make_node(op, [name], [output], name="n\x1b[31m")
    kind = TensorProto.INT64 if op == "NonZero" else TensorProto.FLOAT
    graph = helper.make_graph(
        [node], "g\x1b[31m", [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(output, kind, None)],
    )  # fmt: skip
    return helper.make_model(graph)
