"""Whole models in the cache: the second compilation runs no stage, and nothing doubtful is ever used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

import tilewright
from tests.cpu_stages import model_of
from tilewright import Model, ModelError, Options
from tilewright.compiler import pipeline as compiler
from tilewright.packages import stored
from tilewright.target import machine

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def dense(scale: float = 1.0) -> ModelProto:
    weight = (scale * np.arange(20, dtype=np.float32)).reshape(4, 5)
    return model_of([("MatMul", ["x", "w"], "y", {}), ("Relu", ["y"], "z", {})], {"x": (3, 4)}, {"z": (3, 5)},
                    {"w": weight})  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "dense.onnx"
    file.write_bytes(dense().SerializeToString())
    return file


@pytest.fixture
def compile_it(tmp_path: Path, fresh_cache: Callable[[Path], Path]) -> Callable[..., Model]:
    fresh_cache(tmp_path / "cache")

    def run(model: object, **more: object) -> Model:
        options = Options(cache_dir=tmp_path / "cache", threads=1).override(**more)
        return tilewright.compile(model, options=options)  # type: ignore[arg-type]

    return run


def is_stored(model: Model) -> bool:
    return isinstance(model._artifact, stored.StoredArtifact)


def entries(tmp_path: Path, kind: str) -> list[Path]:
    return sorted((tmp_path / "cache").rglob(f"*.{kind}"))


def test_the_second_time_comes_from_the_cache(path: Path, compile_it: Callable[..., Model]) -> None:
    first, second = compile_it(path), compile_it(path)
    assert (is_stored(first), is_stored(second)) == (False, True)
    assert (first.inputs, first.outputs, first.calls) == (second.inputs, second.outputs, second.calls)
    np.testing.assert_array_equal(first(X)[0], second(X)[0])
    assert len(second.profile(X, repeat=1).calls) == len(first.calls)


def test_bytes_are_taken_too(path: Path, compile_it: Callable[..., Model]) -> None:
    compile_it(path)
    assert is_stored(compile_it(path.read_bytes()))


def test_what_the_compiler_made_is_made_again_on_request(path: Path, compile_it: Callable[..., Model]) -> None:
    first, second = compile_it(path), compile_it(path)
    assert second.artifact.plan == first.artifact.plan
    assert second.artifact.sources == first.artifact.sources
    assert second.artifact.runner is second._runner
    assert second.explain().splitlines()[0] == first.explain().splitlines()[0]


def test_a_changed_file_is_another_model(path: Path, compile_it: Callable[..., Model]) -> None:
    compile_it(path)
    old = compile_it(path)
    path.write_bytes(dense(2.0).SerializeToString())
    new = compile_it(path)
    assert not is_stored(new)
    np.testing.assert_allclose(new(X)[0], 2 * old(X)[0])
    with pytest.raises(ModelError, match="has changed since it was compiled"):
        assert old.artifact


def test_a_file_that_changes_while_it_is_compiled_is_not_kept(
    path: Path, compile_it: Callable[..., Model], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = stored.keep

    def late(*arguments: object) -> object:
        path.write_bytes(dense(2.0).SerializeToString())
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(stored, "keep", late)
    compile_it(path)
    assert not entries(tmp_path, "model")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "more", [{"schedule": "none"}, {"verify": True}, {"stop_after": "plan"}, {"dump": Path("dumped")}], ids=str
)
def test_other_options_are_another_model(
    path: Path, compile_it: Callable[..., Model], more: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    compile_it(path)
    assert not is_stored(compile_it(path, **more))


def test_threads_do_not_matter(path: Path, compile_it: Callable[..., Model]) -> None:
    compile_it(path)
    again = compile_it(path, threads=2)
    assert is_stored(again)
    assert again._runner.threads == 2


@pytest.mark.slow
def test_shapes_matter(tmp_path: Path) -> None:
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "open", ports[:1], ports[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    options = Options(cache_dir=tmp_path, threads=1)
    made = [tilewright.compile(model, shapes={"n": n}, options=options) for n in (3, 4, 3)]
    assert [is_stored(m) for m in made] == [False, False, True]
    assert [m.inputs[0].shape for m in made] == [(3,), (4,), (3,)]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("kind", "damage"),
    [("model", "cut"), ("model", "changed"), ("so", "gone"), ("so", "cut"), ("weights", "cut"), ("weights", "gone")],
)
def test_a_damaged_entry_is_not_used(
    path: Path, compile_it: Callable[..., Model], tmp_path: Path, kind: str, damage: str
) -> None:
    wanted = compile_it(path)(X)[0]
    for file in entries(tmp_path, kind):
        data = file.read_bytes()
        # a new file: the old one may still be mapped
        file.unlink()
        if damage != "gone":
            file.write_bytes(data[: len(data) // 2] if damage == "cut" else data[:-1] + bytes([data[-1] ^ 1]))
    again = compile_it(path)
    assert not is_stored(again)
    np.testing.assert_array_equal(again(X)[0], wanted)
    assert is_stored(compile_it(path))


def external(folder: Path) -> Path:
    import onnx

    folder.mkdir()
    onnx.save(dense(), folder / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    return folder / "m.onnx"


def test_tensors_in_other_files_are_part_of_the_model(compile_it: Callable[..., Model], tmp_path: Path) -> None:
    file = external(tmp_path / "external")
    first = compile_it(file)(X)[0]
    again = compile_it(file)
    assert is_stored(again)
    np.testing.assert_array_equal(again(X)[0], first)
    data = file.with_name("m.data")
    data.write_bytes((2 * np.frombuffer(data.read_bytes(), np.float32)).tobytes())
    with pytest.raises(ModelError, match="has changed since it was compiled"):
        _ = again.artifact
    changed = compile_it(file)
    assert not is_stored(changed)
    np.testing.assert_allclose(changed(X)[0], 2 * first)


def test_models_in_memory_are_found(compile_it: Callable[..., Model]) -> None:
    model = dense()
    first = compile_it(model)(X)[0]
    again = compile_it(dense())
    assert is_stored(again)
    np.testing.assert_array_equal(again(X)[0], first)
    assert not is_stored(compile_it(dense(2.0)))


def test_a_model_changed_in_memory_is_not_taken_for_the_old_one(compile_it: Callable[..., Model]) -> None:
    model = dense()
    compile_it(model)
    again = compile_it(model)
    model.CopyFrom(dense(2.0))
    with pytest.raises(ModelError, match="the model has changed since it was compiled"):
        _ = again.artifact


@pytest.mark.host  # another process looks for the model of this computer
@pytest.mark.parametrize("where", ["inside", "beside"])
def test_from_the_cache_nothing_of_the_compiler_is_imported(
    where: str, path: Path, compile_it: Callable[..., Model], tmp_path: Path
) -> None:
    path = path if where == "inside" else external(tmp_path / "external")
    compile_it(path)
    script = """
import json, sys
from pathlib import Path
import tilewright
options = tilewright.Options(cache_dir=Path(sys.argv[2]), threads=1)
tilewright.compile(sys.argv[1], options=options)
print(json.dumps([n for n in ("onnx", "tilewright.compiler.pipeline", "tilewright.schedule") if n in sys.modules]))
"""
    command = [sys.executable, "-c", script, str(path), str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ))
    assert json.loads(done.stdout) == []


def test_explaining_and_saving_use_what_a_run_has_kept(
    path: Path, compile_it: Callable[..., Model], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = compile_it(path)
    first.save(tmp_path / "first")
    again = compile_it(path)
    assert is_stored(again)
    monkeypatch.setattr(compiler, "build", None)
    assert again.explain() == first.explain()
    again.save(tmp_path / "again")
    files = [sorted(p.relative_to(tmp_path / n) for p in (tmp_path / n).rglob("*")) for n in ("first", "again")]
    assert files[0] == files[1]
    for name in files[0]:
        if name.suffix in (".c", ".h", ".txt") or name.name == "plan.json":
            assert (tmp_path / "first" / name).read_text() == (tmp_path / "again" / name).read_text()
    np.testing.assert_array_equal(tilewright.load(tmp_path / "again")(X)[0], first(X)[0])


def test_texts_that_are_gone_are_made_again(path: Path, compile_it: Callable[..., Model], tmp_path: Path) -> None:
    first = compile_it(path)
    (texts,) = entries(tmp_path, "texts")
    texts.unlink()
    assert compile_it(path).explain().splitlines()[0] == first.explain().splitlines()[0]
    compile_it(path).save(tmp_path / "saved")


def test_the_forms_of_a_heavy_model_are_not_kept(
    path: Path, compile_it: Callable[..., Model], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stored, "_HEAVY_BYTES", 16)
    model = compile_it(path)
    assert is_stored(model)  # without a look at the cache
    assert "became 1 kernel" in model.explain() and model.artifact.plan is not None
    model.save(tmp_path / "saved")


def test_a_large_model_file_is_read_once(
    compile_it: Callable[..., Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the system says of it; a file with another content is another."""
    file = tmp_path / "large.onnx"
    model = dense()
    model.doc_string = "x" * (1 << 20)
    file.write_bytes(model.SerializeToString())
    time.sleep(0.15)
    compile_it(file)
    read: list[str] = []
    real = stored.file_digest
    monkeypatch.setattr(stored, "file_digest", lambda file, kind: read.append(kind) or real(file, kind))
    assert is_stored(compile_it(file)) and not read
    before = file.stat()
    file.write_bytes(file.read_bytes()[:-1] + b"\x12")  # the same size, and the same time of change
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    stored.identify(file, {}, machine("cpu"), Options(cache_dir=tmp_path / "cache"))
    assert read


def test_what_is_told_of_a_model_is_made_when_it_is_asked_for_and_then_kept(
    path: Path, compile_it: Callable[..., Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From all forms, from what the cache has of them, and saved: the same text; of a stored model, made once."""
    from tilewright.report import explain

    tell, made = explain.explain_text, []
    monkeypatch.setattr(explain, "explain_text", lambda *given, **named: made.append(1) or tell(*given, **named))
    first = compile_it(path)
    assert not made
    told = first.explain()
    made.clear()
    assert [compile_it(path).explain() for _ in range(3)] == [told] * 3
    compile_it(path).save(tmp_path / "saved")
    assert len(made) == 1 and tilewright.load(tmp_path / "saved").explain() == told
