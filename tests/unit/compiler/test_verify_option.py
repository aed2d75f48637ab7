"""`verify` holds every stage to the first Program, and names what an edited dump broke."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

from tests.gpu_stages import argmax, attention, graph, softmax_of_matmul
from tests.unit.dynamic.test_extents import open_graph
from tilewright.compiler import verifying
from tilewright.compiler.pipeline import build
from tilewright.compiler.verifying import Verifier, difference, work
from tilewright.errors import InternalError
from tilewright.frontend.onnx.model import load
from tilewright.ir.forms.graph import Room
from tilewright.options import Options
from tilewright.target import machine


def compiled(model: ModelProto, cache: Path, **given: object) -> None:
    options = Options(verify=True, cache_dir=cache, **given)  # type: ignore[arg-type]
    build(load(model, {}), machine(options.target), options)


def edited(model: ModelProto, tmp_path: Path, stage: str, name: str, edit: Callable[[str], str]) -> None:
    """Compile, edit the dump of one stage, and compile with it in the stage's place."""
    options = Options(dump=tmp_path / "dump", stop_after=stage)
    build(load(model, {}), machine("cpu"), options)
    (path,) = (tmp_path / "dump").glob(f"*-{name}")
    before = path.read_text()
    after = edit(before)
    assert after != before
    path.write_text(after)
    compiled(model, tmp_path, overrides=((stage, path),))


@pytest.mark.sample(2)
@pytest.mark.parametrize("target", ("cpu", "cuda-emulated"))
def test_right_stages_pass(target: str, kernel_cache: Path) -> None:
    compiled(attention(13, 5), kernel_cache, target=target)
    compiled(argmax((5, 61), 1), kernel_cache, target=target)
    row = graph([("Exp", ["x"], "y", {})], [("x", ())], [("y", ())])
    compiled(row, kernel_cache, target=target)


def test_a_changed_program_is_caught(tmp_path: Path) -> None:
    with pytest.raises(InternalError) as caught:
        edited(softmax_of_matmul(4, 8, 6), tmp_path, "fold", "fold.txt", lambda t: t.replace("exp(", "abs("))
    text = str(caught.value)
    assert text.startswith("stage 'fold' changed the meaning of the model: o[")
    assert "elements differ" in text


def test_changed_loops_are_caught(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match=r"^stage 'loops' changed the meaning of the model: o\["):
        edited(softmax_of_matmul(4, 8, 6), tmp_path, "loops", "loops.txt", lambda t: t.replace(" / ", " * "))


def test_loops_that_read_what_nobody_wrote_are_caught(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match="^stage 'loops' made Loops that break a rule: kernel k0"):
        edited(
            softmax_of_matmul(4, 8, 64), tmp_path, "loops", "loops.txt",
            lambda t: t.replace("] = 0.0\n", "] = 0.0 * s0[0, 0]\n", 1),
        )  # fmt: skip


def test_a_changed_but_right_plan_passes(tmp_path: Path) -> None:
    def one_row_a_tile(text: str) -> str:
        plan = json.loads(text)
        kernel = plan["body"]["tile"]["body"][0]["tile"]
        kernel["axes"] = [{"name": "rows", "extent": 4, "binds": [{"tensor": "o", "axis": "o0"}]}]
        kernel["sizes"] = [["rows", 1]]
        return json.dumps(plan)

    edited(softmax_of_matmul(4, 8, 6), tmp_path, "plan", "plan.json", one_row_a_tile)


def test_wrong_code_is_caught() -> None:
    class Wrong:
        def run(self, inputs: list[np.ndarray], outputs: list[np.ndarray]) -> None:
            outputs[0][...] = 0.25
            outputs[0][1, 2] = np.nan

    artifact = build(load(softmax_of_matmul(4, 8, 6), {}), machine("cpu"), Options(stop_after="layout"))
    verifier = Verifier()
    verifier.check("program", artifact.program)
    with pytest.raises(InternalError, match=r"^stage 'machine' .*: o\[1, 2\] is nan, and was "):
        verifier.check("machine", Wrong())


def test_large_models_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "SMALL", 1)
    compiled(softmax_of_matmul(37, 16, 29), tmp_path)
    with pytest.raises(InternalError, match="^stage 'fold' .* of 64 elements differ"):
        edited(softmax_of_matmul(37, 16, 29), tmp_path, "fold", "fold.txt", lambda t: t.replace(" / ", " * "))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sizes_that_a_run_tells_are_inside_their_range(tmp_path: Path, seed: int) -> None:
    """What lies behind the last element is nobody's, so that no stage is held to it."""
    nodes = [helper.make_node("Softmax", ["x"], ["s"], axis=0), helper.make_node("ReduceSum", ["s", "axes"], ["y"])]
    model = open_graph(nodes, {"x": (TensorProto.FLOAT, ["n", 6])}, (Room(5, 40),), axes=np.array([1]))
    options = Options(verify=True, cache_dir=tmp_path, stop_after="loops", seed=seed)
    assert build(model, machine("avx2_desktop"), options).program.ends


def test_differences() -> None:
    expected = np.array([1.0, np.nan, np.inf, -100.0])
    assert difference(expected.astype(np.float32), expected).max() == 0
    assert difference(np.array([1.0, 0.0, np.inf, -100.0]), expected).argmax() == 1
    assert difference(np.array([2.0, np.nan, np.inf, -100.0]), expected).max() == pytest.approx(0.01)
    assert difference(np.array([1, 2]), np.array([1, 3])).tolist() == [0.0, 1.0]
    assert difference(np.zeros(0), np.zeros(0)).size == 0


def test_work_counts_multiplications() -> None:
    artifact = build(load(softmax_of_matmul(4, 8, 6), {}), machine("cpu"), Options(stop_after="program"))
    assert artifact.program is not None
    assert work(artifact.program.computes) == 4 * 8 * 6 + 4 * (4 * 6)
