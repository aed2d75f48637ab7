"""Loops behind `unroll` and `join_calls`: forms of their own, dumped, checked, and taken back from an edited dump."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from tests.cpu_stages import model_of
from tilewright.backend import renderable
from tilewright.compiler.pipeline import Artifact, build
from tilewright.errors import InternalError
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.loops import For, ForKind, statements
from tilewright.ir.text.parse import parse_loops
from tilewright.lower.memory import scratch
from tilewright.options import Options
from tilewright.target import machine

N1 = machine("neoverse_n1")


def turned() -> ModelProto:
    """Squares of registers are turned one after the other, in copies of one loop, and functions called."""
    steps = [("MatMul", ["x", "w"], "p", {}), ("Transpose", ["p"], "t", {"perm": [1, 0]}), ("Sigmoid", ["t"], "y", {})]
    weight = np.random.default_rng(0).standard_normal((24, 64)).astype(np.float32)
    return model_of(steps, {"x": (64, 24)}, {"y": (64, 64)}, {"w": weight})


def made(folder: Path, target: str = "neoverse_n1", **given: object) -> Artifact:
    options = Options(dump=folder, stop_after="source", **given)  # type: ignore[arg-type]
    return build(load(turned(), {}), machine(target), options)


def text(folder: Path, stage: str) -> str:
    (file,) = folder.glob(f"*-{stage}.txt")
    return file.read_text()


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Artifact, Path]:
    folder = tmp_path_factory.mktemp("first")
    return made(folder), folder


def test_they_are_stages_that_leave_neither_loops_nor_lone_calls(first: tuple[Artifact, Path]) -> None:
    artifact, folder = first
    assert list(artifact.stage_seconds)[-4:] == ["loops", "unroll", "join_calls", "source"]
    for stage in ("loops", "unroll", "join_calls"):
        (kernel,) = parse_loops(text(folder, stage)).kernels
        kinds = {s.kind for s in statements(kernel.body) if isinstance(s, For)}
        assert (ForKind.UNROLL in kinds) == (stage == "loops")
    assert "alloc calls_0: register" in text(folder, "join_calls") and "calls_0" not in text(folder, "unroll")
    assert len(re.findall(r"alloc square: register", text(folder, "unroll"))) > 1


def test_scratch_lies_where_it_did_before(first: tuple[Artifact, Path]) -> None:
    loops = first[0].loops
    assert loops is not None
    for before, after in zip(loops.kernels, renderable(loops, N1).kernels, strict=True):
        assert scratch(before) == scratch(after)


@pytest.mark.parametrize("stage", ["unroll", "join_calls"])
def test_their_dump_is_taken_back(stage: str, first: tuple[Artifact, Path], tmp_path: Path) -> None:
    file = tmp_path / "edited.txt"
    file.write_text(text(first[1], stage).replace("sigmoid(", "tanh("))
    sources = "".join(made(tmp_path / "again", overrides=((stage, file),)).sources.values())
    assert text(tmp_path / "again", stage) == file.read_text()
    assert "tw_tanh_4_v4f32(" in sources and "sigmoid" not in sources


def test_an_edit_that_breaks_the_grammar_is_refused(first: tuple[Artifact, Path], tmp_path: Path) -> None:
    """A buffer may be there again, not twice at once."""
    (line,) = set(re.findall(r"alloc square: .*", text(first[1], "unroll")))
    file = tmp_path / "edited.txt"
    file.write_text(text(first[1], "unroll").replace(line, f"{line} {line} }}", 1))
    with pytest.raises(InternalError, match="the name square is used twice"):
        made(tmp_path / "again", overrides=(("unroll", file),))


def test_a_gpu_leaves_them_as_they_are(tmp_path: Path) -> None:
    made(tmp_path, "h200")
    assert text(tmp_path, "loops") == text(tmp_path, "unroll") == text(tmp_path, "join_calls")
