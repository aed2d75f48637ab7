"""bench.expected: what whole models should take where older plans were measured."""

from pathlib import Path

import pytest

from bench.expected import Expected, Part, model_file, report


def part(milliseconds: float, kind: str = "contraction") -> Part:
    return Part(kind, milliseconds, 0.5 * milliseconds, f"{kind} of {milliseconds}")


def test_times_follow_the_ratio_of_predictions() -> None:
    """Of 10 ms as much is left as of the prediction; weights that are asked for now were waited for in full."""
    each = Expected("a", 10.0, 9.0, [part(6.0), part(2.0)], [part(4.0)], 1.0, 1800.0)
    assert each.by_plan == pytest.approx(9.0 / 5.0)
    assert each.at_best == pytest.approx(9.0 / (10.0 * 4.0 / 8.5))
    assert each.cells()[-1] == "200"


def test_a_model_without_measured_kernels_stays_where_it_was() -> None:
    each = Expected("a", 10.0, 9.0, [], [part(4.0)], 0.0, 1.0)
    assert each.by_plan == each.at_best == pytest.approx(0.9)


def test_kernels_are_ranked_by_what_lies_above_their_floor() -> None:
    each = Expected("a", 10.0, 9.0, [part(8.0)], [part(1.0, "map"), part(3.0), part(3.0)], 0.0, 1.0)
    lines = report([each], 2).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("a, ms above"))
    assert lines[first + 2].split()[:2] == ["3.00", "2"] and lines[first + 3].split()[:2] == ["0.50", "1"]
    assert any("1.029 by plan" in line for line in lines)


def test_models_are_found_by_either_name(tmp_path: Path) -> None:
    (tmp_path / "bert_base.onnx").touch()
    assert model_file(tmp_path, "bert_128") == tmp_path / "bert_base.onnx"
    assert model_file(tmp_path, "unet") is None
