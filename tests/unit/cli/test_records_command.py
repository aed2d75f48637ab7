"""`tilewright records`: files of measured plans shown and put together, in one line where that cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tilewright.cli.main import main
from tilewright.target import machine
from tilewright.tune.records import Anchor, Machine, Measurement, Writer, digest, read

PROGRAM = "program\nend\n"
HERE = Machine.of(machine("neoverse_n1"), "a processor", "0x41 0xd0c")
MEASURED = Measurement(digest(PROGRAM), HERE.digest, {"target": "neoverse_n1"}, "a task", "product", "tuned", 2, "wall",
                       "model", 8.0, 0.02, 9, Anchor(10.0, 10.1))  # fmt: skip


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Two files with one measurement in common."""
    paths = [tmp_path / "one.twr", tmp_path / "two.twr"]
    for path, microseconds in zip(paths, (9.0, 7.0), strict=True):
        writer = Writer(path)
        writer.append(MEASURED, PROGRAM, HERE)
        writer.append(replace(MEASURED, microseconds=microseconds), PROGRAM, HERE)
    return [str(path) for path in paths]


def test_show_tells_the_best_by_class(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["records", "show", *files, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["class"], row["threads"], row["tasks"], row["plans"], row["best"]) for row in rows] == [
        ("product", 2, 1, 2, 0.8), ("product", 2, 1, 2, 0.7)]  # fmt: skip
    assert rows[0]["machine"] == "a processor (0x41 0xd0c)"


def test_merge_keeps_what_is_the_same_once(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = tmp_path / "both.twr"
    assert main(["records", "merge", *files, "-o", str(both)]) == 0
    assert [m.microseconds for m in read(both).measurements] == [8.0, 9.0, 7.0]
    assert main(["records", "merge", *files, "-o", str(both)]) == 2
    assert "both.twr is there already" in capsys.readouterr().err


def test_what_is_no_file_of_records_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = tmp_path / "wrong.twr"
    wrong.write_text("not JSON\n")
    assert main(["records", "show", str(wrong)]) == 2
    told = capsys.readouterr().err
    assert "wrong.twr, line 1: not JSON" in told and len(told.splitlines()) == 1
