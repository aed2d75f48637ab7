"""The C compiler begins while the pipeline is busy: when it does, when it does not, and where its errors appear."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.cpu_stages import model_of
from tilewright.backend.cpu import machine_code
from tilewright.compiler.pipeline import Artifact, build
from tilewright.errors import ToolError
from tilewright.frontend.onnx.model import load
from tilewright.options import Options
from tilewright.runtime import ObjectCompiler, runtime_sources
from tilewright.target import machine, why_not_here

pytestmark = pytest.mark.host

MODEL = model_of([("Softmax", ["x"], "s", {}), ("MatMul", ["s", "w"], "y", {})], {"x": (8, 16)}, {"y": (8, 16)},
                 {"w": np.ones((16, 16), np.float32)})  # fmt: skip


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names given to the compiler before the machine stage, in order."""
    names: list[str] = []
    start, finish = ObjectCompiler.start, machine_code.load

    def starting(own: ObjectCompiler, name: str, text: str) -> None:
        names.append(name)
        start(own, name, text)

    def loading(*given: object, **more: object) -> object:
        names.append("load")
        return finish(*given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(ObjectCompiler, "start", starting)
    monkeypatch.setattr(machine_code, "load", loading)
    return names


def compiled(folder: Path, **options: object) -> Artifact:
    return build(load(MODEL), machine("cpu"), Options(cache_dir=folder, **options))  # type: ignore[arg-type]


def test_kernels_and_the_runtime_are_begun_before_machine_code_is_asked_for(tmp_path: Path, started: list[str]) -> None:
    artifact = compiled(tmp_path)
    with artifact.runner:
        before = started[: started.index("load")]
        assert before == [*runtime_sources(), *artifact.sources]


def test_nothing_is_begun_where_no_machine_code_is_wanted(tmp_path: Path, started: list[str]) -> None:
    assert compiled(tmp_path, stop_after="source").sources
    assert started == [] and list(tmp_path.iterdir()) == []


def test_nothing_is_begun_for_another_machine(tmp_path: Path, started: list[str]) -> None:
    other = next(m for m in map(machine, ("neoverse_n1", "emerald_rapids")) if why_not_here(m) is not None)
    with pytest.raises(ToolError, match="cannot run here"):
        build(load(MODEL), other, Options(cache_dir=tmp_path))
    assert started == ["load"]


def test_a_failure_on_the_way_leaves_nothing_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[ObjectCompiler] = []
    leave = ObjectCompiler.__exit__

    def leaving(own: ObjectCompiler, *reason: object) -> None:
        left.append(own)
        leave(own, *reason)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ObjectCompiler, "__exit__", leaving)
    monkeypatch.setattr(machine_code, "render", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compiled(tmp_path)
    assert len(left) == 1
    with pytest.raises(RuntimeError, match="shutdown"):
        left[0].start("late", "int late;\n")


def test_errors_of_the_compiler_appear_in_the_machine_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    with pytest.raises(ToolError, match="not a working C compiler"):
        compiled(tmp_path, compiler="no-such-compiler", progress=seen.append)
    assert seen[-1] == "machine"
    monkeypatch.setattr(machine_code, "render_kernel", lambda *_: "not C\n")
    with pytest.raises(ToolError, match="k0: .* failed"):
        compiled(tmp_path, progress=seen.append)
    assert seen[-1] == "machine"
