"""Files of measured plans: what is appended is read back, and what is wrong with a line is told with its place."""

import json
import lzma
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tilewright.target import machine
from tilewright.tune.records import (
    Anchor,
    Machine,
    Measurement,
    RecordError,
    RecordPair,
    Writer,
    digest,
    read,
    read_program,
)

PROGRAM = 'program\n  constant "a b": float32[2, 3] "0"\nend\n'
HERE = Machine.of(machine("neoverse_n1"), "a processor", "aarch64")
MEASURED = Measurement(
    digest(PROGRAM), HERE.digest, {"target": "neoverse_n1"}, "a task", "product", "zoo", 1, "thread", "swept", 12.5,
    0.02, 9, Anchor(12.4, 12.5), (RecordPair("a task #1", "joined"),),
)  # fmt: skip


def written(path: Path) -> list[dict[str, object]]:
    Writer(path).append(MEASURED, PROGRAM, HERE)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_is_appended_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    written(path)
    Writer(path).append(replace(MEASURED, microseconds=13.0), PROGRAM, HERE)
    found = read(path)
    assert [m.microseconds for m in found.measurements] == [12.5, 13.0]
    assert found.measurements[0] == MEASURED
    assert found.programs == {digest(PROGRAM): PROGRAM} and found.targets == {HERE.digest: HERE}
    assert found.targets[HERE.digest].target() == machine("neoverse_n1")


def test_programs_and_targets_are_stored_once(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    written(path)
    kinds = [line["kind"] for line in written(path)]
    assert kinds == ["program", "target", "measurement", "measurement"]


def test_compressed_files_are_read_but_do_not_grow(tmp_path: Path) -> None:
    plain, packed = tmp_path / "some.jsonl", tmp_path / "some.jsonl.xz"
    written(plain)
    packed.write_bytes(lzma.compress(plain.read_bytes()))
    assert read(packed).measurements == [MEASURED]
    with pytest.raises(RecordError, match="only plain files grow"):
        Writer(packed)


@pytest.mark.parametrize(
    ("line", "change", "told"),
    [
        (2, {"microseconds": 0}, "line 3: field 'microseconds' must be a number above 0, not 0"),
        (2, {"microseconds": float("inf")}, "line 3: field 'microseconds' must be a number above 0, not inf"),
        (2, {"rounds": 1.5}, "line 3: field 'rounds' must be a whole number, 1 or more, not 1.5"),
        (2, {"source": "home"}, "line 3: field 'source' must be one of zoo, outside, tuned, not 'home'"),
        (2, {"plan": "text"}, "line 3: field 'plan' must be an object, not 'text'"),
        (2, {"anchor": {"around": 1.0}}, "line 3: field 'beside' must be a number above 0, not nothing"),
        (2, {"pairs": [{"id": "one"}]}, "line 3: field 'decision' must be text, not nothing"),
        (2, {"program": "other"}, "line 3: field 'program' must be the digest of a program on a line before"),
        (2, {"speed": 1}, "line 3: field 'speed' is none"),
        (2, {"kind": "guess"}, "line 3: field 'kind' must be program, target or measurement, not 'guess'"),
        (0, {"version": 2}, "line 1: field 'version' must be 1, not 2"),
        (0, {"text": "another"}, "line 1: field 'digest' must be that of what the line holds"),
        (1, {"description": None}, "line 2: field 'description' must be an object, not nothing"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_place(tmp_path: Path, line: int, change: dict[str, object], told: str) -> None:
    path = tmp_path / "some.jsonl"
    lines = written(path)
    lines[line] |= change
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    with pytest.raises(RecordError) as caught:
        read(path)
    assert f"{path}, {told}" in str(caught.value)


def test_a_line_that_was_cut_is_told_unless_its_writer_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    written(path)
    whole = path.read_text()
    path.write_text(whole[:-20] + "\n")
    with pytest.raises(RecordError, match=r"line 3: not JSON"):
        read(path)
    path.write_text(whole[:-20])
    assert not read(path).measurements and read(path).programs
    path.write_text(whole.rstrip())
    assert len(read(path).measurements) == 1, "a last line may end without a new one"


def test_constants_of_a_program_are_filled_as_asked() -> None:
    text = 'program\nconstant "a b": float32[2, 3] "0"\nend\n'
    assert [a.sum() for a in read_program(text).constants.values()] == [0.0]
    (filled,) = read_program(text, lambda dtype, shape: np.ones(shape, dtype.numpy)).constants.items()
    assert filled[0].name == "a b" and filled[1].sum() == 6.0
