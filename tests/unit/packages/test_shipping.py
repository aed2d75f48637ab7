"""Saved models: a directory that Python and C start from as they are, and that nothing doubtful is loaded from."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

import tilewright
from tests.cpu_stages import model_of
from tests.unit.packages.test_stored import X, dense
from tilewright import Model, ModelError, OptionError, Options, ToolError
from tilewright.cli.main import main
from tilewright.ir.forms import dtypes
from tilewright.packages import files
from tilewright.packages.header import example_text, header_text
from tilewright.packages.manifest import FORMAT, _sum
from tilewright.runtime import ToolchainError, find_compiler, this_machine
from tilewright.runtime.features import c_checks, relied_on
from tilewright.runtime.toolchain import NativeMachine

pytestmark = pytest.mark.host  # what is saved is for this computer

XEON = (
    "abm",
    "amx_bf16",
    "amx_tile",
    "avx2",
    "avx512_bf16",
    "avx512_vnni",
    "avx512f",
    "avx_vnni",
    "f16c",
    "fma",
    "pni",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model, for tests that do not change it."""
    root = tmp_path_factory.mktemp("shipping")
    compiled(root, dense()).save(root / "dense")
    return root / "dense"


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def compiled(root: Path, model: object, **more: object) -> Model:
    options = Options(cache_dir=root / "cache", threads=2).override(**more)
    return tilewright.compile(model, options=options)  # type: ignore[arg-type]


def expected() -> np.ndarray:
    return np.maximum(X @ np.arange(20, dtype=np.float32).reshape(4, 5), 0)


def rewritten(folder: Path, change: Callable[[dict], None]) -> None:
    """The manifest with a change, and summed again."""
    path = folder / "manifest.json"
    row = json.loads(path.read_text())
    change(row)
    row.pop("manifest_sha256")
    path.write_text(json.dumps({**row, "manifest_sha256": _sum(row)}))


@pytest.mark.slow
def test_a_saved_model_gives_the_same(folder: Path) -> None:
    model = tilewright.load(folder)
    assert [str(p) for p in (*model.inputs, *model.outputs)] == ["x: float32[3, 4]", "z: float32[3, 5]"]
    np.testing.assert_allclose(model(X)[0], expected(), rtol=1e-6)
    assert "became 1 kernel" in model.explain()
    assert len(model.profile(X, repeat=1).calls) == len(model.calls) == 1
    with pytest.raises(OptionError, match="compile the model file to look inside"):
        _ = model.artifact


def test_the_manifest_says_what_is_needed(folder: Path) -> None:
    row = json.loads((folder / "manifest.json").read_text())
    assert (row["format"], row["tilewright"], row["threads"], row["denormals"]) == (FORMAT, "0.1.0", 2, "flush")
    assert row["inputs"] == [{"name": "x", "dtype": "float32", "shape": [3, 4]}]
    assert set(row["cpu"]["features"]) <= this_machine().features
    assert row["target"]["name"] == "cpu" and row["target"]["levels"]
    assert set(row["files"]) == {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} - {
        "manifest.json"
    }
    assert {"libmodel.so", "model.weights", "model.h", "example.c", "plan.json", "source/k0.c"} <= set(row["files"])


def test_loading_needs_neither_compiler_nor_the_stages(folder: Path, tmp_path: Path) -> None:
    script = """
import json, sys
import numpy as np
import tilewright
model = tilewright.load(sys.argv[1])
print(model(np.ones((3, 4), np.float32))[0].tolist())
print([n for n in ("onnx", "pickle5", "tilewright.compiler.pipeline", "tilewright.schedule") if n in sys.modules])
"""
    environment = {"PATH": str(tmp_path), "TILEWRIGHT_CC": "no-such-compiler", "TILEWRIGHT_CACHE": str(tmp_path / "no")}
    kept = {name: os.environ[name] for name in ("PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True, cwd=Path.cwd(),
        env={**kept, **environment},
    )  # fmt: skip
    values, modules = done.stdout.splitlines()
    assert json.loads(values) == [[30.0, 34.0, 38.0, 42.0, 46.0]] * 3
    assert modules == "[]"
    assert not (tmp_path / "no").exists()


def test_the_sources_give_the_same_library(folder: Path, tmp_path: Path) -> None:
    """They are complete: what the directory holds can be compiled elsewhere."""
    row = json.loads((folder / "manifest.json").read_text())
    out = tmp_path / "again.so"
    sources = sorted(str(p) for p in (folder / "source").iterdir())
    command = [*find_compiler().argv, *row["flags"], "-shared", "-pthread", *sources, "-lm", "-o", str(out)]
    subprocess.run(command, check=True)
    again = Path(shutil.copytree(folder, tmp_path / "rebuilt"))
    shutil.copyfile(out, again / "libmodel.so")

    def summed(row: dict) -> None:
        from tilewright.packages.directory import checksum

        with (again / "libmodel.so").open("rb") as file:
            row["files"]["libmodel.so"] = checksum(file)

    rewritten(again, summed)
    np.testing.assert_array_equal(tilewright.load(again)(X)[0], tilewright.load(folder)(X)[0])


# ---- from C


def c_example(folder: Path, out: Path) -> Path:
    try:
        compiler = find_compiler()
    except ToolchainError:
        pytest.skip("no C compiler here")
    program = out / "example"
    command = [*compiler.argv, "-Wall", "-Wextra", "-Werror", "-O1", "example.c", "-L.", "-lmodel"]
    subprocess.run([*command, f"-Wl,-rpath,{folder}", "-o", str(program)], check=True, cwd=folder)
    return program


@pytest.mark.parametrize("threads", [1, 3])
def test_the_c_example_prints_what_python_gives(folder: Path, tmp_path: Path, threads: int) -> None:
    program = c_example(folder, tmp_path)
    X.tofile(tmp_path / "x.bin")
    command = [str(program), str(folder / "model.weights"), str(threads), str(tmp_path / "x.bin")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    first, *values = done.stdout.splitlines()
    assert first == "# z: float32, 15 elements"
    found = np.array([np.float32(v) for v in values]).reshape(3, 5)
    np.testing.assert_array_equal(found, tilewright.load(folder)(X)[0])


def test_names_and_types_of_any_kind_reach_c(folder: Path, tmp_path: Path) -> None:
    hostile = 'a*/\n"\\??/é'
    nodes = [
        ("Greater", [hostile, "b"], "more", {}),
        ("Cast", ["more"], "whole", {"to": TensorProto.INT64}),
        ("Cast", ["b"], "half", {"to": TensorProto.FLOAT16}),
        ("ReduceSum", [hostile], "all", {"keepdims": 0}),
    ]
    types = {"more": TensorProto.BOOL, "whole": TensorProto.INT64, "half": TensorProto.FLOAT16}
    shapes = {"more": (2,), "whole": (2,), "half": (2,), "all": ()}
    model = compiled(folder.parent, model_of(nodes, {hostile: (2,), "b": (2,)}, shapes, types=types))
    saved = tmp_path / "saved"
    model.save(saved)
    a, b = np.array([1.5, -2], np.float32), np.array([1, 1], np.float32)
    (tmp_path / "a").write_bytes(a.tobytes())
    (tmp_path / "b").write_bytes(b.tobytes())
    command = [str(c_example(saved, tmp_path)), str(saved / "model.weights"), "2"]
    command += [str(tmp_path / name) for name in ("a", "b")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    assert lines == ["1", "0", "1", "0", "0x3c00", "0x3c00", "-0.5"]
    assert tilewright.load(saved).inputs[0].name == hostile


def test_the_c_program_says_what_is_wrong(folder: Path, tmp_path: Path) -> None:
    program = c_example(folder, tmp_path)
    (tmp_path / "short").write_bytes(b"abc")
    weights = str(folder / "model.weights")
    for arguments, text in [
        ([str(tmp_path / "none"), "1"], "cannot open"),
        ([weights, "0"], "cannot open"),
        ([weights, "1", str(tmp_path / "short")], "not the size of its input"),
    ]:
        done = subprocess.run([str(program), *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 1 and text in done.stderr


@pytest.mark.parametrize(
    ("architecture", "features"), [("x86_64", XEON), ("aarch64", ("asimd", "atomics", "bf16", "i8mm"))]
)
def test_the_header_asks_any_processor(tmp_path: Path, architecture: str, features: tuple[str, ...]) -> None:
    """Compiled for that architecture, in C and in C++; the header has no other way to be tried on one."""
    try:
        zig = find_compiler("zig")
    except ToolchainError:
        pytest.skip("the ziglang package is not installed")
    permissions = ("amx",) if architecture == "x86_64" else ()
    ports = [("x", dtypes.float32, (2, 3))]
    (tmp_path / "model.h").write_text(header_text(ports, ports, features, permissions, "flush"))
    (tmp_path / "example.c").write_text(example_text("model.h", "model.weights"))
    (tmp_path / "other.cpp").write_text('#include "model.h"\nint supported() { return tw_check_cpu(); }\n')
    for argv, file in ((zig.argv, "example.c"), (zig.for_cxx(), "other.cpp")):
        command = [*argv, "-target", f"{architecture}-linux-gnu", "-Wall", "-Werror", "-c", file, "-o", "out.o"]
        subprocess.run(command, check=True, cwd=tmp_path)


@pytest.mark.slow
def test_the_header_knows_an_older_processor(tmp_path: Path) -> None:
    """A Haswell has AVX2 and a Nehalem has not; neither has AVX-512."""
    emulator = shutil.which("qemu-x86_64")
    if emulator is None:
        pytest.skip("qemu-user is not installed")
    try:
        zig = find_compiler("zig")
    except ToolchainError:
        pytest.skip("the ziglang package is not installed")
    haswell = ("abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "pni", "popcnt")
    answers = {}
    for features in (haswell, (*haswell, "avx512f")):
        (tmp_path / "model.h").write_text(header_text([], [], features, (), "keep"))
        (tmp_path / "main.c").write_text('#include "model.h"\nint main(void) { return tw_check_cpu(); }\n')
        command = [*zig.argv, "-target", "x86_64-linux-musl", "-O1", "main.c", "-o", "main"]
        subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
        for cpu in ("Haswell", "Nehalem"):
            done = subprocess.run([emulator, "-cpu", cpu, str(tmp_path / "main")], capture_output=True, check=False)
            answers[cpu, features[-1]] = done.returncode
    assert answers == {("Haswell", "popcnt"): 1, ("Nehalem", "popcnt"): 0, ("Haswell", "avx512f"): 0,
                       ("Nehalem", "avx512f"): 0}  # fmt: skip


def test_features_that_nobody_asks_for_are_not_needed() -> None:
    machine = NativeMachine("x86_64", "", frozenset({*XEON, "aes", "tsc", "hypervisor"}))
    assert relied_on(machine) == tuple(n for n in XEON if not n.startswith("amx"))
    assert relied_on(machine, ("amx",)) == XEON
    assert len(c_checks(XEON)) == len(XEON) + 1 and c_checks(XEON)[-1] == "tw_saved(0x600e6)"
    assert c_checks(("pni",)) == ["tw_cpuid(1, 0, 'c', 0)"]


# ---- refusals


@pytest.mark.parametrize("name", ["libmodel.so", "model.weights", "model.h", "plan.json", "source/k0.c"])
@pytest.mark.parametrize("damage", ["damaged", "missing"])
def test_a_damaged_file_is_named(copy: Path, name: str, damage: str) -> None:
    path = copy / name
    data = path.read_bytes()
    path.unlink()
    if damage == "damaged":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ModelError) as caught:
        tilewright.load(copy)
    assert str(caught.value) == f"{copy}: the file {name} is {damage}; save the model again"


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "null", '{"kind": "tilewright model", "format": 1}'])
def test_a_damaged_manifest_is_refused(copy: Path, text: str) -> None:
    (copy / "manifest.json").write_text(text)
    with pytest.raises(ModelError, match="manifest") as caught:
        tilewright.load(copy)
    assert "\n" not in str(caught.value)


def test_any_change_of_the_manifest_is_noticed(copy: Path) -> None:
    path = copy / "manifest.json"
    path.write_text(path.read_text().replace('"threads": 2', '"threads": 3'))
    with pytest.raises(ModelError, match="its manifest is damaged"):
        tilewright.load(copy)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda r: r.update(format=99, tilewright="9.9"), ModelError,
         "was saved in format 99 by Tilewright 9.9; this is 0.1.0, which reads format 2: save the model again"),
        (lambda r: r.update(interface="other"), ModelError, "was saved by Tilewright 0.1.0, whose code this version"),
        (lambda r: r["cpu"].update(features=["avx9999"]), ToolError,
         "was compiled for a processor that has avx9999, which this one lacks; compile the model here"),
        (lambda r: r["cpu"].update(architecture="pdp11"), ToolError, "is for Linux on pdp11, and this is"),
        (lambda r: r["files"].update({"../../etc/passwd": "1"}), ModelError, "its manifest is damaged"),
        (lambda r: r["inputs"][0].update(dtype="float7"), ModelError, "its manifest is damaged"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_line(
    copy: Path, change: Callable[[dict], None], error: type[Exception], text: str
) -> None:
    rewritten(copy, change)
    with pytest.raises(error) as caught:
        tilewright.load(copy)
    assert text in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_no_saved_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, text in [("none", "does not exist"), ("file", "is a file"), ("", "has no manifest.json")]:
        with pytest.raises(ModelError, match=text):
            tilewright.load(tmp_path / path)


@pytest.mark.parametrize("threads", [0, 10**6, 1.5])
def test_threads_are_checked(folder: Path, threads: object) -> None:
    with pytest.raises(OptionError, match="threads cannot be"):
        tilewright.load(folder, threads=threads)  # type: ignore[arg-type]


# ---- writing


def test_other_files_are_left_alone(folder: Path, tmp_path: Path) -> None:
    model = tilewright.load(folder)
    place = tmp_path / "mine"
    place.mkdir()
    (place / "thesis.txt").write_text("years of work")
    with pytest.raises(OptionError, match="holds other files"):
        model.save(place)
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="is a file"):
        model.save(tmp_path / "file")
    assert (place / "thesis.txt").read_text() == "years of work"
    (place / "thesis.txt").unlink()
    model.save(place)
    np.testing.assert_array_equal(tilewright.load(place)(X)[0], model(X)[0])


def test_another_model_takes_the_place_of_the_first(folder: Path, tmp_path: Path) -> None:
    """Also in a process that has the first one loaded, which goes on with it."""
    place = tmp_path / "model"
    compiled(folder.parent, dense()).save(place)
    first = tilewright.load(place)
    wanted = first(X)[0]
    compiled(folder.parent, dense(scale=2.0)).save(place)
    changed = model_of([("Neg", ["x"], "z", {})], {"x": (3, 4)}, {"z": (3, 4)})
    np.testing.assert_allclose(tilewright.load(place)(X)[0], 2 * wanted)
    compiled(folder.parent, changed).save(place)
    np.testing.assert_array_equal(tilewright.load(place)(X)[0], -X)
    np.testing.assert_array_equal(first(X)[0], wanted)
    assert [p.name for p in tmp_path.iterdir() if p.name != "model"] == []


def test_a_full_disk_leaves_the_old_model(
    folder: Path, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    model = compiled(folder.parent, dense(scale=2.0))
    before = sorted(p.name for p in tmp_path.iterdir())
    monkeypatch.setattr(files.shutil, "copyfile", full)
    for place in (copy, tmp_path / "new"):
        with pytest.raises(ToolError, match=f"cannot write {place}: No space left on device"):
            model.save(place)
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    np.testing.assert_allclose(tilewright.load(copy)(X)[0], expected(), rtol=1e-6)


@pytest.mark.slow
def test_a_model_from_the_cache_is_saved_too(tmp_path: Path) -> None:
    compiled(tmp_path, dense())
    again = compiled(tmp_path, dense())
    again.save(tmp_path / "again")
    np.testing.assert_array_equal(tilewright.load(tmp_path / "again", threads=1)(X)[0], again(X)[0])
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(ToolError, match="removed from the cache"):
        again.save(tmp_path / "late")


def test_what_has_no_code_is_not_saved(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="leave out stop_after"):
        compiled(folder.parent, dense(), stop_after="source").save(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_denormals_and_constants_only(folder: Path, tmp_path: Path) -> None:
    """A model without weights and one that keeps denormals."""
    tiny = np.array([1e-40], np.float32)
    for denormals, wanted in (("keep", tiny), ("flush", np.zeros(1, np.float32))):
        half = model_of([("Add", ["x", "x"], "y", {})], {"x": (1,)}, {"y": (1,)})
        compiled(folder.parent, half, denormals=denormals).save(tmp_path / denormals)
        loaded = tilewright.load(tmp_path / denormals)
        assert (tmp_path / denormals / "model.weights").stat().st_size == 0
        np.testing.assert_array_equal(loaded(tiny)[0], 2 * wanted)


def test_permissions_are_asked_for_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the cache and from a directory: AMX is granted to a process, not to a file."""
    from tilewright.backend.cpu import machine_code
    from tilewright.runtime import cpu_model

    asked: list[str] = []
    monkeypatch.setattr(machine_code, "_permissions", lambda *_: ["amx"])
    monkeypatch.setattr(machine_code, "request", asked.append)
    monkeypatch.setattr(cpu_model, "request", asked.append)
    compiled(folder.parent, dense(3.0)).save(tmp_path / "saved")
    asked.clear()
    compiled(folder.parent, dense(3.0))
    tilewright.load(tmp_path / "saved")
    assert asked == ["amx", "amx"]


# ---- the command


def test_the_command_writes_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: object) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "m.onnx").write_bytes(dense().SerializeToString())
    out = tmp_path / "saved"
    assert main(["compile", str(tmp_path / "m.onnx"), "-o", str(out), "--threads", "1"]) == 0
    assert f"wrote {out}, " in capsys.readouterr().out  # type: ignore[attr-defined]
    np.savez(tmp_path / "in.npz", x=X)
    assert main(["run", str(out), "--inputs", str(tmp_path / "in.npz"), "--outputs", str(tmp_path / "out.npz")]) == 0
    np.testing.assert_allclose(np.load(tmp_path / "out.npz")["z"], expected(), rtol=1e-6)
    assert main(["explain", str(out)]) == 0
    assert main(["compile", str(tmp_path / "m.onnx"), "-o", str(tmp_path)]) == 2
    assert "holds other files" in capsys.readouterr().err  # type: ignore[attr-defined]
