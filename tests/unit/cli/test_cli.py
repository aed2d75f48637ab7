"""The `tilewright` command: help, exit codes, one-line errors, files in and out, JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from tilewright.cli import bench, common
from tilewright.cli.main import COMMANDS, main
from tilewright.errors import InputError
from tilewright.model import Model, Port
from tilewright.report.sidebyside import Comparison, RuntimeResult
from tilewright.target import stored_machines

NAMES = [module.__name__.rpartition(".")[2] for module in COMMANDS]


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch, stub_model: Model) -> Model:
    monkeypatch.setattr(common, "compile", lambda *_args, **_named: stub_model)
    return stub_model


@pytest.mark.parametrize("name", NAMES)
def test_help_has_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert f"example:\n  tilewright {name}" in shown
    assert max(len(line) for line in shown.splitlines()) <= 110


def test_no_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["run", "bench", "explain"])
def test_missing_model_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tilewright.report.explain")
    assert main([name, "nowhere.onnx"]) == 2
    expected = "tilewright: error: model file 'nowhere.onnx' does not exist\n"
    assert capsys.readouterr().err == expected


def test_tune_takes_a_duration(
    stub_model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = []

    def compiled(*_: object, options: object, **_named: object) -> Model:
        given.append(options)
        return stub_model

    monkeypatch.setattr(common, "compile", compiled)
    assert main(["run", "m.onnx", "--tune", "1m30s", "--records", "m.twr", "--arithmetic"]) == 0
    assert (given[0].tune, given[0].tune_records, given[0].tune_arithmetic) == (90.0, Path("m.twr"), True)
    assert main(["run", "m.onnx", "--tune", "0"]) == 2
    assert "tune cannot be '0': it is a duration" in capsys.readouterr().err
    assert main(["run", "m.onnx", "--arithmetic"]) == 2
    assert "tune_arithmetic is for tuning" in capsys.readouterr().err


def test_run_from_file_to_file(stubbed: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image, mask = np.ones((2, 3), np.float32), np.full((2, 3), 2, np.float32)
    np.savez(tmp_path / "in.npz", image=image, mask=mask)
    out = tmp_path / "results.bin"
    assert main(["run", "m.onnx", "--inputs", str(tmp_path / "in.npz"), "--outputs", str(out)]) == 0
    with np.load(out) as archive:
        assert archive.files == ["sum"]
        np.testing.assert_array_equal(archive["sum"], image + mask)
    assert "kernel calls" in capsys.readouterr().out


def test_run_without_inputs_is_seeded(stubbed: Model, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in ("0", "0", "1"):
        assert main(["run", "m.onnx", "--json", "--seed", seed]) == 0
    first, second, other = (pair[0] for pair in stubbed.artifact.runner.received)  # type: ignore[union-attr]
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, other)
    summary = json.loads(capsys.readouterr().out.split("}\n{")[0].rstrip().removesuffix("}") + "}")
    assert summary["outputs"] == [{"name": "sum", "dtype": "float32", "shape": [2, 3]}]


def test_run_stopped_early(stubbed: Model, capsys: pytest.CaptureFixture[str]) -> None:
    stubbed.artifact.runner = None  # type: ignore[misc]
    assert main(["run", "m.onnx", "--stop-after", "program", "--dump", "stages"]) == 0
    assert capsys.readouterr().err == "stopped after program; see stages\n"


def test_wrong_input_name_in_the_file(stubbed: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "in.npz", picture=np.ones(1))
    assert main(["run", "m.onnx", "--inputs", str(tmp_path / "in.npz")]) == 2
    expected = "tilewright: error: there is no input 'picture'; the model takes 2 inputs (image, mask)\n"
    assert capsys.readouterr().err == expected


def test_inputs_that_cannot_be_read(tmp_path: Path) -> None:
    text, single = tmp_path / "notes.npz", tmp_path / "single.npy"
    text.write_text("not an archive")
    np.save(single, np.ones(2))
    for path, expected in (
        (tmp_path / "none.npz", "there is no file "),
        (text, f"{text} cannot be read as an .npz file: "),
        (single, f"{single} holds one array without a name; "),
    ):
        with pytest.raises(InputError) as caught:
            common.read_arrays(path)
        assert str(caught.value).startswith(expected)


def test_arrays_survive_a_file_whatever_their_name_and_type(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    arrays = {
        "file": np.arange(3, dtype=np.int64),
        "block/0.out": np.ones((2, 2), ml_dtypes.bfloat16),
        "flag": np.array(True),
    }
    common.write_arrays(path, arrays)
    ports = [Port(name, array.dtype, array.shape) for name, array in arrays.items()]
    back = common.restore_types(common.read_arrays(path), ports)
    assert list(back) == list(arrays)
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype
        np.testing.assert_array_equal(back[name], array)


def test_shapes_are_parsed() -> None:
    assert common.parse_shape("x=1x3x224") == ("x", (1, 3, 224))
    assert common.parse_shape("a=b=7") == ("a=b", (7,))
    assert common.parse_shape("scalar=") == ("scalar", ())


@pytest.mark.parametrize("text", ["x", "=1x2", "x=1x", "x=-1", "x=1,2"])
def test_wrong_shapes_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", "m.onnx", f"--shape={text}"])
    assert caught.value.code == 2
    assert f"{text!r} is not of the form NAME=1x3x224x224" in capsys.readouterr().err


def test_bench_json(add_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: dict[str, object] = {}

    def fake(path: Path, runtimes: list[str], threads: int, **named: object) -> Comparison:
        asked.update(runtimes=runtimes, threads=threads, **named)
        results = (
            RuntimeResult("tilewright", "0.1.0", median_ms=1.0),
            RuntimeResult("openvino", None, error="openvino is not installed", skipped=True),
        )
        return Comparison(str(path), threads, {"processor": "some"}, results)

    monkeypatch.setattr(bench, "compare", fake)
    command = ["bench", str(add_file), "--peers", "openvino,openvino", "--threads", "2"]
    assert main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert asked["runtimes"] == ["tilewright", "openvino"] and asked["threads"] == 2
    assert asked["algorithms"] == {"merging": None, "convolution": None, "contraction": None, "denormals": None}
    assert {r["name"]: (r["median_ms"], r["error"]) for r in report["runtimes"]} == {
        "tilewright": (1.0, None),
        "openvino": (None, "openvino is not installed"),
    }
    assert main([*command, "--contraction", "strassen", "--convolution", "direct"]) == 0
    assert "openvino is not installed" in capsys.readouterr().out
    chosen = {name: value for name, value in asked["algorithms"].items() if value is not None}
    assert chosen == {"convolution": "direct", "contraction": "strassen"}


def test_bench_refuses_unknown_peers(add_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(add_file), "--peers", "abacus"]) == 2
    assert capsys.readouterr().err.startswith("tilewright: error: --peers: unknown runtime 'abacus'; there are ")


def test_bench_refuses_what_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "notes.onnx"
    path.write_text("these are notes")
    assert main(["bench", str(path)]) == 2
    assert capsys.readouterr().err == f"tilewright: error: '{path}' is not an ONNX model, or is damaged\n"


def test_bench_shape_gives_values_to_symbols(add_model, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "open.onnx"
    path.write_bytes(add_model(shape=("batch", 3)).SerializeToString())
    interface = bench.checked_interface(path)
    dimensions = bench.open_dimensions(interface, {"x": (5, 3)})
    assert dimensions == {"batch": 5}
    assert {a.shape for a in bench.draw_inputs(interface, dimensions).values()} == {(5, 3)}
    with pytest.raises(InputError, match="^input 'x' has 2 dimensions, not 1$"):
        bench.open_dimensions(interface, {"x": (5,)})


@pytest.mark.host
def test_devices(
    kernel_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(kernel_cache))
    assert main(["devices", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [device["name"] for device in printed["described"]] == list(stored_machines())
    devices = printed["devices"]
    assert devices[0]["name"] == "cpu" and {device["name"] for device in devices} == {"cpu", "cuda", "cuda-emulated"}
    assert devices[0]["error"] is None and devices[0]["description"]["levels"]
    assert main(["devices"]) == 0
    shown = capsys.readouterr().out
    for name in stored_machines():
        assert name in shown
    for word in ("L2", "read, alone", "fma_float32", "from kernel to kernel", "numbers: measured 20"):
        assert word in shown


def test_one_device_is_a_file_to_edit(
    tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(kernel_cache))
    assert main(["devices", "cpu", "--json"]) == 0
    file = tmp_path / "machine.json"
    file.write_text(capsys.readouterr().out.replace('"name": "cpu"', '"name": "mine"'))
    assert main(["devices", str(file)]) == 0
    assert capsys.readouterr().out.startswith("mine  ready\n")
    assert main(["devices", "abacus"]) == 2
    assert "target cannot be 'abacus': it is one of cpu, cuda" in capsys.readouterr().err
    assert main(["devices", str(tmp_path / "none.json")]) == 2
    assert "none.json: No such file or directory; 'tilewright devices cpu --json' prints" in capsys.readouterr().err


def test_cache_shows_and_clears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    entry = tmp_path / "ab" / ("ab" * 32)
    entry.parent.mkdir()
    entry.write_bytes(b"12345")
    bystander = tmp_path / "letter.txt"
    bystander.write_text("not of the cache")
    assert main(["cache", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == 5
    assert main(["cache", "clear"]) == 0
    assert not entry.exists() and bystander.exists()


def test_interrupt_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_args: object, **_named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(common, "compile", interrupt)
    assert main(["run", "m.onnx"]) == 130
    assert capsys.readouterr().err == "tilewright: interrupted\n"


def test_a_closed_pipe_is_quiet(kernel_cache: Path) -> None:
    command = [sys.executable, "-m", "tilewright", "devices", "--json"]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        finished = subprocess.run(
            command,
            stdout=writer,
            stderr=subprocess.PIPE,
            env={**os.environ, "TILEWRIGHT_CACHE": str(kernel_cache)},
            text=True,
            check=False,
        )
    finally:
        os.close(writer)
    assert finished.stderr == ""
    assert finished.returncode == 141


def test_output_summary_of_odd_arrays() -> None:
    from tilewright.cli.run import output_table

    outputs = {"empty": np.empty((0, 2), np.float32), "scalar": np.array(True), "[bold]": np.ones(2, np.int8)}
    assert output_table(outputs).row_count == 3


def test_progress_speaks_only_after_a_second(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tilewright.cli import progress

    with progress.working("short"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.01)
    clock = iter((0.0, 2.5))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with progress.working("long"):
        pass
    assert capsys.readouterr().err.endswith("long: 2.5 s\n")
