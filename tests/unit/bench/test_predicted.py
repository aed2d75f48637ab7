"""The comparison of predicted and measured times: files of measurements, and the cost model on what they hold."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from bench import held_out
from bench.measurements import Call, Measured, predict, read, read_program, shown, with_program, write
from bench.predicted import BEYOND, STORED, SUFFIX, Share, by_model, free_factor, report
from tilewright.compiler.pipeline import build
from tilewright.frontend.onnx.model import load
from tilewright.ir.text.text import program_text
from tilewright.options import Options
from tilewright.target import Target, machine

MACHINES = ("neoverse_n1", "emerald_rapids")


def two_layers(path: Path, columns: int = 64) -> Path:
    weights = [
        numpy_helper.from_array(np.ones((96, columns), np.float32), "w"),
        numpy_helper.from_array(np.ones((columns, 512), np.float32), "v"),
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Softmax", ["h"], ["s"]),
        helper.make_node("MatMul", ["s", "v"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, (200, 96))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, (200, 512))
    graph = helper.make_graph(nodes, "layers", [x], [y], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(path))
    return path


def measured(path: Path, target: Target, times: Sequence[float] = ()) -> Measured:
    """A model as if measured: every kernel takes twice its prediction, or these microseconds."""
    artifact = build(load(path, {}), target, Options(stop_after="plan"))
    assert artifact.program is not None and artifact.plan is not None
    kernels = artifact.plan.kernels
    each = times or [2e6 * k.estimate.seconds for k in kernels]
    calls = tuple(Call(i, k.name, time, {}) for i, (k, time) in enumerate(zip(kernels, each, strict=True)))
    return Measured(path.stem, calls, program_text(artifact.program), artifact.plan)


@pytest.mark.parametrize("name", MACHINES)
def test_a_plan_read_back_is_predicted_as_when_it_was_planned(name: str, tmp_path: Path) -> None:
    target = machine(name)
    made = measured(two_layers(tmp_path / "layers.onnx"), target)
    write(tmp_path / f"times{SUFFIX}", [made])
    (again,) = read(tmp_path / f"times{SUFFIX}")
    assert again.plan == made.plan
    calls = predict(again, target)
    assert len(calls) == len(made.calls) and all(call.unchanged for call in calls)
    assert [call.ratio for call in calls] == pytest.approx([2.0] * len(calls), rel=2e-3)


def test_times_alone_are_matched_with_plans_of_the_model(tmp_path: Path) -> None:
    """A kernel that was measured under another tile is left out."""
    target = machine("emerald_rapids")
    path = two_layers(tmp_path / "layers.onnx")
    made = measured(path, target)
    assert made.plan is not None
    kernels = {k.name: k for k in made.plan.kernels}
    plain = [replace(c, shown=shown(kernels[c.kernel])) for c in made.calls]
    assert len(with_program(Measured("layers", tuple(plain)), path, target).calls) == len(plain)
    plain[-1] = replace(plain[-1], shown={**plain[-1].shown, "tile": {"o0": 3}})
    kept = with_program(Measured("layers", tuple(plain)), path, target)
    assert [c.number for c in kept.calls] == [c.number for c in plain[:-1]]


def test_a_file_without_programs_needs_the_models() -> None:
    with pytest.raises(ValueError, match="neither Program nor Plan"):
        predict(Measured("layers", ()), machine("neoverse_n1"))


def test_one_factor_a_model_is_free() -> None:
    assert free_factor(np.array([3.0, 3.1, 2.9, 30.0])) == pytest.approx(3.0, rel=0.4)
    share = Share("layers", 1.0, (0.69, 0.7, 1.0, 1.4, 1.5, 2.9, 3.1, 0.3))
    assert share.within == pytest.approx(3 / 8) and share.beyond == 2 and BEYOND == 3.0


def test_the_report_names_the_worst_kernels(tmp_path: Path) -> None:
    target = machine("emerald_rapids")
    made = measured(two_layers(tmp_path / "layers.onnx"), target)
    slow = replace(made.calls[-1], microseconds=10 * made.calls[-1].microseconds)
    text = report("times", [replace(made, calls=(*made.calls, *made.calls, slow))], target, 1)
    assert "Plans unchanged" in text and "| layers |" in text and "predicted as emerald_rapids" in text
    assert "contraction 200x512 over 64" in text


@pytest.mark.parametrize("name", MACHINES)
def test_stored_measurements_can_be_read(name: str) -> None:
    every = read(STORED / f"{name}{SUFFIX}")
    assert len(every) >= 11
    small = next(each for each in every if each.model == "mobilenet_v2")
    assert small.program is not None and read_program(small.program).computes


@pytest.mark.slow
@pytest.mark.parametrize("name", MACHINES)
def test_the_model_predicts_a_network_as_measured(name: str) -> None:
    every = [each for each in read(STORED / f"{name}{SUFFIX}") if each.model in ("mobilenet_v2", "vit_s")]
    for share in by_model([call for each in every for call in predict(each, machine(name))]):
        assert share.within >= 0.8 and share.beyond == 0, share


def test_held_out_models_are_predicted_by_constants_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three models that agree with the prediction where elements are gathered at 2.2 reads, one at 3 alone."""
    wanted = {"a": 2.2, "b": 2.2, "c": 2.2, "odd": 3.0}

    def ratios(_: object, model: str, constants: tuple[float, ...]) -> np.ndarray:
        right = constants[list(held_out.GRID).index("gathered_reads")] == wanted[model]
        return np.array([1.0, 1.0, 1.0, 1.0] if right else [1.0, 2.5, 6.0, 15.0])

    monkeypatch.setattr(held_out.Fits, "of", ratios)
    text = held_out.report("times", [Measured(m, (), None, None) for m in wanted], machine("neoverse_n1"))
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|")}
    assert "100%" in rows["a"] and "100%" not in rows["odd"] and "25%" in rows["odd"]
    assert "gathered_reads 2.2, stream_cost 0, lane_check 0, foreign 0, cold_start 0." in text


def test_without_asking_for_todays_plans_none_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = machine("neoverse_n1")
    made = measured(two_layers(tmp_path / "layers.onnx"), target)
    whole = predict(made, target)
    monkeypatch.setattr("bench.measurements.make_plan", None)
    quick = predict(made, target, today=False)
    assert [c.microseconds for c in quick] == [c.microseconds for c in whole] and not any(c.unchanged for c in quick)
